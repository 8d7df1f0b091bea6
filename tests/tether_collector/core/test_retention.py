"""What goes of ended executions: by age, by number, by bytes, never within the grace."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tether.limits import TERMINAL_DISK_GRACE_S, TERMINAL_RETENTION_S
from tether_collector.core.retention import Ended, expired, to_forget

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


def test_what_is_being_read_or_written_stays_and_the_next_one_goes_for_it() -> None:
    kept = [Ended(f"e{n}", NOW_MS - GRACE_MS - 10 + n, 100, held=n == 0) for n in range(3)]
    assert names(to_forget(kept, NOW_MS, entries_max=2)) == ["e1"]
    assert to_forget([Ended("old", NOW_MS - 2 * RETENTION_MS, 1, held=True)], NOW_MS) == []


ROUND_MS = 60_000


@given(st.data())
def test_in_any_course_of_time_only_the_expired_goes_or_what_a_quota_asks_for_out_of_its_grace(
    data: st.DataObject,
) -> None:
    """Rounds of housekeeping in virtual time, with ends and readers that come and go."""
    entries_max, bytes_max = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 3000))
    kept: dict[str, Ended] = {}
    now_ms = NOW_MS
    for turn in range(data.draw(st.integers(1, 12))):
        now_ms += data.draw(st.sampled_from([ROUND_MS, GRACE_MS, RETENTION_MS // 3]))
        for number in range(data.draw(st.integers(0, 3))):
            name = f"e{turn}-{number}"
            kept[name] = Ended(name, now_ms - data.draw(st.integers(0, ROUND_MS)), data.draw(st.integers(0, 1000)))
        held = data.draw(st.sets(st.sampled_from(sorted(kept)), max_size=2)) if kept else set()
        found = [Ended(one.execution, one.ended_at, one.bytes, one.execution in held) for one in kept.values()]
        gone = to_forget(found, now_ms, entries_max=entries_max, bytes_max=bytes_max)
        assert not held & {one.execution for one in gone}
        for one in gone:
            over = len(kept) > entries_max or sum(each.bytes for each in kept.values()) > bytes_max
            in_grace = one.ended_at >= now_ms - GRACE_MS
            assert expired(one.ended_at, now_ms) or (over and not in_grace), "it went though nothing asked for it"
            del kept[one.execution]
        free = [one for name, one in kept.items() if name not in held]
        assert not any(expired(one.ended_at, now_ms) for one in free)
        if len(kept) > entries_max or sum(one.bytes for one in kept.values()) > bytes_max:
            assert all(one.ended_at >= now_ms - GRACE_MS for one in free)
