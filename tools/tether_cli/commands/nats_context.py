"""`tether nats-context`: a context for the `nats` CLI, so that `nats --context tether …` sees the set's bus."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from tether import subjects
from tether.service import write_whole
from tether_cli import state
from tether_cli.options import DataOption, JsonOption
from tether_cli.output import CliError, Exit, Output


def register(app: typer.Typer) -> None:
    app.command("nats-context")(nats_context)


def nats_context(
    name: Annotated[str, typer.Option(help="Name of the context.")] = "tether",
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a context for the `nats` CLI, which names the credentials of people, and show what to do with it."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise CliError("--name must be 1 to 64 of the characters A-Z a-z 0-9 _ -", exit_code=Exit.USAGE)
    output = Output(as_json)
    up = state.require(data)
    base = os.environ.get("XDG_CONFIG_HOME", "")
    folder = (Path(base) if base.startswith("/") else Path.home() / ".config") / "nats" / "context"
    path = folder / f"{name}.json"
    value = {
        "description": f"Tether set in {up.data}",
        "url": up.nats_url,
        "creds": up.nats_creds_file,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(path, json.dumps(value, indent=2).encode())
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from None
    output.value({"context": name, "file": str(path), "url": up.nats_url, "creds_file": up.nats_creds_file})
    output.say(f"context {name} is in {path}")
    log = subjects.events_stream(up.tenant)
    for command in (
        "stream report",
        f"stream view {log} --subject 'tether.event.{up.tenant}.>'",
        f"sub 'tether.live.{up.tenant}.>' --headers-only",
        f"consumer report {log}",
        f"kv watch {subjects.SANDBOXES}",
        "micro ls",
    ):
        output.say(f"  nats --context {name} {command}")
