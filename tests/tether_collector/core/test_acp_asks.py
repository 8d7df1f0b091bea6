"""What an ACP agent asks: permissions with their options, forms, questions of its own kind, and what answers fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support_acp_talk import OPTIONS, SESSION, Talk, modes, ready
from support_execution import launch
from tether import events as ev
from tether.errors import InvalidError
from tether_collector.core.adapters import base as b

# --- questions and answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ({"decision": "allow"}, {"outcome": "selected", "optionId": "yes"}),
        ({"decision": "deny", "text": "no"}, {"outcome": "selected", "optionId": "no"}),
        ({"decision": "allow", "answers": {"option": ["ever"]}}, {"outcome": "selected", "optionId": "ever"}),
    ],
)
def test_an_approval_takes_an_offered_option_for_this_once_unless_one_is_named(answer: Any, result: Any) -> None:
    talk = ready()
    interaction = talk.ask()
    [sent] = talk.given(interaction, **answer)
    assert sent == {"jsonrpc": "2.0", "id": 0, "result": {"outcome": result}}
    assert talk.rig.body(ev.INTERACTION_REQUESTED)["options"][0] == {"id": "yes", "label": "Yes", "kind": "allow_once"}


@pytest.mark.parametrize(
    ("answer", "field", "words"),
    [
        ({"decision": "allow", "input": {"command": "rm"}}, "payload.input", "say in a prompt what is to run instead"),
        ({"decision": "allow", "answers": {"option": ["no"]}}, "payload.answers.option", "yes, ever"),
        ({"decision": "allow", "answers": {"x": ["y"]}}, "payload.answers.x", "none but 'option'"),
    ],
)
def test_an_answer_that_acp_cannot_carry_is_refused_by_field_with_the_remedy(
    answer: Any, field: str, words: str
) -> None:
    talk = ready()
    interaction = talk.ask()
    rejection = talk.rig.execution.check_control(
        "answer", talk.rig.execution.target, {"interaction": interaction, **answer}
    )
    assert rejection is not None
    assert field in str(rejection.problem)
    assert words in rejection.problem.detail


def test_an_agent_that_offers_no_way_to_allow_can_only_be_denied() -> None:
    talk = ready()
    interaction = talk.ask(options=[{"optionId": "n", "kind": "reject_always"}])
    state = talk.rig.execution._adapter_state
    with pytest.raises(InvalidError) as caught:
        talk.rig.adapter.answer(state, b.Answer(interaction, "allow"))
    assert caught.value.field == "payload.decision"
    [sent] = talk.given(interaction, decision="deny")
    assert sent["result"] == {"outcome": {"outcome": "selected", "optionId": "n"}}


def test_an_update_before_the_answer_resolves_nothing_and_one_after_it_does() -> None:
    talk = ready()
    interaction = talk.ask()
    talk.update("tool_call_update", toolCallId="t1", status="in_progress")
    assert talk.rig.bodies(ev.INTERACTION_RESOLVED) == []
    talk.given(interaction, decision="allow")
    talk.update("tool_call_update", toolCallId="t1", status="in_progress")
    assert talk.rig.body(ev.INTERACTION_RESOLVED)["outcome"] == "answered"
    assert talk.rig.receipts("ctl-a")[-1] == "settled"


def test_a_tool_that_ends_unasked_for_an_answer_cancels_its_request() -> None:
    talk = ready()
    talk.ask()
    talk.update("tool_call_update", toolCallId="t1", status="failed")
    assert talk.rig.body(ev.INTERACTION_RESOLVED)["outcome"] == "cancelled"


def test_interactions_of_two_processes_never_have_the_same_key() -> None:
    other = replace(launch(), prompt_id="22222222-2222-4222-8222-222222222222")
    assert ready().ask() != ready(start=other).ask()


FORM = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "title": "Name", "description": "What is it called?"},
        "count": {"type": "integer", "title": "Count"},
        "sure": {"type": "boolean"},
        "colours": {"type": "array", "items": {"anyOf": [{"const": "Red", "title": "R"}, {"const": "Blue"}]}},
    },
}


def form(talk: Talk, schema: Any, message: str = "Tell") -> str:
    params = {"mode": "form", "sessionId": SESSION, "message": message, "requestedSchema": schema}
    talk.say(id=5, method="elicitation/create", params=params)
    return str(talk.rig.body(ev.INTERACTION_REQUESTED)["interaction"])


def test_a_form_becomes_questions_and_its_answers_have_the_types_that_it_wants() -> None:
    talk = ready()
    interaction = form(talk, FORM)
    questions = talk.rig.body(ev.INTERACTION_REQUESTED)["questions"]
    assert [question["id"] for question in questions] == ["name", "count", "sure", "colours"]
    assert questions[0]["question"] == "What is it called?"
    assert questions[3]["multiple"] is True
    answers = {"name": ["x"], "count": ["3"], "sure": ["yes"], "colours": ["Red", "Blue"]}
    [sent] = talk.given(interaction, decision="allow", answers=answers)
    content = {"name": "x", "count": 3, "sure": True, "colours": ["Red", "Blue"]}
    assert sent["result"] == {"action": "accept", "content": content}


@pytest.mark.parametrize(
    ("answers", "field"),
    [
        ({"count": ["3"]}, "payload.answers.name"),
        ({"name": ["x"], "count": ["three"]}, "payload.answers.count"),
        ({"name": ["x"], "sure": ["perhaps"]}, "payload.answers.sure"),
        ({"name": ["x"], "colours": ["Green"]}, "payload.answers.colours"),
        ({"name": ["x", "y"]}, "payload.answers.name"),
        ({"name": ["x"], "other": ["y"]}, "payload.answers.other"),
    ],
)
def test_an_answer_that_does_not_fit_the_form_names_its_field(answers: Any, field: str) -> None:
    talk = ready()
    interaction = form(talk, FORM)
    with pytest.raises(InvalidError) as caught:
        talk.rig.adapter.answer(talk.rig.execution._adapter_state, b.Answer(interaction, "allow", answers=answers))
    assert caught.value.field == field


def test_free_text_for_a_choice_goes_to_the_field_that_is_there_for_it() -> None:
    talk = ready("acp:claude", None, modes("default", current="default"))
    choice = {"type": "string", "title": "Colour", "oneOf": [{"const": "Red"}, {"const": "Blue"}]}
    interaction = form(
        talk, {"properties": {"q0": choice, "q0_custom": {"type": "string", "title": "Other"}}}, "Which?"
    )
    [question] = talk.rig.body(ev.INTERACTION_REQUESTED)["questions"]
    assert (question["question"], [option["label"] for option in question["options"]]) == ("Which?", ["Red", "Blue"])
    [sent] = talk.given(interaction, decision="allow", text="Green")
    assert sent["result"] == {"action": "accept", "content": {"q0_custom": "Green"}}


def test_a_refused_form_is_declined_and_one_that_links_elsewhere_is_not_offered() -> None:
    talk = ready()
    [sent] = talk.given(form(talk, FORM), decision="deny")
    assert sent["result"] == {"action": "decline"}
    [refused] = talk.say(id=6, method="elicitation/create", params={"mode": "url", "url": "http://x"})
    assert refused["error"]["code"] == -32602


def test_questions_that_come_as_a_permission_are_answered_beside_its_outcome() -> None:
    talk = ready("acp:qwen", None, modes("default", current="default"))
    questions = [{"question": "Which?", "header": "H", "options": [{"label": "Red", "description": "warm"}]}]
    call = {"toolCallId": "t1", "title": "ask", "rawInput": {"questions": questions}}
    talk.say(id=0, method="session/request_permission", params={"toolCall": call, "options": OPTIONS})
    asked = talk.rig.body(ev.INTERACTION_REQUESTED)
    assert (asked["kind"], asked["questions"][0]["question"]) == ("question", "Which?")
    [sent] = talk.given(asked["interaction"], decision="allow", answers={"Which?": ["Red"]})
    assert sent["result"] == {"outcome": {"outcome": "selected", "optionId": "yes"}, "answers": {"0": "Red"}}
