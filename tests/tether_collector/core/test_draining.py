"""The drain as a machine: its phases, its outcomes, and that it may be saved, loaded and asked again anywhere."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tether.checkpoint import (
    UNHEARD_CHARS_MAX,
    UNHEARD_MAX,
    UNHEARD_TOTAL_CHARS_MAX,
    CheckpointReference,
    DrainedExecution,
    UnheardMessage,
)
from tether.errors import Code, problem
from tether.ids import ExecutionTarget
from tether.sandbox import DrainOrder
from tether_collector.core import draining as d

AT = 1_000_000
NAMES = ("exe_1", "exe_2", "exe_3")
FAILED = problem(Code.CHECKPOINT_FAILED, "no space left on device")


def target(execution: str) -> ExecutionTarget:
    return ExecutionTarget(
        tenant="t",
        workspace="w",
        conversation=f"c_{execution}",
        response="r",
        response_generation=1,
        execution=execution,
        execution_generation=1,
        sandbox="s",
    )


def left(execution: str, outcome: Any = "completed", *, cut: bool = False) -> DrainedExecution:
    return DrainedExecution(target=target(execution), outcome=outcome, cut=cut)


def began(*executions: str, grace_s: float = 10.0) -> d.Draining:
    return d.ordered(DrainOrder(drain="drn_1", grace_s=grace_s), "verb", "boot_1", AT, executions)


def reference(state: d.Draining) -> CheckpointReference:
    return CheckpointReference(
        checkpoint=state.checkpoint,
        drain="drn_1",
        tenant="t",
        workspace="w",
        sandbox="s",
        boot="boot_1",
        manifest="0" * 64,
        manifest_bytes=1,
        stored="volume",
        include="sessions",
        clean=True,
    )


def look(state: d.Draining, after_s: float, *seen: d.Seen) -> d.Draining:
    return d.decide(state, d.Look(AT + int(after_s * 1000), seen))


def kept(state: d.Draining) -> d.Draining:
    return d.decide(d.decide(state, d.CheckpointMade(reference(state))), d.ReferenceWritten(7))


def test_a_turn_has_half_of_the_grace_and_a_person_is_not_waited_for() -> None:
    state = look(began(*NAMES), 1, d.Seen("exe_1", "turn"), d.Seen("exe_2", "waiting"), d.Seen("exe_3", "over"))
    assert d.wants(state) == (d.Leave("exe_2", state.kill_at),) and state.phase == "turn"
    assert d.next_look_at(state) == AT + 5_000
    state = look(state, 5, d.Seen("exe_1", "turn"), d.Seen("exe_2", "waiting"), d.Seen("exe_3", "over"))
    assert [want.execution for want in d.wants(state) if isinstance(want, d.Leave)] == list(NAMES)
    assert state.phase == "leaving"
    state = look(state, 10, d.Seen("exe_1", "turn"))
    assert state.phase == "killing"


def test_nothing_is_kept_before_everybody_is_gone_and_everything_is_told() -> None:
    state = look(began("exe_1", "exe_2"), 1, d.Seen("exe_1", "gone", False, left("exe_1")), d.Seen("exe_2", "turn"))
    assert state.phase == "turn"
    state = look(state, 2, d.Seen("exe_2", "gone", False, left("exe_2", "graceful", cut=True)))
    assert (state.phase, d.wants(state)) == ("publishing", ())
    state = look(state, 3, d.Seen("exe_1", "ended"), d.Seen("exe_2", "gone", False, left("exe_2")))
    assert state.phase == "publishing"
    state = look(state, 4, d.Seen("exe_2", "gone", True, left("exe_2", "graceful", cut=True)))
    assert d.wants(state) == (d.MakeCheckpoint(),)


def test_the_end_is_released_only_after_the_reference_or_its_failure() -> None:
    state = look(began("exe_1"), 1, d.Seen("exe_1", "gone", True, left("exe_1", "graceful", cut=True)))
    state = look(state, 1)
    made = d.decide(state, d.CheckpointMade(reference(state)))
    assert d.wants(made) == (d.WriteReference(reference(state)),)
    written = d.decide(made, d.ReferenceWritten(7))
    assert d.wants(written) == (d.Release("exe_1", state.checkpoint, None),)
    over = look(written, 2, d.Seen("exe_1", "ended"))
    report = d.report_of(over)
    assert (report.state, report.checkpoint_revision, report.checkpoint) == ("done", 7, reference(state))
    lost = d.decide(made, d.ReferenceLost(FAILED))
    assert d.wants(lost) == (d.Release("exe_1", None, FAILED),)


def test_a_failed_checkpoint_is_told_by_the_cut_execution_and_names_no_reference() -> None:
    state = look(
        began("exe_1", "exe_2"),
        1,
        d.Seen("exe_1", "gone", True, left("exe_1", "forced", cut=True)),
        d.Seen("exe_2", "ended", True, left("exe_2")),
    )
    state = d.decide(look(state, 1), d.CheckpointFailed(FAILED, "the checkpoint"))
    report = d.report_of(look(state, 2, d.Seen("exe_1", "ended")))
    assert (report.state, report.checkpoint, report.problem, report.unsaved) == (
        "failed",
        None,
        FAILED,
        "the checkpoint",
    )
    outcomes = {one.target.execution: (one.outcome, one.detail) for one in report.executions}
    assert outcomes["exe_1"] == ("checkpoint_failed", "forced; no space left on device")
    assert outcomes["exe_2"][0] == "completed"


def test_a_checkpoint_that_ends_its_collector_again_and_again_fails_by_that_name_and_all_are_released() -> None:
    state = began("exe_a")
    state = look(look(state, 1, d.Seen("exe_a", "gone", True, left("exe_a", cut=True))), 2)
    assert state.phase == "checkpoint"
    for attempt in range(d.CHECKPOINT_ATTEMPTS_MAX):
        state = d.decide(d.Draining.model_validate_json(state.model_dump_json()), d.CheckpointBegun())
        assert (state.attempts, d.wants(state)) == (attempt + 1, (d.MakeCheckpoint(),))
    state = d.decide(state, d.CheckpointBegun())
    assert state.problem is not None and "8 times" in state.problem.detail
    [release] = d.wants(state)
    assert isinstance(release, d.Release) and release.checkpoint is None
    assert d.decide(state, d.CheckpointMade(reference(state))) == state


def test_a_checkpoint_is_clean_unless_somebody_was_killed() -> None:
    state = look(began("exe_1"), 1, d.Seen("exe_1", "gone", True, left("exe_1", "graceful", cut=True)))
    assert d.is_clean(state)
    state = look(began("exe_1"), 1, d.Seen("exe_1", "gone", True, left("exe_1", "forced", cut=True)))
    assert not d.is_clean(state)


def test_a_collector_that_has_not_read_so_far_again_takes_nothing_back() -> None:
    state = look(began("exe_1"), 1, d.Seen("exe_1", "gone", True, left("exe_1", "graceful", cut=True)))
    again = look(state, 2, d.Seen("exe_1", "turn"))
    assert again.runs == state.runs and again.phase == "checkpoint"


# --- whatever happens ---

stages = st.sampled_from(["turn", "waiting", "over", "gone", "ended"])
seen_of = st.builds(
    lambda name, stage, stored, outcome: d.Seen(
        name,
        stage,
        stored,
        left(name, outcome, cut=outcome != "completed") if stage in ("gone", "ended") else None,
    ),
    st.sampled_from(NAMES),
    stages,
    st.booleans(),
    st.sampled_from(["completed", "graceful", "forced"]),
)
looks = st.builds(
    lambda after_ms, seen: d.Look(AT + after_ms, tuple(seen)), st.integers(0, 20_000), st.lists(seen_of, max_size=4)
)
inputs = st.one_of(
    looks,
    looks,
    st.builds(lambda: d.CheckpointMade(reference(began()))),
    st.builds(lambda: d.CheckpointFailed(FAILED)),
    st.just(d.CheckpointBegun()),
    st.builds(lambda: d.ReferenceWritten(7)),
    st.builds(lambda: d.ReferenceLost(FAILED)),
)


@given(st.lists(inputs, max_size=40), st.sets(st.sampled_from(NAMES)), st.sampled_from([0.0, 10.0]))
def test_whatever_comes_phases_go_forward_and_each_execution_has_one_outcome(
    happened: list[d.Input], names: set[str], grace_s: float
) -> None:
    state = began(*sorted(names), grace_s=grace_s)
    for input_ in happened:
        before, state = state, d.decide(state, input_)
        assert d.PHASES.index(state.phase) >= d.PHASES.index(before.phase)
        assert d.Draining.model_validate_json(state.model_dump_json()) == state, "it may be saved anywhere"
        assert d.decide(state, d.Look(AT, ())).runs == state.runs
        for name, run in before.runs.items():
            assert not run.told or state.runs[name].told, "who was told to leave is not told otherwise"
            assert not run.gone or state.runs[name].gone
            if d.PHASES.index(before.phase) >= d.PHASES.index("checkpoint") and run.left is not None:
                assert state.runs[name].left == run.left, "what the manifest says of it stands"
        for want in d.wants(state):
            match want:
                case d.Leave(name, _):
                    assert not state.runs[name].gone
                case d.MakeCheckpoint() | d.WriteReference():
                    assert all(run.gone and run.stored for run in state.runs.values())
                case d.Release(_, checkpoint, why):
                    assert (checkpoint is None) == (why is not None)
                    assert why is not None or state.revision == 7
        report = d.report_of(state)
        assert (report.state == "running") == (not state.over)
        assert report.checkpoint is None or report.checkpoint_revision == 7
        assert report.state != "done" or report.checkpoint is not None
        assert report.state != "failed" or (report.problem is not None and report.checkpoint is None)
        told = [one.target.execution for one in report.executions]
        assert len(told) == len(set(told)) and set(told) <= names


@given(st.lists(inputs, max_size=25), st.sets(st.sampled_from(NAMES)))
def test_a_drain_always_comes_to_its_end(happened: list[d.Input], names: set[str]) -> None:
    state = began(*sorted(names))
    for input_ in happened:
        state = d.decide(state, input_)
    for _ in range(2):
        gone = (d.Seen(name, "gone", True, left(name, "forced", cut=True)) for name in sorted(names))
        state = look(state, 11, *gone)
    if state.phase == "checkpoint":
        state = kept(state)
    state = look(state, 12, *(d.Seen(name, "ended", True) for name in sorted(names)))
    assert state.over and d.wants(state) == ()


# --- a drain after a drain ---


def cut_by(drain: d.Draining, **more: Any) -> d.Draining:
    """`exe_1` was cut, `exe_2` ended by itself; both ends are told."""
    one = left("exe_1", "graceful", cut=True).model_copy(update=more)
    state = look(drain, 1, d.Seen("exe_1", "ended", True, one), d.Seen("exe_2", "ended", True, left("exe_2")))
    return look(kept(look(state, 1)), 2)


def test_a_drain_after_a_drain_tells_of_what_that_one_cut_until_its_conversation_starts_again() -> None:
    before = cut_by(began("exe_1", "exe_2"))
    assert before.over
    cut = left("exe_1", "graceful", cut=True)
    assert d.carried(before, None, {"c_exe_1": 1, "c_exe_2": 1}) == {"exe_1": cut}
    assert d.carried(before, None, {"c_exe_1": 2}) == {}, "it went on since"
    assert set(d.carried(before, "ckp_older", {"c_exe_1": 1})) == {"exe_1"}
    assert d.carried(before, before.checkpoint, {"c_exe_1": 1}) == {}, "a resume told its turn to go on"
    assert d.carried(None, None, {}) == d.carried(began("exe_1"), None, {}) == {}


def test_what_a_failed_drain_cut_and_messages_that_nobody_has_read_outlive_a_resume() -> None:
    run = d.Run(stage="ended", left=left("exe_1", cut=True))
    failed = began().model_copy(update={"phase": "over", "problem": FAILED, "runs": {"exe_1": run}})
    assert set(d.carried(failed, failed.checkpoint, {"c_exe_1": 1})) == {"exe_1"}
    unheard = (UnheardMessage(request="req_2", text="look here"),)
    waits = cut_by(began("exe_1", "exe_2"), unheard=unheard)
    assert set(d.carried(waits, waits.checkpoint, {"c_exe_1": 1})) == {"exe_1"}
    goes_on = cut_by(began("exe_1", "exe_2"), unheard=unheard, continuation="continue")
    assert d.carried(goes_on, goes_on.checkpoint, {"c_exe_1": 1}) == {}, "its continuation had them"


def test_what_was_carried_is_in_the_report_and_nothing_is_done_to_it_again() -> None:
    cut = left("exe_1", "forced", cut=True)
    order = DrainOrder(drain="drn_2", grace_s=10)
    state = look(d.ordered(order, "verb", "boot_1", AT, (), {"exe_1": cut}), 0)
    state = look(state, 0)
    assert state.phase == "checkpoint" and d.wants(state) == (d.MakeCheckpoint(),)
    assert d.executions_of(state) == (cut,) and not d.is_clean(state)
    state = look(kept(state), 1)
    assert state.over and d.report_of(state).executions == (cut,)
    both = d.ordered(order, "verb", "boot_1", AT, ("exe_3",), {"exe_1": cut})
    assert {name: run.stage for name, run in both.runs.items()} == {"exe_1": "ended", "exe_3": "turn"}


def test_the_text_of_unread_messages_in_one_report_is_bounded_and_what_is_cut_is_marked() -> None:
    messages = tuple(UnheardMessage(request=f"req_{n}", text="x" * UNHEARD_CHARS_MAX) for n in range(UNHEARD_MAX))
    runs = {
        name: d.Run(stage="ended", left=left(name, cut=True).model_copy(update={"unheard": messages})) for name in NAMES
    }
    found = d.executions_of(began().model_copy(update={"runs": runs}))
    told = [message for one in found for message in one.unheard]
    assert len(told) == len(NAMES) * UNHEARD_MAX, "each is named"
    assert sum(len(message.text) for message in told) == UNHEARD_TOTAL_CHARS_MAX
    assert all(message.cut == (len(message.text) < UNHEARD_CHARS_MAX) for message in told)
