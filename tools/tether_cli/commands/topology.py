"""`tether topology show|diff|ensure`: streams, buckets and durable consumers as they should be, and as they are."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from dataclasses import asdict

import typer

from tether import topology
from tether.bus import NatsBus, connect
from tether.errors import BusError
from tether.topology import Topology
from tether_cli import state
from tether_cli.options import DataOption, JsonOption
from tether_cli.output import CliError, Exit, Output
from tether_cli.state import SetState


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Streams, buckets and consumers: show, diff, ensure.", no_args_is_help=True)
    group.command("show")(show)
    group.command("diff")(diff)
    group.command("ensure")(ensure)
    app.add_typer(group, name="topology")


def wanted(up: SetState | None) -> Topology:
    """What this set has: its tenant, with the retention that it started with. Without one: what a set that starts from
    this shell would have. Raises CliError for variables that are wrong."""
    from tether_cli.set import retention

    if up is not None:
        own = topology.tenant(up.tenant, max_bytes=up.events_max_bytes, max_age_s=up.events_max_age_s)
    else:
        asked = retention(os.environ)
        own = topology.tenant("default", max_bytes=asked.max_bytes, max_age_s=asked.max_age_s)
    base = topology.base()
    return Topology(streams=(*base.streams, *own.streams), consumers=(*base.consumers, *own.consumers))


def show(data: DataOption = None, as_json: JsonOption = False) -> None:
    """Print the topology as it should be (needs no set)."""
    output = Output(as_json)
    up = state.running(data)
    found = wanted(up)
    output.value(
        {
            "version": found.version,
            "streams": [asdict(stream) for stream in found.streams],
            "consumers": [asdict(consumer) for consumer in found.consumers],
        }
    )
    output.say(f"topology version {found.version}")
    output.table(
        ("STREAM", "SUBJECTS", "WHAT IT IS"),
        ((stream.name, " ".join(stream.subjects), stream.description) for stream in found.streams),
    )
    output.say()
    output.table(
        ("CONSUMER", "STREAM", "WHAT IT IS"),
        ((each.durable, each.stream, each.description) for each in found.consumers),
    )


def diff(data: DataOption = None, as_json: JsonOption = False) -> None:
    """Name what differs on the running set. Exit code 1 where something does."""
    output = Output(as_json)
    differences = asyncio.run(differing(state.require(data)))
    output.value({"differences": differences})
    for line in differences or ["the live topology is as it should be"]:
        output.say(line)
    if differences:
        raise typer.Exit(int(Exit.FAILED))


def ensure(data: DataOption = None, as_json: JsonOption = False) -> None:
    """Create what is missing on the running set and upgrade what is older; nothing goes downward."""
    output = Output(as_json)
    up = state.require(data)
    asyncio.run(_ensure(up))
    output.value({"ensured": True})
    output.say("the live topology is as it should be, or newer")


async def differing(up: SetState) -> list[str]:
    """One sentence each. Raises CliError."""
    try:
        async with await _connect(up) as bus:
            return list(await bus.diff(wanted(up)))
    except BusError as error:
        raise _unreachable(error) from None


async def _ensure(up: SetState) -> None:
    try:
        async with await _connect(up) as bus:
            await bus.ensure(wanted(up))
    except BusError as error:
        raise _unreachable(error) from None


def _connect(up: SetState) -> Awaitable[NatsBus]:
    return connect(up.nats_url, name="tether-cli", creds_file=up.nats_creds_file, connect_timeout_s=5.0)


def _unreachable(error: BusError) -> CliError:
    return CliError(f"the bus cannot be used: {error}", remedy="see `tether doctor`", exit_code=Exit.UNREACHABLE)
