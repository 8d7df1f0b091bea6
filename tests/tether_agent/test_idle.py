"""Idle sandboxes are suspended and woken again: the clock, the races, two agent services at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from support_agent import Conversation, agent_service, conversation, provider_for, until
from support_nats import NatsServer
from support_sandbox import Sandbox
from tether import ids, owner, subjects
from tether.bus import NatsBus, connect
from tether.control import StartCommand
from tether.ids import ExecutionTarget
from tether.kv import Bucket
from tether.sandbox import ExecutionSummary, SandboxRecord
from tether_agent import lifecycle
from tether_agent.config import AgentSettings
from tether_agent.core import idle
from tether_agent.core.sandbox import Forwarded
from tether_agent.records import SandboxRecords
from tether_agent.service import working


@pytest.fixture
async def talk(bus: NatsBus, tenant: str) -> Conversation:
    return await conversation(bus, tenant)


@pytest.fixture
def hasty(settings: AgentSettings) -> AgentSettings:
    return settings.model_copy(update={"agent_idle_s": 0.3})


@pytest.fixture
def sandbox(bus: NatsBus, settings: AgentSettings, tenant: str) -> Sandbox:
    return Sandbox(bus, settings, tenant)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def begin(talk: Conversation, request: str = "req_1") -> StartCommand:
    command = await talk.admit(request)
    await talk.send(command)
    await until(talk.queue_empty, "the ack of a command")
    return command


async def close(talk: Conversation, command: StartCommand) -> None:
    await talk.change_owner(owner.Ended(command.target.execution, "drained", True, 2))


def busy(target: ExecutionTarget, state: str) -> list[dict[str, object]]:
    return [ExecutionSummary(target=target, state="running").model_dump(mode="json") | {"state": state}]


class Looks:
    """Counts how often an active sandbox was looked at for idleness, so that `never` has something to wait for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        real = idle.is_idle

        def counted(record: SandboxRecord, seen: idle.Seen, *, idle_s: float, waiting: bool) -> bool:
            self.count += 1
            return real(record, seen, idle_s=idle_s, waiting=waiting)

        monkeypatch.setattr("tether_agent.core.idle.is_idle", counted)
        monkeypatch.setattr(lifecycle, "LOOK_S", 0.05)

    async def some(self, number: int = 6) -> None:
        wanted = self.count + number

        async def looked() -> bool:
            return self.count >= wanted

        await until(looked, f"{number} looks")


async def test_a_sandbox_without_executions_is_suspended_after_its_time_and_a_prompt_wakes_it_once(
    bus: NatsBus, hasty: AgentSettings, sandbox: Sandbox, talk: Conversation
) -> None:
    async with agent_service(hasty, bus):
        command = await begin(talk)
        await close(talk, command)
        sandbox.behave(idle_since=now_ms())
        await sandbox.reaches("suspended")
        record = await sandbox.record()
        assert record is not None and record.drained is not None
        assert record.drained.purpose == "suspend"
        assert sandbox.lines("drains.jsonl")[0]["reason"] == "idle"
        sandbox.behave()
        await begin(talk, "req_2")
        assert await sandbox.state() == "active"
    assert len(sandbox.lines("restores.jsonl")) == 1


