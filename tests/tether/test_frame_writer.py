"""L13 and the writer's rules, against a model of one subject with everything that JetStream may do to it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support_events import logs
from tether import events as ev
from tether.events import Event
from tether.fold import Applied, ExecutionFold
from tether.frame_writer import (
    Acked,
    Fenced,
    FrameWriter,
    LastRead,
    Offered,
    OwnerRead,
    ReadLast,
    ReadOwner,
    Rebase,
    Reconnected,
    RecordGap,
    Send,
    Told,
    Unavailable,
    Undecided,
    WriterEffect,
    WriterInput,
    WrongLast,
    agrees,
)
from tether.frames import Frame, Position, cut, decode, encode
from tether.ports import StoredMessage
from tether.subjects import EventAddress

ADDRESS = EventAddress("t", "w", "c", "e")


@dataclass
class Subject:
    """One subject of a stream: compare-and-set, deduplication over ids even after a purge, R1's and R3's answers."""

    replicated: bool
    messages: list[StoredMessage] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    sequence: int = 0

    @property
    def last(self) -> StoredMessage | None:
        return self.messages[-1] if self.messages else None

    def publish(self, data: bytes, msg_id: str, expect_last: int) -> WriterInput:
        actual = self.last.sequence if self.last else 0
        if self.replicated and msg_id in self.ids:
            return Acked(self.ids[msg_id], duplicate=True)
        if actual != expect_last:
            return WrongLast(actual)
        if msg_id in self.ids:
            return Acked(self.ids[msg_id], duplicate=True)
        self.sequence += random.Random(self.sequence).randint(1, 3)  # other subjects' messages lie between
        self.messages.append(StoredMessage(ADDRESS.subject, self.sequence, self.sequence * 1_000, data))
        self.ids[msg_id] = self.sequence
        return Acked(self.sequence, duplicate=False)

    def events(self) -> list[Event]:
        out: list[Event] = []
        for message in self.messages:
            frame = decode(message.subject, message.data)
            assert isinstance(frame, Frame)
            out += frame.events
        return out


def position(event: Event) -> Position:
    return Position(record=event.ordinal, index=0)


class Shell:
    """Performs effects with seeded faults; a crash makes a new writer that knows nothing but its spool (`log`)."""

    def __init__(self, subject: Subject, log: list[Event], rng: random.Random, faults: float) -> None:
        self.subject = subject
        self.log = log
        self.rng = rng
        self.faults = faults
        self.late: list[Send] = []  # publishes that arrive after their writer has gone on
        self.offered = 0
        self.told = 0
        self.fenced: str | None = None
        self.gaps: list[RecordGap] = []
        self.start()

    def start(self) -> None:
        self.writer = FrameWriter(ADDRESS, frame_events_max=self.rng.randint(1, 8))
        self.offered = 0
        self.queue: list[WriterEffect] = list(self.writer.start())

    def feed(self, event: WriterInput) -> None:
        self.queue += self.writer.apply(event)

    def offer(self) -> None:
        count = self.rng.randint(1, 6)
        fresh = self.log[self.offered : self.offered + count]
        self.offered += len(fresh)
        if fresh:
            self.feed(Offered([(event, position(event)) for event in fresh]))

    def perform(self) -> None:
        if not self.queue:
            return
        match self.queue.pop(0):
            case ReadLast():
                lagging = self.rng.random() < self.faults and len(self.subject.messages) > 1
                self.feed(LastRead(self.subject.messages[-2] if lagging else self.subject.last))
            case Send() as send:
                self.send(send)
            case ReadOwner():
                self.feed(OwnerRead(still_ours=True))
            case Told() as told:
                self.told = told.ordinal
            case Rebase() as rebase:
                self.told = rebase.ordinal
                self.offered = rebase.ordinal
            case RecordGap() as gap:
                self.gaps.append(gap)
            case Fenced() as fenced:
                self.fenced = fenced.reason

    def send(self, send: Send) -> None:
        fault = self.rng.random() < self.faults
        kind = self.rng.randint(0, 3) if fault else -1
        if kind == 0:
            self.feed(Undecided())  # lost on the way in
        elif kind == 1:
            self.subject.publish(send.data, send.msg_id, send.expect_last)
            self.feed(Undecided())  # stored, the answer was lost
        elif kind == 2:
            self.feed(Unavailable())
        elif kind == 3:
            self.late.append(send)
            self.feed(Undecided())
        else:
            self.feed(self.subject.publish(send.data, send.msg_id, send.expect_last))

    def deliver_late(self) -> None:
        if self.late:
            send = self.late.pop(0)
            self.subject.publish(send.data, send.msg_id, send.expect_last)


@settings(max_examples=200)
@given(logs(max_steps=40, ended=True), st.integers(0, 2**32), st.booleans(), st.floats(0, 0.6))
def test_whatever_the_bus_answers_the_log_has_each_event_once_and_in_order(
    log: list[Event], seed: int, replicated: bool, faults: float
) -> None:
    rng = random.Random(seed)
    shell = Shell(Subject(replicated), log, rng, faults)
    for _ in range(4_000):
        roll = rng.random()
        if roll < 0.03:
            shell.start()  # killed, perhaps between storing a frame and its ack
        elif roll < 0.05:
            shell.feed(Reconnected())
        elif roll < 0.10:
            shell.deliver_late()
        elif roll < 0.40:
            shell.offer()
        else:
            shell.perform()
        assert shell.fenced is None
        if shell.told == len(log):
            break
    assert shell.told == len(log)
    expected, got = ExecutionFold(), ExecutionFold()
    for event in log:
        expected.apply(event)
    stored = shell.subject.events()
    assert stored[0].ordinal == 1
    for event, after in pairwise(stored):
        assert after.ordinal == event.end + 1
    for event in stored:
        assert got.apply(event) is Applied.APPLIED
    assert got.freeze() == expected.freeze()


@settings(max_examples=100)
@given(logs(max_steps=30, ended=True), st.integers(0, 2**32), st.booleans())
def test_a_tail_that_the_server_lost_is_put_back(log: list[Event], seed: int, replicated: bool) -> None:
    rng = random.Random(seed)
    subject = Subject(replicated)
    shell = Shell(subject, log, rng, 0.0)
    rolled_back = 0
    for _ in range(4_000):
        if rolled_back < 3 and len(subject.messages) > 2 and shell.told < len(log) - 1 and rng.random() < 0.1:
            rolled_back += 1
            kept = rng.randint(1, len(subject.messages) - 1)
            subject.messages = subject.messages[:kept]  # the store is an older copy: its ids are older, too
            subject.ids = {key: value for key, value in subject.ids.items() if value <= subject.messages[-1].sequence}
            subject.sequence = subject.messages[-1].sequence
            shell.feed(Reconnected())
        (shell.offer if rng.random() < 0.4 else shell.perform)()
        assert shell.fenced is None
        if shell.told == len(log) and not shell.queue:
            break
    ordinals = [(event.ordinal, event.end) for event in subject.events()]
    assert ordinals[0][0] == 1
    assert ordinals[-1][1] == len(log)
    assert all(after[0] == before[1] + 1 for before, after in pairwise(ordinals))


def some(count: int, start: int = 1) -> list[Event]:
    return [
        Event(ordinal=n, at=n, type=ev.TEXT_COMPLETED, body={"segment": f"s{n}", "text": str(n)})
        for n in range(start, start + count)
    ]


def offered(events: list[Event]) -> Offered:
    return Offered([(event, position(event)) for event in events])


def stored(events: list[Event], sequence: int) -> StoredMessage:
    frame, _, _ = cut([(event, position(event)) for event in events])
    return StoredMessage(ADDRESS.subject, sequence, sequence * 10, encode(frame))


def ready_writer(events: list[Event]) -> FrameWriter:
    """A writer that has told `events` in one frame at sequence 10."""
    writer = FrameWriter(ADDRESS)
    assert writer.start() == [ReadLast()]
    assert writer.apply(LastRead(None)) == []
    (send,) = writer.apply(offered(events))
    assert isinstance(send, Send)
    assert send.expect_last == 0
    told, *rest = writer.apply(Acked(10, duplicate=False))
    assert isinstance(told, Told)
    assert rest == []
    return writer


def test_one_frame_is_in_flight_and_what_arrives_meanwhile_goes_together() -> None:
    writer = ready_writer(some(1))
    (first,) = writer.apply(offered(some(1, 2)))
    assert writer.apply(offered(some(3, 3))) == []
    assert writer.apply(offered(some(2, 6))) == []
    effects = writer.apply(Acked(11, duplicate=False))
    assert isinstance(first, Send)
    told, second = effects
    assert isinstance(told, Told)
    assert isinstance(second, Send)
    frame = decode(ADDRESS.subject, second.data)
    assert isinstance(frame, Frame)
    assert (frame.first, frame.last, second.expect_last) == (3, 7, 11)


def test_a_duplicate_that_is_not_there_is_sent_with_another_id() -> None:
    """After a purge the server answers `duplicate` and stores nothing."""
    writer = ready_writer(some(1))
    (send,) = writer.apply(offered(some(1, 2)))
    assert writer.apply(Acked(5, duplicate=True)) == [ReadLast()]
    (again,) = writer.apply(LastRead(stored(some(1), 10)))
    assert isinstance(send, Send)
    assert isinstance(again, Send)
    assert again.data == send.data
    assert again.msg_id == send.msg_id + "/r1"


def test_a_lagging_follower_is_read_again_until_it_reaches_the_named_sequence() -> None:
    writer = ready_writer(some(1))
    (send,) = writer.apply(offered(some(1, 2)))
    assert isinstance(send, Send)
    assert writer.apply(WrongLast(12)) == [ReadLast()]
    (again,) = writer.apply(LastRead(stored(some(1), 10)))
    assert isinstance(again, ReadLast)
    mine = StoredMessage(ADDRESS.subject, 12, 120, send.data)
    (told,) = writer.apply(LastRead(mine))
    assert isinstance(told, Told)
    assert (told.ordinal, told.sequence) == (2, 12)


def test_another_writers_frame_fences_for_good() -> None:
    writer = ready_writer(some(1))
    writer.apply(offered(some(1, 2)))
    writer.apply(WrongLast(12))
    foreign = [Event(ordinal=2, at=2, type=ev.TEXT_COMPLETED, body={"segment": "x", "text": "not ours"})]
    (fenced,) = writer.apply(LastRead(stored(foreign, 12)))
    assert isinstance(fenced, Fenced)
    assert writer.apply(offered(some(1, 3))) == []
    assert writer.apply(Reconnected()) == []


@pytest.mark.parametrize(
    "data", [b"", b"\xff no frame", b'{"v":1,"first":2,"last":1,"pos":{"record":0,"index":0},"events":[]}']
)
@pytest.mark.parametrize("told", [False, True])
def test_what_is_no_frame_is_another_writers(data: bytes, told: bool) -> None:
    if told:
        writer = ready_writer(some(1))
        writer.apply(offered(some(1, 2)))
        writer.apply(WrongLast(12))
    else:
        writer = FrameWriter(ADDRESS)
        writer.start()
    (fenced,) = writer.apply(LastRead(StoredMessage(ADDRESS.subject, 12, 120, data)))
    assert isinstance(fenced, Fenced)
    assert writer.apply(offered(some(1, 3))) == []


@pytest.mark.parametrize("body", [{}, {"text": "01"}, {"text": 7, "offset": 0}, {"text": "01", "offset": "0"}])
def test_a_merged_delta_that_lies_agrees_with_nothing(body: dict[str, object]) -> None:
    ours = [
        Event(ordinal=n + 1, at=n, type=ev.TEXT_DELTA, body={"segment": "s", "text": f"{n}", "offset": n})
        for n in range(2)
    ]
    theirs = Event(ordinal=1, last=2, at=0, type=ev.TEXT_DELTA, body=dict(body))
    assert not agrees(Frame(first=1, last=2, pos=Position(record=1, index=0), events=[theirs]), ours)


def test_a_terminal_in_the_log_fences() -> None:
    end = [Event(ordinal=1, at=1, type=ev.EXECUTION_ENDED, body={"outcome": "never_started"})]
    writer = FrameWriter(ADDRESS)
    writer.start()
    told, *_ = writer.apply(LastRead(stored(end, 3)))
    assert isinstance(told, Told)
    assert told.terminal
    (fenced,) = writer.apply(offered(some(2, 2)))
    assert isinstance(fenced, Fenced)


@pytest.mark.parametrize("still_ours", [True, False])
def test_a_subject_found_empty_is_the_owner_records_to_decide(still_ours: bool) -> None:
    writer = ready_writer(some(3))
    writer.apply(offered(some(1, 4)))
    assert writer.apply(WrongLast(0)) == [ReadLast()]
    assert writer.apply(LastRead(None)) == [ReadOwner()]
    effects = writer.apply(OwnerRead(still_ours))
    if not still_ours:
        assert isinstance(effects[0], Fenced)
        return
    gap, send = effects
    assert gap == RecordGap("retention_gap", 1, 3)
    assert isinstance(send, Send)
    assert send.expect_last == 0
    frame = decode(ADDRESS.subject, send.data)
    assert isinstance(frame, Frame)
    assert frame.first == 4


def test_agreement_sees_through_merging_and_refuses_other_text() -> None:
    deltas = [
        Event(ordinal=n + 1, at=n, type=ev.TEXT_DELTA, body={"segment": "s", "text": f"{n}", "offset": n})
        for n in range(6)
    ]
    frame, _, _ = cut([(event, position(event)) for event in deltas])
    assert agrees(frame, deltas)
    assert agrees(frame, deltas[:3])
    other = [*deltas[:3], deltas[3].model_copy(update={"body": {"segment": "s", "text": "X", "offset": 3}})]
    assert not agrees(frame, other)
