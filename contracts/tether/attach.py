"""Attach: how a reader of a conversation gets on the log without losing or doubling anything. A pure machine.

    begin ─▶ 1 subscribe to the live subject, buffering; barrier; the stream's end E, from the leader
             2 the cursor is judged (position is not identity) ── changed ─▶ PositionChanged, from the beginning
             3 read the suffix until the leader says that no more is stored
             4 drain the buffer
             5 live ── a silence is probed: the log has more ─▶ 3
    a hole (first ≠ applied + 1): from a live copy: back to 3; in the log itself: a snapshot of that execution, once;
    what even that does not cover is a gap, told once

Live copies carry the previous sequence of their exact subject, so a lost one shows on the next copy of that subject,
which is read again from the last one seen there. (A cursor handed out in between is past the lost copy; the window
is one frame of the running execution, or the silence probe.)

Subscribing comes first, so an event published at any step boundary is in the buffer, in the suffix, or in both:
duplicates are dropped by identity (execution and ordinal, or the event's id), never by sequence. The buffer is
bounded: when it overflows it is thrown away and the log is read again.

An attach owns its reader by a token: inputs of an older token are no-ops (their timers and callbacks may still come).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

from tether.cursor import WHOLE, Cursor, Standing, judge
from tether.errors import InvalidError
from tether.events import EXECUTION_ENDED, RESPONSE_CREATED, ConversationEvent, Event, GapReason
from tether.frames import Frame, decode
from tether.limits import EXECUTION_TOKEN_CONVERSATION, LIVE_BUFFER_BYTES_MAX
from tether.ports import LiveMessage, StoredMessage
from tether.snapshot import Snapshot
from tether.subjects import EventAddress, parse_event


@dataclass(frozen=True, slots=True)
class Barriered:
    """Subscribed, and the barrier has passed: from here on the live subject misses nothing on this connection."""

    token: int


@dataclass(frozen=True, slots=True)
class EndKnown:
    """The stream's last sequence from its leader, and what it holds at the cursor's sequence."""

    token: int
    last_sequence: int
    at_cursor: StoredMessage | None


@dataclass(frozen=True, slots=True)
class BatchRead:
    """Answer to the `Read` of this round; empty: nothing (more) is there."""

    token: int
    round: int
    messages: Sequence[StoredMessage]


@dataclass(frozen=True, slots=True)
class LiveArrived:
    token: int
    message: LiveMessage


@dataclass(frozen=True, slots=True)
class Overflowed:
    """The shell's own buffer of the subscription overflowed."""

    token: int


@dataclass(frozen=True, slots=True)
class SnapshotRead:
    """Answer to `AskSnapshot`; None where nobody can give one, and `why` then."""

    token: int
    execution: str
    snapshot: Snapshot | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Silent:
    """Nothing came for the silence probe's time."""

    token: int


@dataclass(frozen=True, slots=True)
class Probed:
    """Answer to `Probe`: does the log hold a message after `after` there?"""

    token: int
    round: int
    after: int
    more: bool


AttachInput = Barriered | EndKnown | BatchRead | LiveArrived | Overflowed | SnapshotRead | Silent | Probed


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Subscribe to the conversation's live subject, then pass a barrier; answer Barriered."""

    token: int


@dataclass(frozen=True, slots=True)
class AskEnd:
    """Ask the leader for the stream's end and for the message at `cursor_sequence` (0: none); answer EndKnown."""

    token: int
    cursor_sequence: int


@dataclass(frozen=True, slots=True)
class Read:
    """Read the next batch after this sequence; answer BatchRead. Answers of an older round are no-ops."""

    token: int
    round: int
    after: int


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """The log no longer holds all of this execution; answer SnapshotRead. Never wakes a sandbox."""

    token: int
    address: EventAddress


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the leader whether anything is stored after this sequence, of this execution (None: of the conversation);
    answer Probed."""

    token: int
    round: int  # negative: a silence probe
    after: int
    execution: str | None = None


@dataclass(frozen=True, slots=True)
class Deliver:
    """New events for the reader, in order. `cursor` is the reader's once it has applied them.
    `replay`: they were stored before this attach began; nothing replayed is executed. They are the stored message
    `sequence`, without the first `skipped` events of its frame: with that a cursor into the frame can be made."""

    address: EventAddress
    events: Sequence[Event] | ConversationEvent
    cursor: Cursor
    replay: bool
    sequence: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class DeliverSnapshot:
    """State in place of events that are gone: replaces what the reader has of this execution, never with less."""

    address: EventAddress
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class DeliverGap:
    """Ordinals `first..last` are not to be had. Told once. `detail`: why no snapshot has them either."""

    address: EventAddress
    first: int
    last: int
    reason: GapReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PositionChanged:
    """The cursor names another stream's message: the reader starts over, from the beginning of what is retained."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Everything stored before the attach has been delivered."""

    cursor: Cursor


