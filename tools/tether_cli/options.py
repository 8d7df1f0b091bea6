"""Options that several commands share, so that they are spelt and explained once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        envvar="TETHER_CLI_DATA",
        show_envvar=True,
        help="Data directory of the set.  [default: ~/.local/share/tether]",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]
AgentsDirOption = Annotated[
    Path | None,
    typer.Option("--agents-dir", metavar="DIR", help="Folder that holds the agents' CLIs, looked at first."),
]
