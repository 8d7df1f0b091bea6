"""The other side of the bus: what the records say of a sandbox, and what the agent service is asked.

Nothing here waits for long: an operation is answered at once and asked after again with the next look. Whether the
agent service is reached is part of what is seen, since a deletion must end also where it is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import structlog

from tether import kube, sandbox_asking, subjects
from tether.api_sandboxes import DeleteRequest, DrainView, SandboxView, SuspendRequest
from tether.client.client import Client
from tether.errors import BusError, Code, InvalidError, ProblemError
from tether.kube import AgentTaskSpec
from tether.kv import Bucket
from tether.ports import Bus
from tether.prompt import AgentSpec, RequestRecord
from tether_operator.core.phase import Reach, request_id

PROMPT_PATIENCE_S: Final = 5.0
_log = structlog.get_logger("tether_operator")


@dataclass(frozen=True, slots=True)
class Told:
    """What is seen over the bus of one task. `problem` in words where something was not reached."""

    reach: Reach
    sandbox: SandboxView | None = None
    operation: DrainView | None = None
    response: Literal["none", "running", "completed", "failed"] = "none"
    problem: str = ""


class ControlPlane:
    """Over one bus, for all tenants. `refused`: what the agent service said last, by task workspace."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._refused: dict[tuple[str, str], str] = {}

    async def look(self, spec: AgentTaskSpec, workspace: str, operation: str | None, prompted: bool, uid: str) -> Told:
        """Raises nothing: what cannot be read is said."""
        problem = self._refused.get((spec.tenant, workspace), "")
        sandbox: SandboxView | None = None
        try:
            sandbox = await sandbox_asking.read_sandbox(self._bus, spec.tenant, workspace)
        except ProblemError as error:
            if error.problem.code != Code.NOT_FOUND:
                return Told("unreached", problem=error.problem.detail)
        except BusError as error:
            return Told("unreached", problem=f"the bus is not reached: {error}")
        found: DrainView | None = None
        if operation is not None:
            try:
                found = await sandbox_asking.read_drain(self._bus, spec.tenant, workspace, operation)
            except ProblemError as error:
                if error.problem.code != Code.NOT_FOUND:
                    return Told("unreached", sandbox, problem=error.problem.detail)
            except BusError as error:
                return Told("unreached", sandbox, problem=f"the bus is not reached: {error}")
        return Told("reached", sandbox, found, await self._response(spec, uid) if prompted else "none", problem)

    async def ask(
        self,
        verb: Literal["suspend", "resume", "delete"],
        spec: AgentTaskSpec,
        workspace: str,
        drain: str,
        *,
        checkpoint: bool,
    ) -> None:
        """Begins or joins. A refusal is told by the next look; a deletion's deadline runs on."""
        life = spec.lifecycle
        grace_s = kube.seconds(life.drain_grace)
        key = (spec.tenant, workspace)
        try:
            if verb == "resume":
                await sandbox_asking.resume(self._bus, spec.tenant, workspace)
            elif verb == "suspend":
                suspend = SuspendRequest(
                    grace_s=grace_s, reason="spec.suspend", store=life.checkpoint_store, force=True
                )
                await sandbox_asking.begin_drain(self._bus, "suspend", spec.tenant, workspace, drain, suspend)
            else:
                delete = DeleteRequest(
                    grace_s=grace_s,
                    reason="AgentTask deleted",
                    store=life.checkpoint_store if checkpoint else None,
                    checkpoint=checkpoint,
                )
                await sandbox_asking.begin_drain(self._bus, "delete", spec.tenant, workspace, drain, delete)
        except ProblemError as error:
            self._refused[key] = error.problem.detail
            _log.info("request_refused", verb=verb, workspace=workspace, code=error.problem.code.value)
        except BusError as error:
            self._refused[key] = f"the bus is not reached: {error}"
        else:
            self._refused.pop(key, None)

    async def give(self, spec: AgentTaskSpec, workspace: str, task: str, request: str) -> bool:
        """The task's own prompt, once: the request id is the task's. False where it is not known to be taken."""
        text = spec.task.prompt
        if text is None:
            return True
        client = Client.nats(self._bus, tenant=spec.tenant)
        agent = AgentSpec(kind=spec.agent.kind, model=spec.agent.model, args=spec.agent.args)
        try:
            await client.prompt(
                spec.task.conversation or task,
                text,
                agent=agent,
                workspace=workspace,
                continuation=spec.task.continuation,
                request_id=request,
                patience_s=PROMPT_PATIENCE_S,
            )
        except (ProblemError, InvalidError) as error:
            self._refused[(spec.tenant, workspace)] = str(error)
            _log.warning("prompt_refused", task=task, error=str(error))
            return isinstance(error, InvalidError) or not error.problem.retryable
        except BusError as error:
            self._refused[(spec.tenant, workspace)] = str(error)
            return False
        return True

    async def _response(self, spec: AgentTaskSpec, uid: str) -> Literal["none", "running", "completed", "failed"]:
        """Of the task's own prompt. An interactive task goes on whatever became of it: nobody needs to look."""
        if spec.task.interactive:
            return "running"
        try:
            key = subjects.request_key(spec.tenant, request_id(uid))
            record = await Bucket(self._bus, subjects.REQUESTS).record(key, RequestRecord)
            if record is None or record.done is None:
                return "running"
            if record.done.execution is None:
                return "failed"
            state = await Client.nats(self._bus, tenant=spec.tenant).state(record.done.execution)
        except (BusError, ProblemError):
            return "running"  # not known for now
        if state.response_outcome is None:
            return "running"
        return "completed" if state.response_outcome == "completed" else "failed"
