"""`tether answer`: answer an approval or a question from anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tether_cli.options import DataOption, JsonOption
from tether_cli.output import CliError, Exit, Output

if TYPE_CHECKING:
    from tether.api import InteractionView
    from tether.client import Client


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
    name = talk.token(conversation, "CONVERSATION")
    talk.run(_answer(name, interaction, decision, text, choose or [], data, Output(as_json)))


async def _answer(
    conversation: str,
    interaction: str,
    decision: str | None,
    text: str | None,
    choose: list[str],
    data: Path | None,
    output: Output,
) -> None:
    from tether.client import Answer
    from tether_cli import state, talk

    async with talk.http_client(state.require(data)) as client:
        view: InteractionView | None = None
        if interaction == "-" or choose:
            view = await _find(client, conversation, interaction)
            interaction = view.interaction
        if choose and view is not None:
            given = Answer("allow", text=text, answers=_answers(view, choose))
        else:
            given = Answer("deny" if decision == "deny" else "allow", text=text)
        receipt = await client.answer(
            conversation, interaction, given, execution=None if view is None else view.execution
        )
    output.value(receipt.model_dump(mode="json", exclude_none=True))
    if receipt.status == "unknown":
        output.say("no reply yet: whether it was taken is unknown; `tether show` tells")
    else:
        output.say(f"{given.decision}: {receipt.status}")


async def _find(client: Client, conversation: str, interaction: str) -> InteractionView:
    """The interaction of this id, or the only one that waits."""
    views = (await client.conversation(conversation)).interactions
    waiting = [view for view in views if view.state == "pending"]
    found = waiting if interaction == "-" else [view for view in views if view.interaction == interaction]
    if len(found) == 1:
        return found[0]
    if not found:
        what = "nothing waits" if interaction == "-" else f"there is no interaction {interaction}"
        raise CliError(f"{what} in {conversation}", remedy="`tether show` lists them", exit_code=Exit.USAGE)
    names = ", ".join(view.interaction for view in found)
    raise CliError(f"several wait: {names}", remedy="name one", exit_code=Exit.USAGE)


def _answers(view: InteractionView, choose: list[str]) -> dict[str, list[str]]:
    """`QUESTION=LABEL`, or `LABEL` alone where there is one question."""
    ids = [str(question["id"]) for question in view.questions]
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
