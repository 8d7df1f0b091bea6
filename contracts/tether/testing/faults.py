"""Faults of a memory bus: scripted per call, or drawn from a seed; what fired is written down.

A fault is decided when a call is made. `Faults.once(...)` and `Faults.next(...)` script it, `Faults.random(...)` draws
it; scripted rules come first. `fired` lists what happened, for a failing test's report.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tether.testing.matching import matches


class FaultKind(StrEnum):
    """What may happen to a call. The first three concern `publish` only, LOSE_LIVE what follows from one."""

    LOSE_MESSAGE = "lose_message"  # never stored, and the caller gets UndecidedError
    LOSE_ACK = "lose_ack"  # stored, and the caller gets UndecidedError
    LATE = "late"  # the caller gets UndecidedError, and the message is stored `delay_s` later
    LOSE_LIVE = "lose_live"  # stored and acked, no live copy
    UNAVAILABLE = "unavailable"  # BusUnavailableError, no effect
    DELAY = "delay"  # takes `delay_s` longer
    DISCONNECT = "disconnect"  # the connection breaks before the call had an effect
    DISCONNECT_AFTER = "disconnect_after"  # the connection breaks after the effect, before the answer


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    delay_s: float = 0.0


@dataclass(slots=True)
class _Rule:
    call: str
    subject: str
    fault: Fault
    skip: int
    times: int


@dataclass(frozen=True, slots=True)
class Fired:
    call: str
    subject: str
    fault: Fault


class Faults:
    """`call` is a method's name of `tether.ports.Bus` (`publish`, `last`, `read`, `request`, …)."""

    def __init__(self) -> None:
        self._rules: list[_Rule] = []
        self._random: random.Random | None = None
        self._rates: dict[str, dict[FaultKind, float]] = {}
        self._delay_max_s = 0.0
        self.fired: list[Fired] = []

    def add(
        self,
        call: str,
        kind: FaultKind,
        *,
        subject: str = ">",
        skip: int = 0,
        times: int = 1,
        delay_s: float = 0.0,
    ) -> None:
        """The next `times` calls on a matching subject, after `skip` that go well, get this fault."""
        self._rules.append(_Rule(call, subject, Fault(kind, delay_s), skip, times))

    def random(self, seed: int, rates: Mapping[str, Mapping[FaultKind, float]], *, delay_max_s: float = 0.0) -> None:
        """Draw faults: for each call its kinds' probabilities (their sum at most 1)."""
        self._random = random.Random(seed)
        self._rates = {call: dict(kinds) for call, kinds in rates.items()}
        self._delay_max_s = delay_max_s

    def clear(self) -> None:
        """From here on everything goes well."""
        self._rules.clear()
        self._random = None

    def draw(self, call: str, subject: str) -> Fault | None:
        """The fault of this call, if any; used by the bus."""
        fault = self._scripted(call, subject) or self._drawn(call)
        if fault is not None:
            self.fired.append(Fired(call, subject, fault))
        return fault

    def _scripted(self, call: str, subject: str) -> Fault | None:
        for rule in self._rules:
            if rule.call != call or not matches(rule.subject, subject):
                continue
            if rule.skip > 0:
                rule.skip -= 1
                continue
            rule.times -= 1
            if rule.times <= 0:
                self._rules.remove(rule)
            return rule.fault
        return None

    def _drawn(self, call: str) -> Fault | None:
        if self._random is None or call not in self._rates:
            return None
        point = self._random.random()
        for kind, rate in self._rates[call].items():
            if point < rate:
                return Fault(kind, self._random.random() * self._delay_max_s)
            point -= rate
        return None
