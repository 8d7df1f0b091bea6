"""What goes of ended executions: by age, by number, by bytes, never within the grace."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tether.limits import TERMINAL_DISK_GRACE_S, TERMINAL_RETENTION_S
from tether_collector.core.retention import Ended, to_forget

NOW_MS = 10_000_000_000
GRACE_MS = int(TERMINAL_DISK_GRACE_S * 1000)
RETENTION_MS = int(TERMINAL_RETENTION_S * 1000)


def ended(name: str, ago_ms: int, size: int = 1) -> Ended:
    return Ended(name, NOW_MS - ago_ms, size)


def names(gone: list[Ended]) -> list[str]:
    return [one.execution for one in gone]


def test_what_is_older_than_the_retention_goes_and_nothing_else() -> None:
    kept = [ended("a", RETENTION_MS + 1), ended("b", RETENTION_MS), ended("c", 5)]
    assert names(to_forget(kept, NOW_MS)) == ["a"]


def test_over_the_number_the_oldest_go_first() -> None:
    kept = [ended(f"e{n}", GRACE_MS + 10 - n) for n in range(5)]
    assert names(to_forget(kept, NOW_MS, entries_max=3)) == ["e0", "e1"]


def test_over_the_bytes_the_oldest_go_until_it_fits() -> None:
    kept = [ended(f"e{n}", GRACE_MS + 10 - n, 100) for n in range(5)]
    assert names(to_forget(kept, NOW_MS, bytes_max=250)) == ["e0", "e1", "e2"]


def test_in_its_grace_nothing_goes_however_much_there_is() -> None:
    kept = [ended(f"e{n}", GRACE_MS - n, 1 << 30) for n in range(5)]
    assert to_forget(kept, NOW_MS, entries_max=1, bytes_max=1) == []


@given(
    st.lists(st.tuples(st.integers(0, 2 * RETENTION_MS), st.integers(0, 1000)), max_size=30),
    st.integers(0, 10),
    st.integers(0, 5000),
)
def test_what_stays_is_within_the_limits_or_in_its_grace(
    found: list[tuple[int, int]], entries_max: int, bytes_max: int
) -> None:
    kept = [ended(f"e{n}", ago, size) for n, (ago, size) in enumerate(found)]
    gone = to_forget(kept, NOW_MS, entries_max=entries_max, bytes_max=bytes_max)
    stays = [one for one in kept if one not in gone]
    old = [one for one in stays if one.ended_at < NOW_MS - GRACE_MS]
    if old:
        assert len(stays) <= entries_max
        assert sum(one.bytes for one in stays) <= bytes_max
    assert all(one.ended_at < NOW_MS - GRACE_MS for one in gone)
    assert all(one.ended_at >= NOW_MS - RETENTION_MS for one in stays)
