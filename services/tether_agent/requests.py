"""What the agent service answers on `tether.agent.{verb}`; shown by `nats micro ls`.

    agents     {}                            → {agents: [kind]}   those of its agents file
    sandboxes  {tenant?}                     → {sandboxes: [{tenant, workspace, sandbox, boot, alive, facts}]}
    workspace  {tenant, workspace, path}     → {path}      a directory of the user's for a workspace (provider local)
    stop       {tenant, workspace} | {all}   → {stopped: [{tenant, workspace, killed}]}
    restart-collector  {tenant, workspace}   → {tenant, workspace, boot, before, instance, version}   CLIs live on

Operations on a sandbox's life. Each is answered at once; what it began goes on by itself, over restarts too:

    drain         {tenant, workspace, drain_id, grace_s?, reason?, store?, include?}
    suspend       {… as drain, force?: false}     refused with SESSION_BUSY while an execution lives, unless forced
    delete        {… as drain, checkpoint?: true}  drained first; `checkpoint: false` ends it without
    drain-status  {tenant, workspace, drain_id?}  of the running or last operation, or of exactly this one
    resume        {tenant, workspace}             wakes it, once whoever asks; of an active one it sees to the compute
    forget        {tenant, workspace, deletion, conversation, sessions}   of a conversation's deletion; answers with a
                  `tether.deletion.Forgotten`: the volume is clean of it, or what that waits for

`drain_id`: a token of the caller's; the same id again joins what it began. `grace_s`: 0 to 3600, default 60. `store`:
volume | blobs | both. `include`: sessions | workspace. The first four answer

    {report: DrainReport, purpose: drain | suspend | delete, state, joined}

`report.drain` is the operation that runs: another's id where one ran already (`joined` is true then, and for a
repeated id). `report.state` running is asked again by `drain-status`; `done` and `failed` are final, `report.problem`
and `report.unsaved` say what was not kept. `state` is the sandbox's: provisioning, active, draining, suspended,
resuming, deleting, or `deleted`. A delete that drains nothing (suspended, provisioning, completed, or unwanted) has a
report without executions, whose `checkpoint` is the existing reference, verified, or none with `unsaved` saying so.
`resume` answers

    {state: resuming | active, woken, checkpoint?: CheckpointReference, checkpoint_revision}

where `woken` says that this very request woke it (false: it was awake, or somebody else did). An active sandbox whose
collector was not there is answered for once it is registered, or after 8 s. `stop` leaves a sandbox `suspended` as soon
as all that ran in it is told. Problems:

    NOT_FOUND           there is no such sandbox, or no operation of this id
    SESSION_BUSY        suspend: `context.executions` names who: [{conversation, execution, state}]
    DRAINING            resume while a drain runs, or delete while one of another purpose does; retryable
    CAPABILITY_MISSING  the sandbox's collector cannot drain; nothing was changed
    CHECKPOINT_FAILED   delete: the existing checkpoint cannot be read; `checkpoint: false` goes on without
    RUNTIME_UNAVAILABLE the bus, or a sandbox that is only being started (drain, suspend); retryable

An answer is a JSON object with `v` and either the result's fields or `problem` (RFC 9457 members, naming the field).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from tether import subjects
from tether.checkpoint import Include, Store
from tether.deletion import SESSIONS_MAX, SessionName
from tether.errors import Code, InvalidError, Problem, ProblemError, problem
from tether.ids import Token
from tether.jsonsafe import loads_object
from tether.limits import DRAIN_GRACE_MAX_S, KIB
from tether.ports import Bus, Handler, Message
from tether.prompt import invalid
from tether_agent.providers import NotReadyError, Provider, ProvisionError, Stopped

SERVICE: Final = "tether-agent"
QUEUE: Final = "agent-service"
REQUEST_BYTES_MAX: Final = 128 * KIB


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SandboxesRequest(_Request):
    tenant: Token | None = None


class AgentsRequest(_Request):
    pass


class WorkspaceRequest(_Request):
    tenant: Token
    workspace: Token
    path: str


class RestartRequest(_Request):
    tenant: Token
    workspace: Token


class DrainRequest(_Request):
    """See the module. What is None is the service's own setting."""

    tenant: Token
    workspace: Token
    drain_id: Token
    grace_s: Annotated[float, Field(ge=0, le=DRAIN_GRACE_MAX_S, allow_inf_nan=False)] | None = None
    reason: Annotated[str, StringConstraints(max_length=256)] = ""
    store: Store | None = None
    include: Include | None = None


class SuspendRequest(DrainRequest):
    force: bool = False


class DeleteRequest(DrainRequest):
    checkpoint: bool = True


