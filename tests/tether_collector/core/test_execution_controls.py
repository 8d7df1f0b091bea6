"""Controls at the machine: admission, races, receipts, exact stop."""

from __future__ import annotations

from typing import Any

import pytest

from support_execution import PROMPT_ID, TARGET, Rig, started
from tether import events as ev
from tether.errors import Code
from tether_collector.core import inputs as i
from tether_collector.core.execution import SETTLE
from tether_collector.core.stop import STOP_INTERRUPT, STOP_TERM

OK = {"type": "result", "status": "ok", "prompt": PROMPT_ID}
CONTENT = [{"type": "text", "text": "and this"}]


def waiting(kind: str = "approval", **fields: Any) -> Rig:
    """The agent asks and waits."""
    rig = started()
    rig.say(
        {"type": "tool.start", "id": "t1", "name": "work", "input": {"n": 1}},
        {"type": "ask", "request": "r1", "kind": kind, "tool": "work", "tool_id": "t1", "input": {"n": 1}, **fields},
    )
    return rig


def refusal(rig: Rig, verb: str, **payload: Any) -> Code | None:
    rejection = rig.execution.check_control(verb, rig.execution.target, payload)
    return None if rejection is None else rejection.code


def resolve(rig: Rig, decision: str = "allow") -> None:
    rig.say({"type": "ask.resolved", "request": "r1", "decision": decision})


def test_an_answer_goes_to_the_agent_and_is_settled_by_its_output() -> None:
    rig = waiting()
    rig.control("k1", "answer", interaction="r1", decision="allow", input={"n": 2})
    (write,) = rig.wants(i.WriteStdin)
    assert write.data == b'{"type":"answer","request":"r1","decision":"allow","input":{"n":2}}\n'
    rig.written("k1")
    assert rig.receipts("k1") == ["accepted", "delivered"]
    resolve(rig)
    assert rig.receipts("k1") == ["accepted", "delivered", "settled"]
    assert rig.body(ev.INTERACTION_RESOLVED) == {"interaction": "r1", "outcome": "answered", "control": "k1"}
    assert rig.execution.pending() == []


def test_c2_of_two_answers_in_one_millisecond_the_first_wins_and_the_other_is_refused_with_its_name() -> None:
    rig = waiting()
    assert refusal(rig, "answer", interaction="r1", decision="allow") is None
    assert refusal(rig, "answer", interaction="r1", decision="deny") is None
    rig.control("k1", "answer", interaction="r1", decision="allow")
    rig.control("k2", "answer", interaction="r1", decision="deny")
    assert [write.control for write in rig.wants(i.WriteStdin)] == ["k1"]
    (lost,) = [body for body in rig.bodies(ev.CONTROL_RECEIPT) if body["control"] == "k2"]
    assert (lost["status"], lost["reason"]) == ("rejected", "INTERACTION_SETTLED")
    assert "k1" in lost["detail"]


def test_c3_deny_finish_then_approve_is_refused_without_effect() -> None:
    rig = waiting()
    rig.control("k1", "answer", interaction="r1", decision="deny", text="no")
    rig.write_all()
    resolve(rig, "deny")
    rig.say({"type": "tool.end", "id": "t1", "status": "error", "output": "no"})
    assert rig.body(ev.INTERACTION_RESOLVED)["outcome"] == "denied"
    rejection = rig.execution.check_control("answer", TARGET, {"interaction": "r1", "decision": "allow"})
    assert rejection is not None
    assert rejection.code is Code.INTERACTION_SETTLED
    assert rejection.problem.context["control"] == "k1"
    rig.say(OK)
    assert refusal(rig, "answer", interaction="r1", decision="allow") is Code.INTERACTION_SETTLED
    rig.control("k2", "answer", interaction="r1", decision="allow")
    assert rig.receipts("k2") == ["rejected"]
    assert rig.wants(i.WriteStdin) == []


def test_c5_a_control_for_another_generation_is_stale_and_is_told_the_current_target() -> None:
    rig = started()
    for change in ({"execution_generation": 0}, {"response": "rsp_0"}, {"process_generation": 2}, {"boot": "b0"}):
        rejection = rig.execution.check_control("stop", TARGET.model_copy(update=change), {})
        assert rejection is not None
        assert rejection.code is Code.TARGET_STALE
        assert rejection.problem.context["target"]["native_session"] == "s-1"
    assert rig.execution.wants() == []


