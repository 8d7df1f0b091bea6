"""R6, R7: all services at once, and each again just as its successor has come, while it recovers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support_fault_round import FaultRound, talk
from tether_chaos.faults import Kill
from tether_chaos.plan import SERVICES

WORKSPACE = "w0"


def kills(run: FaultRound) -> list[Kill]:
    """One of every service."""
    return [Kill(run.services, run.victim(name, WORKSPACE if name == "collector" else "")) for name in SERVICES]


async def up_again(found: list[Kill]) -> None:
    ups = await asyncio.gather(*(kill.up() for kill in found))
    assert None not in ups, [kill.victim.tier for kill, up in zip(found, ups, strict=True) if up is None]


@pytest.mark.timeout(180)
async def test_each_service_is_killed_twice_in_a_row_and_all_at_once_and_nothing_is_lost_or_doubled(
    tmp_path: Path,
) -> None:
    async def harm(run: FaultRound) -> None:
        streaming = [run.begin("c0"), run.begin("c1")]
        await run.reads("c0", 6)
        for name in SERVICES:
            where = WORKSPACE if name == "collector" else ""
            await run.kill(name, where)
            await run.kill(name, where)
        for _ in range(2):
            found = kills(run)
            assert all(kill.strike() for kill in found)
            await up_again(found)
        for task in streaming:
            await task
        await run.begin("c2")

    plans = [
        talk("c0", "!lines 300 60\n!ask deploy", "!lines 20 10", workspace=WORKSPACE),
        talk("c1", "!ask first\n!lines 200 60\n!ask second", workspace=WORKSPACE),
        talk("c2", "as before", workspace=WORKSPACE),
    ]
    result = await FaultRound(plans, tmp_path, harm).judged()
    assert result.prompts == 4
