"""`tether show`: a conversation's history, or one execution's state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tether_cli.options import DataOption, JsonOption
from tether_cli.output import Output

if TYPE_CHECKING:
    from tether.api import ConversationHistory
    from tether.client import Client
    from tether.fold import ExecutionState


def register(app: typer.Typer) -> None:
    app.command("show")(show)


def show(
    name: Annotated[str, typer.Argument(metavar="CONVERSATION|EXECUTION")],
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a conversation's newest messages and responses, or one execution."""
    from tether_cli import talk

    talk.run(_show(talk.token(name, "CONVERSATION|EXECUTION"), data, Output(as_json)))


async def _show(name: str, data: Path | None, output: Output) -> None:
    from tether.errors import Code, ProblemError
    from tether_cli import state, talk

    async with talk.http_client(state.require(data)) as client:
        try:
            history = await client.conversation(name)
        except ProblemError as error:
            if error.problem.code is not Code.NOT_FOUND:
                raise
            await _show_execution(client, name, output)
            return
        output.value(history.model_dump(mode="json"))
        if not output.as_json:
            _tell_history(history)


async def _show_execution(client: Client, name: str, output: Output) -> None:
    from tether_cli import talk
    from tether_cli.render import Renderer
    from tether_cli.terminal import Screen

    view = await talk.execution(client, name, "neither a conversation nor an execution")
    answer = await client.snapshot(name)
    output.value({"execution": view.model_dump(mode="json"), "snapshot": answer.model_dump(mode="json")})
    if output.as_json:
        return
    folded = await client.state(name)
    screen = Screen()
    screen.line(f"{view.execution}  {view.state}{f' ({view.outcome})' if view.outcome else ''}  {view.agent or ''}")
    screen.line(f"conversation {view.conversation}  workspace {view.workspace}")
    screen.write(Renderer().state(name, folded))
    _tell_end(screen.line, folded)


def _tell_history(history: ConversationHistory) -> None:
    from tether.client.views import states_of
    from tether_cli.render import Renderer, one_line
    from tether_cli.terminal import Screen

    screen, renderer, states = Screen(), Renderer(), states_of(history)
    screen.line(f"conversation {history.conversation}  workspace {history.workspace}")
    rows = [(message.place, 0, message) for message in history.messages]
    for _, _, message in sorted(rows, key=lambda row: row[:2]):
        text = " ".join(str(part.get("text", "")) for part in message.content)
        screen.line(f"> {one_line(text, 400)}")
        for response in (one for one in history.responses if one.request == message.request):
            state = states.get(response.execution)
            if state is not None:
                screen.write(renderer.state(response.execution, state))
            screen.line(f"── {response.outcome or 'under way'}  execution {response.execution}")
            if response.error:
                detail = f"{response.error.get('code', '')} {response.error.get('detail', '')}"
                screen.line(f"   {one_line(detail, 400)}")
    for failure in history.failures:
        screen.line(f"── failed: {failure.code} {one_line(failure.detail, 400)}  request {failure.request}")
    if history.before is not None:
        screen.line("   (older messages are not shown)")


def _tell_end(line: object, folded: ExecutionState) -> None:
    from tether_cli.render import money, one_line

    assert callable(line)
    usage = folded.usage
    line(f"── {folded.response_outcome or folded.outcome or folded.phase}, {money(usage.cost_usd)}, "
         f"{usage.input_tokens} tokens in, {usage.output_tokens} out")  # fmt: skip
    if folded.error:
        line(f"   {one_line(str(folded.error.get('code', '')))} {one_line(str(folded.error.get('detail', '')), 400)}")
    if folded.proof:
        line(f"   nothing of its process is left: {folded.proof.get('method')}")
    if folded.partial:
        line("   a part of it is missing")
