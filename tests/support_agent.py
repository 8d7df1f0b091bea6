"""An agent service's parts in a test: settings, an owner record that names a start, waiting for a condition."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import support_collector
from support_nats import NatsServer
from tether import frames, ids, owner, subjects, topology
from tether.bus import NatsBus
from tether.control import StartCommand
from tether.events import ConversationEvent
from tether.frames import Frame
from tether.kv import Bucket
from tether.prompt import AgentSpec, TextContent
from tether_agent.agents import AgentsFile, Environment
from tether_agent.config import AgentSettings
from tether_agent.providers.local import LocalProvider
from tether_agent.service import working

DEADLINE_S = 20.0


async def until(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Raises TimeoutError naming `what`."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await condition():  # noqa: ASYNC110 - conditions of other processes
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise TimeoutError(f"{what} did not happen within {timeout_s:g} s") from None


def settings_for(server: NatsServer, root: Path, **changes: object) -> AgentSettings:
    values: dict[str, object] = {
        "nats_url": server.url,
        "agent_state_dir": root / "state",
        "agent_workspaces_dir": root / "workspaces",
        **changes,
    }
    return AgentSettings.model_validate(values)


def provider_for(settings: AgentSettings, bus: NatsBus | None) -> LocalProvider:
    environment = Environment({"scripted": {"KEY": "value"}}, {}, {})
    return LocalProvider(settings, AgentsFile(), environment, bus, command=support_collector.COMMAND)


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation of a tenant, in the workspace `w1`."""

    bus: NatsBus
    tenant: str
    name: str = "c1"
    workspace: str = "w1"

    async def admit(self, request: str = "req_1") -> StartCommand:
        """What a router does: the owner record to `starting`; returns the command, not yet published."""
        bucket = Bucket(self.bus, subjects.OWNERS)
        key = subjects.owner_key(self.tenant, self.workspace, self.name)
        entry = await bucket.get(key)
        record = owner.OwnerRecord() if entry is None else owner.OwnerRecord.model_validate(entry.value)
        decision = owner.decide(
            record,
            owner.Admit(
                tenant=self.tenant,
                workspace=self.workspace,
                conversation=self.name,
                request=request,
                attempt=1,
                response=ids.response_id(self.tenant, request, 1),
                execution=ids.execution_id(self.tenant, request, 1),
                sandbox=ids.sandbox_id(self.tenant, self.workspace),
                prompt_sequence=1,
                prompt_stored_at_ns=1,
                agent={"kind": "scripted"},
                at=1,
            ),
        )
        assert isinstance(decision, owner.Accepted)
        op = ids.new_id("op")
        if entry is None:
            entry = await bucket.create(key, decision.record.value(), op=op)
        else:
            entry = await bucket.update(key, decision.record.value(), op=op, revision=entry.revision)
        assert decision.record.target is not None
        return StartCommand(
            control=ids.control_id(self.tenant, request, "start"),
            target=decision.record.target,
            owner_revision=entry.revision,
            request_id=request,
            attempt=1,
            content=(TextContent(text="hello"),),
            agent=AgentSpec(kind="scripted"),
        )

    async def change_owner(self, event: owner.OwnerInput) -> None:
        bucket = Bucket(self.bus, subjects.OWNERS)
        key = subjects.owner_key(self.tenant, self.workspace, self.name)
        entry = await bucket.get(key)
        assert entry is not None
        decision = owner.decide(owner.OwnerRecord.model_validate(entry.value), event)
        assert isinstance(decision, owner.Accepted)
        await bucket.update(key, decision.record.value(), op=ids.new_id("op"), revision=entry.revision)

    async def send(self, command: StartCommand) -> None:
        await self.bus.publish(
            subjects.command(self.tenant, self.workspace), command.encode(), msg_id=f"{self.tenant}/{command.control}"
        )

    async def execution(self, command: StartCommand) -> list[str]:
        """The types of the execution's events in the log."""
        subject = subjects.event(self.tenant, self.workspace, self.name, command.target.execution)
        found: list[str] = []
        for message in await self.bus.read(subjects.events_stream(self.tenant), 0, subject):
            frame = frames.decode(message.subject, message.data)
            assert isinstance(frame, Frame)
            found += [event.type for event in frame.events]
        return found

    async def told(self) -> list[ConversationEvent]:
        """The conversation-level events."""
        subject = subjects.event(self.tenant, self.workspace, self.name, "_")
        found = []
        for message in await self.bus.read(subjects.events_stream(self.tenant), 0, subject):
            event = frames.decode(message.subject, message.data)
            assert isinstance(event, ConversationEvent)
            found.append(event)
        return found

    async def queue_empty(self) -> bool:
        """No command of this workspace is stored any more: each was acked."""
        subject = subjects.command(self.tenant, self.workspace)
        return await self.bus.last(subjects.COMMANDS_STREAM, subject) is None


async def conversation(bus: NatsBus, tenant: str, name: str = "c1") -> Conversation:
    await bus.ensure(topology.tenant(tenant, max_bytes=64 << 20))
    return Conversation(bus, tenant, name)


@asynccontextmanager
async def agent_service(settings: AgentSettings, bus: NatsBus) -> AsyncIterator[LocalProvider]:
    """Provider, requests, driver and lifecycle in this process. Leaving it ends no collector."""
    provider = provider_for(settings, bus)
    async with provider.running(), working(bus, provider, settings):
        yield provider
