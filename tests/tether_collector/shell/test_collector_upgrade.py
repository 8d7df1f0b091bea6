"""The adapter is another version in mid-execution: nothing is numbered twice, nothing is told twice, and it is said."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support_execution import CLAIM, TARGET, launch
from tether import events as ev
from tether.events import Event
from tether.frames import Position
from tether_collector.core.adapters import ADAPTERS
from tether_collector.core.adapters import base as b
from tether_collector.core.adapters.scripted import Scripted
from tether_collector.core.execution import Execution
from tether_collector.core.inputs import Draft, OutputLine
from tether_collector.keeper import records
from tether_collector.keeper.spool import SpoolWriter
from tether_collector.pipeline import Base, Pipeline
from tether_collector.versions import Reading, begin, load, told_by_others

NONCE = "nonce-of-an-upgrade"


class Another(Scripted):
    """A version that says more of some lines and less of others: `words` events before each text, and no deltas."""

    def __init__(self, version: str, words: int, drop_deltas: bool) -> None:
        self.version = version
        self._words = words
        self._drop = drop_deltas

    def on_line(self, state: dict[str, Any], line: OutputLine) -> b.Reading:
        reading = super().on_line(state, line)
        drafts: list[Draft] = []
        for draft in reading.drafts:
            if draft.type == ev.TEXT_COMPLETED:
                drafts += [
                    Draft(ev.MODEL_REQUEST, {"state": "completed", "detail": f"{n}"}) for n in range(self._words)
                ]
            if draft.type != ev.TEXT_DELTA or not self._drop:
                drafts.append(draft)
        return b.Reading(drafts, reading.signals)


VERSIONS: Mapping[str, Scripted] = {
    "1": Scripted(),
    "2": Another("2", 2, False),
    "3": Another("3", 0, True),
    "4": Another("4", 1, True),
}


@contextmanager
def installed(version: str) -> Iterator[Scripted]:
    """The adapter that this collector was installed with."""
    with mock.patch.dict(ADAPTERS, {"scripted": VERSIONS[version]}):
        yield VERSIONS[version]


@dataclass
class Log:
    """What the log holds of the execution, event by event."""

    events: list[Event] = field(default_factory=list)
    places: list[Position] = field(default_factory=list)
    frame: list[Event] = field(default_factory=list)

    def store(self, frame: Sequence[tuple[Event, Position]]) -> None:
        """One frame, whole."""
        for event, place in frame:
            assert event.ordinal == len(self.events) + 1
            self.events.append(event)
            self.places.append(place)
        self.frame = [event for event, _ in frame]

    @property
    def base(self) -> Base:
        return Base(len(self.events), self.places[-1], len(self.events), 1, events=self.frame)


@dataclass
class Machine:
    """A keeper's folder and a log. Each session is one collector's life."""

    folder: Path
    log: Log = field(default_factory=Log)
    lines: int = 0

    def __post_init__(self) -> None:
        (self.folder / "spool").mkdir()
        self.spool = SpoolWriter(str(self.folder / "spool"), NONCE, 1 << 30, 1 << 30)
        started = Event(ordinal=1, at=1, type=ev.EXECUTION_STARTED, body=CLAIM)
        self.log.store([(started, Position(record=0, index=0))])

    def say(self, count: int) -> None:
        """The CLI prints; every third line is a text, of a number of its own."""
        for _ in range(count):
            self.lines += 1
            segment = f"s{self.lines // 3}"
            line = {"type": "delta", "segment": segment, "text": "x"}
            if self.lines % 3 == 0:
                line = {"type": "text", "segment": segment, "text": f"text {self.lines}"}
            self.spool.append(records.STDOUT, json.dumps(line).encode(), at_us=1000)
        assert self.spool.flush()

    def session(self, version: str, publish: int, *, planned: bool) -> str:
        """A collector of this version: tells at most `publish` events, then ends, told to go or by a crash. Returns how
        complete its snapshot was."""
        with installed(version) as adapter:
            claim = self.log.events[0]
            pipeline = Pipeline.rebuild(self.folder, launch(), adapter, claim, TARGET, self.log.base)
            left = publish
            while (progress := pipeline.step()).moved or progress.events:
                frame = progress.events if planned else progress.events[:left]
                left -= len(frame)
                if frame:
                    self.log.store(frame)
                    pipeline.told([event for event, _ in frame], frame[-1][0].ordinal, len(self.log.events), 1)
                if len(frame) < len(progress.events):
                    pipeline.close()
                    return "crashed"
            assert not pipeline.behind_log
            assert pipeline.fold.applied == len(self.log.events)
            if planned:
                assert pipeline.hand_over()
            pipeline.close()
            return "partial" if pipeline.fold.freeze().partial else "complete"

    def texts(self) -> list[str]:
        return [event.body["text"] for event in self.log.events if event.type == ev.TEXT_COMPLETED]


sessions = st.lists(
    st.tuples(st.sampled_from(sorted(VERSIONS)), st.integers(0, 9), st.integers(0, 14), st.booleans()), max_size=7
)


@settings(max_examples=150, deadline=None)
@given(sessions)
def test_whatever_versions_follow_each_other_each_line_is_told_once_and_numbered_once(
    plan: list[tuple[str, int, int, bool]],
) -> None:
    with tempfile.TemporaryDirectory() as root:
        machine = Machine(Path(root))
        for version, lines, publish, planned in plan:
            machine.say(lines)
            machine.session(version, publish, planned=planned)
        machine.say(3)
        machine.session("2", 10_000, planned=False)
        log = machine.log
        assert [event.ordinal for event in log.events] == list(range(1, len(log.events) + 1))
        unclear = sum(event.type == ev.GAP for event in log.events)
        expected = [f"text {number}" for number in range(3, machine.lines + 1, 3)]
        assert len(set(machine.texts())) == len(machine.texts()), "nothing twice"
        missing = [text for text in expected if text not in machine.texts()]
        assert machine.texts() == [text for text in expected if text not in missing]
        assert len(missing) <= unclear, "what may be missing is told"
        assert [place.record for place in log.places] == sorted(place.record for place in log.places)


def test_a_planned_upgrade_reads_nothing_again_and_stays_complete(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.say(9)
    assert machine.session("1", 10_000, planned=True) == "complete"
    machine.say(9)
    assert machine.session("2", 10_000, planned=True) == "complete"
    assert machine.session("3", 10_000, planned=True) == "complete"
    assert len(machine.texts()) == 6
    assert [event.type for event in machine.log.events].count(ev.MODEL_REQUEST) == 6, "of what version 2 read"


@pytest.mark.parametrize("version", ["2", "3"])
def test_an_upgrade_after_a_crash_goes_on_after_the_logs_end_and_its_snapshot_says_so(
    tmp_path: Path, version: str
) -> None:
    machine = Machine(tmp_path)
    machine.say(9)
    machine.session("1", 7, planned=False)
    told = len(machine.log.events)
    assert machine.session(version, 10_000, planned=False) == "partial"
    assert len(machine.log.events) > told
    assert machine.texts() == ["text 3", "text 6", "text 9"]


def test_the_same_version_after_a_crash_is_complete(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.say(9)
    machine.session("1", 7, planned=False)
    assert machine.session("1", 10_000, planned=False) == "complete"


def test_a_saved_state_that_the_spool_no_longer_reaches_is_not_used(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.say(6)
    machine.session("1", 10_000, planned=True)
    segment = tmp_path / "spool" / records.segment_name(1)
    segment.write_bytes(segment.read_bytes()[:-20])
    with installed("1") as adapter:
        pipeline = Pipeline.rebuild(tmp_path, launch(), adapter, machine.log.events[0], TARGET, machine.log.base)
        while pipeline.step().moved:
            pass
        assert pipeline.behind_log, "the loss is noticed"
        pipeline.close()


def test_a_half_read_line_is_whole_after_a_planned_restart(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.say(2)
    whole = json.dumps({"type": "text", "segment": "s9", "text": "long"}).encode()
    machine.spool.append(records.STDOUT, whole[:10], records.META_CONTINUES, at_us=1000)
    machine.spool.append(records.STDERR, b"between", at_us=1000)
    assert machine.spool.flush()
    machine.session("1", 10_000, planned=True)
    machine.spool.append(records.STDOUT, whole[10:], at_us=1000)
    assert machine.spool.flush()
    machine.session("1", 10_000, planned=False)
    assert machine.texts() == ["long"]
    assert [event.type for event in machine.log.events].count(ev.RAW) == 1


def test_an_adapters_own_state_is_migrated_where_its_shape_has_changed() -> None:
    class Migrating(Another):
        def migrate(self, state: dict[str, Any], from_version: str) -> dict[str, Any]:
            return {**state, "migrated": from_version}

    with installed("1") as adapter:
        saved = Execution.start(launch(), adapter, TARGET, CLAIM).dump()
    with mock.patch.dict(ADAPTERS, {"scripted": Migrating("2", 0, False)}):
        assert json.loads(Execution.load(saved).dump())["adapter_state"]["migrated"] == "1"
    with installed("2"):
        assert "migrated" not in json.loads(Execution.load(saved).dump())["adapter_state"]


def test_which_version_told_what_is_known_from_the_files_alone(tmp_path: Path) -> None:
    known = load(tmp_path, "1")
    assert known == [Reading("1", 0)] and not told_by_others(known, "1", 1, 50)
    known = begin(tmp_path, known, "2", 50)
    assert load(tmp_path, "1") == known == [Reading("1", 0), Reading("2", 50)]
    assert told_by_others(known, "2", 40, 80) and not told_by_others(known, "2", 50, 80)
    assert told_by_others(known, "1", 40, 80) and not told_by_others(known, "1", 40, 50)
    (tmp_path / "adapters.json").write_text("[{")
    assert told_by_others(load(tmp_path, "1"), "1", 0, 1), "what nobody knows is nobody's own"
