"""A CLI that is faster than its quota is slowed down: everything it says is told, in order, once, and no sooner."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from support_nats import NatsServer
from support_shell import Rig, collector
from tether.bus import NatsBus
from tether.events import GAP
from tether.limits import MIB
from tether.testing import VirtualTimeLoop
from tether_collector.pace import BURST_S, Pace

EVENTS_PER_S = 4000
FLOOD = 20_000


def spool_bytes(rig: Rig) -> int:
    size = 0
    for path in rig.state_dir.glob("executions/*/*/spool/*.seg"):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def paced(pace: Pace, frames: list[tuple[int, int]]) -> list[float]:
    """When each frame may be sent, seconds after the first."""

    async def work() -> list[float]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(100)
        begun_s = loop.time()
        found = []
        for events, size_bytes in frames:
            await pace.wait(events, size_bytes)
            found.append(loop.time() - begun_s)
        return found

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work())


def test_a_burst_is_let_through_and_the_rest_comes_at_the_rate_whichever_of_the_two_is_slower() -> None:
    assert paced(Pace(0, 0), [(10**6, 10**9)] * 3) == [0, 0, 0]
    assert paced(Pace(100, 0), [(50, 10**9)] * 4) == pytest.approx([0, 0, 0.5, 1.0])
    assert paced(Pace(0, 1000), [(1, 500)] * 4) == pytest.approx([0, 0, 0.5, 1.0])
    assert paced(Pace(100, 1000), [(50, 2000)] * 2) == pytest.approx([2.0 - BURST_S, 4.0 - BURST_S])


def test_a_lifted_pace_is_none() -> None:
    pace = Pace(1, 1)
    pace.lifted = lambda: True
    assert paced(pace, [(1000, 1000)] * 3) == [0, 0, 0]


def test_what_is_read_ahead_is_so_little_that_it_is_soon_told() -> None:
    assert Pace(0, 5).ahead_events is None
    assert Pace(10_000, 0).ahead_events == 5000
    assert Pace(1, 0).ahead_events == 64


async def test_a_flood_comes_whole_at_the_rate_and_a_full_spool_makes_the_agent_wait(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    environment = {
        "TETHER_COLLECTOR_QUOTA_EVENTS_PER_S": str(EVENTS_PER_S),
        "TETHER_SPOOL_BYTES_MAX": str(MIB),
        "TETHER_SPOOL_SEGMENT_BYTES": str(256 * 1024),
    }
    async with collector(bus, nats_server.url, tenant, tmp_path, environment=environment) as rig:
        begun_s = time.monotonic()
        run = await rig.begin(f"!flood {FLOOD}")
        most_bytes = 0
        ending = asyncio.create_task(run.ended(60.0))
        while not ending.done():
            most_bytes = max(most_bytes, spool_bytes(rig))
            await asyncio.wait({ending}, timeout=0.05)
        ending.result()
        spent_s = time.monotonic() - begun_s
        run.check_whole()
        run.check_chain()
        assert not run.of(GAP), "nothing was shed"
        assert spent_s >= FLOOD / EVENTS_PER_S - BURST_S - 0.1
        assert most_bytes < 2 * MIB, "the agent waited at the quota"
        printed_s = [float(record["at"]) for process in run.processes() for record in process.records]
        assert max(printed_s) - min(printed_s) > 1.0, "it felt the limit"
