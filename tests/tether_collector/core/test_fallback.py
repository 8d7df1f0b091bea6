"""A process that was of no use is followed by another one: when, how often, and when not. G5, G6, G7, D9."""

from __future__ import annotations

from typing import Any

import pytest

from support_execution import SESSION, Rig, launch
from tether import events as ev
from tether_collector.core import inputs as i
from tether_collector.core.execution import Execution
from tether_collector.core.fallback import AGAIN_MS

NOT_FOUND = {"type": "error", "code": "session_not_found", "message": "no such session"}
BUSY = {"type": "error", "code": "session_busy", "message": "it already has an active writer"}
ROWS = [{"role": "user", "text": "before"}, {"role": "assistant", "text": "said before"}]
HISTORY = {"rows": ROWS, "partial": True}
RECOVERED = {"why": "not_found", "source": "export", "rows": 2, "partial": True}


def resuming(*, fallback: bool = True) -> Rig:
    rig = Rig(start=launch(resume=True, fallback=fallback))
    rig.write_all()
    return rig


def gone(rig: Rig, refusal: dict[str, Any] = NOT_FOUND) -> Rig:
    """The process said so, and nothing of it is left."""
    rig.say(refusal)
    rig.exit(1)
    rig.prove()
    return rig


def note(process: int, session: str = "new-session", **more: Any) -> dict[str, Any]:
    return {"process": process, "why": "history", "session": session, "resume": False, "instance": "ins2", **more}


def answer(rig: Rig, session: str = "new-session") -> None:
    """The next process does a turn."""
    rig.write_all()
    prompt = rig.execution.launch.prompt_id
    rig.say(
        {"type": "session", "session_id": session, "version": "1"},
        {"type": "turn.started", "prompt": prompt},
        {"type": "text", "segment": "s1", "text": "done"},
        {"type": "usage", "prompt": prompt, "input_tokens": 3, "output_tokens": 1},
        {"type": "result", "status": "ok", "prompt": prompt},
    )
    rig.exit(0)
    rig.prove()


def outcome(rig: Rig) -> tuple[str, str | None]:
    body = rig.body(ev.EXECUTION_ENDED)
    return body["outcome"], body.get("error", {}).get("code")


# --- the history stands in ---


def test_the_next_process_is_wanted_only_once_the_first_is_proven_gone() -> None:
    rig = resuming()
    rig.say(NOT_FOUND)
    assert rig.execution.next_process is None
    assert [want.name for want in rig.wants(i.SendSignal)] == ["SIGTERM"] and rig.wants(i.CloseStdin)
    rig.exit(1)
    assert rig.execution.next_process is None and rig.wants(i.KillAll)
    rig.prove()
    want = rig.execution.next_process
    assert want is not None and (want.process, want.why) == (2, "history")
    assert rig.execution.wants() == [] and rig.execution.between_processes
    assert rig.types() == [], "nothing is said before the next process is noted"
    assert rig.execution.status().state == "starting"


def test_g5_the_noted_process_goes_on_with_the_history_in_a_session_of_its_own() -> None:
    rig = gone(resuming())
    rig.note("process", **note(2, history=HISTORY, recovered=RECOVERED))
    assert rig.types() == [ev.EXECUTION_STARTED, ev.SESSION_RECOVERED]
    started, recovered = rig.body(ev.EXECUTION_STARTED), rig.body(ev.SESSION_RECOVERED)
    assert (started["process"], started["instance"], started["resumed_from"]) == (2, "ins2", None)
    assert started["target"]["process_generation"] == 2 == rig.execution.target.process_generation
    assert recovered == {"from": SESSION, "process": 2, **RECOVERED}
    assert rig.execution.next_process is None
    [opening] = rig.wants(i.WriteStdin)
    assert b"said before" in opening.data
    answer(rig)
    assert outcome(rig) == ("completed", None)
    assert rig.types().count(ev.RESPONSE_ENDED) == rig.types().count(ev.EXECUTION_ENDED) == 1
    assert [event.ordinal for event in rig.events] == list(range(2, len(rig.events) + 2))
    assert [body["native_session"] for body in rig.bodies(ev.SESSION_BOUND)] == ["new-session", "new-session"]
    assert rig.execution.status().cli_version == "1"


def test_g10_the_usage_of_a_turn_that_follows_a_fallback_is_told_once() -> None:
    rig = gone(resuming())
    rig.note("process", **note(2, history=HISTORY, recovered=RECOVERED))
    answer(rig)
    assert len({body["turn"] for body in rig.bodies(ev.USAGE)}) == len(rig.bodies(ev.USAGE)) == 1


