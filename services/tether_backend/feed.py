"""One tenant's log as one gapless live stream in this process, shared by all its readers.

One subscription to the tenant's live copies. Stream sequences of a tenant's log have no holes, so a copy that was lost
shows as `sequence ≠ position + 1`, whatever subject it was on; what is missing is read from the log and handed out in
its place. A silence is probed every SILENCE_PROBE_S for the whole tenant at once (the stream's last sequence from its
leader): one question whatever the number of readers. The order at the start is: subscribe, barrier, last sequence.

After a reconnect, and at each probe, the message at `position` must still be the one that was seen: a stream that was
made anew or put back from an older copy uses sequences again. Then every reader judges its own cursor (`RESET`).
Where too much is missing to be handed out, readers go back to the log by themselves (`STALE`).

The feed owns `position`; a mailbox belongs to one reader and is filled here, synchronously: no await lies between a
reader's look at `position` and its mailbox being in place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final

import structlog

from tether import limits, subjects
from tether.bindings import Bindings
from tether.errors import BusError, InvalidError, SlowReaderError
from tether.ports import Bus, LiveMessage, StoredMessage
from tether_backend.core.stream import SSE, LogMessage, Wire, decode
from tether_backend.metrics import Metrics

_log = structlog.get_logger("tether.feed")
FILL_MAX: Final = 5000  # messages that are handed out after a hole; beyond, readers go back to the log
_DELETED: Final = b'"conversation.deleted"'
_RETRY_S: Final = 0.2  # between attempts while the bus is away
_LAG_TRIES: Final = 50  # reads of a follower that lags, 20 ms apart
_LAG_WAIT_S: Final = 0.02


class Turn(Enum):
    """Why a reader must leave its mailbox."""

    STALE = "stale"  # go back to the log from your cursor
    RESET = "reset"  # the log changed: judge your cursor first
    CLOSED = "closed"  # the service stops


class Mailbox:
    """What waits for one reader, bounded in bytes. `live` readers are cut when it overflows, others go round again.
    One reader waits at a time. Made on the running loop."""

    def __init__(self, bytes_max: int, cut: Callable[[], None], wire: Wire = SSE) -> None:
        self._bytes_max = bytes_max
        self._cut = cut
        self._wire = wire
        self._messages: deque[LogMessage] = deque()
        self._bytes = 0
        self._held_bytes = 0
        # A bare future: every look for the running loop is a system call (`getpid`), and an `asyncio.Event` looks twice
        # for each wait. With a thousand readers that was a tenth of what an event costs.
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self.live = False
        self.overflowed = False
        self.turn: Turn | None = None

    def offer(self, message: LogMessage) -> None:
        if self.overflowed or self.turn is not None:
            return
        size_bytes = len(message.live(self._wire))
        waiting = self._bytes + self._held_bytes
        if waiting and waiting + size_bytes > self._bytes_max:
            self._overflow()
        else:
            self._messages.append(message)
            self._bytes += size_bytes
        self._wake()

    def hold(self, size_bytes: int) -> None:
        """What waits for this reader beside its messages; `release` once it does not. Counts to the same bound."""
        waiting = self._bytes + self._held_bytes
        self._held_bytes += size_bytes
        if waiting and waiting + size_bytes > self._bytes_max and not self.overflowed:
            self._overflow()
            self._wake()

    def release(self, size_bytes: int) -> None:
        self._held_bytes -= size_bytes

    def _overflow(self) -> None:
        self._clear()
        self.overflowed = True
        if self.live or self._held_bytes > self._bytes_max:  # else it goes round again
            self._cut()

    def tell(self, turn: Turn) -> None:
        if self.turn is not Turn.CLOSED:
            self.turn = turn
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def restart(self) -> None:
        """Begin to collect anew; the reader reads the log up to the feed's position of now."""
        self._clear()
        self.live = self.overflowed = False
        if self.turn is not Turn.CLOSED:
            self.turn = None

    @property
    def pending(self) -> bool:
        return bool(self._messages)

    def take(self) -> list[LogMessage]:
        messages = list(self._messages)
        self._clear()
        return messages

    def _clear(self) -> None:
        self._messages.clear()
        self._bytes = 0

    async def wait(self, timeout_s: float) -> bool:
        """Until there is something to look at; False when `timeout_s` has passed."""
        if self._messages or self.turn is not None or self.overflowed:
            return True
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None
        return bool(self._messages) or self.turn is not None or self.overflowed