async def test_one_busy_execution_and_one_that_waits_for_a_person_block_it(
    bus: NatsBus, hasty: AgentSettings, sandbox: Sandbox, talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(monkeypatch)
    async with agent_service(hasty, bus):
        command = await begin(talk)
        for state in ("running", "waiting"):
            sandbox.behave(idle_since=None, busy=busy(command.target, state))
            await looks.some()
            assert await sandbox.state() == "active"


async def test_who_waits_for_a_person_is_suspended_where_that_is_configured(
    bus: NatsBus, hasty: AgentSettings, sandbox: Sandbox, talk: Conversation
) -> None:
    async with agent_service(hasty.model_copy(update={"agent_idle_waiting": True}), bus):
        command = await begin(talk)
        sandbox.behave(busy=busy(command.target, "waiting"))
        await sandbox.reaches("suspended")


async def test_the_clock_survives_a_restart_of_the_service_which_writes_nothing_meanwhile(
    bus: NatsBus, settings: AgentSettings, hasty: AgentSettings, sandbox: Sandbox, talk: Conversation
) -> None:
    async with agent_service(settings, bus):
        await close(talk, await begin(talk))
        sandbox.behave(idle_since=now_ms())
        record = await sandbox.record()
        assert record is not None
        passed_at = record.wanted_at + 400

        async def passed() -> bool:
            return now_ms() > passed_at

        await until(passed, "the idle time")
        assert await sandbox.state() == "active", "a service without the setting suspends nothing"
    began = now_ms()
    async with agent_service(hasty, bus):
        await sandbox.reaches("suspended")
    order = sandbox.lines("drains.jsonl")[0]
    assert order["began_at"] - began < 15_000 and order["reason"] == "idle"


async def test_activity_between_the_look_and_the_order_cancels_the_suspend(
    bus: NatsBus, hasty: AgentSettings, sandbox: Sandbox, talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start is forwarded right after each look found the sandbox idle: no order is ever written."""
    records, looks = SandboxRecords(bus), 0

    async with agent_service(hasty, bus):
        await close(talk, await begin(talk))
        decided = asyncio.Event()

        async def forwarded_meanwhile(bus_: NatsBus, tenant: str, workspace: str) -> bool:
            nonlocal looks
            # The record that is decided on was read before; this is what a driver does in between.
            await records.apply(tenant, workspace, Forwarded(now_ms() - 10_000))
            looks += 1
            if looks >= 3:
                decided.set()
            return False

        monkeypatch.setattr(lifecycle, "work_waits", forwarded_meanwhile)
        monkeypatch.setattr("tether_agent.core.idle.is_idle", lambda *_, **__: True)
        monkeypatch.setattr(lifecycle, "LOOK_S", 0.05)
        sandbox.behave(idle_since=1)
        await asyncio.wait_for(decided.wait(), 20.0)
        assert await sandbox.state() == "active"
        assert sandbox.lines("drains.jsonl") == []


@contextlib.asynccontextmanager
async def two_services(server: NatsServer, settings: AgentSettings, bus: NatsBus) -> AsyncIterator[None]:
    """Two agent services over the same compute."""
    provider = provider_for(settings, bus)
    async with (
        await connect(server.url, name="second") as second,
        provider.running(),
        working(bus, provider, settings),
        working(second, provider, settings),
    ):
        yield


async def test_two_services_suspend_and_wake_once_between_them(
    nats_server: NatsServer, bus: NatsBus, hasty: AgentSettings, sandbox: Sandbox, talk: Conversation
) -> None:
    async with two_services(nats_server, hasty, bus):
        await close(talk, await begin(talk))
        sandbox.behave(idle_since=1)
        await sandbox.reaches("suspended")
        assert len({order["control"] for order in sandbox.lines("drains.jsonl")}) == 1
        sandbox.behave()
        answers = await asyncio.gather(*(sandbox.ask("resume") for _ in range(4)), begin(talk, "req_2"))
        woken = [answer["woken"] for answer in answers if isinstance(answer, dict)]
        assert sum(woken) <= 1
        await sandbox.reaches("active")
        assert len(sandbox.lines("restores.jsonl")) == 1
        drains = await asyncio.gather(*(sandbox.ask("drain", drain_id=f"d{n % 2}") for n in range(4)))
        await sandbox.reaches("suspended")
        assert len({answer["report"]["drain"] for answer in drains}) == 1
    assert await owners_of(bus, sandbox) == {"starting"}


async def owners_of(bus: NatsBus, sandbox: Sandbox) -> set[str]:
    found = Bucket(bus, subjects.OWNERS).records(owner.OwnerRecord, f"{sandbox.tenant}.w1.*")
    return {record.state async for _, record in found}


STEPS = (
    "agent.drain.idle",
    "agent.drain.ordered",
    "agent.drain.asked",
    "agent.drain.reported",
    "agent.drain.released",
    "agent.drain.over",
)


@pytest.mark.parametrize("step", STEPS)
async def test_a_prompt_at_any_step_of_a_suspend_runs_and_runs_once(
    bus: NatsBus, hasty: AgentSettings, sandbox: Sandbox, talk: Conversation, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    reached = asyncio.Event()

    def passed(name: str) -> None:
        if name == step:
            reached.set()

    monkeypatch.setattr("tether_agent.lifecycle.failpoint", passed)
    async with agent_service(hasty, bus):
        await close(talk, await begin(talk))
        command = await talk.admit("req_2")
        sandbox.behave(idle_since=1)
        await asyncio.wait_for(reached.wait(), 20.0)
        await talk.send(command)
        await until(talk.queue_empty, "the ack of the prompt's command")
        assert await talk.execution(command) == ["execution.started"]
    starts = [line for line in sandbox.lines("starts.jsonl") if line["control"] == command.control]
    assert len(starts) == 1


async def test_a_prompt_that_waits_for_a_router_blocks_it(
    bus: NatsBus, hasty: AgentSettings, sandbox: Sandbox, talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(monkeypatch)
    async with agent_service(hasty, bus):
        await close(talk, await begin(talk))
        await bus.publish(subjects.prompt(talk.tenant, "w1", "c9"), b"{}")
        sandbox.behave(idle_since=1)
        await looks.some()
        assert await sandbox.state() == "active"
        await bus.purge(subjects.PROMPTS_STREAM, subjects.prompt(talk.tenant, "w1", "c9"))
        await sandbox.reaches("suspended")


# --- turns that were cut ---


async def cut(talk: Conversation, sandbox: Sandbox, continuation: str) -> StartCommand:
    command = await begin(talk)
    target = command.target.model_dump(mode="json")
    sandbox.behave(drain={"cut": ["Bash", "Edit"], "continuation": continuation, "target": target})
    await close(talk, command)
    await sandbox.ask("drain", drain_id="d1")
    await sandbox.reaches("suspended")
    sandbox.behave()
    return command


async def test_a_cut_turn_goes_on_by_one_prompt_that_names_the_tools(
    bus: NatsBus, settings: AgentSettings, sandbox: Sandbox, talk: Conversation
) -> None:
    async with agent_service(settings, bus):
        await cut(talk, sandbox, "continue")
        assert await sandbox.prompts() == [], "nothing goes on before the resume"
        await asyncio.gather(*(sandbox.ask("resume") for _ in range(3)))
        await sandbox.reaches("active")
        [prompt] = await sandbox.prompts()
    assert prompt.request_id == ids.continuation_id("chk_d1", "c1")
    assert "Bash, Edit" in prompt.content[0].text
    assert (prompt.agent.model, prompt.author, prompt.continuation) == ("m1", "tether", "continue")


async def test_a_cut_turn_whose_policy_is_wait_gets_nothing_by_itself(
    bus: NatsBus, settings: AgentSettings, sandbox: Sandbox, talk: Conversation
) -> None:
    async with agent_service(settings, bus):
        await cut(talk, sandbox, "wait")
        await sandbox.ask("resume")
        await sandbox.reaches("active")
        assert await sandbox.prompts() == []


async def test_another_conversations_prompt_wakes_the_sandbox_and_the_cut_turn_goes_on(
    bus: NatsBus, settings: AgentSettings, sandbox: Sandbox, talk: Conversation
) -> None:
    async with agent_service(settings, bus):
        await cut(talk, sandbox, "continue")
        await begin(Conversation(bus, talk.tenant, "c2"), "req_9")
        [prompt] = await sandbox.prompts()
        assert prompt.conversation == "c1"


async def test_a_users_prompt_that_wakes_leads_and_carries_the_words(
    bus: NatsBus, settings: AgentSettings, sandbox: Sandbox, talk: Conversation
) -> None:
    async with agent_service(settings, bus):
        await cut(talk, sandbox, "continue")
        await begin(talk, "req_2")
        assert await sandbox.prompts() == []
    texts = sandbox.lines("starts.jsonl")[-1]["texts"]
    assert len(texts) == 2 and "Bash, Edit" in texts[0] and texts[1] == "hello"
