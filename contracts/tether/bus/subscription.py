"""Subscriptions over NATS: the read loop puts into a bounded buffer; an overflow tells the server to stop sending."""

from __future__ import annotations

from collections.abc import Callable

from tether import natsheaders as wire_headers
from tether.buffers import BufferedSubscription, M
from tether.bus.connection import Connection
from tether.ports import LiveMessage, Message


def to_message(subject: bytes, reply: bytes, raw: bytes | None, data: bytes) -> Message:
    return Message(subject.decode(), data, reply.decode(), wire_headers.parse(raw)[2] if raw else {})


def to_live(subject: bytes, raw: bytes | None, data: bytes) -> LiveMessage:
    return wire_headers.live_message(subject.decode(), data, wire_headers.parse(raw)[2])


class _NatsSubscription(BufferedSubscription[M]):
    def __init__(self, connection: Connection, subject: str, buffer_bytes_max: int) -> None:
        super().__init__(subject, buffer_bytes_max)
        self._wire = connection.wire
        self._sid = 0
        self._forget = connection.on_closed(self._end)

    def _received(self, message: M, size_bytes: int) -> None:
        if not self.put(message, size_bytes):
            self._wire.unsub(self._sid)

    async def close(self) -> None:
        if not self._closed:
            self._forget()
            self._wire.unsub(self._sid)
        await super().close()


class CoreSubscription(_NatsSubscription[Message]):
    def start(self, queue: str) -> None:
        self._sid = self._wire.sub(self.subject, queue, self._deliver, self.fail)

    def _deliver(self, subject: bytes, reply: bytes, raw: bytes | None, data: bytes) -> None:
        self._received(to_message(subject, reply, raw, data), len(data) + len(raw or b""))


class LiveCopySubscription(_NatsSubscription[LiveMessage]):
    def __init__(
        self, connection: Connection, subject: str, buffer_bytes_max: int, keep: Callable[[bytes], bool] | None
    ) -> None:
        super().__init__(connection, subject, buffer_bytes_max)
        self._keep = keep
        self._missed_epoch = None if connection.connected else connection.wire.epoch
        self._attend = connection.on_lost(self._missed)

    def start(self) -> None:
        self._sid = self._wire.sub(self.subject, "", self._deliver, self.fail)

    def _missed(self) -> None:
        """Once for each connection that is lost: attempts to make another, which fail, lose nothing more."""
        if self._wire.epoch != self._missed_epoch:
            self._missed_epoch = self._wire.epoch
            self.interrupt()

    async def close(self) -> None:
        if not self._closed:
            self._attend()
        await super().close()

    def _deliver(self, subject: bytes, reply: bytes, raw: bytes | None, data: bytes) -> None:
        if self._keep is None or self._keep(data):
            self._received(to_live(subject, raw, data), len(data) + len(raw or b""))
