"""`tether answer`: answer an approval or a question from anywhere."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tether_cli.options import DataOption, JsonOption
from tether_cli.output import CliError, Exit, Output

if TYPE_CHECKING:
    from tether.client import Answer, Client, Interaction


def register(app: typer.Typer) -> None:
    app.command("answer")(answer)


def answer(
    conversation: Annotated[str, typer.Argument(metavar="CONVERSATION")],
    interaction: Annotated[
        str, typer.Argument(metavar="INTERACTION", help="As `tether show` names it; `-`: the one that waits.")
    ],
    decision: Annotated[
        str | None,
        typer.Argument(
            metavar="[allow|deny|same]",
            help="same: as it was answered before, in a process that was cut. Without any, on a terminal: asked there.",
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(help="With deny: the reason, told to the agent.")] = None,
    option: Annotated[
        str | None,
        typer.Option(metavar="OPTION", help="Answer an approval with what the agent offers, by its label or id."),
    ] = None,
    choose: Annotated[
        list[str] | None,
        typer.Option(metavar="[QUESTION=]LABEL", help="Answer a question; again for several labels or questions."),
    ] = None,
    changed: Annotated[
        str | None, typer.Option("--input", metavar="JSON", help="With allow: the tool's input as it is to be.")
    ] = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer what an execution waits for. Of two answers one wins; the other is told so."""
    from tether_cli import talk

    given = Given(decision, text, option, choose or [], _object(changed))
    terminal = sys.stdin.isatty() and sys.stderr.isatty() and not as_json
    _check(given, terminal=terminal)
    name = talk.token(conversation, "CONVERSATION")
    code = talk.run(_answer(name, interaction, given, data, Output(as_json)))
    raise typer.Exit(int(code))


@dataclass(frozen=True, slots=True)
class Given:
    """As it was typed."""

    decision: str | None
    text: str | None
    option: str | None
    choose: list[str]
    input: dict[str, Any] | None

    @property
    def is_nothing(self) -> bool:
        return self == Given(None, None, None, [], None)


def _check(given: Given, *, terminal: bool) -> None:
    """Raises CliError for what cannot be one answer."""
    why = ""
    if given.decision not in (None, "allow", "deny", "same"):
        why = "the decision must be allow, deny or same"
    elif given.decision is None and not given.choose and given.option is None and not (given.is_nothing and terminal):
        why = "nothing to answer: give allow, deny or --choose"
    elif given.decision == "deny" and given.choose:
        why = "--choose answers a question; deny refuses it"
    elif given.choose and given.option is not None:
        why = "--choose answers a question, --option an approval: give one of them"
    elif given.decision == "same" and given != Given("same", None, None, [], None):
        why = "same is the whole answer that was given before: give nothing else with it"
    elif given.input is not None and given.decision != "allow":
        why = "--input changes what is allowed: give allow with it"
    if why:
        raise CliError(why, exit_code=Exit.USAGE)


def _object(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CliError(f"--input must be JSON: {error}", exit_code=Exit.USAGE) from None
    if not isinstance(value, dict):
        raise CliError("--input must be a JSON object, as the tool's input is", exit_code=Exit.USAGE)
    return value


async def _answer(conversation: str, interaction: str, typed: Given, data: Path | None, output: Output) -> Exit:
    from tether_cli import state, talk

    async with talk.http_client(state.require(data)) as client:
        found: Interaction | None = None
        if interaction == "-" or typed.decision not in ("allow", "deny") or typed.option is not None:
            found = await _find(client, conversation, interaction)
            interaction = found.id
        given = await answer_of(typed, found)
        execution = None if found is None else found.execution
        receipt = await client.answer(conversation, interaction, given, execution=execution)
        receipt = await talk.known(client, receipt)
    output.value(receipt.model_dump(mode="json", exclude_none=True))
    if receipt.status == "unknown":
        return talk.tell_unknown(output, receipt, "the answer was taken")
    output.say(f"{given.decision}: {receipt.status}")
    return Exit.OK


async def answer_of(typed: Given, found: Interaction | None) -> Answer:
    """The answer that was typed, or that is typed now. `found` where that depends on what is asked. Raises CliError."""
    from tether.client import Answer
    from tether_cli import asks
    from tether_cli.terminal import Keyboard, Screen

    if found is not None and typed.is_nothing:
        keyboard = Keyboard()
        try:
            return await asks.ask(Screen(), keyboard, found)
        finally:
            keyboard.close()
    if found is not None and typed.decision == "same":
        if found.offered is None:
            why = f"{found.id} was not answered before"
            raise CliError(why, remedy="give allow, deny or --choose", exit_code=Exit.USAGE)
        return found.offered
    if found is not None and typed.option is not None:
        return _option(found, typed, typed.option)
    if found is not None and typed.choose:
        return Answer("allow", text=typed.text, answers=_answers(found, typed.choose))
    return Answer("deny" if typed.decision == "deny" else "allow", text=typed.text, input=typed.input)


def _option(found: Interaction, typed: Given, named: str) -> Answer:
    """By its id, else by its label where only one has it."""
    from tether.client import Answer
    from tether_cli import asks

    offered = asks.offers(found, always=False)
    chosen = [one for one in offered if one.id == named] or [one for one in offered if one.label == named]
    if len(chosen) != 1:
        labels = ", ".join(one.label if one.label == one.id else f"{one.label} ({one.id})" for one in offered)
        why = f"--option {named!r}: {found.id} {'is offered as several' if chosen else 'has no such option'}"
        raise CliError(why, remedy=f"it has {labels or 'none'}", exit_code=Exit.USAGE)
    (one,) = chosen
    if typed.decision not in (None, one.decision):
        why = f"--option {named!r} comes to {one.decision}, not to {typed.decision}"
        raise CliError(why, remedy=f"give {one.decision}, or nothing, with it", exit_code=Exit.USAGE)
    return Answer(one.decision, text=typed.text, input=typed.input, answers={"option": (one.id,)})


async def _find(client: Client, conversation: str, interaction: str) -> Interaction:
    """What waits under this id, or the only thing that waits; asked of the execution itself, not of its history."""
    from tether.client import Interaction

    waiting: list[Interaction] = []
    for view in (await client.executions(conversation=conversation, active=True)).executions:
        state = await client.state(view.execution)
        waiting += [Interaction.of_state(conversation, view.execution, item) for item in state.pending()]
    found = [one for one in waiting if interaction in ("-", one.id)]
    if len(found) == 1:
        return found[0]
    if not found:
        what = "nothing waits" if interaction == "-" else f"{interaction} does not wait"
        raise CliError(f"{what} in {conversation}", remedy="`tether show` tells how it stands", exit_code=Exit.USAGE)
    names = ", ".join(one.id for one in found)
    raise CliError(f"several wait: {names}", remedy="name one", exit_code=Exit.USAGE)


def _answers(interaction: Interaction, choose: list[str]) -> dict[str, list[str]]:
    """`QUESTION=LABEL`, or `LABEL` alone where there is one question."""
    ids = [str(question["id"]) for question in interaction.questions]
    answers: dict[str, list[str]] = {}
    for text in choose:
        name, equals, label = text.partition("=")
        if not (equals and name in ids):
            if len(ids) != 1:
                remedy = f"write QUESTION=LABEL with one of {', '.join(ids) or 'no questions'}"
                raise CliError(f"--choose {text!r}: which question?", remedy=remedy, exit_code=Exit.USAGE)
            name, label = ids[0], text
        answers.setdefault(name, []).append(label)
    return answers
