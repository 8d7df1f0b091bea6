"""Following a conversation through a durable consumer of the reader's own: the server remembers the position.

    realign   the consumer exists (made where it is missing); the stream's end; what was delivered and not acked
    replay    the log from the ack floor to what the consumer had delivered: in order, whatever is redelivered when
    jobs      at or before the position: acked at once (given already) · the next: given, acked on the next pull
              behind a hole: the log between is read and given first
    a new connection epoch, a silence: realign

A message is acked after the caller came back for more, so whoever dies in between gets it again: at least once. The
caller makes that exactly once by the items' identity, or by keeping the cursor with its own data and giving it here:
what lies before it is acked without being given. Redeliveries come in any order and never twice to one reader; order is
the log's. One reader at a time per name: two would share the messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Final

import structlog

from tether import subjects, topology
from tether.client.backoff import Backoff, of_connection, pause
from tether.client.follow import SeenIds, Where
from tether.client.items import CaughtUp, ConversationItem, ExecutionItem, GapItem, Item, PositionChanged
from tether.cursor import WHOLE, Cursor, Standing, judge
from tether.errors import (
    BusError,
    BusUnavailableError,
    Code,
    InvalidError,
    PermissionDeniedError,
    ProblemError,
    problem,
)
from tether.events import ConversationEvent
from tether.failpoints import failpoint
from tether.frames import Frame, decode
from tether.ids import check_token
from tether.limits import SILENCE_PROBE_S
from tether.ports import Bus, Job, StoredMessage
from tether.topology import Topology

_log = structlog.get_logger("tether.client")
IN_FLIGHT_MAX: Final = 64  # delivered and not acked: what a restart gets again
_CATCH_UP_LOOK_S: Final = 0.1  # without a job for so long the log is asked whether there is more


def durable_name(name: str, conversation: str) -> str:
    """The consumer's name: a reader's name may be used for several conversations."""
    return f"reader-{check_token(name, 'durable')}-{conversation}"


class DurableFollower:
    """One reader with a name. `run()` gives items until the generator is closed or `patience_s` is over."""

    def __init__(
        self,
        bus: Bus,
        where: Where,
        name: str,
        cursor: Cursor,
        *,
        patience_s: float | None = None,
        silence_s: float = SILENCE_PROBE_S,
        in_flight_max: int = IN_FLIGHT_MAX,
        backoff: Backoff | None = None,
    ) -> None:
        self._bus = bus
        self._where = where
        self._durable = durable_name(name, where.conversation)
        self._patience_s = patience_s
        self._silence_s = silence_s
        self._in_flight_max = in_flight_max
        self._backoff = backoff or of_connection()
        self._cursor = cursor  # given to the caller, now or (by its own word) before
        self._applied: dict[str, int] = {}
        self._ids = SeenIds()
        self._watermark = 0
        self._created = ""
        self._caught_up = False
        self._begun = False

    async def run(self) -> AsyncGenerator[Item, None]:
        loop = asyncio.get_running_loop()
        failing_since_s: float | None = None
        while True:
            session = self._session()
            try:
                async for item in session:
                    failing_since_s = None
                    self._backoff.reset()
                    yield item
            except PermissionDeniedError:
                raise
            except BusError as error:
                failing_since_s = failing_since_s or loop.time()
                if self._patience_s is not None and loop.time() - failing_since_s >= self._patience_s:
                    what = problem(Code.RUNTIME_UNAVAILABLE, f"the message bus does not answer: {error.detail}")
                    raise ProblemError(what) from None
                await pause(self._bus, self._backoff.next_s())
            finally:
                await session.aclose()

    async def _session(self) -> AsyncGenerator[Item, None]:
        """From a realignment until the connection, the stream or the consumer is another one."""
        epoch = self._bus.epoch
        changed, delivered = await self._realign()
        failpoint("attach.durable_aligned")
        if changed is not None:
            yield changed
        async with aclosing(self._between(delivered + 1)) as batches:
            async for batch in batches:
                for item in self._give(batch):
                    yield item
        jobs = self._bus.jobs(self._where.stream, self._durable, in_flight_max=self._in_flight_max)
        pending: asyncio.Task[Job] | None = None
        try:
            while True:
                if pending is None:
                    pending = asyncio.create_task(_next(jobs), name=f"durable-{self._durable}")
                wait_s = self._silence_s if self._caught_up else _CATCH_UP_LOOK_S
                done, _ = await asyncio.wait((pending,), timeout=wait_s)
                if self._bus.epoch != epoch:
                    return  # what was on its way may be lost until it is redelivered, behind younger messages
                if not done:
                    for item in await self._quiet():
                        yield item
                    continue
                job, pending = pending.result(), None
                async with aclosing(self._take(job.message)) as items:
                    async for item in items:
                        yield item
                failpoint("attach.durable_given")
                await job.ack()
                failpoint("attach.durable_acked")
        finally:
            if pending is not None:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
            await jobs.aclose()

    # --- where the log and the consumer stand ---

    async def _realign(self) -> tuple[PositionChanged | None, int]:
        """Whether the log is another one, and the last sequence that the consumer has delivered."""
        spec = topology.reader(self._where.tenant, self._durable, self._where.events)
        state = await self._bus.state(self._where.stream)
        if state is None:
            raise BusUnavailableError("the tenant's log does not exist (yet)", subject=self._where.stream)
        sequence = self._cursor.sequence
        found = await self._bus.at(self._where.stream, sequence) if 0 < sequence <= state.last_sequence else None
        standing = judge(self._cursor, found, last_sequence=state.last_sequence)
        changed = self._changed() if standing is Standing.CHANGED else None
        self._created = state.created
        await self._bus.ensure(Topology(streams=(), consumers=(spec,)))
        consumer = await self._bus.consumer(self._where.stream, self._durable)
        if consumer is None:
            raise BusUnavailableError("the consumer was deleted", subject=self._durable)
        if not self._caught_up:
            self._watermark = state.last_sequence
        if not self._begun:
            self._begun = True
            if self._cursor.sequence == 0 and changed is None and consumer.ack_floor:
                acked = await self._bus.at(self._where.stream, consumer.ack_floor)
                floor = Cursor(consumer.ack_floor)
                self._cursor = floor if acked is None else Cursor.after(consumer.ack_floor, acked.stored_at_ns)
        return changed, consumer.delivered

    def _changed(self) -> PositionChanged:
        self._cursor = Cursor.beginning()
        self._applied.clear()
        self._ids.clear()
        self._caught_up = False
        return PositionChanged(self._where.conversation, self._where.encode(self._cursor))

    async def _quiet(self) -> list[Item]:
        """Nothing came for a while. Raises BusUnavailableError where the log or the consumer is another one."""
        if not self._caught_up:
            position = self._cursor.sequence
            if await self._bus.next_after(self._where.stream, position, self._where.events) is None:
                return self._now_caught_up()
            return []
        state = await self._bus.state(self._where.stream)
        consumer = await self._bus.consumer(self._where.stream, self._durable)
        if state is None or consumer is None or state.created != self._created:
            raise BusUnavailableError("the log or the consumer is another one", subject=self._durable)
        return []

    def _now_caught_up(self) -> list[Item]:
        self._caught_up = True
        return [CaughtUp(self._where.conversation, self._where.encode(self._cursor))]

    async def _between(self, before: int) -> AsyncGenerator[list[StoredMessage], None]:
        """Messages of the conversation after the position and before this sequence, from the log, in batches."""
        partly = self._cursor.sequence > 0 and self._cursor.index != WHOLE
        after = self._cursor.sequence - 1 if partly else self._cursor.sequence
        while after < before - 1:
            batch = list(await self._bus.read(self._where.stream, after, self._where.events))
            if not batch:
                following = await self._bus.next_after(self._where.stream, after, self._where.events)
                if following is None:
                    return
                batch = [following]  # a follower lags; the leader has it
            after = batch[-1].sequence
            wanted = [message for message in batch if message.sequence < before]
            if wanted:
                yield wanted

    # --- messages ---

    async def _take(self, message: StoredMessage) -> AsyncGenerator[Item, None]:
        here = self._cursor
        if message.sequence < here.sequence or (message.sequence == here.sequence and here.index == WHOLE):
            return  # given already
        if self._behind_hole(message):
            async with aclosing(self._between(message.sequence)) as batches:
                async for batch in batches:
                    for item in self._give(batch):
                        yield item
        for item in self._give([message]):
            yield item

    def _behind_hole(self, message: StoredMessage) -> bool:
        try:
            content = decode(message.subject, message.data)
        except InvalidError:
            return False
        execution = subjects.parse_event(message.subject).execution
        return isinstance(content, Frame) and content.first > self._applied.get(execution, content.first - 1) + 1

    def _give(self, messages: Sequence[StoredMessage]) -> Iterator[Item]:
        for message in messages:
            replay = message.sequence <= self._watermark and not self._caught_up
            if not replay and not self._caught_up:
                yield from self._now_caught_up()
            yield from self._items(message, replay)

    def _items(self, message: StoredMessage, replay: bool) -> list[Item]:
        where = self._where
        whole = Cursor.after(message.sequence, message.stored_at_ns)
        here, self._cursor = self._cursor, whole
        try:
            address = subjects.parse_event(message.subject)
            content = decode(message.subject, message.data)
        except InvalidError:
            return []  # nobody can read it; a frame's events show as a gap before the next one
        if isinstance(content, ConversationEvent):
            fresh = self._ids.add(content.id)
            return [ConversationItem(where.conversation, content, where.encode(whole), replay)] if fresh else []
        items: list[Item] = []
        begun = content.first - 1
        if message.sequence == here.sequence and here.index != WHOLE:
            given = content.events[: here.index]
            begun = given[-1].end if given else begun
        applied = self._applied.get(address.execution, begun)
        if content.first > applied + 1:
            items.append(
                GapItem(
                    where.conversation,
                    address.execution,
                    applied + 1,
                    content.first - 1,
                    "retention_gap",
                    where.encode(here),
                )
            )
        for index, event in enumerate(content.events, start=1):
            if event.end <= applied:
                continue
            last = index == len(content.events)
            cursor = whole if last else Cursor(message.sequence, index, whole.tag)
            items.append(ExecutionItem(where.conversation, address.execution, event, where.encode(cursor), replay))
        self._applied[address.execution] = max(applied, content.last)
        return items


async def _next(jobs: AsyncGenerator[Job, None]) -> Job:
    return await anext(jobs)
