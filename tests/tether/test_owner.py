"""The owner record as a machine: the diagram, generations, the dead."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether import owner
from tether.ids import ExecutionTarget
from tether.owner import Accepted, Denied, Ignored, OwnerRecord, OwnerState

ALLOWED = {
    owner.Admit: {("idle", "starting")},
    owner.Started: {("starting", "running"), ("running", "running"), ("stopping", "stopping"), ("exiting", "exiting")},
    owner.SessionBound: {(state, state) for state in get_args(OwnerState) if state != "idle"},
    owner.ResponseEnded: {("running", "exiting")},
    owner.Ended: {(state, "idle") for state in get_args(OwnerState) if state != "idle"},
    owner.TakeOver: {("starting", "stopping"), ("running", "stopping"), ("stopping", "stopping")},
    owner.StopRefused: {("stopping", "running"), ("stopping", "starting")},
    owner.StopUnconfirmed: {("stopping", "stopping")},
    owner.Repair: {(state, after) for state in get_args(OwnerState) for after in (state, "starting")},
}


def admit(number: int, *, kind: str = "scripted", at: int = 1) -> owner.Admit:
    return owner.Admit(
        tenant="acme",
        workspace="w",
        conversation="c",
        request=f"r{number}",
        attempt=1,
        response=f"rsp{number}",
        execution=f"exe{number}",
        sandbox="s",
        prompt_sequence=number,
        prompt_stored_at_ns=number,
        agent={"kind": kind},
        at=at,
        log_base=number,
    )


def target(number: int, generation: int) -> ExecutionTarget:
    return ExecutionTarget(
        tenant="acme",
        workspace="w",
        conversation="c",
        response=f"rsp{number}",
        response_generation=generation,
        execution=f"exe{number}",
        execution_generation=generation,
        sandbox="s",
    )


def after(*events: owner.OwnerInput, record: OwnerRecord | None = None) -> OwnerRecord:
    record = record or OwnerRecord()
    for event in events:
        decision = owner.decide(record, event)
        assert isinstance(decision, Accepted), (event, decision)
        record = decision.record
    return record


NUMBERS = st.integers(1, 6)
EXECUTIONS = NUMBERS.map(lambda number: f"exe{number}")
INPUTS: st.SearchStrategy[owner.OwnerInput] = st.one_of(
    NUMBERS.map(admit),
    st.builds(owner.Started, EXECUTIONS, st.sampled_from(["b1", "b2"]), st.integers(1, 3), st.just(2)),
    st.builds(owner.SessionBound, EXECUTIONS, st.sampled_from(["n1", "n2"]), st.just("scripted"), st.booleans()),
    st.builds(owner.ResponseEnded, EXECUTIONS, st.just(3)),
    st.builds(owner.Ended, EXECUTIONS, st.sampled_from(["completed", "lost"]), st.booleans(), st.just(4)),
    st.builds(owner.TakeOver, EXECUTIONS, st.sampled_from(["s1", "s2"]), st.just("r9"), st.just(5)),
    st.builds(owner.StopRefused, st.sampled_from(["s1", "s2"]), st.just(7)),
    st.builds(owner.StopUnconfirmed, st.sampled_from(["s1", "s2"]), st.just(7)),
    st.builds(
        lambda number, generation, named: owner.Repair(
            generation, target(number, generation) if named else None, f"r{number}", 1, 6
        ),
        NUMBERS,
        st.integers(0, 12),
        st.booleans(),
    ),
)


@given(st.lists(INPUTS, max_size=40))
def test_no_sequence_of_inputs_leaves_the_diagram_or_goes_back(events: list[owner.OwnerInput]) -> None:
    record, ended, sessions = OwnerRecord(), set[str](), False
    for event in events:
        decision = owner.decide(record, event)
        if not isinstance(decision, Accepted):
            continue
        changed = decision.record
        assert (record.state, changed.state) in ALLOWED[type(event)]
        assert changed != record, "what is accepted is worth a write"
        assert changed.generation >= record.generation
        assert (changed.state == "idle") == (changed.target is None)
        if changed.target is not None:
            assert changed.target.execution not in ended, "ended executions never come back"
            assert changed.target.execution_generation <= changed.generation
            assert changed.target.response_generation == changed.target.execution_generation
        if isinstance(event, owner.Admit):
            assert changed.generation == record.generation + 1
        if (
            record.target is not None
            and changed.target is not None
            and record.target.execution == changed.target.execution
        ):
            assert changed.target.process_generation >= record.target.process_generation
        elif record.target is not None:
            assert changed.buried(record.target.execution), "whoever owned and does not is buried"
            ended.add(record.target.execution)
        assert not (sessions and changed.native_session is None), "no input clears the last native session"
        sessions = changed.native_session is not None
        assert len(changed.tombstones) <= owner.TOMBSTONES_MAX
        stopping = changed.state == "stopping"
        assert (changed.stop_control is not None) == stopping == (changed.stopping_since > 0)
        assert changed.pending_request is None or changed.state in ("stopping", "idle")
        if changed.superseded is not None and changed.superseded != record.superseded:
            assert (record.state, changed.state) == ("stopping", "idle"), "only a takeover supersedes"
        assert OwnerRecord.model_validate(changed.value()) == changed
        record = changed


@given(st.lists(INPUTS, max_size=20), INPUTS)
def test_an_input_that_was_accepted_changes_nothing_when_it_comes_again(
    events: list[owner.OwnerInput], event: owner.OwnerInput
) -> None:
    record = OwnerRecord()
    for one in events:
        decision = owner.decide(record, one)
        record = decision.record if isinstance(decision, Accepted) else record
    decision = owner.decide(record, event)
    if isinstance(decision, Accepted):
        assert not isinstance(owner.decide(decision.record, event), Accepted)


def test_only_an_idle_record_admits_and_the_reason_is_said() -> None:
    record = after(admit(1))
    assert owner.decide(record, admit(1)) == Ignored(), "a replayed admission"
    assert owner.decide(record, admit(2)) == Denied("the conversation is starting")
    ended = after(owner.Ended("exe1", "completed", True, 2), record=record)
    assert owner.decide(ended, admit(1)) == Denied("the execution of this attempt has ended")
    assert after(admit(2), record=ended).generation == 2


def test_a_takeover_waits_for_the_proof() -> None:
    record = after(admit(1), owner.Started("exe1", "b", 1, 2), owner.TakeOver("exe1", "stop1", "r2", 3))
    assert isinstance(owner.decide(record, owner.Ended("exe1", "stopped", False, 4)), Denied)
    idle = after(owner.Ended("exe1", "stopped", True, 4), record=record)
    assert (idle.state, idle.pending_request, idle.stop_control) == ("idle", "r2", None)
    assert after(admit(2), record=idle).pending_request is None


def test_what_a_takeover_cut_short_is_named_until_the_next_end() -> None:
    record = after(admit(1), owner.Started("exe1", "b", 1, 2), owner.TakeOver("exe1", "stop1", "r2", 3))
    assert (record.stopping_since, record.stop_control) == (3, "stop1")
    idle = after(owner.Ended("exe1", "stopped", True, 4), record=record)
    assert idle.superseded == owner.Superseded(request="r1", response="rsp1", attempt=1)
    admitted = after(admit(2), record=idle)
    assert admitted.superseded == idle.superseded
    assert after(owner.Ended("exe2", "completed", True, 5), record=admitted).superseded is None
    for outcome in ("completed", "failed", "drained", "lost"):
        assert after(owner.Ended("exe1", outcome, True, 4), record=record).superseded is None


def test_a_stop_that_was_refused_leaves_everything_as_it_was() -> None:
    before = after(admit(1), owner.Started("exe1", "b", 1, 2))
    stopping = after(owner.TakeOver("exe1", "stop1", "r2", 3), record=before)
    again = after(owner.StopRefused("stop1", 4), record=stopping)
    assert again == before.model_copy(update={"updated_at": 4})
    assert owner.decide(again, owner.StopRefused("stop1", 4)) == Ignored()
    assert owner.decide(stopping, owner.StopRefused("stop2", 4)) == Ignored(), "of another takeover"
    unclaimed = after(admit(1), owner.TakeOver("exe1", "stop1", "r2", 3), owner.StopRefused("stop1", 4))
    assert unclaimed.state == "starting"


def test_a_stop_that_nobody_confirmed_keeps_its_name_and_lets_another_takeover_follow() -> None:
    stopping = after(admit(1), owner.Started("exe1", "b", 1, 2), owner.TakeOver("exe1", "stop1", "r2", 3))
    assert owner.decide(stopping, owner.TakeOver("exe1", "stop2", "r3", 4)) == Denied("another takeover is under way")
    assert owner.decide(stopping, owner.TakeOver("exe1", "stop1", "r2", 4)) == Ignored()
    unconfirmed = after(owner.StopUnconfirmed("stop1", 5), record=stopping)
    assert (unconfirmed.state, unconfirmed.stop_control, unconfirmed.pending_request) == ("stopping", "stop1", None)
    second = after(owner.TakeOver("exe1", "stop2", "r3", 6), record=unconfirmed)
    assert (second.stop_control, second.pending_request, second.stopping_since) == ("stop2", "r3", 6)
    exiting = after(admit(1), owner.Started("exe1", "b", 1, 2), owner.ResponseEnded("exe1", 3))
    assert owner.decide(exiting, owner.TakeOver("exe1", "s", "r2", 4)) == Denied("the conversation is exiting")


def test_a_session_is_resumed_by_the_same_kind_of_agent_and_only_once_resumable() -> None:
    bound = owner.SessionBound("exe1", "n1", "claude", resumable=False)
    record = after(admit(1, kind="claude"), owner.Started("exe1", "b", 1, 2), bound)
    assert record.target is not None and record.target.native_session == "n1"
    assert record.native_session is None
    done = after(owner.SessionBound("exe1", "n1", "claude"), owner.Ended("exe1", "completed", True, 3), record=record)
    same, other = after(admit(2, kind="claude"), record=done), after(admit(2, kind="codex"), record=done)
    assert same.target is not None and same.target.native_session == "n1"
    assert other.target is not None and other.target.native_session is None


def test_a_fallback_raises_the_process_generation_and_nothing_lowers_it() -> None:
    record = after(admit(1), owner.Started("exe1", "b", 1, 2), owner.Started("exe1", "b", 2, 3))
    assert record.target is not None and record.target.process_generation == 2
    assert owner.decide(record, owner.Started("exe1", "b", 1, 4)) == Ignored()


def test_a_record_that_lost_its_tail_is_repaired_from_the_log_and_the_former_owner_stays_dead() -> None:
    record = after(admit(1), owner.Started("exe1", "b", 1, 2))
    repaired = after(owner.Repair(4, target(3, 4), "r3", 1, 5), record=record)
    assert (repaired.state, repaired.generation, repaired.request) == ("starting", 4, "r3")
    assert repaired.buried("exe1")
    assert owner.decide(repaired, owner.Repair(4, target(3, 4), "r3", 1, 5)) == Ignored()
    idle = after(admit(1), owner.Ended("exe1", "completed", True, 2))
    raised = after(owner.Repair(3, target(1, 3), "r1", 1, 4), record=idle)
    assert (raised.state, raised.generation) == ("idle", 3), "a dead execution is not named again"


@pytest.mark.parametrize("count", [owner.TOMBSTONES_MAX, owner.TOMBSTONES_MAX + 5])
def test_tombstones_are_bounded_and_keep_the_newest(count: int) -> None:
    record = OwnerRecord()
    for number in range(1, count + 1):
        record = after(admit(number), owner.Ended(f"exe{number}", "completed", True, number), record=record)
    assert [stone.execution for stone in record.tombstones] == [
        f"exe{number}" for number in range(count - owner.TOMBSTONES_MAX + 1, count + 1)
    ]


def test_the_next_process_has_another_session_until_it_tells_which_and_the_last_one_stays_known() -> None:
    bound = owner.SessionBound("exe1", "n1", "scripted", cli_version="2.1")
    record = after(admit(1), owner.Started("exe1", "b1", 1, 2), bound, owner.Ended("exe1", "completed", True, 3))
    record = after(admit(2), owner.Started("exe2", "b1", 1, 4), record=record)
    assert record.target is not None and record.target.native_session == "n1"
    record = after(owner.Started("exe2", "b1", 2, 5), record=record)
    assert record.target is not None
    assert (record.target.process_generation, record.target.native_session, record.native_session) == (2, None, "n1")
    record = after(owner.SessionBound("exe2", "n2", "scripted"), record=record)
    assert (record.native_session, record.native_cli_version) == ("n2", "2.1")


def test_an_older_checkpoint_than_the_records_counts_as_none() -> None:
    record = after(replace(admit(1), checkpoint_revision=7))
    assert (record.checkpoint_revision, record.checkpoint_generation) == (7, 1)
    record = after(owner.Ended("exe1", "drained", True, 3), replace(admit(2), checkpoint_revision=7), record=record)
    assert (record.checkpoint_revision, record.checkpoint_generation, record.generation) == (7, 1, 2)


@pytest.mark.parametrize("how", ["drained", "taken over"])
def test_a_turn_that_was_cut_before_its_session_could_be_resumed_stays_known_until_a_session_has_it(how: str) -> None:
    unbound = owner.SessionBound("exe1", "n1", "scripted", resumable=False)
    record = after(admit(1), owner.Started("exe1", "b1", 1, 2), unbound)
    if how == "taken over":
        record = after(owner.TakeOver("exe1", "s1", "r2", 3), owner.Ended("exe1", "stopped", True, 4), record=record)
    else:
        record = after(owner.Ended("exe1", "drained", True, 4), record=record)
    assert record.cut
    record = after(admit(2), record=record)
    assert record.begins_cut and record.fallback
    failed = after(owner.Ended("exe2", "failed", True, 5), record=record)
    assert failed.cut, "what was cut is not told by an attempt that failed"
    assert not after(replace(admit(3), resume="fresh"), record=failed).begins_cut
    assert not after(replace(admit(3), history_fallback="never"), record=failed).fallback
    bound = after(owner.SessionBound("exe2", "n2", "scripted"), record=record)
    assert not after(owner.Ended("exe2", "drained", True, 5), admit(3), record=bound).begins_cut


@pytest.mark.parametrize("outcome", ["completed", "failed", "stopped", "cancelled", "lost", "never_started"])
def test_a_first_turn_that_ended_otherwise_begins_the_next_one_as_before(outcome: str) -> None:
    record = after(admit(1), owner.Started("exe1", "b1", 1, 2), owner.Ended("exe1", outcome, True, 4), admit(2))
    assert not record.cut and not record.begins_cut


def test_a_turn_in_a_resumed_session_that_is_cut_goes_on_in_that_session() -> None:
    record = after(admit(1), owner.SessionBound("exe1", "n1", "scripted"), owner.Ended("exe1", "completed", True, 2))
    record = after(admit(2), owner.Ended("exe2", "drained", True, 3), admit(3), record=record)
    assert not record.begins_cut and record.target is not None and record.target.native_session == "n1"
