"""Commands driven to receipts: real bus, real processes, a collector of few lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from support_agent import Conversation, agent_service, conversation, settings_for, until
from support_collector import claim_frame
from support_nats import NatsServer
from tether import frames, owner, subjects
from tether.bus import NatsBus
from tether.control import StartCommand
from tether.errors import Code, problem
from tether.kv import Bucket
from tether.limits import COMMAND_ACK_WAIT_S
from tether.sandbox import SandboxRecord
from tether_agent import log
from tether_agent.config import AgentSettings
from tether_agent.providers import NotReadyError


def workspace_of(settings: AgentSettings, talk: Conversation) -> Path:
    path = settings.agent_workspaces_dir / talk.tenant / talk.workspace
    path.mkdir(parents=True, exist_ok=True)
    return path


def starts(settings: AgentSettings, talk: Conversation) -> list[dict[str, Any]]:
    path = workspace_of(settings, talk) / "starts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def claim(bus: NatsBus, command: StartCommand) -> None:
    target = command.target
    subject = subjects.event(target.tenant, target.workspace, target.conversation, target.execution)
    await bus.publish(subject, frames.encode(claim_frame(command, "boot_x")), expect_last=0)


@pytest.fixture
async def talk(bus: NatsBus, tenant: str) -> Conversation:
    return await conversation(bus, tenant)


async def test_a_command_starts_a_sandbox_and_is_acked_with_the_collectors_receipt(
    bus: NatsBus, settings: AgentSettings, talk: Conversation
) -> None:
    command = await talk.admit()
    async with agent_service(settings, bus):
        await talk.send(command)
        await until(talk.queue_empty, "ack of the command")
    assert await talk.execution(command) == ["execution.started"]
    [start] = starts(settings, talk)
    entry = await Bucket(bus, subjects.SANDBOXES).get(subjects.sandbox_key(talk.tenant, talk.workspace))
    assert entry is not None
    record = SandboxRecord.model_validate(entry.value)
    assert (record.state, record.starts, record.provider) == ("active", 1, "local")
    assert start["authority"] == {"kind": "sandbox", "holder": "agent-service", "token": entry.revision}
    assert start["control"] == command.control


async def test_every_forwarded_start_moves_the_sandbox_record_on(
    bus: NatsBus, settings: AgentSettings, talk: Conversation
) -> None:
    other = Conversation(bus, talk.tenant, "c2")
    async with agent_service(settings, bus):
        for number, each in enumerate((talk, other)):
            await each.send(await each.admit(f"req_{number}"))
        await until(talk.queue_empty, "ack of both commands")
    seen = starts(settings, talk)
    tokens = [start["authority"]["token"] for start in seen]
    assert len(set(tokens)) == 2
    assert len({start["pid"] for start in seen}) == 1


async def test_a_start_that_gets_no_answer_is_asked_again_with_the_same_control_id(
    bus: NatsBus, settings: AgentSettings, talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tether_agent.drive.CONTROL_REPLY_S", 0.3)
    (workspace_of(settings, talk) / "fake.json").write_text('{"mute": 2}')
    command = await talk.admit()
    async with agent_service(settings, bus):
        await talk.send(command)
        await until(talk.queue_empty, "ack of the command")
    assert [start["control"] for start in starts(settings, talk)] == [command.control] * 3
    assert await talk.execution(command) == ["execution.started"]


async def test_a_busy_collector_is_asked_until_it_takes_the_start(
    bus: NatsBus, settings: AgentSettings, talk: Conversation
) -> None:
    fake = workspace_of(settings, talk) / "fake.json"
    fake.write_text('{"reject": "SESSION_BUSY"}')
    command = await talk.admit()

    async def refused_twice() -> bool:
        return len(starts(settings, talk)) >= 2

    async with agent_service(settings, bus):
        await talk.send(command)
        await until(refused_twice, "a second try")
        assert await talk.execution(command) == []
        fake.unlink()
        await until(talk.queue_empty, "ack of the command")
    assert await talk.execution(command) == ["execution.started"]
    assert await talk.told() == []


async def test_a_start_refused_for_good_ends_never_started_and_then_fails_once(
    bus: NatsBus, settings: AgentSettings, talk: Conversation
) -> None:
    (workspace_of(settings, talk) / "fake.json").write_text('{"reject": "INVALID"}')
    command = await talk.admit()
    async with agent_service(settings, bus):
        await talk.send(command)
        await until(talk.queue_empty, "ack of the command")
    assert await talk.execution(command) == ["response.ended", "execution.ended"]
    [failed] = await talk.told()
    assert failed.id == f"{command.request_id}/response.failed"
    assert failed.generation == command.target.response_generation
    assert (failed.body["code"], failed.body["detail"]) == ("INVALID", "refused by the test")


async def test_a_collector_that_refuses_its_configuration_fails_the_response(
    bus: NatsBus, settings: AgentSettings, talk: Conversation
) -> None:
    (workspace_of(settings, talk) / "fake.json").write_text('{"exit": 78}')
    command = await talk.admit()
    async with agent_service(settings, bus):
        await talk.send(command)
        await until(talk.queue_empty, "ack of the command")
    assert await talk.execution(command) == ["response.ended", "execution.ended"]
    [failed] = await talk.told()
    assert failed.body["code"] == "RUNTIME_UNAVAILABLE"
    assert "collector.log" in failed.body["detail"]


async def test_a_late_command_after_everything_is_over_starts_nothing(
    bus: NatsBus, settings: AgentSettings, talk: Conversation
) -> None:
    command = await talk.admit()
    await talk.change_owner(owner.Ended(command.target.execution, "completed", proved=True, at=2))
    async with agent_service(settings, bus) as provider:
        await talk.send(command)
        await until(talk.queue_empty, "ack of the command")
        assert provider.statuses() == []
    assert await talk.execution(command) == []


async def test_a_redelivered_command_whose_claim_is_in_the_log_asks_nobody(
    bus: NatsBus, settings: AgentSettings, talk: Conversation
) -> None:
    command = await talk.admit()
    await claim(bus, command)
    async with agent_service(settings, bus) as provider:
        await talk.send(command)
        await until(talk.queue_empty, "ack of the command")
        assert provider.statuses() == []


async def test_a_crash_between_the_end_and_the_failure_is_made_good(
    bus: NatsBus, settings: AgentSettings, talk: Conversation
) -> None:
    command = await talk.admit()
    failure = problem(Code.CAPABILITY_MISSING, "no such agent")
    stored = await log.store_never_started(bus, command, failure, now_ms=1)
    assert stored.state == "never_started"
    await talk.change_owner(owner.Ended(command.target.execution, "never_started", proved=True, at=2))
    async with agent_service(settings, bus):
        await talk.send(command)
        await until(talk.queue_empty, "ack of the command")
    [failed] = await talk.told()
    assert (failed.body["code"], failed.body["detail"]) == ("CAPABILITY_MISSING", "no such agent")


async def test_a_takeover_before_the_start_gets_its_proof_and_nothing_runs(
    bus: NatsBus, settings: AgentSettings, talk: Conversation
) -> None:
    command = await talk.admit()
    await talk.change_owner(owner.TakeOver(command.target.execution, "ctl_stop", "req_2", at=2))
    async with agent_service(settings, bus) as provider:
        await talk.send(command)
        await until(talk.queue_empty, "ack of the command")
        assert provider.statuses() == []
    assert await talk.execution(command) == ["response.ended", "execution.ended"]
    assert await talk.told() == []


async def test_of_a_claim_and_a_giving_up_exactly_one_is_stored(bus: NatsBus, talk: Conversation) -> None:
    command = await talk.admit()
    await claim(bus, command)
    lost = await log.store_never_started(bus, command, problem(Code.INVALID, "x"), now_ms=1)
    assert lost.state == "claimed"
    assert await talk.execution(command) == ["execution.started"]


async def test_a_failure_is_told_once_however_often_it_is_tried(bus: NatsBus, talk: Conversation) -> None:
    command = await talk.admit()
    for at in range(3):
        assert await log.tell_failure(bus, command, problem(Code.INVALID, "x"), now_ms=at)
    assert [event.at for event in await talk.told()] == [0]


async def test_a_command_that_nobody_can_read_leaves_the_queue(
    bus: NatsBus, settings: AgentSettings, talk: Conversation
) -> None:
    for data in (b"\xff\xfe", b'{"kind": "start"}', b"[" * 5000, b"null"):
        await bus.publish(subjects.command(talk.tenant, talk.workspace), data)
    command = await talk.admit()
    await bus.publish(subjects.command(talk.tenant, "another"), command.encode())
    async with agent_service(settings, bus) as provider:
        await until(talk.queue_empty, "end of the unreadable commands")
        elsewhere = Conversation(bus, talk.tenant, workspace="another")
        await until(elsewhere.queue_empty, "end of the command on another's subject")
        assert provider.statuses() == []


async def test_a_command_that_was_being_driven_when_the_service_ended_is_taken_up_at_once_by_the_next(
    bus: NatsBus, settings: AgentSettings, talk: Conversation
) -> None:
    (workspace_of(settings, talk) / "fake.json").write_text('{"mute": 1}')
    command = await talk.admit()

    async def asked() -> bool:
        return len(starts(settings, talk)) >= 1

    async with agent_service(settings, bus):
        await talk.send(command)
        await until(asked, "the first ask")
    async with agent_service(settings, bus):
        await until(talk.queue_empty, "ack of the command", timeout_s=8.0)
    seen = starts(settings, talk)
    assert len({start["pid"] for start in seen}) == 1, "the second service adopts the collector"
    assert await talk.execution(command) == ["execution.started"]


async def test_a_sandbox_that_starts_slower_than_every_timeout_gets_the_start_once(
    bus: NatsBus, nats_server: NatsServer, settings: AgentSettings, tmp_path: Path, talk: Conversation
) -> None:
    gate = tmp_path / "gate"
    (workspace_of(settings, talk) / "fake.json").write_text(json.dumps({"gate": str(gate)}))
    impatient = settings_for(nats_server, tmp_path, agent_ready_wait_s=0.05)
    command = await talk.admit()
    async with agent_service(impatient, bus) as provider:
        await talk.send(command)

        async def collector_lives() -> bool:
            return any(status.alive for status in provider.statuses())

        await until(collector_lives, "the start of the collector")
        with pytest.raises(NotReadyError):
            await provider.ensure(talk.tenant, talk.workspace)
        assert await talk.execution(command) == []
        assert await talk.told() == []
        gate.write_text("")
        await until(talk.queue_empty, "ack of the command")
    assert len(starts(settings, talk)) == 1
    assert await talk.execution(command) == ["execution.started"]


async def test_a_command_that_a_killed_predecessor_had_in_hand_is_driven_at_once_and_started_once(
    bus: NatsBus, settings: AgentSettings, talk: Conversation
) -> None:
    command = await talk.admit()
    await talk.send(command)
    in_hand = bus.jobs(subjects.COMMANDS_STREAM, subjects.AGENT_DURABLE)
    async with contextlib.aclosing(in_hand) as jobs:
        await anext(jobs)  # given, and never settled: nothing brings it back for COMMAND_ACK_WAIT_S
        async with asyncio.timeout(COMMAND_ACK_WAIT_S - 1), agent_service(settings, bus):

            async def started() -> bool:
                return await talk.execution(command) == ["execution.started"]

            await until(started, "start of a command in a dead process's hand")
    assert len(starts(settings, talk)) == 1
