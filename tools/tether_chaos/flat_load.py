"""An hour of load in less time: `python -m tether_chaos --flat-load EVENTS`, and what grew by it.

    a tenth of the events ─▶ measure ─▶ up to half ─▶ measure ─▶ the rest ─▶ measure

Conversations run one execution after another without a pause: a tool with output, a stream of deltas, a text; a reader
over HTTP follows each all the while, and everything is read back. An hour of `make bench`'s soak (six conversations
that say something every 20 ms) is HOUR_EVENTS. Measured is what `--flatness` measures, each time at rest. Some things
are filled once (the collector's 1,024 ended executions, the blocks that nats-server writes into): the first half shows
them, the second must be flat. It writes `reports/flat-load.json`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from tether import Client
from tether.client.items import ExecutionItem
from tether.events import EXECUTION_ENDED
from tether_chaos.chaos_set import ChaosSet
from tether_chaos.flatness import FlatSet, Measured, compare, measure_now, running_set, settled
from tether_cli.output import CliError

HOUR_EVENTS: Final = 700_000
CONVERSATIONS: Final = 6
WARM_UP_SHARE: Final = 0.1
DELTAS: Final = 300  # of one execution
SCRIPT: Final = f"!tool Bash 0 2000\n!deltas {DELTAS}\n!say done"
ASK_S: Final = 120.0
# Growth from the middle to the end that is none: room between objects that an allocator keeps, one more block of
# nats-server's. It must stay below what the first half may fill.
TOLERANCE: Final[Mapping[str, float]] = {"fds": 8, "threads": 4, "tasks": 6, "rss_mib": 24}


@dataclass(slots=True)
class FlatLoad:
    """`measured`: at rest after the warm-up, in the middle, at the end. `events`: that readers were given by then."""

    measured: list[Measured] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    executions: int = 0
    seconds: float = 0.0
    growth: list[str] = field(default_factory=list)


class _Load:
    """Conversations and their readers, up to a number of events."""

    def __init__(self, asking: Client, reading: Client) -> None:
        self.events = 0
        self.executions = 0
        self._asking = asking
        self._reading = reading
        self._changed = asyncio.Condition()
        self._given: dict[str, int] = {}  # execution → the last ordinal that its reader was given
        self._ended: set[str] = set()  # read to the end, and not asked for yet

    async def read(self, conversation: str) -> None:
        """Until cancelled."""
        async for item in self._reading.follow(conversation):
            if isinstance(item, ExecutionItem):
                before = self._given.get(item.execution, 0)
                if item.event.ordinal != before + 1:
                    raise CliError(f"{item.execution}: event {item.event.ordinal} came after {before}")
                self._given[item.execution] = item.event.end
                self.events += item.event.end - before
                if item.type == EXECUTION_ENDED:
                    del self._given[item.execution]
                    async with self._changed:
                        self._ended.add(item.execution)
                        self._changed.notify_all()

    async def talk(self, conversation: str, until_events: int) -> None:
        while self.events < until_events:
            async with asyncio.timeout(ASK_S):
                response = await self._asking.ask(conversation, SCRIPT, agent="scripted", workspace="flat")
            if response.outcome != "completed":
                raise CliError(f"{response.execution} ended {response.outcome}")
            self.executions += 1
            async with asyncio.timeout(ASK_S), self._changed:
                await self._changed.wait_for(partial(self._ended.__contains__, response.execution))
            self._ended.discard(response.execution)


async def run(services: FlatSet, events: int) -> FlatLoad:
    """On a set that is up."""
    found = FlatLoad()
    began_s = time.monotonic()
    asking, reading = clients(services)
    async with asking, reading:
        load = _Load(asking, reading)
        names = [f"load-{number}" for number in range(CONVERSATIONS)]
        async with asyncio.TaskGroup() as group:
            for share in (WARM_UP_SHARE, 0.5, 1.0):
                async with asyncio.TaskGroup() as talks:
                    for name in names:
                        talks.create_task(load.talk(name, round(share * events)), name=f"talk-{name}")
                    if share == WARM_UP_SHARE:
                        readers = [group.create_task(load.read(name), name=f"reader-{name}") for name in names]
                last = found.measured[-1] if found.measured else None
                found.measured.append(await settled(services, last))
                found.events.append(load.events)
            for reader in readers:
                reader.cancel()
        found.executions = load.executions
    found.seconds = time.monotonic() - began_s
    found.growth = compare(found.measured[1], found.measured[2], TOLERANCE)
    return found


def clients(services: ChaosSet) -> tuple[Client, Client]:
    """One to ask with, one to read with: over HTTP, as browsers do."""
    up = services.state
    return Client.http(up.http_url, up.token), Client.http(up.http_url, up.token)


def table(found: FlatLoad) -> str:
    marks = ("warm", "half", "end")
    lines = [f"{'':24}" + "".join(f"{mark:>10}" for mark in marks), f"{'events':24}" + _row(found.events)]
    for name in found.measured[0].counts:
        lines.append(f"{name:24}" + _row([one.counts[name] for one in found.measured]))
    for tier, figures in found.measured[0].processes.items():
        for name in figures:
            lines.append(f"{f'{tier} {name}':24}" + _row([one.processes[tier][name] for one in found.measured]))
    return "\n".join(lines)


def _row(values: list[Any]) -> str:
    return "".join(f"{value:>10g}" if isinstance(value, float) else f"{value:>10}" for value in values)


async def measure(events: int) -> FlatLoad:
    """A set of its own, so many events, and what grew."""
    async with running_set() as services:
        await measure_now(services)  # fails early where something cannot be measured
        return await run(services, events)


def command(events: int) -> int:
    found = asyncio.run(measure(events))
    print(f"flat load: {found.events[-1]} events in {found.executions} executions, {found.seconds:.0f} s")
    print(table(found))
    for line in found.growth:
        print(f"  ! {line}")
    Path("reports").mkdir(exist_ok=True)
    value = {
        "verdict": "fail" if found.growth else "pass",
        "figures": {
            "events": found.events[-1],
            "hours": round(found.events[-1] / HOUR_EVENTS, 3),
            "executions": found.executions,
            "seconds": round(found.seconds, 1),
            **{
                mark: {"events": count, **one.counts, "processes": one.processes}
                for mark, count, one in zip(("warm", "half", "end"), found.events, found.measured, strict=True)
            },
        },
    }
    Path("reports/flat-load.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    print("flat load: flat" if not found.growth else "flat load: FAILED")
    return 1 if found.growth else 0