AttachEffect = (
    Subscribe
    | AskEnd
    | Read
    | AskSnapshot
    | Probe
    | Deliver
    | DeliverSnapshot
    | DeliverGap
    | PositionChanged
    | CaughtUp
)


class _Phase(Enum):
    NEW = "new"
    SUBSCRIBING = "subscribing"
    ENDING = "asking for the end"
    READING = "reading"
    DRAINING = "draining"
    SNAPSHOT = "waiting for a snapshot"
    LIVE = "live"


@dataclass(frozen=True, slots=True)
class _Hole:
    """A frame that cannot be applied yet: ordinals `expected..first - 1` are missing before it."""

    address: EventAddress
    expected: int
    first: int


@dataclass(slots=True)
class Attach:
    """One attach of one reader. `cursor`: where it was; `applied`: last ordinal of each execution that it has."""

    token: int
    cursor: Cursor = field(default_factory=Cursor.beginning)
    applied: dict[str, int] = field(default_factory=dict)
    buffer_bytes_max: int = LIVE_BUFFER_BYTES_MAX
    _phase: _Phase = _Phase.NEW
    _round: int = 0
    _end: int | None = None  # the watermark: replay until here
    _start: int = 0  # the sequence that reading began after
    _verified: int = 0  # every message up to here was looked at, known from the log itself: reading goes on from here
    _seen: int = 0  # last sequence looked at
    _silences: int = 0
    _silence: tuple[int, int] = (0, 0)  # answers to a silence probe that are out, and what was seen when it was asked
    _last: dict[str, int] = field(default_factory=dict)  # last sequence looked at, by execution
    _ids: set[str] = field(default_factory=set)
    _buffer: deque[LiveMessage] = field(default_factory=deque)
    _buffered_bytes: int = 0
    _hole: _Hole | None = None
    _ended: set[str] = field(default_factory=set)
    _searched: set[str] = field(default_factory=set)
    _snapshot_used: dict[str, str] = field(default_factory=dict)  # by execution: why there was none
    _caught_up: bool = False
    _from_cursor: bool = False

    def begin(self) -> list[AttachEffect]:
        self._phase = _Phase.SUBSCRIBING
        return [Subscribe(self.token)]

    @property
    def live(self) -> bool:
        return self._phase is _Phase.LIVE

    def apply(self, event: AttachInput) -> list[AttachEffect]:
        if event.token != self.token:
            return []
        match event:
            case Barriered():
                self._phase = _Phase.ENDING
                return [AskEnd(self.token, self.cursor.sequence)]
            case EndKnown():
                return self._end_known(event)
            case BatchRead():
                current = self._phase is _Phase.READING and event.round == self._round
                return self._batch(event.messages) if current else []
            case LiveArrived():
                return self._live(event.message)
            case Overflowed():
                return self._overflow()
            case SnapshotRead():
                return self._snapshot(event)
            case Silent():
                return self._silent()
            case Probed():
                return self._probed(event)
            case _:
                assert_never(event)

    # --- steps ---

    def _end_known(self, event: EndKnown) -> list[AttachEffect]:
        if self._phase is not _Phase.ENDING:
            return []
        effects: list[AttachEffect] = []
        if self._end is None:
            self._end = event.last_sequence
            standing = judge(self.cursor, event.at_cursor, last_sequence=event.last_sequence)
            if standing is Standing.CHANGED:
                self.cursor = Cursor.beginning()
                self.applied.clear()
                effects.append(PositionChanged())
            self._from_cursor = self.cursor.sequence > 0
            # The cursor's own message is read again when only a part of its frame was applied.
            whole = self.cursor.sequence == 0 or self.cursor.index == WHOLE or event.at_cursor is None
            self._start = self._verified = self._seen = self.cursor.sequence if whole else self.cursor.sequence - 1
            self._last[EXECUTION_TOKEN_CONVERSATION] = self._start  # open from the first, whether seen or not
        return [*effects, *self._read()]

    def _read(self) -> list[AttachEffect]:
        self._phase = _Phase.READING
        self._silence = (0, 0)
        self._round += 1
        return [Read(self.token, self._round, self._verified)]

    def _batch(self, messages: Sequence[StoredMessage]) -> list[AttachEffect]:
        effects: list[AttachEffect] = []
        for message in messages:
            effects += self._take(message)
            if self._hole is not None:
                return [*effects, *self._missing()]
            self._verified = message.sequence
        if messages:
            return [*effects, Read(self.token, self._round, self._verified)]
        # A follower that lags answers empty, too: only the leader says that no more is stored.
        return [Probe(self.token, self._round, self._verified)]

    def _silent(self) -> list[AttachEffect]:
        """Each open subject is asked for itself: a lost copy may be older than what was seen on another one."""
        if self._phase is not _Phase.LIVE:
            return []
        self._silences += 1
        own = [
            Probe(self.token, -self._silences, last, execution)
            for execution, last in self._last.items()
            if execution not in self._ended
        ]
        self._silence = (1 + len(own), self._seen)
        return [Probe(self.token, -self._silences, self._seen), *own]

    def _probed(self, event: Probed) -> list[AttachEffect]:
        if event.round > 0:
            if self._phase is not _Phase.READING or event.round != self._round:
                return []
            return self._read() if event.more else self._drain()
        if self._phase is not _Phase.LIVE or event.round != -self._silences:
            return []
        if event.more:
            return self._read()
        waiting, seen = self._silence
        self._silence = (waiting - 1, seen)
        if waiting == 1:
            self._verified = max(self._verified, seen)
        return []

    def _drain(self) -> list[AttachEffect]:
        self._phase = _Phase.DRAINING
        effects: list[AttachEffect] = []
        while self._buffer:
            message = self._buffer.popleft()
            self._buffered_bytes -= len(message.data)
            effects += self._take(message)
            if self._hole is not None:
                return [*effects, *self._missing()]
        self._phase = _Phase.LIVE
        if not self._caught_up:
            self._caught_up = True
            effects.append(CaughtUp(self.cursor))
        return effects

    def _live(self, message: LiveMessage) -> list[AttachEffect]:
        if self._phase is not _Phase.LIVE:
            self._buffer.append(message)
            self._buffered_bytes += len(message.data)
            return self._overflow() if self._buffered_bytes > self.buffer_bytes_max else []
        effects = self._take(message)
        return [*effects, *self._missing()] if self._hole is not None else effects

    def _overflow(self) -> list[AttachEffect]:
        self._buffer.clear()
        self._buffered_bytes = 0
        if self._phase in (_Phase.NEW, _Phase.SUBSCRIBING, _Phase.SNAPSHOT):
            return []
        self._phase = _Phase.ENDING
        return [AskEnd(self.token, 0)]

    # --- events ---

    def _take(self, stored: StoredMessage | LiveMessage) -> list[AttachEffect]:
        try:
            address = parse_event(stored.subject)
        except InvalidError:
            self._seen = max(self._seen, stored.sequence)
            return []
        try:
            message = decode(stored.subject, stored.data, stored.stored_at_ns)
        except InvalidError:
            # No reader can make sense of it, and none may end because of it. What it should have said shows as a hole
            # before the next frame of its execution.
            if self._copy_lost(address, stored):
                self._hole = _Hole(address, 0, 0)
            else:
                self._passed(address, stored)
            return []
        if isinstance(message, ConversationEvent):
            fresh = message.id not in self._ids
            if fresh and self._copy_lost(address, stored):
                self._hole = _Hole(address, 0, 0)
                return []
            self._ids.add(message.id)
            self._passed(address, stored)
            if message.type == RESPONSE_CREATED:
                self._last.setdefault(str(message.body.get("execution")), stored.sequence)
            replay = self._replay(stored.sequence)
            return [Deliver(address, message, self.cursor, replay, stored.sequence)] if fresh else []
        return self._take_frame(address, message, stored)

    def _copy_lost(self, address: EventAddress, stored: StoredMessage | LiveMessage) -> bool:
        """Whether a live copy names a message before it on its subject that was not looked at."""
        return isinstance(stored, LiveMessage) and stored.previous > self._last.get(address.execution, self._start)

    def _take_frame(
        self, address: EventAddress, frame: Frame, stored: StoredMessage | LiveMessage
    ) -> list[AttachEffect]:
        applied = self.applied.get(address.execution)
        if applied is None:
            if self._copy_lost(address, stored):
                self._hole = _Hole(address, 0, frame.first)
                return []
            # A reader that comes with a cursor has what is before it; one from the beginning misses what is missing.
            partly = stored.sequence == self.cursor.sequence and self.cursor.index != WHOLE
            begun = frame.first - 1 + (self._applied_in(frame) if partly else 0)
            applied = begun if self._from_cursor else 0
            self.applied[address.execution] = applied
        if frame.first > applied + 1:
            self._hole = _Hole(address, applied + 1, frame.first)
            return []
        self._passed(address, stored)
        if frame.events[-1].type == EXECUTION_ENDED:
            self._ended.add(address.execution)
        events = [event for event in frame.events if event.end > applied]
        if not events:
            return []
        self.applied[address.execution] = frame.last
        skipped = len(frame.events) - len(events)
        return [Deliver(address, events, self.cursor, self._replay(stored.sequence), stored.sequence, skipped)]

    def _replay(self, sequence: int) -> bool:
        return self._end is None or sequence <= self._end

    def _applied_in(self, frame: Frame) -> int:
        """Ordinals of the frame that the cursor's index covers."""
        covered = frame.events[: self.cursor.index]
        return covered[-1].end - frame.first + 1 if covered else 0

    def _passed(self, address: EventAddress, stored: StoredMessage | LiveMessage) -> None:
        self._seen = max(self._seen, stored.sequence)
        self._last[address.execution] = max(self._last.get(address.execution, 0), stored.sequence)
        if stored.sequence >= self.cursor.sequence and stored.stored_at_ns:
            self.cursor = Cursor.after(stored.sequence, stored.stored_at_ns)

    def _missing(self) -> list[AttachEffect]:
        """A hole among live copies (one was lost, or they came out of order): the log decides. A hole in the log
        itself: a snapshot of the execution, once; then the gap."""
        hole = self._hole
        assert hole is not None
        if self._phase is not _Phase.READING:
            self._hole = None
            self._buffer.clear()
            self._buffered_bytes = 0
            return self._read()
        if hole.address.execution not in self._searched:
            # Before anything is called missing, the log is read once from where this attach began.
            self._searched.add(hole.address.execution)
            self._hole = None
            self._verified = self._start
            return self._read()
        if hole.address.execution in self._snapshot_used:
            return self._give_up(hole)
        self._snapshot_used[hole.address.execution] = ""
        self._phase = _Phase.SNAPSHOT
        return [AskSnapshot(self.token, hole.address)]

    def _snapshot(self, event: SnapshotRead) -> list[AttachEffect]:
        hole = self._hole
        if self._phase is not _Phase.SNAPSHOT or hole is None or hole.address.execution != event.execution:
            return []
        if event.snapshot is None or event.snapshot.watermark.ordinal < hole.expected:
            self._snapshot_used[event.execution] = event.why
            return self._give_up(hole)
        self._hole = None
        self.applied[event.execution] = event.snapshot.watermark.ordinal
        return [DeliverSnapshot(hole.address, event.snapshot), *self._read()]

    def _give_up(self, hole: _Hole) -> list[AttachEffect]:
        self._hole = None
        self.applied[hole.address.execution] = hole.first - 1
        why = self._snapshot_used.get(hole.address.execution, "")
        return [DeliverGap(hole.address, hole.expected, hole.first - 1, "retention_gap", why), *self._read()]
