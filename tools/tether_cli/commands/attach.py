"""`tether attach`: follow a conversation from a cursor, or with a durable reader of one's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tether_cli.options import DataOption, JsonOption
from tether_cli.output import CliError, Exit, Output


def register(app: typer.Typer) -> None:
    app.command("attach")(attach)


def attach(
    conversation: Annotated[str, typer.Argument(metavar="CONVERSATION")],
    cursor: Annotated[str | None, typer.Option(help="Go on behind this cursor.  [default: from the beginning]")] = None,
    durable: Annotated[
        str | None, typer.Option(metavar="NAME", help="A named reader: the server keeps its position.")
    ] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Stay for later responses, until Ctrl-C.")] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Follow a conversation to the end of the response that runs. Approvals are asked on a terminal. Ctrl-C leaves."""
    from tether_cli import talk

    name = talk.token(conversation, "CONVERSATION")
    if durable is not None:
        talk.token(durable, "--durable")
    raise typer.Exit(int(talk.run(_attach(name, cursor, durable, stay, data, Output(as_json)))))


async def _attach(
    conversation: str, cursor: str | None, durable: str | None, stay: bool, data: Path | None, output: Output
) -> Exit:
    from tether.client.tracking import ResponseTracker
    from tether_cli import resuming, state, talk
    from tether_cli.commands.run import attach_line
    from tether_cli.live import Live, exit_code
    from tether_cli.terminal import Keyboard, Screen

    up = state.require(data)
    terminal = sys.stdin.isatty() and sys.stderr.isatty() and not output.as_json
    tracker = ResponseTracker()
    async with talk.nats_client(up) if durable is not None else talk.http_client(up) as client:
        known = {view.conversation for view in (await client.conversations(limit=200)).conversations}
        if conversation not in known and not stay:
            await _exists(client, conversation)
        while True:
            live = Live(
                client,
                Screen(),
                output,
                conversation,
                tracker,
                "ask" if terminal else "leave",
                interrupts=False,
                cursor=cursor,
                durable=durable,
                stay=stay,
                keyboard=Keyboard() if terminal else None,
            )
            live.know()
            await live.follow()
            submission = None if live.detached else await resuming.offer(live, output, state.data_option(up.data))
            if submission is None:
                break
            tracker = ResponseTracker(submission.request_id, submission.response_id, submission.execution)
            cursor = submission.cursor
    if live.detached:
        output.note(f"left; to come back: {attach_line(up, conversation, None if durable else live.cursor)}"
                    + (f" --durable {durable}" if durable else ""))  # fmt: skip
        return Exit.OK if stay else Exit.INTERRUPTED
    return exit_code(live)


async def _exists(client: object, conversation: str) -> None:
    """Raises CliError where nothing of this name is known: a misspelt name would be followed for ever."""
    from tether.client import Client
    from tether.errors import Code, ProblemError

    assert isinstance(client, Client)
    try:
        await client.conversation(conversation, limit=1)
    except ProblemError as error:
        if error.problem.code is not Code.NOT_FOUND:
            raise
        raise CliError(
            f"there is no conversation {conversation}",
            remedy="`tether ps --conversations` lists them; --stay waits for its first message",
            exit_code=Exit.USAGE,
            code=Code.NOT_FOUND,
        ) from None
