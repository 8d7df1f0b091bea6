"""NATS away for longer than every lease, a spool at its quota, a network that stalls: the agent works on."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from pathlib import Path

import pytest

from support_nats import running_server
from support_proxy import running_proxy
from support_shell import Rig, Run, collector, eventually
from tether import subjects, topology
from tether.bus import connect
from tether.errors import BusError
from tether.ids import sandbox_id
from tether.kv import Bucket
from tether_collector.keeper_link import keeper_lives

HASTY = Path(__file__).resolve().parents[2] / "support_hasty_collector.py"
MIB = 1 << 20


async def hasty(rig: Rig) -> None:
    """Start the collector whose leases last a second."""
    rig._spawn([sys.executable, str(HASTY)])

    async def serves() -> bool:
        try:
            return (await rig.ask("discover", timeout_s=1.0)).result is not None
        except BusError:
            return False

    await eventually(serves, "the collector's answer")


async def registered(rig: Rig) -> bool:
    key = subjects.registration_key(rig.tenant, rig.workspace, sandbox_id(rig.tenant, rig.workspace))
    try:
        return await Bucket(rig.bus, subjects.SANDBOXES).get(key) is not None
    except BusError:
        return False


def spool_bytes(rig: Rig) -> int:
    size = 0
    for path in rig.state_dir.glob("executions/*/*/spool/*.seg"):
        with contextlib.suppress(FileNotFoundError):  # the keeper deletes what was released
            size += path.stat().st_size
    return size


async def test_away_for_longer_than_every_lease_nothing_is_presumed_dead(tenant: str, tmp_path: Path) -> None:
    with running_server() as server:
        async with await connect(server.url, name="test") as bus:
            await bus.ensure(topology.base())
            async with collector(bus, server.url, tenant, tmp_path, start=False) as rig:
                await hasty(rig)
                gate, printed = tmp_path / "gate", tmp_path / "printed"
                run = await rig.begin(f"one\n!wait_file {gate}\n!flood 500\n!touch {printed}\n!ask write\ntwo")
                await run.until("text.completed", text="one")
                server.kill()
                away_s, [folder] = time.monotonic(), rig.keeper_folders()
                gate.touch()

                async def worked_on_beyond_the_leases() -> bool:
                    return printed.exists() and time.monotonic() - away_s > 2.5

                await eventually(worked_on_beyond_the_leases, "the agent's work without NATS")
                assert keeper_lives(folder)
                server.start()
                asked = await run.until("interaction.requested")
                await eventually(lambda: registered(rig), "the registration that had expired")
                payload = {"interaction": asked.body["interaction"], "decision": "allow"}
                await rig.ask("answer", target=run.target, payload=payload)
                assert (await run.ended()).body["outcome"] == "completed"
                run.check_whole()
                assert not run.of("gap")


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_spool_at_its_quota_lets_the_agent_work_on_and_what_went_is_a_recorded_gap(
    tenant: str, tmp_path: Path, restarted: bool
) -> None:
    small = {"TETHER_SPOOL_BYTES_MAX": str(MIB), "TETHER_SPOOL_SEGMENT_BYTES": "65536"}
    with running_server() as server:
        async with await connect(server.url, name="test") as bus:
            await bus.ensure(topology.base())
            async with collector(bus, server.url, tenant, tmp_path, environment=small) as rig:
                gate, printed = tmp_path / "gate", tmp_path / "printed"
                run = await rig.begin(f"one\n!wait_file {gate}\n!flood 35000\n!touch {printed}\n!ask write\ntwo")
                await run.until("text.completed", text="one")
                server.kill()
                gate.touch()
                largest = 0

                async def printed_all() -> bool:
                    nonlocal largest
                    largest = max(largest, spool_bytes(rig))
                    return printed.exists()

                await eventually(printed_all, "the agent's work beyond the quota")
                assert largest <= MIB + 256 * 1024
                if restarted:
                    await eventually(lambda: released(rig), "the release")
                    await rig.kill()
                    await rig.start(ready=False)
                server.start()
                await finish(rig, run)


async def test_a_collector_killed_and_started_anew_while_nats_is_away_tells_everything_once(
    tenant: str, tmp_path: Path
) -> None:
    with running_server() as server:
        async with await connect(server.url, name="test") as bus:
            await bus.ensure(topology.base())
            async with collector(bus, server.url, tenant, tmp_path) as rig:
                gate, printed = tmp_path / "gate", tmp_path / "printed"
                run = await rig.begin(
                    f"one\n!wait_file {gate}\n!tool write\n!flood 3000\n!touch {printed}\n!ask write\ntwo"
                )
                await run.until("text.completed", text="one")
                [folder] = rig.keeper_folders()
                server.kill()
                gate.touch()
                for _ in range(2):  # and once more, while the first successor waits for its base
                    await rig.kill()
                    await rig.start(ready=False)

                async def worked_on() -> bool:
                    return printed.exists()

                await eventually(worked_on, "the agent's work without NATS and through two collectors")
                assert keeper_lives(folder)
                server.start()
                asked = await run.until("interaction.requested")
                payload = {"interaction": asked.body["interaction"], "decision": "allow"}

                async def answered() -> bool:
                    reply = await rig.ask("answer", target=run.target, payload=payload, control="ctl_1")
                    return reply.status in ("delivered", "settled")

                await eventually(answered, "an answer that is taken")
                assert (await run.ended()).body["outcome"] == "completed"
                run.check_whole()
                assert not run.of("gap") and len(run.of("execution.started")) == 1


async def test_a_collector_without_its_base_keeps_the_quota_and_its_agent_waits_for_nats(
    tenant: str, tmp_path: Path
) -> None:
    small = {"TETHER_SPOOL_BYTES_MAX": str(MIB), "TETHER_SPOOL_SEGMENT_BYTES": "65536"}
    with running_server() as server:
        async with await connect(server.url, name="test") as bus:
            await bus.ensure(topology.base())
            async with collector(bus, server.url, tenant, tmp_path, environment=small) as rig:
                gate, printed = tmp_path / "gate", tmp_path / "printed"
                run = await rig.begin(f"one\n!wait_file {gate}\n!flood 35000\n!touch {printed}\ntwo")
                await run.until("text.completed", text="one")
                server.kill()
                await rig.kill()
                await rig.start(ready=False)
                gate.touch()
                before = -1

                async def stands_still_at_the_quota() -> bool:
                    nonlocal before
                    await asyncio.sleep(0.5)  # one look to the next: what still grows has grown by then
                    before, now = spool_bytes(rig), before
                    return before == now and before > MIB // 2

                await eventually(stands_still_at_the_quota, "a spool that is full")
                assert before <= MIB + 256 * 1024 and not printed.exists()
                server.start()
                assert (await run.ended()).body["outcome"] == "completed"
                run.check_whole()
                assert printed.exists() and not run.of("gap")


async def released(rig: Rig) -> bool:
    return bool(rig.lines("spool_released_untold"))


async def finish(rig: Rig, run: Run) -> None:
    """The rest of the execution, whose log is a chain that says what is missing."""
    asked = await run.until("interaction.requested")
    payload = {"interaction": asked.body["interaction"], "decision": "allow"}

    async def answered() -> bool:
        reply = await rig.ask("answer", target=run.target, payload=payload, control="ctl_1")
        return reply.status in ("delivered", "settled")

    await eventually(answered, "an answer that is taken")
    assert (await run.ended()).body["outcome"] == "completed"
    assert len(run.of("text.completed", text="two")) == 1
    assert run.of("gap", reason="spool_evicted")
    for gap in run.of("gap", reason="spool_evicted"):
        assert gap.body["from"] == gap.ordinal and gap.body["to"] == gap.end
    assert (await run.snapshot()).completeness == "partial"


async def test_a_network_that_stalls_without_closing_is_replaced_within_seconds(tenant: str, tmp_path: Path) -> None:
    with running_server() as server:
        async with await connect(server.url, name="test") as bus, running_proxy(server.port) as proxy:
            await bus.ensure(topology.base())
            url = f"nats://127.0.0.1:{proxy.port}"
            async with collector(bus, url, tenant, tmp_path) as rig:
                gate = tmp_path / "gate"
                run = await rig.begin(f"one\n!wait_file {gate}\n!flood 500\ntwo")
                await run.until("text.completed", text="one")
                before = proxy.connections
                proxy.hold()
                gate.touch()

                async def another() -> bool:
                    return proxy.connections > before

                began_s = time.monotonic()
                await eventually(another, "another connection")
                assert time.monotonic() - began_s < 15.0
                proxy.release()
                assert (await run.ended()).body["outcome"] == "completed"
                run.check_whole()
                assert not run.of("gap")
