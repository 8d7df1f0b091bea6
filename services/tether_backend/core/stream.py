"""What a reader of a conversation gets: log messages in, encoded frames out. Pure; its shell is `http.course`.

    take(message) → Chunk (bytes to send)                 the cursor moves with it
                  → Hole  (an ordinal is missing)         nothing moves: `restore` a snapshot, else `accept` the gap
    after take, `end` is set once what `until` asks for has come: the frame ends there, and so does the stream

A reader's position is its cursor. What it applied of each execution is known from the first frame it saw, or from a
snapshot; duplicates are dropped by ordinal or id, never by sequence. Encoding is shared: a `LogMessage` encodes itself
once for all readers of one wire to whom it is live and whole. A wire (`SSE`, `WEBSOCKET`) is how a frame is written;
whatever is put together of frames can be taken apart again at their ends (an empty line, a line).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pydantic_core

from tether import events as ev
from tether import frames
from tether.api import (
    FRAME_END,
    FRAME_EVENT,
    FRAME_HEARTBEAT,
    FRAME_LIVE,
    FRAME_OPEN,
    FRAME_PROBLEM,
    FRAME_SNAPSHOT,
    StreamEnd,
    StreamOpen,
)
from tether.cursor import WHOLE, Cursor
from tether.errors import InvalidError, Problem
from tether.events import ConversationEvent, Event
from tether.frame_rules import Refusal, RefusedError
from tether.frames import Frame
from tether.ids import TOKEN_PATTERN
from tether.limits import SSE_HEARTBEAT_S
from tether.ports import StoredMessage
from tether.subjects import EventAddress, parse_event

_ENDS: Final = frozenset({ev.RESPONSE_ENDED, ev.EXECUTION_ENDED})
_RESPONSE_ENDS: Final = frozenset({ev.RESPONSE_FAILED, ev.RESPONSE_SUPERSEDED})
_SEEN_MAX: Final = 4096  # conversation events whose ids a reader remembers


@dataclass(frozen=True, slots=True)
class Wire:
    """How frames are written. `frame`: name, data as JSON, cursor (None: the frame does not move the reader)."""

    name: str
    frame: Callable[[str, bytes, str | None], bytes]
    heartbeat: bytes


def _sse(name: str, data: bytes, cursor: str | None) -> bytes:
    head = (f"id: {cursor}\n" if cursor is not None else "") + (f"event: {name}\n" if name != FRAME_EVENT else "")
    return b"%sdata: %s\n\n" % (head.encode(), data)


def _message(name: str, data: bytes, cursor: str | None) -> bytes:
    """A line for each frame: JSON as it is written here has no newline within."""
    return b'{"frame":"%s","id":%s,"data":%s}\n' % (
        name.encode(),
        b"null" if cursor is None else f'"{cursor}"'.encode(),
        data,
    )


SSE: Final = Wire("sse", _sse, b": hb\n\n")
WEBSOCKET: Final = Wire("websocket", _message, _message(FRAME_HEARTBEAT, b"{}", None))


@dataclass(slots=True)
class LogMessage:
    """A stored message of the log, decoded once. `problem` where it cannot be read (unknown version, damaged)."""

    address: EventAddress
    sequence: int
    stored_at_ns: int
    content: Frame | ConversationEvent | None
    problem: Problem | None = None
    size_bytes: int = 0  # as stored
    refusal: Refusal | None = None  # why it is not believed
    why: str = ""
    _live: dict[str, bytes] = field(default_factory=dict, repr=False)
    _whole: Cursor | None = field(default=None, repr=False)

    @property
    def has_end(self) -> bool:
        """Whether one of its events may be the end that `until` asks for."""
        content = self.content
        if isinstance(content, Frame):
            return any(event.type in _ENDS for event in content.events)
        return content is not None and content.type in _RESPONSE_ENDS

    @property
    def count(self) -> int:
        """Events in the message: cursors index them."""
        return len(self.content.events) if isinstance(self.content, Frame) else 1

    def cursor(self, done: int) -> Cursor:
        """After the first `done` events. The one after all of them is made once for all readers."""
        if done < self.count:
            return Cursor.after(self.sequence, self.stored_at_ns, index=done)
        if self._whole is None:
            self._whole = Cursor.after(self.sequence, self.stored_at_ns, index=WHOLE)
        return self._whole

    def encode_one(self, index: int, *, replay: bool, wire: Wire = SSE) -> bytes:
        cursor = self.cursor(index + 1).encode(self.address.tenant, self.address.conversation)
        if self.problem is not None:
            return wire.frame(FRAME_PROBLEM, problem_json(self.problem), cursor)
        if isinstance(self.content, Frame):
            event = self.content.events[index]
            value: dict[str, Any] = {"execution": self.address.execution, "ordinal": event.ordinal}
            if event.last is not None:
                value["last"] = event.last
        else:
            assert self.content is not None
            event = self.content  # type: ignore[assignment]
            value = {"id": self.content.id, "generation": self.content.generation}
        value |= {"at": event.at, "type": event.type, "body": event.body, "replay": replay}
        return wire.frame(FRAME_EVENT, pydantic_core.to_json(value), cursor)

    def live(self, wire: Wire) -> bytes:
        """All its events as frames of the live stream, encoded once for each wire."""
        known = self._live.get(wire.name)
        if known is None:
            known = b"".join(self.encode_one(index, replay=False, wire=wire) for index in range(self.count))
            self._live[wire.name] = known
        return known


def decode(subject: str, sequence: int, stored_at_ns: int, data: bytes) -> LogMessage:
    """A message of the log. Raises `InvalidError` only where the subject is none of the log's."""
    address = parse_event(subject)
    try:
        content = frames.decode(subject, data, stored_at_ns)
    except RefusedError as error:
        refused = (error.reason, f"{error.field}: {error.remedy}")
        return LogMessage(address, sequence, stored_at_ns, None, error.problem, len(data), *refused)
    return LogMessage(address, sequence, stored_at_ns, content, None, len(data))


