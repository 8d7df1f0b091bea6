"""Step 2 of an attach: the snapshot of one execution, from whoever has it. Reading only: nothing is ever woken, no
lease is taken, nothing is submitted.

    owns its conversation   collector ─▶ log
    has ended               log, where it is whole ─▶ the collector's final snapshot (its disk, or a blob of it)

A collector is asked only if its **registration** says that it can (`executionSnapshotAttach`): an older peer is never
sent a verb that it does not know. The capability is that of one start of a collector (its instance id), so the
registration is read again after the answer: where another instance is registered by then, whoever answered is not known
to be the one that was asked, and the question is asked anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from pydantic import ValidationError

from tether import subjects
from tether.asking import ask_collector
from tether.blobs import snapshot_of
from tether.control import ControlRequest
from tether.cursor import tag_of
from tether.errors import Code, InvalidError
from tether.events import EXECUTION_STARTED, ExecutionStarted
from tether.fold import Applied, ExecutionFold, ExecutionState
from tether.fold_bounds import weight
from tether.frames import Frame, decode
from tether.ids import ExecutionTarget, new_id
from tether.kv import Bucket
from tether.limits import (
    BACKGROUND_MAX,
    DISCOVERY_SANDBOXES_MAX,
    EXECUTION_CHARS_MAX,
    EXECUTION_ITEMS_MAX,
    INTERACTIONS_OPEN_MAX,
    ITEM_ID_CHARS_MAX,
    MIB,
    NUMBER_MAX,
    RECEIPTS_MAX,
    TURNS_MAX,
)
from tether.owner import OwnerRecord
from tether.ports import Bus, StoredMessage
from tether.sandbox import CAN_SNAPSHOT, ExecutionSummary, Registration
from tether.snapshot import Snapshot, Watermark, take
from tether.subjects import EventAddress

_OWN_ITEMS_MAX: Final = 64  # of gaps, beside what the fold bounds
INSTANCES_MAX: Final = 4  # collectors that replace each other while one question is asked

Source = Literal["collector", "log"]


class Absence(Enum):
    """Why there is no snapshot. Of those where both sources failed, the one that somebody can do something about."""

    NOTHING_LOGGED = "nothing_logged"  # and nobody knows of it
    NOT_WHOLE = "not_whole"  # the log no longer begins at ordinal 1
    NO_COLLECTOR = "no_collector"  # none is registered
    CAPABILITY_MISSING = "capability_missing"  # an older collector
    NO_ANSWER = "no_answer"
    NOT_RETAINED = "not_retained"  # RETENTION_GAP: deleted before its time, for a quota
    NOT_SAVED = "not_saved"  # EXECUTION_DURABILITY_GAP: it could not be written
    REFUSED = "refused"  # it does not have this target (any more), or answered for another


@dataclass(frozen=True, slots=True)
class Found:
    source: Source
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Absent:
    why: Absence

    @property
    def detail(self) -> str:
        return _DETAILS[self.why]


_DETAILS: Final = {
    Absence.NOTHING_LOGGED: "nothing of the execution is logged",
    Absence.NOT_WHOLE: "the log no longer begins with the execution's first event",
    Absence.NO_COLLECTOR: "no collector is registered that could tell what the log no longer has",
    Absence.CAPABILITY_MISSING: (
        "CAPABILITY_MISSING: the log is no longer whole, and the sandbox's collector is of an older version that gives "
        "no snapshots; upgrade it"
    ),
    Absence.NO_ANSWER: "the collector did not answer",
    Absence.NOT_RETAINED: "RETENTION_GAP: the final snapshot was deleted before its time, for a quota of the volume",
    Absence.NOT_SAVED: "EXECUTION_DURABILITY_GAP: the final snapshot could not be written to the volume",
    Absence.REFUSED: "the collector has no snapshot of this target",
}
_GAPS: Final = {
    Code.RETENTION_GAP: Absence.NOT_RETAINED,
    Code.EXECUTION_DURABILITY_GAP: Absence.NOT_SAVED,
}


class Snapshots:
    """Of one tenant."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        self._bus = bus
        self._tenant = tenant
        self._stream = subjects.events_stream(tenant)

    async def get(self, address: EventAddress, known: ExecutionTarget | None = None) -> Found | Absent:
        """`known`: the target that the reader has of it, for when its log is gone. Raises BusError."""
        owned = await self.owned(address)
        if owned is not None:
            found = await self.of_collector(owned)
            if isinstance(found, Found):
                return found
            folded = await self.of_log(address, owned)
            return folded if isinstance(folded, Found) else _worse(found, folded)
        folded = await self.of_log(address)
        if isinstance(folded, Found):
            return folded
        target = known or await self._told_target(address)
        if target is None:
            return folded
        found = await self.of_collector(_loosened(target))
        return found if isinstance(found, Found) else _worse(found, folded)

    async def beyond_log(self, address: EventAddress, known: ExecutionTarget | None = None) -> Found | Absent:
        """For whoever has read the log and found it not whole: the collector's, living or final."""
        target = await self.owned(address)
        if target is None:
            target = known or await self._told_target(address)
            target = None if target is None else _loosened(target)
        if target is None:
            return Absent(Absence.NOT_WHOLE)
        found = await self.of_collector(target)
        return found if isinstance(found, Found) else _worse(found, Absent(Absence.NOT_WHOLE))

    async def owned(self, address: EventAddress) -> ExecutionTarget | None:
        """The whole target, where this execution owns its conversation now."""
        key = subjects.owner_key(address.tenant, address.workspace, address.conversation)
        record = await Bucket(self._bus, subjects.OWNERS).record(key, OwnerRecord)
        target = None if record is None else record.target
        return target if target is not None and target.execution == address.execution else None

    async def registration(self, target: ExecutionTarget) -> Registration | None:
        """Of the collector that serves the target's workspace."""
        key = subjects.registration_key(target.tenant, target.workspace, target.sandbox)
        return await Bucket(self._bus, subjects.SANDBOXES).record(key, Registration)

    async def of_collector(self, target: ExecutionTarget) -> Found | Absent:
        """See the module. Raises BusError."""
        for _ in range(INSTANCES_MAX):
            peer = await self.registration(target)
            if peer is None:
                return Absent(Absence.NO_COLLECTOR)
            if CAN_SNAPSHOT not in peer.capabilities:
                return Absent(Absence.CAPABILITY_MISSING)
            request = ControlRequest(control=new_id("ctl"), verb="snapshot", target=target)
            reply = await ask_collector(self._bus, target.tenant, target.workspace, request)
            after = await self.registration(target)
            if after is None or after.instance != peer.instance:
                continue
            if reply.status == "unknown":
                return Absent(Absence.NO_ANSWER)
            if reply.problem is not None and reply.problem.code in _GAPS:
                return Absent(_GAPS[Code(reply.problem.code)])
            snapshot = await snapshot_of(self._bus, target.tenant, target.workspace, reply.result)
            if reply.status == "rejected" or snapshot is None or snapshot.target.differs(target) is not None:
                return Absent(Absence.REFUSED)
            if not bounded(snapshot):
                return Absent(Absence.REFUSED)
            return Found("collector", snapshot)
        return Absent(Absence.NO_ANSWER)

    async def of_log(self, address: EventAddress, target: ExecutionTarget | None = None) -> Found | Absent:
        """The fold from ordinal 1, up to the log's end as its leader says."""
        fold = ExecutionFold()
        last: StoredMessage | None = None
        while True:
            batch = await self._bus.read(self._stream, 0 if last is None else last.sequence, address.subject)
            for stored in batch:
                frame = _frame(stored)
                if frame is None or any(fold.apply(event) is Applied.HOLE for event in frame.events):
                    return Absent(Absence.NOT_WHOLE)
                last = stored
            if batch:
                continue
            after = 0 if last is None else last.sequence
            if await self._bus.next_after(self._stream, after, address.subject) is None:
                break  # not a follower that lags
        if last is None:
            return Absent(Absence.NOTHING_LOGGED)
        state = fold.freeze()
        mark = Watermark(ordinal=state.applied, sequence=last.sequence, tag=tag_of(last.stored_at_ns))
        at = state.ended_at or state.response_ended_at or last.stored_at_ns // 1_000_000
        return Found("log", take(target or target_of(state, address), state, mark, captured_at=at))

    async def _told_target(self, address: EventAddress) -> ExecutionTarget | None:
        """Of an execution that owns nothing any more: by the log, or by the collector that still has it."""
        return await self._logged_target(address) or await self._listed_target(address)

    async def _listed_target(self, address: EventAddress) -> ExecutionTarget | None:
        """As a collector of the workspace lists it: what has ended is listed for as long as it is retained."""
        bucket = Bucket(self._bus, subjects.SANDBOXES)
        every = subjects.sandbox_key(address.tenant, address.workspace) + ".*"
        peers = [peer async for _, peer in bucket.records(Registration, every)][:DISCOVERY_SANDBOXES_MAX]
        listed = [one.target for peer in peers for one in peer.executions]  # a sandbox may name whatever it likes
        if any(peer.executions_omitted for peer in peers):
            listed += await self._discovered(address)
        return next((target for target in listed if _is_at(target, address)), None)

    async def _discovered(self, address: EventAddress) -> list[ExecutionTarget]:
        """Of a conversation, as the collector says that serves the workspace's controls: its list was cut."""
        request = ControlRequest(control=new_id("dsc"), verb="discover", payload={"conversation": address.conversation})
        reply = await ask_collector(self._bus, address.tenant, address.workspace, request)
        try:
            entries = (reply.result or {}).get("executions", ())
            return [ExecutionSummary.model_validate(entry).target for entry in entries]
        except ValidationError:
            return []

    async def _logged_target(self, address: EventAddress) -> ExecutionTarget | None:
        """As the execution's first event names it, where that is still there."""
        first = await self._bus.next_after(self._stream, 0, address.subject)
        frame = None if first is None else _frame(first)
        if frame is None or frame.events[0].type != EXECUTION_STARTED:
            return None
        try:
            return ExecutionTarget.model_validate(ExecutionStarted.model_validate(frame.events[0].body).target)
        except ValidationError:
            return None


