"""Which executions' rows are to be repaired, and when it is tried. Pure; its shell is `tether_backend.recovery`.

    hole       ordinals were given up: neither the log nor a copy had them
    cold       the rows are of before a cold start (an older database, another stream): what they say may be too little
    unknown    the rows say that it runs, and its conversation's owner record has said for a while that it does not

    candidate ── due ──▶ attempt ──repaired, or nothing was wrong──▶ resolved
                   ▲        └──nobody has it for now──▶ later ──┐
                   └──────────────────────────────────────────────┘
    watched (somebody follows the conversation)   QUICK_S, then 30 s growing to 60 s
    cold (nobody does)                            a scan of its own: 5 s, doubled, at most 60 s

A candidate is one **full identity**: the target as the owner record has it, the collector's instance, and what is
missing. Each identity has its own back-off, and a changed one starts afresh: a collector that was replaced is asked at
once. An attempt ends when its candidate does: the last reader left (it is then tried as a cold one), another execution
owns the conversation, or the rows are whole. Nobody's failure ends an execution, and nothing is ever sent to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, assert_never

from tether.limits import (
    ATTACH_QUICK_ATTEMPTS,
    COLD_CANDIDATES_CONCURRENCY,
    RECONCILE_INTERVAL_MAX_S,
    RECONCILE_INTERVAL_S,
    TERMINAL_RETENTION_S,
)

Why = Literal["hole", "cold", "unknown"]
QUICK_S: Final = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)  # between the quick attempts
_GROWTH_S: Final = 10.0  # of the interval after them
_COLD_FIRST_S: Final = 5.0
UNKNOWN_GRACE_S: Final = (
    45.0  # rows lag behind the owner record for a moment at every end: longer than a scan's interval
)


@dataclass(frozen=True, slots=True)
class Identity:
    """`instance`: of the registered collector, empty where none is. `mark`: what is missing, by its first ordinal."""

    tenant: str
    workspace: str
    conversation: str
    execution: str
    response_generation: int = 0
    execution_generation: int = 0
    sandbox: str = ""
    boot: str = ""
    process_generation: int = 0
    instance: str = ""
    mark: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    identity: Identity
    why: Why
    watched: bool = False


@dataclass(frozen=True, slots=True)
class Scanned:
    """Everything that is a candidate now."""

    at_s: float
    candidates: Sequence[Candidate]


@dataclass(frozen=True, slots=True)
class Attempted:
    """An attempt is over. `settled`: repaired, or nothing to repair."""

    at_s: float
    execution: str
    number: int
    settled: bool


@dataclass(frozen=True, slots=True)
class Ticked:
    at_s: float


Input = Scanned | Attempted | Ticked


@dataclass(frozen=True, slots=True)
class Attempt:
    """Attach to this candidate; answer Attempted with the same number."""

    candidate: Candidate
    number: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """The candidate is none any more: end its attempt. Its answer is ignored."""

    execution: str
    number: int


Effect = Attempt | Abandon


def delay_s(watched: bool, attempts: int) -> float:
    """Wait after so many attempts that came to nothing."""
    if not watched:
        return min(RECONCILE_INTERVAL_MAX_S, _COLD_FIRST_S * 2.0 ** min(attempts - 1, 16))
    if attempts < ATTACH_QUICK_ATTEMPTS:
        return QUICK_S[attempts - 1]
    return min(RECONCILE_INTERVAL_MAX_S, RECONCILE_INTERVAL_S + _GROWTH_S * (attempts - ATTACH_QUICK_ATTEMPTS))


def candidate_of(
    identity: Identity, why: Why, *, owned: bool, ended: bool, partial: bool, since_ms: int, now_ms: int, watched: bool
) -> Candidate | None:
    """Whether rows are to be repaired. `owned`: the owner record names it; `ended`, `partial`: as the rows have it;
    `since_ms`: when it ended, else when it was last heard of. None: nothing is wrong, or it is over for too long."""
    if ended and not partial:
        return None  # an end follows everything: the rows are whole
    if why == "unknown" and (owned or ended):
        return None
    if not owned and now_ms - since_ms > TERMINAL_RETENTION_S * 1000:
        return None
    return Candidate(identity, why, watched)


@dataclass(slots=True)
class _Known:
    candidate: Candidate
    due_s: float
    attempts: int = 0
    number: int = 0  # of the attempt that runs, else 0


@dataclass(slots=True)
class Recovery:
    """One tenant's. Times are of one monotonic clock, in seconds."""

    concurrency_max: int = COLD_CANDIDATES_CONCURRENCY
    unknown_grace_s: float = UNKNOWN_GRACE_S
    _known: dict[str, _Known] = field(default_factory=dict)
    _numbers: int = 0
    _running: int = 0

    @property
    def watched(self) -> int:
        return sum(known.candidate.watched for known in self._known.values())

    @property
    def cold(self) -> int:
        return len(self._known) - self.watched

    def due_s(self) -> float | None:
        """When the next attempt is due; None where none waits, or none may begin."""
        if self._running >= self.concurrency_max:
            return None
        waiting = [one.due_s for one in self._known.values() if not one.number]
        return min(waiting, default=None)

    def apply(self, event: Input) -> list[Effect]:
        match event:
            case Scanned():
                return [*self._scanned(event), *self._begin(event.at_s)]
            case Attempted():
                self._attempted(event)
                return self._begin(event.at_s)
            case Ticked():
                return self._begin(event.at_s)
            case _:
                assert_never(event)

    def _scanned(self, event: Scanned) -> list[Effect]:
        found = {candidate.identity.execution: candidate for candidate in event.candidates}
        effects: list[Effect] = []
        for execution, known in list(self._known.items()):
            candidate = found.get(execution)
            if candidate is not None and candidate.identity == known.candidate.identity:
                continue
            effects += self._end(known)
            del self._known[execution]
        for execution, candidate in found.items():
            before = self._known.get(execution)
            if before is None:
                wait_s = self.unknown_grace_s if candidate.why == "unknown" else 0.0
                self._known[execution] = _Known(candidate, event.at_s + wait_s)
                continue
            if candidate.watched != before.candidate.watched and candidate.why != "unknown":
                # A reader came: it is tried at once. The last one left: what it waited for ends with it.
                effects += [] if candidate.watched else self._end(before)
                before.attempts = 0
                before.due_s = event.at_s + (0.0 if candidate.watched else _COLD_FIRST_S)
            before.candidate = candidate
        return effects

    def _end(self, known: _Known) -> list[Effect]:
        if not known.number:
            return []
        number, known.number = known.number, 0
        self._running -= 1
        return [Abandon(known.candidate.identity.execution, number)]

    def _attempted(self, event: Attempted) -> None:
        known = self._known.get(event.execution)
        if known is None or known.number != event.number:
            return  # of a candidate that was replaced
        self._running -= 1
        known.number = 0
        known.attempts += 1
        if event.settled:
            del self._known[event.execution]
        else:
            known.due_s = event.at_s + delay_s(known.candidate.watched, known.attempts)

    def _begin(self, at_s: float) -> list[Effect]:
        due = [one for one in self._known.values() if not one.number and one.due_s <= at_s]
        due.sort(key=lambda one: (not one.candidate.watched, one.due_s))
        effects: list[Effect] = []
        for one in due[: self.concurrency_max - self._running]:
            self._numbers += 1
            one.number = self._numbers
            effects.append(Attempt(one.candidate, one.number))
        self._running += len(effects)
        return effects
