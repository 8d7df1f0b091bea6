"""Whatever is killed, the log is whole: each line that the agent printed, once, in order."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest

from support_nats import NatsServer, running_server
from support_shell import collector, eventually
from tether import topology
from tether.bus import NatsBus, connect
from tether.snapshot import Snapshot
from tether_collector.keeper_link import keeper_lives


async def test_a_collector_killed_in_a_flood_loses_and_doubles_nothing(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    choice = random.Random(seed)
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("!flood 6000\n!tool one 0 0\n!flood 6000")
        for _ in range(4):
            wanted = (run.events[-1].end if run.events else 1) + choice.randrange(1, 1500)

            async def reached(ordinal: int = wanted) -> bool:
                await run.fetch()
                return bool(run.events) and (run.events[-1].end >= ordinal or run.events[-1].type == "execution.ended")

            await eventually(reached, f"ordinal {wanted}")
            await rig.kill()
            await rig.start()
        ended = await run.ended(60.0)
        assert ended.body["outcome"] == "completed"
        run.check_whole()
        assert not run.of("gap")


async def test_an_answer_after_a_restart_reaches_the_same_process(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("before\n!ask write\nafter")
        asked = await run.until("interaction.requested")
        await rig.kill()
        await rig.start()
        payload = {"interaction": asked.body["interaction"], "decision": "allow"}

        async def answered() -> bool:
            reply = await rig.ask("answer", target=run.target, payload=payload, control="ctl_after")
            return reply.status in ("delivered", "settled")

        await eventually(answered, "an answer that is taken")
        assert (await run.ended()).body["outcome"] == "completed"
        run.check_whole()
        snapshot = await run.snapshot()
        assert snapshot.terminal and snapshot.completeness == "complete"


@pytest.mark.parametrize("step", ["control_journaled"])
async def test_a_control_that_was_journaled_before_a_crash_takes_effect_once(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, step: str
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path, start=False) as rig:
        await rig.start(crash_at=step)
        run = await rig.begin("before\n!ask write\nafter")
        asked = await run.until("interaction.requested")
        payload = {"interaction": asked.body["interaction"], "decision": "allow"}
        with pytest.raises(Exception, match="no reply"):
            await rig.ask("answer", target=run.target, payload=payload, control="ctl_1", timeout_s=1.0)
        assert await rig.exited() == 77
        await rig.start()
        assert (await run.ended()).body["outcome"] == "completed"
        assert run.of("interaction.resolved")[0].body["control"] == "ctl_1"
        again = await rig.ask("answer", target=run.target, payload=payload, control="ctl_1")
        assert again.status == "settled"
        run.check_whole()


@pytest.mark.parametrize("step", ["terminal_stored", "final_written"])
async def test_a_crash_after_the_end_was_stored_leaves_one_end_and_a_final_snapshot(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, step: str
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path, start=False) as rig:
        await rig.start(crash_at=step)
        run = await rig.begin("hello")
        assert await rig.exited() == 77
        await rig.start()
        await run.ended()
        assert len(run.of("execution.ended")) == 1

        async def final() -> bool:
            reply = await rig.ask("snapshot", target=run.target)
            return reply.result is not None and Snapshot.model_validate(reply.result["snapshot"]).terminal

        await eventually(final, "the final snapshot")
        [folder] = rig.keeper_folders()

        async def left() -> bool:
            return not keeper_lives(folder)

        await eventually(left, "the keeper's leave")
        run.check_whole()


async def test_sighup_leaves_the_agent_running_and_the_next_collector_goes_on(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        gate = tmp_path / "gate"
        run = await rig.begin(f"before\n!wait_file {gate}\nafter")
        await run.until("text.completed")
        assert await rig.hand_over() == 0
        [folder] = rig.keeper_folders()
        assert keeper_lives(folder)
        gate.touch()
        await rig.start()
        assert (await run.ended()).body["outcome"] == "completed"
        run.check_whole()
        assert await rig.hand_over() == 0


async def test_a_killed_keeper_takes_its_agent_along_and_the_execution_ends_lost(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("ready\n!fork2\n!hang")
        await run.until("text.completed")
        [folder] = rig.keeper_folders()
        os.kill(json.loads((folder / "spawn.json").read_bytes())["keeper_pid"], signal.SIGKILL)
        ended = await run.ended()
        assert ended.body["outcome"] == "lost" and ended.body["proof"]["method"] == "keeper_gone"
        assert run.of("response.ended")[0].body["error"]["code"] == "EXECUTION_DURABILITY_GAP"


async def test_collector_and_keeper_killed_together_end_lost_once(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("ready\n!hang")
        await run.until("text.completed")
        [folder] = rig.keeper_folders()
        await rig.kill()
        os.kill(json.loads((folder / "spawn.json").read_bytes())["keeper_pid"], signal.SIGKILL)
        await rig.start()
        ended = await run.ended()
        assert ended.body["outcome"] == "lost" and ended.body["proof"]["method"] == "keeper_gone"
        await rig.kill()
        await rig.start()
        await run.fetch()
        assert len(run.of("execution.ended")) == 1


async def test_a_server_killed_in_mid_stream_loses_and_doubles_nothing(tenant: str, tmp_path: Path) -> None:
    with running_server() as server:
        async with await connect(server.url, name="test") as bus:
            await bus.ensure(topology.base())
            async with collector(bus, server.url, tenant, tmp_path) as rig:
                run = await rig.begin("!flood 4000\n!deltas 200 5\n!flood 4000")
                for _ in range(3):
                    before = run.events[-1].end if run.events else 0
                    server.kill()
                    server.start()

                    async def further(ordinal: int = before) -> bool:
                        await run.fetch()
                        return run.events[-1].end > ordinal or run.events[-1].type == "execution.ended"

                    await run.until("text.delta")
                    await eventually(further, "progress after the restart")
                ended = await run.ended(60.0)
                assert ended.body["outcome"] == "completed"
                run.check_whole()


async def test_server_and_collector_away_together_lose_nothing(tenant: str, tmp_path: Path) -> None:
    with running_server() as server:
        async with await connect(server.url, name="test") as bus:
            await bus.ensure(topology.base())
            async with collector(bus, server.url, tenant, tmp_path) as rig:
                gate, printed = tmp_path / "gate", tmp_path / "printed"
                run = await rig.begin(f"before\n!wait_file {gate}\n!flood 2000\n!touch {printed}\nafter")
                await run.until("text.completed")
                server.kill()
                gate.touch()

                async def done() -> bool:
                    return printed.exists()

                await eventually(done, "the agent's work without a bus")
                await rig.kill()
                await rig.start(ready=False)
                server.start()
                ended = await run.ended(60.0)
                assert ended.body["outcome"] == "completed"
                run.check_whole()


async def test_rotated_segments_are_enough_to_go_on(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(
        bus, nats_server.url, tenant, tmp_path, environment={"TETHER_SPOOL_SEGMENT_BYTES": "16384"}
    ) as rig:
        gate = tmp_path / "gate"
        run = await rig.begin(f"!deltas 4000 0\n!ask write\n!wait_file {gate}\n!flood 4000")
        asked = await run.until("interaction.requested")
        [folder] = rig.keeper_folders()

        async def rotated() -> bool:
            return any(folder.glob("fold-*.json"))

        await eventually(rotated, "a rotation with state")
        await rig.kill()
        first = folder / "spool" / "000000000001.seg"
        first.unlink()
        await rig.start()
        payload = {"interaction": asked.body["interaction"], "decision": "allow"}

        async def answered() -> bool:
            reply = await rig.ask("answer", target=run.target, payload=payload, control="ctl_1")
            return reply.status in ("delivered", "settled")

        await eventually(answered, "an answer that is taken")
        gate.touch()
        assert (await run.ended()).body["outcome"] == "completed"
        run.check_whole()
        assert not run.of("gap")
        snapshot = await run.snapshot()
        assert snapshot.completeness == "complete" and snapshot.watermark.ordinal == run.events[-1].ordinal
