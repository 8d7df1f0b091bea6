"""What the entry process does, as a pure machine: `decide(state, event, now_s)` gives the next state and effects.

    START ── files are there ──▶ RUNNING ── collector crashes ──▶ PAUSE ── back-off over ──▶ RUNNING
                                   │  │ └── ends with 0, nothing else lives ──▶ leaves with 0
                                   │  └──── SIGHUP ──▶ REPLACE ── it has ended ──▶ RUNNING, the next one
                                   ├─────── SIGTERM ─▶ DRAIN ── it has ended with 0 ──▶ SETTLE ──▶ leaves with 0
                                   └─────── SIGUSR1 ─▶ END ── it has ended ──▶ SETTLE ── something stays ──▶ REST

* A collector that crashes is started again, CLIs live on under their keepers. Only where it never comes up and nothing
  else lives is that given up, so that whoever runs the container sees why.
* SIGHUP hands over: the collector lets go of its keepers and the next one adopts them.
* SIGTERM is a drain: the collector performs it and ends with 0. One that dies in the middle is started again and goes
  on from its journal; it is told again in case it died before it had written the order down.
* SIGUSR1 ends without a drain: the collector hands over, keepers get SIGTERM (they end their CLI and record the proof).

Keepers are ended in REST alone. Whoever leaves anything behind there leaves with LEFT_BEHIND, since no collector has
told of it. The race: a keeper that is dismissed needs a moment to go, which SETTLE gives it; a collector that ended
with 0 and left keepers that stay was handed over by somebody else, and is followed by the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

EX_CONFIG: Final = 78  # of a collector that refuses its configuration: another start changes nothing
LEFT_BEHIND: Final = 75  # something was ended here that no collector has told of
KILLED: Final = 137

FILES_LOOK_S: Final = 0.05
FILES_WAIT_S: Final = 600.0  # for whoever started the container to hand the files over
BACKOFF_MIN_S: Final = 0.2
BACKOFF_MAX_S: Final = 30.0
STABLE_S: Final = 30.0  # a collector that lived so long starts the back-off afresh
CRASHES_MAX: Final = 5  # in a row, of a collector over which nothing lives
HANDOVER_S: Final = 20.0  # the collector's own shutdown budget fits in
SETTLE_S: Final = 3.0  # for dismissed keepers to go
TERM_AGAIN_S: Final = 3.0  # a collector that was just started has not heard of the drain
KEEPERS_S: Final = 12.0  # a keeper's own escalation against its CLI fits in
DRAIN_DEADLINE_S: Final = 3720.0  # beyond the longest grace of a drain; who stops the container has a bound of its own

Phase = Literal["start", "running", "pause", "replace", "drain", "settle", "end", "rest"]
Name = Literal["TERM", "HUP", "USR1"]


@dataclass(frozen=True, slots=True)
class Signal:
    """Asked of the entry process."""

    name: Name


@dataclass(frozen=True, slots=True)
class Exited:
    """The collector has ended: exit code, -signal where it was killed. `others`: something else lives."""

    code: int
    others: bool


@dataclass(frozen=True, slots=True)
class Look:
    """A timer is due, or a child other than the collector has ended. `ready`: the files are there."""

    others: bool
    ready: bool = True


Event = Signal | Exited | Look


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a collector."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Signal the collector."""

    name: Literal["TERM", "HUP", "KILL"]


@dataclass(frozen=True, slots=True)
class TellRest:
    """Signal every other child."""

    name: Literal["TERM", "KILL"]


@dataclass(frozen=True, slots=True)
class Leave:
    """The entry process ends; the kernel ends what is left."""

    code: int


Effect = Spawn | Tell | TellRest | Leave
Step = tuple["State", tuple[Effect, ...]]


@dataclass(frozen=True, slots=True)
class State:
    """`due_s`: when to look next, 0 for never. `since_s`: when the collector was started, or the files first waited
    for. `deadline_s`: of a drain. `draining`: no collector follows. `handing`: the collector that lives was told to
    hand over. `code`: to leave with."""

    phase: Phase = "start"
    due_s: float = 0.0
    since_s: float = 0.0
    deadline_s: float = 0.0
    crashes: int = 0
    handing: bool = False
    draining: bool = False
    code: int = 0


def begin(now_s: float) -> State:
    """The machine at the start; its first look is due at once."""
    return State(since_s=now_s, due_s=now_s)


def decide(state: State, event: Event, now_s: float) -> Step:
    """See the module's docstring."""
    match event:
        case Signal(name):
            return _signalled(state, name, now_s)
        case Exited(code, others):
            return _exited(state, code, others, now_s)
        case Look(others, ready):
            return _looked(state, others, ready, now_s)


# --- signals ---


def _signalled(state: State, name: Name, now_s: float) -> Step:
    match state.phase:
        case "start":
            return (state, ()) if name == "HUP" else (state, (Leave(0),))  # nothing was ever started
        case "rest":
            return state, ()
        case "settle":
            return _from_settle(state, name, now_s)
        case "pause":
            return _from_pause(state, name, now_s)
        case _:
            return _over_collector(state, name, now_s)


