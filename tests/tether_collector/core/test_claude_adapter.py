"""What is said to Claude Code, and lines that no recording has."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from support_execution import PROMPT_ID, Rig, launch
from tether import events as ev
from tether.errors import InvalidError
from tether_collector.core import inputs as i
from tether_collector.core.adapters.base import Answer
from tether_collector.core.adapters.claude import CLAUDE
from tether_collector.core.adapters.claude_lines import IGNORED

INIT = {"type": "system", "subtype": "init", "session_id": "s"}
QUESTIONS = [
    {"question": "Which?", "multiSelect": False, "options": [{"label": "a"}, {"label": "b"}]},
    {"question": "What else?", "multiSelect": True, "options": [{"label": "c"}, {"label": "d"}]},
]


def asking(tool: str, tool_input: dict[str, Any], request: str = "req-1") -> Rig:
    rig = Rig("claude")
    rig.write_all()
    inner = {"subtype": "can_use_tool", "tool_name": tool, "input": tool_input, "tool_use_id": "t1"}
    rig.say(INIT, {"type": "control_request", "request_id": request, "request": inner})
    return rig


def written(rig: Rig) -> dict[str, Any]:
    (write,) = rig.wants(i.WriteStdin)
    assert write.data.endswith(b"\n")
    message: dict[str, Any] = json.loads(write.data)
    return message


def test_the_command_line_holds_neither_the_prompt_nor_a_secret() -> None:
    start = replace(launch("a secret plan"), model="opus", permission_mode="plan", args=["--strict-mcp-config"])
    argv = CLAUDE.argv(start, ["/opt/claude"])
    assert argv == [
        *("/opt/claude", "-p", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose"),
        *("--include-partial-messages", "--permission-prompt-tool", "stdio"),
        *("--session-id", start.session, "--permission-mode", "plan", "--model", "opus", "--strict-mcp-config"),
    ]
    assert "--resume" in CLAUDE.argv(replace(start, resume=True), ["claude"])
    assert CLAUDE.environment(start)["CLAUDE_CODE_EAGER_FLUSH"] == "1"
    assert not [name for name in CLAUDE.environment(start) if "KEY" in name or "TOKEN" in name]


def test_the_prompt_is_written_with_the_launchs_uuid() -> None:
    assert written(Rig("claude")) == {
        "type": "user",
        "uuid": PROMPT_ID,
        "message": {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    }


def test_an_allow_repeats_the_whole_input_or_gives_the_changed_one() -> None:
    for change, expected in ((None, {"command": "ls"}), ({"command": "pwd"}, {"command": "pwd"})):
        rig = asking("Bash", {"command": "ls"})
        rig.control("k1", "answer", interaction="req-1", decision="allow", input=change)
        response = written(rig)["response"]
        assert response["request_id"] == "req-1"
        assert response["response"] == {"behavior": "allow", "updatedInput": expected}


def test_a_deny_carries_its_text() -> None:
    rig = asking("Bash", {"command": "ls"})
    rig.control("k1", "answer", interaction="req-1", decision="deny", text="not today")
    assert written(rig)["response"]["response"] == {"behavior": "deny", "message": "not today"}


def test_a_request_id_that_may_not_stand_in_a_subject_is_answered_by_its_own_name_all_the_same() -> None:
    rig = asking("Bash", {}, request="../../etc/passwd *>")
    (pending,) = rig.execution.pending()
    assert pending.interaction.startswith("x_")
    rig.control("k1", "answer", interaction=pending.interaction, decision="allow")
    assert written(rig)["response"]["request_id"] == "../../etc/passwd *>"


def test_questions_are_answered_by_id_or_text() -> None:
    rig = asking("AskUserQuestion", {"questions": QUESTIONS})
    asked = rig.body(ev.INTERACTION_REQUESTED)["questions"]
    assert [(question["id"], question["multiple"]) for question in asked] == [("q1", False), ("q2", True)]
    answers = {"q1": ["a"], "What else?": ["c", "d"]}
    rig.control("k1", "answer", interaction="req-1", decision="allow", answers=answers)
    assert written(rig)["response"]["response"]["updatedInput"] == {
        "questions": QUESTIONS,
        "answers": {"Which?": "a", "What else?": "c, d"},
    }


@pytest.mark.parametrize(
    ("answers", "field"),
    [
        ({"q1": ("a",)}, "payload.answers.q2"),
        ({"q1": ("a", "b"), "q2": ("c",)}, "payload.answers.q1"),
        ({"q1": ("a",), "q2": ("c",), "q3": ("x",)}, "payload.answers.q3"),
        ({}, "payload.answers.q1"),
    ],
)
def test_an_answer_that_does_not_fit_the_questions_names_the_field(
    answers: dict[str, tuple[str, ...]], field: str
) -> None:
    rig = asking("AskUserQuestion", {"questions": QUESTIONS})
    rejection = rig.execution.check_control(
        "answer", rig.execution.target, {"interaction": "req-1", "decision": "allow", "answers": answers}
    )
    assert rejection is not None
    assert rejection.problem.fields[0].field == field


def test_an_answer_to_something_that_is_not_open_is_refused() -> None:
    with pytest.raises(InvalidError):
        CLAUDE.answer(CLAUDE.initial(launch()), Answer("nope", "allow"))


def test_free_text_answers_a_single_question() -> None:
    rig = asking("AskUserQuestion", {"questions": QUESTIONS[:1]})
    rig.control("k1", "answer", interaction="req-1", decision="allow", text="neither")
    assert written(rig)["response"]["response"]["updatedInput"]["answers"] == {"Which?": "neither"}


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_what_is_ignored_by_name_makes_no_event(name: str) -> None:
    kind, _, sub = name.partition("/")
    line: dict[str, Any] = {"type": kind}
    match kind:
        case "stream_event" if sub.endswith("_delta") and sub != "message_delta":
            line["event"] = {"type": "content_block_delta", "index": 0, "delta": {"type": sub}}
        case "stream_event":
            line["event"] = {"type": sub}
        case "system":
            line["subtype"] = sub
        case "control_request":
            line |= {"request_id": "r", "request": {"subtype": sub}}
        case "assistant":
            line["message"] = {"id": "m", "content": [{"type": sub}]}
        case "user" if sub == "replay":
            line |= {"isReplay": True, "message": {"content": []}}
        case "user":
            line["message"] = {"content": [{"type": sub, "text": "x"}]}
    assert Rig("claude").say(line) == []


def delta(kind: str, index: int, **fields: Any) -> dict[str, Any]:
    event = {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}
    return {"type": "stream_event", "event": event, "parent_tool_use_id": None, "api_message_id": "m1"}


def assistant(*blocks: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "assistant", "message": {"id": "m1", "content": list(blocks)}, **fields}


def test_thinking_is_reasoning_and_each_block_completes_its_own_segment() -> None:
    rig = Rig("claude")
    rig.say(
        delta("thinking_delta", 0, thinking="hm "),
        delta("thinking_delta", 0, thinking="ok"),
        delta("text_delta", 1, text="yes"),
        assistant({"type": "thinking", "thinking": "hm ok", "signature": "x"}),
        assistant({"type": "text", "text": "yes"}),
    )
    assert rig.body(ev.REASONING_COMPLETED) == {"segment": "m1/0", "text": "hm ok"}
    assert rig.body(ev.TEXT_COMPLETED) == {"segment": "m1/1", "text": "yes"}
    assert [body["offset"] for body in rig.bodies(ev.REASONING_DELTA)] == [0, 3]


def test_a_message_that_came_without_streaming_voids_what_another_one_had_streamed() -> None:
    rig = Rig("claude")
    rig.say(delta("text_delta", 0, text="half"))
    rig.say({"type": "assistant", "message": {"id": "m2", "content": [{"type": "text", "text": "whole"}]}})
    assert rig.body(ev.TEXT_DISCARDED)["segment"] == "m1/0"
    assert rig.body(ev.TEXT_COMPLETED)["segment"] == "m2/a1"


def test_an_allowed_tool_that_reports_progress_has_got_its_answer() -> None:
    rig = asking("Bash", {"command": "make"})
    rig.control("k1", "answer", interaction="req-1", decision="allow")
    rig.write_all()
    rig.say({"type": "tool_progress", "tool_use_id": "t1", "elapsed_time_seconds": 3})
    assert rig.receipts("k1")[-1] == "settled"
    assert rig.body(ev.INTERACTION_RESOLVED)["outcome"] == "answered"


def test_the_old_release_names_no_prompt_and_a_turn_goes_to_the_oldest_that_waits() -> None:
    rig = Rig("claude")
    rig.write_all()
    rig.say(INIT)
    rig.control("k1", "interject", request="q", content=[{"type": "text", "text": "more"}])
    rig.write_all()
    rig.say({"type": "result", "is_error": False})
    assert ev.RESPONSE_ENDED not in rig.types()
    rig.say(INIT)
    assert rig.receipts("k1") == ["accepted", "delivered", "settled"]
    rig.say({"type": "result", "is_error": False})
    assert rig.types()[-1] == ev.RESPONSE_ENDED


def test_a_prompt_that_the_agent_drops_as_a_duplicate_is_not_waited_for() -> None:
    rig = Rig("claude")
    rig.write_all()
    rig.say({"type": "command_lifecycle", "command_uuid": PROMPT_ID, "state": "started"}, INIT)
    rig.control("k1", "interject", request="q", content=[{"type": "text", "text": "more"}])
    uuid = written(rig)["uuid"]
    rig.write_all()
    rig.say({"type": "result", "is_error": False})
    rig.say({"type": "command_lifecycle", "command_uuid": uuid, "state": "completed"})
    assert rig.types()[-1] == ev.RESPONSE_ENDED
    assert rig.receipts("k1")[-1] == "settled"
