"""The whole set on three nats-servers: the log's leader is killed while agents stream and readers follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from support_fault_round import FaultRound, talk
from tether import subjects
from tether.errors import BusError
from tether_chaos.faults import Kill, victims


async def leader(run: FaultRound) -> str:
    """The name of the server that leads the tenant's log now."""
    found = ""

    async def known() -> bool:
        nonlocal found
        try:
            info = await run.api(f"STREAM.INFO.{subjects.events_stream(run.up.tenant)}")
        except BusError:  # no leader of the servers' own just now
            return False
        found = info.get("cluster", {}).get("leader") or ""
        return found != ""

    await run.until(known, "a leader of the log")
    return found


@pytest.mark.timeout(180)
async def test_the_leader_of_the_log_is_killed_while_agents_stream_and_every_sequence_is_unbroken(
    tmp_path: Path,
) -> None:
    async def harm(run: FaultRound) -> None:
        streaming = [run.begin(name) for name in ("c0", "c1")]
        for number in range(2):
            await run.reads("c0", 30 * (number + 1))
            first = await leader(run)
            [victim] = [
                one for one in victims(run.services.paths.root, "nats") if one.name == first.replace("n", "nats")
            ]
            kill = Kill(run.services, victim)
            assert kill.strike()
            if number:  # a frame in flight may be stored or not: its collector dies with the question open
                await run.kill("collector", "w0")
            before = run.count("c0")
            await leader(run)  # one of the two that are left; on a slow machine the killed one may be back already

            async def goes_on(least: int = before + 10) -> bool:
                return run.count("c0") >= least or streaming[0].done()

            await run.until(goes_on, "the stream after the loss of its leader")
            assert await kill.up() is not None
            follower = await run.api(f"STREAM.INFO.{subjects.events_stream(run.up.tenant)}")
            assert follower["config"]["num_replicas"] == 3
        for task in streaming:
            await task

    plans = [
        talk("c0", "!lines 300 60\n!ask deploy\n!flood 500", "second"),
        talk("c1", "!ask first\n!deltas 400 40\n!ask deploy", workspace="w1"),
    ]
    result = await FaultRound(plans, tmp_path, harm, nodes=3).judged()
    assert result.prompts == 3
