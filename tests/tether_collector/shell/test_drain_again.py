"""D1, D3, D10: a drain after a drain loses nothing of what the first one cut, nor what was sent and not read."""

from __future__ import annotations

from pathlib import Path

from support_drain import an_order, ask_drain, drained, manifest_of, of_conversation, reference_of
from support_nats import NatsServer
from support_shell import Rig, Run, collector
from tether.bus import NatsBus
from tether.checkpoint import UNHEARD_CHARS_MAX, UnheardMessage

BUSY = "ready\n!tool build 60000"


async def busy(rig: Rig, conversation: str = "cut") -> Run:
    run = await rig.begin(BUSY, conversation=conversation, continuation="continue")
    await run.until("tool.started")
    return run


async def test_d3_a_drain_after_sigterms_own_tells_of_what_that_one_cut(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    environment = {"TETHER_COLLECTOR_DRAIN_GRACE_S": "4"}
    async with collector(bus, nats_server.url, tenant, tmp_path, environment=environment) as rig:
        run = await busy(rig)
        assert await rig.terminate() == 0
        assert (await run.ended()).body["outcome"] == "drained"
        first = await reference_of(rig)
        await rig.start()
        report = await drained(rig, an_order())
        assert (report.state, report.executions) == ("done", first.executions)
        one = of_conversation(report, "cut")
        assert (one.cut, one.interrupted, one.continuation) == (True, ("build",), "continue")
        reference = await reference_of(rig)
        assert reference.checkpoint != first.checkpoint and reference.executions == report.executions
        assert (await manifest_of(rig)).executions == report.executions
        assert await rig.exited() == 0


async def test_d5_a_drain_after_one_that_failed_has_what_that_one_cut_but_for_who_went_on_since(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    environment = {"TETHER_COLLECTOR_CHECKPOINT_WAIT_S": "0.5"}
    async with collector(bus, nats_server.url, tenant, tmp_path, environment=environment) as rig:
        cut, went_on = await busy(rig), await busy(rig, "went_on")
        await bus.delete_stream(f"BLOBS_{tenant}")
        failed = await drained(rig, an_order(store="blobs", grace_s=1.0))
        assert failed.state == "failed"
        await cut.ended()
        await went_on.ended()
        again = await rig.begin("hello", conversation="went_on")
        await again.ended()
        conflict = await ask_drain(rig, an_order(grace_s=3.0))
        assert conflict.problem is not None and conflict.problem.code == "REQUEST_CONFLICT"
        assert conflict.problem.detail.startswith("drain_id: drn_1")
        report = await drained(rig, an_order("drn_2"))
        assert report.state == "done", report
        one = of_conversation(report, "cut")
        assert (one.cut, one.outcome, one.interrupted) == (True, "graceful", ("build",))
        assert [each.target.conversation for each in report.executions if each.cut] == ["cut"]


async def test_d13_messages_that_an_agent_had_queued_are_told_when_its_turn_is_cut(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await busy(rig)
        long = "y" * (UNHEARD_CHARS_MAX + 1)
        for request, text in (("req_2", "look at the tests"), ("req_3", long)):
            payload = {"request": request, "content": [{"type": "text", "text": text}]}
            reply = await rig.ask("interject", target=run.target, payload=payload)
            assert reply.status in ("delivered", "settled"), reply
        report = await drained(rig, an_order(grace_s=1.0))
        assert of_conversation(report, "cut").unheard == (
            UnheardMessage(request="req_2", text="look at the tests"),
            UnheardMessage(request="req_3", text=long[:-1], cut=True),
        )
        assert (await reference_of(rig)).executions == report.executions
        await run.ended()
        run.check_whole()


async def test_a_message_that_the_agent_took_up_is_not_told_again(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        gate = tmp_path / "gate"
        run = await rig.begin(f"ready\n!wait_file {gate}", conversation="cut")
        await run.until("text.completed")
        payload = {"request": "req_2", "content": [{"type": "text", "text": BUSY}]}
        await rig.ask("interject", target=run.target, payload=payload)
        gate.touch()
        await run.until("tool.started")
        report = await drained(rig, an_order(grace_s=1.0))
        one = of_conversation(report, "cut")
        assert one.cut and one.unheard == () and one.unheard_more == 0
