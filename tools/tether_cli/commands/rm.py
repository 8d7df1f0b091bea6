"""`tether rm`: delete a conversation for good, wherever it is stored."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tether_cli.options import DataOption, JsonOption
from tether_cli.output import CliError, Exit, Output

if TYPE_CHECKING:
    from tether.deletion import DeletionView


def register(app: typer.Typer) -> None:
    app.command("rm")(rm)


def rm(
    conversation: Annotated[str, typer.Argument(metavar="CONVERSATION", help="As `tether ps --all` lists it.")],
    yes: Annotated[bool, typer.Option("--yes", help="Delete without being asked.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Stop what runs first; without it that is refused.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the end; it goes on either way.")] = True,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a conversation for good: log, blobs, checkpoints, rows, records, recovery material, agents' sessions.

    The files of its workspace are yours and stay. `tether export` keeps a copy: nothing brings it back.
    """
    from tether_cli import talk

    name = talk.token(conversation, "CONVERSATION")
    if not yes:
        _consent(name)
    raise typer.Exit(int(talk.run(_rm(name, force, wait, data, Output(as_json)))))


def _consent(conversation: str) -> None:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        why = "deleting needs your consent, and there is no terminal to ask"
        raise CliError(why, remedy=f"say --yes; `tether export {conversation}` keeps a copy", exit_code=Exit.USAGE)
    sys.stderr.write(f"`tether export {conversation}` keeps a copy; nothing brings it back.\n")
    sys.stderr.write(f"delete the conversation {conversation}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CliError("nothing was deleted", exit_code=Exit.DENIED)


async def _rm(conversation: str, force: bool, wait: bool, data: Path | None, output: Output) -> Exit:
    from tether.errors import Code, ProblemError
    from tether_cli import state, talk

    async with talk.http_client(state.require(data)) as client:
        try:
            view = await client.delete_conversation(conversation, force=force)
        except ProblemError as error:
            if error.problem.code is not Code.SESSION_BUSY:
                raise
            refused = talk.as_cli_error(error)
            refused.remedy = "wait for the response, or say --force: it is stopped first"
            raise refused from None
        if wait and not view.is_final:
            try:
                view = await client.deleted(view, on_progress=lambda seen: _progress(seen, output))
            except ProblemError as error:
                if "pending_on" not in error.problem.context:
                    raise
                view = await client.deletion(conversation)
    output.value(view.model_dump(mode="json", exclude_none=True))
    for line in lines_of(view):
        output.say(line)
    return Exit.FAILED if view.state == "failed" else Exit.OK


def _progress(view: DeletionView, output: Output) -> None:
    if view.pending_on and not output.as_json:
        sys.stderr.write(f"waits for {'; '.join(view.pending_on)}\n")


def lines_of(view: DeletionView) -> list[str]:
    """A deletion for people."""
    from tether_cli.render import one_line

    name = view.conversation
    if view.state == "failed":
        why = "" if view.problem is None else f": {one_line(view.problem.detail, 300)}"
        return [f"{name} was not deleted{why}"]
    erased = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in view.erased.items() if count)
    head = (
        f"{name} is deleted" if view.is_final else f"{name} is being deleted (step {view.step}); it goes on by itself"
    )
    return [
        head,
        *([f"  erased      {erased}"] if erased else []),
        *(f"  waits for   {one}" for one in view.pending_on),
    ]
