"""The agent service is killed at every step of drain, resume, idle suspend and delete, and started again: at each step
of one and the same operation in turn, so that what goes on after a kill is killed too."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from support_agent import Conversation, conversation, until
from support_agent_process import Service, agent_process
from support_sandbox import Sandbox
from tether import ids, owner, topology
from tether.bus import NatsBus
from tether.errors import BusError
from tether_agent.config import AgentSettings
from tether_chaos.failpoints import scan

DRAIN = ("ordered", "asked", "reported", "released", "over")
RESUME = ("ordered", "ensured", "continued", "active")
DELETE = ("ordered", "stopped", "removed")
IDLE = ("idle", "ordered")
STEPS = {
    "drain": [f"agent.drain.{step}" for step in DRAIN],
    "resume": [f"agent.resume.{step}" for step in RESUME],
    "delete": [f"agent.delete.{step}" for step in DELETE],
}
IDLE_STEPS = [f"agent.drain.{step}" for step in IDLE]
FAMILIES = ("agent.drain.", "agent.resume.", "agent.delete.")


@pytest.fixture
def failpoints(tmp_path: Path) -> Path:
    folder = tmp_path / "failpoints"
    folder.mkdir()
    return folder


def test_every_step_that_the_code_has_is_killed_here() -> None:
    assert {found.name for found in scan() if found.name.startswith(FAMILIES)} == {*sum(STEPS.values(), IDLE_STEPS)}


async def persist(sandbox: Sandbox, verb: str, **fields: object) -> dict[str, Any]:
    """Ask until somebody answers: what a client does whose agent service was killed."""
    found: dict[str, Any] = {}

    async def answered() -> bool:
        try:
            found.update(await sandbox.ask(verb, timeout_s=1.0, **fields))
        except BusError:
            return False
        return True

    await until(answered, f"an answer to {verb}", 30.0)
    return found


async def start(talk: Conversation, sandbox: Sandbox) -> None:
    """An execution that a drain will cut, and whose owner record is idle by then."""
    await talk.bus.ensure(topology.base())
    command = await talk.admit()
    target = command.target.model_dump(mode="json")
    sandbox.behave(drain={"cut": ["Bash"], "continuation": "continue", "target": target})
    await talk.send(command)
    await until(talk.queue_empty, "the ack of the start", 30.0)
    await talk.change_owner(owner.Ended(command.target.execution, "drained", True, 2))


async def killed(service: Service, steps: list[str]) -> None:
    """It was killed once at each of them."""

    async def at_each() -> bool:
        return not any(service.is_armed(step) for step in steps) and len(service.exits) == len(steps)

    await until(at_each, f"a kill at each of {steps}", 30.0)
    assert service.exits == [-signal.SIGKILL] * len(steps)


@pytest.mark.parametrize("operation", STEPS)
async def test_a_service_that_is_killed_goes_on_from_the_record_and_does_everything_once(
    bus: NatsBus, settings: AgentSettings, tenant: str, failpoints: Path, operation: str
) -> None:
    talk, sandbox = await conversation(bus, tenant), Sandbox(bus, settings, tenant)
    async with agent_process(settings, failpoints) as service:
        await start(talk, sandbox)
        for step in STEPS[operation]:
            service.arm(step)
        if operation == "delete":
            answer = await persist(sandbox, "delete", drain_id="d2", checkpoint=False)
            assert answer.get("state") == "deleting" or answer["problem"]["code"] == "NOT_FOUND", "it is gone already"
            await sandbox.reaches(None, 30.0)
        else:
            await drained_and_resumed(sandbox)
        await killed(service, STEPS[operation])


async def drained_and_resumed(sandbox: Sandbox) -> None:
    await persist(sandbox, "drain", drain_id="d1", grace_s=20)
    await sandbox.reaches("suspended", 30.0)
    reference, record = await sandbox.reference(), await sandbox.record()
    assert reference is not None and reference.drain == "d1"
    assert record is not None and record.drained is not None and record.drained.state == "done"
    await persist(sandbox, "resume")
    await sandbox.reaches("active", 30.0)
    [continued] = await sandbox.prompts()
    assert continued.request_id == ids.continuation_id(reference.checkpoint, "c1")
    assert [line["restore"] for line in sandbox.lines("restores.jsonl")] == [reference.checkpoint]


async def test_an_idle_suspend_that_was_killed_ends_suspended(
    bus: NatsBus, settings: AgentSettings, tenant: str, failpoints: Path
) -> None:
    talk, sandbox = await conversation(bus, tenant), Sandbox(bus, settings, tenant)
    hasty = settings.model_copy(update={"agent_idle_s": 0.2})
    async with agent_process(hasty, failpoints) as service:
        await start(talk, sandbox)
        for step in IDLE_STEPS:
            service.arm(step)
        sandbox.behave(idle_since=1)
        await sandbox.reaches("suspended", 30.0)
        record = await sandbox.record()
        assert record is not None and record.drained is not None
        assert (record.drained.purpose, record.drained.state) == ("suspend", "done")
        await killed(service, IDLE_STEPS)
