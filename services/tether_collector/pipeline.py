"""Spool → machine → events, and the fold of what the log has: one execution's state, made from disk at any time.

`rebuild` starts at the newest segment state that the log has overtaken and replays from there. The same spool always
makes the same ordinals, so what the log has is known by its last ordinal alone: those events only go into the fold.

Another version of the adapter may say more or less of the same lines. What it reads for the first time is numbered
after the log's end, wherever it would count itself: the log names the record that it reaches and holds its last event,
so up to there nothing is told, and after it everything. The fold is then made of this version's
events for what another one told, and says so. A collector that is told to go saves its state at exactly the log's end
(`hand_over`), so that the next one has nothing to read again.

A spool that is shorter than the log (a power loss took its tail) would use ordinals again. So the gap is recorded as
an input, `to` being the log's last ordinal, and every event from there on is numbered after it: also by the next
replay, as the record says it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tether.cursor import tag_of
from tether.errors import InvalidError
from tether.events import DELTAS, EXECUTION_ENDED, GAP, Event
from tether.fold import Applied, ExecutionFold, ExecutionState
from tether.frames import Frame, Position, decode
from tether.ids import ExecutionTarget
from tether.ports import StoredMessage
from tether.service import write_whole
from tether.snapshot import Watermark
from tether_collector import redacting, versions
from tether_collector.core import inputs as i
from tether_collector.core.adapters.base import Adapter, Launch
from tether_collector.core.execution import Execution
from tether_collector.spool_inputs import InputReader, begins_whole, holds, states

STATE_VERSION: Final = 1
STATE_BYTES_MAX: Final = 1_400_000  # a rotation's request carries it in base64 below the keeper's limit of 2 MiB
FOLD_FILES_KEPT: Final = 3
_IDS: Final = ("segment", "tool", "interaction", "control", "turn")  # what an event is about, the most telling first
HANDOVER: Final = "handover.json"
HANDOVER_FOLD: Final = "handover-fold.json"


@dataclass(frozen=True, slots=True)
class Base:
    """Where the log stands: its last ordinal, the spool position that it reaches, the frame's sequence and tag (0:
    not known). Ordinal 0: the subject is empty. `terminal`: its end is there. `events`: of its last frame."""

    ordinal: int
    position: Position
    sequence: int = 0
    tag: int = 0
    terminal: bool = False
    events: Sequence[Event] = ()


def base_of(message: StoredMessage) -> Base | str:
    """Where a log stands whose last message is this one; why it cannot be told."""
    try:
        frame = decode(message.subject, message.data)
    except InvalidError as error:
        return f"the subject holds what is no frame: {error}"
    assert isinstance(frame, Frame)
    terminal = frame.events[-1].type == EXECUTION_ENDED
    return Base(frame.last, frame.pos, message.sequence, tag_of(message.stored_at_ns), terminal, frame.events)


@dataclass(frozen=True, slots=True)
class Progress:
    """Of one step: events that the log lacks, the bytes behind them, whether anything was read."""

    events: list[tuple[Event, Position]]
    size_bytes: int
    moved: bool
    inputs: int


class Pipeline:
    """Not shared between tasks: one steps it, others only look."""

    def __init__(
        self,
        folder: Path,
        machine: Execution,
        fold: ExecutionFold,
        reader: InputReader,
        base: Base,
        shift: int,
        fold_bytes: int,
        *,
        by_position: bool = False,
        untold: bool = False,
    ) -> None:
        self.machine = machine
        self.fold = fold
        self._folder = folder
        self._reader = reader
        self._base = base
        self._shift = shift
        self._start_ordinal = self.next_ordinal
        self._untold = untold  # the state was saved, and what is before it released, without having been told
        self._unclear = False  # of the log's last record it cannot be said what was told
        self._by_position = by_position  # another version told what is read now: ordinals say nothing of it
        self.fold_bytes = fold_bytes  # of the newest fold file: rotations keep a distance in proportion to it
        self._sequence = base.sequence
        self._tag = base.tag

    @classmethod
    def rebuild(
        cls, folder: Path, launch: Launch, adapter: Adapter, claim: Event, target: ExecutionTarget, base: Base
    ) -> Pipeline:
        """From the newest state that the log has overtaken, or from the claim.

        `target` has boot id and process generation.
        """
        saved = _choose(folder, base.ordinal)
        rules = redacting.load(folder)
        known = versions.load(folder, str(claim.body.get("adapter_version") or adapter.version))
        others = versions.told_by_others(known, adapter.version, 1 if saved is None else saved.ordinal, base.ordinal)
        versions.begin(folder, known, adapter.version, base.ordinal)
        if saved is None:
            machine = Execution.start(launch, adapter, target, claim.body, rules)
            fold = ExecutionFold()
            if base.ordinal:
                fold.apply(claim)
            return cls(folder, machine, fold, InputReader(folder), base, 0, 0, by_position=others)
        machine = Execution.load(json.dumps(saved.content["machine"]).encode(), rules)
        fold, fold_bytes = _load_fold(saved.fold)
        reader = InputReader(folder, after=saved.after)
        shift = int(saved.content["shift"])
        untold = saved.content.get("untold") is True
        return cls(folder, machine, fold, reader, base, shift, fold_bytes, by_position=others, untold=untold)

    @property
    def next_ordinal(self) -> int:
        return self.machine.next_ordinal + self._shift

    @property
    def after(self) -> int:
        """The last record that was read."""
        return self._reader.after

    @property
    def behind_log(self) -> bool:
        """At the spool's end: the log has ordinals that the spool no longer explains."""
        return self._by_position or self.next_ordinal <= self._base.ordinal

    def lead(self, at: int) -> tuple[Event, Position] | None:
        """Where the log lost more than the spool can put back: one event that takes the place of what is missing."""
        first, last = self._base.ordinal + 1, self._start_ordinal - 1
        if last < first:
            return None
        body = {"reason": "spool_evicted" if self._untold else "durability_gap", "from": first, "to": last}
        event = Event(ordinal=first, last=last, at=at, type=GAP, body=body)
        return event, Position(record=max(0, self._reader.after), index=0)

    def gap_body(self) -> dict[str, Any]:
        """The note that closes `behind_log`."""
        to = self._base.ordinal
        return {"reason": "durability_gap", "from": min(self.next_ordinal, to), "to": to}

    def step(self, told: int | None = None) -> Progress:
        """Read on, as far as one read goes. `told`: the last record that a living keeper told of."""
        read = self._reader.read(told)
        out: list[tuple[Event, Position]] = []
        for input_, record in read.inputs:
            if self._by_position and record > self._base.position.record:
                self._cross(self.machine.next_ordinal)
            self._renumber(input_)
            events = self.machine.apply(input_, record)
            if events:
                out += self._fresh(events)
        if self._by_position and self._reader.after >= self._base.position.record:
            self._cross(self.machine.next_ordinal)
        if self._unclear:
            self._unclear = False
            out.insert(0, self._say_unclear(read.inputs[0][0].at if read.inputs else 0))
        return Progress(out, read.size_bytes, read.moved, len(read.inputs))

    def _renumber(self, input_: i.Input) -> None:
        if isinstance(input_, i.Note) and input_.kind == GAP and input_.body.get("reason") == "durability_gap":
            to = input_.body.get("to")
            if isinstance(to, int) and self._by_position and to >= self._base.ordinal:
                self._cross(self.machine.next_ordinal)  # the position was in what is lost
            if isinstance(to, int) and to >= self.next_ordinal:
                self._shift = to + 1 - self.machine.next_ordinal

    def _cross(self, first: int) -> None:
        """The log's end is reached: `first`, as the machine counts, is the first ordinal that it lacks."""
        base = self._base.ordinal
        self._by_position = False
        self._shift = base + (2 if self._unclear else 1) - first  # the gap that is told then takes one
        self.fold.skip_to(base + 1, "durability_gap")
        detail = "told by another version of the adapter"
        self.fold.doubt(self._start_ordinal, base, "durability_gap", detail)

    def _say_unclear(self, at: int) -> tuple[Event, Position]:
        """A gap in front of what the log lacks; everything after it counts one more."""
        ordinal, end = self._base.ordinal + 1, self._base.position
        body = {"reason": "durability_gap", "detail": f"of spool record {end.record} an unknown part was told"}
        return Event(ordinal=ordinal, at=at, type=GAP, body=body), Position(end.record, end.index + 1)

    def _placed(self, events: Sequence[tuple[Event, Position]]) -> Sequence[tuple[Event, Position]]:
        """Those behind the position that the log reaches. They are one record's; where that is the log's last one, the
        places of another version's events say nothing, so what the log has of it is looked for among these. Where that
        cannot be said (a frame that begins within the record), none of them is told, and that is."""
        count, end = len(events), self._base.position
        if events[0][1].record == end.record:
            known = self._base.events[-(end.index + 1) :]
            if len(known) == end.index + 1:
                count = 0
            matches = [n for n, (event, _) in enumerate(events, 1) if any(_same(told, event) for told in known)]
            count = max(matches, default=count)
            if not matches and count:
                self._unclear = True
        fresh, shift = events[count:], self._shift
        told = [Event.made(one.ordinal + shift, one.at, one.type, one.body) for one, _ in events[:count]]
        self._fold([one for one in told if one.ordinal <= self._base.ordinal])
        if fresh:
            self._cross(fresh[0][0].ordinal)
        return fresh

    def _fresh(self, events: Sequence[tuple[Event, Position]]) -> Sequence[tuple[Event, Position]]:
        """Those beyond the base, with their ordinals as the log counts them; the others are folded."""
        if self._by_position:
            events = self._placed(events)
        if self._shift and events:
            shift = self._shift
            events = [(Event.made(one.ordinal + shift, one.at, one.type, one.body), place) for one, place in events]
        if not events or events[0][0].ordinal > self._base.ordinal:
            return events
        told = [event for event, _ in events if event.ordinal <= self._base.ordinal]
        self._fold(told)
        return events[len(told) :]

    def _fold(self, events: Sequence[Event]) -> None:
        for event in events:
            if self.fold.apply(event) is Applied.HOLE:
                self.fold.skip_to(event.ordinal, "durability_gap")
                self.fold.apply(event)

    def told(self, events: Sequence[Event], ordinal: int, sequence: int, tag: int) -> None:
        """A frame is stored: its events are part of the state now. Those up to the base are replayed instead."""
        if ordinal > self._base.ordinal:
            self._fold(events)
        self._sequence, self._tag = sequence, tag

    def replayed_to_its_end(self) -> bool:
        """Of an execution whose end is in the log: whether the spool explains it, so that it is ours."""
        while not self.machine.ended and self.step().moved:
            pass
        return self.machine.ended and not self.closed_by_another

    @property
    def closed_by_another(self) -> bool:
        """The log's end was written by who could not reach this spool."""
        newest = self._base.events[-1] if self._base.events else None
        return newest is not None and newest.type == EXECUTION_ENDED and newest.body.get("tail") == "unknown"

    @property
    def caught_up(self) -> bool:
        """The state holds everything that the log has: before, the watermark would lie."""
        return 0 < self.fold.applied >= self._base.ordinal

    def watermark(self, tag: int | None = None) -> Watermark:
        return Watermark(ordinal=self.fold.applied, sequence=self._sequence, tag=self._tag if tag is None else tag)

    @property
    def tag_known(self) -> bool:
        return self._tag != 0

    def save(self, record: int, *, untold: bool = False) -> bytes | None:
        """The state after `record`; the fold of what is stored goes to a file beside the spool first. `untold`: not
        every event before it is stored, and the spool gives them up.
        None where the state is too large for a segment."""
        content = {**self._content(), "untold": True} if untold else self._content()
        state = json.dumps(content, separators=(",", ":")).encode()
        if len(state) > STATE_BYTES_MAX:
            return None
        self._save_fold(_fold_path(self._folder, record))
        for path in sorted(self._folder.glob("fold-*.json"))[:-FOLD_FILES_KEPT]:
            path.unlink(missing_ok=True)
        return state

    def hand_over(self) -> bool:
        """Save the state as it is, where it is exactly what the log says; False where it is not."""
        if self.behind_log or self.fold.applied != self.next_ordinal - 1:
            return False
        self._save_fold(self._folder / HANDOVER_FOLD)
        content = {**self._content(), "after": self._reader.resume_after}
        write_whole(self._folder / HANDOVER, json.dumps(content, separators=(",", ":")).encode())
        return True

    def _content(self) -> dict[str, Any]:
        machine = json.loads(self.machine.dump())
        return {"v": STATE_VERSION, "ordinal": self.next_ordinal - 1, "machine": machine, "shift": self._shift}

    def _save_fold(self, path: Path) -> None:
        data = self.fold.freeze().model_dump_json().encode()
        write_whole(path, data)
        self.fold_bytes = len(data)

    def close(self) -> None:
        self._reader.close()


