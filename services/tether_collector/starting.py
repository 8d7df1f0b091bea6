"""`start`: a command becomes an execution, once, however often it is delivered.

    known control or execution ─▶ its receipt (another payload: REQUEST_CONFLICT)
    another sandbox, agent not configured ─▶ rejected
    the sandbox is being drained ─▶ rejected DRAINING, to be tried again
    a process of the conversation lives ─▶ rejected SESSION_BUSY, to be tried again
    owner record does not name it ─▶ rejected TARGET_STALE
    ── journal (fsync) ─▶ claim ─▶ keeper ─▶ the prompt on stdin     (execution_shell.py)

Only what is journaled is remembered: a rejection has no effect and may turn out otherwise next time. The lock makes
the checks and the journal one step against a second delivery.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

from pydantic import ValidationError

from tether import agent_args, subjects
from tether.control import ControlReply, ControlRequest, StartCommand
from tether.errors import BusError, Code, InvalidError, ProblemError, problem
from tether.kv import Bucket
from tether.owner import OwnerRecord
from tether.prompt import invalid
from tether_collector.claim import claim_body, claim_frame
from tether_collector.core.adapters import adapter_for
from tether_collector.executions import Executions
from tether_collector.journal import Control, Start
from tether_collector.raising import FIRST_PROCESS
from tether_collector.surroundings import now_ms

OWNER_READS_MAX: Final = 10  # of a follower that lags behind the revision that the command names
OWNER_READ_PAUSE_S: Final = 0.1
STARTED: Final = frozenset({"delivered", "settled"})


class Starter:
    """Serves the verb `start`. `instance` is this collector's."""

    def __init__(self, executions: Executions, instance: str) -> None:
        self._executions = executions
        self._around = executions.around
        self._instance = instance
        self.lock = asyncio.Lock()

    async def start(self, request: ControlRequest, wait_s: float) -> ControlReply:
        """Raises ProblemError where the start is rejected."""
        try:
            command = StartCommand.model_validate(request.payload)
        except ValidationError as error:
            raise invalid(error, "payload") from None
        if command.control != request.control:
            raise InvalidError("payload.control", "must be the request's control id")
        async with self.lock:
            control = self._known(request, command)
            if control is None:
                await self._check(command)
                control = self._accept(request, command)
        shell = self._executions.get(command.target.execution)
        if shell is not None:
            control = await shell.receipt(control.control, STARTED, wait_s) or control
        control = self._around.journal.control(control.control) or control
        target = None if shell is None else shell.summary().target
        return control.reply(target, {"execution": command.target.execution, "boot": self._around.settings.boot})

    def _known(self, request: ControlRequest, command: StartCommand) -> Control | None:
        """The receipt of an earlier delivery. Raises ProblemError for another payload."""
        journal = self._around.journal
        control = journal.control(request.control)
        if control is not None:
            if control.digest != request.digest:
                raise ProblemError(problem(Code.REQUEST_CONFLICT, "this control id was used with another payload"))
            return control
        start = journal.start(command.target.execution)
        if start is None:
            return None
        same = start.command.model_dump(exclude={"control", "owner_revision"}) == command.model_dump(
            exclude={"control", "owner_revision"}
        )
        if not same:
            raise ProblemError(problem(Code.REQUEST_CONFLICT, "this execution was started with another payload"))
        return journal.control(start.control)

    async def _check(self, command: StartCommand) -> None:
        settings, target = self._around.settings, command.target
        if settings.recovery:
            detail = "this collector only tells what is left"
            raise ProblemError(problem(Code.RUNTIME_UNAVAILABLE, detail, retryable=True))
        if (drain := self._executions.draining) is not None:
            raise ProblemError(problem(Code.DRAINING, "the sandbox is being drained", drain=drain))
        for name in ("tenant", "workspace", "sandbox"):
            if getattr(target, name) != getattr(settings, name):
                raise ProblemError(problem(Code.TARGET_UNKNOWN, f"this collector serves another {name}"))
        if target.boot and target.boot != settings.boot:
            raise ProblemError(problem(Code.TARGET_STALE, "the sandbox was started anew", boot=settings.boot))
        adapter = adapter_for(command.agent.kind)
        if adapter.name not in settings.agents:
            detail = f"no command is configured for the agent {adapter.name}"
            raise ProblemError(problem(Code.CAPABILITY_MISSING, detail, agents=sorted(settings.agents)))
        agent_args.check(adapter.name, command.agent.args, settings.collector_agent_args_allow.get(adapter.name, ()))
        living = self._executions.of_conversation(target.conversation)
        if living is not None and not living.proven:
            raise ProblemError(
                problem(
                    Code.SESSION_BUSY,
                    "a process of this conversation lives",
                    retryable=True,
                    execution=living.start.execution,
                )
            )
        await self._check_owner(command)

    async def _check_owner(self, command: StartCommand) -> None:
        """The owner record names this execution, at the command's revision or a later one."""
        target = command.target
        bucket = Bucket(self._around.bus, subjects.OWNERS, leader=False)
        key = subjects.owner_key(target.tenant, target.workspace, target.conversation)
        for _ in range(OWNER_READS_MAX):
            try:
                entry = await bucket.get(key)
                record = None if entry is None else bucket.parse(entry, OwnerRecord)
            except BusError as error:
                raise ProblemError(
                    problem(Code.RUNTIME_UNAVAILABLE, f"the owner record cannot be read: {error.detail}")
                ) from error
            if entry is not None and record is not None and entry.revision >= command.owner_revision:
                named = record.target is not None and record.target.execution == target.execution
                if named and record.state in ("starting", "running"):
                    return
                raise ProblemError(
                    problem(Code.TARGET_STALE, "the owner record does not name this execution", state=record.state)
                )
            await asyncio.sleep(OWNER_READ_PAUSE_S)
        raise ProblemError(
            problem(Code.RUNTIME_UNAVAILABLE, "the owner record of the command's revision is not to be seen yet")
        )

    def _accept(self, request: ControlRequest, command: StartCommand) -> Control:
        settings = self._around.settings
        target = command.target.model_copy(update={"boot": settings.boot, "process_generation": FIRST_PROCESS})
        at = now_ms()
        adapter = adapter_for(command.agent.kind)
        body = claim_body(
            command,
            target,
            instance=self._instance,
            adapter_version=adapter.version,
            key_source=settings.key_source(adapter.name),
        )
        start = Start(
            execution=target.execution,
            conversation=target.conversation,
            control=request.control,
            digest=request.digest,
            command=command,
            target=target,
            # The execution in front lets a sweep find its processes even where the journal is lost.
            nonce=f"{target.execution}-{secrets.token_hex(16)}",
            claim=claim_frame(body, at),
            phase="journaled",
            created_at=at,
        )
        self._around.journal.add_start(start, request)
        self._around.step("journaled")
        self._executions.begin(start)
        control = self._around.journal.control(request.control)
        assert control is not None
        return control
