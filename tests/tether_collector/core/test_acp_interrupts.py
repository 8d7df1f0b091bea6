"""Interrupts of ACP agents at each moment, with prompts that wait and requests that are open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support_acp_talk import CAPABILITIES, SESSION, Talk, modes, ready
from support_execution import PROMPT_ID, launch
from tether import events as ev
from tether_collector.core import inputs as i

DEFAULT = modes("default", current="default")


def methods(sent: list[dict[str, Any]]) -> list[str | None]:
    return [message.get("method") for message in sent]


@pytest.mark.parametrize("kind", ["acp:claude", "acp:opencode", "acp:another"])
def test_an_interrupt_is_written_though_the_agent_has_shown_nothing_of_its_turn(kind: str) -> None:
    """A model that is silent, or fails again and again, shows nothing for minutes."""
    talk = ready(kind, None, DEFAULT if kind == "acp:claude" else None)
    talk.rig.control("int-1", "interrupt")
    assert methods(talk.write()) == ["session/cancel"]
    assert talk.rig.receipts("int-1") == ["accepted", "delivered"]
    talk.answer("session/prompt", {"stopReason": "cancelled"})
    assert talk.rig.body(ev.RESPONSE_ENDED)["outcome"] == "cancelled"


def test_an_interrupt_in_the_same_moment_as_the_prompt_is_written_behind_it() -> None:
    talk = Talk()
    talk.answer("initialize", {"protocolVersion": 1, "agentCapabilities": CAPABILITIES})
    identifier = talk.asked["session/new"].pop(0)
    talk.rig.say({"jsonrpc": "2.0", "id": identifier, "result": {"sessionId": SESSION}})
    talk.rig.control("int-1", "interrupt")
    assert methods(talk.write()) == ["session/prompt", "session/cancel"]


def test_a_prompt_that_fails_over_the_interrupt_was_interrupted() -> None:
    talk = ready()
    talk.rig.control("int-1", "interrupt")
    talk.write()
    talk.answer("session/prompt", error={"code": -32603, "message": "Internal service failure"})
    assert talk.rig.body(ev.TURN_COMPLETED)["outcome"] == "interrupted"
    assert talk.rig.body(ev.RESPONSE_ENDED)["error"]["code"] == "INTERRUPTED"


def test_an_interrupt_before_the_first_turn_leaves_the_prompt_behind_it_its_own() -> None:
    talk = Talk()
    talk.interject("ctl-1", "second")
    talk.rig.control("int-1", "interrupt")
    talk.answer("initialize", {"protocolVersion": 1, "agentCapabilities": CAPABILITIES})
    [sent] = talk.answer("session/new", {"sessionId": SESSION})
    assert sent["params"]["prompt"] == [{"type": "text", "text": "second"}]
    assert talk.rig.receipts("int-1")[-1] == "settled"
    talk.answer("session/prompt", {"stopReason": "end_turn"})
    turns = [(body["turn"], body["outcome"]) for body in talk.rig.bodies(ev.TURN_COMPLETED)]
    assert turns == [(PROMPT_ID, "interrupted"), ("ctl-1", "completed")]
    assert talk.rig.body(ev.RESPONSE_ENDED)["outcome"] == "completed"
    assert talk.rig.receipts("ctl-1") == ["accepted", "delivered", "settled"]


def test_opencode_is_told_a_second_prompt_after_the_first_as_its_cancel_would_drop_it_unread() -> None:
    talk = ready("acp:opencode")
    assert talk.interject("ctl-1", "second") == []
    talk.rig.control("int-1", "interrupt")
    assert methods(talk.write()) == ["session/cancel"]
    [sent] = talk.answer("session/prompt", {"stopReason": "cancelled"})
    assert sent["params"]["prompt"] == [{"type": "text", "text": "second"}]


def test_what_a_cancelled_turn_had_asked_is_over_though_another_prompt_goes_on() -> None:
    talk = ready("acp:claude", None, DEFAULT)
    talk.ask()
    talk.interject("ctl-1", "second")
    talk.rig.control("int-1", "interrupt")
    talk.write()
    talk.answer("session/prompt", {"stopReason": "cancelled"})
    assert talk.rig.bodies(ev.RESPONSE_ENDED) == []
    assert talk.rig.body(ev.INTERACTION_RESOLVED)["outcome"] == "cancelled"
    assert talk.rig.execution.status().state == "running"


def test_a_stop_of_a_silent_turn_cancels_it_first() -> None:
    talk = ready()
    talk.rig.control("stop-1", "stop")
    assert methods(talk.write()) == ["session/cancel"]
    talk.answer("session/prompt", {"stopReason": "cancelled"})
    assert talk.rig.wants(i.CloseStdin)


# --- lines around a turn ---------------------------------------------------------------------------------------------


def test_a_replay_that_goes_on_while_the_mode_is_set_is_no_history() -> None:
    start = replace(launch(resume=True), session=SESSION)
    talk = Talk("acp:claude", start)
    talk.answer("initialize", {"protocolVersion": 1, "agentCapabilities": {"loadSession": True}})
    [asked] = talk.answer("session/load", modes("default", "auto", current="auto"))
    assert asked["method"] == "session/set_mode"
    talk.chunk("what was said before")
    talk.update("usage_update", cost={"amount": 0.5, "currency": "USD"})
    talk.answer("session/set_mode", {})
    assert talk.rig.bodies(ev.TEXT_DELTA) == []
    talk.update("usage_update", cost={"amount": 0.75, "currency": "USD"})
    talk.answer("session/prompt", {"stopReason": "end_turn"})
    assert talk.rig.body(ev.USAGE)["cost_usd"] == 0.25


def test_an_update_of_an_unknown_kind_takes_no_tools_beginning_along() -> None:
    talk = ready()
    talk.update("tool_call", toolCallId="t1", title="bash", status="pending", rawInput={"command": "ls"})
    talk.update("of another day")
    talk.update("tool_call_update", toolCallId="t1", status="completed")
    assert [kind for kind in talk.rig.types() if kind.startswith("tool.")] == [ev.TOOL_STARTED, ev.TOOL_COMPLETED]


@pytest.mark.parametrize("choices", [1, True, 1.5, "x", {"const": "a"}, None, [None, 1, {"const": 2}]])
def test_a_form_whose_choices_are_no_list_is_asked_without_them(choices: Any) -> None:
    talk = ready("acp:claude", None, DEFAULT)
    schema = {"properties": {"a": {"oneOf": choices}, "b": {"type": "array", "items": {"anyOf": choices}}}}
    talk.say(id=5, method="elicitation/create", params={"mode": "form", "message": "?", "requestedSchema": schema})
    assert [question["options"] for question in talk.rig.body(ev.INTERACTION_REQUESTED)["questions"]] == [[], []]
