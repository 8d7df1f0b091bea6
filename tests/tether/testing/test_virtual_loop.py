"""Virtual time: waiting is free, order is kept, waiting for nothing fails at once."""

from __future__ import annotations

import asyncio
import time

import pytest

from tether.testing import DeadlockError, VirtualTimeLoop


@pytest.mark.virtual_time
async def test_an_hour_passes_at_once_and_in_order() -> None:
    start_s = time.monotonic()
    loop = asyncio.get_running_loop()
    seen: list[tuple[str, float]] = []

    async def sleeper(name: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        seen.append((name, loop.time()))

    begin_s = loop.time()
    await asyncio.gather(sleeper("hour", 3600), sleeper("minute", 60), sleeper("second", 1))
    assert [(name, at_s - begin_s) for name, at_s in seen] == [("second", 1), ("minute", 60), ("hour", 3600)]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10_000):
            await asyncio.Event().wait()
    assert time.monotonic() - start_s < 5


@pytest.mark.virtual_time
async def test_work_in_a_thread_is_waited_for() -> None:
    def work() -> str:
        time.sleep(0.02)
        return "done"

    assert await asyncio.to_thread(work) == "done"


def test_waiting_for_nothing_fails_at_once_and_names_who_waits() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.Event().wait(), name="the-waiting-task")

    with (
        pytest.raises(DeadlockError, match="the-waiting-task"),
        asyncio.Runner(loop_factory=VirtualTimeLoop) as runner,
    ):
        runner.run(main())