def test_it_happens_once_and_a_note_that_comes_again_changes_nothing() -> None:
    rig = gone(resuming())
    body = note(2, history=HISTORY, recovered=RECOVERED)
    rig.note("process", **body)
    assert rig.note("process", **body) == []
    assert rig.note("process_refused", code="QUOTA_EXCEEDED", detail="of an earlier attempt") == []
    answer(rig)
    assert outcome(rig) == ("completed", None)


def test_a_session_that_is_lost_again_after_the_fallback_fails_the_response() -> None:
    rig = gone(resuming())
    rig.note("process", **note(2, recovered=RECOVERED) | {"resume": True})
    rig.write_all()
    gone(rig)
    assert outcome(rig) == ("failed", "RESUME_FAILED") and rig.execution.next_process is None


def test_a_refused_process_fails_the_response_by_name_with_the_proof_of_the_first() -> None:
    rig = gone(resuming())
    rig.note("process_refused", code="QUOTA_EXCEEDED", detail="the recovery material is full")
    body = rig.body(ev.EXECUTION_ENDED)
    assert body["error"] == {
        "code": "QUOTA_EXCEEDED",
        "detail": "the recovery material is full",
        "choices": ["fresh", "history"],
    }
    assert body["proof"]["method"] == "pid_namespace" and rig.body(ev.RESPONSE_ENDED)["error"] == body["error"]


# --- it does not ---


@pytest.mark.parametrize(
    "shown",
    [
        {"type": "delta", "segment": "s1", "text": "I"},
        {"type": "reasoning", "text": "hm"},
        {"type": "tool.start", "id": "t1", "name": "build", "input": {}},
        {"type": "ask", "request": "r1", "kind": "approval", "tool": "write", "tool_id": "t1", "input": {}},
    ],
    ids=["text", "reasoning", "tool", "interaction"],
)
def test_g6_after_anything_was_shown_there_is_no_fallback(shown: dict[str, Any]) -> None:
    rig = resuming()
    rig.say({"type": "session", "session_id": SESSION}, {"type": "turn.started", "prompt": "p"}, shown)
    gone(rig)
    assert outcome(rig) == ("failed", "RESUME_FAILED") and rig.execution.next_process is None


def test_what_a_leaving_process_still_says_ends_the_fallback() -> None:
    rig = resuming()
    rig.say(NOT_FOUND, {"type": "text", "segment": "s1", "text": "after all"})
    rig.exit(1)
    rig.prove()
    assert outcome(rig) == ("failed", "RESUME_FAILED") and rig.execution.next_process is None


def test_d9_without_leave_a_lost_session_fails_and_names_the_choices() -> None:
    rig = gone(resuming(fallback=False))
    assert outcome(rig) == ("failed", "RESUME_FAILED")
    assert rig.body(ev.RESPONSE_ENDED)["error"]["choices"] == ["fresh", "history"]


@pytest.mark.parametrize("stop_first", [True, False])
def test_a_stop_leaves_no_room_for_another_process(stop_first: bool) -> None:
    rig = resuming()
    if stop_first:
        rig.control("s1", "stop", grace_s=0)
    rig.say(NOT_FOUND)
    if not stop_first:
        rig.control("s1", "stop", grace_s=0)
    rig.exit(1)
    rig.prove()
    assert rig.execution.next_process is None
    assert rig.body(ev.EXECUTION_ENDED)["outcome"] in ("stopped", "failed")
    assert rig.receipts("s1")[-1] == "settled"


def test_a_stop_between_two_processes_ends_the_execution_with_the_proof_that_there_is() -> None:
    rig = gone(resuming())
    rig.control("s1", "stop", grace_s=0)
    assert outcome(rig) == ("stopped", "STOPPED") and rig.body(ev.EXECUTION_ENDED)["proof"]
    assert rig.receipts("s1") == ["accepted", "delivered", "settled"]
    assert rig.note("process", **note(2)) == []


def test_between_two_processes_an_interjection_is_to_be_sent_again() -> None:
    rig = gone(resuming())
    payload = {"request": "req_2", "content": [{"type": "text", "text": "and"}]}
    refused = rig.execution.check_control("interject", rig.execution.target, payload)
    assert refused is not None and (refused.code, refused.problem.retryable) == ("RUNTIME_UNAVAILABLE", True)


# --- resumed, but not that ---


