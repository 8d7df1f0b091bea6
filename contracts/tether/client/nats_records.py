"""What the NATS client reads: records, addresses, the fold of a log, snapshots. Each call raises BusErrors only."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import ValidationError

from tether import subjects
from tether.control import ControlReply, ControlRequest
from tether.cursor import Cursor, tag_of
from tether.errors import NoReplyError
from tether.fold import Applied, ConversationFold, ExecutionFold, ExecutionState
from tether.frames import Frame, decode
from tether.ids import ExecutionTarget, new_id
from tether.kv import Bucket
from tether.limits import CONTROL_REPLY_S
from tether.owner import OwnerRecord
from tether.ports import Bus
from tether.prompt import RequestRecord
from tether.sandbox import CAN_SNAPSHOT, Registration, SandboxRecord
from tether.snapshot import Snapshot, Watermark, take
from tether.subjects import EventAddress


@dataclass(slots=True)
class Log:
    """The fold of a conversation's log, and the last message that is in it."""

    told: ConversationFold = field(default_factory=ConversationFold)
    folds: dict[str, ExecutionFold] = field(default_factory=dict)
    created_ms: int = 0
    sequence: int = 0
    stored_at_ns: int = 0

    @property
    def cursor(self) -> Cursor:
        return Cursor.after(self.sequence, self.stored_at_ns) if self.sequence else Cursor.beginning()


