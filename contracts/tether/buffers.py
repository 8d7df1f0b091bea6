"""A bounded buffer of bytes between whoever delivers and one reader: both buses' subscriptions.

Delivery never waits: when the buffer is full the reader has lost messages, so the buffer is dropped and the reader gets
SlowReaderError. Nothing is lost in silence. A refused subscription gives PermissionDeniedError the same way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Final, Generic, TypeVar

from tether.errors import BusError, SlowReaderError
from tether.ports import LiveMessage, Message

_OVERHEAD_BYTES: Final = 256  # what a buffered message costs beyond its bytes
M = TypeVar("M", Message, LiveMessage)


class BufferedSubscription(Generic[M]):
    """One reader's subscription; `next` and iteration are for one task."""

    def __init__(self, subject: str, buffer_bytes_max: int) -> None:
        self.subject = subject
        self._bytes_max = buffer_bytes_max
        self._bytes = 0
        self._buffer: deque[tuple[M, int]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: BusError | None = None
        self._closed = False
        self._interrupted = False

    def put(self, message: M, size_bytes: int) -> bool:
        """From the read loop. False when this overflowed: stop the sender."""
        if self._closed or self._error is not None:
            return True
        size_bytes += _OVERHEAD_BYTES
        if self._bytes + size_bytes > self._bytes_max:
            self.fail(
                SlowReaderError(f"more than {self._bytes_max} bytes waited for this reader", subject=self.subject)
            )
            return False
        self._buffer.append((message, size_bytes))
        self._bytes += size_bytes
        self._notify()
        return True

    def fail(self, error: BusError) -> None:
        self._error = error
        self._buffer.clear()
        self._bytes = 0
        self._notify()

    def interrupt(self) -> None:
        """What waits in `next` gets None now, once what is buffered was taken: more may have been missed."""
        self._interrupted = True
        self._notify()

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> M | None:
        if self._buffer:
            message, size_bytes = self._buffer.popleft()
            self._bytes -= size_bytes
            return message
        if self._error is not None:
            raise self._error
        return None

    async def next(self, timeout_s: float | None = None) -> M | None:
        message = self._take()
        if message is not None or self._closed:
            return message
        if self._interrupted or (timeout_s is not None and timeout_s <= 0):
            self._interrupted = False
            return None
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while not self._closed:
            self._waiter = loop.create_future()
            timer = None if deadline is None else loop.call_at(deadline, self._notify)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
            message = self._take()
            if message is not None:
                return message
            if self._interrupted or (deadline is not None and loop.time() >= deadline):
                self._interrupted = False
                return None
        return None

    def __aiter__(self) -> AsyncIterator[M]:
        return self

    async def __anext__(self) -> M:
        while True:
            message = await self.next()
            if message is not None:
                return message
            if self._closed:
                raise StopAsyncIteration

    async def close(self) -> None:
        self._end()

    def _end(self) -> None:
        self._closed = True
        self._buffer.clear()
        self._bytes = 0
        self._notify()
