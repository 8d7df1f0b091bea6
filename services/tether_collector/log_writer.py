"""The shell of one execution's log writer: performs what `tether.frame_writer` decides, in order, one at a time.

The machine is fed by two sides, both on the loop's thread: `offer` (new events) and the answers of the bus. Effects
wait in one queue that one task works off, so there is never more than one frame in flight. Between effects the task
looks whether the connection is a new one: then the log is read again, which is how an acked tail that the server lost
is noticed and put back.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from typing import Protocol, assert_never, cast

import structlog

from tether import tracing
from tether.errors import (
    BusError,
    BusUnavailableError,
    PermissionDeniedError,
    UndecidedError,
    WrongLastSequenceError,
)
from tether.events import Event
from tether.failpoints import failpoint
from tether.frame_writer import (
    Acked,
    Fenced,
    FrameWriter,
    LastRead,
    Offered,
    OwnerRead,
    ReadLast,
    ReadOwner,
    Rebase,
    Reconnected,
    RecordGap,
    Send,
    Told,
    Unavailable,
    Undecided,
    WriterEffect,
    WriterInput,
    WrongLast,
)
from tether.frames import Position
from tether.limits import DISCONNECTED_AFTER_S, PUBLISH_ATTEMPT_S
from tether.ports import Bus, StoredMessage
from tether.subjects import EventAddress, events_stream
from tether_collector import metrics
from tether_collector.pace import Pace

EPOCH_LOOK_S = 0.5  # how often an idle writer looks whether the connection is a new one
READ_PAUSE_MIN_S, READ_PAUSE_MAX_S = 0.05, 1.0
FULL_EVENTS = 8192  # offered and not stored: the spool is not read on above this
FULL_BYTES = 16 * 1024 * 1024  # likewise, of line bytes that made them


class WriterOwner(Protocol):
    """Whom the writer tells. `told` must not wait; the others may."""

    def told(self, told: Told) -> None: ...

    def rebase(self, ordinal: int, position: Position) -> None:
        """Nothing of an older reading may be offered after this returns."""
        ...

    async def record_gap(self, gap: RecordGap) -> None: ...

    async def still_ours(self) -> bool:
        """Whether the owner record names this execution; waits until that can be read."""
        ...

    def fenced(self, reason: str) -> None: ...


class LogWriter:
    """One execution's frames. `run` is its task; it ends when the writer is fenced or the terminal is stored."""

    def __init__(self, bus: Bus, address: EventAddress, owner: WriterOwner, pace: Pace | None = None) -> None:
        self._bus = bus
        self._address = address
        self._stream = events_stream(address.tenant)
        self._owner = owner
        self._pace = pace or Pace(0, 0)
        self._full_events = min(FULL_EVENTS, self._pace.ahead_events or FULL_EVENTS)
        self._paid = ""  # the id of the frame that was paced last: sent again, it costs nothing
        self._machine = FrameWriter(address)
        self._running = False
        self._frame = asyncio.Lock()  # held while a frame is in flight
        self._based = False  # the log's end has been read: before, nothing can follow it
        self._effects: deque[WriterEffect] = deque()
        self._wake = asyncio.Event()
        self._moved = asyncio.Event()
        self._epoch = bus.epoch
        self._stored_at_s = 0.0
        self._reported = False
        self._sizes: deque[tuple[int, int]] = deque()  # (last ordinal, bytes) of each offer
        self._waiting_bytes = 0
        self.terminal = False

    @property
    def idle(self) -> bool:
        """Everything offered is stored."""
        return self._machine.idle and not self._effects

    @property
    def based(self) -> bool:
        """The log's end was read: before, nothing can follow it."""
        return self._based

    @property
    def paced(self) -> bool:
        """A quota slows it down, and the log takes what is sent: what waits will be stored."""
        return self._pace.limited and self._now() - self._stored_at_s < self._pace.silence_s

    @property
    def has_room(self) -> bool:
        return self._machine.waiting < self._full_events and self._waiting_bytes < FULL_BYTES

    def offer(self, events: Sequence[tuple[Event, Position]], size_bytes: int) -> None:
        """New events in order; `size_bytes` of the input that made them, for `room`."""
        self._sizes.append((events[-1][0].end, size_bytes))
        self._waiting_bytes += size_bytes
        self._feed(Offered(events))

    async def room(self) -> None:
        """Wait until more may be offered."""
        while not (self.has_room and self._based) and not self._machine.fenced:
            await self._next_move()

    async def settled(self) -> None:
        """Wait until everything offered is stored (or the writer is fenced, or does not run)."""
        while self._running and not (self.idle or self._machine.fenced):
            await self._next_move()

    def between_frames(self) -> asyncio.Lock:
        """Holding this, no frame is in flight, and what was told has been told to the owner."""
        return self._frame

    async def run(self) -> None:
        self._stored_at_s = self._now()
        self._effects.extend(self._machine.start())
        self._running = True
        try:
            while not self._done():
                if self._effects:
                    await self._perform(self._effects.popleft())
                else:
                    await self._more()
        finally:
            self._running = False
            self._moved.set()

    def _done(self) -> bool:
        return (self._machine.fenced and not self._effects) or (self.terminal and self.idle)

    async def _more(self) -> None:
        """Wait for an input; meanwhile look whether the connection is a new one."""
        self._wake.clear()
        look = asyncio.get_running_loop().call_later(EPOCH_LOOK_S, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            look.cancel()
        if self._bus.epoch != self._epoch and self._bus.connected:
            self._epoch = self._bus.epoch
            self._feed(Reconnected())

    async def _next_move(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    def _feed(self, event: WriterInput) -> None:
        self._effects.extend(self._machine.apply(event))
        self._wake.set()

    async def _perform(self, effect: WriterEffect) -> None:
        match effect:
            case Send():
                if self._pace.limited and effect.msg_id != self._paid:
                    self._paid = effect.msg_id
                    await self._pace.wait(_events_of(effect.msg_id), len(effect.data))
                async with self._frame:
                    self._feed(await self._send(effect))
                    while self._effects and isinstance(self._effects[0], Told):
                        self._on_told(cast(Told, self._effects.popleft()))
            case ReadLast():
                self._feed(LastRead(await self._read_last(effect.after_s)))
                self._based = True
                self._moved.set()
            case ReadOwner():
                self._feed(OwnerRead(await self._owner.still_ours()))
            case Told():
                self._on_told(effect)
            case Rebase():
                self._sizes.clear()
                self._waiting_bytes = 0
                self._owner.rebase(effect.ordinal, effect.position)
                self._moved.set()
            case RecordGap():
                await self._owner.record_gap(effect)
            case Fenced():
                self._owner.fenced(effect.reason)
                self._moved.set()
            case _:
                assert_never(effect)

    def _on_told(self, told: Told) -> None:
        while self._sizes and self._sizes[0][0] <= told.ordinal:
            self._waiting_bytes -= self._sizes.popleft()[1]
        self._stored_at_s = self._now()
        self._reported = False
        metrics.events.inc(len(told.events))
        self.terminal = self.terminal or told.terminal
        self._owner.told(told)
        self._moved.set()

    async def _send(self, send: Send) -> WriterInput:
        if send.after_s:
            await asyncio.sleep(send.after_s * random.uniform(0.8, 1.2))
            self._report()
        sent_s = self._now()
        failpoint("collector.frame.cut")
        try:
            ack = await self._bus.publish(
                self._address.subject,
                send.data,
                msg_id=send.msg_id,
                expect_last=send.expect_last,
                headers=tracing.outgoing(),
                timeout_s=PUBLISH_ATTEMPT_S,
            )
        except UndecidedError:
            metrics.publish_failures.labels("undecided").inc()
            return Undecided()
        except WrongLastSequenceError as error:
            metrics.publish_failures.labels("wrong_last").inc()
            return WrongLast(error.actual)
        except BusUnavailableError:
            metrics.publish_failures.labels("unavailable").inc()
            # Not connected: the next attempt waits for the connection by itself and needs no longer pause.
            return Unavailable() if self._bus.connected else Undecided()
        except PermissionDeniedError as error:
            structlog.get_logger("tether.collector").error("log_denied", error=str(error))
            metrics.publish_failures.labels("denied").inc()
            return Unavailable()
        failpoint("collector.frame.stored")
        metrics.stored(len(send.data), self._now() - sent_s)
        return Acked(ack.sequence, ack.duplicate)

    async def _read_last(self, after_s: float) -> StoredMessage | None:
        pause_s = READ_PAUSE_MIN_S
        if after_s:
            await asyncio.sleep(after_s)
        while True:
            try:
                return await self._bus.last(self._stream, self._address.subject, leader=False)
            except BusError:
                self._report()
                await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
                pause_s = min(pause_s * 2, READ_PAUSE_MAX_S)

    def _report(self) -> None:
        """Once per outage, in the log: the sandbox is disconnected, and spools on."""
        if not self._reported and self._now() - self._stored_at_s > DISCONNECTED_AFTER_S:
            self._reported = True
            structlog.get_logger("tether.collector").warning(
                "log_disconnected", execution=self._address.execution, waiting_events=self._machine.waiting
            )

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _events_of(msg_id: str) -> int:
    """How many events a frame has, merged ones counted: `{conversation}/{execution}/{first}-{last}/…`."""
    first, _, last = msg_id.split("/")[2].partition("-")
    return int(last) - int(first) + 1
