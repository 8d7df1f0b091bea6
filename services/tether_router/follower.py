"""Owner records follow the log: at once by live hints, and by a sweep that is the net under them.

    live copy that may matter ─▶ wake who waits ─▶ catch up (read the log, then compare-and-set)
    every `sweep_s`, at start, after a reconnect or a lost hint ─▶ the owners that are not idle ─▶ catch up

A hint moves nothing by itself: it is a copy that may be late, twice or missing. Several routers follow at the same
time; compare-and-set lets one of them write, the others find it written.

The sweep knows which records are not idle from the bucket's own stream, of which it reads only what is new: a cache,
rebuilt whenever the stream is not the one it read. Work per sweep is bounded in records and in log read for each; what
is left is first in the next. What the sweep cannot judge it leaves: a `starting` whose command has not been claimed is
the agent service's to answer, and an empty log without a registration needs the provider's proof.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Final

import structlog

from tether import subjects
from tether.errors import BusError, InvalidError, PermissionDeniedError, SlowReaderError
from tether.limits import LIVE_BUFFER_BYTES_MAX, VOLUME_WAIT_S
from tether.owner import OwnerRecord
from tether.ports import Bus, LiveMessage, LiveSubscription
from tether.subjects import EventAddress, parse_event
from tether_router import metrics
from tether_router.admitter import Clock
from tether_router.core.facts import catch_up, is_hint
from tether_router.gates import Gates
from tether_router.log import Log, read_through
from tether_router.records import OwnerEntry, Records, owner_from

LIVE_ALL: Final = "tether.live.>"
HINTS_WAITING_MAX: Final = 10_000  # conversations to be looked at; beyond, the sweep finds them
WORKERS: Final = 4  # that look at hinted conversations, and again as many in a sweep
WRITE_RACES_MAX: Final = 4
SWEEP_RECORDS_MAX: Final = 5_000  # of one sweep
SWEEP_BATCHES_MAX: Final = 200  # batch reads of the bucket's stream in one sweep
EXECUTION_BATCHES_MAX: Final = 64  # batch reads of one execution in one sweep; admission reads without a bound
PROBE_S: Final = 1.0  # how often a silent live subscription looks for a reconnect
RETRY_S: Final = 1.0

_log = structlog.get_logger("tether.router")


@dataclass(frozen=True, slots=True)
class _Conversation:
    tenant: str
    workspace: str
    conversation: str

    @property
    def key(self) -> str:
        return subjects.owner_key(self.tenant, self.workspace, self.conversation)


class Follower:
    """One router's follower. `run` works until it is cancelled."""

    def __init__(
        self,
        bus: Bus,
        log: Log,
        records: Records,
        gates: Gates,
        clock: Clock,
        *,
        sweep_s: float,
        seen: Callable[[str, OwnerRecord], None] = lambda key, record: None,
    ) -> None:
        """`seen` is told each owner record as it stands, with its key."""
        self._bus = bus
        self._log = log
        self._records = records
        self._gates = gates
        self._clock = clock
        self._sweep_s = sweep_s
        self._seen = seen
        self._sweep_due = asyncio.Event()
        self._hinted: dict[_Conversation, None] = {}
        self._hints = asyncio.Event()
        self._active: dict[_Conversation, str | None] = {}  # → the execution that was reported as unclaimed
        self._swept_to = 0
        self._created = ""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_live(), name="router-live")
            group.create_task(self._sweep_always(), name="router-sweep")
            for number in range(WORKERS):
                group.create_task(self._work(), name=f"router-follow-{number}")

    # --- live hints ---

    async def _follow_live(self) -> None:
        while True:
            try:
                subscription = await self._bus.live(LIVE_ALL, buffer_bytes_max=LIVE_BUFFER_BYTES_MAX, keep=is_hint)
                try:
                    await self._bus.barrier()
                    self._sweep_due.set()
                    await self._hear(subscription)
                finally:
                    await subscription.close()
            except PermissionDeniedError:
                raise
            except SlowReaderError:
                _log.warning("live_hints_lost")
            except BusError as error:
                _log.warning("live_interrupted", error=str(error))
            await asyncio.sleep(RETRY_S)

    async def _hear(self, subscription: LiveSubscription) -> None:
        """Until the subscription is closed."""
        loop = asyncio.get_running_loop()
        epoch = self._bus.epoch
        while True:
            asked_s = loop.time()
            message = await subscription.next(PROBE_S)
            if self._bus.epoch != epoch:
                epoch = self._bus.epoch
                self._sweep_due.set()  # what was published meanwhile had no live copy for us
            if message is not None:
                self._hint(message)
            elif loop.time() < asked_s + PROBE_S / 2:
                return

    def _hint(self, message: LiveMessage) -> None:
        try:
            address = parse_event(message.subject)
        except InvalidError:
            return
        if address.conversation_level:
            return
        conversation = _Conversation(address.tenant, address.workspace, address.conversation)
        self._gates.wake(conversation.key)
        if len(self._hinted) >= HINTS_WAITING_MAX and conversation not in self._hinted:
            self._sweep_due.set()
            return
        self._hinted[conversation] = None
        self._hints.set()

    async def _work(self) -> None:
        while True:
            await self._hints.wait()
            if not self._hinted:
                self._hints.clear()
                continue
            conversation = next(iter(self._hinted))
            del self._hinted[conversation]  # a hint that comes while this one is worked on is looked at again
            await self._catch_up(conversation)

    # --- catching up ---

    async def _catch_up(self, conversation: _Conversation, *, batches_max: int | None = None) -> OwnerEntry | None:
        """Move the record to where the log is. Returns it as it stands, or None where it could not be read."""
        try:
            for _ in range(WRITE_RACES_MAX):
                entry = await self._records.owner(conversation.key)
                target = entry.record.target
                if target is None:
                    self._seen(conversation.key, entry.record)
                    return entry
                address = EventAddress(
                    conversation.tenant, conversation.workspace, conversation.conversation, target.execution
                )
                facts = await self._log.execution(address, batches_max=batches_max)
                changed = catch_up(entry.record, facts)
                if facts.empty:
                    self._report_unclaimed(conversation, entry)
                if changed == entry.record:
                    self._seen(conversation.key, entry.record)
                    return entry
                op = f"follow/{target.execution}/{facts.scanned_to}/{changed.state}"
                revision = await self._records.write_owner(conversation.key, changed, entry.revision, op)
                if revision is not None:
                    self._gates.wake(conversation.key)
                    self._seen(conversation.key, changed)
                    _log.info(
                        "owner_moved",
                        **asdict(conversation),
                        execution=target.execution,
                        before=entry.record.state,
                        after=changed.state,
                    )
                    return OwnerEntry(changed, revision)
        except (BusError, InvalidError) as error:
            _log.warning("owner_not_followed", **asdict(conversation), error=str(error))
        return None

    def _report_unclaimed(self, conversation: _Conversation, entry: OwnerEntry) -> None:
        """Said once for each execution; nothing is decided by an absence."""
        target, age_s = entry.record.target, (self._clock() - entry.record.updated_at) / 1000
        if target is None or age_s < VOLUME_WAIT_S or self._active.get(conversation) == target.execution:
            return
        if conversation in self._active:
            self._active[conversation] = target.execution
            named = {**asdict(conversation), "execution": target.execution}
            _log.warning("owner_unclaimed", **named, age_s=round(age_s))

    # --- the sweep ---

    async def _sweep_always(self) -> None:
        while True:
            self._sweep_due.clear()
            try:
                await self.sweep()
            except BusError as error:
                _log.warning("sweep_interrupted", error=str(error))
            await asyncio.sleep(RETRY_S)  # the least pause, whatever asks for it
            try:
                async with asyncio.timeout(self._sweep_s - RETRY_S):
                    await self._sweep_due.wait()
            except TimeoutError:
                pass

    async def sweep(self) -> None:
        """Look at the records that are not idle, those that waited longest first. Raises BusError."""
        await metrics.look(self._bus)
        await self._refresh_active()
        due = list(islice(self._active, SWEEP_RECORDS_MAX))
        parts = [due[number::WORKERS] for number in range(WORKERS)]
        async with asyncio.TaskGroup() as group:
            for number, part in enumerate(parts):
                group.create_task(self._sweep_part(part), name=f"router-sweep-{number}")

    async def _sweep_part(self, conversations: Sequence[_Conversation]) -> None:
        for conversation in conversations:
            entry = await self._catch_up(conversation, batches_max=EXECUTION_BATCHES_MAX)
            reported = self._active.pop(conversation, None)
            if entry is None or entry.record.state != "idle":
                self._active[conversation] = reported  # last in the next sweep

    async def _refresh_active(self) -> None:
        stream = f"KV_{subjects.OWNERS}"
        state = await self._bus.state(stream)
        if state is None:
            return
        if state.created != self._created or state.last_sequence < self._swept_to:
            self._created, self._swept_to = state.created, 0
            self._active.clear()
        prefix = f"$KV.{subjects.OWNERS}."
        seen = 0
        reading = read_through(
            self._bus, stream, prefix + ">", self._swept_to, state.last_sequence, batches_max=SWEEP_BATCHES_MAX
        )
        async for message in reading:
            seen = message.sequence
            conversation = _parse_key(message.subject.removeprefix(prefix))
            if conversation is None:
                continue
            entry = owner_from(message)
            if entry is not None and entry.record.state != "idle":
                self._active.setdefault(conversation)
            else:
                self._active.pop(conversation, None)
        if seen:
            self._swept_to = seen


def _parse_key(key: str) -> _Conversation | None:
    parts = key.split(".")
    return _Conversation(*parts) if len(parts) == 3 else None
