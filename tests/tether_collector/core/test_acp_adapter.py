"""What the ACP adapter writes and when: the handshake, modes, prompts that wait, turns and their ends, tools, texts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from support_acp_talk import CAPABILITIES, OPTIONS, SESSION, Talk, modes, ready
from support_execution import PROMPT_ID, launch
from tether import events as ev
from tether.errors import InvalidError
from tether_collector.core import inputs as i
from tether_collector.core.adapters import adapter_for
from tether_collector.core.adapters.acp import Acp
from tether_collector.core.adapters.acp_rules import GENERAL, PROFILES

# --- handshake -------------------------------------------------------------------------------------------------------


def test_each_step_is_written_when_the_one_before_was_answered() -> None:
    talk = Talk()
    assert [message["method"] for message in talk.written] == ["initialize"]
    capabilities = talk.written[0]["params"]["clientCapabilities"]
    assert capabilities["fs"] == {"readTextFile": False, "writeTextFile": False}
    assert capabilities["terminal"] is False
    [new] = talk.answer("initialize", {"protocolVersion": 1, "agentCapabilities": CAPABILITIES})
    assert (new["method"], new["params"]) == ("session/new", {"cwd": "/sandbox/ws", "mcpServers": []})
    [prompt] = talk.answer("session/new", {"sessionId": SESSION})
    assert prompt["params"] == {"sessionId": SESSION, "prompt": [{"type": "text", "text": "hello"}]}


@pytest.mark.parametrize(
    ("capabilities", "method"),
    [
        ({"sessionCapabilities": {"resume": {}}}, "session/resume"),
        ({"loadSession": True}, "session/load"),
        ({"loadSession": True, "sessionCapabilities": {"resume": {}}}, "session/resume"),
    ],
)
def test_a_session_is_resumed_where_the_agent_can_and_loaded_else(capabilities: dict[str, Any], method: str) -> None:
    start = replace(launch(resume=True), session=SESSION)
    talk = Talk(start=start)
    [asked] = talk.answer("initialize", {"protocolVersion": 1, "agentCapabilities": capabilities})
    assert (asked["method"], asked["params"]["sessionId"]) == (method, SESSION)
    talk.chunk("what was said before")
    talk.update("tool_call", toolCallId="old", title="bash", status="completed")
    assert talk.rig.events == [], "a replay is no history"
    [prompt] = talk.answer(method, {})
    assert prompt["params"]["sessionId"] == SESSION
    assert talk.rig.body(ev.SESSION_BOUND)["native_session"] == SESSION


def test_an_agent_that_can_do_neither_has_no_session_to_go_on_with() -> None:
    talk = Talk(start=launch(resume=True))
    assert talk.answer("initialize", {"protocolVersion": 1, "agentCapabilities": {}}) == []
    assert talk.rig.body(ev.RESPONSE_ENDED)["error"]["code"] == "RESUME_FAILED"


@pytest.mark.parametrize("version", [2, None, "1"])
def test_another_version_of_the_protocol_is_refused_by_name(version: Any) -> None:
    talk = Talk()
    assert talk.answer("initialize", {"protocolVersion": version}) == []
    error = talk.rig.body(ev.RESPONSE_ENDED)["error"]
    assert error["code"] == "agent_unsupported"
    assert f"version {version} of ACP" in error["detail"]


@pytest.mark.parametrize(
    ("kind", "error", "code"),
    [
        ("acp:another", {"code": -32002, "message": "Resource not found"}, "RESUME_FAILED"),
        ("acp:another", {"code": -32603, "message": "no rollout found"}, "agent_error"),
        (
            "acp:codex",
            {"code": -32603, "message": "Internal", "data": {"details": "no rollout found"}},
            "RESUME_FAILED",
        ),
        ("acp:gemini", {"code": -32603, "message": "Invalid session identifier"}, "RESUME_FAILED"),
        ("acp:opencode", {"code": -32603, "message": "failure", "data": {"service": "session"}}, "RESUME_FAILED"),
        ("acp:opencode", {"code": -32603, "message": "failure", "data": {"service": "disk"}}, "agent_error"),
        ("acp:another", {"code": -32000, "message": "Authentication required"}, "model_auth"),
    ],
)
def test_why_a_session_is_refused_is_told_by_the_agents_own_rules(kind: str, error: Any, code: str) -> None:
    talk = Talk(kind, replace(launch(resume=True), key_source="MY_KEY of /a/file"))
    talk.answer("initialize", {"protocolVersion": 1, "agentCapabilities": CAPABILITIES})
    assert talk.answer("session/resume", error=error) == []
    told = talk.rig.body(ev.RESPONSE_ENDED)["error"]
    assert told["code"] == code
    assert error["message"] in told["detail"]
    assert ("MY_KEY of /a/file" in told["detail"]) == (code == "model_auth")


def test_a_permission_mode_is_set_before_the_prompt_and_only_where_it_is_not_there_already() -> None:
    offered = modes("default", "plan", "auto", current="auto")
    talk = ready("acp:claude", replace(launch(), permission_mode="plan"), offered)
    sent = [message["params"] for message in talk.written if message["method"] == "session/set_mode"]
    assert sent == [{"sessionId": SESSION, "modeId": "plan"}]
    again = ready("acp:claude", None, modes("default", current="default"))
    assert "session/set_mode" not in [message["method"] for message in again.written]


def test_modes_and_models_that_come_as_options_are_set_as_such() -> None:
    values = [{"value": "build", "name": "b"}, {"value": "plan", "name": "p"}]
    option = {"id": "mode", "category": "mode", "currentValue": "build", "options": values}
    model = {"id": "m", "category": "model", "currentValue": "a/x", "options": [{"group": "g", "options": []}]}
    start = replace(launch(), permission_mode="plan", model="a/y")
    talk = ready("acp:opencode", start, {"configOptions": [option, model]})
    sent = [message["params"] for message in talk.written if message["method"] == "session/set_config_option"]
    assert [(each["configId"], each["value"]) for each in sent] == [("mode", "plan"), ("m", "a/y")]
    assert talk.rig.bodies(ev.SESSION_BOUND)[0]["model"] == "a/y"


def test_a_mode_that_the_agent_does_not_have_is_refused_before_anything_runs() -> None:
    talk = Talk("acp:claude", replace(launch(), permission_mode="dontAsk"))
    talk.answer("initialize", {"protocolVersion": 1, "agentCapabilities": CAPABILITIES})
    assert talk.answer("session/new", {"sessionId": SESSION, **modes("default", "plan", current="default")}) == []
    error = talk.rig.body(ev.RESPONSE_ENDED)["error"]
    assert error["code"] == "agent_unsupported"
    assert "'dontAsk'" in error["detail"]
    assert "it offers default, plan" in error["detail"]


def test_a_model_for_an_agent_that_lets_none_be_chosen_is_refused() -> None:
    talk = Talk(start=replace(launch(), model="big"))
    talk.answer("initialize", {"protocolVersion": 1, "agentCapabilities": CAPABILITIES})
    assert talk.answer("session/new", {"sessionId": SESSION}) == []
    assert "leave `model` out" in talk.rig.body(ev.RESPONSE_ENDED)["error"]["detail"]


def test_an_interrupt_before_the_prompt_was_written_prevents_it() -> None:
    talk = Talk()
    talk.rig.control("int-1", "interrupt")
    assert talk.write() == []
    talk.answer("initialize", {"protocolVersion": 1, "agentCapabilities": CAPABILITIES})
    assert talk.answer("session/new", {"sessionId": SESSION}) == []
    assert talk.rig.body(ev.RESPONSE_ENDED)["outcome"] == "cancelled"
    assert talk.rig.receipts("int-1")[-1] == "settled"


def test_an_interjection_before_there_is_a_session_waits_for_it() -> None:
    talk = Talk("acp:claude")
    assert talk.interject("ctl-1", "and this") == []
    talk.answer("initialize", {"protocolVersion": 1, "agentCapabilities": CAPABILITIES})
    sent = talk.answer("session/new", {"sessionId": SESSION, **modes("default", current="default")})
    assert [message["params"]["prompt"][0]["text"] for message in sent] == ["hello", "and this"]


def test_an_interjection_for_a_session_that_never_came_is_refused() -> None:
    talk = Talk()
    talk.interject("ctl-1", "and this")
    talk.answer("initialize", error={"code": -32603, "message": "broken"})
    assert talk.rejected() == ("SESSION_STREAM_NOT_ACTIVE", "the agent made no session")


# --- turns -----------------------------------------------------------------------------------------------------------


def test_where_a_second_prompt_breaks_the_first_it_is_held_until_that_is_over() -> None:
    talk = ready("acp:qwen", None, modes("default", current="default"))
    talk.chunk("one")
    assert talk.interject("ctl-1", "second") == []
    assert talk.rig.receipts("ctl-1") == ["accepted"]
    [sent] = talk.answer("session/prompt", {"stopReason": "end_turn"})
    assert sent["params"]["prompt"] == [{"type": "text", "text": "second"}]
    assert talk.rig.bodies(ev.RESPONSE_ENDED) == []
    assert talk.rig.wants(i.Deadline) == [], "a turn runs: the response is not ended by a deadline"
    talk.chunk("two", "m2")
    assert talk.rig.receipts("ctl-1") == ["accepted", "delivered", "settled"]
    talk.answer("session/prompt", {"stopReason": "end_turn"})
    assert [body["turn"] for body in talk.rig.bodies(ev.TURN_COMPLETED)] == [PROMPT_ID, "ctl-1"]
    assert talk.rig.body(ev.RESPONSE_ENDED)["outcome"] == "completed"


def test_where_prompts_may_wait_in_the_agent_each_is_written_at_once_and_the_last_one_ends_the_response() -> None:
    talk = ready("acp:claude", None, modes("default", current="default"))
    [sent] = talk.interject("ctl-1", "second")
    assert sent["method"] == "session/prompt"
    talk.answer("session/prompt", {"stopReason": "end_turn"})
    assert talk.rig.bodies(ev.RESPONSE_ENDED) == []
    assert talk.rig.receipts("ctl-1")[-1] == "settled", "the agent goes on to it"
    talk.answer("session/prompt", {"stopReason": "end_turn"})
    assert talk.rig.body(ev.RESPONSE_ENDED)["outcome"] == "completed"


def test_a_prompt_that_joined_the_running_turn_may_be_answered_first() -> None:
    talk = ready("acp:codex", None, modes("read-only", current="read-only"))
    talk.interject("ctl-1", "steer")
    first, second = talk.asked["session/prompt"]
    talk.say(id=second, result={"stopReason": "end_turn"})
    assert talk.rig.bodies(ev.RESPONSE_ENDED) == []
    talk.say(id=first, result={"stopReason": "end_turn"})
    assert talk.rig.body(ev.RESPONSE_ENDED)["outcome"] == "completed"
    assert talk.rig.receipts("ctl-1")[-1] == "settled"


@pytest.mark.parametrize(
    ("result", "outcome", "code"),
    [
        ({"stopReason": "end_turn"}, "completed", None),
        ({"stopReason": "cancelled"}, "cancelled", "INTERRUPTED"),
        ({"stopReason": "refusal"}, "failed", "refusal"),
        ({"stopReason": "max_tokens"}, "failed", "max_tokens"),
        ({"stopReason": "max_turn_requests"}, "failed", "max_turn_requests"),
        ({"stopReason": "of another day"}, "completed", None),
        (None, "completed", None),
    ],
)
def test_how_a_turn_ends_is_what_its_stop_reason_says(result: Any, outcome: str, code: str | None) -> None:
    talk = ready()
    talk.answer("session/prompt", result)
    body = talk.rig.body(ev.RESPONSE_ENDED)
    assert (body["outcome"], (body.get("error") or {}).get("code")) == (outcome, code)


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        ({"code": -32603, "message": "Internal error: API Error: 400 bad"}, "model_error", 400),
        ({"code": -32603, "message": "Internal error", "data": {"details": "http status 503"}}, "model_error", 503),
        ({"code": 429, "message": "slow down"}, "model_error", 429),
        ({"code": -32603, "message": "API Error: 401 invalid key"}, "model_auth", 401),
        ({"code": -32603, "message": "out of cheese 500"}, "agent_error", None),
        ("nonsense", "agent_error", None),
    ],
)
def test_a_failed_prompt_tells_what_failed(error: Any, code: str, status: int | None) -> None:
    talk = ready()
    talk.answer("session/prompt", error=error)
    assert talk.rig.body(ev.RESPONSE_ENDED)["error"]["code"] == code
    assert [body.get("http_status") for body in talk.rig.bodies(ev.MODEL_REQUEST)] == ([status] if status else [])


@pytest.mark.parametrize(
    ("name", "code"), [("APIError", "model_error"), ("ProviderAuthError", "model_auth"), ("Other", "agent_error")]
)
def test_a_failure_that_opencode_gives_a_name_is_told_by_it(name: str, code: str) -> None:
    talk = ready("acp:opencode")
    talk.answer("session/prompt", error={"code": -32603, "message": "Internal error", "data": {"errorName": name}})
    assert talk.rig.body(ev.RESPONSE_ENDED)["error"]["code"] == code


def test_a_failure_that_codex_tells_beside_the_protocol_is_one() -> None:
    talk = ready("acp:codex", None, modes("read-only", current="read-only"))
    talk.chunk("unexpected status 400 Bad Request")
    talk.update("session_info_update", _meta={"codex": {"threadStatus": {"type": "systemError"}}})
    talk.answer("session/prompt", {"stopReason": "end_turn"})
    error = talk.rig.body(ev.RESPONSE_ENDED)["error"]
    assert (error["code"], error["detail"]) == ("model_error", "unexpected status 400 Bad Request")


def test_an_interrupt_cancels_the_turn_and_every_open_request_with_it() -> None:
    talk = ready()
    first = talk.ask(0, "t1")
    talk.ask("1", "t2")
    talk.rig.control("int-1", "interrupt")
    cancel, one, two = talk.write()
    assert (cancel["method"], "id" in cancel) == ("session/cancel", False)
    assert [(each["id"], each["result"]) for each in (one, two)] == [
        (0, {"outcome": {"outcome": "cancelled"}}),
        ("1", {"outcome": {"outcome": "cancelled"}}),
    ]
    assert talk.given(first, decision="allow") == [], "what was cancelled is not allowed any more"
    asked = {"sessionId": SESSION, "toolCall": {"toolCallId": "t3"}, "options": OPTIONS}
    [late] = talk.say(id=2, method="session/request_permission", params=asked)
    assert late["result"] == {"outcome": {"outcome": "cancelled"}}, "asked while the interrupt was on its way"
    talk.answer("session/prompt", {"stopReason": "cancelled"})
    assert [body["outcome"] for body in talk.rig.bodies(ev.INTERACTION_RESOLVED)] == ["cancelled", "cancelled"]
    assert talk.rig.receipts("int-1") == ["accepted", "delivered", "settled"]
    assert talk.rig.body(ev.RESPONSE_ENDED)["outcome"] == "cancelled"


def test_what_is_open_when_the_process_dies_is_closed() -> None:
    talk = ready()
    talk.chunk("half a ")
    talk.update("tool_call", toolCallId="t1", title="bash", status="in_progress", rawInput={"command": "x"})
    talk.update("agent_thought_chunk", content={"type": "text", "text": "hm"})
    talk.rig.exit(-9)
    assert talk.rig.body(ev.TEXT_COMPLETED) == {"segment": "text-1", "text": "half a "}
    assert talk.rig.body(ev.REASONING_COMPLETED)["partial"] is True
    assert talk.rig.body(ev.TOOL_COMPLETED)["status"] == "interrupted"
    assert talk.rig.body(ev.RESPONSE_ENDED)["outcome"] == "lost"


# --- tools and texts -------------------------------------------------------------------------------------------------


def test_a_tool_starts_when_its_input_is_complete() -> None:
    talk = ready()
    talk.update("tool_call", toolCallId="t1", title="bash", status="pending", rawInput={})
    talk.update("tool_call_update", toolCallId="t1", rawInput={"command": "l"})
    talk.update("tool_call_update", toolCallId="t1", rawInput={"command": "ls"})
    assert talk.rig.bodies(ev.TOOL_STARTED) == []
    talk.update("usage_update", used=1, size=2)
    assert talk.rig.body(ev.TOOL_STARTED) == {"tool": "t1", "name": "bash", "input": {"command": "ls"}}


def test_output_that_is_repeated_whole_is_told_once() -> None:
    talk = ready()
    talk.update("tool_call", toolCallId="t1", title="bash", status="in_progress", rawInput={"command": "x"})
    for text in ("one\n", "one\ntwo\n", "one\ntwo\n"):
        content = [{"type": "content", "content": {"type": "text", "text": text}}]
        talk.update("tool_call_update", toolCallId="t1", status="in_progress", content=content)
    talk.update("tool_call_update", toolCallId="t1", status="completed", rawOutput={"exit": 0})
    assert [(body["text"], body["offset"]) for body in talk.rig.bodies(ev.TOOL_PROGRESS)] == [
        ("one\n", 0),
        ("two\n", 4),
    ]
    assert talk.rig.body(ev.TOOL_COMPLETED)["output"] == {"exit": 0}
    talk.update("tool_call_update", toolCallId="t1", status="completed")
    assert len(talk.rig.bodies(ev.TOOL_COMPLETED)) == 1, "a late update starts nothing anew"


def test_texts_of_two_messages_and_around_a_tool_are_segments_of_their_own() -> None:
    talk = ready()
    talk.chunk("a")
    talk.chunk("b")
    talk.chunk("c", "m2")
    talk.update("tool_call", toolCallId="t1", title="bash", status="completed")
    talk.chunk("d", "m2")
    talk.answer("session/prompt", {"stopReason": "end_turn"})
    texts = [(body["segment"], body["text"]) for body in talk.rig.bodies(ev.TEXT_COMPLETED)]
    assert texts == [("text-1", "ab"), ("text-2", "c"), ("text-3", "d")]
    assert [body["resumable"] for body in talk.rig.bodies(ev.SESSION_BOUND)] == [False, True]


def test_a_plan_is_told_as_the_tool_that_it_is_with_other_agents() -> None:
    talk = ready()
    talk.update("plan", entries=[{"content": "look", "status": "pending", "priority": "high"}])
    assert talk.rig.body(ev.TOOL_STARTED)["input"]["entries"][0]["content"] == "look"
    assert talk.rig.body(ev.TOOL_COMPLETED)["status"] == "ok"


def test_a_session_of_an_agent_that_does_not_find_it_again_is_never_resumable() -> None:
    talk = ready("acp:gemini", None, modes("default", current="default"))
    talk.chunk("text")
    talk.answer("session/prompt", {"stopReason": "end_turn"})
    assert [body["resumable"] for body in talk.rig.bodies(ev.SESSION_BOUND)] == [False]


@pytest.mark.parametrize("method", ["fs/read_text_file", "terminal/create", "_vendor/thing"])
def test_what_the_client_does_not_offer_is_refused_at_once(method: str) -> None:
    talk = ready()
    [refused] = talk.say(id=7, method=method, params={})
    assert (refused["id"], refused["error"]["code"]) == (7, -32601)
    assert method in refused["error"]["message"]


def test_updates_of_another_session_and_unknown_ones_are_kept_as_raw() -> None:
    talk = ready()
    update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "x"}}
    talk.say(method="session/update", params={"sessionId": "other", "update": update})
    talk.update("of_another_day")
    talk.say(method="of/another/day")
    talk.update("agent_message_chunk", content={"type": "image"})
    assert [body["why"] for body in talk.rig.bodies(ev.RAW)] == [
        "an update of another session",
        "unknown update",
        "unknown notification",
        "a chunk that is not text",
    ]


# --- the registry and what is data -----------------------------------------------------------------------------------


def test_any_acp_name_has_an_adapter_and_an_unknown_one_the_general_rules() -> None:
    another, known = adapter_for("acp:another"), adapter_for("acp:opencode")
    assert isinstance(another, Acp)
    assert isinstance(known, Acp)
    assert (another.name, another.profile) == ("acp:another", GENERAL)
    assert known.profile is PROFILES["opencode"]
    for kind in ("acp:", "acp:A", "acp:a/b", "acp"):
        with pytest.raises(InvalidError):
            adapter_for(kind)


def test_sessions_and_settings_lie_in_the_workspace_and_the_command_line_holds_neither_prompt_nor_key() -> None:
    start = replace(launch("the prompt"), args=("--more",))
    adapter = adapter_for("acp:opencode")
    assert adapter.argv(start, ["/bin/opencode"]) == ["/bin/opencode", "acp", "--more"]
    env = adapter.environment(start)
    assert env["XDG_DATA_HOME"] == "/sandbox/ws/.tether/agents/acp-opencode/data"
    assert json.loads(env["OPENCODE_PERMISSION"])["bash"] == "ask"
    free = adapter.environment(replace(start, permission_mode="bypassPermissions"))
    assert json.loads(free["OPENCODE_PERMISSION"])["bash"] == "allow"
    assert adapter_for("acp:claude").environment(start)["CLAUDE_CONFIG_DIR"].endswith("/.tether/agents/acp-claude")
    assert adapter_for("acp:codex").environment(start)["CODEX_HOME"].endswith("/.tether/agents/acp-codex")
