"""A child of the set, on its own: what the two tasks that watch it may do to each other."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tether_cli.supervise import Child, ChildSpec, LogSink


def child(log: Path) -> Child:
    code = "import time; print('begun', flush=True); time.sleep(60)"
    spec = ChildSpec(
        name="child",
        argv=(sys.executable, "-I", "-S", "-c", code),
        env={"PATH": os.environ["PATH"]},
        log=log,
        ready=lambda _: {} if log.exists() and "begun" in log.read_text() else None,
        restarted=lambda _: None,
    )
    return Child(spec, LogSink("quiet"))


async def test_a_child_that_is_kept_and_stopped_at_once_is_ended_by_both(tmp_path: Path) -> None:
    for number in range(5):
        one = child(tmp_path / f"{number}.log")
        await one.start()
        keeping = asyncio.create_task(one.keep(), name="keep-child")
        await asyncio.sleep(0)  # it waits for the child's end
        await one.stop()
        await keeping


async def test_a_keeper_that_is_cancelled_in_the_middle_leaves_the_rest_to_stop(tmp_path: Path) -> None:
    one = child(tmp_path / "one.log")
    await one.start()
    keeping = asyncio.create_task(one.keep(), name="keep-child")
    await asyncio.sleep(0)
    stopping = asyncio.create_task(one.stop(), name="stop-child")
    await asyncio.sleep(0)
    keeping.cancel()
    await stopping
    assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "log-child"] == []