def decode_stored(stored: StoredMessage) -> LogMessage | None:
    """A message of the log; None where its subject is none of the log's: whatever lies there has no reader."""
    try:
        return decode(stored.subject, stored.sequence, stored.stored_at_ns, stored.data)
    except InvalidError:
        return None


def problem_json(problem: Problem) -> bytes:
    return problem.model_copy(update={"context": problem.context}).model_dump_json(exclude_none=True).encode()


@dataclass(frozen=True, slots=True)
class Until:
    """When the stream ends: `response` names one, else `idle`."""

    text: str
    response: str | None = None

    @staticmethod
    def parse(text: str) -> Until:
        """`response:{id}` or `idle`. Raises `InvalidError`."""
        kind, _, name = text.partition(":")
        if kind == "idle" and not name:
            return Until(text)
        if kind == "response" and re.fullmatch(TOKEN_PATTERN, name):
            return Until(text, name)
        raise InvalidError("until", "must be response:{id} or idle")


@dataclass(frozen=True, slots=True)
class Chunk:
    data: bytes


@dataclass(frozen=True, slots=True)
class Hole:
    """Ordinals `first..last` of the execution are not in the log where they should be."""

    execution: str
    first: int
    last: int


class ReaderView:
    """One reader. `watermark`: the stream's last sequence when it connected; up to it events are a replay."""

    def __init__(
        self,
        tenant: str,
        conversation: str,
        cursor: Cursor,
        watermark: int,
        until: Until | None = None,
        wire: Wire = SSE,
    ) -> None:
        self.tenant = tenant
        self.conversation = conversation
        self.cursor = cursor
        self.watermark = watermark
        self.until = until
        self.wire = wire
        self.end: StreamEnd | None = None
        self.until_execution: str | None = None  # which execution answers the response that `until` names
        self._applied: dict[str, int] = {}
        self._from_start = cursor.sequence == 0  # an execution that is not known must begin at 1
        self._seen: OrderedDict[str, None] = OrderedDict()

    @property
    def encoded_cursor(self) -> str:
        return self.cursor.encode(self.tenant, self.conversation)

    @property
    def read_after(self) -> int:
        """Read the log after this sequence: a message that was applied in part is read again."""
        whole = self.cursor.index == WHOLE or self.cursor.sequence == 0
        return self.cursor.sequence if whole else self.cursor.sequence - 1

    def restore(self, cursor: Cursor, applied: Mapping[str, int], watermark: int) -> None:
        """The reader was given a snapshot: it stands at `cursor`, with these ordinals applied."""
        self.cursor = cursor
        self.watermark = max(watermark, cursor.sequence)
        self._applied = dict(applied)
        self._from_start = True
        self._seen.clear()

    def learn(self, applied: Mapping[str, int]) -> None:
        """The reader was given a snapshot to fill a hole: it stays where it is, and has these ordinals as well."""
        for execution, ordinal in applied.items():
            self._applied[execution] = max(ordinal, self._applied.get(execution, 0))

    def accept(self, hole: Hole) -> None:
        """The gap has been told: go on behind it."""
        self._applied[hole.execution] = hole.last

    def take(self, message: LogMessage) -> Chunk | Hole:
        """The next message in order of the log."""
        here = self.cursor
        if message.sequence < here.sequence or (message.sequence == here.sequence and here.index >= message.count):
            return Chunk(b"")
        start = here.index if message.sequence == here.sequence else 0
        if isinstance(message.content, Frame):
            found = self._frame(message, message.content, start)
        else:
            found = self._conversation_event(message)
        if isinstance(found, Chunk) and self.end is None:
            self.cursor = message.cursor(message.count)
        return found

    def _conversation_event(self, message: LogMessage) -> Chunk:
        event = message.content
        if isinstance(event, ConversationEvent):
            if event.id in self._seen:
                return Chunk(b"")
            self._seen[event.id] = None
            if len(self._seen) > _SEEN_MAX:
                self._seen.popitem(last=False)
            self._judge_conversation(event, message)
        if message.sequence > self.watermark:
            return Chunk(message.live(self.wire))
        return Chunk(message.encode_one(0, replay=True, wire=self.wire))

    def _frame(self, message: LogMessage, frame: Frame, start: int) -> Chunk | Hole:
        execution = message.address.execution
        applied = self._applied.get(execution)
        if applied is None:
            # A reader without knowledge trusts its cursor; one from the beginning must see ordinal 1.
            applied = 0 if self._from_start and not start else frame.events[start].ordinal - 1
        if frame.events[start].ordinal > applied + 1:
            return Hole(execution, applied + 1, frame.events[start].ordinal - 1)
        if frame.last <= applied:
            return Chunk(b"")
        replay = message.sequence <= self.watermark
        watching = self.until is not None and message.has_end
        self._applied[execution] = frame.last
        if not replay and not watching and start == 0 and frame.first == applied + 1:
            return Chunk(message.live(self.wire))
        parts: list[bytes] = []
        for index in range(start, len(frame.events)):
            event = frame.events[index]
            if event.end <= applied:
                continue
            parts.append(message.encode_one(index, replay=replay, wire=self.wire))
            if watching and self._ends(execution, event):
                self._finish(message.cursor(index + 1), event.body.get("outcome"))
                break
        return Chunk(b"".join(parts))

    def _ends(self, execution: str, event: Event) -> bool:
        # The response's end may be missing from the log where its start was evicted; the execution's end implies it.
        return self.until_execution == execution and event.type in _ENDS

    def _judge_conversation(self, event: ConversationEvent, message: LogMessage) -> None:
        if self.until is None or self.until.response is None or event.body.get("response") != self.until.response:
            return
        if event.type == ev.RESPONSE_CREATED:
            self.until_execution = event.body.get("execution")
        elif event.type in _RESPONSE_ENDS:
            outcome = "failed" if event.type == ev.RESPONSE_FAILED else "superseded"
            self._finish(message.cursor(1), outcome)

    def _finish(self, cursor: Cursor, outcome: str | None) -> None:
        assert self.until is not None
        self.cursor = cursor
        self.end = StreamEnd(
            until=self.until.text, cursor=self.encoded_cursor, response=self.until.response, outcome=outcome
        )

    def finish_deleted(self, cursor: Cursor) -> None:
        """The conversation was deleted, which was told: nothing follows."""
        self.cursor = cursor
        until = None if self.until is None else self.until.text
        self.end = StreamEnd(until=until or "", cursor=self.encoded_cursor, outcome="deleted")

    def finish_idle(self) -> None:
        """The conversation has no active execution (the shell asked), and everything has been told."""
        self._finish(self.cursor, None)

    def finish_before(self) -> None:
        """The end that is asked for lies at or before the cursor (the shell found)."""
        self._finish(self.cursor, None)

    # --- frames of the stream itself ---

    def open_frame(self) -> bytes:
        told = StreamOpen(conversation=self.conversation, cursor=self.encoded_cursor, heartbeat_s=SSE_HEARTBEAT_S)
        return self.wire.frame(FRAME_OPEN, told.model_dump_json().encode(), self.encoded_cursor)

    def live_frame(self) -> bytes:
        data = pydantic_core.to_json({"cursor": self.encoded_cursor})
        return self.wire.frame(FRAME_LIVE, data, self.encoded_cursor)

    def problem_frame(self, problem: Problem) -> bytes:
        # Without an id: the old cursor stays until the snapshot's frame replaces it.
        return self.wire.frame(FRAME_PROBLEM, problem_json(problem), None)

    def snapshot_frame(self, history: bytes) -> bytes:
        return self.wire.frame(FRAME_SNAPSHOT, b'{"history":%s}' % history, self.encoded_cursor)

    def end_frame(self) -> bytes:
        assert self.end is not None
        return self.wire.frame(FRAME_END, self.end.model_dump_json().encode(), self.end.cursor)
