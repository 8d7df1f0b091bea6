"""A child of the set, on its own: what the two tasks that watch it may do to each other."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from tether_cli.output import CliError
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


async def test_a_child_that_fails_at_its_start_is_told_in_words_not_as_a_logs_line(tmp_path: Path) -> None:
    raised = {"exc_type": "ConfigurationError", "exc_value": "TETHER_X: must be a number", "frames": ["…"]}
    lines = [json.dumps({"event": "service_failed", "exception": [raised]}), json.dumps({"event": "ends"}), "plain"]
    spec = ChildSpec(
        name="backend",
        argv=(sys.executable, "-I", "-S", "-c", "import sys; print(sys.argv[1]); sys.exit(1)", "\n".join(lines)),
        env={"PATH": os.environ["PATH"]},
        log=tmp_path / "backend.log",
        ready=lambda _: None,
        restarted=lambda _: None,
    )
    with pytest.raises(CliError) as failed:
        await Child(spec, LogSink("quiet")).start()
    head, *shown = failed.value.line().splitlines()
    assert head.startswith(f"tether: backend ended with 1 before it was ready (its log is {spec.log})")
    assert shown == [
        "  service_failed: ConfigurationError: TETHER_X: must be a number",
        '  {"event": "ends"}',
        "  plain",
    ]
    assert spec.log.read_text().splitlines() == lines, "the log has the whole of it"