def _from_settle(state: State, name: Name, now_s: float) -> Step:
    if name == "USR1":
        return _rest(state, now_s)
    if state.draining:
        return state, ()
    return _from_pause(state, name, now_s)


def _from_pause(state: State, name: Name, now_s: float) -> Step:
    match name:
        case "HUP":
            return _spawn(replace(state, crashes=0), "running", now_s)
        case "TERM":
            return _spawn(_drain(state, now_s), "drain", now_s)
        case "USR1":
            return _rest(state, now_s)


def _over_collector(state: State, name: Name, now_s: float) -> Step:
    """While a collector lives."""
    if name == "USR1" and state.phase != "end":
        told = () if state.handing else (Tell("HUP"),)
        return replace(state, phase="end", handing=True, draining=False, due_s=now_s + HANDOVER_S), told
    if name == "TERM" and state.phase in ("running", "replace"):
        drained = replace(_drain(state, now_s), phase="drain")
        if state.handing:  # it is on its way out: the next one drains
            return replace(drained, due_s=now_s + HANDOVER_S), ()
        return replace(drained, due_s=drained.deadline_s), (Tell("TERM"),)
    if name == "HUP" and state.phase == "running":
        return replace(state, phase="replace", handing=True, due_s=now_s + HANDOVER_S), (Tell("HUP"),)
    return state, ()


def _drain(state: State, now_s: float) -> State:
    return replace(state, draining=True, crashes=0, deadline_s=now_s + DRAIN_DEADLINE_S)


# --- ends ---


def _exited(state: State, code: int, others: bool, now_s: float) -> Step:
    match state.phase:
        case "end":
            return _settle(replace(state, handing=False, draining=True), others, now_s)
        case "replace":
            return _spawn(replace(state, crashes=0), "running", now_s)
        case "drain":
            return _drained(state, code, others, now_s)
        case _:
            return _crashed(state, code, others, now_s)


def _drained(state: State, code: int, others: bool, now_s: float) -> Step:
    if state.handing:
        return _spawn(state, "drain", now_s)
    if code == 0:
        return _settle(state, others, now_s)
    if now_s >= state.deadline_s or state.crashes + 1 >= CRASHES_MAX:
        return _rest(replace(state, code=_exit_code(code)), now_s, others)
    return _spawn(replace(state, crashes=state.crashes + 1), "drain", now_s)


def _crashed(state: State, code: int, others: bool, now_s: float) -> Step:
    if code == 0:
        return _settle(state, others, now_s)
    crashes = 1 if now_s - state.since_s > STABLE_S else state.crashes + 1
    if not others and (code == EX_CONFIG or crashes >= CRASHES_MAX):
        return state, (Leave(_exit_code(code)),)
    pause_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(crashes - 1, 16))
    return replace(state, phase="pause", crashes=crashes, due_s=now_s + pause_s), ()


def _settle(state: State, others: bool, now_s: float) -> Step:
    if not others:
        return state, (Leave(0),)
    return replace(state, phase="settle", code=0, due_s=now_s + SETTLE_S), ()


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


# --- timers ---


def _looked(state: State, others: bool, ready: bool, now_s: float) -> Step:
    due = state.due_s > 0 and now_s >= state.due_s
    match state.phase:
        case "start":
            if ready:
                return _spawn(state, "running", now_s)
            if now_s - state.since_s > FILES_WAIT_S:
                return state, (Leave(LEFT_BEHIND),)
            return replace(state, due_s=now_s + FILES_LOOK_S), ()
        case "pause":
            return _spawn(state, "running", now_s) if due else (state, ())
        case "settle":
            return _settled(state, others, due, now_s)
        case "rest":
            if not others:
                return state, (Leave(state.code),)
            return (replace(state, due_s=0.0), (TellRest("KILL"), Leave(state.code))) if due else (state, ())
        case "replace" | "end":
            return (replace(state, due_s=0.0), (Tell("KILL"),)) if due else (state, ())
        case "drain":
            return _drain_due(state, now_s) if due else (state, ())
        case _:
            return state, ()


def _settled(state: State, others: bool, due: bool, now_s: float) -> Step:
    if not others:
        return state, (Leave(0),)
    if not due:
        return state, ()
    return _rest(state, now_s, others) if state.draining else _spawn(state, "running", now_s)


def _drain_due(state: State, now_s: float) -> Step:
    if state.handing or now_s >= state.deadline_s:
        return replace(state, due_s=0.0), (Tell("KILL"),)
    return replace(state, due_s=state.deadline_s), (Tell("TERM"),)


# --- small things ---


def _spawn(state: State, phase: Phase, now_s: float) -> Step:
    due_s = min(now_s + TERM_AGAIN_S, state.deadline_s) if phase == "drain" else 0.0
    return replace(state, phase=phase, since_s=now_s, due_s=due_s, handing=False), (Spawn(),)


def _rest(state: State, now_s: float, others: bool = True) -> Step:
    if not others:
        return state, (Leave(state.code),)
    ending = replace(state, phase="rest", code=state.code or LEFT_BEHIND, due_s=now_s + KEEPERS_S)
    return ending, (TellRest("TERM"),)
