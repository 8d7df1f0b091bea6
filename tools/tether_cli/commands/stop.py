"""`tether stop` and `tether interrupt`: end an execution's process, or its turn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tether_cli.options import DataOption, JsonOption
from tether_cli.output import Exit, Output

NameArgument = Annotated[str, typer.Argument(metavar="EXECUTION|CONVERSATION")]


def register(app: typer.Typer) -> None:
    app.command("stop")(stop)
    app.command("interrupt")(interrupt)


def stop(name: NameArgument, data: DataOption = None, as_json: JsonOption = False) -> None:
    """End the process of an execution (or of the one that runs in a conversation), with proof."""
    _run(name, "stop", data, as_json)


def interrupt(name: NameArgument, data: DataOption = None, as_json: JsonOption = False) -> None:
    """End the turn that runs; the agent keeps its session."""
    _run(name, "interrupt", data, as_json)


def _run(name: str, verb: Literal["stop", "interrupt"], data: Path | None, as_json: bool) -> None:
    from tether_cli import talk

    code = talk.run(_control(talk.token(name, "EXECUTION|CONVERSATION"), verb, data, Output(as_json)))
    raise typer.Exit(int(code))


async def _control(name: str, verb: Literal["stop", "interrupt"], data: Path | None, output: Output) -> Exit:
    from tether_cli import state, talk

    async with talk.http_client(state.require(data)) as client:
        view = await talk.active_execution(client, name)
        receipt = await (client.stop(view.execution) if verb == "stop" else client.interrupt(view.execution))
        receipt = await talk.known(client, receipt)
    output.value(receipt.model_dump(mode="json", exclude_none=True))
    if receipt.status == "unknown":
        return talk.tell_unknown(output, receipt, f"the {verb} took effect")
    if receipt.status == "delivered" and verb == "interrupt":
        output.say(f"{view.execution}: delivered; the agent has not answered yet (`tether stop` ends its process)")
        return Exit.OK
    told = {"stop": "stopped", "interrupt": "interrupted"}[verb] if receipt.status == "settled" else receipt.status
    output.say(f"{view.execution}: {told}")
    return Exit.OK
