"""Spool → machine → events, and the fold of what the log has: one execution's state, made from disk at any time.

`rebuild` starts at the newest segment state that the log has overtaken and replays from there. The same spool always
makes the same ordinals, so what the log has is known by its last ordinal alone: those events only go into the fold.

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

from tether.events import GAP, Event
from tether.fold import Applied, ExecutionFold, ExecutionState
from tether.frames import Position
from tether.ids import ExecutionTarget
from tether.service import write_whole
from tether.snapshot import Watermark
from tether_collector.core import inputs as i
from tether_collector.core.adapters.base import Adapter, Launch
from tether_collector.core.execution import Execution
from tether_collector.spool_inputs import InputReader, begins_whole, states
from tether_collector.spool_reader import LatestState

STATE_VERSION: Final = 1
STATE_BYTES_MAX: Final = 1_400_000  # a rotation's request carries it in base64 below the keeper's limit of 2 MiB
FOLD_FILES_KEPT: Final = 3


@dataclass(frozen=True, slots=True)
class Base:
    """Where the log stands: its last ordinal, the spool position that it reaches, the frame's sequence and tag (0:
    not known). Ordinal 0: the subject is empty. `terminal`: the execution's end is there."""

    ordinal: int
    position: Position
    sequence: int = 0
    tag: int = 0
    terminal: bool = False


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
    ) -> None:
        self.machine = machine
        self.fold = fold
        self._folder = folder
        self._reader = reader
        self._base = base
        self._shift = shift
        self._start_ordinal = self.next_ordinal
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
        if saved is None:
            machine = Execution.start(launch, adapter, target, claim.body)
            fold = ExecutionFold()
            if base.ordinal:
                fold.apply(claim)
            return cls(folder, machine, fold, InputReader(folder), base, 0, 0)
        state, content = saved
        machine = Execution.load(json.dumps(content["machine"]).encode())
        fold, fold_bytes = _load_fold(folder, state.state_record)
        reader = InputReader(folder, after=state.first_record)
        return cls(folder, machine, fold, reader, base, int(content["shift"]), fold_bytes)

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
        return self.next_ordinal <= self._base.ordinal

    def lead(self, at: int) -> tuple[Event, Position] | None:
        """Where the log lost more than the spool can put back: one event that takes the place of what is missing."""
        first, last = self._base.ordinal + 1, self._start_ordinal - 1
        if last < first:
            return None
        body = {"reason": "durability_gap", "from": first, "to": last}
        event = Event(ordinal=first, last=last, at=at, type=GAP, body=body)
        return event, Position(record=max(0, self._reader.after), index=0)

    def gap_body(self) -> dict[str, Any]:
        """The note that closes `behind_log`."""
        return {"reason": "durability_gap", "from": self.next_ordinal, "to": self._base.ordinal}

    def step(self, told: int | None = None) -> Progress:
        """Read on, as far as one read goes. `told`: the last record that a living keeper told of."""
        read = self._reader.read(told)
        out: list[tuple[Event, Position]] = []
        for input_, record in read.inputs:
            self._renumber(input_)
            events = self.machine.apply(input_, record)
            if events:
                out += self._fresh(events)
        return Progress(out, read.size_bytes, read.moved, len(read.inputs))

    def _renumber(self, input_: i.Input) -> None:
        if isinstance(input_, i.Note) and input_.kind == GAP and input_.body.get("reason") == "durability_gap":
            to = input_.body.get("to")
            if isinstance(to, int) and to >= self.next_ordinal:
                self._shift = to + 1 - self.machine.next_ordinal

    def _fresh(self, events: Sequence[tuple[Event, Position]]) -> Sequence[tuple[Event, Position]]:
        """Those beyond the base, with their ordinals as the log counts them; the others are folded."""
        if self._shift:
            shift = self._shift
            events = [(Event.made(one.ordinal + shift, one.at, one.type, one.body), place) for one, place in events]
        if events[0][0].ordinal > self._base.ordinal:
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

    @property
    def caught_up(self) -> bool:
        """The state holds everything that the log has: before, the watermark would lie."""
        return 0 < self.fold.applied >= self._base.ordinal

    def watermark(self, tag: int | None = None) -> Watermark:
        return Watermark(ordinal=self.fold.applied, sequence=self._sequence, tag=self._tag if tag is None else tag)

    @property
    def tag_known(self) -> bool:
        return self._tag != 0

    def save(self, record: int) -> bytes | None:
        """The state after `record`, every event of which is stored; the fold goes to a file beside the spool first.
        None where the state is too large for a segment."""
        machine = json.loads(self.machine.dump())
        state = json.dumps(
            {"v": STATE_VERSION, "ordinal": self.next_ordinal - 1, "machine": machine, "shift": self._shift},
            separators=(",", ":"),
        ).encode()
        if len(state) > STATE_BYTES_MAX:
            return None
        data = self.fold.freeze().model_dump_json().encode()
        write_whole(_fold_path(self._folder, record), data)
        self.fold_bytes = len(data)
        for path in sorted(self._folder.glob("fold-*.json"))[:-FOLD_FILES_KEPT]:
            path.unlink(missing_ok=True)
        return state

    def close(self) -> None:
        self._reader.close()


def _choose(folder: Path, ordinal: int) -> tuple[LatestState, dict[str, Any]] | None:
    """The newest state of which the log has every event. Where there is none: nothing, so that the replay starts with
    the first record; where that is gone, the oldest state."""
    oldest = None
    for state in states(folder):
        content = json.loads(state.state)
        if content.get("v") != STATE_VERSION:
            continue
        oldest = (state, content)
        if content["ordinal"] <= ordinal:
            return oldest
    return None if begins_whole(folder) else oldest


def _fold_path(folder: Path, record: int) -> Path:
    return folder / f"fold-{record:012d}.json"


def _load_fold(folder: Path, record: int) -> tuple[ExecutionFold, int]:
    """The fold as it was; an empty one where its file is missing (then the snapshot is partial)."""
    try:
        data = _fold_path(folder, record).read_bytes()
    except FileNotFoundError:
        return ExecutionFold(), 0
    return ExecutionFold(ExecutionState.model_validate_json(data)), len(data)