@pytest.mark.parametrize("field", ["tenant", "workspace", "conversation"])
def test_a_control_for_something_else_learns_nothing_of_this_execution(field: str) -> None:
    rejection = started().execution.check_control("stop", TARGET.model_copy(update={field: "other"}), {})
    assert rejection is not None
    assert rejection.code is Code.TARGET_UNKNOWN
    assert "target" not in rejection.problem.context


def test_a_target_of_before_the_process_still_fits_and_another_native_session_does_not() -> None:
    rig = started()
    early = TARGET.model_copy(update={"boot": "", "process_generation": 0})
    assert rig.execution.check_control("stop", early, {}) is None
    other = rig.execution.check_control("stop", TARGET.model_copy(update={"native_session": "s-2"}), {})
    assert other is not None
    assert other.code is Code.TARGET_STALE
    assert rig.execution.check_control("stop", None, {}) is not None


@pytest.mark.parametrize(
    ("verb", "payload", "code"),
    [
        ("answer", {"interaction": "nope", "decision": "allow"}, Code.TARGET_UNKNOWN),
        ("answer", {"interaction": "r1"}, Code.INVALID),
        ("answer", {"interaction": "r1", "decision": "maybe"}, Code.INVALID),
        ("answer", {"interaction": "r1", "decision": "allow", "answers": {"q1": ["a"]}}, Code.INVALID),
        ("answer", {"interaction": ["r1"], "decision": "allow"}, Code.INVALID),
        ("interject", {}, Code.INVALID),
        ("interject", {"request": "req_2", "content": [{"type": "image"}]}, Code.INVALID),
        ("drain", {}, None),
        ("checkpoint", {}, Code.CAPABILITY_MISSING),
        ("answer", {"interaction": "r1", "decision": "allow"}, None),
        ("interject", {"request": "req_2", "content": CONTENT}, None),
        ("interrupt", {}, None),
        ("stop", {}, None),
    ],
)
def test_admission_answers_by_name(verb: str, payload: dict[str, Any], code: Code | None) -> None:
    assert refusal(waiting(), verb, **payload) is code


def test_a_bad_payload_that_was_journaled_all_the_same_is_refused_and_breaks_nothing() -> None:
    rig = waiting()
    for number, payload in enumerate(({"interaction": 7}, {}, "x", None, [1])):
        rig.note("control", control=f"k{number}", verb="answer", payload=payload)
        assert rig.receipts(f"k{number}") == ["rejected"]
    assert rig.wants(i.WriteStdin) == []


def test_a_control_noted_twice_has_one_effect() -> None:
    rig = waiting()
    rig.control("k1", "answer", interaction="r1", decision="allow")
    assert rig.control("k1", "answer", interaction="r1", decision="allow") == []
    assert len(rig.wants(i.WriteStdin)) == 1


def test_a_partial_write_is_unknown_and_is_never_tried_again() -> None:
    rig = waiting()
    rig.control("k1", "answer", interaction="r1", decision="allow")
    rig.written("k1", "partial")
    assert rig.receipts("k1") == ["accepted", "unknown"]
    assert rig.wants(i.WriteStdin) == []


def test_a_write_that_found_stdin_closed_is_refused() -> None:
    rig = waiting()
    rig.control("k1", "answer", interaction="r1", decision="allow")
    rig.written("k1", "closed")
    assert rig.receipts("k1") == ["accepted", "rejected"]


def test_what_the_keeper_never_got_before_stdin_closed_is_refused() -> None:
    rig = waiting()
    rig.control("k1", "answer", interaction="r1", decision="allow")
    rig.give(i.StreamClosed(rig.at, "stdin"))
    assert rig.receipts("k1") == ["accepted", "rejected"]
    assert refusal(rig, "interrupt") is Code.SESSION_STREAM_NOT_ACTIVE


def test_a_delivered_answer_whose_effect_never_showed_is_unknown_at_the_end() -> None:
    rig = waiting()
    rig.control("k1", "answer", interaction="r1", decision="allow")
    rig.written("k1")
    rig.exit(-9)
    rig.prove()
    assert rig.receipts("k1") == ["accepted", "delivered", "unknown"]
    assert rig.body(ev.INTERACTION_RESOLVED) == {
        "interaction": "r1",
        "outcome": "expired",
        "control": "k1",
        "detail": "the process ended",
    }
    types = rig.types()
    assert types.index(ev.INTERACTION_RESOLVED) < types.index(ev.EXECUTION_ENDED)