def _frame(stored: StoredMessage) -> Frame | None:
    try:
        content = decode(stored.subject, stored.data)
    except InvalidError:
        return None
    return content if isinstance(content, Frame) else None


def _is_at(target: ExecutionTarget, address: EventAddress) -> bool:
    said = (target.tenant, target.workspace, target.conversation, target.execution)
    return said == (address.tenant, address.workspace, address.conversation, address.execution)


def bounded(snapshot: Snapshot) -> bool:
    """Whether it says no more than the fold of a log could: a collector makes it, and a sandbox may be its own."""
    state = snapshot.state
    if not 0 <= state.applied <= NUMBER_MAX or snapshot.watermark.ordinal != state.applied:
        return False
    counts = ((state.usage_by_turn, TURNS_MAX), (state.receipts, RECEIPTS_MAX), (state.background, BACKGROUND_MAX))
    if len(state.items) > EXECUTION_ITEMS_MAX + _OWN_ITEMS_MAX or any(len(have) > most for have, most in counts):
        return False
    if any(len(item.id) > ITEM_ID_CHARS_MAX or "\x00" in item.id for item in state.items):
        return False
    waiting = sum(item.kind == "interaction" and item.state == "pending" for item in state.items)
    return waiting <= INTERACTIONS_OPEN_MAX and sum(map(weight, state.items)) <= EXECUTION_CHARS_MAX + MIB


def _loosened(target: ExecutionTarget) -> ExecutionTarget:
    """Of an execution that has ended: a fallback may have made another process of it since its first event."""
    return target.model_copy(update={"process_generation": 0, "native_session": None})


def _worse(collector: Absent, log: Absent) -> Absent:
    if log.why is Absence.NOTHING_LOGGED and collector.why is not Absence.CAPABILITY_MISSING:
        return log if collector.why in (Absence.NO_COLLECTOR, Absence.NOTHING_LOGGED) else collector
    return collector


def target_of(state: ExecutionState, address: EventAddress) -> ExecutionTarget:
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
