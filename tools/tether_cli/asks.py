"""What waits for a human, asked on the terminal: an approval or questions in, an answer out.

    approval    y, n, a number of what the agent offers beyond this once, or a reason why not; nothing typed denies
    question    numbers, or one's own words; nothing typed denies

Where the same was answered before, in a process that was cut, nothing typed gives that answer again. The end of the
terminal never does: it denies, as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tether.client import Answer, Interaction
from tether_cli.render import one_line, tool_label
from tether_cli.terminal import Keyboard, Screen

_WORDS_CHARS_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Offer:
    """An option of the agent's for an approval, and the decision that it comes to."""

    id: str
    label: str
    decision: Literal["allow", "deny"]

    @property
    def answer(self) -> Answer:
        return Answer.allow(option=self.id) if self.decision == "allow" else Answer.deny(option=self.id)


def offers(interaction: Interaction, *, always: bool = True) -> list[Offer]:
    """What the agent offers beyond allowing and denying this once; with `always=False` all that it offers."""
    found = []
    for option in interaction.options if interaction.kind == "approval" else ():
        identity, kind = option.get("id"), str(option.get("kind", ""))
        is_known = isinstance(identity, str) and kind.startswith(("allow", "reject"))
        if isinstance(identity, str) and is_known and (kind.endswith("_always") or not always):
            decision: Literal["allow", "deny"] = "allow" if kind.startswith("allow") else "deny"
            found.append(Offer(identity, one_line(str(option.get("label") or identity)), decision))
    return found


def words_of(answer: Answer, interaction: Interaction) -> str:
    """An answer in one line: `allow`, `Always allow ls`, `deny: not today`, `Red; Large`."""
    chosen = {name: list(values) for name, values in answer.answers.items()}
    if interaction.kind == "approval" and (option := chosen.get("option")):
        return next((one.label for one in offers(interaction, always=False) if one.id in option), one_line(option[0]))
    told: str = answer.decision
    if chosen and answer.decision == "allow":
        told = "; ".join(", ".join(values) for values in chosen.values())
    elif answer.input is not None:
        told += f" with the input {one_line(answer.input)}"
    return one_line(f"{told}: {answer.text}" if answer.text else told, _WORDS_CHARS_MAX)


def parse_approval(line: str | None, beyond: Sequence[Offer] = (), before: Answer | None = None) -> Answer:
    """`y` allows, a number takes what is offered `beyond` this once; `n`, and the end of the terminal, deny; nothing is
    what was answered `before`, or denies; anything else denies with that as the reason."""
    word = (line or "").strip()
    if word.lower() in ("y", "yes"):
        return Answer.allow()
    if (number := _number(word)) is not None and 1 <= number <= len(beyond):
        return beyond[number - 1].answer
    if line is not None and not word and before is not None:
        return before
    return Answer.deny(None if word.lower() in ("", "n", "no") else word)


def parse_choice(line: str, question: Mapping[str, Any]) -> list[str]:
    """Numbers of options (several by commas where that is allowed), or free text."""
    labels = [str(option.get("label", option)) for option in question.get("options", [])]
    words = [word.strip() for word in line.split(",")] if question.get("multiple") else [line.strip()]
    chosen = []
    for word in words:
        number = _number(word) or 0
        chosen.append(labels[number - 1] if 1 <= number <= len(labels) else word)
    return [word for word in chosen if word]


def _number(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdigit() and len(word) < 4 else None


async def ask(screen: Screen, keyboard: Keyboard, interaction: Interaction) -> Answer:
    """Ask it, and take what is typed. What was typed before is no answer to it."""
    if (before := interaction.offered) is not None:
        what = words_of(before, interaction)
        screen.line(f"  you answered this before: {what}. Whether that was applied is not known")
    if interaction.kind == "approval":
        return await _ask_approval(screen, keyboard, interaction)
    return await _ask_questions(screen, keyboard, interaction)


async def _ask_approval(screen: Screen, keyboard: Keyboard, interaction: Interaction) -> Answer:
    before, beyond = interaction.offered, offers(interaction)
    for number, offer in enumerate(beyond, start=1):
        screen.line(f"    {number}  {offer.label} ({offer.decision})")
    choices = ["y/n, nothing for the same answer again" if before is not None else "y/N"]
    choices += ["a number"] if beyond else []
    label, how = tool_label(interaction.name, interaction.input), ", ".join(choices)
    while True:
        line = await _typed(screen, keyboard, f"  allow {label}? [{how}, or a reason why not] ")
        chosen = _number((line or "").strip())
        if beyond and chosen is not None and not 1 <= chosen <= len(beyond):
            screen.line(f"  there is no {chosen}: 1 to {len(beyond)}")
            continue
        return parse_approval(line, beyond, before)


async def _ask_questions(screen: Screen, keyboard: Keyboard, interaction: Interaction) -> Answer:
    answers: dict[str, list[str]] = {}
    otherwise = "nothing denies" if interaction.offered is None else "nothing: the same answer again"
    for question in interaction.questions:
        screen.line(f"  {one_line(question.get('question', ''), 400)}")
        for number, option in enumerate(question.get("options", []), start=1):
            about = f": {one_line(option['description'])}" if option.get("description") else ""
            screen.line(f"    {number}  {one_line(option.get('label', ''))}{about}")
        hint = "numbers by commas" if question.get("multiple") else "a number"
        line = await _typed(screen, keyboard, f"  {hint}, or your own words ({otherwise}): ")
        chosen = parse_choice(line or "", question)
        if not chosen and line is not None and not answers and interaction.offered is not None:
            return interaction.offered
        if not chosen:
            return Answer.deny()
        answers[str(question["id"])] = chosen
        otherwise = "nothing denies"
    return Answer.choose(answers)


async def _typed(screen: Screen, keyboard: Keyboard, question: str) -> str | None:
    keyboard.forget()
    screen.ask(question)
    line = await keyboard.line()
    screen.answered()
    return line
