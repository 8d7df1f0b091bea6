"""What a stored message of the log may say. Sandboxes write most of it, so every reader looks before it believes.

A message that breaks a rule is **refused** as a whole, with a typed reason, by `frames.decode`: no part of it is
folded, handed out or decided by. Readers go on behind it; what it should have said shows as a hole before the next
message.
These rules need nothing but the message and its place. Whether the conversation lives in that workspace, and whether
the execution was ever admitted there, is known from records: see `tether.bindings`.

    unreadable, version, nesting    no JSON, not of this shape, of another version, too deep
    size, count                     larger than a writer makes them
    number, name, time              what no column, no clock and no JSON can hold
    ordinal                         holes, or numbers that disagree with the frame
    type                            an event that its subject's writers do not write
    target                          a claim that names another place than its subject
    after_end                       anything behind `execution.ended`, which is an execution's last event

An unknown type is kept (newer writers), a known type with a bad body is the fold's to tell (`corrupt`): the rest of its
frame is as good as ever.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

from tether import events as ev
from tether.errors import InvalidError
from tether.events import BODIES, CONVERSATION_TYPES, ConversationEvent, Event
from tether.limits import (
    CLOCK_AHEAD_MAX_S,
    FRAME_EVENTS_MAX,
    FRAME_STORED_BYTES_MAX,
    ITEM_ID_CHARS_MAX,
    MERGED_ORDINALS_MAX,
    NOTE_BYTES_MAX,
    NUMBER_MAX,
    TYPE_CHARS_MAX,
)
from tether.subjects import EventAddress


class Refusal(StrEnum):
    """Why a stored message is not believed."""

    UNREADABLE = "unreadable"
    VERSION = "version"
    NESTING = "nesting"
    SIZE = "size"
    COUNT = "count"
    NUMBER = "number"
    NAME = "name"
    TIME = "time"
    ORDINAL = "ordinal"
    TYPE = "type"
    TARGET = "target"
    AFTER_END = "after_end"
    FOREIGN_CONVERSATION = "foreign_conversation"
    FOREIGN_EXECUTION = "foreign_execution"
    NOT_ADMITTED = "not_admitted"
    LIMIT = "limit"


class RefusedError(InvalidError):
    """The message is refused. `reason` is what quarantine, gaps and figures say."""

    def __init__(self, reason: Refusal, field: str, remedy: str) -> None:
        super().__init__(field, remedy)
        self.reason = reason


# The services' own: whoever writes an execution's subject does not write these there.
SERVICES_ONLY: Final = frozenset(
    {
        ev.PROMPT_ADMITTED,
        ev.RESPONSE_CREATED,
        ev.RESPONSE_FAILED,
        ev.RESPONSE_SUPERSEDED,
        ev.RECOVERY,
        ev.CONVERSATION_DELETED,
    }
)
EXECUTION_ONLY: Final = frozenset(BODIES) - CONVERSATION_TYPES
# Types of events → the member of their body that names a row.
_NAMES: Final = {
    ev.TEXT_DELTA: "segment",
    ev.TEXT_COMPLETED: "segment",
    ev.TEXT_DISCARDED: "segment",
    ev.REASONING_DELTA: "segment",
    ev.REASONING_COMPLETED: "segment",
    ev.TOOL_STARTED: "tool",
    ev.TOOL_PROGRESS: "tool",
    ev.TOOL_COMPLETED: "tool",
    ev.INTERACTION_REQUESTED: "interaction",
    ev.INTERACTION_RESOLVED: "interaction",
    ev.CONTROL_RECEIPT: "control",
    ev.USAGE: "turn",
    ev.BACKGROUND: "id",
}
_COMPOUND: Final = frozenset({dict, list, float})
_PLACE: Final = ("tenant", "workspace", "conversation", "execution")


def check_size(address: EventAddress, size_bytes: int) -> None:
    """Before anything is parsed. Raises RefusedError."""
    bytes_max = NOTE_BYTES_MAX if address.conversation_level else FRAME_STORED_BYTES_MAX
    if size_bytes > bytes_max:
        raise RefusedError(Refusal.SIZE, "message", f"must have at most {bytes_max} bytes, got {size_bytes}")


def check_ordinals(events: Sequence[Event], first: int, last: int) -> None:
    """Without holes, and as the frame says. Raises RefusedError."""
    if not events:
        raise RefusedError(Refusal.COUNT, "events", "must not be empty")
    expected = first
    for event in events:
        if event.ordinal != expected:
            raise RefusedError(
                Refusal.ORDINAL, "events.ordinal", f"must continue at {expected} without holes, got {event.ordinal}"
            )
        end = event.last
        if end is None:
            expected += 1
            continue
        if end < expected or (end > expected and not _may_span(event, end - expected)):
            raise RefusedError(
                Refusal.ORDINAL,
                "events.last",
                f"must be set on merged deltas and gaps alone, from {expected} on, got {end}",
            )
        expected = end + 1
    if expected != last + 1:
        raise RefusedError(Refusal.ORDINAL, "last", f"must be {expected - 1}, the last event's ordinal, got {last}")
    if last > NUMBER_MAX:
        raise RefusedError(Refusal.ORDINAL, "last", f"must be at most {NUMBER_MAX}")


def _may_span(event: Event, more: int) -> bool:
    """Deltas that were merged stand for many; a gap for whatever was lost."""
    return event.type == ev.GAP or (event.type in ev.DELTAS and more < MERGED_ORDINALS_MAX)


def check_events(address: EventAddress, events: Sequence[Event], data: bytes, stored_at_ns: int) -> None:
    """The events of one frame, whose ordinals are in order. `stored_at_ns`: 0 where it is not known.
    Raises RefusedError."""
    if len(events) > FRAME_EVENTS_MAX:
        raise RefusedError(Refusal.COUNT, "events", f"must be at most {FRAME_EVENTS_MAX}, got {len(events)}")
    at_max = _latest_ms(stored_at_ns)
    doubtful = b"\\u0000" in data
    newest = events[-1]
    for event in events:
        if not 0 <= event.at <= at_max:
            raise _late(event.at, at_max)
        kind, body = event.type, event.body
        name = _NAMES.get(kind)
        if name is not None:
            named = body.get(name)
            if type(named) is str and (len(named) > ITEM_ID_CHARS_MAX or (doubtful and "\x00" in named)):
                raise _unnameable(f"events.body.{name}")
            parent = body.get("parent")
            if type(parent) is str and len(parent) > ITEM_ID_CHARS_MAX:
                raise _unnameable("events.body.parent")
        elif kind == ev.EXECUTION_ENDED:
            if event is not newest:
                raise RefusedError(Refusal.AFTER_END, "events", "must not go on behind execution.ended")
        elif kind == ev.EXECUTION_STARTED:
            _check_claim(address, body)
        elif kind in SERVICES_ONLY:
            raise RefusedError(Refusal.TYPE, "events.type", f"{kind} is not an execution's to say")
        elif len(kind) > TYPE_CHARS_MAX or (doubtful and "\x00" in kind):
            raise _unnameable("events.type")
        for value in body.values():
            if type(value) in _COMPOUND:
                _check_numbers(value)


def check_note(address: EventAddress, event: ConversationEvent, data: bytes, stored_at_ns: int) -> None:
    """One conversation-level event. Raises RefusedError."""
    if event.type in EXECUTION_ONLY:
        raise RefusedError(Refusal.TYPE, "type", f"{event.type} belongs to an execution")
    if len(event.type) > TYPE_CHARS_MAX or "\x00" in event.type:
        raise _unnameable("type")
    if not event.id or len(event.id) > ITEM_ID_CHARS_MAX or "\x00" in event.id:
        raise _unnameable("id")
    at_max = _latest_ms(stored_at_ns)
    if not 0 <= event.at <= at_max:
        raise _late(event.at, at_max)
    if not 0 <= event.generation <= NUMBER_MAX:
        raise RefusedError(Refusal.NUMBER, "generation", f"must be from 0 to {NUMBER_MAX}")
    _check_numbers(event.body)


def _check_claim(address: EventAddress, body: dict[str, Any]) -> None:
    """A claim speaks of the place where it lies."""
    target = body.get("target")
    if not isinstance(target, dict):
        return  # the fold tells it as corrupt
    for name in _PLACE:
        if name in target and target[name] != getattr(address, name):
            raise RefusedError(Refusal.TARGET, f"events.body.target.{name}", "must be the subject's own")


def _latest_ms(stored_at_ns: int) -> int:
    """Ahead of the server's clock when it was stored and of this reader's now: what has come meanwhile harms nobody."""
    return max(stored_at_ns, time.time_ns()) // 1_000_000 + CLOCK_AHEAD_MAX_S * 1000


def _late(at: int, at_max: int) -> RefusedError:
    return RefusedError(Refusal.TIME, "at", f"must be unix milliseconds from 0 to {at_max}, got {str(at)[:40]}")


def _unnameable(field: str) -> RefusedError:
    return RefusedError(Refusal.NAME, field, f"must have at most {ITEM_ID_CHARS_MAX} characters, none of them NUL")


def _check_numbers(value: Any) -> None:
    """Numbers that JSON has no word for would come out as no JSON at all. Its depth is bounded by who parsed it."""
    if type(value) is float:
        if not math.isfinite(value):
            raise RefusedError(Refusal.NUMBER, "events.body", "must have finite numbers")
        return
    for one in value.values() if type(value) is dict else value:
        if type(one) in _COMPOUND:
            _check_numbers(one)
