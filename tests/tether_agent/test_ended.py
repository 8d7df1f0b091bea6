"""Sandboxes that were ended without a drain are suspended once everything of them is told, and woken like any other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support_agent import Conversation, agent_service, conversation, until
from support_sandbox import Sandbox
from tether import owner, subjects
from tether.bus import NatsBus
from tether.checkpoint import DrainedExecution
from tether.control import StartCommand
from tether.ids import ExecutionTarget
from tether.sandbox import DrainReport, SandboxRecord
from tether_agent import lifecycle
from tether_agent.config import AgentSettings
from tether_agent.core import sandbox as core
from tether_agent.core.sandbox import ComputeEnded, Keep, Write
from tether_agent.lifecycle import Lifecycle
from tether_agent.providers.local import LocalProvider


@pytest.fixture
async def talk(bus: NatsBus, tenant: str) -> Conversation:
    return await conversation(bus, tenant)


@pytest.fixture
def sandbox(bus: NatsBus, settings: AgentSettings, tenant: str) -> Sandbox:
    return Sandbox(bus, settings, tenant)


async def begin(talk: Conversation, request: str = "req_1") -> StartCommand:
    command = await talk.admit(request)
    await talk.send(command)
    await until(talk.queue_empty, "the ack of a command")
    return command


async def over(talk: Conversation, command: StartCommand) -> None:
    """What a router does with the end of an execution."""
    await talk.change_owner(owner.Ended(command.target.execution, "completed", True, 2))


class Looks:
    """Counts the looks at sandboxes whose compute has ended, so that `never` has something to wait for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        real = Lifecycle._look_at_ended

        async def counted(*arguments: object) -> None:
            await real(*arguments)  # type: ignore[arg-type]
            self.count += 1

        monkeypatch.setattr(Lifecycle, "_look_at_ended", counted)
        monkeypatch.setattr(lifecycle, "LOOK_S", 0.05)

    async def some(self, number: int = 4) -> None:
        wanted = self.count + number

        async def looked() -> bool:
            return self.count >= wanted

        await until(looked, f"{number} looks")


async def test_what_is_stopped_is_suspended_with_it_and_woken_by_a_prompt_and_by_a_resume(
    bus: NatsBus, settings: AgentSettings, sandbox: Sandbox, talk: Conversation
) -> None:
    async with agent_service(settings, bus):
        await over(talk, await begin(talk))
        assert (await sandbox.ask("stop"))["stopped"][0]["workspace"] == "w1"
        record = await sandbox.record()
        assert record is not None and (record.state, record.drained, record.checkpoint_revision) == (
            "suspended",
            None,
            0,
        )
        await over(talk, await begin(talk, "req_2"))
        assert await sandbox.state() == "active"
        await sandbox.ask("stop")
        assert await sandbox.state() == "suspended"
        answer = await sandbox.ask("resume")
        assert (answer["state"], answer["woken"]) == ("resuming", True)
        await sandbox.reaches("active")


async def test_what_was_stopped_by_another_service_is_suspended_by_the_next_ones_look(
    bus: NatsBus, settings: AgentSettings, sandbox: Sandbox, talk: Conversation
) -> None:
    async with agent_service(settings, bus) as provider:
        await over(talk, await begin(talk))
        await provider.stop(sandbox.tenant, "w1")
        await sandbox.reaches("suspended")
    async with agent_service(settings, bus):
        await over(talk, await begin(talk, "req_2"))
        assert await sandbox.state() == "active"


