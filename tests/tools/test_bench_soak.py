"""`tether_bench.soak`: when memory counts as flat."""

from __future__ import annotations

import random

import pytest

from tether_bench.soak import BLOCKS, FLOOR_MIB, figure_of
from tether_bench.stats import blocks, trend


def _samples(growth_mib_10min: float, noise_mib: float, seconds: int = 600) -> list[tuple[float, float]]:
    chance = random.Random(7)
    return [(float(at), 50 + growth_mib_10min * at / 600 + chance.gauss(0, noise_mib)) for at in range(seconds)]


def test_a_line_has_its_slope_and_no_width() -> None:
    found = trend([(float(at), 3.0 + 2.0 * at) for at in range(10)])
    assert (found.slope, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    with pytest.raises(ValueError, match="two points"):
        trend([(1.0, 1.0)])


def test_a_single_jump_does_not_bend_a_trend() -> None:
    values = [(float(at), 200.0 if at == 10 else 50.0) for at in range(20)]
    assert trend(values).slope == 0.0


def test_stretches_have_the_median_of_what_lies_in_them() -> None:
    found = blocks([(float(at), float(at % 10)) for at in range(100)], 10)
    assert len(found) == 10
    assert {value for _, value in found} == {4.5}
    assert blocks([(1.0, 5.0)], 20) == [(1.0, 5.0)]


def test_growth_beyond_the_noise_is_no_flat_memory_and_noise_without_growth_is() -> None:
    grown = figure_of("backend", _samples(20.0, 1.0), 600, "")
    assert grown.value == pytest.approx(20.0, abs=1.0)
    assert grown.met is False
    flat = figure_of("backend", _samples(0.0, 5.0), 600, "")
    assert flat.met is True
    slow = figure_of("router", _samples(FLOOR_MIB / 2, 0.01), 600, "")
    assert slow.met is True  # less than an allocator's own steps


def test_a_short_soak_gives_a_figure_and_no_verdict() -> None:
    figure = figure_of("nats", _samples(20.0, 0.1, seconds=30), 30, "30 s")
    assert figure.target is None
    assert figure.met is None
    assert "too short" in figure.note
    assert figure.key == "nats"
    assert BLOCKS < 30