@pytest.mark.parametrize("line", [{"session_id": "another"}, {"session_id": SESSION, "resumed": False}])
@pytest.mark.parametrize("fallback", [True, False])
def test_g7_a_session_that_is_another_one_is_reported_as_not_resumed_and_ended(
    line: dict[str, Any], fallback: bool
) -> None:
    rig = resuming(fallback=fallback)
    rig.say({"type": "session", **line}, {"type": "turn.started", "prompt": "p"})
    assert [want.name for want in rig.wants(i.SendSignal)] == ["SIGTERM"] and not rig.wants(i.WriteStdin)
    rig.say({"type": "text", "segment": "s1", "text": "in the other session"})
    assert ev.RESPONSE_ENDED not in rig.types(), "what it says until it is gone comes before the end"
    rig.exit(143)
    rig.prove()
    assert outcome(rig) == ("failed", "RESUME_FAILED") and rig.execution.next_process is None
    assert rig.bodies(ev.SESSION_BOUND) == [], "the conversation's session is still the lost one"
    assert rig.execution.target.native_session is None


# --- busy ---


def test_a_busy_session_is_tried_again_with_growing_pauses_and_never_forked() -> None:
    rig = resuming(fallback=False)
    for number in range(len(AGAIN_MS)):
        gone(rig, BUSY)
        want = rig.execution.next_process
        assert want is not None and (want.process, want.why) == (number + 2, "again")
        assert want.not_before == rig.at + AGAIN_MS[number]
        rig.note("process", process=number + 2, why="again", session=SESSION, resume=True, instance="ins1")
        assert (rig.execution.launch.session, rig.execution.launch.resume) == (SESSION, True)
        rig.write_all()
    gone(rig, BUSY)
    assert outcome(rig) == ("failed", "SESSION_BUSY")
    assert "choices" not in rig.body(ev.RESPONSE_ENDED)["error"]
    assert ev.SESSION_RECOVERED not in rig.types()


def test_a_busy_session_that_is_free_by_then_answers_as_if_nothing_had_been() -> None:
    rig = gone(resuming(fallback=False), BUSY)
    rig.note("process", process=2, why="again", session=SESSION, resume=True, instance="ins1")
    assert rig.body(ev.EXECUTION_STARTED)["resumed_from"] == SESSION
    answer(rig, SESSION)
    assert outcome(rig) == ("completed", None)


def test_a_new_session_whose_id_is_taken_fails_at_once() -> None:
    rig = Rig()
    rig.write_all()
    gone(rig, {"type": "error", "code": "session_exists", "message": "in use"})
    assert outcome(rig) == ("failed", "SESSION_BUSY") and rig.execution.next_process is None


# --- chosen by the user ---


def test_the_first_process_may_be_noted_before_it_is_launched() -> None:
    rig = Rig()
    rig.note("process", **note(1, history=HISTORY, recovered={**RECOVERED, "why": "chosen"}))
    assert rig.types() == [ev.SESSION_RECOVERED] and rig.execution.process_generation == 1
    assert b"said before" in rig.wants(i.WriteStdin)[0].data
    answer(rig)
    assert outcome(rig) == ("completed", None)


def test_the_first_process_may_be_refused_and_was_never_spawned() -> None:
    rig = Rig()
    rig.note("process_refused", code="RESUME_FAILED", detail="no history")
    assert outcome(rig) == ("failed", "RESUME_FAILED")
    assert rig.body(ev.EXECUTION_ENDED)["proof"]["method"] == "never_spawned"
    assert rig.body(ev.RESPONSE_ENDED)["error"]["choices"] == ["fresh", "history"]


def test_where_there_is_no_history_it_is_not_offered_again() -> None:
    rig = Rig()
    rig.note("process_refused", code="RESUME_FAILED", detail="no history", choices=["fresh", "unknown"])
    assert rig.body(ev.RESPONSE_ENDED)["error"]["choices"] == ["fresh"]


# --- a machine that is dumped and loaded anywhere ---


def test_l2_a_machine_cut_before_every_record_goes_through_the_fallback_alike() -> None:
    whole = gone(resuming())
    whole.note("process", **note(2, history=HISTORY, recovered=RECOVERED))
    answer(whole)
    machine = Execution.start(
        launch(resume=True, fallback=True),
        whole.adapter,
        whole.execution.target.model_copy(update={"process_generation": 1, "native_session": None}),
        whole.execution.claim,
    )
    events = []
    for record, input_ in enumerate(whole.inputs, 1):
        machine = Execution.load(machine.dump())
        events += [event for event, _ in machine.apply(input_, record)]
    assert events == whole.events and machine.ended
