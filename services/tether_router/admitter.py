"""One delivery of a prompt, performed: `core.admission` decides, this does it and hands back what came of it.

Every failure of the bus becomes `Unreachable`: the delivery ends in a wait, and the next one begins at the top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, assert_never

import structlog

from tether import subjects, tracing
from tether.control import ControlReply, ControlRequest
from tether.errors import BusError, BusUnavailableError, Code, InvalidError, NoReplyError, UndecidedError
from tether.failpoints import failpoint_of
from tether.ids import ExecutionTarget
from tether.kv import Conflict
from tether.limits import CONTROL_REPLY_S, EXECUTION_TOKEN_CONVERSATION
from tether.ports import Bus
from tether.prompt import Prompt
from tether.subjects import EventAddress, events_stream
from tether_router.core import steps
from tether_router.core.admission import decide
from tether_router.core.discovery import Found
from tether_router.core.facts import ExecutionFacts
from tether_router.core.state import Admission, HistoryFallback
from tether_router.core.steps import Ack, Effect, Input, Wait
from tether_router.discovery import resolve
from tether_router.log import Log
from tether_router.records import Records
from tether_router.slots import Slots
from tether_router.turns import NO_TURN, Turn
from tether_router.waiting import later_takeover

STEPS_MAX: Final = 200  # of one delivery; a healthy one takes about 20
COMMAND_ATTEMPTS_MAX: Final = 5

Clock = Callable[[], int]  # unix milliseconds

_log = structlog.get_logger("tether.router")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a delivery ended: settled (ack it) or to wait, and with what the machine ended."""

    end: Ack | Wait
    state: Admission