async def test_what_is_not_told_to_its_end_and_what_work_waits_for_stays_active(
    bus: NatsBus, settings: AgentSettings, sandbox: Sandbox, talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(monkeypatch)
    async with agent_service(settings, bus) as provider:
        command = await begin(talk)
        await provider.stop(sandbox.tenant, "w1")
        await looks.some()
        assert await sandbox.state() == "active", "an execution is open in the log"
        subject = subjects.prompt(sandbox.tenant, "w1", "c1")
        await bus.publish(subject, b"{}")
        await over(talk, command)
        await looks.some()
        assert await sandbox.state() == "active", "a prompt waits"
        assert await bus.last(subjects.PROMPTS_STREAM, subject) is not None
        await bus.purge(subjects.PROMPTS_STREAM, subject)
        await sandbox.reaches("suspended")


async def test_a_sandbox_that_lives_stays_active_over_a_restart_of_the_service(
    bus: NatsBus, settings: AgentSettings, sandbox: Sandbox, talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with agent_service(settings, bus):
        await over(talk, await begin(talk))
    before = await sandbox.record()
    looked = 0
    real = Lifecycle._attend

    async def counted(*arguments: object) -> None:
        nonlocal looked
        await real(*arguments)  # type: ignore[arg-type]
        looked += 1

    monkeypatch.setattr(Lifecycle, "_attend", counted)
    monkeypatch.setattr(lifecycle, "LOOK_S", 0.05)
    async with agent_service(settings, bus):

        async def some() -> bool:
            return looked >= 4

        await until(some, "looks at it")
        assert await sandbox.record() == before


async def test_a_resume_of_an_active_sandbox_sees_to_its_collector_and_answers_when_it_is_registered(
    bus: NatsBus, settings: AgentSettings, sandbox: Sandbox, talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(monkeypatch)
    async with agent_service(settings, bus) as provider:
        await begin(talk)
        await provider.stop(sandbox.tenant, "w1")
        await looks.some(2)
        before = await sandbox.registration()
        answer = await sandbox.ask("resume")
        assert (answer["state"], answer["woken"]) == ("active", True)
        registered, record = await sandbox.registration(), await sandbox.record()
        assert registered is not None and record is not None and registered.boot == record.facts["boot"]
        assert before is None or before.boot != registered.boot
        [status] = [each for each in provider.statuses() if each.tenant == sandbox.tenant]
        assert status.alive
        assert not (await sandbox.ask("resume"))["woken"], "it was awake"


async def test_a_sandbox_whose_volume_is_away_is_left_to_whoever_tells_what_is_on_it(
    bus: NatsBus, settings: AgentSettings, sandbox: Sandbox, talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks(monkeypatch)
    real = LocalProvider.statuses
    monkeypatch.setattr(LocalProvider, "statuses", lambda self: [replace(each, lost=each.ended) for each in real(self)])
    async with agent_service(settings, bus) as provider:
        await over(talk, await begin(talk))
        await provider.stop(sandbox.tenant, "w1")
        await looks.some()
        assert await sandbox.state() == "active"


def test_only_an_active_record_is_suspended_for_an_end_of_its_compute() -> None:
    for state in ("provisioning", "draining", "suspended", "resuming", "deleting"):
        record = SandboxRecord(tenant="t", workspace="w", sandbox="s", state=state, provider="local")
        assert core.decide(record, ComputeEnded(5)) == Keep()
    assert core.decide(None, ComputeEnded(5)) == Keep()
    report = DrainReport(drain="d1", state="done")
    active = SandboxRecord(
        tenant="t", workspace="w", sandbox="s", state="active", provider="local", drained=report, checkpoint_revision=4
    )
    decided = core.decide(active, ComputeEnded(5))
    assert isinstance(decided, Write)
    assert (decided.record.state, decided.record.drained) == ("suspended", None)
    assert (decided.record.checkpoint_revision, decided.record.updated_at) == (4, 5)


def test_of_an_earlier_drain_only_messages_that_nobody_has_read_are_kept() -> None:
    target = ExecutionTarget(
        tenant="t",
        workspace="w",
        conversation="c1",
        response="rsp",
        response_generation=1,
        execution="exe",
        execution_generation=1,
        sandbox="s",
    )
    heard = DrainedExecution(target=target, outcome="graceful", cut=True, continuation="continue")
    unread = heard.model_copy(update={"unheard_more": 1})
    report = DrainReport(drain="d1", state="done", executions=(heard, unread))
    active = SandboxRecord(tenant="t", workspace="w", sandbox="s", state="active", provider="local", drained=report)
    decided = core.decide(active, ComputeEnded(5))
    assert isinstance(decided, Write) and decided.record.drained is not None
    [kept] = decided.record.drained.executions
    assert (kept.unheard_more, kept.continuation) == (1, "wait"), "its turn is not gone on with a second time"
