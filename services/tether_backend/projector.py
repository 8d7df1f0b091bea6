"""One tenant's projection: durable consumer → batches → database, by one process at a time.

    1  the lease of (tenant, shard) is held
    2  the database proves that it is the one that was acked for: its batch number is not behind the bucket's;
       behind → it is an older copy: the consumer is made anew from the log's beginning (rows stay: what they contain
       is trimmed by identity, and what the log no longer has is not thrown away)
    3  per batch:  commit rows and number  →  the number to the bucket by compare-and-set  →  ack

A crash after any step is repaired by the next one: a batch that was committed and not numbered makes a database that
is ahead by one; one that was not acked is delivered again and trimmed. A consumer that was deleted, or went with its
stream, is made again; the memory of positions is dropped with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tether import subjects, topology
from tether.errors import BusError, InvalidError
from tether.kv import Bucket, Conflict, Entry
from tether.ports import Bus, Job, StoredMessage
from tether_backend.core.stream import LogMessage, decode
from tether_backend.metrics import Metrics
from tether_backend.store.engine import Database
from tether_backend.store.projection import ProjectionWriter, SupersededError

_log = structlog.get_logger("tether.projection")
BATCH_MAX: Final = 512  # messages of one transaction
_LINGER_S: Final = 0.05  # least time between two commits: what comes meanwhile is written together
_CHECK_S: Final = 2.0  # is the consumer still there, is the number still ours
_RETRY_S: Final = 0.5
SHARD: Final = 0  # one per tenant, so far

# Told after each step: tests crash there.
Step = Callable[[str], None]


def _nothing(_: str) -> None:
    return None


class Superseded(Exception):  # noqa: N818 - an outcome
    """The bucket's number was written by another projector, or the consumer is gone: bind again."""


class Projector:
    """See the module. `bound` while its database is proven and a consumer is followed, by this or another process."""

    def __init__(self, bus: Bus, database: Database, tenant: str, metrics: Metrics, *, step: Step = _nothing) -> None:
        self.tenant = tenant
        self.durable = subjects.projection_durable(database.id, SHARD)
        self.stream = subjects.events_stream(tenant)
        self.writer = ProjectionWriter(bus, database, tenant, SHARD, metrics)
        self.bound = asyncio.Event()
        self._bus = bus
        self._database = database
        self._metrics = metrics
        self._step = step
        self._key = subjects.projection_key(database.id, tenant, SHARD)
        self._bucket = Bucket(bus, subjects.PROJECTIONS)
        self._number = 0
        self._entry: Entry | None = None

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
            self.bound.clear()

    async def stand_by(self) -> None:
        """Another process projects into this database: prove it all the same, for this process's readers."""
        try:
            number = await self.writer.number()
            entry = await self._bucket.get(self._key)
            following = await self._bus.consumer(self.stream, self.durable)
        except (BusError, SQLAlchemyError, OSError):
            return
        told = int(entry.value.get("number", 0)) if entry is not None else 0
        # The number is written after the commit, so a proven database is never behind what was read before it.
        if following is not None and (told <= number or told <= await self.writer.number()):
            self.bound.set()
        else:
            self.bound.clear()

    async def bind(self) -> None:
        """Step 2: prove the database, have the consumer."""
        self.writer.forget()
        number = await self.writer.number()
        entry = await self._bucket.get(self._key)
        told = int(entry.value.get("number", 0)) if entry is not None else 0
        if told > number:
            _log.warning("projection_database_is_older", tenant=self.tenant, database=number, told=told)
            self.bound.clear()
            # The consumer goes first: without it, history hands out cursors from the beginning.
            await self._bus.delete_consumer(self.stream, self.durable)
            await self.writer.renumber(told)
            number = told
        self._number = number
        self._entry = entry
        consumer = topology.projection(self.tenant, self._database.id, SHARD)
        await self._bus.ensure(topology.Topology(streams=(), consumers=(consumer,)))
        await self._catch_up()
        self.bound.set()
        _log.info("projection_bound", tenant=self.tenant, durable=self.durable, number=number)

    async def _catch_up(self) -> None:
        """What a predecessor was given and did not ack comes again only after the ack wait: read it from the log."""
        state = await self._bus.consumer(self.stream, self.durable)
        if state is None or state.ack_pending == 0:
            return
        after = state.ack_floor
        while after < state.delivered:
            batch = await self._bus.read(self.stream, after, f"tether.event.{self.tenant}.>", limit=BATCH_MAX)
            if not batch:
                return
            after = batch[-1].sequence
            await self.writer.commit(self._number + 1, _decoded(batch, self._metrics))
            self._number += 1
            await self._tell()

    async def _follow(self) -> None:
        jobs: asyncio.Queue[Job] = asyncio.Queue(BATCH_MAX)
        source = self._bus.jobs(self.stream, self.durable, in_flight_max=2 * BATCH_MAX)
        async with _cancelled_with(_pump(source, jobs), f"projection-jobs-{self.tenant}") as pump:
            while True:
                batch = await self._gather(jobs, pump)
                if batch:
                    await self._project(batch)
                else:
                    await self._check()

    async def _gather(self, jobs: asyncio.Queue[Job], pump: asyncio.Task[None]) -> list[Job]:
        """What waits, at most BATCH_MAX; empty after a silence."""
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
            batch = [first.result()]
        else:
            batch = []
        while len(batch) < BATCH_MAX and not jobs.empty():
            batch.append(jobs.get_nowait())
        return batch

    async def _project(self, batch: Sequence[Job]) -> None:
        started_s = asyncio.get_running_loop().time()
        await self.writer.commit(self._number + 1, _decoded([job.message for job in batch], self._metrics))
        self._number += 1
        self._step("committed")
        await self._tell()
        self._step("numbered")
        for job in batch:
            await job.ack()
        self._step("acked")
        self._metrics.batches.inc()
        self._metrics.projected.inc(len(batch))
        if len(batch) < BATCH_MAX:
            spent_s = asyncio.get_running_loop().time() - started_s
            await asyncio.sleep(max(0.0, _LINGER_S - spent_s))

    async def _tell(self) -> None:
        """The number to the bucket. Another's write there means that another projector is at work."""
        value = {"number": self._number}
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


def _decoded(batch: Sequence[StoredMessage], metrics: Metrics) -> list[LogMessage]:
    messages = []
    for stored in batch:
        try:
            messages.append(decode(stored.subject, stored.sequence, stored.stored_at_ns, stored.data))
        except InvalidError:
            metrics.unreadable.inc()
            _log.error("projection_foreign_subject", subject=stored.subject)
    return messages


async def _pump(source: AsyncIterator[Job], jobs: asyncio.Queue[Job]) -> None:
    try:
        async for job in source:
            await jobs.put(job)
    finally:
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


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
