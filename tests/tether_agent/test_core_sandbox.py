"""The sandbox record's life cycle, as data."""

from __future__ import annotations

import pytest

from tether.checkpoint import CheckpointReference, DrainedExecution
from tether.errors import Code, problem
from tether.ids import ExecutionTarget
from tether.sandbox import DrainOrder, DrainReport, SandboxRecord, SandboxState
from tether_agent.core.sandbox import (
    Deleted,
    DeleteOrdered,
    DrainedItself,
    DrainOrdered,
    DrainReported,
    Forwarded,
    Keep,
    Provisioned,
    Refuse,
    Released,
    Remove,
    SandboxInput,
    Wait,
    WakeFailed,
    Wanted,
    Woken,
    Write,
    decide,
)

WANTED = Wanted("acme", "w1", "sbx_1", "local", at=5)


def record(state: SandboxState, **changes: object) -> SandboxRecord:
    base = SandboxRecord(tenant="acme", workspace="w1", sandbox="sbx_1", state=state, provider="local")
    return base.model_copy(update=changes)


def test_a_first_start_makes_the_record_in_provisioning() -> None:
    decision = decide(None, WANTED)
    assert isinstance(decision, Write)
    assert (decision.record.state, decision.record.starts, decision.record.updated_at) == ("provisioning", 0, 5)


@pytest.mark.parametrize("state", ["provisioning", "resuming", "active"])
def test_a_sandbox_that_is_there_or_on_its_way_is_kept(state: SandboxState) -> None:
    assert decide(record(state), WANTED) == Keep()


def test_a_suspended_sandbox_is_resumed() -> None:
    decision = decide(record("suspended", starts=3), WANTED)
    assert isinstance(decision, Write)
    assert (decision.record.state, decision.record.starts) == ("resuming", 3)


@pytest.mark.parametrize("state", ["draining", "deleting"])
@pytest.mark.parametrize("event", [WANTED, Provisioned({}, at=6), Forwarded(at=6)])
def test_a_sandbox_that_is_going_away_makes_every_start_wait(state: SandboxState, event: SandboxInput) -> None:
    assert decide(record(state), event) == Wait(f"the sandbox is {state}")


def test_another_providers_sandbox_is_left_alone() -> None:
    assert isinstance(decide(record("active", provider="kubernetes"), WANTED), Wait)


@pytest.mark.parametrize("state", ["provisioning", "resuming"])
def test_provisioned_compute_makes_the_sandbox_active_with_its_facts(state: SandboxState) -> None:
    decision = decide(record(state), Provisioned({"boot": "b"}, at=7))
    assert isinstance(decision, Write)
    assert (decision.record.state, decision.record.facts) == ("active", {"boot": "b"})


def test_the_same_facts_again_write_nothing_so_that_a_drain_is_not_disturbed() -> None:
    assert decide(record("active", facts={"boot": "b"}), Provisioned({"boot": "b"}, at=8)) == Keep()


def test_every_forwarded_start_is_counted() -> None:
    decision = decide(record("active", starts=41), Forwarded(at=9))
    assert isinstance(decision, Write)
    assert decision.record.starts == 42


@pytest.mark.parametrize("state", ["provisioning", "suspended", "resuming"])
def test_a_start_is_forwarded_to_an_active_sandbox_only(state: SandboxState) -> None:
    assert isinstance(decide(record(state), Forwarded(at=9)), Wait)
    assert isinstance(decide(None, Forwarded(at=9)), Wait)


TARGET = ExecutionTarget(
    tenant="acme",
    workspace="w1",
    conversation="c1",
    response="rsp_1",
    response_generation=7,
    execution="exe_1",
    execution_generation=7,
    sandbox="sbx_1",
)
ORDER = DrainOrder(drain="d1", reason="test", began_at=10)
DELETE = DrainOrder(drain="d2", purpose="delete")
DONE = DrainReport(drain="d1", state="done", phase="over", checkpoint_revision=44)
FAILED = DrainReport(drain="d1", state="failed", phase="over", problem=problem(Code.CHECKPOINT_FAILED, "full"))


def written(found: object) -> SandboxRecord:
    assert isinstance(found, Write), found
    return found.record


def draining(**changes: object) -> SandboxRecord:
    return written(decide(record("active"), DrainOrdered(ORDER, at=10))).model_copy(update=changes)


def test_a_drain_goes_from_its_order_over_its_report_to_suspended_with_the_reference() -> None:
    begun = draining()
    assert (begun.state, begun.drain, begun.drained and begun.drained.state) == ("draining", ORDER, "running")
    kept = written(decide(begun, DrainReported(DONE, at=11)))
    assert kept.drained is not None
    assert (kept.state, kept.drained.state, kept.drained.phase) == ("draining", "running", "releasing")
    over = written(decide(kept, Released("d1", at=12)))
    assert over.drained is not None
    assert (over.state, over.drain, over.checkpoint_revision) == ("suspended", None, 44)
    assert (over.drained.state, over.drained.purpose) == ("done", "drain")


def test_compute_is_not_given_up_before_the_collector_said_that_all_is_kept() -> None:
    assert isinstance(decide(draining(), Released("d1", at=12)), Wait)
    other = written(
        decide(draining(), DrainReported(DrainReport(drain="d1", state="running", phase="releasing"), at=11))
    )
    assert isinstance(decide(other, Released("d1", at=12)), Wait), "the collector's own last phase is not the release"


def test_a_drain_that_failed_leaves_the_sandbox_active_and_says_why() -> None:
    after = written(decide(draining(), DrainReported(FAILED, at=11)))
    assert (after.state, after.drain) == ("active", None)
    assert after.drained is not None and after.drained.problem is not None
    assert decide(after, DrainOrdered(ORDER, at=12)) == Keep(), "the same id never begins twice"
    assert written(decide(after, DrainOrdered(DELETE, at=12))).state == "draining"


