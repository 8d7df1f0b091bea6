"""One process of an execution as the collector holds it: a launch that nobody answered is made anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support_keeper import KeeperRig, living_with, python_cli
from tether_collector import keeper_link, process
from tether_collector.keeper_link import KeeperLink
from tether_collector.process import LAUNCHES_MAX, AgentProcess

IDLE = "import sys; sys.stdin.read()  # {marker}"


def times_out(monkeypatch: pytest.MonkeyPatch, first: int) -> list[None]:
    """The first launches find their time over as soon as they wait: as in a collector that stood still for longer."""
    real, calls = keeper_link.launch, list[None]()
    usual_s = keeper_link.LAUNCH_TIMEOUT_S

    async def launch(*arguments: Any, **more: Any) -> KeeperLink:
        calls.append(None)
        monkeypatch.setattr(keeper_link, "LAUNCH_TIMEOUT_S", 0.0 if len(calls) <= first else usual_s)
        return await real(*arguments, **more)

    monkeypatch.setattr(process, "launch", launch)
    return calls


async def end(running: AgentProcess) -> None:
    assert running.live is not None
    await running.live.kill()
    await running.dismiss()


async def test_a_launch_that_ran_out_of_time_is_made_anew_and_one_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = f"idle-{tmp_path.name}"
    spec = KeeperRig(tmp_path).spec(python_cli(IDLE.format(marker=marker)))
    running = AgentProcess(tmp_path / "keeper", spec.nonce, lambda: None)
    calls = times_out(monkeypatch, 1)
    assert await running.launch(spec) is None
    try:
        assert (len(calls), running.gone, running.spawned) == (2, False, True)
        assert len(living_with(marker)) == 1
    finally:
        await end(running)


async def test_what_cannot_be_launched_in_time_is_told_as_a_start_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = KeeperRig(tmp_path).spec(python_cli(IDLE.format(marker="never")))
    running = AgentProcess(tmp_path / "keeper", spec.nonce, lambda: None)
    calls = times_out(monkeypatch, LAUNCHES_MAX)
    failure = await running.launch(spec)
    assert failure == "the keeper did not start in time" and len(calls) == LAUNCHES_MAX
    assert (running.gone, running.spawned, running.live) == (True, False, None)
    spool = b"".join(path.read_bytes() for path in (tmp_path / "keeper" / "spool").iterdir())
    assert b"spawn_failed" in spool and b"did not start in time" in spool