class Admitter:
    """Takes prompts through admission. Holds nothing of them between deliveries."""

    def __init__(
        self,
        bus: Bus,
        log: Log,
        records: Records,
        clock: Clock,
        *,
        history_fallback: HistoryFallback = "takeover",
        slots: Slots | None = None,
    ) -> None:
        self._bus = bus
        self._history_fallback: HistoryFallback = history_fallback
        self._log = log
        self._records = records
        self._clock = clock
        self._slots = slots

    async def admit(
        self, prompt: Prompt, *, sequence: int, stored_at_ns: int, actor: str, turn: Turn = NO_TURN
    ) -> Verdict:
        """`actor` must be of this delivery alone. Raises nothing that the bus or a stored value may cause."""
        state = Admission(
            prompt,
            sequence,
            stored_at_ns,
            actor,
            self._clock(),
            history_fallback=self._history_fallback,
            limited=self._slots is not None and self._slots.limited(prompt.tenant),
        )
        event: Input = steps.Begin()
        for _ in range(STEPS_MAX):
            state, effects = decide(state, event)
            for effect in effects:
                if isinstance(effect, Ack | Wait):
                    return Verdict(effect, state)
                try:
                    event = await self._perform(state, effect, turn)
                    failpoint_of("router.admission", effect, Effect)
                except (BusError, InvalidError, Conflict) as error:
                    # Conflict: a write of the bucket that this port raced, told nowhere else.
                    _log.warning("admission_step_failed", step=state.phase, error=str(error))
                    event = steps.Unreachable(str(error))
        return Verdict(Wait("the admission does not come to an end", changed=False), state)

    async def _perform(self, state: Admission, effect: Effect, turn: Turn) -> Input:
        match effect:
            case steps.ReadOldest(subject=subject):
                oldest = await self._bus.next_after(subjects.PROMPTS_STREAM, 0, subject)
                return steps.OldestRead(None if oldest is None else oldest.sequence)
            case steps.ReadRequest(key=key):
                return await self._request(key)
            case steps.WriteRequest(key=key, record=request, revision=revision, op=op):
                written = await self._records.write_request(key, request, revision, op)
                return await self._request(key) if written is None else steps.RequestWritten(written)
            case steps.Bind(key=key, workspace=workspace):
                return steps.Bound(await self._records.bind(key, workspace, f"{state.actor}/bind"))
            case steps.Observe():
                return await self._observe(state, effect)
            case steps.ReadOrigin(key=key, tenant=tenant, cut=cut):
                return await self._origin(key, tenant, cut=cut)
            case steps.TakePlace(execution=execution):
                return await self._place(state.prompt, execution)
            case steps.WriteOwner(key=key, record=record, revision=revision, op=op):
                written = await self._records.write_owner(key, record, revision, op)
                return steps.OwnerLost() if written is None else steps.OwnerWritten(written)
            case steps.AppendEvent(known=known) if known is not None:
                return steps.EventStored(known)
            case steps.AppendEvent(event=event, base=base):
                stored = await self._log.append(conversation_address(state.prompt), event, base)
                return steps.Overtaken() if stored is None else steps.EventStored(stored)
            case steps.PublishCommand():
                return await self._command(effect)
            case steps.SendControl(request=request_control, timeout_s=timeout_s):
                async with turn.away():
                    return await self._control(state, request_control, timeout_s)
            case steps.AskReceipt(request=request_control):
                async with turn.away():
                    return await self._control(state, request_control, CONTROL_REPLY_S)
            case steps.ReadLater(subject=subject, sequence=sequence, request=request):
                return steps.LaterRead(await later_takeover(self._bus, self._records, subject, sequence, request))
            case steps.Resolve(target=target, claimed=claimed):
                async with turn.away():
                    return await self._resolve(target, claimed=claimed)
            case Ack() | Wait():
                raise AssertionError("the delivery has ended")
            case _:
                assert_never(effect)

    async def _place(self, prompt: Prompt, execution: str) -> steps.PlaceTaken:
        full = None if self._slots is None else await self._slots.take(prompt, execution)
        if full is None:
            return steps.PlaceTaken()
        of = {"service": "the set", "tenant": "the tenant", "workspace": "the workspace"}[full.scope]
        return steps.PlaceTaken(f"{full.value} executions of {of} run, which is its limit")

    async def _request(self, key: str) -> steps.RequestRead:
        entry = await self._records.request(key)
        return steps.RequestRead(entry.record, entry.revision)

    async def _observe(self, state: Admission, effect: steps.Observe) -> steps.Observation:
        prompt = state.prompt
        entry = await self._records.owner(effect.key)
        record = entry.record
        view = await self._log.conversation(conversation_address(prompt), record.log_base)
        facts = marked = own = None
        if record.target is not None:
            facts = await self._execution(prompt, record.target.execution)
        if effect.marked is not None:
            marked = facts if facts is not None and facts.execution == effect.marked else None
            marked = marked or await self._execution(prompt, effect.marked)
        if record.target is None or record.target.execution != effect.own_execution:
            own = await self._execution(prompt, effect.own_execution)
        return steps.Observation(record, entry.revision, view, facts, marked, own)

    async def _execution(self, prompt: Prompt, execution: str) -> ExecutionFacts:
        return await self._log.execution(EventAddress(prompt.tenant, prompt.workspace, prompt.conversation, execution))

    async def _origin(self, key: str, tenant: str, *, cut: bool) -> steps.OriginRead:
        reference, revision = await self._records.checkpoint(key)
        log_end = 0
        if cut:
            stream = events_stream(tenant)
            found = await self._bus.state(stream)
            if found is None:
                raise BusUnavailableError("the log's stream is missing", subject=stream)
            log_end = found.last_sequence
        return steps.OriginRead(reference, revision, log_end)

    async def _command(self, effect: steps.PublishCommand) -> steps.CommandStored:
        command = effect.command
        subject = subjects.command(command.target.tenant, command.target.workspace)
        data = command.encode()
        execution, control = command.target.execution, command.control
        with tracing.scope("publish command", kind="producer", execution=execution, control=control):
            for attempt in range(COMMAND_ATTEMPTS_MAX):
                try:
                    await self._bus.publish(subject, data, msg_id=control, headers=tracing.outgoing())
                    break
                except UndecidedError:
                    if attempt + 1 == COMMAND_ATTEMPTS_MAX:
                        raise
        return steps.CommandStored()

    async def _resolve(self, target: ExecutionTarget, *, claimed: bool) -> steps.Resolved:
        found = await resolve(self._bus, target)
        if isinstance(found, Found):
            return steps.Resolved(found.target)
        # Of a start that is not claimed there need be nobody yet: the agent service settles it.
        absent = found.code in (Code.RUNTIME_UNAVAILABLE, Code.TARGET_UNKNOWN)
        return steps.Resolved(target, None if absent and not claimed else found)

    async def _control(self, state: Admission, request: ControlRequest, timeout_s: float) -> steps.ControlAnswered:
        prompt = state.prompt
        subject = subjects.control(prompt.tenant, prompt.workspace, request.verb)
        data = request.model_dump_json(exclude_none=True).encode()
        try:
            with tracing.scope(f"control {request.verb}", kind="client", control=request.control):
                headers = tracing.outgoing()
                answer = await self._bus.request(subject, data, timeout_s=timeout_s, headers=headers)
        except NoReplyError as error:
            _log.info("control_unanswered", verb=request.verb, control=request.control, error=str(error))
            return steps.ControlAnswered(None)
        try:
            reply = ControlReply.model_validate_json(answer.data)
        except ValueError:
            _log.warning("control_reply_unreadable", verb=request.verb, control=request.control)
            return steps.ControlAnswered(None)
        if reply.control != request.control:
            _log.warning("control_reply_of_another", verb=request.verb, control=request.control)
            return steps.ControlAnswered(None)
        return steps.ControlAnswered(reply)


def conversation_address(prompt: Prompt) -> EventAddress:
    return EventAddress(prompt.tenant, prompt.workspace, prompt.conversation, EXECUTION_TOKEN_CONVERSATION)


def identity_of(prompt: Prompt) -> dict[str, str]:
    """What log lines and spans of a prompt say of it."""
    named = {"tenant": prompt.tenant, "workspace": prompt.workspace, "conversation": prompt.conversation}
    return {**named, "request_id": prompt.request_id}
