"""One tenant's projection: durable consumer → batches → database, by one process at a time.

    1  the lease of (tenant, shard) is held
    2  **the fast path needs proof** (`core.binding`): the consumer is there, the database's batch number is not behind
       the bucket's, and the log still has, at its place, the very message that the bucket names as the last applied one
    3  without it, the cold path:  the consumer goes  →  the number is taken, and what the rows call unfinished is
       marked to be looked at (`core.recovery` attaches to each of them)  →  the consumer is made anew, from the log's
       beginning  →  the bucket is told. Rows stay: what they contain is trimmed by identity, and what the log no
       longer has is not thrown away
    4  per batch:  what is not to be believed is marked  →  commit rows and number  →  what was refused to quarantine
       (`tether.quarantine`)  →  the number and the place to the bucket by compare-and-set  →  ack

A crash after any step is repaired by the next one: a batch that was committed and not numbered makes a database that
is ahead by one; one that was not acked is delivered again and trimmed. A consumer that was deleted, or went with its
stream, is made again; the memory of positions is dropped with it.

A batch is bounded in messages, events and bytes, so that a backlog becomes many transactions of well below a second.
Where nothing is behind, the projection rests between two commits for some times of what the last one took, and what
comes meanwhile is written together: live streams share its event loop. A reader of rows that knows of something newer
ends the rest (`reach`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

import structlog
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from tether import subjects, topology
from tether.cursor import Cursor, Standing, judge
from tether.errors import BusError, InvalidError, UnreadableRecordError
from tether.failpoints import under
from tether.kv import Bucket, Conflict, Entry
from tether.limits import MIB
from tether.ports import Bus, Job, StoredMessage
from tether.quarantine import QuarantineWriter, Refused
from tether_backend.core.binding import Doubt, Evidence, Noted, doubt_of
from tether_backend.core.stream import LogMessage, decode
from tether_backend.metrics import Metrics
from tether_backend.store.engine import Database
from tether_backend.store.projection import ProjectionWriter, SupersededError

_log = structlog.get_logger("tether.projection")
BATCH_MAX: Final = 512  # messages of one transaction, and those that are at hand at once
EVENTS_MAX: Final = 4096  # of one transaction: about 0.2 s
BYTES_MAX: Final = 4 * MIB
_REST_MIN_S: Final = 0.2  # between the begins of two commits, where nothing is behind
_REST_MAX_S: Final = 0.5
_REST_SHARE: Final = 6.0  # times what the last commit took
_CHECK_S: Final = 2.0  # is the consumer still there, is the number still ours
_RETRY_S: Final = 0.5
SHARD: Final = 0  # one per tenant, so far

# Told after each step: tests crash there.
Step = Callable[[str], None]
_failpoint: Final[Step] = under("backend.projection")


class Superseded(Exception):  # noqa: N818 - an outcome
    """The bucket's number was written by another projector, or the consumer is gone: bind again."""


