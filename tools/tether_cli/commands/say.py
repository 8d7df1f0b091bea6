"""`tether say`: a message into the response that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tether_cli.options import DataOption, JsonOption
from tether_cli.output import CliError, Exit, Output


def register(app: typer.Typer) -> None:
    app.command("say")(say)


def say(
    conversation: Annotated[str, typer.Argument(metavar="CONVERSATION")],
    text: Annotated[str, typer.Argument(metavar="TEXT")],
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say something to the agent while it works. `tether run --conversation` starts a new response instead."""
    from tether_cli import talk

    if not text.strip():
        raise CliError("the message is empty", exit_code=Exit.USAGE)
    talk.run(_say(talk.token(conversation, "CONVERSATION"), text, data, Output(as_json)))


async def _say(conversation: str, text: str, data: Path | None, output: Output) -> None:
    from tether_cli import state, talk

    async with talk.http_client(state.require(data)) as client:
        told = await client.say(conversation, text)
    output.value(
        {
            "request_id": told.request_id,
            "status": told.status,
            "response_id": told.response_id,
            "execution": told.execution,
            "cursor": told.cursor,
        }
    )
    output.say("said" if told.status == "interjected" else f"{told.status}: request {told.request_id}")
