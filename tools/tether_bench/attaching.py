"""attach_ms_p50_*: a reader that knows nothing attaches to a running execution."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import aclosing
from typing import Final

from tether.bus import NatsBus
from tether.client.follow import Follower, Where
from tether.client.items import CaughtUp, ExecutionItem
from tether.cursor import Cursor
from tether.snapshot import Snapshot
from tether.subjects import EventAddress
from tether_bench.logfill import MadeExecution, introduce, made_execution, publish
from tether_bench.rig import Http, Rig, projected
from tether_bench.stats import Figure, Target, median
from tether_bench.tap import BenchError

SIZES: Final = (100, 10_000, 200_000)
FLAT: Final = 2.0
_ATTACH_S: Final = 60.0
_FILL_S: Final = 300.0  # until the largest execution is projected
_BUDGET_S: Final = 6.0  # of a short run's rounds


def name_of(size: int) -> str:
    return f"attach_ms_p50_{size}"


def attaches(rig: Rig, wanted: Iterable[str]) -> list[Figure]:
    sizes = [size for size in SIZES if name_of(size) in wanted]
    rounds, samples = (3, 3) if rig.short else (5, 5)
    made = [made_execution(rig.state.tenant, rig.name("attach"), size) for size in sizes]
    rig.on_bus(lambda bus: _fill(bus, rig.log, made), timeout_s=_FILL_S)
    values: dict[int, list[float]] = {size: [] for size in sizes}
    replays: dict[int, list[float]] = {size: [] for size in sizes}
    with rig.http() as client:

        async def work(bus: NatsBus) -> None:
            for number in rig.rounds(rounds, _BUDGET_S):
                for size, one in zip(sizes, made, strict=True):
                    values[size].append(median([await _attach(bus, client, one) for _ in range(samples)]))
                    if number < 3:
                        replays[size].append(await _replay(bus, one))

        rig.on_bus(work, timeout_s=2 * _ATTACH_S)
    smallest = min(sizes)
    figures = []
    for size in sizes:
        target = None
        if size != smallest:
            base = median(values[smallest])
            target = Target("at most", FLAT * base, f"{FLAT:g}× of {smallest:,}")
        baselines = {"replay": tuple(replays[size])}
        note = f"snapshot and suffix of {size:,} events"
        figures.append(Figure(name_of(size), "ms", tuple(values[size]), baselines, target, note=note))
    return figures


async def _fill(bus: NatsBus, log: str, made: list[MadeExecution]) -> None:
    sequence = 0
    for one in made:
        await introduce(bus, one)
        sequence = (await publish(bus, one)).sequence
    await projected(bus, log, sequence)


async def _attach(bus: NatsBus, client: Http, made: MadeExecution) -> float:
    """ms until caught up, with the snapshot. The follower subscribes and reads the suffix by itself."""
    begun_s = time.perf_counter()
    where = Where(made.address.tenant, made.address.workspace, made.address.conversation)
    history = client.ask("GET", f"/v1/conversations/{where.conversation}")
    cursor = Cursor.decode(str(history["cursor"]), where.tenant, where.conversation)
    applied = history["executions"][0]["applied"]
    if applied != made.events:
        raise BenchError(f"the snapshot has {applied} of {made.events} events")
    if await _caught_up(bus, where, cursor):
        raise BenchError("events came that the snapshot has")
    return 1000 * (time.perf_counter() - begun_s)


async def _replay(bus: NatsBus, made: MadeExecution) -> float:
    begun_s = time.perf_counter()
    where = Where(made.address.tenant, made.address.workspace, made.address.conversation)
    got = await _caught_up(bus, where, Cursor.beginning())
    if got != made.events:
        raise BenchError(f"a replay has {got} of {made.events} events")
    return 1000 * (time.perf_counter() - begun_s)


async def _caught_up(bus: NatsBus, where: Where, cursor: Cursor) -> int:
    """Follow until everything stored has come; how many events of executions that were."""
    events = 0
    async with aclosing(Follower(bus, where, cursor, _no_snapshot).run()) as items:
        async for item in items:
            if isinstance(item, ExecutionItem):
                events += item.event.end - item.event.ordinal + 1
            elif isinstance(item, CaughtUp):
                return events
    raise BenchError("the follower ended before it had caught up")


async def _no_snapshot(_address: EventAddress) -> Snapshot | None:
    return None
