"""`tether drain`, `tether suspend`, `tether resume`: stop a sandbox without losing work, and wake it again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

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


def _given(
    grace: GraceOption = None,
    reason: ReasonOption = None,
    store: StoreOption = None,
    include: IncludeOption = None,
    drain_id: DrainIdOption = None,
    wait: WaitOption = True,
) -> DrainOptions:
    """What drain and suspend are both given."""
    from tether_cli.drains import DrainOptions

    return DrainOptions(drain_id, grace, reason, store, include, wait)


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """By name, with types in place of their names."""
    types = get_type_hints(function, localns={"DrainOptions": Any}, include_extras=True)
    return {
        name: one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=types[name])
        for name, one in inspect.signature(function).parameters.items()
    }


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `_given` in place of its parameter `given`."""
    shared = _parameters(_given)

    @functools.wraps(command)
    def taking(**values: Any) -> None:
        given = _given(**{name: values.pop(name) for name in shared})
        command(given=given, **values)

    parameters: list[inspect.Parameter] = []
    for name, parameter in _parameters(command).items():
        parameters += shared.values() if name == "given" else (parameter,)
    # Typer reads both.
    taking.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    taking.__annotations__ = {one.name: one.annotation for one in parameters}
    return taking


@_with_options
def drain(
    workspace: WorkspaceArgument,
    given: DrainOptions,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a sandbox in good order: turns may finish, then its agents leave, and what they need is kept.

    A message (or `tether resume`) wakes it where it was. Ctrl-C stops the waiting, not the drain.
    """
    raise typer.Exit(int(_begin("drain", workspace, given, data, as_json)))


@_with_options
def suspend(
    workspace: WorkspaceArgument,
    given: DrainOptions,
    force: Annotated[bool, typer.Option("--force", help="Also where something runs or waits.")] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put an idle sandbox to sleep and release what it uses; refused where something runs or waits."""
    raise typer.Exit(int(_begin("suspend", workspace, replace(given, force=force), data, as_json)))


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
