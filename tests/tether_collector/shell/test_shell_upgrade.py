"""A later adapter version takes over a living CLI; what a collector finds on disk is taken for no more than it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support_nats import NatsServer
from support_shell import Rig, collector, eventually
from tether.bus import NatsBus
from tether.errors import BusError
from tether_collector.spool_reader import SpoolReader

UPGRADED = Path(__file__).resolve().parents[2] / "support_upgraded_collector.py"


async def upgrade(rig: Rig) -> None:
    rig._spawn([sys.executable, str(UPGRADED)])

    async def serves() -> bool:
        try:
            return (await rig.ask("discover", timeout_s=1.0)).result is not None
        except BusError:
            return False

    await eventually(serves, "the later collector's answer")


@pytest.mark.parametrize("planned", [True, False])
async def test_an_upgrade_under_a_living_agent_repeats_nothing_and_says_what_may_differ(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, planned: bool
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        gate = tmp_path / "gate"
        run = await rig.begin(f"one\n!flood 300\ntwo\n!wait_file {gate}\n!flood 300\nthree")
        await run.until("text.completed", text="two")
        if planned:
            assert await rig.hand_over() == 0
        else:
            await rig.kill()
        [folder] = rig.keeper_folders()
        assert (folder / "handover.json").exists() is planned
        await upgrade(rig)
        gate.touch()
        assert (await run.ended()).body["outcome"] == "completed"
        run.check_whole()
        assert not run.of("gap")
        assert len(run.of("note.later")) == 2, "of the two texts that the later version read first"
        assert (await run.snapshot()).completeness == ("complete" if planned else "partial")
        notes = [record.meta for record in SpoolReader(folder).read(0, 1 << 24).records if record.kind == "adapter"]
        assert {"name": "scripted", "version": "2"} in notes


async def test_a_file_of_an_ended_execution_is_never_taken_for_a_running_one(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("hello")
        await run.ended()
        [final] = await eventually(lambda: _finals(rig), "the final snapshot")
        await rig.kill()
        await rig.start()
        listed = (await rig.ask("discover")).result
        assert listed is not None and [entry["state"] for entry in listed["executions"]] == ["ended"]
        await rig.kill()
        for path in rig.state_dir.glob("journal.sqlite3*"):
            path.unlink()
        await rig.start()
        listed = (await rig.ask("discover")).result
        assert listed is not None and listed["executions"] == []
        assert json.loads(final.read_text())["snapshot"]["terminal"], "what is not known is left alone"


async def _finals(rig: Rig) -> list[Path]:
    return list(rig.state_dir.glob("execution-recovery/*.json"))
