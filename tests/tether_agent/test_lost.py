"""A sandbox that is proven gone: told by a recovery collector, or closed without its volume; never by a timeout."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support_agent import Conversation, agent_service, conversation, provider_for, settings_for, until
from support_nats import NatsServer
from tether import events, frames, subjects
from tether.bus import NatsBus
from tether.control import StartCommand
from tether.events import Event
from tether.frames import Frame
from tether.ids import ExecutionTarget
from tether.processes import is_running, send_signal
from tether.prompt import TextContent
from tether_agent.agents import AgentConfig, AgentsFile, Environment
from tether_agent.config import AgentSettings
from tether_agent.core.lost import Close, Look, Lost, Tell, Wait, decide
from tether_agent.drive import Driver
from tether_agent.providers import NotReadyError, leftovers, procfs, sandbox_file
from tether_agent.providers import lost as lost_executions
from tether_agent.providers.local import LocalProvider
from tether_agent.providers.sandbox_file import SandboxFile

PROOF = "no process is left"


def test_no_time_replaces_the_proof_and_the_wait_begins_with_it() -> None:
    state, seen = decide(Lost(), Look(0.0, volume=False, proof=None), 10.0)
    state, seen = decide(state, Look(1e9, volume=False, proof=None), 10.0)
    assert isinstance(seen, Wait)
    state, seen = decide(state, Look(1e9, volume=False, proof=PROOF), 10.0)
    assert isinstance(seen, Wait)
    state, seen = decide(state, Look(1e9 + 9.9, volume=False, proof=PROOF), 10.0)
    assert isinstance(seen, Wait)
    assert decide(state, Look(1e9 + 10.0, volume=False, proof=PROOF), 10.0)[1] == Close(PROOF)


def test_a_proof_that_is_lost_again_begins_the_wait_anew() -> None:
    state, _ = decide(Lost(), Look(0.0, volume=False, proof=PROOF), 10.0)
    state, _ = decide(state, Look(9.0, volume=False, proof=None), 10.0)
    state, seen = decide(state, Look(11.0, volume=False, proof=PROOF), 10.0)
    assert isinstance(seen, Wait)


def test_a_volume_that_is_back_is_told_whatever_was_decided_before() -> None:
    assert decide(Lost(1.0), Look(99.0, volume=True, proof=PROOF), 10.0)[1] == Tell()
    assert decide(Lost(), Look(99.0, volume=True, proof=None, closed=True), 10.0)[1] == Tell()
    assert isinstance(decide(Lost(), Look(99.0, volume=False, proof=PROOF, closed=True), 0.0)[1], Wait)


# --- closing in the log ---


async def stored(bus: NatsBus, target: ExecutionTarget) -> list[Event]:
    subject = subjects.event(target.tenant, target.workspace, target.conversation, target.execution)
    found: list[Event] = []
    after = 0
    while batch := await bus.read(subjects.events_stream(target.tenant), after, subject):
        for message in batch:
            frame = frames.decode(message.subject, message.data)
            assert isinstance(frame, Frame)
            found += frame.events
            after = message.sequence
    return found


async def tell(bus: NatsBus, target: ExecutionTarget, *told: tuple[str, dict[str, Any]]) -> None:
    """Frames of a collector, one per event."""
    subject = subjects.event(target.tenant, target.workspace, target.conversation, target.execution)
    for kind, body in told:
        last = await bus.last(subjects.events_stream(target.tenant), subject)
        ordinal = len(await stored(bus, target)) + 1
        event = Event(ordinal=ordinal, at=1, type=kind, body=body)
        frame = Frame(first=ordinal, last=ordinal, pos=frames.Position(record=ordinal, index=0), events=[event])
        await bus.publish(subject, frames.encode(frame), expect_last=0 if last is None else last.sequence)


@pytest.fixture
async def talk(bus: NatsBus, tenant: str) -> Conversation:
    return await conversation(bus, tenant)


def started(command: StartCommand) -> tuple[str, dict[str, Any]]:
    body = {
        "boot": "boot_1",
        "instance": "i",
        "process": 1,
        "target": command.target.model_dump(mode="json"),
        "agent": "scripted",
        "request": command.request_id,
        "adapter_version": "1",
    }
    return events.EXECUTION_STARTED, body


async def test_closing_ends_what_is_open_in_order_with_its_proof_and_does_it_once(
    bus: NatsBus, talk: Conversation
) -> None:
    command = await talk.admit()
    asked = {"interaction": "ask_1", "kind": "approval", "name": "write"}
    await tell(bus, command.target, started(command), (events.INTERACTION_REQUESTED, asked))
    for _ in range(2):
        assert await lost_executions.close_all(bus, talk.tenant, talk.workspace, PROOF)
    told = await stored(bus, command.target)
    assert [event.type for event in told[2:]] == ["interaction.resolved", "response.ended", "execution.ended"]
    ended = told[-1].body
    assert (ended["outcome"], ended["tail"], ended["proof"]["method"]) == ("lost", "unknown", "provider")
    assert ended["proof"]["detail"] == PROOF and told[2].body == {"interaction": "ask_1", "outcome": "expired"}
    assert [event.ordinal for event in told] == [1, 2, 3, 4, 5]


async def test_a_response_that_had_ended_keeps_its_outcome(bus: NatsBus, talk: Conversation) -> None:
    command = await talk.admit()
    await tell(bus, command.target, started(command), (events.RESPONSE_ENDED, {"outcome": "completed"}))
    assert await lost_executions.close_all(bus, talk.tenant, talk.workspace, PROOF)
    told = await stored(bus, command.target)
    assert [event.type for event in told].count("response.ended") == 1
    assert told[-1].body["outcome"] == "completed" and told[-1].body["tail"] == "unknown"


async def test_an_empty_subject_is_closed_and_a_start_that_is_still_queued_is_not(
    bus: NatsBus, talk: Conversation
) -> None:
    command = await talk.admit()
    await talk.send(command)
    assert not await lost_executions.close_all(bus, talk.tenant, talk.workspace, PROOF)
    assert await stored(bus, command.target) == []
    async for job in bus.jobs(subjects.COMMANDS_STREAM, subjects.AGENT_DURABLE):
        await job.ack(confirm=True)
        if job.message.subject == subjects.command(talk.tenant, talk.workspace):
            break
    assert await lost_executions.close_all(bus, talk.tenant, talk.workspace, PROOF)
    assert [event.type for event in await stored(bus, command.target)] == ["response.ended", "execution.ended"]


# --- the provider ---


def file_of(settings: AgentSettings, tenant: str) -> SandboxFile:
    found = sandbox_file.read(settings.agent_state_dir, tenant, "w1")
    assert found is not None
    return found


async def end_process(file: SandboxFile) -> None:
    assert file.process is not None
    identity = file.process
    send_signal(identity, signal.SIGKILL)

    async def gone() -> bool:
        procfs.reap(identity.pid)
        return not is_running(identity)

    await until(gone, "the collector's end")


async def types_of(talk: Conversation, command: StartCommand) -> list[str]:
    return await talk.execution(command)


async def test_without_its_volume_a_gone_sandbox_is_closed_after_the_wait_and_can_start_anew(
    bus: NatsBus, nats_server: NatsServer, tmp_path: Path, talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tether_agent.providers.base.VOLUME_LOOK_S", 0.05)
    settings = settings_for(nats_server, tmp_path, agent_volume_wait_s=0.2)
    command = await talk.admit()
    async with agent_service(settings, bus):
        await talk.send(command)
        await until(talk.queue_empty, "ack of the command")
    await end_process(file_of(settings, talk.tenant))
    assert file_of(settings, talk.tenant).used
    shutil.rmtree(settings.agent_workspaces_dir / talk.tenant / "w1")
    async with (provider := provider_for(settings, bus)).running():

        async def closed() -> bool:
            return file_of(settings, talk.tenant).status == "lost"

        await until(closed, "the end without the volume")
        assert await types_of(talk, command) == ["execution.started", "response.ended", "execution.ended"]
        before = file_of(settings, talk.tenant).boot
        assert (await provider.ensure(talk.tenant, "w1")).boot != before
        await provider.stop(talk.tenant, "w1")


async def test_while_something_of_it_lives_nothing_is_closed_however_long_it_takes(
    bus: NatsBus, nats_server: NatsServer, tmp_path: Path, talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tether_agent.providers.base.VOLUME_LOOK_S", 0.02)
    settings = settings_for(nats_server, tmp_path, agent_volume_wait_s=0.0)
    command = await talk.admit()
    async with agent_service(settings, bus):
        await talk.send(command)
        await until(talk.queue_empty, "ack of the command")
    await end_process(file_of(settings, talk.tenant))
    shutil.rmtree(settings.agent_workspaces_dir / talk.tenant / "w1")
    looks = 0
    real = leftovers.proof_of_end

    def counted(file: SandboxFile, names: list[str]) -> str | None:
        nonlocal looks
        looks += 1
        return real(file, names)

    monkeypatch.setattr(leftovers, "proof_of_end", counted)
    async with agent_of(command) as agent:
        assert agent
        async with (provider := provider_for(settings, bus)).running():

            async def looked() -> bool:
                return looks >= 5

            await until(looked, "five looks")
            assert await types_of(talk, command) == ["execution.started"]
            with pytest.raises(NotReadyError, match="volume"):
                await provider.ensure(talk.tenant, "w1")


@asynccontextmanager
async def agent_of(command: StartCommand) -> AsyncIterator[int]:
    """A process with the marker of this execution."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        "-c",
        "import time; time.sleep(600)",
        env={"TETHER_PROCESS_NONCE": f"{command.target.execution}-0123456789abcdef"},
    )
    try:
        yield process.pid
    finally:
        process.kill()
        await process.wait()


