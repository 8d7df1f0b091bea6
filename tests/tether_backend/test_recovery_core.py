"""When rows are repaired: back-off per full identity, bounded in number, ended with the candidate. Time is an input."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.cursor import Standing
from tether.limits import COLD_CANDIDATES_CONCURRENCY, TERMINAL_RETENTION_S
from tether_backend.core.binding import Doubt, Evidence, doubt_of
from tether_backend.core.recovery import (
    UNKNOWN_GRACE_S,
    Abandon,
    Attempt,
    Attempted,
    Candidate,
    Effect,
    Identity,
    Recovery,
    Scanned,
    Ticked,
    Why,
    candidate_of,
)

NOW_MS = 1_700_000_000_000


def candidate(name: str = "e1", *, watched: bool = False, why: Why = "hole", **changes: Any) -> Candidate:
    identity = Identity(tenant="t", workspace="w", conversation="c", execution=name, instance="i1", mark=3)
    return Candidate(replace(identity, **changes), why, watched)


def attempts(effects: list[Effect]) -> list[Attempt]:
    return [one for one in effects if isinstance(one, Attempt)]


def failing(machine: Recovery, one: Candidate, until_s: float) -> list[float]:
    """When it is attempted in virtual time, each attempt coming to nothing at once."""
    began: list[float] = []
    at_s = 0.0
    effects = machine.apply(Scanned(at_s, [one]))
    while True:
        for begun in attempts(effects):
            began.append(at_s)
            machine.apply(Attempted(at_s, begun.candidate.identity.execution, begun.number, settled=False))
        due_s = machine.due_s()
        assert due_s is not None
        if due_s > until_s:
            return began
        at_s = max(due_s, at_s)
        effects = machine.apply(Ticked(at_s))


def test_a_watched_candidate_has_eight_quick_attempts_then_half_a_minute_growing_to_one() -> None:
    began = failing(Recovery(), candidate(watched=True), 400.0)
    waits = [after - before for before, after in itertools.pairwise(began)]
    assert sum(waits[:7]) < 15.0 and all(later > earlier for earlier, later in itertools.pairwise(waits[:7]))
    assert waits[7:] == pytest.approx([30.0, 40.0, 50.0, *[60.0] * (len(waits) - 10)])


def test_a_cold_candidate_is_tried_at_once_and_then_at_most_a_minute_apart() -> None:
    began = failing(Recovery(), candidate(), 600.0)
    waits = [after - before for before, after in itertools.pairwise(began)]
    assert began[0] == 0.0 and waits[:4] == [5.0, 10.0, 20.0, 40.0] and set(waits[4:]) == {60.0}


@pytest.mark.parametrize(
    "change",
    [
        {"instance": "i2"},
        {"boot": "b2"},
        {"sandbox": "s2"},
        {"process_generation": 2},
        {"execution_generation": 2},
        {"response_generation": 2},
        {"mark": 9},
    ],
)
def test_a_changed_identity_starts_afresh_and_the_old_ones_answer_changes_nothing(change: dict[str, Any]) -> None:
    machine = Recovery()
    (first,) = attempts(machine.apply(Scanned(0.0, [candidate()])))
    machine.apply(Attempted(0.0, "e1", first.number, settled=False))
    assert attempts(machine.apply(Ticked(5.0))) and machine.apply(Ticked(5.0)) == []
    effects = machine.apply(Scanned(6.0, [candidate(**change)]))
    (running,) = [one for one in effects if isinstance(one, Abandon)]
    (fresh,) = attempts(effects)
    assert fresh.candidate == candidate(**change) and fresh.number != running.number
    assert machine.apply(Attempted(6.0, "e1", running.number, settled=True)) == []
    assert machine.cold == 1  # the old one's success is not the new one's
    machine.apply(Attempted(6.0, "e1", fresh.number, settled=False))
    assert machine.due_s() == 11.0


def test_each_candidate_backs_off_by_itself() -> None:
    machine = Recovery()
    first, second = attempts(machine.apply(Scanned(0.0, [candidate("e1"), candidate("e2")])))
    machine.apply(Attempted(0.0, "e1", first.number, settled=False))
    machine.apply(Attempted(3.0, "e2", second.number, settled=False))
    assert [one.candidate.identity.execution for one in attempts(machine.apply(Ticked(5.0)))] == ["e1"]
    assert [one.candidate.identity.execution for one in attempts(machine.apply(Ticked(8.0)))] == ["e2"]


def test_so_many_run_at_once_and_no_more_and_watched_ones_come_first() -> None:
    machine = Recovery()
    names = [f"e{n}" for n in range(10)]
    scan = [candidate(name, watched=name == "e9") for name in names]
    running = attempts(machine.apply(Scanned(0.0, scan)))
    assert len(running) == COLD_CANDIDATES_CONCURRENCY == 4
    assert running[0].candidate.identity.execution == "e9" and machine.due_s() is None
    assert attempts(machine.apply(Ticked(1.0))) == []
    assert len(attempts(machine.apply(Attempted(1.0, "e9", running[0].number, settled=True)))) == 1


def test_it_ends_with_the_subscription_and_goes_on_as_a_cold_one() -> None:
    machine = Recovery()
    (begun,) = attempts(machine.apply(Scanned(0.0, [candidate(watched=True)])))
    assert machine.apply(Scanned(1.0, [candidate(watched=False)])) == [Abandon("e1", begun.number)]
    assert machine.due_s() == 6.0 and (machine.watched, machine.cold) == (0, 1)
    (again,) = attempts(machine.apply(Scanned(2.0, [candidate(watched=True)])))  # a reader came: at once
    assert again.number != begun.number


def test_it_ends_where_nothing_is_to_be_repaired_any_more() -> None:
    machine = Recovery()
    (begun,) = attempts(machine.apply(Scanned(0.0, [candidate()])))
    assert machine.apply(Scanned(1.0, [])) == [Abandon("e1", begun.number)]
    assert machine.apply(Attempted(1.0, "e1", begun.number, settled=False)) == []
    assert machine.due_s() is None and machine.cold == 0


def test_rows_that_only_lag_behind_the_owner_record_are_left_alone() -> None:
    machine = Recovery()
    assert machine.apply(Scanned(0.0, [candidate(why="unknown")])) == []
    assert machine.due_s() == UNKNOWN_GRACE_S
    assert machine.apply(Scanned(30.0, [])) == [] and machine.due_s() is None
    machine.apply(Scanned(30.0, [candidate(why="unknown")]))
    assert attempts(machine.apply(Scanned(30.0 + UNKNOWN_GRACE_S, [candidate(why="unknown")])))


def judged(**changes: Any) -> Candidate | None:
    given: dict[str, Any] = {
        "owned": True,
        "ended": False,
        "partial": True,
        "since_ms": NOW_MS,
        "now_ms": NOW_MS,
        "watched": False,
    }
    why: Why = changes.pop("why", "hole")
    return candidate_of(candidate().identity, why, **{**given, **changes})


@pytest.mark.parametrize("why", ["hole", "cold", "unknown"])
@pytest.mark.parametrize("owned", [True, False])
def test_a_completed_execution_whose_rows_are_whole_is_never_a_candidate(why: Why, owned: bool) -> None:
    assert judged(why=why, owned=owned, ended=True, partial=False) is None


def test_what_is_active_or_ended_within_the_retention_is_a_candidate_and_what_is_older_is_not() -> None:
    old_ms = NOW_MS - int(TERMINAL_RETENTION_S * 1000) - 1
    assert judged() and judged(owned=False, ended=True)
    assert judged(owned=True, since_ms=old_ms)  # it runs: whenever it was last heard of
    assert judged(owned=False, ended=True, since_ms=old_ms) is None
    assert judged(why="unknown", owned=True) is None and judged(why="unknown", owned=False)


@given(
    told=st.none() | st.integers(0, 9),
    database=st.integers(0, 9),
    consumer=st.booleans(),
    place=st.sampled_from(list(Standing)),
)
def test_the_fast_path_needs_every_proof(told: int | None, database: int, consumer: bool, place: Standing) -> None:
    doubt = doubt_of(Evidence(database=database, told=told, consumer=consumer, place=place))
    proven = told is not None and told <= database and consumer and place is Standing.CURRENT
    assert (doubt is None) == proven
    if doubt is Doubt.DATABASE_OLDER:
        assert told is not None and told > database
