"""The drain of a sandbox: everybody leaves, it is proven, published and kept, and only then is it said.

    Ordered ─▶ turn ──nobody may stay: told to leave, or gone──▶ leaving ──the grace is over──▶ killing
                 │                                                 │                              │
                 └───────────── nothing of any process is left ────┴──────────────────────────────┘
                                              ▼
                                         publishing ── everything they said is in the log
                                              ▼
                                         checkpoint ── CheckpointMade, ReferenceWritten(revision)
                                              │   └─── CheckpointFailed, ReferenceLost: `problem`, whatever was before
                                              ▼
                                         releasing ─── every held `execution.ended` is in the log
                                              ▼
                                            over: done, or failed where there is a `problem`

Each execution by itself:

    in a turn ──turn over──▶ leaves by its own ─────────────────────────────────────────────▶ completed
       │  │                                                                     SIGTERM obeyed ─▶ graceful
       │  └──waits for a person: at once──▶ told to leave (Leave) ──▶ ─────────┤
       └──DRAIN_TURN_SHARE of the grace is over──▶ told to leave ──────────────┘ killed ───────▶ forced
    a turn that was cut, and no checkpoint: checkpoint_failed

State is data: it is saved (journal, fsync) before what it wants is done, and `wants` is level-triggered, so a
collector that was killed at any point reads it and goes on: Leave has a control id of its own, CheckpointMade fixes the
reference before it is written under its operation id, Release of an execution that has ended does nothing. What kills
the collector again and again does not do so for ever: CheckpointBegun counts.

**What a drain cut stays cut** until its conversation starts again. A drain that begins after another one (SIGTERM's,
or one that failed) takes over what that one cut, as ended: its report, manifest and reference are the only ones that
who resumes will read. After a resume from the other one's checkpoint, which told the turns that go on by themselves,
only messages that nobody has read are taken over.

The phases only go forward. `Look` is what the shell sees of every execution; time is a part of it. SIGTERM of the
process is an order like another (`source`), with the grace of the settings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, assert_never

from pydantic import BaseModel, ConfigDict

from tether.checkpoint import UNHEARD_TOTAL_CHARS_MAX, CheckpointReference, DrainedExecution
from tether.errors import Code, Problem, problem
from tether.ids import Token
from tether.limits import DRAIN_TURN_SHARE
from tether.sandbox import DrainOrder, DrainReport

Phase = Literal["turn", "leaving", "killing", "publishing", "checkpoint", "releasing", "over"]
Source = Literal["verb", "signal"]
# turn: something is under way, or about to be; waiting: for a person; over: its response has ended, the process lives;
# gone: nothing of the process is left, which is recorded; ended: and its end is in the log.
Stage = Literal["turn", "waiting", "over", "gone", "ended"]
PHASES: Final[tuple[Phase, ...]] = ("turn", "leaving", "killing", "publishing", "checkpoint", "releasing", "over")
CHECKPOINT_ATTEMPTS_MAX: Final = 8  # begun and not ended, each time by the end of the collector: the next one fails
UNSAVED: Final = "the checkpoint; an older one is not touched"
_WHILE_LEAVING: Final = ("turn", "leaving", "killing")


@dataclass(frozen=True, slots=True)
class Seen:
    """An execution as it is now. `stored`: what it said is in the log, as far as that may be said before the end.
    `left`: what became of it, once nothing of it is left; None for a start that came to nothing."""

    execution: str
    stage: Stage
    stored: bool = False
    left: DrainedExecution | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """Every execution of the drain, at this time (unix ms)."""

    at: int
    seen: tuple[Seen, ...]


@dataclass(frozen=True, slots=True)
class CheckpointBegun:
    """It is about to be made: counted first, so that one that ends its collector is not made for ever."""


@dataclass(frozen=True, slots=True)
class CheckpointMade:
    """The manifest is on the volume, and what the order wants stored is stored. The reference as it will be written."""

    reference: CheckpointReference


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """`unsaved`: what was not kept, for people."""

    problem: Problem
    unsaved: str = ""


@dataclass(frozen=True, slots=True)
class ReferenceWritten:
    revision: int


@dataclass(frozen=True, slots=True)
class ReferenceLost:
    """Another holds the key, or it cannot be written."""

    problem: Problem


Input = Look | CheckpointBegun | CheckpointMade | CheckpointFailed | ReferenceWritten | ReferenceLost


@dataclass(frozen=True, slots=True)
class Leave:
    """Tell this execution to go: SIGTERM now, killed at `kill_at` (unix ms)."""

    execution: str
    kill_at: int


@dataclass(frozen=True, slots=True)
class MakeCheckpoint:
    pass


@dataclass(frozen=True, slots=True)
class WriteReference:
    reference: CheckpointReference


@dataclass(frozen=True, slots=True)
class Release:
    """Say the end of this execution, with the checkpoint's id or what went wrong."""

    execution: str
    checkpoint: str | None
    problem: Problem | None