async def test_after_a_reboot_of_the_machine_a_recovery_collector_tells_and_goes(
    bus: NatsBus, settings: AgentSettings, tenant: str
) -> None:
    async with (first := provider_for(settings, bus)).running():
        await first.ensure(tenant, "w1")
    await end_process(file_of(settings, tenant))
    sandbox_file.write(settings.agent_state_dir, replace(file_of(settings, tenant), machine_boot="an-earlier-boot"))
    async with (second := provider_for(settings, bus)).running():

        async def told() -> bool:
            return file_of(settings, tenant).status == "stopped"

        await until(told, "the recovery collector's end")
        assert not file_of(settings, tenant).recovery
        environment = settings.agent_workspaces_dir / tenant / "w1" / "recovered"
        assert environment.exists()
        await second.ensure(tenant, "w1")
        assert not file_of(settings, tenant).recovery


# --- with a real collector ---


def real_provider(settings: AgentSettings, bus: NatsBus, root: Path) -> LocalProvider:
    agents = AgentsFile(agents={"scripted": AgentConfig(command=(sys.executable, "-m", "scripted_agent"))})
    home = {"TETHER_SCRIPTED_HOME": str(root / "home"), "TETHER_SCRIPTED_TRUTH": str(root / "truth")}
    return LocalProvider(settings, agents, Environment({"scripted": home}, {}, {}), bus)


