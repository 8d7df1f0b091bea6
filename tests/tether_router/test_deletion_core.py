"""The deletion's machine: which step follows which, and what a record says while it waits."""

from __future__ import annotations

from typing import Final

import pytest

from tether.deletion import STEPS, DeletionRecord, Step
from tether.errors import Code
from tether.ids import ExecutionTarget
from tether.limits import REQUEST_MEMORY_S
from tether.owner import Accepted, DeletionOrdered, Denied, Ignored, OwnerRecord, Tombstone, decide
from tether_router.core import deletion as core
from tether_router.core.deletion import Behind, Busy, Erased, Later, Marked, Reached, VolumeAway, VolumeClean

AT: Final = 1_700_000_000_000
RECORD: Final = DeletionRecord(
    deletion="del_1", tenant="acme", conversation="c1", workspace="w1", began_at=AT, updated_at=AT
)
TARGET: Final = ExecutionTarget(
    tenant="acme",
    workspace="w1",
    conversation="c1",
    response="rsp_1",
    response_generation=1,
    execution="exe_1",
    execution_generation=1,
    sandbox="sbx_1",
)


def through(record: DeletionRecord, *results: core.Result) -> list[Step]:
    """The steps that the record passes, the first one included."""
    steps = [record.step]
    for result in results:
        record = core.decide(record, result, AT)
        steps.append(record.step)
    return steps


def test_a_deletion_takes_every_step_in_its_order_and_is_done() -> None:
    record = RECORD
    seen: list[Step] = []
    results: dict[Step, core.Result] = {
        "marking": Marked(("session-1",)),
        "sandbox": VolumeClean({"files": 3}),
        "projections": Reached(),
    }
    while record.state == "running":
        seen.append(record.step)
        record = core.decide(record, results.get(record.step, Erased({record.step: 1}, sequence=9)), AT)
    assert tuple(seen) == STEPS[:-1], "`volume` is for a volume that was out of reach"
    assert (record.state, record.volume_clean, record.pending_on) == ("done", True, ())
    assert record.free_at == AT + REQUEST_MEMORY_S * 1000
    assert record.sessions == ("session-1",)
    assert record.log_sequence == 9
    assert record.erased == {"prompts": 1, "files": 3, "checkpoints": 1, "blobs": 1, "log": 1, "records": 1}


def test_prompts_are_refused_before_anything_is_erased() -> None:
    assert STEPS.index("marking") == 0


def test_the_collector_forgets_before_the_log_is_erased_so_that_it_puts_no_tail_back() -> None:
    assert STEPS.index("sandbox") < STEPS.index("log")


def test_blobs_are_erased_before_the_events_that_name_them() -> None:
    assert STEPS.index("blobs") < STEPS.index("log")


def test_what_runs_is_refused_without_force_and_nothing_was_changed() -> None:
    failed = core.decide(RECORD, Busy("exe_1", stopping=False), AT)
    assert failed.state == "failed"
    assert failed.problem is not None and failed.problem.code is Code.SESSION_BUSY
    assert failed.problem.context["execution"] == "exe_1"
    assert failed.erased == {}


def test_with_force_the_end_of_what_runs_is_waited_for_and_said() -> None:
    waiting = core.decide(RECORD, Busy("exe_1", stopping=True), AT)
    assert (waiting.state, waiting.step) == ("running", "marking")
    assert waiting.pending_on == ("the end of execution exe_1",)
    assert core.decide(waiting, Marked(), AT).pending_on == ()


def test_a_volume_out_of_reach_delays_nothing_else_and_is_come_back_to() -> None:
    record = RECORD.model_copy(update={"step": "sandbox"})
    away = VolumeAway("it sleeps")
    steps = through(record, away, Erased(), Erased(), Erased(sequence=9), Erased(), Reached())
    assert steps == ["sandbox", "checkpoints", "blobs", "log", "records", "projections", "volume"]
    for result in (away, Erased(), Erased(), Erased(sequence=9), Erased(), Reached(), away):
        record = core.decide(record, result, AT)
    assert (record.state, record.step, record.free_at) == ("running", "volume", 0)
    assert record.pending_on == ("workspace volume: it sleeps",)


def test_what_was_made_while_the_volume_was_away_is_erased_once_more_before_the_end() -> None:
    record = RECORD.model_copy(update={"step": "volume", "pending_on": ("workspace volume: it sleeps",)})
    steps = through(record, VolumeClean(), Erased(), Erased(), Erased(sequence=9), Erased(), Reached())
    assert steps == ["volume", "checkpoints", "blobs", "log", "records", "projections", "projections"]


def test_a_database_that_is_away_is_waited_for_a_while_and_then_named() -> None:
    record = RECORD.model_copy(update={"step": "projections", "volume_clean": True})
    waits = core.decide(record, Behind(("db1",), waited=False), AT)
    assert (waits.state, waits.pending_on) == ("running", ("database db1",))
    over = core.decide(waits, Behind(("db1",), waited=True), AT)
    assert (over.state, over.pending_on) == ("done", ("database db1",))


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_has_to_wait_stays_where_it_is(step: Step) -> None:
    record = RECORD.model_copy(update={"step": step})
    later = core.decide(record, Later("the sandbox is draining"), AT)
    assert (later.state, later.step) == ("running", step)
    assert core.decide(later, Later("the sandbox is draining"), AT + 1) == later, "nothing is written again"


def test_a_done_deletion_is_due_only_when_its_id_is_to_be_freed() -> None:
    done = RECORD.model_copy(update={"state": "done", "free_at": AT + 10})
    assert not core.is_due(done, AT)
    assert core.is_due(done, AT + 10)
    freed = core.free(done, AT + 10)
    assert not core.is_due(freed, AT + 20)
    assert not freed.bars
    assert done.bars and RECORD.bars


# --- the owner record ---


def test_an_idle_owner_forgets_its_agent_and_refuses_prompts() -> None:
    stones = (Tombstone(execution="exe_0", outcome="completed", at=AT),)
    record = OwnerRecord(
        generation=4, agent={"kind": "claude", "model": "x"}, native_session="s1", cut=True, tombstones=stones
    )
    decision = decide(record, DeletionOrdered("del_1", False, AT))
    assert isinstance(decision, Accepted)
    bare = decision.record
    assert (bare.deletion, bare.state, bare.generation) == ("del_1", "idle", 4)
    assert bare.tombstones == stones, "what has ended stays ended"
    assert bare.native_session == "s1", "until it is deleted, its name is needed"
    assert bare.agent == {} and not bare.cut
    assert isinstance(decide(bare, DeletionOrdered("del_1", False, AT + 5)), Ignored)


def test_an_active_owner_is_marked_only_with_force_and_keeps_its_target() -> None:
    record = OwnerRecord(state="running", generation=1, target=TARGET, request="r1")
    assert isinstance(decide(record, DeletionOrdered("del_1", False, AT)), Denied)
    decision = decide(record, DeletionOrdered("del_1", True, AT))
    assert isinstance(decision, Accepted)
    assert (decision.record.deletion, decision.record.target) == ("del_1", TARGET)
    assert isinstance(decide(decision.record, DeletionOrdered("del_1", True, AT)), Ignored)
