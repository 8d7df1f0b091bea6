"""What recorded runs of Claude Code say; that every line means something, `test_recordings.py` looks after."""

from __future__ import annotations

import json

import pytest

from support_execution import Rig
from support_recordings import GOLDEN, Replay, read_recording, replayed
from tether import events as ev
from tether_collector.core import inputs as i


def outcome_of(name: str) -> tuple[str, str | None]:
    body = replayed(GOLDEN / f"{name}.ndjson").body(ev.RESPONSE_ENDED)
    return body["outcome"], (body.get("error") or {}).get("code")


@pytest.mark.parametrize(
    ("name", "outcome", "code"),
    [
        ("claude-2.1.332/text", "completed", None),
        ("claude-2.1.332/http_500", "failed", "model_error"),
        ("claude-2.1.332/flaky_529_twice", "completed", None),
        ("claude-2.1.332/interrupt_text", "cancelled", "INTERRUPTED"),
        ("claude-2.1.332/interrupt_running_tool", "cancelled", "INTERRUPTED"),
        ("claude-2.1.332/sigterm_running_tool", "lost", "EXECUTION_DURABILITY_GAP"),
        ("claude-2.1.332/kill9_mid_tool_0", "lost", "EXECUTION_DURABILITY_GAP"),
        ("claude-2.1.332/resume_unknown_id", "failed", "RESUME_FAILED"),
        ("claude-2.1.197/resume_unknown_id", "failed", "RESUME_FAILED"),
        ("claude-2.1.332/session_id_existing", "failed", "SESSION_BUSY"),
        ("claude-2.1.332/malformed_stdin", "failed", "AGENT_START_FAILED"),
        ("claude-2.1.197/bash_allow", "completed", None),
    ],
)
def test_how_a_recorded_run_ended(name: str, outcome: str, code: str | None) -> None:
    assert outcome_of(name) == (outcome, code)


def test_a_retried_model_request_voids_what_it_had_streamed() -> None:
    rig = replayed(GOLDEN / "claude-2.1.332/drop_once.ndjson")
    discarded = rig.body(ev.TEXT_DISCARDED)["segment"]
    assert discarded in {body["segment"] for body in rig.bodies(ev.TEXT_DELTA)}
    assert [body["text"] for body in rig.bodies(ev.TEXT_COMPLETED)] == ["Recovered after a drop."]


def test_background_work_and_the_turn_it_begins_belong_to_the_response() -> None:
    """G9: the first result is not the end, and neither is the moment between the work's end and the next turn."""
    rig = replayed(GOLDEN / "claude-2.1.332/background_bash.ndjson")
    types = rig.types()
    assert types.count(ev.TURN_COMPLETED) == 2
    assert types.index(ev.RESPONSE_ENDED) > [n for n, kind in enumerate(types) if kind == ev.TURN_COMPLETED][1]
    assert [body["state"] for body in rig.bodies(ev.BACKGROUND)] == ["started", "completed"]


def test_a_subagent_that_ends_before_the_result_still_owes_its_turn() -> None:
    rig = replayed(GOLDEN / "claude-2.1.332/subagent.ndjson")
    types = rig.types()
    assert types.count(ev.TURN_COMPLETED) == 2
    assert types.index(ev.RESPONSE_ENDED) > [n for n, kind in enumerate(types) if kind == ev.TURN_COMPLETED][1]
    assert [body["parent"] for body in rig.bodies(ev.TEXT_COMPLETED) if "parent" in body] == ["toolu_fake_0_037210976"]


def test_a_queued_prompt_gets_its_own_turn_in_the_same_response() -> None:
    rig = replayed(GOLDEN / "claude-2.1.332/multi_turn_queue.ndjson")
    assert [body["text"] for body in rig.bodies(ev.TEXT_COMPLETED)][-1] == "second turn"
    assert rig.types().count(ev.TURN_COMPLETED) == 2
    assert rig.receipts("ctl-2") == ["accepted", "delivered", "settled"]
    assert rig.types().index(ev.RESPONSE_ENDED) > len(rig.events) - 8


