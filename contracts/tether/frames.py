"""Frames: one message of the log, `{v, first, last, pos, events[]}`.

A writer has one frame in flight; what arrives meanwhile goes together in the next. Cutting and merging are pure:
adjacent deltas of one segment merge, a frame never exceeds its limits, and ordinals stay without holes.
`pos` is the spool position that the frame reaches: what a restarted collector has told already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from tether.events import DELTAS, TOOL_PROGRESS, ConversationEvent, Event
from tether.frame_rules import Refusal, RefusedError, check_events, check_note, check_ordinals, check_size
from tether.limits import FRAME_BYTES_MAX, FRAME_EVENTS_MAX
from tether.refusals import remedy_of
from tether.subjects import EventAddress, parse_event

VERSION = 1
_HEAD_BYTES: Final = 160  # of a frame around its events, with the longest numbers
_LAST_BYTES: Final = 32  # of the comma, and of `last` in a delta that others are merged into


@dataclass(frozen=True, slots=True)
class Position:
    """A spool position: the `index`-th event (from 0) that the record `record` made."""

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


_encode_event: Final = Event.__pydantic_serializer__.to_json


def encode_part(event: Event) -> bytes:
    """The event as it stands in its frame's bytes."""
    return _encode_event(event, exclude_none=True)


def _key(event: Event) -> tuple[str, Any] | tuple[str, Any, int] | None:
    """Deltas with the same key may merge when adjacent. One that counts its redactions stays alone, so that the count
    is exact however frames are cut."""
    if event.type not in DELTAS:
        return None
    if "redacted" in event.body:
        return (event.type, event.body.get("tool" if event.type == TOOL_PROGRESS else "segment"), event.ordinal)
    return (event.type, event.body.get("tool" if event.type == TOOL_PROGRESS else "segment"))


class _Merger:
    """Adjacent deltas of one segment become one, whose text is joined once. Events are taken as they are and never
    changed: whoever gave them still has them."""

    __slots__ = ("_end", "_head", "_key", "_texts", "done")

    def __init__(self) -> None:
        self.done: list[Event] = []
        self._key: tuple[str, Any] | tuple[str, Any, int] | None = None
        self._head: Event | None = None  # of the run of deltas that is open
        self._texts: list[str] = []
        self._end = 0

    def joins(self, event: Event) -> bool:
        """Whether this event, a delta, continues the open run."""
        return self._head is not None and self._end + 1 == event.ordinal and _key(event) == self._key

    def join(self, event: Event) -> None:
        self._texts.append(event.body["text"])
        self._end = event.end

    def take(self, event: Event) -> None:
        """An event that continues nothing; a delta begins a run."""
        self.close()
        if event.type in DELTAS:
            self._head, self._key, self._texts, self._end = event, _key(event), [event.body["text"]], event.end
        else:
            self.done.append(event)

    def close(self) -> Event | None:
        """End the open run; the event that it became where several were merged."""
        head, self._head = self._head, None
        if head is None:
            return None
        if len(self._texts) == 1:
            self.done.append(head)
            return None
        body = {**head.body, "text": "".join(self._texts)}
        merged = Event.made(head.ordinal, head.at, head.type, body, self._end)
        self.done.append(merged)
        return merged


def merge(events: Sequence[Event]) -> list[Event]:
    """Merge adjacent deltas of one segment. fold(merge(events)) = fold(events)."""
    merger = _Merger()
    for event in events:
        if merger.joins(event):
            merger.join(event)
        else:
            merger.take(event)
    merger.close()
    return merger.done


def encode(frame: Frame) -> bytes:
    return frame.model_dump_json(exclude_none=True).encode()


def encode_event(event: ConversationEvent) -> bytes:
    return event.model_dump_json(exclude_none=True).encode()


def check(frame: Frame) -> None:
    """Raise `RefusedError` where ordinals have holes or disagree with `first..last`, or where there is no event."""
    check_ordinals(frame.events, frame.first, frame.last)


def decode(subject: str, data: bytes, stored_at_ns: int = 0) -> Frame | ConversationEvent:
    """A stored message's content. Raises `RefusedError` with its reason (an unknown version is named), `InvalidError`
    for a subject that is none of the log's. `stored_at_ns`: when it was stored, 0 where that is not known."""
    address = parse_event(subject)
    check_size(address, len(data))
    model: type[Frame] | type[ConversationEvent] = ConversationEvent if address.conversation_level else Frame
    try:
        message = model.model_validate_json(data)
    except ValidationError as error:
        raise _unreadable(error) from None
    if isinstance(message, Frame):
        check_ordinals(message.events, message.first, message.last)
        check_events(address, message.events, data, stored_at_ns)
    else:
        check_note(address, message, data, stored_at_ns)
    return message


def _unreadable(error: ValidationError) -> RefusedError:
    first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "message"
    if where == "v":
        return RefusedError(Refusal.VERSION, where, f"this reader knows version {VERSION}")
    deep = "recursion limit" in str(first.get("ctx", {}).get("error", ""))
    return RefusedError(Refusal.NESTING if deep else Refusal.UNREADABLE, where, remedy_of(first))


def message_id(address: EventAddress, frame: Frame, data: bytes, *, retry: int = 0) -> str:
    """`Nats-Msg-Id` of a frame; `/r1`… after the server said `duplicate` for a message that is gone."""
    digest = hashlib.sha256(data).hexdigest()[:16]
    suffix = f"/r{retry}" if retry else ""
    return f"{address.conversation}/{address.execution}/{frame.first}-{frame.last}/{digest}{suffix}"


def size_of(event: Event) -> int:
    """Bytes that the event adds to a frame."""
    return len(encode_part(event)) + 1


class Cut(NamedTuple):
    """A frame, how many of the waiting entries it takes, and its bytes (`encode(frame)`, made of parts that were
    encoded once, to measure them)."""

    frame: Frame
    taken: int
    data: bytes


def cut(
    waiting: Iterable[tuple[Event, Position]],
    *,
    bytes_max: int = FRAME_BYTES_MAX,
    events_max: int = FRAME_EVENTS_MAX,
) -> Cut:
    """The next frame of `waiting` (not empty): at least one of its entries.

    `events_max` bounds events before merging; `bytes_max` the encoded size, unless one event alone exceeds it.
    """
    merger = _Merger()
    parts: list[bytes] = []
    taken, size, last, position = 0, _HEAD_BYTES, 0, None
    for event, reached in islice(waiting, events_max):
        joins = merger.joins(event)
        if joins:  # its text alone goes into the event that is there
            more = len(to_json(event.body["text"]))
        else:
            part = encode_part(event)
            more = len(part) + _LAST_BYTES
        if taken and size + more > bytes_max:
            break
        if joins:
            merger.join(event)
        else:
            _replace_last(parts, merger.close())
            merger.take(event)
            parts.append(part)
        size += more
        taken += 1
        last, position = event.end, reached
    assert position is not None
    _replace_last(parts, merger.close())
    first = merger.done[0].ordinal
    frame = Frame(first=first, last=last, pos=position, events=merger.done)
    place = f'"pos":{{"record":{position.record},"index":{position.index}}}'
    head = f'{{"v":{VERSION},"first":{first},"last":{last},{place}'
    return Cut(frame, taken, b'%b,"events":[%b]}' % (head.encode(), b",".join(parts)))


def _replace_last(parts: list[bytes], merged: Event | None) -> None:
    if merged is not None:
        parts[-1] = encode_part(merged)
