"""What the NATS client reads: records, addresses, the fold of a log, snapshots. Each call raises BusErrors only."""

from __future__ import annotations

from dataclasses import dataclass, field

from tether import subjects
from tether.asking import ask_collector
from tether.control import ControlReply, ControlRequest
from tether.control_lease import USER_VERBS, ControlLeases
from tether.conversation_fold import ConversationFold
from tether.cursor import Cursor, tag_of
from tether.errors import InvalidError
from tether.fold import Applied, ExecutionFold
from tether.frames import Frame, decode
from tether.ids import ExecutionTarget
from tether.kv import Bucket
from tether.owner import OwnerRecord
from tether.ports import Bus
from tether.prompt import ConversationRecord, RequestRecord
from tether.snapshot import Snapshot, Watermark, take
from tether.snapshots import Absence, Absent, Found, Snapshots, target_of
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

    def __init__(self, bus: Bus, tenant: str, leases: ControlLeases | None = None) -> None:
        self.bus = bus
        self._leases = leases or ControlLeases(bus, "client")
        self.tenant = tenant
        self.stream = subjects.events_stream(tenant)

    async def workspace(self, conversation: str) -> str | None:
        """Where the conversation lives; None before its first prompt was admitted."""
        key = subjects.conversation_key(self.tenant, conversation)
        record = await Bucket(self.bus, subjects.CONVERSATIONS).record(key, ConversationRecord)
        return None if record is None else record.workspace

    async def conversations(self) -> list[tuple[str, str, int]]:
        """(conversation, workspace, created in unix ms), oldest first."""
        found: list[tuple[str, str, int]] = []
        bucket = Bucket(self.bus, subjects.CONVERSATIONS)
        async for entry, record in bucket.records(ConversationRecord, f"{self.tenant}.*"):
            found.append((entry.key.partition(".")[2], record.workspace, entry.stored_at_ns // 1_000_000))
        return found

    async def owner(self, workspace: str, conversation: str) -> OwnerRecord | None:
        key = subjects.owner_key(self.tenant, workspace, conversation)
        return await Bucket(self.bus, subjects.OWNERS).record(key, OwnerRecord)

    async def owners(self) -> list[tuple[str, str, OwnerRecord]]:
        """(workspace, conversation, record) of every conversation of the tenant."""
        found: list[tuple[str, str, OwnerRecord]] = []
        async for entry, record in Bucket(self.bus, subjects.OWNERS).records(OwnerRecord, f"{self.tenant}.*.*"):
            _, workspace, conversation = entry.key.split(".")
            found.append((workspace, conversation, record))
        return found

    async def request(self, request_id: str) -> RequestRecord | None:
        key = subjects.request_key(self.tenant, request_id)
        return await Bucket(self.bus, subjects.REQUESTS).record(key, RequestRecord)

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

    # --- controls ---

    async def control(self, request: ControlRequest, workspace: str) -> ControlReply:
        """Ask the collector (see `tether.asking`), with the conversation's control lease where the verb needs it."""
        if request.verb in USER_VERBS:
            return await self._leases.ask(request)
        return await ask_collector(self.bus, self.tenant, workspace, request)

    async def beyond_log(self, address: EventAddress) -> Snapshot | Absent:
        """What the log no longer has, from the collector: of the living execution, or the final one."""
        found = await Snapshots(self.bus, self.tenant).beyond_log(address)
        return found.snapshot if isinstance(found, Found) else found

    # --- the log, folded ---

    async def fold(self, filter_subject: str) -> Log:
        """Everything that the log holds there. What it no longer holds is a gap in the state."""
        log = Log()
        while True:
            batch = await self.bus.read(self.stream, log.sequence, filter_subject)
            for stored in batch:
                log.created_ms = log.created_ms or stored.stored_at_ns // 1_000_000
                log.sequence, log.stored_at_ns = stored.sequence, stored.stored_at_ns
                try:
                    content = decode(stored.subject, stored.data, stored.stored_at_ns)
                except InvalidError:
                    continue  # nobody can read it; a frame's events show as a gap before the next one
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

    async def snapshot(self, address: EventAddress) -> tuple[str, Snapshot] | Absent:
        """(source, snapshot): the collector's of a living execution, else the fold of the log, or the collector's final
        one. What not even that has is a gap in the fold of what the log still holds."""
        found = await Snapshots(self.bus, self.tenant).get(address)
        if isinstance(found, Found):
            return found.source, found.snapshot
        log = await self.fold(address.subject)
        fold = log.folds.get(address.execution)
        if fold is None or found.why is Absence.CAPABILITY_MISSING:
            return found
        state = fold.freeze()
        target = await self.target(address) or target_of(state, address)
        mark = Watermark(ordinal=state.applied, sequence=log.sequence, tag=tag_of(log.stored_at_ns))
        at = state.ended_at or state.response_ended_at or log.stored_at_ns // 1_000_000
        return "log", take(target, state, mark, captured_at=at)
