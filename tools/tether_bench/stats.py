"""Percentiles, medians over rounds, figures with their targets. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["at most", "at least"]


def percentile(samples: Sequence[float], share: float) -> float:
    """The `share` (0…1) percentile, interpolated between neighbours. Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples")
    if not 0 <= share <= 1:
        raise ValueError("share must lie between 0 and 1")
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def percentile_of_counts(counts: Mapping[int, int], share: float) -> float:
    """The value at the `share` (0…1) place of samples that are told as value → how many. Raises ValueError."""
    total = sum(counts.values())
    if not total:
        raise ValueError("no samples")
    if not 0 <= share <= 1:
        raise ValueError("share must lie between 0 and 1")
    place = share * (total - 1)
    seen = 0
    for value in sorted(counts):
        seen += counts[value]
        if seen > place:
            return float(value)
    return float(max(counts))


def median(samples: Sequence[float]) -> float:
    return percentile(samples, 0.5)


def blocks(samples: Sequence[tuple[float, float]], count: int) -> list[tuple[float, float]]:
    """The median (time, value) of each of `count` stretches of the same length that have a sample: what comes and goes
    within a stretch is no trend. Samples in order of time."""
    if not samples:
        raise ValueError("no samples")
    first, last = samples[0][0], samples[-1][0]
    stretches: list[list[tuple[float, float]]] = [[] for _ in range(count)]
    for at, value in samples:
        place = int((at - first) / (last - first) * count) if last > first else 0
        stretches[min(place, count - 1)].append((at, value))
    return [(median([at for at, _ in one]), median([value for _, value in one])) for one in stretches if one]


@dataclass(frozen=True, slots=True)
class Trend:
    """Units of the value per unit of time; `low` … `high`: the 95 % interval."""

    slope: float
    low: float
    high: float


def trend(points: Sequence[tuple[float, float]]) -> Trend:
    """Theil and Sen's slope: the median of the slopes between all pairs, so that a single jump does not bend it. Its
    interval is Sen's, from the variance of Kendall's statistic. Raises ValueError for less than two points."""
    slopes = sorted(
        (later - earlier) / (then - at)
        for index, (at, earlier) in enumerate(points)
        for then, later in points[index + 1 :]
        if then > at
    )
    if not slopes:
        raise ValueError("a trend needs two points in time")
    size = len(points)
    reach = 1.96 * math.sqrt(size * (size - 1) * (2 * size + 5) / 18)
    below = max(0, int((len(slopes) - reach) / 2))
    above = min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2))
    return Trend(median(slopes), slopes[below], slopes[above])


@dataclass(frozen=True, slots=True)
class Target:
    """`because` is shown where the limit is not a plain number."""

    direction: Direction
    limit: float
    because: str = ""

    def met(self, value: float) -> bool:
        return value <= self.limit if self.direction == "at most" else value >= self.limit

    def __str__(self) -> str:
        sign = "≤" if self.direction == "at most" else "≥"
        return f"{sign} {number(self.limit)}{f' ({self.because})' if self.because else ''}"


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured under one name: the value of each round, and of each baseline in the same rounds.

    `key` names a part of a figure that has several (`rss_mib`). `problem`: why it could not be measured.
    """

    name: str
    unit: str
    rounds: tuple[float, ...] = ()
    baselines: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    target: Target | None = None
    key: str = ""
    note: str = ""
    cpu_us: Mapping[str, float] = field(default_factory=dict)  # of each process for one event
    problem: str = ""

    @property
    def value(self) -> float | None:
        return median(self.rounds) if self.rounds else None

    def baseline(self, name: str) -> float:
        return median(self.baselines[name])

    def ratio(self, name: str) -> float | None:
        """Value to baseline; None where one of them is missing or nothing."""
        value, base = self.value, self.baseline(name)
        return value / base if value is not None and base else None

    @property
    def met(self) -> bool | None:
        """None without a target or a value."""
        return None if self.target is None or self.value is None else self.target.met(self.value)


@dataclass(slots=True)
class Losses:
    """What readers, log and projection missed or had twice, over the whole run; `examples` are bounded."""

    lost: int = 0
    duplicated: int = 0
    examples: list[str] = field(default_factory=list)

    def count(self, where: str, *, expected: int, got: Mapping[str, int] | None = None, distinct: int = 0) -> None:
        """`got`: token → how often it came. Or `distinct` alone, where only a number is known."""
        have = len(got) if got is not None else distinct
        doubled = sum(times - 1 for times in got.values()) if got is not None else max(0, distinct - expected)
        missing = max(0, expected - have)
        self.lost += missing
        self.duplicated += doubled
        if (missing or doubled) and len(self.examples) < 20:
            self.examples.append(f"{where}: {missing} of {expected} lost, {doubled} doubled")


def number(value: float) -> str:
    """Three significant digits or so, thousands separated."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}"