def test_an_answer_that_the_agent_withdrew_before_it_arrived_is_refused() -> None:
    rig = waiting()
    rig.control("k1", "answer", interaction="r1", decision="allow")
    rig.written("k1")
    rig.say({"type": "ask.cancelled", "request": "r1"})
    assert rig.receipts("k1") == ["accepted", "delivered", "rejected"]
    assert rig.body(ev.INTERACTION_RESOLVED)["outcome"] == "cancelled"


def test_a_question_takes_answers_by_id_and_refuses_others() -> None:
    questions = [{"id": "q1", "question": "Which?", "options": ["a", "b"], "multi": False}]
    rig = waiting("question", questions=questions)
    asked = rig.body(ev.INTERACTION_REQUESTED)["questions"][0]
    assert asked["options"] == [{"label": "a"}, {"label": "b"}]
    assert refusal(rig, "answer", interaction="r1", decision="allow", answers={"q9": ["a"]}) is Code.INVALID
    rig.control("k1", "answer", interaction="r1", decision="allow", answers={"q1": ["a"]})
    (write,) = rig.wants(i.WriteStdin)
    assert b'"answers":{"q1":["a"]}' in write.data


# --- interjections ---------------------------------------------------------------------------------------------------


def interject(rig: Rig, control: str = "k1") -> None:
    rig.control(control, "interject", request="req_2", content=CONTENT)


def test_a_written_interjection_that_was_not_taken_up_keeps_the_response_open() -> None:
    rig = started()
    interject(rig)
    rig.write_all()
    rig.say(OK)
    assert ev.RESPONSE_ENDED not in rig.types()
    assert not rig.wants(i.CloseStdin)
    rig.say({"type": "turn.started", "prompt": "k1"})
    assert rig.receipts("k1") == ["accepted", "delivered", "settled"]
    rig.say({"type": "result", "status": "ok", "prompt": "k1"})
    assert rig.types()[-1] == ev.RESPONSE_ENDED


def test_an_interjection_that_is_not_even_written_keeps_the_response_open() -> None:
    rig = started()
    interject(rig)
    rig.say(OK)
    assert ev.RESPONSE_ENDED not in rig.types()
    assert len(rig.wants(i.WriteStdin)) == 1


def test_an_interjection_that_a_hanging_agent_never_takes_up_is_given_up_with_a_bound() -> None:
    rig = started()
    interject(rig)
    rig.write_all()
    rig.say(OK)
    assert rig.deadline(SETTLE) == 10_000
    rig.timer(SETTLE)
    assert rig.types()[-1] == ev.RESPONSE_ENDED
    rig.exit()
    assert rig.receipts("k1") == ["accepted", "delivered", "unknown"]


def test_a_steered_interjection_joins_the_running_turn() -> None:
    rig = started()
    interject(rig)
    rig.write_all()
    rig.say({"type": "prompt.accepted", "id": "k1", "mode": "steered"}, {"type": "model", "state": "completed"}, OK)
    assert rig.receipts("k1")[-1] == "settled"
    assert rig.types()[-1] == ev.RESPONSE_ENDED


def test_a_steered_interjection_that_came_too_late_gets_its_turn() -> None:
    rig = started()
    interject(rig)
    rig.write_all()
    rig.say({"type": "model", "state": "completed"}, {"type": "prompt.accepted", "id": "k1", "mode": "steered"}, OK)
    assert ev.RESPONSE_ENDED not in rig.types()
    rig.say({"type": "turn.started", "prompt": "k1"}, {"type": "result", "status": "ok", "prompt": "k1"})
    assert rig.types()[-1] == ev.RESPONSE_ENDED


def test_c8_an_interjection_after_the_response_is_refused_and_says_that_it_ended() -> None:
    rig = started()
    rig.say(OK)
    payload = {"request": "req_2", "content": CONTENT}
    rejection = rig.execution.check_control("interject", TARGET, payload)
    assert rejection is not None
    assert rejection.code is Code.SESSION_STREAM_NOT_ACTIVE
    assert rejection.problem.context["ended"] is True


# --- interrupt and stop ------------------------------------------------------------------------------------------


