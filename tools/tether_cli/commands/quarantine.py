"""`tether quarantine`: what of the log was refused, and why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tether_cli.options import DataOption, JsonOption
from tether_cli.output import CliError, Exit, Output


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Messages of the log that were not believed, with the reason.", no_args_is_help=True)
    group.command("list")(list_)
    group.command("show")(show)
    app.add_typer(group, name="quarantine")


def list_(
    workspace: Annotated[str | None, typer.Option(help="Only of this workspace.")] = None,
    conversation: Annotated[str | None, typer.Option(help="Only of this conversation.")] = None,
    before: Annotated[int | None, typer.Option(min=1, help="Only entries older than this one.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="At most so many, newest first.")] = 50,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """List refused messages, newest first."""
    from tether_cli import talk

    given = {"workspace": workspace, "conversation": conversation, "before": before, "limit": limit}
    talk.run(_list({name: value for name, value in given.items() if value is not None}, data, Output(as_json)))


def show(
    entry: Annotated[int, typer.Argument(min=1, help="Its id, as the list shows it.")],
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one: its place in the log, the reason, and the first bytes of what was written."""
    from tether_cli import talk

    talk.run(_show(entry, data, Output(as_json)))


async def _list(params: dict[str, Any], data: Path | None, output: Output) -> None:
    from tether_cli.render import duration

    found = await _asked(data, "/v1/quarantine", params)
    output.value(found)
    now_s = time.time()
    output.table(
        ("ENTRY", "REASON", "WORKSPACE", "CONVERSATION", "EXECUTION", "MESSAGES", "BYTES", "AGE", "DETAIL"),
        (
            (
                one["id"],
                one["reason"],
                one["workspace"],
                one["conversation"],
                one["execution"],
                one["count"],
                one["bytes"],
                duration(max(0.0, now_s - one["stored_at"] / 1000)),
                one["detail"],
            )
            for one in found["entries"]
        ),
    )
    if found.get("next_page"):
        output.note(f"there are older ones; --before {found['next_page']} shows them")


async def _show(entry: int, data: Path | None, output: Output) -> None:
    from tether.quarantine import NumberedEntry

    found = await _asked(data, f"/v1/quarantine/{entry}", {})
    output.value(found)
    one = NumberedEntry.model_validate(found)
    rows = [
        ("reason", f"{one.reason.value}: {one.detail}" if one.detail else one.reason.value),
        ("subject", one.subject),
        ("log", f"{one.stream} {one.sequence}" + (f" to {one.last_sequence}" if one.count > 1 else "")),
        ("messages", one.count),
        ("size", f"{one.bytes} bytes, sha-256 {one.digest}"),
        ("begins", repr(one.text)[1:-1]),  # what a sandbox wrote never moves a terminal
    ]
    output.table(("FIELD", "VALUE"), rows)


async def _asked(data: Path | None, path: str, params: dict[str, Any]) -> dict[str, Any]:
    import httpx2

    from tether.errors import Problem, ProblemError
    from tether_cli import state, talk

    running = state.require(data)
    headers = {"Authorization": f"Bearer {running.token}"}
    try:
        async with httpx2.AsyncClient(base_url=running.http_url, headers=headers, timeout=30.0) as client:
            answer = await client.get(path, params=params)
    except httpx2.HTTPError as error:
        raise CliError(f"the set cannot be reached: {type(error).__name__}", exit_code=Exit.UNREACHABLE) from None
    if answer.is_error:
        raise talk.as_cli_error(ProblemError(Problem.model_validate_json(answer.content)))
    found: dict[str, Any] = answer.json()
    return found
