"""What the agent service reads and writes in a tenant's log: the claim, the end that stands in its place, the failure.

`execution.ended{never_started}` goes to the execution's subject at base 0, where the collector's claim would be: the
server lets exactly one of the two in. `response.failed` goes to the conversation's `_`, one event per message, by
compare-and-set, idempotent by its id (`events.request_event_id`): who loses reads forward and looks for the own id.
"""

from __future__ import annotations

from typing import Any, get_args

from tether import events, frames, subjects
from tether.control import StartCommand
from tether.conversation_log import append_once
from tether.errors import Code, InvalidError, Problem, UndecidedError, WrongLastSequenceError, problem
from tether.events import ConversationEvent, Event
from tether.frames import Frame, Position
from tether.ids import ExecutionTarget
from tether.ports import Bus, StoredMessage
from tether.prompt import ResumeChoice
from tether.subjects import EventAddress
from tether_agent.core.commands import LogSeen


def _address(command: StartCommand) -> EventAddress:
    target = command.target
    return EventAddress(target.tenant, target.workspace, target.conversation, target.execution)


async def look(bus: Bus, command: StartCommand) -> LogSeen:
    """The first message of the execution's subject, from the leader. Raises BusError."""
    address = _address(command)
    first = await bus.next_after(subjects.events_stream(address.tenant), 0, address.subject)
    return LogSeen("empty") if first is None else _judge(first)


async def has_ended(bus: Bus, target: ExecutionTarget) -> bool:
    """The fence stands: `execution.ended` is the last that the log says of it. Raises BusError."""
    address = EventAddress(target.tenant, target.workspace, target.conversation, target.execution)
    last = await bus.last(subjects.events_stream(address.tenant), address.subject)
    if last is None:
        return False
    try:
        frame = frames.decode(last.subject, last.data)
    except InvalidError:
        return False  # a newer version's frame
    return isinstance(frame, Frame) and any(event.type == events.EXECUTION_ENDED for event in frame.events)


def _judge(first: StoredMessage) -> LogSeen:
    try:
        frame = frames.decode(first.subject, first.data)
    except InvalidError:
        return LogSeen("claimed")  # a newer version's frame: somebody has claimed it, whatever it says
    if not isinstance(frame, Frame):
        return LogSeen("claimed")
    for event in frame.events:
        if event.type == events.EXECUTION_ENDED and event.body.get("outcome") == "never_started":
            return LogSeen("never_started", _failure(event.body.get("error")))
    return LogSeen("claimed")


def _failure(error: Any) -> Problem | None:
    """The reason as it was stored, so that whoever tells it after a crash tells the same."""
    if not isinstance(error, dict) or error.get("code") not in set(Code):
        return None
    return problem(Code(error["code"]), str(error.get("detail", "")))


def _choices(failure: Problem) -> dict[str, list[str]]:
    """What is kept cannot be restored: with what the same may be sent again."""
    return {"choices": list(get_args(ResumeChoice))} if failure.code is Code.RESUME_FAILED else {}


async def store_never_started(bus: Bus, command: StartCommand, failure: Problem, *, now_ms: int) -> LogSeen:
    """Put the end where the claim would be; returns what is there then. Raises BusError."""
    address = _address(command)
    error = {"code": failure.code.value, "detail": failure.detail, **_choices(failure)}
    proof = {"method": "never_spawned", "at": now_ms}
    bodies = (
        (events.RESPONSE_ENDED, {"outcome": "never_started", "error": error}),
        (events.EXECUTION_ENDED, {"outcome": "never_started", "proof": proof, "error": error}),
    )
    told = [
        Event(ordinal=ordinal, at=now_ms, type=kind, body=body) for ordinal, (kind, body) in enumerate(bodies, start=1)
    ]
    frame = Frame(first=1, last=len(told), pos=Position(record=0, index=0), events=told)
    data = frames.encode(frame)
    try:
        await bus.publish(address.subject, data, msg_id=frames.message_id(address, frame, data), expect_last=0)
    except (WrongLastSequenceError, UndecidedError):
        pass  # the log says which of the two is there, or that nothing is
    return await look(bus, command)


async def tell_failure(bus: Bus, command: StartCommand, failure: Problem, *, now_ms: int) -> bool:
    """Append `response.failed` once. False where others write too fast: to be tried later. Raises BusError."""
    target = command.target
    event = ConversationEvent(
        id=events.request_event_id(command.request_id, events.RESPONSE_FAILED, command.attempt),
        generation=target.response_generation,
        at=now_ms,
        type=events.RESPONSE_FAILED,
        body={
            "request": command.request_id,
            "response": target.response,
            "code": failure.code.value,
            "detail": failure.detail,
            "retryable": failure.retryable,
            **_choices(failure),
        },
    )
    return await append_once(bus, _address(command), event)
