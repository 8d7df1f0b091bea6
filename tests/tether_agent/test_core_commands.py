"""One start command, from delivery to receipt, as data."""

from __future__ import annotations

import pytest

from tether.control import ControlReply, StartCommand
from tether.errors import Code, problem
from tether.events import ReceiptStatus
from tether.ids import ExecutionTarget
from tether.limits import NAK_DELAY_MAX_S, NAK_DELAY_MIN_S
from tether.owner import OwnerRecord, OwnerState
from tether.prompt import AgentSpec, TextContent
from tether_agent.core.commands import (
    Answered,
    Ask,
    CommandInput,
    Effect,
    EnsureSandbox,
    Later,
    LogSeen,
    NotNow,
    OwnerSeen,
    ReadLog,
    ReadOwner,
    SandboxImpossible,
    SandboxReady,
    Settle,
    StoreNeverStarted,
    TellFailure,
    Told,
    Unanswered,
    back_off_s,
    begin,
    step,
)

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
COMMAND = StartCommand(
    control="ctl_1",
    target=TARGET,
    owner_revision=20,
    request_id="req_1",
    attempt=1,
    content=(TextContent(text="hello"),),
    agent=AgentSpec(kind="scripted"),
)
FINAL = problem(Code.INVALID, "no such agent")
PASSING = problem(Code.SESSION_BUSY, "a process lives")


def owner(state: OwnerState = "starting", **changes: object) -> OwnerRecord:
    return OwnerRecord(state=state, generation=7, target=TARGET).model_copy(update=changes)


def replied(status: ReceiptStatus, failure: object = None) -> Answered:
    return Answered(ControlReply(control="ctl_1", verb="start", status=status, problem=failure))


def effects(*inputs: CommandInput, deliveries: int = 1) -> list[Effect]:
    state, effect = begin(COMMAND, deliveries)
    seen = [effect]
    for event in inputs:
        state, effect = step(state, event)
        seen.append(effect)
    return seen


UP_TO_ASK = (LogSeen("empty"), OwnerSeen(owner(), 20), SandboxReady(33, COMMAND))


@pytest.mark.parametrize("status", ["accepted", "delivered", "settled"])
def test_a_start_goes_log_owner_sandbox_collector_and_is_acked_with_the_receipt(status: ReceiptStatus) -> None:
    assert effects(*UP_TO_ASK, replied(status)) == [
        ReadLog(),
        ReadOwner(),
        EnsureSandbox(),
        Ask(33, COMMAND),
        Settle("receipt", status),
    ]


def test_a_start_that_the_log_has_claimed_is_done_without_asking_anyone() -> None:
    assert effects(LogSeen("claimed")) == [ReadLog(), Settle("claimed")]


@pytest.mark.parametrize(
    "record",
    [
        None,
        OwnerRecord(state="idle", generation=9),
        owner(target=TARGET.model_copy(update={"execution": "exe_2"})),
        owner(target=TARGET.model_copy(update={"execution_generation": 8})),
    ],
)
def test_a_start_that_the_owner_does_not_name_is_stale(record: OwnerRecord | None) -> None:
    last = effects(LogSeen("empty"), OwnerSeen(record, 21))[-1]
    assert isinstance(last, Settle)
    assert last.result == "stale"


def test_an_owner_record_older_than_the_command_is_waited_for() -> None:
    assert isinstance(effects(LogSeen("empty"), OwnerSeen(owner(), 19))[-1], Later)


@pytest.mark.parametrize("event", [Unanswered(), replied("unknown"), replied("rejected", PASSING), NotNow("away")])
def test_no_word_or_a_passing_refusal_never_gives_up(event: CommandInput) -> None:
    for deliveries in (1, 10, 10_000):
        last = effects(*UP_TO_ASK, event, deliveries=deliveries)[-1]
        assert isinstance(last, Later)
        assert NAK_DELAY_MIN_S <= last.delay_s <= NAK_DELAY_MAX_S


def test_a_start_that_meets_a_drain_is_tried_again_soon_however_often_it_was() -> None:
    draining = replied("rejected", problem(Code.DRAINING, "it drains"))
    for inputs in ((*UP_TO_ASK, draining), (*UP_TO_ASK[:2], NotNow("the sandbox is draining", soon=True))):
        last = effects(*inputs, deliveries=10_000)[-1]
        assert isinstance(last, Later)
        assert last.delay_s < 1.0


def test_a_start_whose_collector_is_being_restarted_is_asked_again_within_a_second_however_often_it_was() -> None:
    for deliveries in (1, 3, 10_000):
        last = effects(*UP_TO_ASK, Unanswered(), deliveries=deliveries)[-1]
        assert isinstance(last, Later)
        assert NAK_DELAY_MIN_S <= last.delay_s <= 1.0


def test_the_back_off_doubles_up_to_its_bound() -> None:
    delays = [back_off_s(deliveries) for deliveries in range(1, 9)]
    assert delays == sorted(delays)
    assert delays[:3] == [0.25, 0.5, 1.0]
    assert delays[-1] == NAK_DELAY_MAX_S


@pytest.mark.parametrize(
    "inputs",
    [(*UP_TO_ASK, replied("rejected", FINAL)), (*UP_TO_ASK[:2], SandboxImpossible(FINAL))],
)
def test_a_final_word_stores_the_end_before_it_tells_the_failure(inputs: tuple[CommandInput, ...]) -> None:
    assert effects(*inputs, LogSeen("never_started", FINAL), Told())[-3:] == [
        StoreNeverStarted(FINAL),
        TellFailure(FINAL),
        Settle("gave_up", FINAL.detail),
    ]


def test_a_claim_that_won_against_the_giving_up_stands() -> None:
    seen = effects(*UP_TO_ASK, replied("rejected", FINAL), LogSeen("claimed"))
    assert seen[-2:] == [StoreNeverStarted(FINAL), Settle("claimed")]


def test_an_end_that_may_not_have_been_stored_tells_nothing_yet() -> None:
    assert isinstance(effects(*UP_TO_ASK, replied("rejected", FINAL), LogSeen("empty"))[-1], Later)


def test_a_crash_after_the_end_was_stored_still_tells_the_failure_with_the_stored_reason() -> None:
    assert effects(LogSeen("never_started", FINAL), Told()) == [
        ReadLog(),
        TellFailure(FINAL),
        Settle("gave_up", FINAL.detail),
    ]


def test_a_takeover_of_a_start_that_has_not_begun_gets_its_proof_and_no_failure_is_told() -> None:
    seen = effects(LogSeen("empty"), OwnerSeen(owner("stopping"), 25), LogSeen("never_started"))
    assert isinstance(seen[-2], StoreNeverStarted)
    assert isinstance(seen[-1], Settle)
    assert seen[-1].result == "gave_up"


@pytest.mark.parametrize("state", ["running", "exiting"])
def test_a_conversation_that_runs_already_needs_no_start(state: OwnerState) -> None:
    assert isinstance(effects(LogSeen("empty"), OwnerSeen(owner(state), 25))[-1], Settle)