Effect = Leave | MakeCheckpoint | WriteReference | Release


class Run(BaseModel):
    """One execution in the drain. `told`: it must leave."""

    model_config = ConfigDict(frozen=True)

    told: bool = False
    stage: Stage = "turn"
    stored: bool = False
    left: DrainedExecution | None = None

    @property
    def gone(self) -> bool:
        return self.stage in ("gone", "ended")


class Draining(BaseModel):
    """The whole state, as it is saved. `at`: when it began (unix ms). `reference`: made, and written if `revision`.
    `attempts`: how often the checkpoint was begun."""

    model_config = ConfigDict(frozen=True)

    order: DrainOrder
    source: Source = "verb"
    boot: Token
    at: int
    phase: Phase = "turn"
    runs: dict[str, Run] = {}
    reference: CheckpointReference | None = None
    revision: int = 0
    problem: Problem | None = None
    unsaved: str | None = None
    attempts: int = 0

    @property
    def drain(self) -> str:
        return self.order.drain

    @property
    def over(self) -> bool:
        return self.phase == "over"

    @property
    def failed(self) -> bool:
        return self.problem is not None

    @property
    def checkpoint(self) -> str:
        """The checkpoint's id: the same after a crash."""
        return "ckp_" + hashlib.sha256(f"{self.order.drain}\x1f{self.boot}".encode()).hexdigest()[:24]

    @property
    def share_at(self) -> int:
        return self.at + int(self.order.grace_s * DRAIN_TURN_SHARE * 1000)

    @property
    def kill_at(self) -> int:
        return self.at + int(self.order.grace_s * 1000)


def ordered(
    order: DrainOrder,
    source: Source,
    boot: str,
    at: int,
    executions: tuple[str, ...],
    carried: Mapping[str, DrainedExecution] | None = None,
) -> Draining:
    """The drain begins, with every execution that lives, and what was `carried` from the one before."""
    runs = {name: Run(told=True, stage="ended", stored=True, left=left) for name, left in (carried or {}).items()}
    return Draining(order=order, source=source, boot=boot, at=at, runs={**runs, **{name: Run() for name in executions}})


def carried(
    before: Draining | None, resumed: str | None, generations: Mapping[str, int]
) -> dict[str, DrainedExecution]:
    """Of the drain before, what is still cut. `resumed`: the checkpoint that this boot goes on from. `generations`:
    conversation → its last execution's."""
    found: dict[str, DrainedExecution] = {}
    if before is None or not before.over:
        return found
    for name, run in before.runs.items():
        left = run.left
        if left is None or not left.cut:
            continue
        if generations.get(left.target.conversation, 0) > left.target.execution_generation:
            continue  # its conversation has started since
        told = resumed == before.checkpoint and not before.failed
        if not told or (left.unheard and left.continuation == "wait"):
            found[name] = left
    return found


def decide(state: Draining, input_: Input) -> Draining:
    """What the input changes; an input of another phase changes nothing."""
    match input_:
        case Look():
            return _look(state, input_)
        case CheckpointBegun():
            return _begun(state)
        case CheckpointMade(reference):
            if state.phase != "checkpoint" or state.reference is not None:
                return state
            return state.model_copy(update={"reference": reference})
        case CheckpointFailed(problem, unsaved):
            if state.phase != "checkpoint" or state.reference is not None:
                return state
            return state.model_copy(update={"phase": "releasing", "problem": problem, "unsaved": unsaved or None})
        case ReferenceWritten(revision):
            if state.phase != "checkpoint" or state.reference is None:
                return state
            return state.model_copy(update={"phase": "releasing", "revision": revision})
        case ReferenceLost(problem):
            if state.phase != "checkpoint" or state.reference is None:
                return state
            return state.model_copy(update={"phase": "releasing", "problem": problem, "reference": None})
        case _:
            assert_never(input_)


def _begun(state: Draining) -> Draining:
    if state.phase != "checkpoint" or state.reference is not None:
        return state
    if state.attempts < CHECKPOINT_ATTEMPTS_MAX:
        return state.model_copy(update={"attempts": state.attempts + 1})
    detail = f"it was begun {state.attempts} times, and each time the collector ended over it; its log says why"
    return decide(state, CheckpointFailed(problem(Code.CHECKPOINT_FAILED, detail), UNSAVED))


