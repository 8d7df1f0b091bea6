"""Carrying deletions on: `core.deletion` says which step is next, this does it (see there for the order and why).

Every router looks at the records each LOOK_S and carries those that are due; several may carry the same one, since a
step that is done twice finds done what was done, and the record moves by compare-and-set.

Erasing: a message of a stream is deleted one by one, with its bytes overwritten on the servers' disks. A purge leaves
the bytes where they are until the server writes their block anew, which of a stream's last block it never does. A
bucket does not allow it; of a record its key is deleted and purged.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Final

import structlog
from pydantic import ValidationError

from tether import events as ev
from tether import ids, subjects
from tether.asking import ask_collector
from tether.blobs import MANIFEST
from tether.checkpoint import CheckpointReference
from tether.control import Authority, ControlRequest, decode_command
from tether.control_lease import ControlLeases
from tether.deletion import REMEMBERED_S, DeletionRecord, ForgetPayload, Forgotten
from tether.errors import BusError, InvalidError, NoReplyError, ProblemError, UnreadableRecordError
from tether.events import ConversationDeleted, ConversationEvent
from tether.frames import Frame, decode
from tether.jsonsafe import loads_object
from tether.kv import Bucket, Conflict
from tether.limits import EXECUTION_TOKEN_CONVERSATION, KIB, NUMBER_MAX
from tether.owner import Accepted, DeletionOrdered, OwnerRecord
from tether.owner import decide as decide_owner
from tether.ports import Bus, StoredMessage
from tether.prompt import ConversationRecord
from tether.sandbox import Registration, SandboxRecord
from tether.subjects import EventAddress
from tether_router.admitter import Clock
from tether_router.core import deletion as core
from tether_router.core.deletion import Busy, Erased, Later, Marked, Result, VolumeAway, VolumeClean
from tether_router.log import Log, read_through
from tether_router.records import Records

LOOK_S: Final = 0.5
RECOUNT_S: Final = 60.0  # all records are read again: a bucket may have been put back to an older state
AGAIN_S: Final = 0.5  # between attempts of one deletion that waits for something, growing to
AGAIN_MAX_S: Final = 10.0
CARRIED_MAX: Final = 4  # at once, of one router: erasing is some hundred messages a second, for all of them together
PROJECTIONS_S: Final = 30.0  # a database that is behind for longer is told of, and not waited for
AGENT_REPLY_S: Final = 20.0  # it may start a process that looks at the volume
_RACES_MAX: Final = 8
_HEAD_BYTES: Final = 4 * KIB  # of a blob: whose snapshot it is stands at its beginning
_DIGEST: Final = re.compile(rb'"digest":\s*"([0-9a-f]{64})"')

_log = structlog.get_logger("tether.router")
StepHook = Callable[[str], None]  # told after each step that was taken; tests crash there


class Deletions:
    """One router's. `run` works until it is cancelled."""

    def __init__(
        self, bus: Bus, log: Log, records: Records, clock: Clock, *, step: StepHook = lambda _name: None
    ) -> None:
        self._bus = bus
        self._log = log
        self._records = records
        self._clock = clock
        self._step = step
        self._bucket = Bucket(bus, subjects.DELETIONS)
        self._leases = ControlLeases(bus, "router")
        self._open: dict[str, DeletionRecord] = {}  # by key; a cache: whoever acts reads again
        self._read_up_to = 0
        self._read_all_at_s = float("-inf")
        self._carried: dict[str, asyncio.Task[None]] = {}
        self._waits: dict[str, tuple[float, float]] = {}  # key → when it is tried again, and the pause before that

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    try:
                        await self._look()
                    except BusError as error:
                        _log.info("deletions_later", reason=str(error))
                    for key in self._due():
                        task = group.create_task(self._carry(key), name=f"deletion-{key}")
                        self._carried[key] = task
                    await asyncio.sleep(LOOK_S)
        finally:
            await self._leases.close()

    async def _look(self) -> None:
        """What was written since the last look; now and then everything. Raises BusError."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._read_all_at_s >= RECOUNT_S:
            self._open, self._read_up_to, self._read_all_at_s = {}, 0, now_s
        async for entry, record in self._bucket.records(DeletionRecord, "*.*", after=self._read_up_to):
            self._read_up_to = entry.revision
            if record.state in ("running", "done"):
                self._open[entry.key] = record
            else:
                self._open.pop(entry.key, None)

    def _due(self) -> list[str]:
        """Those to be carried on now, as many as there is room for."""
        now_ms, now_s = self._clock(), asyncio.get_running_loop().time()
        self._waits = {key: wait for key, wait in self._waits.items() if key in self._open}
        due = [
            key
            for key, record in self._open.items()
            if key not in self._carried and core.is_due(record, now_ms) and self._waits.get(key, (0.0, 0.0))[0] <= now_s
        ]
        return due[: CARRIED_MAX - len(self._carried)]

    async def _carry(self, key: str) -> None:
        """The task of one deletion, until there is nothing to do for it now, or it has to wait."""
        before = self._open.get(key)
        try:
            while True:
                record = await self.advance(key)
                if record is None or record.state in ("failed", "freed"):
                    self._open.pop(key, None)
                    return
                self._open[key] = record
                if record == before or not core.is_due(record, self._clock()):
                    break
                self._waits.pop(key, None)
                before = record
        except (BusError, InvalidError, ProblemError, OSError) as error:
            _log.info("deletion_later", deletion=key, reason=str(error)[:300])
        finally:
            del self._carried[key]
        pause_s = min(2 * self._waits.get(key, (0.0, AGAIN_S / 2))[1], AGAIN_MAX_S)
        self._waits[key] = (asyncio.get_running_loop().time() + pause_s, pause_s)

    async def advance(self, key: str) -> DeletionRecord | None:
        """Take the step that is next; the record as it is then. Raises BusError, InvalidError, ProblemError."""
        entry = await self._bucket.get(key)
        if entry is None:
            return None
        record = self._bucket.parse(entry, DeletionRecord)
        if not core.is_due(record, self._clock()):
            return record
        if record.state == "done":
            await self._free(record)
            changed = core.free(record, self._clock())
        else:
            changed = core.decide(record, await self._do(record), self._clock())
        if changed == record:
            return record
        self._step(f"{record.step}_done")
        ttl_s = None if changed.state == "running" else int(REMEMBERED_S)
        if changed.state == "done":
            ttl_s = None  # until it is freed
        try:
            await self._bucket.update(key, changed.value(), op=ids.new_id("op"), revision=entry.revision, ttl_s=ttl_s)
        except Conflict as lost:
            return None if lost.current is None else self._bucket.parse(lost.current, DeletionRecord)
        self._step(f"{record.step}_noted")
        named = {"tenant": record.tenant, "conversation": record.conversation, "deletion": record.deletion}
        if changed.state != record.state:
            _log.info("deletion_" + changed.state, **named, erased=changed.erased, pending_on=changed.pending_on)
        elif changed.step != record.step:
            _log.info("deletion_step", **named, step=changed.step)
        return changed

    async def _do(self, record: DeletionRecord) -> Result:
        match record.step:
            case "marking":
                return await self._mark(record)
            case "prompts":
                return await self._prompts(record)
            case "sandbox" | "volume":
                return await self._sandbox(record)
            case "checkpoints":
                return await self._checkpoints(record)
            case "blobs":
                return Erased({"blobs": await self._blobs(record)})
            case "log":
                return await self._erase_log(record, NUMBER_MAX)
            case "records":
                return await self._erase_records(record)
            case "projections":
                return await self._projections(record)

    # --- marking ---

    async def _mark(self, record: DeletionRecord) -> Result:
        key = subjects.owner_key(record.tenant, record.workspace, record.conversation)
        for _ in range(_RACES_MAX):
            entry = await self._records.owner(key)
            ordered = DeletionOrdered(record.deletion, record.force, self._clock())
            decision = decide_owner(entry.record, ordered)
            owner = decision.record if isinstance(decision, Accepted) else entry.record
            if isinstance(decision, Accepted):
                written = await self._records.write_owner(key, owner, entry.revision, ids.new_id("op"))
                if written is None:
                    continue
                self._step("owner_marked")
            if owner.state == "idle":
                return Marked(() if owner.native_session is None else (owner.native_session,))
            execution = "" if owner.target is None else owner.target.execution
            if owner.deletion == record.deletion:
                await self._erase_prompts(record)  # one that waits would begin at the end of this one
                await self._stop(record, owner)
                return Busy(execution, stopping=True)
            return Busy(execution, stopping=False)
        return Later("the owner record changes too fast")

    async def _stop(self, record: DeletionRecord, owner: OwnerRecord) -> None:
        """The exact stop of what runs: once, whoever asks again. Its end in the log is the proof."""
        if owner.target is None or owner.state == "stopping":
            return  # a takeover stops it
        control = ids.control_id(record.tenant, record.deletion, f"stop/{owner.target.execution}")
        await self._leases.ask(ControlRequest(control=control, verb="stop", target=owner.target))

    # --- prompts ---

    async def _prompts(self, record: DeletionRecord) -> Erased:
        erased = {"prompts": await self._erase_prompts(record)}
        stream = subjects.COMMANDS_STREAM
        commands = 0
        async for message in self._messages(stream, subjects.command(record.tenant, record.workspace)):
            try:
                named = decode_command(message.data).target.conversation
            except InvalidError:
                continue
            if named == record.conversation:
                commands += await self._bus.erase(stream, message.sequence)
        erased["commands"] = commands
        return Erased(erased, await self._sessions(record))

    async def _erase_prompts(self, record: DeletionRecord) -> int:
        subject = subjects.prompt(record.tenant, record.workspace, record.conversation)
        return await self._erase(subjects.PROMPTS_STREAM, subject)

    async def _sessions(self, record: DeletionRecord) -> tuple[str, ...]:
        """The agents' own sessions that the log names."""
        found: dict[str, None] = {}
        async for message in self._messages(subjects.events_stream(record.tenant), self._of(record)):
            if b"native_session" not in message.data and b'"from"' not in message.data:
                continue
            try:
                content = decode(message.subject, message.data)
            except InvalidError:
                continue
            for event in content.events if isinstance(content, Frame) else ():
                for name in ("native_session", "from"):
                    value = event.body.get(name)
                    if event.type in (ev.SESSION_BOUND, ev.SESSION_RECOVERED) and isinstance(value, str) and value:
                        found[value[:256]] = None
        return tuple(found)

    # --- the sandbox ---

    async def _sandbox(self, record: DeletionRecord) -> Result:
        """A collector that serves holds the volume; else the agent service may reach it. Its record of the sandbox has
        the conversation forgotten in any case."""
        key = subjects.registration_key(
            record.tenant, record.workspace, ids.sandbox_id(record.tenant, record.workspace)
        )
        registered = await Bucket(self._bus, subjects.SANDBOXES).record(key, Registration)
        # A registration outlives its collector for a while: nobody may answer.
        forgotten = None if registered is None else await self._ask_collector(record)
        told = await self._ask_agent(record)
        if forgotten is None or (not forgotten.clean and told.clean):
            forgotten = told
        if not forgotten.clean:
            return VolumeAway(forgotten.pending_on)
        if told.pending_on == core.NO_AGENT:
            return VolumeAway(told.pending_on)  # its record of the sandbox may name the conversation
        return VolumeClean({"executions": forgotten.executions, "files": forgotten.files})

    async def _ask_collector(self, record: DeletionRecord) -> Forgotten:
        owner = await self._records.owner(subjects.owner_key(record.tenant, record.workspace, record.conversation))
        request = ControlRequest(
            control=ids.control_id(record.tenant, record.deletion, "forget"),
            verb="forget",
            authority=Authority(kind="owner", holder="router", token=owner.revision),
            payload=_payload(record).model_dump(mode="json"),
        )
        reply = await ask_collector(self._bus, record.tenant, record.workspace, request)
        if reply.status != "settled" or reply.result is None:
            why = "its collector does not answer" if reply.problem is None else reply.problem.detail
            return Forgotten(clean=False, pending_on=why)
        try:
            return Forgotten.model_validate(reply.result)
        except ValidationError:
            return Forgotten(clean=False, pending_on="its collector's answer cannot be read")

    async def _ask_agent(self, record: DeletionRecord) -> Forgotten:
        asked = {"tenant": record.tenant, "workspace": record.workspace, **_payload(record).model_dump(mode="json")}
        try:
            data = json.dumps(asked, separators=(",", ":")).encode()
            message = await self._bus.request(subjects.agent("forget"), data, timeout_s=AGENT_REPLY_S)
            value = loads_object(message.data, "answer", bytes_max=64 * KIB)
            if "problem" in value:
                return Forgotten(clean=False, pending_on=str(value["problem"].get("detail", "")) or core.NO_AGENT)
            return Forgotten.model_validate(value)
        except (NoReplyError, InvalidError, ValidationError, AttributeError):
            return Forgotten(clean=False, pending_on=core.NO_AGENT)

    # --- checkpoints ---

    async def _checkpoints(self, record: DeletionRecord) -> Result:
        key = subjects.sandbox_key(record.tenant, record.workspace)
        sandbox = await Bucket(self._bus, subjects.SANDBOXES).record(key, SandboxRecord)
        if sandbox is not None and sandbox.state in ("draining", "deleting"):
            return Later(f"the sandbox is {sandbox.state}")
        if not record.volume_clean and await self._others_need_it(record):
            return Erased()
        where = subjects.checkpoint_key(record.tenant, record.workspace)
        references = await self._drop_key(subjects.CHECKPOINTS, where)
        self._step("references_dropped")
        prefix = subjects.blob(record.tenant, record.workspace, "checkpoint", "x", MANIFEST).removesuffix("x.manifest")
        blobs = await self._erase(subjects.blobs_stream(record.tenant), prefix + ">")
        return Erased({"checkpoints": references, "checkpoint_blobs": blobs})

    async def _others_need_it(self, record: DeletionRecord) -> bool:
        """The volume is out of reach, and the workspace's other conversations may have nothing but the checkpoint."""
        key = subjects.checkpoint_key(record.tenant, record.workspace)
        try:
            reference = await Bucket(self._bus, subjects.CHECKPOINTS).record(key, CheckpointReference)
        except UnreadableRecordError:
            return False
        if reference is None or reference.stored == "volume":
            return False
        conversations = Bucket(self._bus, subjects.CONVERSATIONS)
        own = subjects.conversation_key(record.tenant, record.conversation)
        async for entry, other in conversations.records(ConversationRecord, f"{record.tenant}.*"):
            if other.workspace == record.workspace and entry.key != own:
                return True
        return False

    # --- blobs ---

    async def _blobs(self, record: DeletionRecord) -> int:
        """What the conversation's events refer to, and snapshots of it that were too large for a reply."""
        log, blobs = subjects.events_stream(record.tenant), subjects.blobs_stream(record.tenant)
        doomed: set[str] = set()
        async for message in self._messages(log, self._of(record)):
            doomed.update(match.decode() for match in _DIGEST.findall(message.data))
        doomed |= await self._snapshots(record, doomed)
        if not doomed:
            return 0
        own = f"tether.event.{record.tenant}.{record.workspace}.{record.conversation}."
        async for message in self._messages(log, f"tether.event.{record.tenant}.{record.workspace}.>"):
            if not message.subject.startswith(own):
                doomed.difference_update(match.decode() for match in _DIGEST.findall(message.data))
        erased = 0
        for digest in sorted(doomed):
            part = subjects.blob(record.tenant, record.workspace, "artifact", digest, MANIFEST)
            erased += await self._erase_blob(blobs, part.removesuffix(MANIFEST) + "*")
        return erased

    async def _erase_blob(self, stream: str, parts: str) -> int:
        """The manifest first, so that nobody takes the rest for whole; the first part, which tells whose it is, last:
        a crash in between leaves what is found again."""
        found = [message.sequence async for message in self._messages(stream, parts)]
        return sum([await self._bus.erase(stream, sequence) for sequence in reversed(found)])

    async def _snapshots(self, record: DeletionRecord, known: set[str]) -> set[str]:
        """Blobs that no event names: a snapshot that was asked for says at its beginning of whom it is."""
        stream = subjects.blobs_stream(record.tenant)
        first = subjects.blob(record.tenant, record.workspace, "artifact", "x", 0).replace(".x.", ".*.")
        whose = re.compile(rb'"target":\{[^{}]*"conversation":"%s"' % re.escape(record.conversation.encode()))
        found = set()
        for subject in await self._bus.subjects(stream, first):
            digest = subject.split(".")[5]
            if digest in known:
                continue
            chunk = await self._bus.last(stream, subject)
            if chunk is not None and whose.search(chunk.data[:_HEAD_BYTES]):
                found.add(digest)
        return found

    # --- the log, records ---

    async def _erase_log(self, record: DeletionRecord, until: int) -> Erased:
        """`conversation.deleted` is told, everything else erased. Told again (of the same `until`) it is found."""
        address = EventAddress(record.tenant, record.workspace, record.conversation, EXECUTION_TOKEN_CONVERSATION)
        while True:
            tail = await self._log.tail(address)
            event = ConversationEvent(
                id=f"{record.deletion}/{until}/{ev.CONVERSATION_DELETED}",
                generation=tail.generation,
                at=self._clock(),
                type=ev.CONVERSATION_DELETED,
                body=ConversationDeleted(deletion=record.deletion, until=until).model_dump(mode="json"),
            )
            told = await self._log.append(address, event, 0)
            if told is not None:
                break
        self._step("deletion_told")
        stream = subjects.events_stream(record.tenant)
        count = await self._erase(stream, self._of(record), but=told.sequence)
        return Erased({"events": count}, sequence=told.sequence)

    async def _erase_records(self, record: DeletionRecord) -> Erased:
        stream = subjects.quarantine_stream(record.tenant)
        refused = 0
        if await self._bus.state(stream) is not None:
            where = f"tether.quarantine.{record.tenant}.{record.workspace}.{record.conversation}.>"
            refused = await self._erase(stream, where)
        notes = 0
        bucket = Bucket(self._bus, subjects.NOTIFICATIONS)
        async for entry in bucket.keys(f"{record.tenant}.*.*"):
            if entry.value.get("conversation") == record.conversation:
                notes += await self._drop_key(subjects.NOTIFICATIONS, entry.key)
        return Erased({"quarantine": refused, "notifications": notes})

    async def _projections(self, record: DeletionRecord) -> Result:
        behind = []
        async for entry in Bucket(self._bus, subjects.PROJECTIONS).keys(f"*.{record.tenant}.*"):
            sequence = entry.value.get("sequence")
            if not isinstance(sequence, int) or sequence < record.log_sequence:
                behind.append(entry.key.partition(".")[0])
        if not behind:
            return core.Reached()
        waited = (self._clock() - record.updated_at) / 1000 >= PROJECTIONS_S
        return core.Behind(tuple(sorted(set(behind))), waited)

    async def _free(self, record: DeletionRecord) -> None:
        """What came late is erased, and no record bars the id any more."""
        await self._erase_prompts(record)
        await self._erase_log(record, core.nobodys_until(record))
        await self._erase_records(record)
        where = subjects.owner_key(record.tenant, record.workspace, record.conversation)
        await self._drop_key(subjects.OWNERS, where)
        self._step("owner_dropped")
        await self._drop_key(subjects.CONVERSATIONS, subjects.conversation_key(record.tenant, record.conversation))

    # --- erasing ---

    def _of(self, record: DeletionRecord) -> str:
        return subjects.conversation_events(record.tenant, record.workspace, record.conversation)

    async def _messages(self, stream: str, subject: str) -> AsyncIterator[StoredMessage]:
        """What is stored now, in order."""
        state = await self._bus.state(stream)
        if state is not None:
            async for message in read_through(self._bus, stream, subject, 0, state.last_sequence):
                yield message

    async def _erase(self, stream: str, subject: str, *, but: int = 0) -> int:
        """Every message that is stored now, one by one: `but` is kept. How many."""
        count = 0
        async for message in self._messages(stream, subject):
            if message.sequence != but:
                count += await self._bus.erase(stream, message.sequence)
        return count

    async def _drop_key(self, name: str, key: str) -> int:
        """Delete a key and its history; 1 where there was a value."""
        bucket, stream, subject = Bucket(self._bus, name), f"KV_{name}", f"$KV.{name}.{key}"
        for _ in range(_RACES_MAX):
            last = await self._bus.last(stream, subject)
            if last is None:
                return 0
            live = last.headers.get("KV-Operation") not in ("DEL", "PURGE")
            try:
                if live:
                    await bucket.delete(key, revision=last.sequence)
                    last = await self._bus.last(stream, subject)
            except Conflict:
                continue
            if last is not None:
                await self._bus.purge(stream, subject, up_to=last.sequence)
            return int(live)
        raise InvalidError(f"{name}/{key}", "changes too fast to be deleted")


def _payload(record: DeletionRecord) -> ForgetPayload:
    return ForgetPayload(deletion=record.deletion, conversation=record.conversation, sessions=record.sessions)
