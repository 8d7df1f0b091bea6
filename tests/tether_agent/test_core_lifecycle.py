"""Drains as they are driven, the idle clock and continuations, as data."""

from __future__ import annotations

import pytest

from tether import ids
from tether.checkpoint import CheckpointReference, DrainedExecution, UnheardMessage
from tether.control import ControlReply, StartCommand
from tether.errors import Code, problem
from tether.ids import ExecutionTarget
from tether.limits import DRAIN_DEADLINE_S, REGISTRATION_TTL_S
from tether.prompt import AgentSpec, TextContent
from tether.sandbox import DrainOrder, DrainReport, ExecutionState, ExecutionSummary, Registration, SandboxRecord
from tether_agent.core import continuation, draining, idle

NOW = 1_000_000_000
ORDER = DrainOrder(drain="d1", grace_s=60.0, began_at=NOW)
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


def record(**changes: object) -> SandboxRecord:
    base = SandboxRecord(
        tenant="acme", workspace="w1", sandbox="sbx_1", state="draining", provider="local", drain=ORDER
    )
    return base.model_copy(update={"drained": DrainReport(drain="d1", state="running"), "updated_at": NOW, **changes})


def reply(**changes: object) -> ControlReply:
    return ControlReply(control="ctl_1", verb="drain", status="accepted").model_copy(update=changes)


# --- the drive ---


def test_a_drain_without_a_word_is_given_up_after_the_grace_and_the_deadline_and_says_what_was_not_kept() -> None:
    last_ms = NOW + round((60.0 + DRAIN_DEADLINE_S) * 1000)
    assert draining.following(record(), 0, last_ms) == draining.Ask(ORDER)
    found = draining.following(record(), 0, last_ms + 1)
    assert isinstance(found, draining.GiveUp)
    assert found.report.state == "failed" and found.report.unsaved
    assert found.report.problem is not None and found.report.problem.code is Code.CHECKPOINT_FAILED


def test_each_word_of_the_collector_moves_the_deadline() -> None:
    late_ms = NOW + 10_000_000
    heard = draining.following(record(), late_ms - 1_000, late_ms)
    written = draining.following(record(updated_at=late_ms - 1_000), 0, late_ms)
    assert heard == written == draining.Ask(ORDER), "also of a service that was restarted and only has the record"


def test_what_the_collector_told_before_stays_in_a_report_that_is_given_up() -> None:
    known = DrainedExecution(target=TARGET, outcome="forced")
    told = DrainReport(drain="d1", state="running", executions=(known,))
    assert draining.failed(record(drained=told), problem(Code.CHECKPOINT_FAILED, "away")).executions == (known,)


def test_a_passing_refusal_is_no_word_and_a_final_one_is_the_end() -> None:
    passing = reply(status="rejected", problem=problem(Code.LEASE_NOT_READY, "an older revision"))
    assert draining.report_of(record(), passing) is None
    final = draining.report_of(record(), reply(status="rejected", problem=problem(Code.INVALID, "grace_s: no")))
    assert final is not None and final.state == "failed"


def test_a_report_of_another_drain_is_no_word_on_this_one() -> None:
    assert draining.report_of(record(), reply(result={"drain": "d9", "state": "done"})) is None
    with pytest.raises(ValueError, match="state"):
        draining.report_of(record(), reply(result={"drain": "d1", "state": "perhaps"}))


def test_what_is_released_is_the_boot_that_answered_last() -> None:
    kept = DrainReport(drain="d1", state="running", phase="releasing")
    assert draining.following(record(drained=kept, facts={"boot": "b2"}), 0, NOW) == draining.Release("d1", "b2")


# --- the idle clock ---

IDLE_S = 60.0


def active(**changes: object) -> SandboxRecord:
    return record(state="active", drain=None, drained=None, wanted_at=0, **changes)


def registration(*states: ExecutionState, idle_since: int | None = NOW, **changes: object) -> Registration:
    executions = tuple(ExecutionSummary(target=TARGET, state=state) for state in states)
    base = Registration(
        tenant="acme",
        workspace="w1",
        sandbox="sbx_1",
        boot="b1",
        instance="i1",
        executions=executions,
        idle_since=idle_since,
        updated_at=NOW + 60_000,
    )
    return base.model_copy(update=changes)


LATER = NOW + 60_001


def look(found: Registration | None, *, now_ms: int = LATER, quiet: int | None = None) -> bool:
    seen = idle.Seen(found, now_ms, quiet)
    return idle.is_idle(active(), seen, idle_s=IDLE_S, waiting=quiet is not None)


def test_the_clock_runs_from_the_last_end_and_from_the_last_wish() -> None:
    assert look(registration())
    assert not look(registration(), now_ms=NOW + 60_000)
    seen = idle.Seen(registration(), LATER)
    assert not idle.is_idle(active().model_copy(update={"wanted_at": NOW + 1}), seen, idle_s=IDLE_S, waiting=False)


@pytest.mark.parametrize("state", ["starting", "running", "waiting", "exiting"])
def test_one_busy_execution_blocks_it(state: ExecutionState) -> None:
    assert not look(registration(state, "ended"))
    assert look(registration("ended", "ended"))


def test_what_is_not_known_is_not_idle() -> None:
    assert not look(None)
    assert not look(registration(idle_since=None))
    assert not look(registration(), now_ms=NOW + 60_001 + (REGISTRATION_TTL_S + 60) * 1000), (
        "a registration that is old"
    )
    assert not look(registration(draining="d0"))


