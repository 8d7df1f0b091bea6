"""What routes ask of the bus: records, cursors, controls. Each call is bounded; BusErrors go to the caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tether import subjects
from tether.agent_kinds import KnownAgents
from tether.asking import ask_collector
from tether.control import ControlReply, ControlRequest
from tether.control_lease import USER_VERBS, ControlLeases
from tether.cursor import Cursor
from tether.ids import ExecutionTarget
from tether.kv import Bucket
from tether.owner import OwnerRecord
from tether.ports import Bus
from tether.prompt import ConversationRecord, RequestRecord
from tether.sandbox import Registration
from tether_backend.feed import Feed
from tether_backend.http.edge import Admission
from tether_backend.metrics import Metrics
from tether_backend.projector import SHARD, Projector
from tether_backend.quotas import EdgeQuotas
from tether_backend.store.engine import Database
from tether_backend.store.history import History
from tether_backend.webhooks.service import Webhooks

REACH_S: Final = 0.5  # a reader of rows waits at most so long for the projection


@dataclass(frozen=True, slots=True)
class Deps:
    """What the HTTP application works with. `feeds`, `projectors` and `webhooks` by tenant."""

    bus: Bus
    database: Database
    history: History
    feeds: Mapping[str, Feed]
    projectors: Mapping[str, Projector]
    leases: ControlLeases
    webhooks: Mapping[str, Webhooks]
    admission: Admission
    metrics: Metrics
    version: str
    quotas: EdgeQuotas
    agents: KnownAgents = field(default_factory=KnownAgents)

    @property
    def runtime(self) -> Runtime:
        return Runtime(self.bus, self.database.id, self.leases)

    async def caught_up(self, tenant: str) -> None:
        """Wait shortly for the rows to have what this process has seen of the log, so that whoever was told an event
        finds it in them. Not where the projection is far behind: then a cursor says what the rows have."""
        await self.projectors[tenant].reach(self.feeds[tenant].position, REACH_S)


class Runtime:
    def __init__(self, bus: Bus, database: str, leases: ControlLeases) -> None:
        self._bus = bus
        self._database = database
        self._leases = leases

    async def workspace(self, tenant: str, conversation: str) -> str | None:
        """Where the conversation lives; None before its first prompt was admitted."""
        key = subjects.conversation_key(tenant, conversation)
        record = await Bucket(self._bus, subjects.CONVERSATIONS).record(key, ConversationRecord)
        return None if record is None else record.workspace

    async def owner(self, tenant: str, workspace: str, conversation: str) -> OwnerRecord | None:
        key = subjects.owner_key(tenant, workspace, conversation)
        return await Bucket(self._bus, subjects.OWNERS).record(key, OwnerRecord)

    async def owner_of_execution(self, tenant: str, execution: str) -> OwnerRecord | None:
        """Search the tenant's owner records: only for an execution that no row names yet."""
        async for _, record in Bucket(self._bus, subjects.OWNERS).records(OwnerRecord, f"{tenant}.*.*"):
            if record.target is not None and record.target.execution == execution:
                return record
        return None

    async def request(self, tenant: str, request_id: str) -> RequestRecord | None:
        key = subjects.request_key(tenant, request_id)
        return await Bucket(self._bus, subjects.REQUESTS).record(key, RequestRecord)

    async def idle(self, tenant: str, conversation: str) -> bool:
        """No execution owns the conversation, and no prompt of it waits."""
        waiting = f"tether.prompt.{tenant}.*.{conversation}"
        if await self._bus.next_after(subjects.PROMPTS_STREAM, 0, waiting) is not None:
            return False
        workspace = await self.workspace(tenant, conversation)
        if workspace is None:
            return True
        owner = await self.owner(tenant, workspace, conversation)
        return owner is None or owner.state == "idle"

    async def floor(self, tenant: str) -> Cursor:
        """The projection's cursor: everything up to it is in the rows that are read after this call.

        The beginning, where the consumer is being made anew or its floor's message is no longer retained: readers drop
        the overlap by identity.
        """
        stream = subjects.events_stream(tenant)
        state = await self._bus.consumer(stream, subjects.projection_durable(self._database, SHARD))
        if state is None or state.ack_floor == 0:
            return Cursor.beginning()
        message = await self._bus.at(stream, state.ack_floor)
        if message is None:
            return Cursor.beginning()
        return Cursor.after(message.sequence, message.stored_at_ns)

    async def registration(self, target: ExecutionTarget) -> Registration | None:
        key = subjects.registration_key(target.tenant, target.workspace, target.sandbox)
        return await Bucket(self._bus, subjects.SANDBOXES).record(key, Registration)

    async def control(self, tenant: str, workspace: str, request: ControlRequest) -> ControlReply:
        """Ask the collector (see `tether.asking`), with the conversation's control lease where the verb needs it."""
        if request.verb in USER_VERBS:
            return await self._leases.ask(request)
        return await ask_collector(self._bus, tenant, workspace, request)
