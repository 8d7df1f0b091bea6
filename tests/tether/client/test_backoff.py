"""How long a client waits between attempts: for a person who reads, seldom enough and never long."""

from __future__ import annotations

import asyncio
import random

from tether.client.backoff import Backoff, of_connection, pause
from tether.limits import (
    ATTACH_QUICK_ATTEMPTS,
    CONNECTION_RETRY_MAX_S,
    RECONCILE_INTERVAL_MAX_S,
    RECONCILE_INTERVAL_S,
)
from tether.testing import MemoryBus, MemoryServer


def test_a_reader_whose_server_is_away_for_an_hour_is_back_within_three_seconds_of_its_return() -> None:
    backoff = of_connection()
    backoff.rng = random.Random(4)
    waits = [backoff.next_s() for _ in range(1000)]
    assert max(waits) <= CONNECTION_RETRY_MAX_S < 3.0
    assert min(waits[ATTACH_QUICK_ATTEMPTS:]) >= CONNECTION_RETRY_MAX_S / 2, "and costs the server no more than that"
    assert waits[0] < 0.1, "the first attempts come at once"


def test_what_costs_others_something_is_tried_again_seldom() -> None:
    backoff = Backoff(rng=random.Random(4))
    waits = [backoff.next_s() for _ in range(40)]
    assert max(waits[:ATTACH_QUICK_ATTEMPTS]) <= CONNECTION_RETRY_MAX_S
    assert min(waits[ATTACH_QUICK_ATTEMPTS:]) >= RECONCILE_INTERVAL_S / 2
    assert RECONCILE_INTERVAL_MAX_S / 2 <= waits[-1] <= RECONCILE_INTERVAL_MAX_S
    backoff.reset()
    assert backoff.next_s() < 0.1


def test_what_the_server_asks_for_is_waited_at_least() -> None:
    assert of_connection().next_s(asked_s=7.0) == 7.0
    assert of_connection().next_s(asked_s=1e9) == RECONCILE_INTERVAL_MAX_S


async def test_a_connection_that_comes_back_ends_a_pause() -> None:
    async with MemoryBus(MemoryServer()) as bus:
        bus.disconnect(for_s=0.05)
        async with asyncio.timeout(10):
            await pause(bus, 3600.0)
        assert bus.connected


async def test_a_pause_of_a_connection_that_stands_lasts_its_time() -> None:
    loop = asyncio.get_running_loop()
    async with MemoryBus(MemoryServer()) as bus:
        began_s = loop.time()
        await pause(bus, 0.05)
        assert loop.time() - began_s >= 0.05