async def run_until_printed(
    settings: AgentSettings, bus: NatsBus, root: Path, talk: Conversation, text: str
) -> StartCommand:
    """An execution that is under way, in a sandbox whose agent service has gone."""
    command = (await talk.admit()).model_copy(update={"content": (TextContent(text=text),)})
    provider = real_provider(settings, bus, root)
    async with provider.running(), asyncio.TaskGroup() as group:
        driving = group.create_task(Driver(bus, provider, commands_max=4).run(), name="commands")
        await talk.send(command)

        async def shown() -> bool:
            return "text.completed" in await types_of(talk, command)

        await until(shown, "the agent's first text")
        driving.cancel()
    return command


async def end_all(settings: AgentSettings, tenant: str) -> None:
    """Collector, keepers and agents die at once."""
    file = file_of(settings, tenant)
    await end_process(file)
    for identity, _ in leftovers.keepers(Path(file.directory) / ".tether"):
        send_signal(identity, signal.SIGKILL)

    async def gone() -> bool:
        return not leftovers.keepers(Path(file.directory) / ".tether")

    await until(gone, "the keepers' end")


def segments(settings: AgentSettings, talk: Conversation) -> list[Path]:
    return list(Path(file_of(settings, talk.tenant).directory).glob(".tether/executions/*/*/spool/*.seg"))


