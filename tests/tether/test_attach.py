"""L3, L4, L8, L9, L11 and holes: the attach machine against a model of a stream, live copies, a lagging follower."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tether import events as ev
from tether.attach import (
    AskEnd,
    AskSnapshot,
    Attach,
    AttachEffect,
    AttachInput,
    Barriered,
    BatchRead,
    CaughtUp,
    Deliver,
    DeliverGap,
    DeliverSnapshot,
    EndKnown,
    LiveArrived,
    Overflowed,
    PositionChanged,
    Probe,
    Probed,
    Read,
    Silent,
    SnapshotRead,
    Subscribe,
)
from tether.cursor import Cursor, tag_of
from tether.events import ConversationEvent, Event
from tether.fold import ExecutionFold
from tether.frames import Frame, Position, encode, encode_event
from tether.ids import ExecutionTarget
from tether.ports import LiveMessage, StoredMessage
from tether.snapshot import Snapshot, Watermark, take
from tether.subjects import EventAddress

TARGET = ExecutionTarget(
    tenant="t",
    workspace="w",
    conversation="c",
    response="r",
    response_generation=1,
    execution="e1",
    execution_generation=1,
    sandbox="s",
)


def address(execution: str) -> EventAddress:
    return EventAddress("t", "w", "c", execution)


@dataclass
class Stream:
    """A tenant's stream: messages of one conversation among others', and its live copies."""

    messages: list[StoredMessage] = field(default_factory=list)
    sequence: int = 0
    ordinals: dict[str, int] = field(default_factory=dict)
    notes: int = 0
    epoch: int = 0

    def publish(self, execution: str, count: int) -> StoredMessage:
        first = self.ordinals.get(execution, 0) + 1
        events = [
            Event(ordinal=n, at=n, type=ev.TEXT_COMPLETED, body={"segment": f"s{n}", "text": f"{execution}-{n}"})
            for n in range(first, first + count)
        ]
        self.ordinals[execution] = first + count - 1
        frame = Frame(first=first, last=first + count - 1, pos=Position(record=0, index=0), events=events)
        return self._store(execution, encode(frame))

    def note(self, execution: str | None = None) -> StoredMessage:
        """A conversation-level event; with `execution`, the `response.created` that goes before its first frame."""
        self.notes += 1
        kind = ev.RECOVERY if execution is None else ev.RESPONSE_CREATED
        event = ConversationEvent(id=f"n{self.notes}", generation=1, at=1, type=kind, body={"execution": execution})
        return self._store("_", encode_event(event))

    def _store(self, execution: str, data: bytes) -> StoredMessage:
        self.sequence += 1 + self.sequence % 3
        stored = StoredMessage(address(execution).subject, self.sequence, self.sequence * 1_000 + self.epoch, data)
        self.messages.append(stored)
        return stored

    def after(self, sequence: int, limit: int) -> list[StoredMessage]:
        return [message for message in self.messages if message.sequence > sequence][:limit]


@dataclass
class Reader:
    """What a reader got, by execution; fails on anything doubled or out of order."""

    got: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cursor: Cursor = field(default_factory=Cursor.beginning)
    replays: list[tuple[int, bool]] = field(default_factory=list)
    gaps: list[DeliverGap] = field(default_factory=list)
    snapshots: list[DeliverSnapshot] = field(default_factory=list)
    changed: int = 0
    caught_up: int = 0

    def perform(self, effect: AttachEffect) -> None:
        match effect:
            case Deliver(where, events, cursor, replay):
                self.cursor = cursor
                self.replays.append((cursor.sequence, replay))
                if isinstance(events, ConversationEvent):
                    assert events.id not in self.notes
                    self.notes.append(events.id)
                    return
                mine = self.got.setdefault(where.execution, [])
                for event in events:
                    assert not mine or event.ordinal == mine[-1] + 1
                    mine.append(event.ordinal)
            case DeliverGap():
                self.gaps.append(effect)
                self.got.setdefault(effect.address.execution, [])[:] = [effect.last]
            case DeliverSnapshot():
                self.snapshots.append(effect)
                self.got.setdefault(effect.address.execution, [])[:] = [effect.snapshot.watermark.ordinal]
            case PositionChanged():
                self.changed += 1
                self.got.clear()
                self.notes.clear()
            case CaughtUp():
                self.caught_up += 1
            case _:
                raise AssertionError(effect)


class Shell:
    """Performs effects one at a time; `publish` may run between any two."""

    def __init__(self, stream: Stream, reader: Reader, *, token: int = 1, batch: int = 3, seed: int = 0) -> None:
        self.stream = stream
        self.reader = reader
        self.rng = random.Random(seed)
        self.batch = batch
        self.subscribed = False
        self.lose_live = 0.0
        self.lag = 0.0
        self.snapshot: Snapshot | None = None
        self.machine = Attach(token, cursor=reader.cursor)
        self.effects: deque[AttachEffect] = deque(self.machine.begin())

    def feed(self, event: AttachInput) -> None:
        self.effects.extend(self.machine.apply(event))

    def published(self, message: StoredMessage) -> None:
        if self.subscribed and self.rng.random() >= self.lose_live:
            before = [m.sequence for m in self.stream.messages if m.subject == message.subject]
            previous = before[-2] if len(before) > 1 else 0
            copy = LiveMessage(message.subject, message.sequence, previous, message.data, message.stored_at_ns)
            self.feed(LiveArrived(self.machine.token, copy))

    def step(self) -> bool:
        """Perform the next effect; False where there is none."""
        if not self.effects:
            return False
        effect = self.effects.popleft()
        match effect:
            case Subscribe(token):
                self.subscribed = True
                self.feed(Barriered(token))
            case AskEnd(token, sequence):
                there = [message for message in self.stream.messages if message.sequence == sequence]
                self.feed(EndKnown(token, self.stream.sequence, there[0] if there else None))
            case Read(token, turn, after):
                batch = self.stream.after(after, self.batch)
                if batch and self.rng.random() < self.lag:
                    batch = batch[: self.rng.randint(0, len(batch))]
                self.feed(BatchRead(token, turn, batch))
            case Probe(token, turn, after, execution):
                more = [
                    message
                    for message in self.stream.after(after, 1_000_000)
                    if execution is None or message.subject == address(execution).subject
                ]
                self.feed(Probed(token, turn, after, bool(more)))
            case AskSnapshot(token, where):
                self.feed(SnapshotRead(token, where.execution, self.snapshot))
            case _:
                self.reader.perform(effect)
        return True

    def run(self) -> None:
        for _ in range(10_000):
            if not self.step():
                return
        raise AssertionError("the attach does not come to rest")


def everything(stream: Stream) -> dict[str, list[int]]:
    return {execution: list(range(1, last + 1)) for execution, last in stream.ordinals.items()}


@pytest.mark.parametrize("boundary", range(12))
@pytest.mark.parametrize("cursor_at", [0, 2])
def test_an_event_published_at_any_step_boundary_is_applied_once(boundary: int, cursor_at: int) -> None:
    stream = Stream()
    stored = [stream.publish("e1", 2), stream.note(), stream.publish("e2", 1), stream.publish("e1", 3)]
    reader = Reader()
    if cursor_at:
        reader.cursor = Cursor.after(stored[cursor_at].sequence, stored[cursor_at].stored_at_ns)
        reader.got = {"e1": [1, 2], "e2": [1]}
        reader.notes = ["n1"]
    shell = Shell(stream, reader, batch=2)
    for _ in range(boundary):
        shell.step()
    shell.published(stream.publish("e1", 1))
    shell.published(stream.note())
    shell.run()
    assert reader.got == everything(stream)
    assert reader.notes == ["n1", "n2"]
    assert reader.caught_up == 1


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([0.0, 0.2, 0.5]), st.floats(0, 0.8))
def test_whatever_is_lost_live_or_lags_each_event_arrives_once_and_in_order(
    seed: int, batch: int, lose: float, lag: float
) -> None:
    rng = random.Random(seed)
    stream, reader = Stream(), Reader()
    shell = Shell(stream, reader, batch=batch, seed=seed)
    shell.lose_live, shell.lag = lose, lag
    for _ in range(rng.randint(20, 200)):
        roll = rng.random()
        if roll < 0.25:
            execution = rng.choice(["e1", "e2"])
            if rng.random() < 0.3:
                shell.published(stream.note())
            else:
                if execution not in stream.ordinals:
                    shell.published(stream.note(execution))
                shell.published(stream.publish(execution, 2))
        elif roll < 0.28:
            shell.feed(Overflowed(1))
        elif roll < 0.34:
            shell.feed(Silent(1))
        elif roll < 0.38 and not lose:  # the connection dies; the reader comes back with its cursor alone
            for _ in range(rng.randint(0, 3)):
                shell.step()
            shell = Shell(stream, reader, token=shell.machine.token, batch=batch, seed=seed + 1)
            shell.lose_live, shell.lag = lose, lag
        else:
            shell.step()
    shell.run()
    shell.feed(Silent(1))  # the silence probe finds what live copies did not bring
    shell.run()
    assert reader.got == everything(stream)
    assert reader.notes == [f"n{n}" for n in range(1, stream.notes + 1)]
    assert not reader.gaps


def test_a_reader_reconnecting_a_hundred_times_sees_each_event_once() -> None:
    stream, reader = Stream(), Reader()
    for _ in range(100):
        shell = Shell(stream, reader)
        for number in range(25):
            shell.published(stream.publish("e1", 1))
            if number % 2:
                shell.step()
        shell.published(stream.publish("e2", 25))
        for _ in range(5):
            shell.step()
    Shell(stream, reader).run()
    assert reader.got == everything(stream)
    assert sum(stream.ordinals.values()) == 5_000


def test_history_is_marked_as_replay_until_the_watermark() -> None:
    stream, reader = Stream(), Reader()
    stream.publish("e1", 2)
    last = stream.publish("e1", 2).sequence
    shell = Shell(stream, reader)
    shell.run()
    shell.published(stream.publish("e1", 1))
    shell.run()
    assert [replay for _, replay in reader.replays] == [sequence <= last for sequence, _ in reader.replays]
    assert [replay for _, replay in reader.replays] == [True, True, False]


@pytest.mark.parametrize("rolled_back", [False, True])
def test_a_recreated_or_rolled_back_stream_is_no_empty_success(rolled_back: bool) -> None:
    old = Stream()
    for _ in range(5):
        old.publish("e1", 1)
    reader = Reader(cursor=Cursor.after(old.sequence, old.messages[-1].stored_at_ns), got={"e1": [1, 2, 3, 4, 5]})
    new = Stream(epoch=7)
    for _ in range(2 if rolled_back else 6):
        new.publish("e1", 1)
    Shell(new, reader).run()
    assert reader.changed == 1
    assert reader.got == everything(new)


def evicted(stream: Stream, count: int) -> None:
    stream.messages = stream.messages[count:]


def test_an_evicted_beginning_without_a_snapshot_is_one_gap() -> None:
    stream, reader = Stream(), Reader()
    for _ in range(4):
        stream.publish("e1", 2)
    evicted(stream, 2)
    Shell(stream, reader).run()
    assert [(gap.first, gap.last) for gap in reader.gaps] == [(1, 4)]
    assert reader.got == {"e1": [4, 5, 6, 7, 8]}


@pytest.mark.parametrize(("watermark", "gaps"), [(4, []), (6, []), (3, [(4, 4)]), (0, [(1, 4)])])
def test_a_snapshot_stands_in_for_what_is_evicted_and_only_the_rest_is_a_gap(
    watermark: int, gaps: list[tuple[int, int]]
) -> None:
    stream, reader = Stream(), Reader()
    for _ in range(4):
        stream.publish("e1", 2)
    evicted(stream, 2)
    shell = Shell(stream, reader)
    state = ExecutionFold().freeze().model_copy(update={"applied": watermark})
    shell.snapshot = take(TARGET, state, Watermark(ordinal=watermark, sequence=1, tag=0), captured_at=1)
    shell.run()
    assert [(gap.first, gap.last) for gap in reader.gaps] == gaps
    assert len(reader.snapshots) == (1 if watermark else 0)
    assert reader.got["e1"][-1] == 8


def test_eviction_that_took_only_what_the_reader_had_is_no_gap() -> None:
    stream = Stream()
    stored = [stream.publish("e1", 2) for _ in range(4)]
    reader = Reader(cursor=Cursor.after(stored[1].sequence, stored[1].stored_at_ns), got={"e1": [1, 2, 3, 4]})
    evicted(stream, 2)
    Shell(stream, reader).run()
    assert reader.got == everything(stream)
    assert not reader.gaps


def test_a_cursor_inside_a_frame_gets_the_rest_of_that_frame() -> None:
    stream = Stream()
    message = stream.publish("e1", 5)
    cursor = Cursor(message.sequence, 2, tag_of(message.stored_at_ns))
    reader = Reader(cursor=cursor, got={"e1": [1, 2]})
    Shell(stream, reader).run()
    assert reader.got == everything(stream)


def test_inputs_of_a_replaced_attach_change_nothing() -> None:
    stream, reader = Stream(), Reader()
    stream.publish("e1", 3)
    shell = Shell(stream, reader, token=2)
    stale: list[AttachInput] = [
        Barriered(1),
        EndKnown(1, 99, None),
        BatchRead(1, 1, stream.messages),
        LiveArrived(1, LiveMessage(address("e1").subject, 1, 0, stream.messages[0].data)),
        Overflowed(1),
        SnapshotRead(1, "e1", None),
        Silent(1),
        Probed(1, 1, 0, True),
    ]
    while shell.effects:
        for event in stale:
            assert shell.machine.apply(event) == []
        shell.step()
    assert reader.got == everything(stream)


@pytest.mark.parametrize("replaced_after", range(14))
def test_an_attach_that_is_replaced_at_any_of_its_steps_changes_nothing_more(replaced_after: int) -> None:
    """L11: what it was waiting for still comes, to deaf ears; the newer one begins from what was given, and the old
    cursor is replaced only by what was."""
    stream, reader = Stream(), Reader()
    stream.publish("e1", 3)
    stream.publish("e1", 2)
    stream.note()
    stream.publish("e2", 4)
    older = Shell(stream, reader, token=1, batch=1)
    for _ in range(replaced_after):
        older.step()
    given = reader.cursor
    newer = Shell(stream, reader, token=2, batch=2)
    newer.machine.applied = {execution: ordinals[-1] for execution, ordinals in reader.got.items()}
    late: list[AttachInput] = [
        Barriered(1),
        EndKnown(1, stream.sequence, None),
        *(BatchRead(1, turn, stream.messages) for turn in range(4)),
        Overflowed(1),
        SnapshotRead(1, "e1", None),
        Silent(1),
        Probed(1, 1, 0, True),
    ]
    for event in late:
        assert newer.machine.apply(event) == []
    assert reader.cursor == given and newer.machine.cursor == given
    while newer.step():
        for event in late:
            assert newer.machine.apply(event) == []
    assert reader.got == everything(stream)


def test_a_buffer_over_its_bound_is_thrown_away_and_the_log_read_again() -> None:
    stream, reader = Stream(), Reader()
    shell = Shell(stream, reader)
    shell.machine.buffer_bytes_max = 400
    shell.step()
    for _ in range(20):
        shell.published(stream.publish("e1", 1))
    assert shell.machine._buffered_bytes <= 400
    shell.run()
    assert reader.got == everything(stream)


@pytest.mark.parametrize(
    "rubbish", [b"", b"\xff no frame", b'{"v":2}', b'{"v":1,"first":3,"last":2,"pos":{},"events":[]}']
)
@pytest.mark.parametrize("live", [False, True])
def test_a_message_that_nobody_can_read_ends_no_reader_and_shows_as_a_gap(rubbish: bytes, live: bool) -> None:
    stream, reader = Stream(), Reader()
    shell = Shell(stream, reader)
    if live:
        shell.run()
    shell.published(stream.publish("e1", 2))
    shell.published(stream._store("e1", rubbish))  # in the place of ordinals 3 and 4
    stream.ordinals["e1"] += 2
    shell.published(stream._store("_", rubbish))
    shell.published(stream.publish("e1", 2))
    shell.published(stream._store("e1", rubbish))  # in nothing's place
    shell.published(stream.publish("e1", 1))
    shell.published(stream.note())
    shell.run()
    assert reader.got == {"e1": [4, 5, 6, 7]}
    assert [(gap.first, gap.last) for gap in reader.gaps] == [(3, 4)]
    assert reader.notes == ["n1"]
    assert reader.cursor.sequence == stream.sequence
    assert shell.machine.live


def test_a_lost_copy_before_one_that_nobody_can_read_is_fetched() -> None:
    stream, reader = Stream(), Reader()
    shell = Shell(stream, reader)
    shell.published(stream.publish("e1", 2))
    shell.run()
    shell.lose_live = 1.0
    shell.published(stream.publish("e1", 3))
    shell.lose_live = 0.0
    shell.published(stream._store("e1", b"rubbish"))
    shell.run()
    assert reader.got == everything(stream)
    assert not reader.gaps
