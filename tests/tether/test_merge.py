"""Merging a snapshot into what a reader has: less never replaces more, and what was given up comes back once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tether import events as ev
from tether.events import Event
from tether.fold import ExecutionFold, ExecutionState, TextItem
from tether.merge import merge, own_gaps


def event(ordinal: int, kind: str, /, **body: Any) -> Event:
    return Event(ordinal=ordinal, at=ordinal, type=kind, body=body)


def story() -> list[Event]:
    return [
        event(1, ev.SESSION_BOUND, native_session="n", resumable=True),
        event(2, ev.TEXT_DELTA, segment="a", text="one", offset=0),
        event(3, ev.TEXT_COMPLETED, segment="a", text="one two"),
        event(4, ev.TOOL_STARTED, tool="t", name="Bash", input={"command": "ls"}),
        event(5, ev.INTERACTION_REQUESTED, interaction="i", kind="approval", tool="t"),
        event(6, ev.INTERACTION_RESOLVED, interaction="i", outcome="answered", control="k"),
        event(7, ev.TOOL_COMPLETED, tool="t", status="ok", output="done"),
        event(8, ev.USAGE, turn="u1", input_tokens=1, output_tokens=2, cost_usd=0.5),
        event(9, ev.TEXT_DELTA, segment="b", text="gone", offset=0),
        event(10, ev.TEXT_DISCARDED, segment="b", reason="model_request_retried"),
        event(11, ev.TEXT_COMPLETED, segment="c", text="last"),
        event(12, ev.USAGE, turn="u2", input_tokens=3, output_tokens=4, cost_usd=0.25),
        event(13, ev.RESPONSE_ENDED, outcome="completed"),
        event(14, ev.EXECUTION_ENDED, outcome="completed", exit=0),
    ]


def folded(events: list[Event], *, without: range | None = None) -> ExecutionState:
    fold = ExecutionFold()
    for one in events:
        if without is not None and one.ordinal in without:
            continue
        if without is not None and one.ordinal == without.stop:
            fold.skip_to(one.ordinal, "retention_gap")
        fold.apply(one)
    return fold.freeze()


@given(data=st.data())
def test_whatever_was_given_up_a_whole_state_that_reaches_as_far_brings_everything_back(data: st.DataObject) -> None:
    events = story()
    upto = data.draw(st.integers(1, len(events)), label="reader has")
    first = data.draw(st.integers(1, upto), label="first missing")
    last = data.draw(st.integers(first, upto), label="last missing")
    mine = folded(events[:upto], without=range(first, last + 1) if last < upto else None)
    reach = data.draw(st.integers(upto, len(events)), label="snapshot reaches")
    whole = folded(events[:reach])
    merged = merge(mine, whole)
    if mine.outcome is not None and whole.outcome is None:
        assert not merged.changed
        return
    assert merged.state.text == whole.text or len(merged.state.text) >= len(whole.text)
    assert merged.state.usage == whole.usage and merged.state.usage_by_turn == whole.usage_by_turn
    assert merged.state.phase == whole.phase and merged.state.applied == whole.applied
    assert own_gaps(merged.state) == []
    assert merged.filled == tuple(own_gaps(mine))
    assert {(item.kind, item.id) for item in merged.state.items} >= {(item.kind, item.id) for item in whole.items}
    assert merge(merged.state, whole).changed is False


@given(first=st.integers(1, 14), last=st.integers(1, 14))
def test_a_whole_state_over_a_part_of_itself_is_just_that_state(first: int, last: int) -> None:
    events = story()
    whole = folded(events)
    mine = folded(events[: min(first, last)])
    assert merge(mine, whole).state == whole


def test_completed_text_that_was_not_discarded_stays_and_the_result_is_partial() -> None:
    mine = folded(story()[:3])
    theirs = ExecutionState(applied=12, phase="running")
    merged = merge(mine, theirs)
    assert merged.state.text == "one two" and merged.state.partial and merged.state.applied == 12


def test_text_that_was_explicitly_discarded_goes() -> None:
    mine = ExecutionState(applied=3, items=[TextItem(id="b", state="streaming", text="gone")])
    merged = merge(mine, folded(story()[:10]))
    assert [item.state for item in merged.state.items if isinstance(item, TextItem) and item.id == "b"] == ["discarded"]
    assert not merged.state.partial


def test_provisional_text_that_a_whole_state_does_not_have_goes() -> None:
    mine = ExecutionState(applied=3, items=[TextItem(id="zz", state="streaming", text="half")])
    assert [item.id for item in merge(mine, folded(story()[:4])).state.items] == ["a", "t"]


def test_a_preview_never_replaces_the_whole_text() -> None:
    mine = ExecutionState(applied=3, items=[TextItem(id="a", state="completed", text="the whole of it")])
    preview = TextItem(id="a", state="completed", text="the wh", blob={"digest": "d", "bytes": 15})
    merged = merge(mine, ExecutionState(applied=5, items=[preview]))
    assert merged.state.text == "the whole of it" and not merged.state.partial


def test_a_terminal_state_is_never_followed_by_running() -> None:
    ended, running = folded(story()), folded(story()[:12])
    running.applied = 99
    merged = merge(ended, running)
    assert not merged.changed and merged.state is ended


def test_a_state_that_reaches_less_far_changes_nothing() -> None:
    mine, theirs = folded(story()[:8]), folded(story()[:7])
    assert merge(mine, theirs).state is mine


def test_settled_tools_and_interactions_are_not_opened_again() -> None:
    mine, theirs = folded(story()[:8]), folded(story()[:5])
    theirs.applied = 8
    merged = merge(mine, theirs)
    states = {item.id: getattr(item, "state", "") for item in merged.state.items}
    assert (states["t"], states["i"]) == ("ok", "answered")


def test_an_answer_that_is_offered_again_and_a_new_session_are_not_lost_to_a_state_that_does_not_know_them() -> None:
    offered = {"decision": "allow", "control": "k"}
    mine = folded(
        [
            event(1, ev.SESSION_RECOVERED, process=2, why="not_found", source="native", rows=3),
            event(2, ev.INTERACTION_REQUESTED, interaction="i", kind="approval", offered=offered),
        ]
    )
    theirs = folded([event(1, "of.tomorrow"), event(2, ev.INTERACTION_REQUESTED, interaction="i", kind="approval")])
    merged = merge(mine, theirs)
    assert merged.state.items == mine.items and not merged.state.partial and not merged.changed
    assert merge(theirs, mine).state == mine


def test_usage_that_only_the_reader_has_is_added_once() -> None:
    mine = folded(story()[:8])
    theirs = ExecutionState(applied=12, usage_by_turn={"u2": {"turn": "u2", "input_tokens": 3, "cost_usd": 0.25}})
    total = merge(mine, theirs).state.usage
    assert (total.turns, total.input_tokens, total.cost_usd) == (2, 4, 0.75)


def test_a_gap_that_the_newer_state_does_not_cover_stays_and_one_of_the_log_stays_too() -> None:
    fold = ExecutionFold()
    fold.apply(event(1, ev.GAP, reason="spool_evicted", detail="the collector's own"))
    fold.skip_to(6, "retention_gap")
    mine = fold.freeze()
    assert own_gaps(mine) == [(2, 5)]
    behind = merge(mine, ExecutionState(applied=3))
    assert behind.gaps == [(2, 5)] and not behind.changed
    covered = merge(mine, ExecutionState(applied=5))
    assert covered.filled == ((2, 5),) and covered.gaps == []
    assert [item.id for item in covered.state.items] == ["1"]
