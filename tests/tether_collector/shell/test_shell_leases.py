"""User-driven controls and the control lease: the collector takes what the lease's holder sends, nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support_nats import NatsServer, running_server
from support_shell import Rig, Run, collector
from tether import subjects, topology
from tether.bus import NatsBus, connect
from tether.control import Authority, ControlReply, ControlRequest
from tether.control_lease import ControlLeases
from tether.errors import Code, ProblemError
from tether.kv import Bucket


@asynccontextmanager
async def asking(bus: NatsBus, server: NatsServer, tenant: str, root: Path) -> AsyncIterator[tuple[Rig, Run, Any]]:
    """A collector whose agent waits for an approval; the interaction's id."""
    async with collector(bus, server.url, tenant, root) as rig:
        run = await rig.begin("!ask write\nafter")
        asked = await run.until("interaction.requested")
        yield rig, run, asked.body["interaction"]
        await rig.ask("stop", target=run.target)
        await run.ended()


def answer(run: Run, interaction: str, control: str = "ctl_a") -> ControlRequest:
    payload = {"interaction": interaction, "decision": "allow"}
    return ControlRequest(control=control, verb="answer", target=run.target, payload=payload)


def code_of(reply: ControlReply) -> Code | None:
    return None if reply.problem is None else reply.problem.code


async def test_a_control_without_a_lease_is_refused_and_harms_nothing(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with asking(bus, nats_server, tenant, tmp_path) as (rig, run, interaction):
        request = answer(run, interaction)
        refused = await rig.ask(
            "answer", target=run.target, payload=request.payload, control="ctl_a", authority=Authority()
        )
        assert (refused.status, code_of(refused)) == ("rejected", Code.LEASE_NOT_READY)
        assert refused.problem is not None and refused.problem.retryable and refused.problem.retry_after_s
        assert [event.body for event in run.events if event.type == "control.receipt"] == []
        leases = ControlLeases(bus, "backend")
        assert (await leases.ask(request)).status in ("delivered", "settled"), "the same control, with a lease"
        await leases.close()


async def test_c7_a_holder_that_was_frozen_beyond_its_lease_is_refused_when_it_wakes(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with asking(bus, nats_server, tenant, tmp_path) as (rig, run, interaction):
        frozen, other = ControlLeases(bus, "frozen"), ControlLeases(bus, "other", idle_s=30)
        async with frozen.authority(run.target) as stale:
            taken = await rig.lease(run.target, "other-backend")  # the frozen one's lease expired, another acquired it
            assert taken.token > stale.token
            payload = answer(run, interaction).payload
            late = await rig.ask("answer", target=run.target, payload=payload, authority=stale)
            assert code_of(late) == Code.LEASE_NOT_READY
            await rig.ask("interrupt", target=run.target, authority=taken)
            entry = await Bucket(bus, subjects.LEASES).get(subjects.lease_key(tenant, "w1", "c1"))
            assert entry is not None
            await Bucket(bus, subjects.LEASES).delete(entry.key, revision=entry.revision)
            again = await rig.ask("answer", target=run.target, payload=payload, authority=stale)
            assert code_of(again) == Code.LEASE_NOT_READY, "nor when nobody holds it any more"
        await frozen.close()
        await other.close()


async def test_a_lease_that_the_collector_refused_is_acquired_anew_and_the_control_counts_once(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with asking(bus, nats_server, tenant, tmp_path) as (_, run, interaction):
        leases, bucket = ControlLeases(bus, "backend"), Bucket(bus, subjects.LEASES)
        async with leases.authority(run.target):
            pass
        entry = await bucket.get(subjects.lease_key(tenant, "w1", "c1"))
        assert entry is not None
        await bucket.delete(entry.key, revision=entry.revision)  # as if it had expired unnoticed
        reply = await leases.ask(answer(run, interaction))
        assert reply.status in ("delivered", "settled")
        await run.until("tool.completed")
        assert len([event for event in run.events if event.type == "interaction.resolved"]) == 1
        await leases.close()


async def test_another_process_waits_for_its_turn_and_says_after_how_long_to_come_back(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with asking(bus, nats_server, tenant, tmp_path) as (_, run, interaction):
        first = ControlLeases(bus, "first", idle_s=0.5)
        hasty = ControlLeases(bus, "hasty", wait_s=0.3)
        patient = ControlLeases(bus, "patient")
        async with first.authority(run.target) as held:
            with pytest.raises(ProblemError) as refused:
                await hasty.ask(answer(run, interaction))
            assert refused.value.problem.code == Code.LEASE_NOT_READY
            assert refused.value.problem.retry_after_s is not None
        reply = await patient.ask(answer(run, interaction))
        assert reply.status in ("delivered", "settled")
        async with patient.authority(run.target) as now:
            assert now.token > held.token
        await first.close()
        await hasty.close()
        await patient.close()
        assert await Bucket(bus, subjects.LEASES).get(subjects.lease_key(tenant, "w1", "c1")) is None, "released"


async def test_controls_count_again_where_the_leases_bucket_was_made_anew(tenant: str, tmp_path: Path) -> None:
    with running_server() as server:
        async with await connect(server.url, name="backend") as bus:
            await bus.ensure(topology.base())
            bucket = Bucket(bus, subjects.LEASES)
            for number in range(20):  # so that what counts anew counts far below
                await bucket.create(f"control.{tenant}.w.c{number}", {"holder": "another"}, op="test")
            async with asking(bus, server, tenant, tmp_path) as (rig, run, interaction):
                leases = ControlLeases(bus, "backend", idle_s=0.2)
                told = {"request": "q2", "content": [{"type": "text", "text": "more"}]}
                request = ControlRequest(control="ctl_i", verb="interject", target=run.target, payload=told)
                assert (await leases.ask(request)).status in ("delivered", "settled")
                async with leases.authority(run.target) as before:
                    pass
                await bus.request(f"$JS.API.STREAM.DELETE.KV_{subjects.LEASES}", b"", timeout_s=5)
                await bus.ensure(topology.base())
                reply = await leases.ask(answer(run, interaction))
                assert reply.status in ("delivered", "settled"), reply
                async with leases.authority(run.target) as after:
                    assert after.token > before.token
                    late = await rig.ask("interrupt", target=run.target, authority=before)
                    assert code_of(late) == Code.LEASE_NOT_READY, "and a stale proof is still refused"
                await leases.close()
