"""The shell around `core.commands`: takes commands from the queue, performs effects, settles.

Steps of one delivery, in order (a crash after any of them is continued by the next delivery):

1. read the execution's subject from the leader;
2. read the owner record;
3. the sandbox runs (`waking`), and its record counts this start;
4. ask the collector, with the record's revision as authority;
5. or: the end at base 0, then `response.failed`;
6. ack.

While it is driven a command's ack wait is extended; when the service ends, it is given back at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final, assert_never

import structlog

from tether import subjects, tracing
from tether.control import Authority, ControlReply, ControlRequest, StartCommand, decode_command
from tether.errors import BusError, Code, InvalidError, NoReplyError
from tether.failpoints import failpoint, failpoint_of
from tether.limits import COMMAND_ACK_WAIT_S, CONTROL_REPLY_S
from tether.ports import Bus, Job, StoredMessage
from tether_agent import log, metrics, waking
from tether_agent.core import continuation
from tether_agent.core.commands import (
    Answered,
    Ask,
    CommandInput,
    Effect,
    EnsureSandbox,
    Later,
    NotNow,
    OwnerSeen,
    ReadLog,
    ReadOwner,
    SandboxImpossible,
    SandboxReady,
    Settle,
    StoreNeverStarted,
    TellFailure,
    Told,
    Unanswered,
    begin,
    step,
)
from tether_agent.core.sandbox import Forwarded
from tether_agent.providers import NotReadyError, Provider, ProvisionError
from tether_agent.records import OwnerRecords, SandboxRecords
from tether_agent.waking import Waker

EXTEND_S: Final = COMMAND_ACK_WAIT_S / 3
_log = structlog.get_logger("tether_agent")


class Driver:
    """Drives commands to receipts. Any number of drivers may share the queue's durable consumer."""

    def __init__(self, bus: Bus, provider: Provider, *, commands_max: int) -> None:
        self._bus = bus
        self._provider = provider
        self._commands_max = commands_max
        self._sandboxes = SandboxRecords(bus)
        self._owners = OwnerRecords(bus)
        self._waker = Waker(bus, provider)

    async def run(self) -> None:
        """Until cancelled. At most `commands_max` commands are held at a time."""
        jobs = self._bus.jobs(subjects.COMMANDS_STREAM, subjects.AGENT_DURABLE, in_flight_max=self._commands_max)
        slots = asyncio.Semaphore(self._commands_max)
        try:
            async with asyncio.TaskGroup() as group:
                # Looked at before the first command is asked for: afterwards ours are among them.
                in_hand = await self._in_hand()
                group.create_task(self._take_up(*in_hand), name="commands-of-a-predecessor")
                async for job in jobs:
                    await slots.acquire()
                    task = group.create_task(self._handle(job), name=f"command-{job.message.sequence}")
                    task.add_done_callback(lambda _: slots.release())
        finally:
            with contextlib.suppress(BusError):
                await _close(jobs)

    async def _in_hand(self) -> tuple[int, int]:
        """Behind which sequence, and up to which, there are commands that were given to somebody and not settled."""
        try:
            state = await self._bus.consumer(subjects.COMMANDS_STREAM, subjects.AGENT_DURABLE)
        except BusError:
            return 0, 0
        return (0, 0) if state is None or state.ack_pending == 0 else (state.ack_floor, state.delivered)

    async def _take_up(self, after: int, last: int) -> None:
        """What a predecessor was given and did not settle comes again only after the ack wait; nobody waits that long
        for an agent to start. Drive it from the stream: its next delivery finds what was done. A driver that lives and
        has it in hand does the same at the same time, and a start is done once whoever asks for it."""
        try:
            while after < last:
                stored = await self._bus.read(subjects.COMMANDS_STREAM, after, subjects.COMMANDS_ALL)
                for message in stored:
                    if message.sequence <= last:
                        await self._take_up_one(message)
                after = stored[-1].sequence if stored else last
        except BusError as error:
            _log.warning("commands_not_taken_up", reason=str(error))  # they come by themselves, later

    async def _take_up_one(self, message: StoredMessage) -> None:
        try:
            command = decode_command(message.data)
        except InvalidError:
            return  # its next delivery says what is wrong with it
        with tracing.scope("start command", kind="consumer") as span, tracing.identified(span, **_identity(command)):
            await self.drive(command, 1)

    async def _handle(self, job: Job) -> None:
        try:
            command = _decode(job)
        except InvalidError as error:
            # Nobody will ever understand it; the queue must not carry it for ever.
            _log.error("command_refused", subject=job.message.subject, field=error.field, remedy=error.remedy)
            await job.term(f"{error.field}: {error.remedy}")
            metrics.commands.labels("refused").inc()
            return
        with tracing.scope("start command", kind="consumer", headers=job.message.headers) as span:
            span.set(deliveries=job.deliveries)
            with tracing.identified(span, **_identity(command)):
                await self._drive_and_settle(job, command)

    async def _drive_and_settle(self, job: Job, command: StartCommand) -> None:
        extending = asyncio.create_task(_extend(job), name=f"extend-{job.message.sequence}")
        try:
            settled = await self.drive(command, job.deliveries)
        except asyncio.CancelledError:
            with contextlib.suppress(BusError):
                await job.nak(0.0)
            raise
        finally:
            extending.cancel()
            await asyncio.gather(extending, return_exceptions=True)
        failpoint_of("agent.command", settled, Effect)
        with contextlib.suppress(BusError):  # an ack that is lost means another delivery, which finds what was done
            match settled:
                case Settle():
                    await job.ack()
                    failpoint("agent.command.acked")
                case Later(delay_s):
                    await job.nak(delay_s)
                case _:
                    assert_never(settled)

    async def drive(self, command: StartCommand, deliveries: int) -> Settle | Later:
        """One delivery of one command, up to how it is settled."""
        state, effect = begin(command, deliveries)
        with metrics.command_seconds.time():
            while not isinstance(effect, Settle | Later):
                seen = await self._perform(command, effect)
                failpoint_of("agent.command", effect, Effect)
                state, effect = step(state, seen)
        if isinstance(effect, Settle):
            _log.info("command_settled", result=effect.result, detail=effect.detail)
        else:
            _log.info("command_later", reason=effect.reason, delay_s=effect.delay_s)
        metrics.commands.labels(effect.result if isinstance(effect, Settle) else "later").inc()
        return effect

    async def _perform(self, command: StartCommand, effect: Effect) -> CommandInput:
        try:
            match effect:
                case ReadLog():
                    return await log.look(self._bus, command)
                case ReadOwner():
                    target = command.target
                    return OwnerSeen(*await self._owners.read(target.tenant, target.workspace, target.conversation))
                case EnsureSandbox():
                    return await self._ensure(command)
                case Ask(revision, forwarded):
                    return await self._ask(forwarded, revision)
                case StoreNeverStarted(failure):
                    return await log.store_never_started(self._bus, command, failure, now_ms=waking.now_ms())
                case TellFailure(failure):
                    told = await log.tell_failure(self._bus, command, failure, now_ms=waking.now_ms())
                    return Told() if told else NotNow("the conversation's events change too fast")
                case Settle() | Later():
                    raise AssertionError("the end of a drive is not performed here")
                case _:
                    assert_never(effect)
        except ProvisionError as error:
            return SandboxImpossible(error.problem)
        except NotReadyError as error:
            return NotNow(str(error), soon=error.soon)
        except BusError as error:
            return NotNow(f"bus: {error}")

    async def _ensure(self, command: StartCommand) -> SandboxReady:
        """The sandbox runs, and this start is counted in its record. Raises NotReadyError, ProvisionError."""
        tenant, workspace = command.target.tenant, command.target.workspace
        try:
            await self._waker.wanted(tenant, workspace)
        except ProvisionError as error:
            # What is kept cannot be restored: who chose to go on without its session goes on without it.
            if error.problem.code is not Code.RESUME_FAILED or command.resume is None:
                raise
            _log.warning("checkpoint_left", choice=command.resume, reason=error.problem.detail)
            await self._waker.wanted(tenant, workspace, bare=True)
        forwarded = await self._sandboxes.apply(tenant, workspace, Forwarded(waking.now_ms()))
        assert forwarded.record is not None
        record = continuation.as_kept(forwarded.record, (await self._waker.kept(tenant, workspace)).reference)
        return SandboxReady(forwarded.revision, continuation.led_by(record, command))

    async def _ask(self, command: StartCommand, revision: int) -> CommandInput:
        request = ControlRequest(
            control=command.control,
            verb="start",
            authority=Authority(kind="sandbox", holder="agent-service", token=revision),
            payload=command.model_dump(mode="json", exclude_none=True),
        )
        subject = subjects.control(command.target.tenant, command.target.workspace, "start")
        try:
            with tracing.scope("control start", kind="client"):
                data, headers = request.model_dump_json(exclude_none=True).encode(), tracing.outgoing()
                answer = await self._bus.request(subject, data, timeout_s=CONTROL_REPLY_S, headers=headers)
            return Answered(ControlReply.model_validate_json(answer.data))
        except NoReplyError:
            return Unanswered()
        except ValueError:
            return NotNow("the collector's answer is not a receipt")


def _identity(command: StartCommand) -> dict[str, str]:
    """What log lines and spans of a command say of it."""
    target = command.target
    where = {"tenant": target.tenant, "workspace": target.workspace, "conversation": target.conversation}
    return {**where, "execution": target.execution, "request_id": command.request_id, "control": command.control}


def _decode(job: Job) -> StartCommand:
    """Raises InvalidError; a command whose subject is another's is refused too."""
    command = decode_command(job.message.data)
    tenant, workspace = subjects.parse_command(job.message.subject)
    if (tenant, workspace) != (command.target.tenant, command.target.workspace):
        raise InvalidError("target", "must be of the tenant and workspace in the subject")
    return command


async def _extend(job: Job) -> None:
    while True:
        await asyncio.sleep(EXTEND_S)
        with contextlib.suppress(BusError):
            await job.in_progress()


async def _close(jobs: AsyncIterator[Job]) -> None:
    closing = getattr(jobs, "aclose", None)
    if closing is not None:
        await closing()
