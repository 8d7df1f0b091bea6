"""Jobs of a memory bus: a durable consumer's deliveries as an iterator, bounded by what is unsettled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from tether.ports import StoredMessage
from tether.testing.faults import FaultKind

if TYPE_CHECKING:
    from tether.testing.memory_bus import MemoryBus
    from tether.testing.memory_consumer import MemoryConsumer


class _Unsettled:
    """How many jobs of one iterator are handed out and unsettled."""

    __slots__ = ("count", "wake")

    def __init__(self, wake: asyncio.Event) -> None:
        self.count = 0
        self.wake = wake

    def settled(self) -> None:
        self.count -= 1
        self.wake.set()


class MemoryJob:
    """One delivery. A settling while disconnected, or lost by a fault (`ack`, `nak`), has no effect."""

    def __init__(
        self, bus: MemoryBus, key: tuple[str, str], message: StoredMessage, deliveries: int, unsettled: _Unsettled
    ) -> None:
        self._bus = bus
        self._key = key
        self._message = message
        self._unsettled = unsettled
        self._settled = False
        self.deliveries = deliveries
        unsettled.count += 1

    def __del__(self) -> None:
        self._settle()

    @property
    def message(self) -> StoredMessage:
        return self._message

    async def ack(self, *, confirm: bool = False) -> bool:
        self._settle()
        await asyncio.sleep(0)
        consumer = self._consumer("ack")
        if consumer is None:
            return False
        consumer.ack(self._message.sequence)
        self._bus.server.wake()
        return True

    async def nak(self, delay_s: float) -> None:
        self._settle()
        consumer = self._consumer("nak")
        if consumer is not None:
            consumer.nak(self._message.sequence, self._bus.server.clock.now_ns(), max(0, round(delay_s * 1e9)))
            self._bus.server.wake()

    async def in_progress(self) -> None:
        consumer = self._consumer("in_progress")
        if consumer is not None:
            consumer.in_progress(self._message.sequence, self._bus.server.clock.now_ns())

    async def term(self, reason: str) -> None:
        self._settle()
        consumer = self._consumer("term")
        if consumer is not None:
            consumer.ack(self._message.sequence)
            self._bus.server.wake()

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            self._unsettled.settled()

    def _consumer(self, call: str) -> MemoryConsumer | None:
        if not self._bus.connected:
            return None
        fault = self._bus.faults.draw(call, self._message.subject)
        if fault is not None and fault.kind is FaultKind.LOSE_MESSAGE:
            return None
        return self._bus.server.consumers.get(self._key)


async def job_stream(bus: MemoryBus, stream: str, durable: str, in_flight_max: int) -> AsyncGenerator[MemoryJob, None]:
    """Ends when the bus is closed. A missing stream or consumer is waited for."""
    wake = asyncio.Event()
    unsettled = _Unsettled(wake)
    key = (stream, durable)
    server = bus.server
    server.wakers.add(wake.set)
    try:
        while not bus.closed:
            wake.clear()
            consumer = server.consumers.get(key)
            taken = None
            if consumer is not None and bus.connected and unsettled.count < in_flight_max:
                taken = consumer.take(server.clock.now_ns())
            if taken is not None:
                yield MemoryJob(bus, key, *taken, unsettled)
                await asyncio.sleep(0)
                continue
            due_ns = None if consumer is None else consumer.due_ns()
            await _wait(wake, None if due_ns is None else max(0.0, (due_ns - server.clock.now_ns()) / 1e9))
    finally:
        server.wakers.discard(wake.set)


async def _wait(wake: asyncio.Event, timeout_s: float | None) -> None:
    if timeout_s is None:
        await wake.wait()
        return
    # A little late rather than early: rounding must not make this spin.
    timer = asyncio.get_running_loop().call_later(timeout_s + 0.001, wake.set)
    try:
        await wake.wait()
    finally:
        timer.cancel()
