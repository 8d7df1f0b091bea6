"""A collector that is killed at any step of a drain goes on after its restart and comes to the same end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from support_drain import an_order, ask_drain, drained, manifest_of, of_conversation, reference_entry, reference_of
from support_nats import NatsServer
from support_shell import Rig, collector, eventually
from tether.bus import NatsBus
from tether.failpoints import FOLDER_VARIABLE
from tether_collector.draining import FAILED_EXIT

DEAF = "!ignore SIGTERM\nready\n!tool build 60000"
# Before these nobody was told to go: a restart that takes longer than the grace would leave nobody to go by itself.
EARLY = ("drain_journaled", "leave_journaled", "drain_leaving")
STEPS = (
    *EARLY,
    "drain_publishing",
    "drain_checkpoint",
    "checkpoint_collected",
    "manifest_written",
    "blob_part_stored",
    "checkpoint_stored",
    "checkpoint_journaled",
    "reference_written",
    "drain_releasing",
    "terminal_stored",
    "final_written",
    "end_journaled",
    "drain_over",
)


@pytest.mark.parametrize("step", STEPS)
async def test_a_collector_that_dies_at_any_step_of_a_drain_goes_on_to_the_same_end(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, step: str
) -> None:
    folder = tmp_path / "failpoints"
    folder.mkdir()
    environment = {FOLDER_VARIABLE: str(folder)}
    async with collector(bus, nats_server.url, tenant, tmp_path, environment=environment) as rig:
        waiting = await rig.begin("before\n!ask write\nafter", conversation="waiting")
        runs = [waiting]
        await waiting.until("interaction.requested")
        if step not in EARLY:
            runs.append(deaf := await rig.begin(DEAF, conversation="deaf"))
            await deaf.until("tool.started")
        order = an_order(grace_s=60.0 if step in EARLY else 1.0, store="both")
        (folder / f"collector.{step}").touch()
        sending = asyncio.create_task(ask_drain(rig, order), name="ask")
        assert await rig.exited() == -signal.SIGKILL, step
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await rig.start()
        report = await drained(rig, order)
        assert report.state == "done", report
        assert of_conversation(report, "waiting").outcome == "graceful"
        if step not in EARLY:
            assert of_conversation(report, "deaf").outcome == "forced"
        reference, manifest = await reference_of(rig), await manifest_of(rig)
        assert report.checkpoint == reference and reference.clean == (step in EARLY)
        assert manifest.executions == report.executions
        assert await rig.exited() == 0
        for run in runs:
            end = await run.ended()
            assert (end.body["outcome"], end.body["checkpoint"]) == ("drained", reference.checkpoint)
            assert len(run.of("response.ended")) == 1
            run.check_whole()
        assert list((rig.state_dir / "checkpoints").iterdir()) == [
            rig.state_dir / "checkpoints" / f"{reference.checkpoint}.json"
        ], "nothing is left of what was begun"


async def test_a_drain_that_is_done_is_told_again_by_the_next_collector_which_then_ends(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        order = an_order()
        first = await drained(rig, order)
        assert await rig.exited() == 0
        await rig.start()
        late = await rig.admit("late")
        refused = await rig.ask_start(late)
        assert refused.problem is not None and refused.problem.code == "DRAINING"
        assert await drained(rig, order) == first
        assert await rig.exited() == 0
        rig.boot = "boot_next"
        await rig.start()
        run = await rig.begin("hello")
        assert (await run.ended()).body["outcome"] == "completed", "another boot has nothing to do with it"


async def test_a_drain_of_a_boot_that_is_gone_is_finished_by_the_next_one_which_then_serves(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("ready\n!tool build 60000")
        await run.until("tool.started")
        assert (await ask_drain(rig, an_order(grace_s=30.0))).status == "accepted"
        await rig.kill()
        _kill_keepers(rig)
        rig.boot = "boot_next"
        await rig.start()
        end = await run.ended()
        assert end.body["outcome"] == "lost", "it was still in its share of the grace"
        after = await rig.admit("hello", conversation="after")

        async def taken() -> bool:
            return (await rig.ask_start(after)).problem is None

        await eventually(taken, "an end of the drain")
        assert (await after.ended()).body["outcome"] == "completed"
        assert await reference_entry(rig) is not None


def _kill_keepers(rig: Rig) -> None:
    for folder in rig.keeper_folders():
        os.kill(json.loads((folder / "spawn.json").read_bytes())["keeper_pid"], signal.SIGKILL)


async def test_d10_sigterm_is_a_drain_of_its_own_within_the_grace_of_the_settings(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    environment = {"TETHER_COLLECTOR_DRAIN_GRACE_S": "8", "TETHER_COLLECTOR_CHECKPOINT_STORE": "both"}
    async with collector(bus, nats_server.url, tenant, tmp_path, environment=environment) as rig:
        waiting = await rig.begin("before\n!ask write\nafter", conversation="waiting")
        deaf = await rig.begin(DEAF, conversation="deaf")
        await waiting.until("interaction.requested")
        await deaf.until("tool.started")
        began_s = asyncio.get_running_loop().time()
        assert await rig.terminate() == 0
        assert asyncio.get_running_loop().time() - began_s < 10.0
        reference = await reference_of(rig)
        assert (reference.stored, reference.clean) == ("both", False)
        outcomes = {one.target.conversation: one.outcome for one in reference.executions}
        assert outcomes == {"waiting": "graceful", "deaf": "forced"}
        for run in (waiting, deaf):
            assert (await run.ended()).body["checkpoint"] == reference.checkpoint
        assert len(list((rig.state_dir / "execution-recovery").glob("*.json"))) == 2, (
            "T4: the final snapshots are there"
        )
        await rig.start()
        run = await rig.begin("hello", conversation="waiting")
        assert (await run.ended()).body["outcome"] == "completed", "the same boot goes on"


async def test_sigterm_whose_checkpoint_fails_exits_with_its_own_code(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        (rig.state_dir / "checkpoints").touch()  # where the folder would be
        assert await rig.terminate() == FAILED_EXIT
        assert await reference_entry(rig) is None
        assert rig.lines("checkpoint_failed")


@pytest.mark.parametrize("step", ["checkpoint_collected", "reference_written"])
async def test_what_nobody_foresaw_fails_the_drain_by_its_name_and_the_collector_serves_on(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, step: str
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path, start=False) as rig:
        await rig.start(crash_at=f"!{step}")
        run = await rig.begin("before\n!ask write\nafter", conversation="waiting")
        await run.until("interaction.requested")
        report = await drained(rig, order := an_order(grace_s=5.0))
        assert report.state == "failed" and report.problem is not None
        assert f"RuntimeError: nobody foresaw this at {step}" in report.problem.detail
        assert of_conversation(report, "waiting").outcome == "checkpoint_failed"
        assert (await run.ended()).body["outcome"] == "drained"
        again = await rig.begin("hello", conversation="other")
        assert (await again.ended()).body["outcome"] == "completed", "this very process goes on"
        assert await rig.hand_over() == 0
        await rig.start()
        assert (await drained(rig, order)).state == "failed", "it is told as it was, and not made again"
        assert (await drained(rig, an_order("drn_2", grace_s=5.0))).state == "done"


async def test_sigterm_that_meets_a_drain_joins_it_and_sighup_hands_a_drain_over(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        gate = tmp_path / "gate"
        run = await rig.begin(f"ready\n!wait_file {gate}\nfinished")
        await run.until("text.completed")
        order = an_order(grace_s=60.0)
        assert (await ask_drain(rig, order)).status == "accepted"
        assert await rig.hand_over() == 0
        await rig.start()
        assert (await ask_drain(rig, order)).status == "accepted", "it goes on"
        os.kill(rig.pid, signal.SIGTERM)
        gate.touch()
        assert await rig.exited() == 0
        assert (await run.ended()).body["outcome"] == "completed"
        assert (await reference_of(rig)).drain == order.drain