def move(source: Path, to: Path) -> None:
    """A volume goes, or comes back in place of the empty directory."""
    if to.exists():
        to.rmdir()
    source.rename(to)


async def test_a_recovery_collector_tells_the_tail_and_the_end_of_another_boot(
    bus: NatsBus, settings: AgentSettings, talk: Conversation, tmp_path: Path
) -> None:
    command = await run_until_printed(settings, bus, tmp_path, talk, "one\n!hang")
    await end_all(settings, talk.tenant)
    sandbox_file.write(settings.agent_state_dir, replace(file_of(settings, talk.tenant), machine_boot="earlier"))
    async with real_provider(settings, bus, tmp_path).running():

        async def stopped() -> bool:
            return file_of(settings, talk.tenant).status == "stopped"

        await until(stopped, "the recovery collector's end")
    told = await stored(bus, command.target)
    assert told[-1].body["outcome"] == "lost" and told[-1].body.get("tail", "complete") == "complete"
    assert told[-1].body["proof"]["method"] == "keeper_gone"
    assert [event.ordinal for event in told] == list(range(1, len(told) + 1))


async def test_a_tail_that_is_found_later_is_salvaged_once_with_its_usage(
    bus: NatsBus, nats_server: NatsServer, tmp_path: Path, talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tether_agent.providers.base.VOLUME_LOOK_S", 0.05)
    settings = settings_for(nats_server, tmp_path, agent_volume_wait_s=0.1)
    gate = tmp_path / "gate"
    command = await run_until_printed(settings, bus, tmp_path, talk, f"one\n!wait_file {gate}\nunseen")
    await end_process(file_of(settings, talk.tenant))  # the agent goes on, and nobody tells
    gate.touch()

    async def done() -> bool:
        return any(b'"type":"result"' in path.read_bytes() for path in segments(settings, talk))

    await until(done, "the agent's work")
    await end_all(settings, talk.tenant)
    directory = Path(file_of(settings, talk.tenant).directory)
    move(directory, tmp_path / "volume")
    directory.mkdir()  # noqa: ASYNC240 - a mount point without its volume
    async with real_provider(settings, bus, tmp_path).running():

        async def closed() -> bool:
            return file_of(settings, talk.tenant).status == "lost"

        await until(closed, "the end without the volume")
        fence = await stored(bus, command.target)
        assert fence[-1].body["tail"] == "unknown"
        move(tmp_path / "volume", directory)

        async def salvaged() -> bool:
            return any(event.type == events.RECOVERY for event in await talk.told())

        await until(salvaged, "the salvaged tail")

        async def stopped() -> bool:
            return file_of(settings, talk.tenant).status == "stopped"

        await until(stopped, "the recovery collector's end")
    assert await stored(bus, command.target) == fence, "nothing follows the fence"
    [recovery] = [event for event in await talk.told() if event.type == events.RECOVERY]
    found = recovery.body["salvaged"]
    assert found["execution"] == command.target.execution and found["usage"][0]["output_tokens"] > 0
    [reference] = found["blobs"]
    chunk = await bus.last(
        subjects.blobs_stream(talk.tenant),
        subjects.blob(talk.tenant, talk.workspace, "artifact", reference["digest"], 0),
    )
    assert chunk is not None
    lines = [json.loads(line) for line in chunk.data.decode().splitlines()]
    assert any(line["body"].get("text") == "unseen" for line in lines) and len(lines) == found["events"]
    async with real_provider(settings, bus, tmp_path).running():
        pass
    assert len([event for event in await talk.told() if event.type == events.RECOVERY]) == 1
