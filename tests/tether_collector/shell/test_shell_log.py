"""The log is the writer's base: what happens when it is shorter, empty or another's."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from support_nats import NatsServer, running_server
from support_shell import Rig, Run, collector, eventually
from tether import frames, subjects, topology
from tether.bus import NatsBus, connect
from tether.events import Event
from tether.frames import Frame, Position
from tether_collector.keeper_link import keeper_lives


async def test_acked_frames_that_the_server_lost_are_put_back(tenant: str, tmp_path: Path) -> None:
    with running_server() as server:
        async with await connect(server.url, name="test") as bus:
            await bus.ensure(topology.base())
            async with collector(bus, server.url, tenant, tmp_path) as rig:
                gate, second = tmp_path / "gate", tmp_path / "second"
                run = await rig.begin(f"one\n!wait_file {gate}\n!flood 300\ntwo\n!wait_file {second}\nthree")
                await run.until("text.completed", text="one")
                server.kill()
                shutil.copytree(server.root / "store", tmp_path / "older")
                server.start()
                gate.touch()
                await run.until("text.completed", text="two")
                server.kill()
                shutil.rmtree(server.root / "store")
                shutil.copytree(tmp_path / "older", server.root / "store")
                server.start()
                again = Run(rig, run.command)
                await again.until("text.completed", text="two")
                second.touch()
                assert (await again.ended()).body["outcome"] == "completed"
                again.check_whole()
                assert [event.ordinal for event in again.of("text.completed")][:2] == [
                    event.ordinal for event in run.of("text.completed")
                ][:2]
                final = await again.snapshot()
                assert final.completeness == "complete" and final.watermark.sequence == again.sequences[-1]


async def test_a_purged_subject_is_a_gap_and_the_ordinals_go_on(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        gate, second = tmp_path / "gate", tmp_path / "second"
        run = await rig.begin(f"one\n!wait_file {gate}\ntwo\n!wait_file {second}\nthree")
        last = await run.until("text.completed", text="one")
        await bus.purge(subjects.events_stream(tenant), run.subject)
        gate.touch()
        after = Run(rig, run.command, sequences=[run.sequences[-1]])
        gap = await after.until("gap")
        second.touch()
        await after.until("execution.ended")
        assert after.events[0].ordinal > last.ordinal and after.of("gap") == [gap]
        assert gap.body["reason"] == "retention_gap" and gap.body["from"] == 1
        ordinals = [event.ordinal for event in after.events]
        assert ordinals == sorted(set(ordinals))


async def test_another_writers_frame_fences_this_one_and_ends_its_process(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        gate = tmp_path / "gate"
        run = await rig.begin(f"one\n!wait_file {gate}\ntwo")
        last = await run.until("text.completed", text="one")
        await run.fetch()
        [folder] = rig.keeper_folders()
        first = run.events[-1].end + 1
        ended = Event(ordinal=first, at=1, type="execution.ended", body={"outcome": "lost"})
        frame = Frame(first=first, last=first, pos=Position(record=0, index=0), events=[ended])
        assert last.ordinal < first
        await bus.publish(run.subject, frames.encode(frame), expect_last=run.sequences[-1])
        gate.touch()

        async def gone() -> bool:
            return not keeper_lives(folder)

        await eventually(gone, "the end of the fenced process")
        await eventually(lambda: _fenced(rig), "the log line that says so")
        await run.fetch()
        assert run.events[-1].body == {"outcome": "lost"}


@pytest.mark.parametrize("away", [False, True])
async def test_what_is_no_frame_at_the_end_of_the_log_fences_and_crashes_nothing(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, away: bool
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        gate = tmp_path / "gate"
        run = await rig.begin(f"one\n!wait_file {gate}\ntwo\n!hang")
        await run.until("text.completed", text="one")
        if away:
            await rig.kill()
        await run.fetch()
        [folder] = rig.keeper_folders()
        await bus.publish(run.subject, b"\xff no frame", expect_last=run.sequences[-1])
        if away:
            await rig.start()
        gate.touch()

        async def gone() -> bool:
            return not keeper_lives(folder)

        await eventually(gone, "the end of the fenced process")
        await eventually(lambda: _fenced(rig), "the log line that says so")
        another = await rig.begin("three", conversation="another")
        assert (await another.ended()).body["outcome"] == "completed"


async def _fenced(rig: Rig) -> bool:
    return bool(rig.lines("execution_fenced"))


async def test_an_execution_that_another_ended_while_the_collector_was_away_is_not_revived(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("one\n!hang")
        await run.until("text.completed", text="one")
        await rig.kill()
        await run.fetch()
        first = run.events[-1].end + 1
        ended = Event(ordinal=first, at=1, type="execution.ended", body={"outcome": "lost", "tail": "unknown"})
        frame = Frame(first=first, last=first, pos=Position(record=0, index=0), events=[ended])
        await bus.publish(run.subject, frames.encode(frame), expect_last=run.sequences[-1])
        await rig.start()
        [folder] = rig.keeper_folders()

        async def gone() -> bool:
            return not keeper_lives(folder)

        await eventually(gone, "the end of the fenced process")
        await run.fetch()
        assert run.events[-1].ordinal == first


async def test_a_spool_that_lost_its_tail_is_a_gap_and_no_ordinal_is_used_twice(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("one\n!flood 50\ntwo\n!hang")
        await run.until("text.completed", text="two")
        await rig.kill()
        await run.fetch()
        [folder] = rig.keeper_folders()
        await _kill_keeper(folder)
        segment = folder / "spool" / "000000000001.seg"
        os.truncate(segment, segment.stat().st_size // 2)
        before = run.events[-1].end
        await rig.start()
        ended = await run.ended()
        assert ended.body["outcome"] == "lost"
        [gap] = run.of("gap")
        assert gap.ordinal == before + 1 and gap.body["reason"] == "durability_gap" and gap.body["to"] == before
        await rig.kill()
        await rig.start()
        final = await run.snapshot()
        assert final.completeness == "partial" and final.watermark.ordinal == run.events[-1].ordinal


async def _kill_keeper(folder: Path) -> None:
    os.kill(json.loads((folder / "spawn.json").read_bytes())["keeper_pid"], signal.SIGKILL)

    async def gone() -> bool:
        return not keeper_lives(folder)

    await eventually(gone, "the keeper's death")


async def test_a_conversations_next_start_is_taken_as_soon_as_the_end_is_in_the_log(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        counts = []
        for _ in range(8):
            run = await rig.begin("hello")
            await run.ended()
            run.check_whole()
            counts.append(rig.handles())

        async def dismissed() -> bool:
            return not any(keeper_lives(folder) for folder in rig.keeper_folders())

        await eventually(dismissed, "the keepers' leave")
        assert rig.handles() <= counts[0], counts