class DrainStatusRequest(_Request):
    tenant: Token
    workspace: Token
    drain_id: Token | None = None


class ResumeRequest(_Request):
    tenant: Token
    workspace: Token


class ForgetRequest(_Request):
    """A `tether.deletion.ForgetPayload`, and of which workspace."""

    tenant: Token
    workspace: Token
    deletion: Token
    conversation: Token
    sessions: Annotated[tuple[SessionName, ...], Field(max_length=SESSIONS_MAX)] = ()


class StopRequest(_Request):
    """One sandbox, or `all` of this service's."""

    tenant: Token | None = None
    workspace: Token | None = None
    all: bool = False


Answer = dict[str, Any]
Handling = Callable[[bytes], Awaitable[Answer]]
Ended = Callable[[Sequence[Stopped]], Awaitable[None]]
RequestT = TypeVar("RequestT", bound=_Request)


class Requests:
    """The handlers; the provider is the one who knows. `more`: verbs that another answers. `kinds`: the agents that
    there are. `stopped` is told
    which sandboxes were stopped."""

    def __init__(
        self,
        provider: Provider,
        more: Mapping[str, Handling] | None = None,
        stopped: Ended | None = None,
        kinds: Sequence[str] | None = None,
    ) -> None:
        self._provider = provider
        self._stopped = stopped
        self._more = dict(more or {})
        if kinds is not None:
            self._more["agents"] = self.agents
        self._kinds = sorted(kinds or ())

    @contextlib.asynccontextmanager
    async def serving(self, bus: Bus) -> AsyncIterator[None]:
        """Answer while the context is open."""
        handlers: dict[str, Handling] = {
            "sandboxes": self.sandboxes,
            "workspace": self.workspace,
            "stop": self.stop,
            "restart-collector": self.restart_collector,
            **self._more,
        }
        async with contextlib.AsyncExitStack() as stack:
            for verb, handler in handlers.items():
                served = bus.serve(subjects.agent(verb), _answering(handler), queue=QUEUE, name=SERVICE)
                await stack.enter_async_context(served)
            yield

    async def agents(self, data: bytes) -> Answer:
        parse(AgentsRequest, data)
        return {"agents": self._kinds}

    async def sandboxes(self, data: bytes) -> Answer:
        request = parse(SandboxesRequest, data)
        found = [
            asdict(status)
            for status in self._provider.statuses()
            if request.tenant is None or status.tenant == request.tenant
        ]
        return {"sandboxes": found}

    async def workspace(self, data: bytes) -> Answer:
        request = parse(WorkspaceRequest, data)
        return {"path": self._provider.assign(request.tenant, request.workspace, request.path)}

    async def restart_collector(self, data: bytes) -> Answer:
        request = parse(RestartRequest, data)
        try:
            restarted = await self._provider.restart_collector(request.tenant, request.workspace)
        except NotReadyError as error:
            detail = f"the new collector is not ready yet: {error}"
            raise ProblemError(problem(Code.RUNTIME_UNAVAILABLE, detail, retry_after_s=1.0)) from None
        except ProvisionError as error:
            raise ProblemError(error.problem) from None
        if restarted is None:
            raise ProblemError(problem(Code.NOT_FOUND, "workspace: no sandbox of this service runs for it"))
        return asdict(restarted)

    async def stop(self, data: bytes) -> Answer:
        request = parse(StopRequest, data)
        if request.all:
            if request.tenant is not None or request.workspace is not None:
                raise InvalidError("all", "must not be given together with tenant or workspace")
            return await self._told(await self._provider.stop_all())
        if request.tenant is None or request.workspace is None:
            raise InvalidError("workspace", "give tenant and workspace, or all")
        stopped = await self._provider.stop(request.tenant, request.workspace)
        return await self._told(() if stopped is None else (stopped,))

    async def _told(self, stopped: Sequence[Stopped]) -> Answer:
        if self._stopped is not None:
            await self._stopped(stopped)
        return {"stopped": [asdict(each) for each in stopped]}


def parse(model: type[RequestT], data: bytes) -> RequestT:
    """Raises InvalidError."""
    value = loads_object(data or b"{}", "request", bytes_max=REQUEST_BYTES_MAX)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid(error) from None


def _answering(handler: Handling) -> Handler:
    async def answer(message: Message) -> bytes:
        try:
            result = {"v": 1, **await handler(message.data)}
        except ProblemError as error:
            result = {"v": 1, "problem": _shown(error.problem)}
        return json.dumps(result).encode()

    return answer


def _shown(found: Problem) -> Answer:
    return found.model_dump(mode="json", exclude_none=True)