class Records:
    """Read-only view of one tenant."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        self.bus = bus
        self.tenant = tenant
        self.stream = subjects.events_stream(tenant)

    async def workspace(self, conversation: str) -> str | None:
        """Where the conversation lives; None before its first prompt was admitted."""
        key = subjects.conversation_key(self.tenant, conversation)
        entry = await Bucket(self.bus, subjects.CONVERSATIONS).get(key)
        return None if entry is None else str(entry.value["workspace"])

    async def conversations(self) -> list[tuple[str, str, int]]:
        """(conversation, workspace, created in unix ms), oldest first."""
        found: list[tuple[str, str, int]] = []
        async for entry in Bucket(self.bus, subjects.CONVERSATIONS).keys(f"{self.tenant}.*"):
            found.append((entry.key.partition(".")[2], str(entry.value["workspace"]), entry.stored_at_ns // 1_000_000))
        return found

    async def owner(self, workspace: str, conversation: str) -> OwnerRecord | None:
        key = subjects.owner_key(self.tenant, workspace, conversation)
        entry = await Bucket(self.bus, subjects.OWNERS).get(key)
        return None if entry is None else OwnerRecord.model_validate(entry.value)

    async def owners(self) -> list[tuple[str, str, OwnerRecord]]:
        """(workspace, conversation, record) of every conversation of the tenant."""
        found: list[tuple[str, str, OwnerRecord]] = []
        async for entry in Bucket(self.bus, subjects.OWNERS).keys(f"{self.tenant}.*.*"):
            _, workspace, conversation = entry.key.split(".")
            found.append((workspace, conversation, OwnerRecord.model_validate(entry.value)))
        return found

    async def request(self, request_id: str) -> RequestRecord | None:
        key = subjects.request_key(self.tenant, request_id)
        entry = await Bucket(self.bus, subjects.REQUESTS).get(key)
        return None if entry is None else RequestRecord.model_validate(entry.value)

    async def end(self) -> Cursor:
        """The end of the tenant's log as of now."""
        state = await self.bus.state(self.stream)
        if state is None or not state.last_sequence:
            return Cursor.beginning()
        message = await self.bus.at(self.stream, state.last_sequence)
        return Cursor.beginning() if message is None else Cursor.after(message.sequence, message.stored_at_ns)

    async def address(self, execution: str) -> EventAddress | None:
        """Where an execution lives: from the log, else (nothing logged yet) from the owner records."""
        named = await self.bus.subjects(self.stream, f"tether.event.{self.tenant}.*.*.{execution}")
        for subject in named:
            return subjects.parse_event(subject)
        for workspace, conversation, record in await self.owners():
            if record.target is not None and record.target.execution == execution:
                return EventAddress(self.tenant, workspace, conversation, execution)
        return None

    async def target(self, address: EventAddress) -> ExecutionTarget | None:
        """The whole target, where this execution owns its conversation now."""
        record = await self.owner(address.workspace, address.conversation)
        target = None if record is None else record.target
        return target if target is not None and target.execution == address.execution else None

    async def sandboxes(self) -> list[tuple[SandboxRecord, Registration | None]]:
        records: dict[str, SandboxRecord] = {}
        registered: dict[str, Registration] = {}
        async for entry in Bucket(self.bus, subjects.SANDBOXES).keys(f"{self.tenant}.>"):
            parts = entry.key.split(".")
            if len(parts) == 2:
                records[parts[1]] = SandboxRecord.model_validate(entry.value)
            elif len(parts) == 3:
                registered[parts[1]] = Registration.model_validate(entry.value)
        return [(record, registered.get(workspace)) for workspace, record in sorted(records.items())]

    # --- controls ---

    async def control(self, request: ControlRequest, workspace: str) -> ControlReply:
        """Ask the collector once. No reply in time, or one that cannot be read: `unknown`; nothing is sent again."""
        subject = subjects.control(self.tenant, workspace, request.verb)
        data = request.model_dump_json(exclude_none=True).encode()
        try:
            message = await self.bus.request(subject, data, timeout_s=CONTROL_REPLY_S)
            return ControlReply.model_validate_json(message.data)
        except (NoReplyError, ValidationError):
            return ControlReply(control=request.control, verb=request.verb, status="unknown")

    async def live_snapshot(self, address: EventAddress) -> Snapshot | None:
        """The collector's, where the execution lives and its collector can; an older peer is not asked."""
        target = await self.target(address)
        if target is None:
            return None
        key = subjects.registration_key(target.tenant, target.workspace, target.sandbox)
        entry = await Bucket(self.bus, subjects.SANDBOXES).get(key)
        if entry is None or CAN_SNAPSHOT not in Registration.model_validate(entry.value).capabilities:
            return None
        request = ControlRequest(control=new_id("ctl"), verb="snapshot", target=target)
        reply = await self.control(request, target.workspace)
        value = None if reply.result is None else reply.result.get("snapshot")
        try:
            return None if value is None else Snapshot.model_validate(value)
        except ValidationError:
            return None

    # --- the log, folded ---

    async def fold(self, filter_subject: str) -> Log:
        """Everything that the log holds there. What it no longer holds is a gap in the state."""
        log = Log()
        while True:
            batch = await self.bus.read(self.stream, log.sequence, filter_subject)
            for stored in batch:
                log.created_ms = log.created_ms or stored.stored_at_ns // 1_000_000
                log.sequence, log.stored_at_ns = stored.sequence, stored.stored_at_ns
                content = decode(stored.subject, stored.data)
                if not isinstance(content, Frame):
                    log.told.apply(content)
                    continue
                execution = subjects.parse_event(stored.subject).execution
                fold = log.folds.setdefault(execution, ExecutionFold())
                for event in content.events:
                    if fold.apply(event) is Applied.HOLE:
                        fold.skip_to(event.ordinal, "retention_gap")
                        fold.apply(event)
            if batch:
                continue
            if await self.bus.next_after(self.stream, log.sequence, filter_subject) is None:
                return log  # the leader says so: a follower may lag

    async def snapshot(self, address: EventAddress) -> tuple[str, Snapshot] | None:
        """(source, snapshot): the collector's, else the fold of the log; None where nothing is logged."""
        live = await self.live_snapshot(address)
        if live is not None:
            return "collector", live
        log = await self.fold(address.subject)
        fold = log.folds.get(address.execution)
        if fold is None:
            return None
        state = fold.freeze()
        target = await self.target(address) or logged_target(state, address)
        mark = Watermark(ordinal=state.applied, sequence=log.sequence, tag=tag_of(log.stored_at_ns))
        at = state.ended_at or state.response_ended_at or log.stored_at_ns // 1_000_000
        return "log", take(target, state, mark, captured_at=at)


def logged_target(state: ExecutionState, address: EventAddress) -> ExecutionTarget:
    """The target that the execution's first event names; where that is gone, what its address says."""
    try:
        return ExecutionTarget.model_validate(state.target or {})
    except ValidationError:
        return ExecutionTarget(
            tenant=address.tenant,
            workspace=address.workspace,
            conversation=address.conversation,
            response="unknown",
            response_generation=0,
            execution=address.execution,
            execution_generation=0,
            sandbox="unknown",
        )
