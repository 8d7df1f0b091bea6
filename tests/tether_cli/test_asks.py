"""Approvals and questions asked on a terminal: what is offered, what was answered before, what is typed."""

from __future__ import annotations

import io
import os
import pty
import tty
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from tether.client import Answer, Interaction
from tether.events import InteractionRequested
from tether_cli import asks
from tether_cli.commands.answer import Given, answer_of
from tether_cli.output import CliError
from tether_cli.terminal import Keyboard, Screen

OPTIONS: list[dict[str, Any]] = [
    {"id": "yes", "label": "Yes", "kind": "allow_once"},
    {"id": "yes-ever", "label": "Always allow ls", "kind": "allow_always"},
    {"id": "no-ever", "label": "Never", "kind": "reject_always"},
    {"id": "odd", "label": "Odd", "kind": "of_tomorrow"},
]
QUESTIONS: list[dict[str, Any]] = [
    {"id": "q1", "question": "Which?", "options": [{"label": "Red"}, {"label": "Blue"}]},
    {"id": "q2", "question": "How many?"},
]
APPROVAL: dict[str, Any] = {"interaction": "i", "kind": "approval", "name": "Bash", "input": {"command": "ls"}}
ASKED: dict[str, Any] = {"interaction": "i", "kind": "question", "questions": QUESTIONS}


def interaction(body: dict[str, Any], **more: Any) -> Interaction:
    return Interaction.of_event("c", "e", InteractionRequested.model_validate({**body, **more}))


@pytest.fixture
async def terminal() -> AsyncIterator[tuple[int, Keyboard]]:
    """The end that a person types at, and the keyboard that reads it."""
    master, slave = pty.openpty()
    tty.setraw(slave)
    keyboard = Keyboard(slave)
    yield master, keyboard
    keyboard.close()
    os.close(master)
    os.close(slave)


class Typist(io.StringIO):
    """A screen's stream at which somebody types: one line at each question that is shown."""

    def __init__(self, descriptor: int, lines: list[str]) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines = lines

    def write(self, text: str) -> int:
        if text.rstrip().endswith(("]", "):")) and self._lines:
            os.write(self._descriptor, self._lines.pop(0).encode() + b"\n")
        return super().write(text)


async def asked(terminal: tuple[int, Keyboard], what: Interaction, *lines: str) -> tuple[Answer, str]:
    beside = Typist(terminal[0], list(lines))
    answer = await asks.ask(Screen(io.StringIO(), beside), terminal[1], what)
    return answer, beside.getvalue()


async def test_what_an_agent_offers_beyond_this_once_is_taken_by_its_number(terminal: tuple[int, Keyboard]) -> None:
    what = interaction(APPROVAL, options=OPTIONS)
    answer, shown = await asked(terminal, what, "1")
    assert "1  Always allow ls (allow)" in shown and "2  Never (deny)" in shown and "Odd" not in shown
    assert answer == Answer.allow(option="yes-ever")
    answer, shown = await asked(terminal, what, "7", "2")
    assert "there is no 7: 1 to 2" in shown and answer == Answer.deny(option="no-ever")
    assert (await asked(terminal, what, "y"))[0] == Answer.allow()
    assert (await asked(terminal, what, ""))[0] == Answer.deny()


async def test_without_options_a_number_is_a_reason_as_any_other_word(terminal: tuple[int, Keyboard]) -> None:
    assert (await asked(terminal, interaction(APPROVAL), "7"))[0] == Answer.deny("7")


@pytest.mark.parametrize(
    ("offered", "words", "answer"),
    [
        ({"decision": "allow", "control": "k"}, "allow", Answer.allow()),
        ({"decision": "deny", "text": "not today"}, "deny: not today", Answer.deny("not today")),
        (
            {"decision": "allow", "input": {"command": "pwd"}},
            'allow with the input {"command": "pwd"}',
            Answer.allow(input={"command": "pwd"}),
        ),
        (
            {"decision": "allow", "answers": {"option": ["yes-ever"]}},
            "Always allow ls",
            Answer("allow", answers={"option": ("yes-ever",)}),
        ),
        ({"decision": "allow", "answers": {"option": ["of-old"]}}, "allow", Answer.allow()),
    ],
    ids=["allow", "deny", "input", "option", "option-that-is-gone"],
)
async def test_nothing_typed_gives_the_answer_from_before_and_words_another(
    terminal: tuple[int, Keyboard], offered: dict[str, Any], words: str, answer: Answer
) -> None:
    what = interaction(APPROVAL, options=OPTIONS, offered=offered)
    found, shown = await asked(terminal, what, "")
    assert f"you answered this before: {words}. Whether that was applied is not known" in shown
    assert "nothing for the same answer again" in shown and found == answer
    assert (await asked(terminal, what, "n"))[0] == Answer.deny()
    assert (await asked(terminal, what, "y"))[0] == Answer.allow()


async def test_answers_from_before_are_given_again_whole_or_not_at_all(terminal: tuple[int, Keyboard]) -> None:
    what = interaction(ASKED, offered={"decision": "allow", "answers": {"q1": ["Red"], "q2": ["two", "three"]}})
    found, shown = await asked(terminal, what, "")
    assert "you answered this before: Red; two, three." in shown
    assert found == Answer("allow", answers={"q1": ("Red",), "q2": ("two", "three")})
    found, _ = await asked(terminal, what, "2", "five")
    assert found == Answer.choose({"q1": ["Blue"], "q2": ["five"]})
    assert (await asked(terminal, what, "2", ""))[0] == Answer.deny(), "nothing typed at the second is no answer"


@pytest.mark.parametrize("offered", [None, {}, {"decision": "perhaps"}, {"decision": "allow", "answers": {"q": 3}}])
def test_what_is_no_answer_is_not_offered(offered: dict[str, Any] | None) -> None:
    assert interaction(APPROVAL, offered=offered).offered is None


def test_the_end_of_the_terminal_gives_no_answer_from_before() -> None:
    before = Answer.allow(option="yes-ever")
    assert asks.parse_approval(None, (), before) == Answer.deny()
    assert asks.parse_approval("", (), before) == before
    assert asks.parse_approval(" N ", (), before) == Answer.deny()


NOTHING = Given(None, None, None, [], None)


async def test_by_command_the_same_answer_and_an_option_are_named() -> None:
    what = interaction(APPROVAL, options=OPTIONS, offered={"decision": "deny", "text": "no"})
    assert await answer_of(replace(NOTHING, decision="same"), what) == Answer.deny("no")
    ever = Answer("allow", answers={"option": ("yes-ever",)})
    assert await answer_of(replace(NOTHING, option="yes-ever"), what) == ever
    assert await answer_of(replace(NOTHING, option="Always allow ls", decision="allow"), what) == ever
    once = Answer("allow", answers={"option": ("yes",)})
    assert await answer_of(replace(NOTHING, option="Yes"), what) == once


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (replace(NOTHING, decision="same"), "i was not answered before; give allow, deny"),
        (replace(NOTHING, option="maybe"), "has no such option; it has Yes (yes), Always allow ls (yes-ever), Never"),
        (replace(NOTHING, option="Never", decision="allow"), "comes to deny, not to allow; give deny"),
    ],
)
async def test_what_cannot_be_answered_so_is_refused_with_what_can(typed: Given, told: str) -> None:
    with pytest.raises(CliError) as refused:
        await answer_of(typed, interaction(APPROVAL, options=OPTIONS))
    assert told in refused.value.line()
