"""`tether down`: end the set of a data directory, whatever state it is in.

A living set gets SIGTERM and ends itself in order. What a killed one left behind (its children end with it, its
sandboxes do not) is ended here, by identity; nothing that is not recorded as ours is touched.
"""

from __future__ import annotations

import shutil
import signal
from typing import Annotated, Final

import typer

from tether.processes import send_signal
from tether_cli import state
from tether_cli.options import DataOption, JsonOption
from tether_cli.output import CliError, Output
from tether_cli.processes import wait_gone
from tether_cli.state import Paths

DOWN_S: Final = 150.0  # every step of an ordered end within its deadline
_OURS: Final = ("nats", "secrets", "logs", "ready", "agent", "workspaces", "backend")
_FILES: Final = ("state.json", "http-token", "http-tokens.json", "agents.toml")


def register(app: typer.Typer) -> None:
    app.command("down")(down)


def down(
    wipe: Annotated[
        bool, typer.Option("--wipe", help="Delete log, database, secrets and the workspaces that Tether made.")
    ] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """End the set: executions are stopped, their ends told in the log. Again on a set that is down: nothing."""
    from tether_cli.set import end_leftovers, stop_sandboxes_offline

    output = Output(as_json)
    paths = Paths(state.data_dir(data))
    if not paths.root.is_dir():
        output.value({"was_up": False, "wiped": False})
        output.say(f"nothing is up: there is no {paths.root}")
        return
    found = state.read(paths)
    was_up = found is not None and found.is_up
    if found is not None and was_up:
        send_signal(found.supervisor, signal.SIGTERM)
        if not wait_gone(found.supervisor, DOWN_S):
            raise CliError(
                f"the set (pid {found.supervisor.pid}) has not ended within {DOWN_S:g} s", remedy=f"see {paths.logs}"
            )
    with state.locked(paths):
        end_leftovers(paths)
        if not stop_sandboxes_offline(paths):
            raise CliError("not every sandbox could be ended", remedy=f"see {paths.logs / 'agent.log'}")
        if wipe:
            _wipe(paths)
    output.value({"was_up": was_up, "wiped": wipe})
    output.say(("the set is down" if was_up else "no set was up") + (f"; {paths.root} is wiped" if wipe else ""))


def _wipe(paths: Paths) -> None:
    """What `up` makes, by name: the directory may hold other things. The lock stays, it is held."""
    try:
        for name in _OURS:
            if (paths.root / name).is_dir():
                shutil.rmtree(paths.root / name)
        for name in _FILES:
            (paths.root / name).unlink(missing_ok=True)
    except OSError as error:
        raise CliError(f"cannot delete {error.filename}: {error.strerror}") from None
