"""The writer of one execution's log: a pure machine. **The log is the writer's base**, not what it remembers.

            ┌───────────────────────── Reconnected, WrongLast, doubtful duplicate ───────────────┐
            ▼                                                                                    │
        reading ── LastRead ──▶ ready ── something waits ──▶ sending ── Acked ──▶ ready          │
            │                                                  │  ▲                              │
            │                                                  └──┘ Undecided, Unavailable:      │
            │                                                       the same bytes again ────────┘
            ├── our frame in flight is there            → told, ready
            ├── the log ends before what was told        → Rebase: rebuild from the spool, offer anew
            ├── empty, though frames were told           → asking ── OwnerRead ──▶ gap and go on, or fenced
            └── another writer's frame, or a terminal    → fenced: nothing is written again

One frame is in flight; what is offered meanwhile goes together in the next (group commit). Every frame carries
compare-and-set on its own subject and a message id made of its content, so sending the same bytes again is safe:
R1 answers "wrong last sequence: N" and R3 `duplicate` for a frame that is stored already. Neither is believed before
the message has been read: after a purge the server says `duplicate` and stores nothing (then `/r1`, `/r2`… make a
new id). A reader of a lagging follower is caught by the next wrong last sequence, which names N: read until the
subject's last is at least N (0: empty), then judge.

Inputs and effects are data; the shell performs effects in order. No clock: pauses are given in seconds as data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, assert_never

from tether.cursor import tag_of
from tether.errors import InvalidError
from tether.events import DELTAS, EXECUTION_ENDED, Event, GapReason
from tether.frames import Frame, Position, cut, decode, message_id
from tether.limits import FRAME_BYTES_MAX, FRAME_EVENTS_MAX, PUBLISH_BACKOFF_MAX_S, PUBLISH_BACKOFF_MIN_S
from tether.ports import StoredMessage
from tether.subjects import EventAddress

READ_AGAIN_S = 0.02  # before a follower that lags is read again
READ_AGAIN_MAX = 100  # then what the follower says is taken; the next wrong last sequence corrects it
UNAVAILABLE_S = 1.0  # before a stream that is full or missing is tried again
WAITING_MAX = 65_536  # events that may wait; the shell stops reading the spool above `full`


@dataclass(frozen=True, slots=True)
class Offered:
    """New events with the spool position each reaches, in order of ordinal."""

    events: Sequence[tuple[Event, Position]]


@dataclass(frozen=True, slots=True)
class LastRead:
    """The subject's last message as read now (None: the subject is empty)."""

    message: StoredMessage | None


@dataclass(frozen=True, slots=True)
class Acked:
    sequence: int
    duplicate: bool
    stored_at_ns: int = 0


@dataclass(frozen=True, slots=True)
class Undecided:
    """Timeout, lost connection, 10158, 10164."""


@dataclass(frozen=True, slots=True)
class WrongLast:
    actual: int


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The stream is missing or full: nothing was stored."""


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The connection is a new one: what the log holds must be read again."""


@dataclass(frozen=True, slots=True)
class OwnerRead:
    """Answer to `ReadOwner`: does the owner record still name this execution?"""

    still_ours: bool


WriterInput = Offered | LastRead | Acked | Undecided | WrongLast | Unavailable | Reconnected | OwnerRead


@dataclass(frozen=True, slots=True)
class ReadLast:
    """Read the subject's last message, after `after_s`; answer with LastRead."""

    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Send:
    """Publish `data` with this id and compare-and-set, after `after_s`."""

    data: bytes
    msg_id: str
    expect_last: int
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReadOwner:
    """Read the owner record; answer with OwnerRead."""


@dataclass(frozen=True, slots=True)
class Told:
    """Stored for certain: every ordinal up to `ordinal`, whose frame has `sequence` and `tag`, reaching `position`.

    `events` are those of that frame. `tag` is 0 where the answer did not carry the stored time."""

    ordinal: int
    sequence: int
    tag: int
    position: Position
    events: Sequence[Event]
    terminal: bool


@dataclass(frozen=True, slots=True)
class Rebase:
    """The log ends at `ordinal` (spool position `position`): rebuild from the spool and offer what follows anew."""

    ordinal: int
    position: Position


@dataclass(frozen=True, slots=True)
class RecordGap:
    """Record a gap as an input of the execution: ordinals `first..last` are no longer in the log."""

    reason: GapReason
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """Another writer has the subject, or the execution has ended: stop writing, for good."""

    reason: str


WriterEffect = ReadLast | Send | ReadOwner | Told | Rebase | RecordGap | Fenced


class _State(Enum):
    NEW = "new"
    READING = "reading"
    READY = "ready"
    SENDING = "sending"
    ASKING = "asking"
    FENCED = "fenced"