def _same(told: Event, event: Event) -> bool:
    """Whether the log's event is of the same thing, or ends with it where deltas were merged."""
    if told.type != event.type:
        return False
    if told.type not in DELTAS:
        named = next((key for key in _IDS if key in told.body and key in event.body), None)
        return told.body == event.body if named is None else bool(told.body[named] == event.body[named])
    end, own_end = (one.body["offset"] + len(one.body["text"]) for one in (told, event))
    same_text: bool = end == own_end and told.body["text"].endswith(event.body["text"])
    return same_text and all(told.body.get(key) == event.body.get(key) for key in ("segment", "tool"))


@dataclass(frozen=True, slots=True)
class _Saved:
    """A state, the record after which to read on, its fold's file."""

    content: dict[str, Any]
    after: int
    fold: Path

    @property
    def ordinal(self) -> int:
        return int(self.content["ordinal"])


def _choose(folder: Path, ordinal: int) -> _Saved | None:
    """The newest state of which the log has every event. Where there is none: nothing, so that the replay starts with
    the first record; where that is gone, the oldest state."""
    oldest, handed = None, _handed_over(folder)
    if handed is not None and handed.ordinal > ordinal:
        handed = None
    for state in states(folder):
        content = json.loads(state.state)
        if content.get("v") != STATE_VERSION:
            continue
        oldest = _Saved(content, state.first_record, _fold_path(folder, state.state_record))
        if oldest.ordinal <= ordinal:
            return handed if handed is not None and handed.after > oldest.after else oldest
    return handed if handed is not None or begins_whole(folder) else oldest


def _handed_over(folder: Path) -> _Saved | None:
    """What the collector before saved when it was told to go; None where the spool is shorter than that by now."""
    try:
        content = json.loads((folder / HANDOVER).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return None  # the volume's damage: the spool has everything
    if content.get("v") != STATE_VERSION:
        return None
    after, last = int(content["after"]), int(content["machine"]["facts"]["last_record"])
    if not all(holds(folder, record) for record in {after, last} if record):
        return None
    return _Saved(content, after, folder / HANDOVER_FOLD)


def _fold_path(folder: Path, record: int) -> Path:
    return folder / f"fold-{record:012d}.json"


def _load_fold(path: Path) -> tuple[ExecutionFold, int]:
    """The fold as it was; an empty one where its file is missing (then the snapshot is partial)."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ExecutionFold(), 0
    return ExecutionFold(ExecutionState.model_validate_json(data)), len(data)