def test_reports_of_another_drain_or_after_the_end_change_nothing() -> None:
    assert decide(draining(), DrainReported(DONE.model_copy(update={"drain": "d9"}), at=11)) == Keep()
    kept = written(decide(draining(), DrainReported(DONE, at=11)))
    assert decide(kept, DrainReported(FAILED, at=12)) == Keep()
    assert decide(record("suspended"), DrainReported(DONE, at=12)) == Keep()
    assert decide(record("active"), Released("d1", at=12)) == Keep()


@pytest.mark.parametrize("state", ["draining", "suspended", "deleting"])
def test_a_second_drain_joins_what_is_there(state: SandboxState) -> None:
    assert decide(record(state, drain=ORDER), DrainOrdered(DELETE, at=12)) == Keep()


@pytest.mark.parametrize("state", ["provisioning", "resuming"])
def test_a_sandbox_that_is_being_started_is_drained_later(state: SandboxState) -> None:
    decision = decide(record(state), DrainOrdered(ORDER, at=12))
    assert isinstance(decision, Refuse)
    assert (decision.problem.code, decision.problem.retryable) == (Code.RUNTIME_UNAVAILABLE, True)


@pytest.mark.parametrize("event", [DrainOrdered(ORDER, at=1), Woken(at=1), DeleteOrdered(DELETE, DONE, at=1)])
def test_what_is_not_there_is_said_to_be_not_there(event: SandboxInput) -> None:
    decision = decide(None, event)
    assert isinstance(decision, Refuse)
    assert decision.problem.code is Code.NOT_FOUND


def test_a_wake_moves_the_record_of_an_active_sandbox_on_so_that_an_idle_suspend_loses() -> None:
    assert written(decide(record("active"), Woken(at=50))).wanted_at == 50
    assert written(decide(record("suspended"), Woken(at=50))).state == "resuming"
    assert decide(record("resuming"), Woken(at=50)) == Keep()


def test_a_wake_that_cannot_be_is_suspended_again() -> None:
    assert written(decide(record("resuming"), WakeFailed(at=9))).state == "suspended"
    assert decide(record("active"), WakeFailed(at=9)) == Keep()


def test_a_collector_that_the_machine_drained_suspends_the_boot_that_it_was_of() -> None:
    known = record("active", facts={"boot": "b1"})
    after = written(decide(known, DrainedItself("b1", DONE, at=9)))
    assert (after.state, after.checkpoint_revision) == ("suspended", 44)
    assert decide(known, DrainedItself("b0", DONE, at=9)) == Keep()
    assert decide(draining(), DrainedItself("b1", DONE, at=9)) == Keep()


@pytest.mark.parametrize("state", ["provisioning", "resuming", "suspended"])
def test_what_runs_nothing_is_deleted_without_a_drain(state: SandboxState) -> None:
    deleting = written(decide(record(state), DeleteOrdered(DELETE, DONE, at=9)))
    assert (deleting.state, deleting.drain) == ("deleting", DELETE)
    assert decide(deleting, Deleted(at=10)) == Remove()
    assert decide(record(state), Deleted(at=10)) == Keep()


def test_what_may_run_is_drained_before_it_is_deleted_unless_no_checkpoint_is_wanted() -> None:
    assert isinstance(decide(record("active"), DeleteOrdered(DELETE, DONE, at=9)), Wait)
    assert isinstance(decide(draining(), DeleteOrdered(DELETE, DONE, at=9)), Wait)
    for known in (record("active"), draining()):
        assert written(decide(known, DeleteOrdered(DELETE, DONE, at=9, checkpoint=False))).state == "deleting"
    assert written(decide(record("active"), DeleteOrdered(DELETE, DONE, at=9, over=True))).state == "deleting"


def test_a_delete_that_drains_goes_on_to_no_record() -> None:
    begun = written(decide(record("active"), DrainOrdered(DELETE, at=9)))
    kept = written(decide(begun, DrainReported(DONE.model_copy(update={"drain": "d2"}), at=10)))
    deleting = written(decide(kept, Released("d2", at=11)))
    assert (deleting.state, deleting.checkpoint_revision) == ("deleting", 44)
    assert decide(deleting, Deleted(at=12)) == Remove()


def test_the_compute_that_goes_on_with_a_drain_is_noted_without_touching_its_clock() -> None:
    known = draining(updated_at=10, facts={"boot": "b1"})
    noted = written(decide(known, Provisioned({"boot": "b2"}, at=99, drains=True)))
    assert (noted.state, noted.facts, noted.updated_at) == ("draining", {"boot": "b2"}, 10)
    assert isinstance(decide(known, Provisioned({"boot": "b2"}, at=99)), Wait)


def test_the_record_keeps_the_executions_of_a_drain_once() -> None:
    reference = CheckpointReference(
        checkpoint="chk_1",
        drain="d1",
        tenant="acme",
        workspace="w1",
        sandbox="sbx_1",
        boot="b1",
        manifest="0" * 64,
        manifest_bytes=1,
        stored="volume",
        include="sessions",
        clean=True,
        executions=(DrainedExecution(target=TARGET, outcome="graceful"),),
    )
    told = DONE.model_copy(update={"checkpoint": reference})
    itself = written(decide(record("active", facts={"boot": "b1"}), DrainedItself("b1", told, at=9)))
    ordered = written(decide(draining(), DrainReported(told, at=11)))
    for after in (itself, ordered):
        assert after.drained is not None and after.drained.checkpoint is not None
        assert (after.drained.executions, after.drained.checkpoint.executions) == (reference.executions, ())
