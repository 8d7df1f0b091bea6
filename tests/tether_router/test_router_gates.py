"""Gates of conversations: one at a time, no wake lost, nothing left behind."""

from __future__ import annotations

import asyncio

from support_router import virtual
from tether_router.gates import Gates
from tether_router.router import delay_s


@virtual
async def test_a_gate_lets_one_in_at_a_time_and_is_gone_with_its_last_visitor() -> None:
    gates, inside, most = Gates(), 0, 0

    async def visitor(key: str) -> None:
        nonlocal inside, most
        with gates.visit(key) as visit:
            async with visit.lock:
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(1)
                inside -= 1

    await asyncio.gather(*(visitor("c1") for _ in range(20)))
    assert most == 1
    await asyncio.gather(*(visitor(f"c{number}") for number in range(20)))
    assert most == 20, "other conversations go on meanwhile"
    assert len(gates) == 0


@virtual
async def test_a_wake_between_the_look_and_the_wait_is_not_lost_and_an_older_one_does_not_count() -> None:
    gates = Gates()
    with gates.visit("c1") as visit:
        gates.wake("c1")
        visit.look()
        assert not await visit.woken(5)
        visit.look()
        assert gates.wake("c1")
        assert await visit.woken(0)
    assert not gates.wake("c1"), "nobody is there any more"


@virtual
async def test_every_visitor_that_waits_is_woken_by_one_wake() -> None:
    gates = Gates()

    async def waits() -> bool:
        with gates.visit("c1") as visit:
            return await visit.woken(60)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(waits()) for _ in range(5)]
        await asyncio.sleep(1)
        gates.wake("c1")
    assert all(task.result() for task in tasks)


def test_delays_grow_from_a_quarter_of_a_second_to_five_and_stay_there() -> None:
    assert [delay_s(count) for count in (1, 2, 3, 4, 5, 6, 7, 10_000)] == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
