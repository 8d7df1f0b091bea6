"""What routes ask of the bus: records, cursors, controls. Each call is bounded; BusErrors go to the caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from tether import subjects
from tether.control import ControlReply, ControlRequest
from tether.cursor import Cursor
from tether.errors import NoReplyError
from tether.ids import ExecutionTarget
from tether.kv import Bucket
from tether.limits import CONTROL_REPLY_S
from tether.owner import OwnerRecord
from tether.ports import Bus
from tether.prompt import RequestRecord
from tether.sandbox import Registration, SandboxRecord
from tether_backend.feed import Feed
from tether_backend.http.edge import Admission
from tether_backend.metrics import Metrics
from tether_backend.projector import SHARD, Projector
from tether_backend.store.engine import Database
from tether_backend.store.history import History


@dataclass(frozen=True, slots=True)
class Deps:
    """What the HTTP application works with. `feeds` and `projectors` by tenant."""

    bus: Bus
    database: Database
    history: History
    feeds: Mapping[str, Feed]
    projectors: Mapping[str, Projector]
    admission: Admission
    metrics: Metrics
    version: str

    @property
    def runtime(self) -> Runtime:
        return Runtime(self.bus, self.database.id)


class Runtime:
    def __init__(self, bus: Bus, database: str) -> None:
        self._bus = bus
        self._database = database

    async def workspace(self, tenant: str, conversation: str) -> str | None:
        """Where the conversation lives; None before its first prompt was admitted."""
        entry = await Bucket(self._bus, subjects.CONVERSATIONS).get(subjects.conversation_key(tenant, conversation))
        return None if entry is None else str(entry.value["workspace"])

    async def owner(self, tenant: str, workspace: str, conversation: str) -> OwnerRecord | None:
        entry = await Bucket(self._bus, subjects.OWNERS).get(subjects.owner_key(tenant, workspace, conversation))
        return None if entry is None else OwnerRecord.model_validate(entry.value)

    async def owner_of_execution(self, tenant: str, execution: str) -> OwnerRecord | None:
        """Search the tenant's owner records: only for an execution that no row names yet."""
        async for entry in Bucket(self._bus, subjects.OWNERS).keys(f"{tenant}.*.*"):
            record = OwnerRecord.model_validate(entry.value)
            if record.target is not None and record.target.execution == execution:
                return record
        return None

    async def request(self, tenant: str, request_id: str) -> RequestRecord | None:
        entry = await Bucket(self._bus, subjects.REQUESTS).get(subjects.request_key(tenant, request_id))
        return None if entry is None else RequestRecord.model_validate(entry.value)

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
        entry = await Bucket(self._bus, subjects.SANDBOXES).get(key)
        return None if entry is None else Registration.model_validate(entry.value)

    async def sandboxes(self, tenant: str) -> list[tuple[SandboxRecord, Registration | None]]:
        records: dict[str, SandboxRecord] = {}
        registered: dict[str, Registration] = {}
        async for entry in Bucket(self._bus, subjects.SANDBOXES).keys(f"{tenant}.>"):
            parts = entry.key.split(".")
            if len(parts) == 2:
                records[parts[1]] = SandboxRecord.model_validate(entry.value)
            elif len(parts) == 3:
                registered[parts[1]] = Registration.model_validate(entry.value)
        return [(record, registered.get(workspace)) for workspace, record in sorted(records.items())]

    async def control(self, tenant: str, workspace: str, request: ControlRequest) -> ControlReply:
        """Ask the collector. No reply in time, or one that cannot be read: status `unknown`, nothing is sent again."""
        subject = subjects.control(tenant, workspace, request.verb)
        data = request.model_dump_json(exclude_none=True).encode()
        try:
            message = await self._bus.request(subject, data, timeout_s=CONTROL_REPLY_S)
            return ControlReply.model_validate_json(message.data)
        except (NoReplyError, ValidationError):
            return ControlReply(control=request.control, verb=request.verb, status="unknown")