def _look(state: Draining, look: Look) -> Draining:
    if state.over:
        return state
    runs = dict(state.runs)
    for seen in look.seen:
        if seen.execution in runs:
            runs[seen.execution] = _seen(state, runs[seen.execution], seen, look.at)
    return state.model_copy(update={"runs": runs, "phase": _phase(state, runs, look.at)})


def _seen(state: Draining, run: Run, seen: Seen, at: int) -> Run:
    if run.gone and seen.stage not in ("gone", "ended"):
        return run  # a new collector has not read so far yet
    if run.stage == "ended":
        return run
    told = run.told
    if state.phase in _WHILE_LEAVING and seen.stage in ("turn", "waiting", "over"):
        told = told or seen.stage == "waiting" or at >= state.share_at
    left = run.left
    if seen.stage in ("gone", "ended") and (left is None or state.phase in (*_WHILE_LEAVING, "publishing")):
        left = seen.left or left
    return Run(told=told, stage=seen.stage, stored=run.stored or seen.stored or seen.stage == "ended", left=left)


def _phase(state: Draining, runs: dict[str, Run], at: int) -> Phase:
    phase = state.phase
    if phase in _WHILE_LEAVING:
        living = [run for run in runs.values() if not run.gone]
        if not living:
            return "publishing"
        if at >= state.kill_at:
            return "killing"
        return _later(phase, "leaving") if all(run.told for run in living) else phase
    if phase == "publishing" and all(run.stored for run in runs.values()):
        return "checkpoint"
    if phase == "releasing" and all(run.stage == "ended" for run in runs.values()):
        return "over"
    return phase


def _later(one: Phase, other: Phase) -> Phase:
    return max(one, other, key=PHASES.index)


def wants(state: Draining) -> tuple[Effect, ...]:
    """What is to be done now; all of it may be done again."""
    match state.phase:
        case "turn" | "leaving" | "killing":
            return tuple(Leave(name, state.kill_at) for name, run in state.runs.items() if run.told and not run.gone)
        case "checkpoint":
            return (MakeCheckpoint(),) if state.reference is None else (WriteReference(state.reference),)
        case "releasing":
            checkpoint = None if state.failed else state.checkpoint
            return tuple(
                Release(name, checkpoint, state.problem) for name, run in state.runs.items() if run.stage != "ended"
            )
        case "publishing" | "over":
            return ()
        case _:
            assert_never(state.phase)


def next_look_at(state: Draining) -> int | None:
    """When time alone changes something (unix ms)."""
    if state.phase == "turn":
        return state.share_at
    return state.kill_at if state.phase == "leaving" else None


def executions_of(state: Draining) -> tuple[DrainedExecution, ...]:
    """What became of those of which nothing is left."""
    found = _bounded([run.left for run in state.runs.values() if run.left is not None])
    if state.problem is None:
        return tuple(found)
    detail = f"{state.problem.detail}"
    return tuple(
        one.model_copy(update={"outcome": "checkpoint_failed", "detail": f"{one.outcome}; {detail}"})
        if one.cut
        else one
        for one in found
    )


def _bounded(executions: list[DrainedExecution]) -> list[DrainedExecution]:
    """With no more of the messages' text than one record may hold."""
    room, found = UNHEARD_TOTAL_CHARS_MAX, []
    for one in executions:
        messages = []
        for message in one.unheard:
            text = message.text[:room]
            room -= len(text)
            messages.append(message.model_copy(update={"text": text, "cut": message.cut or text != message.text}))
        found.append(one.model_copy(update={"unheard": tuple(messages)}) if messages else one)
    return found


def is_clean(state: Draining) -> bool:
    """Nobody had to be killed."""
    return not any(run.left is not None and run.left.outcome == "forced" for run in state.runs.values())


def report_of(state: Draining) -> DrainReport:
    """How it stands, for whoever ordered it. `executions`: those that have left so far."""
    outcome: Literal["running", "done", "failed"] = "running"
    if state.over:
        outcome = "failed" if state.failed else "done"
    written = state.reference if state.revision else None
    return DrainReport(
        drain=state.drain,
        state=outcome,
        phase=state.phase,
        executions=executions_of(state),
        checkpoint=written,
        checkpoint_revision=state.revision,
        problem=state.problem,
        unsaved=state.unsaved,
    )