def test_usage_is_the_turns_own_and_costs_add_up_to_the_total() -> None:
    """G10: also after a resume, whose total goes on from the process before."""
    for name in ("multi_turn_queue", "background_bash", "interrupt_text", "resume_0_first"):
        path = GOLDEN / f"claude-2.1.332/{name}.ndjson"
        results = [json.loads(row["line"]) for row in read_recording(path) if '"type":"result"' in row["line"]]
        costs = [body["cost_usd"] for body in replayed(path).bodies(ev.USAGE)]
        assert sum(costs) == pytest.approx(results[-1]["total_cost_usd"])
    second = replayed(GOLDEN / "claude-2.1.332/resume_1_second.ndjson").body(ev.USAGE)
    assert second["cost_usd"] == pytest.approx(0.00044)
    old = replayed(GOLDEN / "claude-2.1.197/bash_allow.ndjson").body(ev.USAGE)
    assert (old["cost_usd"], old["input_tokens"], old["output_tokens"]) == (pytest.approx(0.001725), 200, 29)
    interrupted = replayed(GOLDEN / "claude-2.1.332/interrupt_text.ndjson").bodies(ev.USAGE)[0]
    assert (interrupted["input_tokens"], interrupted["output_tokens"]) == (100, 10)


def test_an_answered_approval_is_settled_by_the_tools_own_result() -> None:
    rig = replayed(GOLDEN / "claude-2.1.332/bash_allow.ndjson")
    resolved = rig.body(ev.INTERACTION_RESOLVED)
    assert resolved["outcome"] == "answered"
    assert rig.receipts(resolved["control"]) == ["accepted", "delivered", "settled"]
    assert rig.types().index(ev.INTERACTION_RESOLVED) < rig.types().index(ev.TOOL_COMPLETED)


def test_a_denied_approval_is_resolved_as_denied() -> None:
    rig = replayed(GOLDEN / "claude-2.1.332/bash_deny.ndjson")
    assert rig.body(ev.INTERACTION_RESOLVED)["outcome"] == "denied"
    assert rig.body(ev.TOOL_COMPLETED)["status"] == "error"


def test_a_question_carries_its_options_and_its_answer_settles_it() -> None:
    rig = replayed(GOLDEN / "claude-2.1.332/ask_user_question.ndjson")
    asked = rig.body(ev.INTERACTION_REQUESTED)
    assert asked["kind"] == "question"
    assert [option["label"] for option in asked["questions"][0]["options"]] == ["Red", "Blue"]
    assert rig.body(ev.INTERACTION_RESOLVED)["outcome"] == "answered"


def test_an_interrupt_withdraws_the_approval_and_a_late_answer_is_refused_by_name() -> None:
    rig = replayed(GOLDEN / "claude-2.1.332/interrupt_pending_approval.ndjson")
    assert rig.body(ev.INTERACTION_RESOLVED)["outcome"] == "cancelled"
    assert rig.receipts("int-1") == ["accepted", "delivered", "settled"]
    refused = [body for body in rig.bodies(ev.CONTROL_RECEIPT) if body["status"] == "rejected"]
    assert refused[0]["reason"] == "INTERACTION_SETTLED"


def test_an_approval_that_nobody_answered_and_the_agent_gave_up_is_cancelled() -> None:
    rig = replayed(GOLDEN / "claude-2.1.332/eof_pending_approval.ndjson")
    assert rig.body(ev.INTERACTION_RESOLVED)["outcome"] == "cancelled"


def test_retries_and_failures_of_the_model_are_shown_as_such() -> None:
    """G8"""
    rig = replayed(GOLDEN / "claude-2.1.332/http_500.ndjson")
    states = [(body["state"], body.get("http_status")) for body in rig.bodies(ev.MODEL_REQUEST)]
    assert states == [("started", None), ("retrying", 500), ("retrying", 500), ("failed", 500)]
    assert rig.bodies(ev.TEXT_COMPLETED) == []


def test_a_running_tool_of_a_killed_agent_is_interrupted() -> None:
    rig = replayed(GOLDEN / "claude-2.1.332/kill9_mid_tool_0.ndjson")
    assert rig.body(ev.TOOL_COMPLETED)["status"] == "interrupted"
    assert replayed(GOLDEN / "claude-2.1.332/kill9_pending_approval_0.ndjson").body(ev.INTERACTION_RESOLVED)[
        "outcome"
    ] == ("expired")


def test_stdin_that_a_recording_closed_is_what_the_machine_would_have_closed() -> None:
    """The machine wants stdin closed once the response has ended, and not before."""
    replay = Replay(GOLDEN / "claude-2.1.332/background_bash.ndjson")
    rig = Rig("claude", start=replay.launch)
    for input_ in replay.inputs():
        if isinstance(input_, i.Exited):
            break
        rig.give(input_)
        assert bool(rig.wants(i.CloseStdin)) == (ev.RESPONSE_ENDED in rig.types())