def agrees(frame: Frame, events: Sequence[Event]) -> bool:
    """Whether `events`, as far as the frame covers them, are what the frame says, however it was cut and merged."""
    by_first = {stored.ordinal: stored for stored in frame.events}
    stored = None
    for event in events:
        if event.ordinal > frame.last:
            break
        stored = by_first.get(event.ordinal, stored)
        if event.ordinal < frame.first:
            continue
        if stored is None or stored.type != event.type or event.end > stored.end:
            return False
        if stored.last is None:
            if stored.body != event.body or stored.at != event.at:
                return False
        elif event.type in DELTAS and not _within(stored.body, event.body):
            return False
    return True


def _within(merged: Mapping[str, Any], delta: Mapping[str, Any]) -> bool:
    """Whether a merged delta of the log, whose body may be anything, has our delta's text in its place."""
    whole, offset = merged.get("text"), merged.get("offset")
    if not isinstance(whole, str) or not isinstance(offset, int):
        return False
    text: str = delta["text"]
    start = delta["offset"] - offset
    return whole[start : start + len(text)] == text


@dataclass(slots=True)
class _InFlight:
    frame: Frame
    data: bytes
    taken: int
    retry: int = 0
    attempts: int = 0
    doubted: bool = False  # an answer said that it is there; only reading decides


