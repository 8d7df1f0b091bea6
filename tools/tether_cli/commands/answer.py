"""`tether answer`: answer an approval or a question from anywhere."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tether_cli.options import DataOption, JsonOption
from tether_cli.output import CliError, Exit, Output

if TYPE_CHECKING:
    from tether.client import Client, Interaction


def register(app: typer.Typer) -> None:
    app.command("answer")(answer)


def answer(
    conversation: Annotated[str, typer.Argument(metavar="CONVERSATION")],
    interaction: Annotated[
        str, typer.Argument(metavar="INTERACTION", help="As `tether show` names it; `-`: the one that waits.")
    ],
    decision: Annotated[str | None, typer.Argument(metavar="[allow|deny]")] = None,
    text: Annotated[str | None, typer.Option(help="With deny: the reason, told to the agent.")] = None,
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

    if decision not in (None, "allow", "deny"):
        raise CliError("the decision must be allow or deny", exit_code=Exit.USAGE)
    if decision is None and not choose:
        raise CliError("nothing to answer: give allow, deny or --choose", exit_code=Exit.USAGE)
    if decision == "deny" and choose:
        raise CliError("--choose answers a question; deny refuses it", exit_code=Exit.USAGE)
    if changed is not None and decision != "allow":
        raise CliError("--input changes what is allowed: give allow with it", exit_code=Exit.USAGE)
    name = talk.token(conversation, "CONVERSATION")
    given = _Given(decision, text, choose or [], _object(changed))
    code = talk.run(_answer(name, interaction, given, data, Output(as_json)))
    raise typer.Exit(int(code))


@dataclass(frozen=True, slots=True)
class _Given:
    """As it was typed."""

    decision: str | None
    text: str | None
    choose: list[str]
    input: dict[str, Any] | None


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


async def _answer(conversation: str, interaction: str, typed: _Given, data: Path | None, output: Output) -> Exit:
    from tether.client import Answer
    from tether_cli import state, talk

    async with talk.http_client(state.require(data)) as client:
        found: Interaction | None = None
        if interaction == "-" or typed.choose:
            found = await _find(client, conversation, interaction)
            interaction = found.id
        if typed.choose and found is not None:
            given = Answer("allow", text=typed.text, answers=_answers(found, typed.choose))
        else:
            given = Answer("deny" if typed.decision == "deny" else "allow", text=typed.text, input=typed.input)
        execution = None if found is None else found.execution
        receipt = await client.answer(conversation, interaction, given, execution=execution)
        receipt = await talk.known(client, receipt)
    output.value(receipt.model_dump(mode="json", exclude_none=True))
    if receipt.status == "unknown":
        return talk.tell_unknown(output, receipt, "the answer was taken")
    output.say(f"{given.decision}: {receipt.status}")
    return Exit.OK


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
