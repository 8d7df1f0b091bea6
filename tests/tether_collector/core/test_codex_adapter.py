"""What is said to Codex, and lines that no recording has."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from support_execution import PROMPT_ID, Rig, launch
from tether import events as ev
from tether.errors import InvalidError
from tether.prompt import AgentSpec
from tether_collector.core import inputs as i
from tether_collector.core.adapters.base import Answer
from tether_collector.core.adapters.codex import _READ_KEY, CODEX, MODES
from tether_collector.core.adapters.codex_lines import IGNORED
from tether_collector.core.adapters.codex_turns import REFUSED

THREAD = "th-1"
TURN = "tu-1"
OF = {"threadId": THREAD, "turnId": TURN}


def said(method: str, **params: Any) -> dict[str, Any]:
    return {"method": method, "params": params}


def writes(rig: Rig) -> list[dict[str, Any]]:
    """What a shell would write now, and does: each line, in order."""
    lines = [json.loads(line) for want in rig.wants(i.WriteStdin) for line in want.data.splitlines()]
    rig.write_all()
    return lines


def greeted(*, resume: bool = False) -> Rig:
    """Until the request for the thread is written."""
    rig = Rig("codex", start=launch(resume=resume, session=THREAD if resume else None))
    rig.write_all()
    rig.say({"id": "opening:initialize", "result": {"userAgent": "x"}})
    rig.write_all()
    return rig


def threaded() -> Rig:
    """Until the first turn was asked for."""
    rig = greeted()
    rig.say({"id": "reply:thread", "result": {"model": "m", "thread": {"id": THREAD, "cliVersion": "0.171.0"}}})
    rig.write_all()
    return rig


def running() -> Rig:
    """The first turn runs, its prompt was taken up."""
    rig = threaded()
    rig.say(
        {"id": "reply:turn", "result": {"turn": {"id": TURN}}},
        said("turn/started", threadId=THREAD, turn={"id": TURN}),
        said("item/started", **OF, item={"type": "userMessage", "id": "u1", "clientId": PROMPT_ID}),
        said("item/completed", **OF, item={"type": "userMessage", "id": "u1", "clientId": PROMPT_ID}),
    )
    return rig


def ended(status: str = "completed", turn: str = TURN, **more: Any) -> dict[str, Any]:
    return said("turn/completed", threadId=THREAD, turn={"id": turn, "status": status, **more})


def command(item: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "commandExecution", "id": item, "command": "make", "cwd": "/w", "status": "inProgress", **more}


def asked(method: str, request: Any = 0, **params: Any) -> Rig:
    rig = running()
    rig.say({"id": request, "method": method, "params": {**OF, "itemId": "c1", **params}})
    return rig


def total(tokens: int, cached: int = 0) -> dict[str, int]:
    return {"inputTokens": tokens, "cachedInputTokens": cached, "cacheWriteInputTokens": 0, "outputTokens": tokens // 5}


def used(tokens: int, turn: str = TURN, **more: Any) -> dict[str, Any]:
    usage = {"total": total(tokens), "last": total(100), **more}
    return said("thread/tokenUsage/updated", threadId=THREAD, turnId=turn, tokenUsage=usage)


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_command_line_holds_neither_the_prompt_nor_a_secret() -> None:
    start = replace(launch("a secret plan"), args=["-c", "model_verbosity=low"])
    argv = CODEX.argv(start, ["/opt/codex"])
    assert argv[:2] == ["/opt/codex", "app-server"]
    assert argv[-2:] == ["-c", "model_verbosity=low"], "what the user says wins"
    assert not [word for word in argv if "secret plan" in word]
    assert 'cli_auth_credentials_store="ephemeral"' in argv, "no login gets into the workspace"
    assert CODEX.environment(start) == {"CODEX_HOME": "/sandbox/ws/.tether/agents/codex", "NO_COLOR": "1"}


def test_every_permission_mode_that_a_prompt_may_name_has_its_policy_and_another_is_refused_by_name() -> None:
    for mode in ("default", "acceptEdits", "plan", "dontAsk", "bypassPermissions"):
        AgentSpec(kind="codex", permission_mode=mode)
        assert CODEX.argv(replace(launch(), permission_mode=mode), ["codex"])
    assert CODEX.initial(launch())["start"] == {
        "cwd": "/sandbox/ws",
        "approvalPolicy": "untrusted",
        "sandbox": "workspace-write",
    }
    assert MODES["plan"] == ("never", "read-only")
    with pytest.raises(InvalidError) as refused:
        CODEX.argv(replace(launch(), permission_mode="yolo"), ["codex"])
    assert refused.value.field == "agent.permission_mode"


def test_a_key_in_the_environment_makes_a_provider_that_reads_it_from_the_descriptor() -> None:
    settings = CODEX.environment_arguments({"OPENAI_API_KEY": "", "PATH": "/bin"})[1::2]
    assert 'model_provider="tether"' in settings
    assert 'model_providers.tether.base_url="https://api.openai.com/v1"' in settings
    assert any(setting.startswith("model_providers.tether.auth={") for setting in settings)
    assert CODEX.environment_arguments({"PATH": "/bin"}) == [], "without both the CLI's own provider is left alone"
    other = CODEX.environment_arguments({"OPENAI_BASE_URL": 'http://h/"v1'})[1::2]
    assert 'model_providers.tether.base_url="http://h/\\"v1"' in other
    assert not any(".auth=" in setting for setting in other)


def test_the_key_is_read_once_and_asked_for_again_it_is_said_to_be_refused() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"sk-of-the-test")
    os.close(writing)
    environment = {"TETHER_OPENAI_KEY_FD": str(reading)}

    def read() -> subprocess.CompletedProcess[bytes]:
        command = ["/bin/sh", "-c", _READ_KEY]
        return subprocess.run(command, env=environment, pass_fds=(reading,), capture_output=True, check=False)

    first, second = read(), read()
    os.close(reading)
    assert (first.returncode, first.stdout) == (0, b"sk-of-the-test")
    assert (second.returncode, second.stdout) == (1, b"")
    assert REFUSED.encode() in second.stderr


# --- the handshake ---------------------------------------------------------------------------------------------------


def test_the_handshake_goes_step_by_step_and_the_prompt_is_the_last_of_it() -> None:
    rig = Rig("codex")
    (hello,) = writes(rig)
    assert (hello["id"], hello["method"], "jsonrpc" in hello) == ("opening:initialize", "initialize", False)
    assert writes(rig) == []
    rig.say({"id": "opening:initialize", "result": {}})
    initialized, thread = writes(rig)
    assert initialized == {"method": "initialized"}
    assert (thread["method"], "threadId" in thread["params"]) == ("thread/start", False)
    rig.say({"id": "reply:thread", "result": {"thread": {"id": THREAD, "cliVersion": "0.171.0"}, "model": "m"}})
    (turn,) = writes(rig)
    assert turn["params"] == {
        "threadId": THREAD,
        "input": [{"type": "text", "text": "hello"}],
        "clientUserMessageId": PROMPT_ID,
    }
    bound = rig.body(ev.SESSION_BOUND)
    assert (bound["native_session"], bound["cli_version"], bound["resumable"]) == (THREAD, "0.171.0", False)


def test_a_resumed_thread_is_resumable_from_the_start() -> None:
    rig = greeted(resume=True)
    rig.say({"id": "reply:thread", "result": {"thread": {"id": THREAD}}})
    assert rig.body(ev.SESSION_BOUND)["resumable"] is True


@pytest.mark.parametrize(
    ("message", "outcome", "code"),
    [
        ("no rollout found for thread id 0", "failed", "RESUME_FAILED"),
        ("invalid session id: x", "failed", "RESUME_FAILED"),
        ("Model provider `x` not found", "failed", "agent_error"),
    ],
)
def test_a_thread_that_is_refused_ends_the_response_with_the_reason(message: str, outcome: str, code: str) -> None:
    rig = greeted(resume=True)
    rig.say({"id": "reply:thread", "error": {"code": -32600, "message": message}})
    ended = rig.body(ev.RESPONSE_ENDED)
    assert (ended["outcome"], ended["error"]["code"]) == (outcome, code)
    assert message in ended["error"]["detail"]


def test_after_a_stop_nothing_is_begun_any_more() -> None:
    rig = greeted()
    rig.control("s1", "stop", grace_s=0)
    rig.say({"id": "reply:thread", "result": {"thread": {"id": THREAD}}})
    assert writes(rig) == []


# --- prompts and interrupts ------------------------------------------------------------------------------------------


def test_a_prompt_before_the_thread_is_there_waits_for_it_and_follows_the_first() -> None:
    rig = greeted()
    rig.control("c-1", "interject", request="r", content=[{"type": "text", "text": "more"}])
    assert writes(rig) == []
    rig.say({"id": "reply:thread", "result": {"thread": {"id": THREAD}}})
    assert [line["params"]["clientUserMessageId"] for line in writes(rig)] == [PROMPT_ID, "c-1"]
    assert rig.receipts("c-1") == ["accepted", "delivered"]


def test_a_steered_prompt_is_settled_when_the_model_gets_it_and_cuts_the_text_there() -> None:
    rig = running()
    rig.say(said("item/agentMessage/delta", **OF, itemId="m1", delta="so far"))
    rig.control("c-1", "interject", request="r", content=[{"type": "text", "text": "more"}])
    (line,) = writes(rig)
    assert (line["id"], line["method"]) == ("c-1", "turn/start")
    rig.say({"id": "c-1", "result": {"turn": {"id": TURN}}})
    assert rig.receipts("c-1") == ["accepted", "delivered"]
    rig.say(said("item/started", **OF, item={"type": "userMessage", "id": "u2", "clientId": "c-1"}))
    assert rig.receipts("c-1") == ["accepted", "delivered", "settled"]
    assert rig.body(ev.TEXT_COMPLETED) == {"segment": "m1", "text": "so far", "partial": True}
    rig.say(ended())
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == "completed"


def test_a_prompt_that_came_just_after_the_turn_gets_a_turn_of_the_same_response() -> None:
    rig = running()
    rig.control("c-1", "interject", request="r", content=[{"type": "text", "text": "more"}])
    rig.write_all()
    rig.say(ended())
    assert ev.RESPONSE_ENDED not in rig.types()
    rig.say(
        {"id": "c-1", "result": {"turn": {"id": "tu-2"}}},
        said("turn/started", threadId=THREAD, turn={"id": "tu-2"}),
        said("item/started", threadId=THREAD, item={"type": "userMessage", "id": "u2", "clientId": "c-1"}),
        ended(turn="tu-2"),
    )
    assert rig.receipts("c-1")[-1] == "settled"
    assert rig.types()[-2:] == [ev.TURN_COMPLETED, ev.RESPONSE_ENDED]


def test_a_prompt_that_an_interrupt_took_along_is_rejected_as_the_model_never_saw_it() -> None:
    rig = running()
    rig.control("c-1", "interject", request="r", content=[{"type": "text", "text": "more"}])
    rig.write_all()
    rig.say({"id": "c-1", "result": {"turn": {"id": TURN}}}, ended("interrupted"))
    assert rig.receipts("c-1")[-1] == "rejected"
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == "cancelled"


def test_a_prompt_that_the_cli_refuses_is_rejected_and_the_turn_goes_on() -> None:
    rig = running()
    rig.control("c-1", "interject", request="r", content=[{"type": "text", "text": "more"}])
    rig.write_all()
    rig.say({"id": "c-1", "error": {"code": -32600, "message": "no"}})
    assert rig.receipts("c-1")[-1] == "rejected"
    rig.say(ended())
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == "completed"


def test_an_interrupt_before_the_turn_began_waits_for_it() -> None:
    rig = threaded()
    rig.control("i-1", "interrupt")
    assert writes(rig) == []
    rig.say(said("turn/started", threadId=THREAD, turn={"id": TURN}))
    (line,) = writes(rig)
    assert (line["id"], line["params"]) == ("i-1", {"threadId": THREAD, "turnId": TURN})
    rig.say({"id": "i-1", "result": {}}, ended("interrupted"))
    assert rig.receipts("i-1") == ["accepted", "delivered", "settled"]


def test_a_command_that_outlives_its_turn_is_cleaned_before_the_response_ends() -> None:
    rig = running()
    rig.say(said("item/started", **OF, item=command()))
    rig.control("i-1", "interrupt")
    rig.write_all()
    rig.say({"id": "i-1", "result": {}}, ended("interrupted"))
    assert rig.body(ev.TOOL_COMPLETED)["status"] == "interrupted"
    (line,) = writes(rig)
    assert (line["id"], line["method"]) == ("clean:1", "thread/backgroundTerminals/clean")
    assert ev.RESPONSE_ENDED not in rig.types(), "not before it is clean"
    rig.say({"id": "clean:1", "result": {}}, said("item/completed", **OF, item=command(status="failed", exitCode=-1)))
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == "cancelled"
    assert len(rig.bodies(ev.TOOL_COMPLETED)) == 1, "its own end is no news"


def test_a_clean_that_is_never_answered_holds_the_response_up_for_a_moment_only() -> None:
    rig = running()
    rig.say(said("item/started", **OF, item=command()), ended("interrupted"))
    assert rig.timer("settle")
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == "cancelled"


# --- what is asked ---------------------------------------------------------------------------------------------------


def answered(rig: Rig, **answer: Any) -> list[dict[str, Any]]:
    (body,) = rig.bodies(ev.INTERACTION_REQUESTED)
    rig.control("a-1", "answer", interaction=body["interaction"], **answer)
    return writes(rig)


@pytest.mark.parametrize("method", ["item/commandExecution/requestApproval", "item/fileChange/requestApproval"])
def test_an_approval_is_answered_under_its_own_id(method: str) -> None:
    rig = asked(method, command="make", cwd="/w", reason="wants to write")
    body = rig.body(ev.INTERACTION_REQUESTED)
    assert (body["interaction"], body["tool"], body["description"]) == ("c1_0", "c1", "wants to write")
    assert answered(rig, decision="allow") == [{"id": 0, "result": {"decision": "accept"}}]
    rig.say(said("serverRequest/resolved", threadId=THREAD, requestId=0))
    assert rig.body(ev.INTERACTION_RESOLVED)["outcome"] == "answered"
    assert rig.receipts("a-1") == ["accepted", "delivered", "settled"]


def test_a_denial_with_a_text_is_steered_into_the_turn_behind_it() -> None:
    rig = asked("item/commandExecution/requestApproval", command="make")
    denial, steer = answered(rig, decision="deny", text="use ninja")
    assert denial == {"id": 0, "result": {"decision": "decline"}}
    assert (steer["method"], steer["params"]["expectedTurnId"]) == ("turn/steer", TURN)
    assert steer["params"]["input"] == [{"type": "text", "text": "use ninja"}]
    rig.say(said("serverRequest/resolved", threadId=THREAD, requestId=0))
    assert rig.body(ev.INTERACTION_RESOLVED)["outcome"] == "denied"
    for response in ({"result": {"turnId": TURN}}, {"error": {"code": -32600, "message": "no active turn"}}):
        rig.say({"id": steer["id"], **response})
    assert rig.bodies(ev.RAW) == []


def test_a_denial_without_a_text_is_only_that() -> None:
    rig = asked("item/commandExecution/requestApproval", command="make")
    assert answered(rig, decision="deny") == [{"id": 0, "result": {"decision": "decline"}}]


@pytest.mark.parametrize("method", ["execCommandApproval", "applyPatchApproval"])
def test_the_older_forms_take_a_text_with_the_denial(method: str) -> None:
    rig = running()
    rig.say({"id": "r7", "method": method, "params": {"conversationId": THREAD, "callId": "c9", "command": ["make"]}})
    assert rig.body(ev.INTERACTION_REQUESTED)["interaction"] == "c9_r7"
    assert answered(rig, decision="deny", text="no") == [
        {"id": "r7", "result": {"decision": {"denied": {"rejection": "no"}}}}
    ]


def test_permissions_are_granted_as_asked_for_or_less() -> None:
    wanted = {"network": {"enabled": True}, "fileSystem": None}
    rig = asked("item/permissions/requestApproval", permissions=wanted, cwd="/w")
    less = {"permissions": {"network": None}, "cwd": "/w"}
    assert answered(rig, decision="allow", input=less) == [
        {"id": 0, "result": {"permissions": {"network": None}, "scope": "turn"}}
    ]
    rig = asked("item/permissions/requestApproval", permissions=wanted, cwd="/w")
    assert answered(rig, decision="allow")[0]["result"]["permissions"] == wanted
    rig = asked("item/permissions/requestApproval", permissions=wanted, cwd="/w")
    assert answered(rig, decision="deny")[0]["result"]["permissions"] == {}


QUESTIONS = [
    {"id": "colour", "header": "C", "question": "Which?", "options": [{"label": "Red", "description": "warm"}]},
    {"id": "name", "header": "N", "question": "What name?", "options": None},
]


def test_questions_are_answered_by_id_or_text_and_each_must_be() -> None:
    rig = asked("item/tool/requestUserInput", questions=QUESTIONS)
    assert [question["id"] for question in rig.body(ev.INTERACTION_REQUESTED)["questions"]] == ["colour", "name"]
    assert answered(rig, decision="allow", answers={"colour": ["Red"], "What name?": ["Rosa"]}) == [
        {"id": 0, "result": {"answers": {"colour": {"answers": ["Red"]}, "name": {"answers": ["Rosa"]}}}}
    ]
    rig = asked("item/tool/requestUserInput", questions=QUESTIONS)
    state = rig.execution._adapter_state
    with pytest.raises(InvalidError) as missing:
        CODEX.answer(state, Answer("c1_0", "allow", answers={"colour": ["Red"]}))
    assert missing.value.field == "payload.answers.name"
    denial, steer = answered(rig, decision="deny", text="not now")
    assert denial["error"]["message"] == "not now"
    assert steer["method"] == "turn/steer"


def test_a_form_of_an_mcp_server_is_asked_field_by_field_and_answered_in_their_types() -> None:
    fields = {
        "level": {"type": "integer", "description": "Which level?"},
        "sure": {"type": "boolean"},
        "kind": {"type": "string", "enum": ["a", "b"]},
    }
    params = {"threadId": THREAD, "turnId": TURN, "serverName": "s", "message": "please", "mode": "form"}
    rig = running()
    request = {"id": 3, "method": "mcpServer/elicitation/request"}
    rig.say({**request, "params": {**params, "requestedSchema": {"type": "object", "properties": fields}}})
    questions = rig.body(ev.INTERACTION_REQUESTED)["questions"]
    assert [(q["id"], [o["label"] for o in q["options"]]) for q in questions] == [
        ("level", []),
        ("sure", ["true", "false"]),
        ("kind", ["a", "b"]),
    ]
    answers = {"level": ["7"], "sure": ["true"], "kind": ["b"]}
    state = rig.execution._adapter_state
    key = rig.body(ev.INTERACTION_REQUESTED)["interaction"]
    with pytest.raises(InvalidError) as refused:
        CODEX.answer(state, Answer(key, "allow", answers={**answers, "level": ["high"]}))
    assert refused.value.field == "payload.answers.level"
    [line] = answered(rig, decision="allow", answers=answers)
    assert line["result"] == {"action": "accept", "content": {"level": 7, "sure": True, "kind": "b"}}


def test_a_changed_input_is_refused_where_the_protocol_has_none() -> None:
    rig = asked("item/commandExecution/requestApproval", command="make", cwd="/w")
    state = rig.execution._adapter_state
    with pytest.raises(InvalidError) as refused:
        CODEX.answer(state, Answer("c1_0", "allow", input={"command": "ninja", "cwd": "/w"}))
    assert refused.value.field == "payload.input"
    same = CODEX.answer(state, Answer("c1_0", "allow", input={"command": "make", "cwd": "/w"}))
    assert json.loads(same)["result"] == {"decision": "accept"}
    with pytest.raises(InvalidError) as none:
        CODEX.answer(state, Answer("c1_0", "allow", answers={"x": ["y"]}))
    assert none.value.field == "payload.answers"


def test_requests_of_two_processes_are_different_interactions_and_a_number_is_no_string() -> None:
    rig = asked("item/commandExecution/requestApproval", command="make")
    rig.say({"id": "0", "method": "item/commandExecution/requestApproval", "params": {**OF, "itemId": "c2"}})
    rig.say(said("serverRequest/resolved", threadId=THREAD, requestId="0"))
    assert rig.body(ev.INTERACTION_RESOLVED)["interaction"] == "c2_0"


def test_a_pending_approval_is_cancelled_with_its_turn() -> None:
    rig = asked("item/commandExecution/requestApproval", command="make")
    rig.say(ended("interrupted"))
    assert rig.body(ev.INTERACTION_RESOLVED)["outcome"] == "cancelled"


@pytest.mark.parametrize("method", ["item/tool/call", "account/chatgptAuthTokens/refresh", "some/thing"])
def test_a_request_that_nobody_here_can_answer_is_refused_and_shown(method: str) -> None:
    rig = running()
    rig.say({"id": 5, "method": method, "params": {}})
    (line,) = writes(rig)
    assert (line["id"], line["error"]["code"]) == (5, -32601)
    assert method in rig.body(ev.RAW)["why"]


# --- turns, errors, usage --------------------------------------------------------------------------------------------


def test_a_retry_voids_the_open_text_and_the_same_item_may_begin_anew() -> None:
    rig = running()
    item = {"type": "agentMessage", "id": "m1", "text": ""}
    retry = {"message": "Reconnecting... 2/5", "codexErrorInfo": {"httpConnectionFailed": {"httpStatusCode": 503}}}
    rig.say(
        said("item/started", **OF, item=item),
        said("item/agentMessage/delta", **OF, itemId="m1", delta="half"),
        said("error", **OF, willRetry=True, error={**retry, "additionalDetails": "busy"}),
        said("item/started", **OF, item=item),
        said("item/agentMessage/delta", **OF, itemId="m1", delta="whole"),
        said("item/completed", **OF, item={**item, "text": "whole"}),
    )
    assert rig.body(ev.TEXT_DISCARDED)["segment"] == "m1"
    assert rig.body(ev.TEXT_COMPLETED) == {"segment": "m1.2", "text": "whole"}
    assert [body["offset"] for body in rig.bodies(ev.TEXT_DELTA)] == [0, 0]
    assert rig.body(ev.MODEL_REQUEST) == {
        "state": "retrying",
        "attempt": 2,
        "attempts_max": 5,
        "http_status": 503,
        "detail": "busy",
    }


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"message": "no", "codexErrorInfo": "unauthorized"}, "model_auth"),
        ({"message": "no", "codexErrorInfo": {"httpConnectionFailed": {"httpStatusCode": 401}}}, "model_auth"),
        ({"message": f"provider auth command failed: {REFUSED}", "codexErrorInfo": "other"}, "model_auth"),
        ({"message": "no", "codexErrorInfo": "usageLimitExceeded"}, "model_error"),
        ({"message": "no", "codexErrorInfo": "sandboxError"}, "agent_error"),
        ({"message": "no", "codexErrorInfo": ["?"]}, "model_error"),
        (None, "model_error"),
    ],
)
def test_why_a_turn_failed(error: Any, code: str) -> None:
    rig = Rig("codex", start=replace(launch(), key_source="OPENAI_API_KEY of here"))
    rig.write_all()
    rig.say({"id": "opening:initialize", "result": {}}, {"id": "reply:thread", "result": {"thread": {"id": THREAD}}})
    rig.say(said("turn/started", threadId=THREAD, turn={"id": TURN}), ended("failed", error=error))
    told = rig.body(ev.RESPONSE_ENDED)["error"]
    assert told["code"] == code
    assert ("OPENAI_API_KEY of here" in told["detail"]) == (code == "model_auth")


def test_usage_is_each_turns_own_once_with_cached_input_apart() -> None:
    rig = threaded()
    rig.say(
        used(1000, turn="an earlier process's"),
        said("turn/started", threadId=THREAD, turn={"id": TURN}),
        used(1100),
        said("thread/tokenUsage/updated", **OF, tokenUsage={"total": total(1300, cached=50), "last": total(200)}),
        ended(),
    )
    body = rig.body(ev.USAGE)
    assert (body["input_tokens"], body["cache_read_tokens"], body["output_tokens"]) == (250, 50, 60)
    assert [request["state"] for request in rig.bodies(ev.MODEL_REQUEST)] == ["completed", "completed"]


def test_a_turn_without_a_finished_request_used_nothing() -> None:
    rig = running()
    rig.say(ended("interrupted"))
    assert rig.bodies(ev.USAGE) == []


def test_a_subagents_items_have_their_parent_and_its_turn_is_background_work() -> None:
    rig = running()
    call = {"type": "collabAgentToolCall", "id": "t1", "tool": "spawn_agent", "receiverThreadIds": ["th-2"]}
    child = {"threadId": "th-2", "turnId": "tu-9"}
    rig.say(
        said("item/started", **OF, item=call),
        said("turn/started", threadId="th-2", turn={"id": "tu-9"}),
        said("item/completed", **child, item={"type": "agentMessage", "id": "m9", "text": "hi"}),
        said("thread/tokenUsage/updated", **child, tokenUsage={"total": total(500), "last": total(500)}),
        said("item/completed", **OF, item={**call, "status": "completed"}),
        ended(),
    )
    assert rig.body(ev.TEXT_COMPLETED) == {"segment": "m9", "text": "hi", "parent": "t1"}
    assert ev.RESPONSE_ENDED not in rig.types(), "its turn still runs"
    rig.say(said("turn/completed", threadId="th-2", turn={"id": "tu-9", "status": "completed"}))
    assert [body["state"] for body in rig.bodies(ev.BACKGROUND)] == ["started", "completed"]
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == "completed"
    assert rig.bodies(ev.USAGE) == []


@pytest.mark.parametrize(
    ("item", "name", "status"),
    [
        (command(status="completed", exitCode=0), "commandExecution", "ok"),
        (command(status="completed", exitCode=3), "commandExecution", "error"),
        (command(status="declined"), "commandExecution", "error"),
        (
            {"type": "mcpToolCall", "server": "s", "tool": "t", "arguments": {"a": 1}, "status": "failed"},
            "s.t",
            "error",
        ),
        ({"type": "webSearch", "query": "q"}, "webSearch", "ok"),
        ({"type": "dynamicToolCall", "tool": "d", "arguments": {}, "status": "completed"}, "d", "ok"),
    ],
)
def test_a_tool_is_told_with_its_end_also_where_its_beginning_was_not(
    item: dict[str, Any], name: str, status: str
) -> None:
    rig = running()
    rig.say(said("item/completed", **OF, item={**item, "id": "x1"}))
    assert rig.body(ev.TOOL_STARTED)["name"] == name
    assert rig.body(ev.TOOL_COMPLETED)["status"] == status


def test_reasoning_and_output_come_in_parts() -> None:
    rig = running()
    rig.say(
        said("item/started", **OF, item={"type": "reasoning", "id": "r1", "summary": [], "content": []}),
        said("item/reasoning/summaryTextDelta", **OF, itemId="r1", summaryIndex=0, delta="hm"),
        said("item/completed", **OF, item={"type": "reasoning", "id": "r1", "summary": ["hm"], "content": ["long"]}),
        said("item/started", **OF, item=command()),
        said("item/commandExecution/outputDelta", **OF, itemId="c1", delta="one"),
        said("item/commandExecution/outputDelta", **OF, itemId="c1", delta="two"),
    )
    assert [body["segment"] for body in rig.bodies(ev.REASONING_COMPLETED)] == ["r1/s0", "r1/c0"]
    assert [(body["text"], body["offset"]) for body in rig.bodies(ev.TOOL_PROGRESS)] == [("one", 0), ("two", 3)]


@pytest.mark.parametrize("method", sorted(IGNORED))
def test_what_is_ignored_by_name_says_nothing(method: str) -> None:
    rig = running()
    before = len(rig.events)
    rig.say(said(method, threadId=THREAD))
    assert len(rig.events) == before


@pytest.mark.parametrize(
    "line",
    [
        {"method": "new/thing", "params": {}},
        {"method": "turn/completed", "params": {"threadId": THREAD, "turn": {"id": TURN, "status": ["x"]}}},
        {"method": "item/started", "params": {"item": {"type": {}, "id": "x"}}},
        {"method": "item/completed", "params": {"item": {"type": "agentMessage", "id": "m"}}},
        {"method": 7},
        {"id": "nobody's", "result": {}},
        {"id": 1.5, "result": {}},
        {"hello": "world"},
    ],
)
def test_a_line_that_is_not_understood_is_shown_bounded(line: dict[str, Any]) -> None:
    rig = running()
    rig.say(line)
    assert rig.body(ev.RAW)["stream"] == "stdout"
