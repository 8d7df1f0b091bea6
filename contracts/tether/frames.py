"""Frames: one message of the log, `{v, first, last, pos, events[]}`.

A writer has one frame in flight; what arrives meanwhile goes together in the next. Cutting and merging are pure:
adjacent deltas of one segment merge, a frame never exceeds its limits, and ordinals stay without holes.
`pos` is the spool position that the frame reaches: what a restarted collector has told already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tether.errors import InvalidError
from tether.events import DELTAS, TOOL_PROGRESS, ConversationEvent, Event
from tether.limits import FRAME_BYTES_MAX, FRAME_EVENTS_MAX
from tether.subjects import EventAddress, parse_event

VERSION = 1


class Position(BaseModel):
    """A spool position: the `index`-th event (from 0) that the record `record` made."""

    model_config = ConfigDict(frozen=True)

    record: int
    index: int


class Frame(BaseModel):
    """One stored message of an execution: events `first..last`, without holes."""

    model_config = ConfigDict(extra="ignore")

    v: Literal[1] = 1
    first: Annotated[int, Field(ge=1)]
    last: Annotated[int, Field(ge=1)]
    pos: Position
    events: list[Event]


def _key(event: Event) -> tuple[str, Any] | None:
    """Deltas with the same key may merge when adjacent."""
    if event.type not in DELTAS:
        return None
    return (event.type, event.body.get("tool" if event.type == TOOL_PROGRESS else "segment"))


def merge(events: Sequence[Event]) -> list[Event]:
    """Merge adjacent deltas of one segment. fold(merge(events)) = fold(events)."""
    merged: list[Event] = []
    texts: list[str] = []  # of the run of deltas being merged, joined once at its end

    def close() -> None:
        if len(texts) > 1:
            head = merged[-1]
            head.body = {**head.body, "text": "".join(texts)}
        texts.clear()

    key: tuple[str, Any] | None = None
    for event in events:
        this = _key(event)
        if this is not None and this == key and merged[-1].end + 1 == event.ordinal:
            merged[-1].last = event.end
            texts.append(event.body["text"])
            continue
        close()
        merged.append(event.model_copy())
        key = this
        if this is not None:
            texts.append(event.body["text"])
    close()
    return merged


def encode(frame: Frame) -> bytes:
    return frame.model_dump_json(exclude_none=True).encode()


def encode_event(event: ConversationEvent) -> bytes:
    return event.model_dump_json(exclude_none=True).encode()


def check(frame: Frame) -> None:
    """Raise `InvalidError` where ordinals have holes or disagree with `first..last`."""
    expected = frame.first
    for event in frame.events:
        if event.ordinal != expected or event.end < event.ordinal:
            raise InvalidError("events.ordinal", f"must continue at {expected} without holes, got {event.ordinal}")
        expected = event.end + 1
    if expected != frame.last + 1:
        raise InvalidError("last", f"must be {expected - 1}, the last event's ordinal, got {frame.last}")


def decode(subject: str, data: bytes) -> Frame | ConversationEvent:
    """A stored message's content. Raises `InvalidError` (an unknown version is named)."""
    address = parse_event(subject)
    model: type[Frame] | type[ConversationEvent] = ConversationEvent if address.conversation_level else Frame
    try:
        message = model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "message"
        remedy = f"this reader knows version {VERSION}" if where == "v" else first["msg"]
        raise InvalidError(where, remedy) from None
    if isinstance(message, Frame):
        check(message)
    return message


def message_id(address: EventAddress, frame: Frame, data: bytes, *, retry: int = 0) -> str:
    """`Nats-Msg-Id` of a frame; `/r1`… after the server said `duplicate` for a message that is gone."""
    digest = hashlib.sha256(data).hexdigest()[:16]
    suffix = f"/r{retry}" if retry else ""
    return f"{address.conversation}/{address.execution}/{frame.first}-{frame.last}/{digest}{suffix}"


def size_of(event: Event) -> int:
    """Bytes that the event adds to a frame."""
    return len(event.model_dump_json(exclude_none=True)) + 1


def cut(
    waiting: Sequence[tuple[Event, Position]],
    *,
    bytes_max: int = FRAME_BYTES_MAX,
    events_max: int = FRAME_EVENTS_MAX,
) -> tuple[Frame, int]:
    """The next frame of `waiting` (not empty), and how many of its entries it takes (at least one).

    `events_max` bounds events before merging; `bytes_max` the encoded size, unless one event alone exceeds it.
    """
    taken = size = 0
    for event, _ in waiting[:events_max]:
        more = size_of(event)
        if taken and size + more > bytes_max:
            break
        size += more
        taken += 1
    chosen = [event for event, _ in waiting[:taken]]
    frame = Frame(first=chosen[0].ordinal, last=chosen[-1].end, pos=waiting[taken - 1][1], events=merge(chosen))
    return frame, taken
