"""Executions of a sandbox that is proven gone and whose volume is away: found by owner records, closed in the log.

The end is the fence: it goes behind the subject's last message by compare-and-set, after what still waited for a human
(`interaction.resolved{expired}`) and `response.ended` where none is logged. A collector of that sandbox that wrote
after all would have made the compare-and-set fail, and what it told is read first. A start whose command is still in
the queue is left to the command's driver.
"""

from __future__ import annotations

import time
from typing import Any, Final

import structlog

from tether import events, frames, subjects
from tether.control import decode_command
from tether.errors import BusError, Code, InvalidError, UndecidedError, WrongLastSequenceError
from tether.events import Event
from tether.fold import Applied, ExecutionFold
from tether.frames import Frame, Position
from tether.ids import ExecutionTarget
from tether.kv import Bucket
from tether.owner import OwnerRecord
from tether.ports import Bus, StoredMessage
from tether.subjects import EventAddress

_ROUNDS_MAX: Final = 16
_log = structlog.get_logger("tether_agent")


async def open_executions(bus: Bus, tenant: str, workspace: str) -> list[ExecutionTarget]:
    """What owner records name in this workspace. Raises BusError."""
    found = []
    key = subjects.owner_key(tenant, workspace, "x")[:-1] + "*"
    async for _, record in Bucket(bus, subjects.OWNERS).records(OwnerRecord, key):
        if record.state != "idle" and record.target is not None:
            found.append(record.target)
    return found


async def close_all(bus: Bus, tenant: str, workspace: str, proof: str) -> bool:
    """Close every open execution of the workspace. False where one could not be closed now."""
    done = True
    try:
        targets = await open_executions(bus, tenant, workspace)
        queued = await _queued(bus, tenant, workspace)
        for target in targets:
            closed = await close(bus, target, proof, queued=target.execution in queued)
            _log.warning("execution_closed" if closed else "execution_open", execution=target.execution, proof=proof)
            done = done and closed
    except BusError as error:
        _log.warning("executions_not_closed", tenant=tenant, workspace=workspace, reason=str(error))
        return False
    return done


async def _queued(bus: Bus, tenant: str, workspace: str) -> set[str]:
    """Executions whose start command is still in the queue. Raises BusError."""
    subject, after, found = subjects.command(tenant, workspace), 0, set[str]()
    while (message := await bus.next_after(subjects.COMMANDS_STREAM, after, subject)) is not None:
        after = message.sequence
        try:
            found.add(decode_command(message.data).target.execution)
        except InvalidError:
            continue  # its driver refuses it
    return found


async def close(bus: Bus, target: ExecutionTarget, proof: str, *, queued: bool) -> bool:
    """Append the end of one execution; True where its end is in the log then. Raises BusError."""
    address = EventAddress(target.tenant, target.workspace, target.conversation, target.execution)
    stream = subjects.events_stream(target.tenant)
    for _ in range(_ROUNDS_MAX):
        last = await bus.last(stream, address.subject)
        if last is None and queued:
            return False  # it may still be started elsewhere
        fold = await _fold(bus, stream, address)
        if fold is None:
            return False
        if fold.ended:
            return True
        position = _position(last, fold.applied)
        if position is None:
            return False  # a follower answered that lags behind
        data, frame = _end(fold, position, proof)
        base = 0 if last is None else last.sequence
        try:
            await bus.publish(address.subject, data, msg_id=frames.message_id(address, frame, data), expect_last=base)
        except (WrongLastSequenceError, UndecidedError):
            continue
        # A `duplicate` is no proof that it is stored: the next round reads it.
    return False


async def _fold(bus: Bus, stream: str, address: EventAddress) -> ExecutionFold | None:
    """What the log says of the execution; None where it holds what this version cannot read."""
    fold, after = ExecutionFold(), 0
    while batch := await bus.read(stream, after, address.subject):
        for message in batch:
            after = message.sequence
            try:
                frame = frames.decode(message.subject, message.data)
            except InvalidError as error:
                _log.error("log_unreadable", execution=address.execution, field=error.field, remedy=error.remedy)
                return None
            assert isinstance(frame, Frame)
            for event in frame.events:
                if fold.apply(event) is Applied.HOLE:
                    fold.skip_to(event.ordinal, "retention_gap")
                    fold.apply(event)
    return fold


def _position(last: StoredMessage | None, applied: int) -> Position | None:
    """The spool position that the log reaches; None where `applied` is not its last ordinal."""
    if last is None:
        return Position(record=0, index=0)
    frame = frames.decode(last.subject, last.data)
    assert isinstance(frame, Frame)
    return frame.pos if frame.last == applied else None


def _end(fold: ExecutionFold, position: Position, proof: str) -> tuple[bytes, Frame]:
    state, at = fold.freeze(), time.time_ns() // 1_000_000
    error = {"code": Code.EXECUTION_DURABILITY_GAP.value, "detail": "its sandbox is gone, and its volume out of reach"}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (events.INTERACTION_RESOLVED, {"interaction": item.id, "outcome": "expired"}) for item in state.pending()
    ]
    outcome = state.response_outcome or "lost"
    if not fold.response_ended:
        bodies.append((events.RESPONSE_ENDED, {"outcome": outcome, "error": error}))
    proved = {"method": "provider", "at": at, "detail": proof}
    bodies.append((events.EXECUTION_ENDED, {"outcome": outcome, "proof": proved, "tail": "unknown", "error": error}))
    first = fold.applied + 1
    told = [Event(ordinal=first + n, at=at, type=kind, body=body) for n, (kind, body) in enumerate(bodies)]
    frame = Frame(first=first, last=first + len(told) - 1, pos=position, events=told)
    return frames.encode(frame), frame