def test_an_interrupt_ends_the_turn_and_cancels_the_response() -> None:
    rig = waiting()
    rig.control("k1", "interrupt")
    rig.write_all()
    rig.say({"type": "interrupted", "id": "k1"}, {"type": "ask.cancelled", "request": "r1"})
    assert rig.receipts("k1") == ["accepted", "delivered", "settled"]
    rig.say({"type": "result", "status": "interrupted", "prompt": PROMPT_ID})
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == "cancelled"
    rig.exit()
    rig.prove()
    assert rig.body(ev.EXECUTION_ENDED)["outcome"] == "cancelled"


def test_an_interrupt_leaves_a_queued_interjection_its_turn() -> None:
    rig = started()
    interject(rig, "k1")
    rig.control("k2", "interrupt")
    rig.write_all()
    rig.say({"type": "result", "status": "interrupted", "prompt": PROMPT_ID})
    assert ev.RESPONSE_ENDED not in rig.types()
    rig.say({"type": "turn.started", "prompt": "k1"}, {"type": "result", "status": "ok", "prompt": "k1"})
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == "completed"


def test_c6_a_stop_escalates_from_interrupt_to_sigterm_to_kill_and_is_settled_by_proof_alone() -> None:
    rig = started()
    rig.control("k1", "stop")
    (write,) = rig.wants(i.WriteStdin)
    assert write.data == b'{"type":"interrupt","id":"k1"}\n'
    rig.written("k1")
    assert rig.deadline(STOP_INTERRUPT) == 2_000
    rig.timer(STOP_INTERRUPT)
    assert rig.wants(i.CloseStdin)
    assert rig.wants(i.SendSignal) == [i.SendSignal("k1", "SIGTERM")]
    assert rig.deadline(STOP_TERM) == 5_000
    rig.timer(STOP_TERM)
    assert rig.execution.wants() == [i.KillAll()]
    rig.exit(-9)
    assert rig.receipts("k1") == ["accepted", "delivered"], "an exit is no proof"
    assert rig.wants(i.KillAll), "what the agent left behind must go as well"
    rig.prove()
    assert rig.receipts("k1") == ["accepted", "delivered", "settled"]
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == rig.body(ev.EXECUTION_ENDED)["outcome"] == "stopped"
    assert rig.types()[-1] == ev.EXECUTION_ENDED


def test_a_stop_whose_interrupt_is_obeyed_leaves_the_agent_its_two_seconds_to_go() -> None:
    rig = started()
    rig.control("k1", "stop")
    rig.write_all()
    rig.say({"type": "interrupted", "id": "k1"}, {"type": "result", "status": "interrupted"})
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == "stopped"
    assert rig.wants(i.CloseStdin)
    assert not rig.wants(i.SendSignal)
    assert rig.receipts("k1") == ["accepted", "delivered"]


def test_c9_a_natural_completion_wins_over_a_stop_and_the_receipt_says_so() -> None:
    rig = started()
    rig.control("k1", "stop")
    rig.say({"type": "text", "segment": "s1", "text": "done"}, OK)
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == "completed"
    rig.exit()
    rig.prove()
    assert rig.body(ev.EXECUTION_ENDED)["outcome"] == "completed"
    settled = rig.bodies(ev.CONTROL_RECEIPT)[-1]
    assert (settled["status"], settled["detail"]) == ("settled", "the response had ended before: completed")


def test_c10_a_stop_of_an_agent_that_hangs_on_after_its_end_goes_straight_to_sigterm() -> None:
    rig = started()
    rig.say(OK)
    rig.control("k1", "stop")
    assert rig.wants(i.WriteStdin) == []
    assert i.SendSignal("k1", "SIGTERM") in rig.wants(i.SendSignal)
    rig.timer(STOP_TERM)
    assert rig.wants(i.KillAll)
    rig.exit(-9)
    rig.prove()
    assert rig.body(ev.EXECUTION_ENDED)["outcome"] == "completed"
    assert rig.receipts("k1")[-1] == "settled"


def test_a_completed_turn_with_background_work_open_does_not_survive_a_stop() -> None:
    rig = started()
    rig.say({"type": "background", "id": "b1", "state": "started"})
    rig.control("k1", "stop")
    rig.say(OK)
    assert ev.RESPONSE_ENDED not in rig.types()
    rig.exit(143)
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == "stopped"


