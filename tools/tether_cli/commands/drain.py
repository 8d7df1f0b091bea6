"""`tether drain`, `tether suspend`, `tether resume`: stop a sandbox without losing work, and wake it again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tether_cli.options import DataOption, JsonOption
from tether_cli.output import Exit, Output

if TYPE_CHECKING:
    from tether_cli.drains import DrainOptions

WorkspaceArgument = Annotated[
    str, typer.Argument(metavar="WORKSPACE", help="As `tether sandbox list` shows it.", show_default=False)
]
GraceOption = Annotated[
    float | None,
    typer.Option(
        "--grace", metavar="SECONDS", help="Until everything is killed.  [default: as the set is configured, 60]"
    ),
]
ReasonOption = Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Kept in the checkpoint.")]
StoreOption = Annotated[
    str | None,
    typer.Option("--store", help="Where the checkpoint goes: volume, blobs or both.  [default: as configured, volume]"),
]
IncludeOption = Annotated[
    str | None,
    typer.Option(
        "--include", help="What is in it: sessions, or the whole workspace.  [default: as configured, sessions]"
    ),
]
DrainIdOption = Annotated[
    str | None,
    typer.Option("--drain-id", metavar="ID", help="Its name: the same again joins it.  [default: a new one]"),
]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is over.")]


def register(app: typer.Typer) -> None:
    app.command("drain")(drain)
    app.command("suspend")(suspend)
    app.command("resume")(resume)


def drain(
    workspace: WorkspaceArgument,
    grace: GraceOption = None,
    reason: ReasonOption = None,
    store: StoreOption = None,
    include: IncludeOption = None,
    drain_id: DrainIdOption = None,
    wait: WaitOption = True,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a sandbox in good order: turns may finish, then its agents leave, and what they need is kept.

    A message (or `tether resume`) wakes it where it was. Ctrl-C stops the waiting, not the drain.
    """
    from tether_cli.drains import DrainOptions

    given = DrainOptions(drain_id, grace, reason, store, include, wait)
    raise typer.Exit(int(_begin("drain", workspace, given, data, as_json)))


def suspend(
    workspace: WorkspaceArgument,
    force: Annotated[bool, typer.Option("--force", help="Also where something runs or waits.")] = False,
    grace: GraceOption = None,
    reason: ReasonOption = None,
    store: StoreOption = None,
    include: IncludeOption = None,
    drain_id: DrainIdOption = None,
    wait: WaitOption = True,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put an idle sandbox to sleep and release what it uses; refused where something runs or waits."""
    from tether_cli.drains import DrainOptions

    given = DrainOptions(drain_id, grace, reason, store, include, wait, force=force)
    raise typer.Exit(int(_begin("suspend", workspace, given, data, as_json)))


def _begin(
    verb: Literal["drain", "suspend"], workspace: str, given: DrainOptions, data: Path | None, as_json: bool
) -> Exit:
    from tether_cli import drains, talk

    return talk.run(drains.begin(verb, talk.token(workspace, "WORKSPACE"), given, data, Output(as_json)))


def resume(
    workspace: WorkspaceArgument,
    wait: WaitOption = True,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Wake a suspended sandbox. A message does so by itself."""
    from tether_cli import drains, talk

    raise typer.Exit(int(talk.run(drains.wake(talk.token(workspace, "WORKSPACE"), wait, data, Output(as_json)))))