class Projector:
    """See the module. `bound` while its database is proven and a consumer is followed, by this or another process."""

    def __init__(
        self,
        bus: Bus,
        database: Database,
        tenant: str,
        metrics: Metrics,
        *,
        step: Step = _failpoint,
        shared: bool = False,
    ) -> None:
        """`shared`: other tenants have their projections and streams in this process."""
        self.tenant = tenant
        self.durable = subjects.projection_durable(database.id, SHARD)
        self.stream = subjects.events_stream(tenant)
        self.writer = ProjectionWriter(bus, database, tenant, SHARD, metrics)
        self.bound = asyncio.Event()
        self._bus = bus
        self._database = database
        self._metrics = metrics
        self._step = step
        self._shared = shared
        self._quarantine = QuarantineWriter(bus, tenant)
        self._key = subjects.projection_key(database.id, tenant, SHARD)
        self._bucket = Bucket(bus, subjects.PROJECTIONS)
        self._number = 0
        self._place = Cursor.beginning()  # of the youngest message that was applied
        self._epoch = 0  # of the connection under which that was looked at
        self._entry: Entry | None = None
        self._reached: int | None = None  # the rows have what is stored up to here; None: this process does not project
        self._progress = asyncio.Event()  # set, and made anew, with each commit
        self._hurry = asyncio.Event()  # somebody waits, or enough is at hand: do not rest

    async def reach(self, sequence: int, within_s: float) -> None:
        """Return once the rows have what is stored up to `sequence`, or at `within_s`; at once where that is far away,
        or where another process projects."""
        deadline_s = asyncio.get_running_loop().time() + within_s
        while self._reached is not None and self._reached < sequence <= self._reached + BATCH_MAX:
            self._hurry.set()
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._progress.wait()
            except TimeoutError:
                return

    async def run(self) -> None:
        """For ever, while the caller holds the lease; outlives failures of bus and database."""
        try:
            while True:
                try:
                    await self.bind()
                    await self._follow()
                except Superseded as error:
                    _log.warning("projection_rebinds", tenant=self.tenant, detail=str(error))
                except SupersededError as error:
                    _log.warning("projection_superseded", detail=str(error))
                except (BusError, SQLAlchemyError, OSError) as error:
                    _log.warning(
                        "projection_waits", tenant=self.tenant, detail=f"{type(error).__name__}: {error}"[:300]
                    )
                await asyncio.sleep(_RETRY_S)
        finally:
            self._reached = None
            self.bound.clear()

    def _noted(self, entry: Entry | None) -> Noted:
        """What the bucket says. Raises UnreadableRecordError: nothing is projected on a guess."""
        try:
            return Noted() if entry is None else Noted.model_validate(entry.value)
        except ValidationError as error:
            assert entry is not None
            first = error.errors(include_input=False, include_url=False)[0]
            raise UnreadableRecordError(
                f"{first['loc'][0]}: {first['msg']}",
                bucket=subjects.PROJECTIONS,
                key=self._key,
                revision=entry.revision,
            ) from None

    async def stand_by(self) -> None:
        """Another process projects into this database: prove it all the same, for this process's readers."""
        try:
            number = await self.writer.number()
            entry = await self._bucket.get(self._key)
            following = await self._bus.consumer(self.stream, self.durable)
            told = self._noted(entry).number
        except (BusError, SQLAlchemyError, OSError):
            return
        # The number is written after the commit, so a proven database is never behind what was read before it.
        if following is not None and (told <= number or told <= await self.writer.number()):
            self.bound.set()
        else:
            self.bound.clear()

    async def bind(self) -> None:
        """Steps 2 and 3: prove the database and the log, or begin anew; have the consumer."""
        self.writer.forget()
        self._quarantine.forget()
        self._reached = None
        self._epoch = self._bus.epoch
        number = await self.writer.number()
        self._entry = await self._bucket.get(self._key)
        told = self._noted(self._entry)
        consumer = await self._bus.consumer(self.stream, self.durable)
        evidence = Evidence(
            database=number,
            told=None if self._entry is None else told.number,
            consumer=consumer is not None,
            place=await self._standing(told.place),
        )
        self._number, self._place = number, told.place
        doubt = doubt_of(evidence)
        if doubt is not None:
            await self._begin_anew(doubt, max(told.number, number))
        self.writer.stand_at(self._number)
        await self._ensure_consumer()
        self._metrics.binds.labels("fast" if doubt is None else doubt.value).inc()
        if doubt is not None:
            self._step("consumer_made")
            self._place = Cursor.beginning()
            await self._tell()
            self._step("told")
        self._reached = await self._catch_up()
        self._step("caught_up")
        self.bound.set()
        _log.info("projection_bound", tenant=self.tenant, durable=self.durable, number=self._number)

    async def _begin_anew(self, doubt: Doubt, number: int) -> None:
        """The cold path up to the consumer; see the module."""
        first = doubt is Doubt.FIRST and number == 0
        (_log.info if first else _log.warning)(
            "projection_begins_anew", tenant=self.tenant, reason=doubt.value, number=number
        )
        self.bound.clear()
        # The consumer goes first: without it, history hands out cursors from the beginning.
        await self._bus.delete_consumer(self.stream, self.durable)
        self._step("consumer_deleted")
        await self.writer.renumber(number)
        self._number = number
        self._step("unfinished_marked")

    async def _ensure_consumer(self) -> None:
        consumer = topology.projection(self.tenant, self._database.id, SHARD)
        await self._bus.ensure(topology.Topology(streams=(), consumers=(consumer,)))

    async def _standing(self, place: Cursor) -> Standing:
        """What the log says of the last place that was applied."""
        state = await self._bus.state(self.stream)
        last_sequence = 0 if state is None else state.last_sequence
        at = await self._bus.at(self.stream, place.sequence) if 0 < place.sequence <= last_sequence else None
        return judge(place, at, last_sequence=last_sequence)

    async def _still_there(self) -> None:
        """The place is the one that was applied. Evicted under a living consumer it is as good. Raises Superseded."""
        if await self._standing(self._place) is Standing.CHANGED:
            self.bound.clear()
            raise Superseded("the log was made anew or put back")

    async def _catch_up(self) -> int:
        """What a predecessor was given and did not ack comes again only after the ack wait: read it from the log.
        Up to which sequence the rows are then."""
        state = await self._bus.consumer(self.stream, self.durable)
        if state is None:
            return 0
        if state.ack_pending == 0:
            return state.delivered
        after = state.ack_floor
        while after < state.delivered:
            batch = await self._bus.read(self.stream, after, f"tether.event.{self.tenant}.>", limit=BATCH_MAX)
            if not batch:
                break
            after = batch[-1].sequence
            messages = _decoded(batch, self._metrics)
            stored = {one.sequence: one for one in batch}
            while messages:
                taken = _fitting(messages)
                await self.writer.screen.look(messages[:taken])
                await self.writer.commit(self._number + 1, messages[:taken])
                self._number += 1
                await self._quarantined([(stored[one.sequence], one) for one in messages[:taken]])
                self._placed(messages[:taken])
                await self._tell()
                messages = messages[taken:]
        return after

    async def _follow(self) -> None:
        jobs: asyncio.Queue[Job] = asyncio.Queue(BATCH_MAX)
        source = self._bus.jobs(self.stream, self.durable, in_flight_max=BATCH_MAX)
        async with _cancelled_with(self._pump(source, jobs), f"projection-jobs-{self.tenant}") as pump:
            while True:
                batch = await self._gather(jobs, pump)
                if batch and self._epoch != self._bus.epoch:
                    await self._still_there()
                    self._epoch = self._bus.epoch
                if batch:
                    await self._project(batch, behind=not jobs.empty())
                else:
                    await self._check()

    async def _pump(self, source: AsyncIterator[Job], jobs: asyncio.Queue[Job]) -> None:
        try:
            async for job in source:
                await jobs.put(job)
                if jobs.qsize() >= BATCH_MAX // 2:
                    self._hurry.set()
        finally:
            close = getattr(source, "aclose", None)
            if close is not None:
                await close()

    async def _gather(self, jobs: asyncio.Queue[Job], pump: asyncio.Task[None]) -> list[tuple[Job, LogMessage | None]]:
        """What waits, bounded (by one message too many at most); empty after a silence."""
        if jobs.empty():
            first = asyncio.ensure_future(jobs.get())
            try:
                await asyncio.wait((first, pump), timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not first.done():
                    first.cancel()
            if pump.done():
                pump.result()
                raise Superseded("the consumer's messages ended")
            if not first.done() or first.cancelled():
                return []
            job = first.result()
        else:
            job = jobs.get_nowait()
        batch = [(job, _decode(job.message, self._metrics))]
        size = _Size()
        while size.has_room(batch[-1][1]) and not jobs.empty():
            await asyncio.sleep(0)  # decoding a frame takes a while, and streams share the loop
            job = jobs.get_nowait()
            batch.append((job, _decode(job.message, self._metrics)))
        return batch

    async def _project(self, batch: Sequence[tuple[Job, LogMessage | None]], *, behind: bool) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        self._hurry.clear()
        messages = [message for _, message in batch if message is not None]
        await self.writer.screen.look(messages)
        await self.writer.commit(self._number + 1, messages)
        self._number += 1
        self._placed(messages)
        self._step("committed")
        await self._quarantined([(job.message, message) for job, message in batch if message is not None])
        self._reached = max(self._reached or 0, *(job.message.sequence for job, _ in batch))
        self._progress.set()
        self._progress = asyncio.Event()
        await self._tell()
        self._step("numbered")
        for job, _ in batch:
            await job.ack()
        self._step("acked")
        self._metrics.batches.inc()
        self._metrics.projected.inc(len(batch))
        spent_s = loop.time() - started_s
        if not behind:
            await self._rest(min(_REST_MAX_S, max(_REST_MIN_S - spent_s, _REST_SHARE * spent_s)))
        elif self._shared:
            await asyncio.sleep(min(_REST_MAX_S, spent_s))  # a backlog of one tenant takes half of the time at most

    async def _quarantined(self, batch: Sequence[tuple[StoredMessage, LogMessage]]) -> None:
        """Tell what was refused, after the rows and before the acks: a crash in between tells it then. What cannot be
        told now stops nobody: the log has the message, and the figures its reason."""
        refused = [
            Refused(message.address, stored, message.refusal, message.why)
            for stored, message in batch
            if message.refusal is not None
        ]
        if not refused:
            return
        for one in refused:
            self._metrics.refused.labels(one.reason.value).inc()
        counted = Counter(one.reason.value for one in refused)
        _log.warning("projection_refused", tenant=self.tenant, sequence=refused[0].stored.sequence, reasons=counted)
        try:
            await self._quarantine.write(refused, time.time_ns() // 1_000_000)
        except BusError as error:
            self._metrics.untold.inc(len(refused))
            _log.error("quarantine_failed", tenant=self.tenant, messages=len(refused), detail=error.detail[:300])

    async def _rest(self, duration_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(duration_s):
                await self._hurry.wait()

    def _placed(self, messages: Sequence[LogMessage]) -> None:
        """The youngest that was applied is the place that the next start has to find again."""
        newest = max(messages, key=lambda one: one.sequence, default=None)
        if newest is not None and newest.sequence >= self._place.sequence:
            self._place = Cursor.after(newest.sequence, newest.stored_at_ns)

    async def _tell(self) -> None:
        """Number and place to the bucket. Another's write there means that another projector is at work."""
        value = {"number": self._number, "sequence": self._place.sequence, "tag": self._place.tag}
        op = f"{self.durable}-{self._number}-{secrets.token_hex(4)}"
        try:
            if self._entry is None:
                self._entry = await self._bucket.create(self._key, value, op=op)
            else:
                self._entry = await self._bucket.update(self._key, value, op=op, revision=self._entry.revision)
        except Conflict as conflict:
            raise Superseded(f"{conflict.key} was written by another") from None

    async def _check(self) -> None:
        state = await self._bus.consumer(self.stream, self.durable)
        if state is None:
            self.bound.clear()
            raise Superseded("the consumer is gone")
        self._metrics.lag.labels(self.tenant).set(state.pending + state.ack_pending)
        entry = await self._bucket.get(self._key)
        mine = 0 if self._entry is None else self._entry.revision
        if (0 if entry is None else entry.revision) != mine:
            raise Superseded("the number was written by another")
        await self._still_there()


def _decode(stored: StoredMessage, metrics: Metrics) -> LogMessage | None:
    try:
        return decode(stored.subject, stored.sequence, stored.stored_at_ns, stored.data)
    except InvalidError:
        metrics.unreadable.inc()
        _log.error("projection_foreign_subject", subject=stored.subject)
        return None


def _decoded(batch: Sequence[StoredMessage], metrics: Metrics) -> list[LogMessage]:
    return [message for message in (_decode(stored, metrics) for stored in batch) if message is not None]


class _Size:
    """Of a batch that is being put together."""

    def __init__(self) -> None:
        self.messages = self.events = self.bytes = 0

    def has_room(self, taken: LogMessage | None) -> bool:
        """For more, with this one taken."""
        self.messages += 1
        if taken is not None:
            self.events += taken.count
            self.bytes += taken.size_bytes
        return self.messages < BATCH_MAX and self.events < EVENTS_MAX and self.bytes < BYTES_MAX


def _fitting(messages: Sequence[LogMessage]) -> int:
    """How many of the messages make one batch, at least one."""
    size = _Size()
    for taken, message in enumerate(messages, start=1):
        if not size.has_room(message):
            return taken
    return len(messages)


@contextlib.asynccontextmanager
async def _cancelled_with(work: asyncio._CoroutineLike[None], name: str) -> AsyncIterator[asyncio.Task[None]]:
    """A task that lives as long as the block."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, BusError):
            await task