class Feed:
    """See the module. `ready` once `position` is known."""

    def __init__(self, bus: Bus, tenant: str, metrics: Metrics) -> None:
        self.tenant = tenant
        self.stream = subjects.events_stream(tenant)
        self._bus = bus
        self._metrics = metrics
        self._filter = f"tether.event.{tenant}.>"
        self.bindings = Bindings(bus, tenant)
        self._mailboxes: dict[str, set[Mailbox]] = {}
        self._created = ""
        self._known = False
        self.position = 0
        self.stored_at_ns = 0
        self.ready = asyncio.Event()
        self._closed = False

    def attach(self, conversation: str, mailbox: Mailbox) -> None:
        self._mailboxes.setdefault(conversation, set()).add(mailbox)
        if self._closed:
            mailbox.tell(Turn.CLOSED)

    def detach(self, conversation: str, mailbox: Mailbox) -> None:
        boxes = self._mailboxes.get(conversation)
        if boxes is not None:
            boxes.discard(mailbox)
            if not boxes:
                del self._mailboxes[conversation]

    def watched(self, conversation: str) -> bool:
        """Whether somebody follows it, in this process."""
        return conversation in self._mailboxes

    def close(self) -> None:
        """Readers end their streams; their cursors stay good."""
        self._closed = True
        self._tell(Turn.CLOSED)

    def _tell(self, turn: Turn) -> None:
        for boxes in self._mailboxes.values():
            for mailbox in boxes:
                mailbox.tell(turn)

    async def run(self) -> None:
        """For ever; outlives every failure of the bus."""
        while True:
            try:
                await self._follow()
            except SlowReaderError:
                _log.warning("feed_overflowed", tenant=self.tenant)
            except BusError as error:
                _log.info("feed_waits", tenant=self.tenant, detail=error.detail)
                await asyncio.sleep(_RETRY_S)

    async def _follow(self) -> None:
        subscription = await self._bus.live(
            f"tether.live.{self.tenant}.>", buffer_bytes_max=limits.LIVE_BUFFER_BYTES_MAX
        )
        try:
            epoch = self._bus.epoch
            await self._bus.barrier()
            await self._align()
            while True:
                message = await subscription.next(limits.SILENCE_PROBE_S)
                if message is None or self._bus.epoch != epoch:
                    epoch = self._bus.epoch
                    await self._align()
                if message is not None:
                    await self._take(message)
        finally:
            await subscription.close()

    async def _take(self, message: LiveMessage) -> None:
        if message.sequence == 0:
            return  # published to the live subject by hand: no copy of a stored message
        if message.sequence <= self.position:
            if message.stored_at_ns > self.stored_at_ns > 0:
                await self._align()  # younger than what we have, at an older place: the log changed
            return
        self._metrics.feed_messages.inc()
        if message.sequence > self.position + 1:
            await self._fill(message.sequence - 1)
        if message.sequence == self.position + 1:
            subject = "tether.event." + message.subject.removeprefix("tether.live.")
            await self._hand_out(subject, message.sequence, message.stored_at_ns, message.data)

    async def _hand_out(self, subject: str, sequence: int, stored_at_ns: int, data: bytes) -> None:
        tokens = subject.split(".")
        conversation = tokens[4] if len(tokens) == 6 else ""
        if conversation in self._mailboxes and self.bindings.known_workspace(conversation) is None:
            await self.bindings.workspace(conversation)  # once, where somebody listens
        # No await from here on: see the module.
        self.position, self.stored_at_ns = sequence, stored_at_ns
        self._offer(tokens, sequence, stored_at_ns, data)
        if tokens[-1] == limits.EXECUTION_TOKEN_CONVERSATION and _DELETED in data:
            self.bindings.forget()  # the conversation may come again, elsewhere

    def _offer(self, tokens: Sequence[str], sequence: int, stored_at_ns: int, data: bytes) -> None:
        conversation = tokens[4] if len(tokens) == 6 else ""
        boxes = self._mailboxes.get(conversation)
        if not boxes:
            return
        if self.bindings.known_workspace(conversation) != tokens[3]:
            self._metrics.feed_refused.inc()  # another workspace's sandbox, or nobody's conversation
            return
        try:
            message = decode(".".join(tokens), sequence, stored_at_ns, data)
        except InvalidError:
            return  # no subject of the log's
        for mailbox in tuple(boxes):
            mailbox.offer(message)

    async def _align(self) -> None:
        """Compare with the stream: is it still the same one, and is anything missing?"""
        state = await self._bus.state(self.stream)
        if state is None:
            if self._known and self.position:
                self._reset("", 0, 0)
            return
        last = await self._bus.at(self.stream, self.position) if self.position else None
        if not self._known:
            end = await self._bus.at(self.stream, state.last_sequence) if state.last_sequence else None
            self._created, self.position = state.created, state.last_sequence
            self.stored_at_ns = end.stored_at_ns if end is not None else 0
            self._known = True
            self.ready.set()
            return
        other = last is not None and self.stored_at_ns and last.stored_at_ns != self.stored_at_ns
        if state.created != self._created or state.last_sequence < self.position or other:
            end = await self._bus.at(self.stream, state.last_sequence) if state.last_sequence else None
            self._reset(state.created, state.last_sequence, end.stored_at_ns if end is not None else 0)
        elif state.last_sequence > self.position:
            await self._fill(state.last_sequence)

    def _reset(self, created: str, position: int, stored_at_ns: int) -> None:
        self.bindings.forget()
        _log.warning("feed_reset", tenant=self.tenant, position=self.position, now=position)
        self._metrics.feed_resets.inc()
        self._created, self.position, self.stored_at_ns = created, position, stored_at_ns
        self._tell(Turn.RESET)

    async def _fill(self, target: int) -> None:
        """Hand out what lies after `position` up to `target`, from the log."""
        if target - self.position > FILL_MAX:
            await self._jump(target)
            return
        tries = 0
        while self.position < target:
            batch = await self._bus.read(self.stream, self.position, self._filter)
            for message in batch:
                self._metrics.feed_filled.inc()
                await self._hand_out(message.subject, message.sequence, message.stored_at_ns, message.data)
            if batch:
                continue
            following = await self._bus.next_after(self.stream, self.position, self._filter)
            if following is None or following.sequence > target:
                # Evicted meanwhile: there is nothing to hand out. Whose time this was is not known.
                self.position, self.stored_at_ns = target, 0
                return
            tries += 1
            if tries > _LAG_TRIES:
                await self._jump(target)
                return
            await asyncio.sleep(_LAG_WAIT_S)

    async def _jump(self, target: int) -> None:
        end: StoredMessage | None = await self._bus.at(self.stream, target)
        self.position = target
        self.stored_at_ns = end.stored_at_ns if end is not None else 0
        self._tell(Turn.STALE)
