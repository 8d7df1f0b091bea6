"""A start, delivered again at any step: one process, one log, one receipt (or a named refusal and none)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support_nats import NatsServer
from support_shell import Rig, Run, collector, eventually
from tether import frames, ids, subjects
from tether.bus import NatsBus
from tether.control import ControlReply
from tether.errors import BusError, NoReplyError
from tether.events import Event
from tether.frames import Frame, Position

STEPS = ("journaled", "claimed", "claim_journaled", "redaction_noted", "spawned", "spawn_journaled")


async def delivered(rig: Rig, run: Run) -> ControlReply:
    """Deliver the start until it has an answer, as the agent service does."""

    async def answered() -> ControlReply | None:
        try:
            reply = await rig.ask_start(run, timeout_s=2.0)
        except BusError:
            return None
        return None if reply.problem is not None and reply.problem.retryable else reply

    reply: ControlReply = await eventually(answered, "an answer to the start")
    return reply


@pytest.mark.parametrize("step", STEPS)
async def test_a_start_redelivered_after_a_crash_at_any_step_makes_one_process(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, step: str
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path, start=False) as rig:
        await rig.start(crash_at=step)
        run = await rig.admit("hello\n!tool once")
        with pytest.raises(NoReplyError):
            await rig.ask_start(run, timeout_s=1.0)
        assert await rig.exited() == 77
        await rig.start()
        replies = [await delivered(rig, run), await delivered(rig, run)]
        assert {reply.status for reply in replies} <= {"accepted", "delivered", "settled"}
        assert (await run.ended()).body["outcome"] == "completed"
        run.check_whole()
        assert (await rig.ask("receipt", payload={"control": run.command.control})).status == "settled"
        assert len((rig.truth / "ledger.ndjson").read_text().splitlines()) == 1


@pytest.mark.parametrize("step", STEPS)
async def test_a_collector_that_crashed_in_a_start_goes_on_without_a_redelivery(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, step: str
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path, start=False) as rig:
        await rig.start(crash_at=step)
        run = await rig.admit("hello")
        with pytest.raises(NoReplyError):
            await rig.ask_start(run, timeout_s=1.0)
        assert await rig.exited() == 77
        await rig.start()
        assert (await run.ended()).body["outcome"] == "completed"
        run.check_whole()


async def test_starts_delivered_at_once_make_one_process(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.admit("hello")
        replies = await asyncio.gather(*(rig.ask_start(run) for _ in range(5)))
        assert {reply.status for reply in replies} <= {"delivered", "settled"}
        await run.ended()
        run.check_whole()
        late = await rig.ask_start(run)
        assert late.status == "settled" and len(run.processes()) == 1


async def test_a_start_with_another_payload_is_a_conflict(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.begin("hello\n!sleep 0.2")
        changed = run.command.model_copy(update={"request_id": "req_other"})
        reply = await rig.ask_start(Run(rig, changed))
        assert reply.problem is not None and reply.problem.code == "REQUEST_CONFLICT"
        other_control = changed.model_copy(update={"control": "ctl_other"})
        reply = await rig.ask_start(Run(rig, other_control))
        assert reply.problem is not None and reply.problem.code == "REQUEST_CONFLICT"
        await run.ended()
        run.check_whole()


async def test_a_start_is_refused_while_a_process_of_the_conversation_lives(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        gate = tmp_path / "gate"
        first = await rig.begin(f"hello\n!wait_file {gate}")
        second = await rig.admit("!say again")
        reply = await rig.ask_start(second)
        assert reply.problem is not None and reply.problem.code == "SESSION_BUSY" and reply.problem.retryable
        gate.touch()
        await first.ended()
        assert (await delivered(rig, second)).status in ("delivered", "settled")
        assert (await second.ended()).body["outcome"] == "completed"
        second.check_whole()


async def test_a_start_that_the_owner_record_does_not_name_is_stale(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        older = await rig.admit("older")
        newer = await rig.admit("newer")
        reply = await rig.ask_start(older)
        assert reply.problem is not None and reply.problem.code == "TARGET_STALE"
        await older.fetch()
        assert older.frames == [] and not older.processes()
        assert (await rig.ask_start(newer)).status in ("delivered", "settled")
        await newer.ended()


async def append(run: Run, kind: str, body: dict[str, Any]) -> None:
    """Another's first message on the execution's subject."""
    frame = Frame(
        first=1, last=1, pos=Position(record=0, index=0), events=[Event(ordinal=1, at=1, type=kind, body=body)]
    )
    await run.rig.bus.publish(run.subject, frames.encode(frame), expect_last=0)


async def test_a_start_that_was_given_up_is_never_spawned(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.admit("hello")
        await append(run, "execution.ended", {"outcome": "never_started"})
        reply = await rig.ask_start(run)
        assert reply.status == "rejected" and reply.problem is not None and reply.problem.code == "TARGET_STALE"
        again = await rig.ask_start(run)
        assert again.status == "rejected"
        assert not rig.keeper_folders()
        await run.fetch()
        assert len(run.frames) == 1


@pytest.mark.parametrize(("boot", "outcome"), [("", "lost"), ("boot_other", None)])
async def test_a_claim_without_a_journal_is_never_spawned(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path, boot: str, outcome: str | None
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.admit("hello")
        claim = {
            "boot": boot or rig.boot,
            "instance": "ins_gone",
            "process": 1,
            "target": run.target.model_dump(mode="json"),
            "agent": "scripted",
            "request": run.command.request_id,
            "adapter_version": "1",
        }
        await append(run, "execution.started", claim)
        reply = await rig.ask_start(run)
        assert reply.status == "rejected"
        assert not rig.keeper_folders()
        await run.fetch()
        ends = [event.body["outcome"] for event in run.of("execution.ended")]
        assert ends == ([] if outcome is None else [outcome])
        run.check_chain()


async def test_a_start_for_another_sandbox_or_an_unknown_agent_is_refused_by_name(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        run = await rig.admit("hello")
        elsewhere = run.command.model_copy(
            update={"target": run.target.model_copy(update={"sandbox": ids.sandbox_id(tenant, "w2")})}
        )
        reply = await rig.ask_start(Run(rig, elsewhere))
        assert reply.problem is not None and reply.problem.code == "TARGET_UNKNOWN"
        for kind, code in (("claude", "CAPABILITY_MISSING"), ("nobody", "INVALID")):
            agent = run.command.agent.model_copy(update={"kind": kind})
            reply = await rig.ask_start(Run(rig, run.command.model_copy(update={"agent": agent})))
            assert reply.problem is not None and reply.problem.code == code
        assert not rig.keeper_folders()


HOSTILE = (
    ("stop", b"\xff\xfe"),
    ("stop", b"[]"),
    ("stop", b'{"v": 9, "control": "a", "verb": "stop"}'),
    ("stop", b'{"control": "../x", "verb": "stop"}'),
    ("stop", b'{"control": "a", "verb": "interrupt"}'),
    ("stop", b'{"control": "a", "verb": "stop"}'),
    ("stop", b'{"control": "a", "verb": "stop", "payload": {"x": NaN}}'),
    ("stop", b"{" * 5000),
    ("stop", b'{"control": "a", "verb": "stop", "payload": {"x": "' + b"x" * 700_000 + b'"}}'),
    ("start", b'{"control": "a", "verb": "start", "payload": {}}'),
    ("answer", b'{"control": "a", "verb": "answer", "surprise": 1}'),
    ("receipt", b'{"control": "a", "verb": "receipt", "payload": {"control": 7}}'),
    ("discover", b'{"control": "a", "verb": "discover", "payload": {"conversation": "a.>"}}'),
    ("snapshot", b'{"control": "a", "verb": "snapshot"}'),
)


async def test_hostile_requests_get_a_typed_error_that_names_the_field(
    bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    async with collector(bus, nats_server.url, tenant, tmp_path) as rig:
        for verb, data in HOSTILE:
            answer = await bus.request(subjects.control(tenant, rig.workspace, verb), data, timeout_s=5.0)
            reply = ControlReply.model_validate_json(answer.data)
            assert reply.status == "rejected" and reply.problem is not None, data[:80]
            assert reply.problem.code == "INVALID" and reply.problem.fields[0].field, data[:80]
        run = await rig.begin("hello")
        assert (await run.ended()).body["outcome"] == "completed"
