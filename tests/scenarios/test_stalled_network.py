"""R10: connections of one service to NATS that stay open and move nothing are replaced; what waited goes on, once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import pytest

from support_fault_round import FaultRound, talk
from tether_chaos.proxy import NatsProxy

SERVICES: Final = ("router", "agent", "backend", "collector")
WITHIN_S: Final = 15.0  # a missed answer is noticed within seconds; the machine may be busy


@pytest.mark.timeout(180)
async def test_a_connection_of_any_service_that_stalls_without_closing_is_replaced_within_seconds(
    tmp_path: Path,
) -> None:
    spent_s: dict[str, float] = {}

    async def harm(run: FaultRound) -> None:
        for service in SERVICES:
            proxy = run.services.proxies["agent" if service == "collector" else service]
            run.begin(f"before-{service}")
            await run.reads(f"before-{service}", 5)
            assert proxy.leave_hanging(service) > 0
            began_s = time.monotonic()
            # What needs the service: a first prompt in a new workspace, and readers of what is under way.
            done = run.begin(f"after-{service}")

            async def replaced(through: NatsProxy = proxy, tier: str = service) -> bool:
                return through.moving(tier) > 0

            await run.until(replaced, f"another connection of the {service}", WITHIN_S)
            spent_s[service] = time.monotonic() - began_s
            await done

    plans = [
        conversation
        for service in SERVICES
        for conversation in (
            talk(f"before-{service}", "!lines 60 30\n!ask deploy", workspace=f"w-{service}"),
            talk(f"after-{service}", "!lines 10 5", workspace=f"w-{service}-new"),
        )
    ]
    await FaultRound(plans, tmp_path, harm).judged()
    assert set(spent_s) == set(SERVICES), spent_s