class FrameWriter:
    """One execution's writer. Call `start`, perform the effects, feed every answer to `apply`."""

    def __init__(
        self,
        address: EventAddress,
        *,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        frame_events_max: int = FRAME_EVENTS_MAX,
    ) -> None:
        self._address = address
        self._bytes_max = frame_bytes_max
        self._events_max = frame_events_max
        self._state = _State.NEW
        self._waiting: deque[tuple[Event, Position]] = deque()
        self._in_flight: _InFlight | None = None
        self._base = 0  # the subject's last sequence
        self._told = 0  # last ordinal known to be stored
        self._at_least = 0  # a wrong last sequence named this: a read below it is of a lagging follower
        self._rereads = 0
        self._confirmed = False  # a frame of ours was stored on this base
        self._known = False  # the base has been read at least once
        self._terminal = False
        self._purged = False  # the subject was found empty and the owner record still names us

    @property
    def told(self) -> int:
        """Last ordinal that is stored for certain."""
        return self._told

    @property
    def waiting(self) -> int:
        """Events offered and not yet stored."""
        return len(self._waiting)

    @property
    def fenced(self) -> bool:
        return self._state is _State.FENCED

    @property
    def idle(self) -> bool:
        """Everything offered is stored."""
        return self._state is _State.READY and not self._waiting

    @property
    def full(self) -> bool:
        """Enough waits: stop reading the spool, it holds the rest."""
        return len(self._waiting) >= WAITING_MAX

    def start(self) -> list[WriterEffect]:
        """Begin by reading the base."""
        assert self._state is _State.NEW
        self._state = _State.READING
        return [ReadLast()]

    def apply(self, event: WriterInput) -> list[WriterEffect]:
        if self._state is _State.FENCED:
            return []
        match event:
            case Offered():
                return self._offered(event)
            case LastRead():
                return self._last_read(event.message) if self._state is _State.READING else []
            case Acked():
                return self._acked(event)
            case Undecided():
                return self._again(self._backoff())
            case Unavailable():
                return self._again(UNAVAILABLE_S)
            case WrongLast():
                return self._wrong_last(event.actual)
            case Reconnected():
                if self._state is _State.SENDING:
                    return []  # its publish answers Undecided, and the same bytes go again
                return self._read() if self._state is _State.READY else []
            case OwnerRead():
                return self._owner_read(event.still_ours)
            case _:
                assert_never(event)

    # --- sending ---

    def _offered(self, event: Offered) -> list[WriterEffect]:
        newest = self._waiting[-1][0].end if self._waiting else self._told
        for pair in event.events:
            if pair[0].end <= newest:
                continue
            if pair[0].ordinal > newest + 1:
                break  # offered before the shell performed a Rebase: all of it comes again
            self._waiting.append(pair)
            newest = pair[0].end
        return self._next() if self._state is _State.READY else []

    def _next(self) -> list[WriterEffect]:
        self._state = _State.READY
        if not self._waiting:
            return []
        if self._terminal:
            return self._fence("the execution has ended")
        frame = cut(self._waiting, bytes_max=self._bytes_max, events_max=self._events_max)
        self._in_flight = _InFlight(frame.frame, frame.data, frame.taken)
        self._state = _State.SENDING
        return [self._send(0.0)]

    def _send(self, after_s: float) -> Send:
        flight = self._in_flight
        assert flight is not None
        flight.attempts += 1
        msg_id = message_id(self._address, flight.frame, flight.data, retry=flight.retry)
        return Send(flight.data, msg_id, self._base, after_s)

    def _backoff(self) -> float:
        attempts = self._in_flight.attempts if self._in_flight else 1
        return min(PUBLISH_BACKOFF_MAX_S, PUBLISH_BACKOFF_MIN_S * attempts)

    def _again(self, after_s: float) -> list[WriterEffect]:
        return [self._send(after_s)] if self._state is _State.SENDING else []

    def _acked(self, event: Acked) -> list[WriterEffect]:
        if self._state is not _State.SENDING or self._in_flight is None:
            return []
        if event.duplicate:
            self._in_flight.doubted = True
            return self._read(event.sequence)
        return [self._stored(event.sequence, event.stored_at_ns), *self._next()]

    def _stored(self, sequence: int, stored_at_ns: int) -> Told:
        flight = self._in_flight
        assert flight is not None
        for _ in range(flight.taken):
            self._waiting.popleft()
        self._in_flight = None
        self._base = sequence
        self._confirmed = True
        self._purged = False
        self._told = flight.frame.last
        self._terminal = flight.frame.events[-1].type == EXECUTION_ENDED
        return Told(
            self._told,
            sequence,
            tag_of(stored_at_ns) if stored_at_ns else 0,
            flight.frame.pos,
            flight.frame.events,
            self._terminal,
        )

    # --- judging ---

    def _read(self, at_least: int = 0, after_s: float = 0.0) -> list[WriterEffect]:
        self._state = _State.READING
        self._at_least = at_least
        self._rereads = 0
        return [ReadLast(after_s)]

    def _wrong_last(self, actual: int) -> list[WriterEffect]:
        if self._state is not _State.SENDING:
            return []
        return self._read(actual)

    def _last_read(self, message: StoredMessage | None) -> list[WriterEffect]:
        sequence = 0 if message is None else message.sequence
        if sequence < self._at_least and not self._doubtful():
            return [ReadLast(READ_AGAIN_S)]
        self._rereads = 0
        if message is None:
            return self._found_empty()
        try:
            frame = decode(message.subject, message.data)
        except InvalidError:
            return self._fence("the log ends with what is no frame: another writer's")
        assert isinstance(frame, Frame)
        if self._in_flight is not None and message.data == self._in_flight.data:
            return [self._stored(message.sequence, message.stored_at_ns), *self._next()]
        if not self._known:
            # Told > 0 here means that the tail is being put back; the log may have lost more meanwhile.
            return self._rewound(frame) if frame.last < self._told else self._adopt(message, frame)
        if sequence == self._base or frame.last == self._told:
            self._base = sequence
            return self._go_on()
        if frame.last < self._told:
            return self._rewound(frame)
        # Beyond what we told. A base that no frame of ours has confirmed may have been a lagging follower's: it is read
        # anew. Else an earlier instance of this collector may have cut the same events otherwise, and its last publish
        # arrived late: equal content is ours. Anything else is another writer's.
        if not self._confirmed:
            return self._adopt(message, frame)
        if frame.first != self._told + 1 or not agrees(frame, [event for event, _ in self._waiting]):
            return self._fence("another writer's frame is in the log")
        return self._adopt(message, frame)

    def _doubtful(self) -> bool:
        """Whether a read below the named sequence is to be believed: a `duplicate` may name a message that is gone;
        after a wrong last sequence a lagging follower is given time to catch up, but not for ever."""
        flight = self._in_flight
        self._rereads += 1
        return (flight is not None and flight.doubted) or self._rereads > READ_AGAIN_MAX

    def _adopt(self, message: StoredMessage, frame: Frame) -> list[WriterEffect]:
        """What the log has is told: on the first read of a (re)started writer, or a frame of our own content."""
        self._known = True
        self._in_flight = None
        self._base = message.sequence
        self._told = frame.last
        self._terminal = frame.events[-1].type == EXECUTION_ENDED
        while self._waiting and self._waiting[0][0].end <= self._told:
            self._waiting.popleft()
        told = Told(self._told, message.sequence, tag_of(message.stored_at_ns), frame.pos, frame.events, self._terminal)
        return [told, *self._next()]

    def _go_on(self) -> list[WriterEffect]:
        return self._next() if self._in_flight is None else self._resend()

    def _resend(self) -> list[WriterEffect]:
        """The frame in flight is not in the log, whose end is our base. If the server called it a duplicate, its id
        is burnt."""
        flight = self._in_flight
        assert flight is not None
        if flight.doubted:
            flight.retry += 1
            flight.doubted = False
        self._state = _State.SENDING
        return [self._send(self._backoff())]

    def _rewound(self, frame: Frame) -> list[WriterEffect]:
        """The log ends before what was told (the server lost acked messages): put the tail back."""
        self._known = self._confirmed = False
        self._waiting.clear()
        self._in_flight = None
        self._told = frame.last
        self._state = _State.READING
        return [Rebase(frame.last, frame.pos), ReadLast()]

    def _found_empty(self) -> list[WriterEffect]:
        if self._told == 0 or self._purged:
            self._known = True
            self._base = 0
            return self._go_on()
        self._state = _State.ASKING
        return [ReadOwner()]

    def _owner_read(self, still_ours: bool) -> list[WriterEffect]:
        if self._state is not _State.ASKING:
            return []
        if not still_ours:
            return self._fence("the subject is empty and the conversation has another owner")
        self._base = 0
        self._purged = True
        gap = RecordGap("retention_gap", 1, self._told)
        return [gap, *self._go_on()]

    def _fence(self, reason: str) -> list[WriterEffect]:
        self._state = _State.FENCED
        self._waiting.clear()
        self._in_flight = None
        return [Fenced(reason)]
