"""What the entry process decides."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.limits import DRAIN_GRACE_MAX_S, STOP_INTERRUPT_S, STOP_TERM_S
from tether_collector.init import core
from tether_collector.init.core import Exited, Leave, Look, Signal, Spawn, State, Tell, TellRest, begin, decide

AT_S: Final = 100.0


def started() -> State:
    state, effects = decide(begin(AT_S), Look(others=False), AT_S)
    assert effects == (Spawn(),)
    return state


def after(state: State, *events: core.Event, at_s: float = AT_S) -> tuple[State, list[core.Effect]]:
    told: list[core.Effect] = []
    for event in events:
        state, effects = decide(state, event, at_s)
        told += effects
    return state, told


def test_nothing_is_started_before_the_files_are_there_and_that_is_not_waited_for_for_ever() -> None:
    state, effects = after(begin(AT_S), Look(False, ready=False))
    assert (effects, state.due_s) == ([], AT_S + core.FILES_LOOK_S)
    _, effects = after(state, Look(False, ready=False), at_s=AT_S + core.FILES_WAIT_S + 1)
    assert effects == [Leave(core.LEFT_BEHIND)]


def test_a_crash_under_living_clis_is_followed_by_a_new_collector_however_often_after_growing_pauses() -> None:
    state, pauses, at_s = started(), [], AT_S
    for _ in range(12):
        state, effects = decide(state, Exited(-9, others=True), at_s)
        assert effects == ()
        pauses.append(state.due_s - at_s)
        state, effects = decide(state, Look(True), state.due_s - 0.01)
        assert effects == ()
        at_s = state.due_s
        state, effects = decide(state, Look(True), at_s)
        assert effects == (Spawn(),)
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == pytest.approx((core.BACKOFF_MIN_S, core.BACKOFF_MAX_S))
    state, _ = decide(state, Exited(1, others=True), at_s + core.STABLE_S + 1)
    assert state.due_s == pytest.approx(at_s + core.STABLE_S + 1 + core.BACKOFF_MIN_S)


def test_a_collector_that_never_comes_up_is_given_up_with_its_code_where_nothing_lives() -> None:
    state = started()
    for _ in range(core.CRASHES_MAX - 1):
        state, effects = after(state, Exited(1, others=False))
        assert effects == []
        state, _ = after(state, Look(False), at_s=state.due_s)
    assert after(state, Exited(1, others=False))[1] == [Leave(1)]
    assert after(started(), Exited(core.EX_CONFIG, others=False))[1] == [Leave(core.EX_CONFIG)]
    assert after(started(), Exited(core.EX_CONFIG, others=True))[1] == []


def test_sighup_replaces_the_collector_and_touches_nothing_else() -> None:
    state, effects = after(started(), Signal("HUP"))
    assert effects == [Tell("HUP")]
    state, effects = after(state, Signal("HUP"), Exited(0, others=True))
    assert (effects, state.phase) == ([Spawn()], "running")


def test_a_collector_that_does_not_hand_over_in_time_is_killed_and_followed() -> None:
    state, _ = after(started(), Signal("HUP"))
    assert after(state, Look(True), at_s=AT_S + core.HANDOVER_S - 1)[1] == []
    state, effects = after(state, Look(True), Exited(-9, others=True), at_s=AT_S + core.HANDOVER_S)
    assert effects == [Tell("KILL"), Spawn()]


def test_sigterm_is_a_drain_and_its_end_is_the_end_of_the_sandbox() -> None:
    state, effects = after(started(), Signal("TERM"), Signal("TERM"), Signal("HUP"))
    assert effects == [Tell("TERM")]
    assert after(state, Exited(0, others=False))[1] == [Leave(0)]
    state, effects = after(state, Exited(0, others=True), Look(True))
    assert effects == [], "a keeper that was dismissed needs a moment"
    assert after(state, Look(False))[1] == [Leave(0)]
    state, effects = after(state, Look(True), at_s=AT_S + core.SETTLE_S)
    assert effects == [TellRest("TERM")]
    assert after(state, Look(False))[1] == [Leave(core.LEFT_BEHIND)]


def test_a_collector_that_dies_in_a_drain_goes_on_with_it_and_is_told_again() -> None:
    state, effects = after(started(), Signal("TERM"), Exited(-9, others=True))
    assert effects == [Tell("TERM"), Spawn()]
    state, effects = after(state, Look(True), at_s=AT_S + core.TERM_AGAIN_S)
    assert effects == [Tell("TERM")]
    assert after(state, Exited(0, others=False))[1] == [Leave(0)]


def test_a_drain_that_keeps_dying_or_goes_on_for_ever_is_ended_with_what_is_left() -> None:
    state, _ = after(started(), Signal("TERM"))
    dying, effects = after(state, *[Exited(3, others=True)] * core.CRASHES_MAX)
    assert effects[-1] == TellRest("TERM")
    assert after(dying, Look(False))[1] == [Leave(3)]
    late_s = AT_S + core.DRAIN_DEADLINE_S
    assert after(state, Look(True), Exited(-9, others=False), at_s=late_s)[1] == [Tell("KILL"), Leave(core.KILLED)]


def test_sigusr1_ends_without_a_drain_and_says_whether_anything_was_left() -> None:
    state, effects = after(started(), Signal("USR1"), Signal("TERM"), Signal("HUP"))
    assert effects == [Tell("HUP")]
    assert after(state, Exited(0, others=False))[1] == [Leave(0)]
    state, effects = after(state, Exited(0, others=True), Look(True))
    assert effects == [], "a keeper that was dismissed needs a moment"
    at_s = AT_S + core.SETTLE_S
    state, effects = after(state, Look(True), at_s=at_s)
    assert effects == [TellRest("TERM")]
    at_s += core.KEEPERS_S
    assert after(state, Look(True), at_s=at_s)[1] == [TellRest("KILL"), Leave(core.LEFT_BEHIND)]


def test_a_drain_during_a_hand_over_is_done_by_the_next_collector() -> None:
    state, effects = after(started(), Signal("HUP"), Signal("TERM"), Exited(0, others=True))
    assert effects == [Tell("HUP"), Spawn()]
    assert state.phase == "drain"
    assert after(state, Look(True), at_s=AT_S + core.TERM_AGAIN_S)[1] == [Tell("TERM")]


def test_a_collector_that_was_handed_over_by_somebody_else_is_followed_and_one_that_was_done_is_not() -> None:
    assert after(started(), Exited(0, others=False))[1] == [Leave(0)]
    state, effects = after(started(), Exited(0, others=True))
    assert effects == []
    assert after(state, Look(True), at_s=AT_S + core.SETTLE_S)[1] == [Spawn()]


def test_it_waits_longer_than_what_it_waits_for() -> None:
    assert core.DRAIN_DEADLINE_S > DRAIN_GRACE_MAX_S
    assert core.KEEPERS_S > STOP_INTERRUPT_S + STOP_TERM_S


EVENTS = st.one_of(
    st.sampled_from([Signal("TERM"), Signal("HUP"), Signal("USR1")]),
    st.builds(Exited, st.sampled_from([0, 1, -9, core.EX_CONFIG]), st.booleans()),
    st.builds(Look, st.booleans()),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 60)), max_size=40))
def test_there_is_never_a_second_collector_and_keepers_are_ended_only_where_none_lives(
    steps: list[tuple[core.Event, float]],
) -> None:
    state, at_s, lives = begin(0.0), 0.0, False
    for event, pause_s in steps:
        at_s += pause_s
        if isinstance(event, Exited) and not lives:
            continue
        if isinstance(event, Exited):
            lives = False
        state, effects = decide(state, event, at_s)
        for effect in effects:
            match effect:
                case Spawn():
                    assert not lives
                    lives = True
                case Tell():
                    assert lives
                case TellRest():
                    assert not lives
                case Leave():
                    assert not lives
                    return


@pytest.mark.parametrize("name", ["TERM", "USR1"])
@given(st.lists(st.tuples(EVENTS, st.floats(0, 60)), max_size=20))
def test_whatever_happened_before_a_drain_and_an_end_come_to_an_end(
    name: core.Name, steps: list[tuple[core.Event, float]]
) -> None:
    state, at_s, lives, left = begin(0.0), 0.0, False, False

    def take(event: core.Event) -> None:
        nonlocal state, lives, left
        state, effects = decide(state, event, at_s)
        for effect in effects:
            lives = True if isinstance(effect, Spawn) else lives
            left = left or isinstance(effect, Leave)

    for event, pause_s in steps:
        at_s += pause_s
        if left or (isinstance(event, Exited) and not lives):
            continue
        lives = lives and not isinstance(event, Exited)
        take(event)
    if not left:
        take(Signal(name))
    for _ in range(20):  # the collector does what it is told, at last
        if left:
            return
        at_s = max(at_s, state.due_s)
        if lives and state.phase != "running":
            lives = False
            take(Exited(0, others=False))
        else:
            take(Look(others=False))
    assert left, state