def test_a_stop_does_not_leave_a_queued_interjection_its_turn() -> None:
    rig = started()
    interject(rig, "k1")
    rig.control("k2", "stop")
    rig.write_all()
    rig.say({"type": "interrupted", "id": "k2"}, {"type": "result", "status": "interrupted", "prompt": PROMPT_ID})
    assert rig.wants(i.SendSignal) == [i.SendSignal("k2", "SIGTERM")], "told to go before it takes the next one up"
    rig.say({"type": "turn.started", "prompt": "k1"}, {"type": "result", "status": "ok", "prompt": "k1"})
    assert ev.RESPONSE_ENDED not in rig.types(), "what the agent still says comes before the response's end"
    assert rig.deadline(STOP_TERM) == 5_000
    rig.exit(0)
    rig.prove()
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == rig.body(ev.EXECUTION_ENDED)["outcome"] == "stopped"


def test_a_turn_that_begins_behind_a_stop_does_not_complete_the_response() -> None:
    rig = started()
    rig.say({"type": "background", "id": "b1", "state": "started"})
    rig.say({"type": "result", "status": "ok", "prompt": PROMPT_ID})
    rig.control("k1", "stop")
    assert rig.wants(i.SendSignal) == [i.SendSignal("k1", "SIGTERM")], "between two turns nothing is to be interrupted"
    rig.say({"type": "background", "id": "b1", "state": "done"})
    rig.say({"type": "turn.started", "prompt": "later"}, {"type": "result", "status": "ok", "prompt": "later"})
    rig.exit(143)
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == "stopped"


@pytest.mark.parametrize("said", ["before the stop", "after the stop"])
def test_a_stop_between_a_completed_turn_and_the_queued_one_stops(said: str) -> None:
    rig = started()
    interject(rig, "k1")
    rig.write_all()
    if said == "before the stop":
        rig.say(OK)
    rig.control("k2", "stop")
    if said == "after the stop":
        rig.say(OK)
    assert rig.wants(i.SendSignal) == [i.SendSignal("k2", "SIGTERM")]
    rig.say({"type": "turn.started", "prompt": "k1"})
    rig.exit(143)
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == "stopped"


def test_a_second_stop_joins_the_first_and_both_are_settled_by_one_proof() -> None:
    rig = started()
    rig.control("k1", "stop")
    rig.pass_ms(500)
    rig.control("k2", "stop")
    assert rig.deadline(STOP_INTERRUPT) == 1_500
    rig.exit(143)
    rig.prove()
    assert rig.receipts("k1")[-1] == rig.receipts("k2")[-1] == "settled"
    assert refusal(rig, "stop") is Code.SESSION_STREAM_NOT_ACTIVE


def test_nothing_but_the_interrupt_is_written_while_stopping() -> None:
    rig = waiting()
    rig.control("k1", "answer", interaction="r1", decision="allow")
    rig.control("k2", "stop")
    assert [write.control for write in rig.wants(i.WriteStdin)] == ["k2"]
    assert refusal(rig, "interject", request="req_2", content=CONTENT) is Code.SESSION_STREAM_NOT_ACTIVE
    rig.exit(143)
    assert rig.receipts("k1") == ["accepted", "rejected"]


def test_a_deadline_of_a_stage_that_is_over_changes_nothing() -> None:
    rig = started()
    rig.control("k1", "stop")
    rig.give(i.Timer(rig.at, STOP_TERM), i.Timer(rig.at, "watchdog"), i.Timer(rig.at, "unheard of"))
    assert not rig.wants(i.KillAll)
    assert not rig.wants(i.SendSignal)


# --- before a turn runs ---


def test_an_interrupt_before_the_prompt_was_taken_up_is_written_once_its_turn_begins() -> None:
    """A CLI that is told between two turns acknowledges it and ends nothing."""
    rig = Rig()
    rig.write_all()
    rig.control("k1", "interrupt")
    assert not rig.wants(i.WriteStdin) and rig.receipts("k1") == ["accepted"]
    rig.say({"type": "turn.started", "prompt": PROMPT_ID})
    assert [want.control for want in rig.wants(i.WriteStdin)] == ["k1"]


def test_an_interrupt_of_a_turn_that_never_began_is_refused_by_the_end() -> None:
    rig = Rig()
    rig.write_all()
    rig.control("k1", "interrupt")
    rig.exit(1)
    assert rig.receipts("k1") == ["accepted", "rejected"]


def test_a_stop_before_the_prompt_was_taken_up_escalates_all_the_same() -> None:
    rig = Rig()
    rig.write_all()
    rig.control("s1", "stop")
    assert not rig.wants(i.WriteStdin)
    rig.timer(STOP_INTERRUPT)
    assert rig.wants(i.SendSignal) and rig.receipts("s1") == ["accepted", "delivered"]
