"""What a command does where the agent's session could not be resumed: offer the choices, send the same again.

    response failed{RESUME_FAILED, choices} ─▶ on a terminal: asked ─▶ the request's content, as a new request{resume}
                                            └▶ without one: told, with the option that chooses

What was asked before is never sent again by itself: nothing is done twice unless somebody says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from tether.client import Client, Submission, resume_choices
from tether.errors import ProblemError
from tether.prompt import AgentSpec, ResumeChoice, TextContent
from tether_cli.live import Live
from tether_cli.output import Output
from tether_cli.render import one_line
from tether_cli.terminal import Keyboard, Screen

ASKED_MAX: Final = 3  # answers that are none
_ABOUT: Final[dict[ResumeChoice, str]] = {
    "fresh": "a new session, which knows nothing of what was said before",
    "history": "a new session, which is given the conversation's history",
}
_LOOK_BACK: Final = 20  # messages and responses of a conversation, for the one that failed


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it may be sent again. `workspace` is the conversation's own by then."""

    conversation: str
    content: tuple[TextContent, ...]
    agent: AgentSpec


def choices_of(live: Live) -> tuple[ResumeChoice, ...]:
    """Of the response that was followed, or else of the last that was seen to end."""
    return resume_choices(live.tracker.error if live.tracker.outcome is not None else live.last_error)


async def choose(screen: Screen, keyboard: Keyboard, choices: tuple[ResumeChoice, ...]) -> ResumeChoice | None:
    """Ask on the terminal; None leaves it."""
    screen.line("  its earlier session cannot be resumed. Send the same again with")
    for number, choice in enumerate(choices, start=1):
        screen.line(f"    {number}  {choice}: {_ABOUT[choice]}")
    named = {str(number): choice for number, choice in enumerate(choices, start=1)} | {one: one for one in choices}
    keyboard.forget()
    try:
        for _ in range(ASKED_MAX):
            screen.ask("  a number, or nothing to leave it: ")
            word = (await keyboard.line() or "").strip().lower()
            screen.answered()
            if not word or word in named:
                return named.get(word)
            screen.line(f"  {one_line(word, 40)} is none of these: {', '.join(named)}")
    finally:
        keyboard.close()
    return None


async def offer(live: Live, output: Output, data: str) -> Submission | None:
    """After a conversation was followed: its last request once more, where somebody at the terminal says so. `data`:
    the option that names the set's directory. Raises ProblemError."""
    choices = choices_of(live)
    asked = await last_failed(live.client, live.conversation) if choices else None
    if asked is None:
        return None
    if live.keyboard is None:
        output.note(hint(live.conversation, choices, data))
        return None
    choice = await choose(live.screen, live.keyboard, choices)
    if choice is None:
        return None
    return await live.client.prompt(asked.conversation, asked.content, agent=asked.agent, resume=choice)


async def last_failed(client: Client, conversation: str) -> Asked | None:
    """The conversation's last request, if it is one whose session could not be resumed, as the history has it."""
    try:
        history = await client.conversation(conversation, limit=_LOOK_BACK)
    except ProblemError:
        return None
    ends = [(one.place, one.request, one.agent) for one in history.responses if resume_choices(one.error)]
    ends += [(one.place, one.request, "") for one in history.failures if resume_choices({"code": one.code})]
    if not ends or not history.messages:
        return None
    _, request, agent = max(ends)
    message = max(history.messages, key=lambda one: one.place)
    if message.request != request:
        return None  # something was asked after it
    known = agent or next((one.agent for one in reversed(history.responses) if one.agent), "")
    try:
        content = tuple(TextContent.model_validate(part) for part in message.content)
        return Asked(conversation, content, AgentSpec(kind=known) if known else AgentSpec())
    except ValidationError:
        return None


def hint(conversation: str, choices: tuple[ResumeChoice, ...], data: str) -> str:
    """What to type where nobody can be asked."""
    first, *others = choices
    or_else = "".join(f" (or `{choice}`)" for choice in others)
    command = f"`tether run … --conversation {one_line(conversation)} --resume {first}{data}`"
    return f"{command}{or_else} sends it again in a new session"
