"""The agent service's life: one bus connection, one provider, the commands' driver, the answered requests.

Start: agents file → bus → base topology → provider (adopts what runs) → requests → lifecycle, commands → ready.
End, on SIGTERM or SIGINT: commands are given back, drains are left to the next service → requests end → sandboxes,
only if `agent_stop_sandboxes` says so → the provider lets go (collectors run on) → bus.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import structlog

from tether import topology
from tether.bus import connect_service, wait_for_streams
from tether.ports import Bus
from tether.service import ready
from tether_agent import agents, authority, metrics
from tether_agent.config import AgentSettings
from tether_agent.drive import Driver
from tether_agent.lifecycle import Lifecycle
from tether_agent.operations import Operations
from tether_agent.providers import Provider, choose
from tether_agent.providers.local import COLLECTOR
from tether_agent.requests import Requests

_log = structlog.get_logger("tether_agent")


async def serve(settings: AgentSettings, stop: asyncio.Event, *, command: Sequence[str] = COLLECTOR) -> None:
    """Run until `stop` is set. `command` starts a collector."""
    known = agents.load(settings.agents_file)
    environment = agents.environment(known, os.environ)
    for kind, names in environment.missing.items():
        _log.warning("agent_variables_missing", agent=kind, variables=names)
    allowed = authority.of(settings)
    bus = await connect_service(settings, "tether-agent", stop)
    if bus is None:
        return
    async with bus:
        if not await wait_for_streams(bus, topology.names(topology.base()), stop):
            return
        provider = choose.provider(settings, known, environment, bus, command=command)
        provider.admit_by(allowed)
        metrics.watch(provider.statuses)
        async with provider.running():
            async with working(bus, provider, settings, sorted(known.agents)) as lifecycle:
                ready(settings, provider=provider.name, agents=sorted(known.agents))
                await stop.wait()
            if settings.agent_stop_sandboxes:
                await lifecycle.stopped(await provider.stop_all())


@asynccontextmanager
async def working(
    bus: Bus, provider: Provider, settings: AgentSettings, kinds: Sequence[str] | None = None
) -> AsyncIterator[Lifecycle]:
    """Commands are driven, requests answered, sandboxes carried on while the context is open. The provider runs.
    `kinds`: the agents that there are, told to who asks."""
    lifecycle = Lifecycle(bus, provider, settings)
    operations = Operations(bus, provider, lifecycle, settings)
    driver = Driver(bus, provider, commands_max=settings.agent_commands_max)
    requests = Requests(provider, operations.handlers, lifecycle.stopped, kinds)
    async with requests.serving(bus), asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(lifecycle.run(), name="lifecycle"),
            group.create_task(driver.run(), name="commands"),
        ]
        try:
            yield lifecycle
        finally:
            for task in tasks:
                task.cancel()


async def stop_sandboxes(settings: AgentSettings) -> int:
    """End every sandbox of this state directory, without a bus: what `tether down` does when no agent service is left
    to be asked. Returns how many were ended."""
    provider = choose.provider(settings, agents.AgentsFile(), agents.Environment({}, {}, {}), None)
    async with provider.running(restart=False):
        return len(await provider.stop_all())