def test_who_waits_for_a_person_is_idle_only_where_that_is_configured_and_after_its_own_silence() -> None:
    waiting = registration("waiting", idle_since=None)
    assert not look(waiting)
    assert look(waiting, quiet=NOW)
    assert not look(waiting, quiet=NOW + 10)
    assert not look(registration("waiting", "running", idle_since=None), quiet=NOW)
    assert not look(registration("waiting", idle_since=None, executions_omitted=1), quiet=NOW)


# --- continuations ---


def cut(**changes: object) -> DrainedExecution:
    base = DrainedExecution(
        target=TARGET,
        outcome="graceful",
        agent="claude",
        spec=AgentSpec(kind="claude", model="m1", args=("--x",)),
        cut=True,
        interrupted=("Bash", "Edit"),
        continuation="continue",
    )
    return base.model_copy(update=changes)


def report(*executions: DrainedExecution, state: str = "done") -> DrainReport:
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
    )
    return DrainReport(drain="d1", state="done", executions=executions, checkpoint=reference).model_copy(
        update={"state": state}
    )


def test_a_continuation_names_the_interrupted_tools_asks_for_the_same_agent_and_has_one_id() -> None:
    prompt = continuation.prompt_for("chk_1", cut())
    assert prompt.request_id == ids.continuation_id("chk_1", "c1") == continuation.prompt_for("chk_1", cut()).request_id
    assert "Bash, Edit" in prompt.content[0].text and "anew" in prompt.content[0].text
    assert (prompt.agent.model, prompt.agent.args, prompt.continuation) == ("m1", ("--x",), "continue")
    assert ids.continuation_id("chk_2", "c1") != prompt.request_id
    assert prompt.encode() == continuation.prompt_for("chk_1", cut()).encode()


def test_only_turns_that_were_cut_go_on_and_only_by_their_policy() -> None:
    assert not list(continuation.cut_turns(report(cut(continuation="wait"))))
    assert not list(continuation.cut_turns(report(cut(cut=False))))
    assert not list(continuation.cut_turns(report(cut(), state="failed")))
    assert list(continuation.cut_turns(report(cut()))) == [cut()]


def test_many_tools_are_named_up_to_a_bound() -> None:
    text = continuation.words(tuple(f"tool_{number}" for number in range(20)))
    assert "tool_15" in text and "tool_16" not in text and "4 more" in text


def command(generation: int, request: str = "req_2", conversation: str = "c1") -> StartCommand:
    target = TARGET.model_copy(update={"execution_generation": generation, "conversation": conversation})
    return StartCommand(
        control="ctl_1",
        target=target,
        owner_revision=1,
        request_id=request,
        attempt=1,
        content=(TextContent(text="hello"),),
        agent=AgentSpec(),
    )


def test_a_users_prompt_that_wakes_comes_after_the_words_of_the_continuation_once() -> None:
    known = active().model_copy(update={"drained": report(cut())})
    led = continuation.led_by(known, command(8))
    assert [part.text for part in led.content] == [continuation.words(("Bash", "Edit")), "hello"]
    for other in (command(9), command(8, ids.continuation_id("chk_1", "c1")), command(8, conversation="c2")):
        assert continuation.led_by(known, other) == other
    waits = known.model_copy(update={"drained": report(cut(continuation="wait"))})
    assert continuation.led_by(waits, command(8)) == command(8)


UNREAD = (
    UnheardMessage(request="req_5", text="look at the tests"),
    UnheardMessage(request="req_6", text="and then", cut=True),
)


def test_messages_that_were_not_read_are_told_with_the_continuation() -> None:
    text = continuation.prompt_for("chk_1", cut(unheard=UNREAD, unheard_more=2)).content[0].text
    assert text.startswith(continuation.words(("Bash", "Edit")))
    assert "1. [req_5]\nlook at the tests" in text and "2. [req_6] (its beginning)\nand then" in text
    assert "2 more" in text and text.index("req_5") < text.index("req_6") < text.index("End of the messages")
    led = continuation.led_by(active().model_copy(update={"drained": report(cut(unheard=UNREAD))}), command(8))
    assert "look at the tests" in led.content[0].text and led.content[1:] == command(8).content


@pytest.mark.parametrize("state", ["done", "failed"])
def test_messages_that_were_not_read_lead_the_next_prompt_once_where_the_turn_does_not_go_on_by_itself(
    state: str,
) -> None:
    drained = report(cut(unheard=UNREAD, continuation="wait"), state=state)
    if state == "failed":
        drained = drained.model_copy(update={"checkpoint": None})
    known = active().model_copy(update={"drained": drained})
    led = continuation.led_by(known, command(8))
    assert led.content[0].text.startswith("[tether] Your last turn was cut off")
    assert "look at the tests" in led.content[0].text and "Go on from" not in led.content[0].text
    assert led.content[1:] == command(8).content and led == continuation.led_by(known, command(8))
    for other in (command(9), command(8, conversation="c2")):
        assert continuation.led_by(known, other) == other


def test_what_a_deleted_record_does_not_know_any_more_the_reference_tells() -> None:
    told = report(cut(unheard=UNREAD))
    assert told.checkpoint is not None
    reference = told.checkpoint.model_copy(update={"executions": told.executions})
    anew = continuation.as_kept(active(), reference)
    assert continuation.led_by(anew, command(8)) == continuation.led_by(continuation.as_kept(anew, None), command(8))
    assert "look at the tests" in continuation.led_by(anew, command(8)).content[0].text
    for known in (told, report(state="failed")):  # the record's own word, and that of a later drain that failed
        mine = active().model_copy(update={"drained": known})
        assert continuation.as_kept(mine, reference) == mine
    newer = reference.model_copy(update={"drain": "d2"})  # of a collector that was drained by the machine, and went on
    assert continuation.as_kept(active().model_copy(update={"drained": told}), newer).drained != told
