"""`MemoryBus`: the port `tether.ports.Bus` in memory, one connection to a shared `MemoryServer`, with faults.

Semantics are JetStream's (one conformance suite runs on both). Each call is one step of the server between two
scheduling points, so tests can interleave; `Faults` says what goes wrong with it. A lost connection drops what is
delivered meanwhile and grows `epoch`, as the real one does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

from tether import natsheaders, topology_apply
from tether.buffers import BufferedSubscription
from tether.errors import (
    BusError,
    BusUnavailableError,
    MessageTooLargeError,
    NoReplyError,
    UndecidedError,
    WrongLastSequenceError,
)
from tether.ports import (
    ConsumerState,
    Handler,
    Job,
    LiveMessage,
    LiveSubscription,
    Message,
    PubAck,
    StoredMessage,
    StreamState,
    Subscription,
)
from tether.serving import Endpoint, HandlerPool
from tether.testing.faults import Fault, FaultKind, Faults
from tether.testing.memory_jobs import job_stream
from tether.testing.memory_server import PAYLOAD_BYTES_MAX, CoreSubscription, MemoryServer
from tether.testing.memory_stream import EXPECTED, MSG_ID, TTL, MemoryStream, RefusedError, header_bytes, size_of
from tether.topology import Topology

_HEADERS_BYTES_MAX: Final = 4096
_CALL_TIMEOUT_S: Final = 5.0
_LOST: Final = frozenset({FaultKind.LOSE_MESSAGE, FaultKind.LATE, FaultKind.DISCONNECT})
_inboxes = itertools.count(1)


class _MemorySubscription(BufferedSubscription[Message]):
    def __init__(self, bus: MemoryBus, subject: str, queue: str, buffer_bytes_max: int) -> None:
        super().__init__(subject, buffer_bytes_max)
        self._release = bus.attach(subject, queue, self._deliver, self._end)

    def _deliver(self, message: Message) -> None:
        if not self.put(message, len(message.data) + header_bytes(message.headers)):
            self._release()

    async def close(self) -> None:
        self._release()
        await super().close()


class _MemoryLive(BufferedSubscription[LiveMessage]):
    def __init__(
        self, bus: MemoryBus, subject: str, buffer_bytes_max: int, keep: Callable[[bytes], bool] | None
    ) -> None:
        super().__init__(subject, buffer_bytes_max)
        self._keep = keep
        self._release = bus.attach(subject, "", self._deliver, self._end)

    def _deliver(self, message: Message) -> None:
        if self._keep is not None and not self._keep(message.data):
            return
        live = natsheaders.live_message(message.subject, message.data, message.headers)
        if not self.put(live, len(message.data) + header_bytes(message.headers)):
            self._release()

    async def close(self) -> None:
        self._release()
        await super().close()


class MemoryBus:
    """One connection. `faults` is this connection's own unless one is shared."""

    def __init__(self, server: MemoryServer, *, name: str = "test", faults: Faults | None = None) -> None:
        self.server = server
        self.name = name
        self.faults = faults or Faults()
        self.closed = False
        self._up = asyncio.Event()
        self._up.set()
        self._epoch = 1
        self._reconnect: asyncio.TimerHandle | None = None
        self._attached: dict[object, tuple[CoreSubscription, Callable[[], None]]] = {}

    async def __aenter__(self) -> MemoryBus:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- the connection ---

    @property
    def connected(self) -> bool:
        return self._up.is_set() and not self.closed

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def payload_bytes_max(self) -> int:
        return PAYLOAD_BYTES_MAX - _HEADERS_BYTES_MAX

    def disconnect(self, *, for_s: float | None = None) -> None:
        """Lose the connection; with `for_s` it comes back by itself."""
        self._up.clear()
        if self._reconnect is not None:
            self._reconnect.cancel()
            self._reconnect = None
        if for_s is not None:
            self._reconnect = asyncio.get_running_loop().call_later(for_s, self.reconnect)
        self.server.wake()

    def reconnect(self) -> None:
        if not self._up.is_set():
            self._epoch += 1
            self._up.set()
            self.server.wake()

    async def close(self) -> None:
        self.closed = True
        if self._reconnect is not None:
            self._reconnect.cancel()
        for subscription, end in list(self._attached.values()):
            self.server.unsubscribe(subscription)
            end()
        self._attached.clear()
        self._up.set()
        self.server.wake()

    def attach(
        self, subject: str, queue: str, deliver: Callable[[Message], None], end: Callable[[], None]
    ) -> Callable[[], None]:
        """Subscribe at the server; returns how to stop. `end` is called when the connection is closed."""
        natsheaders.check_subject(subject)
        key = object()
        subscription = CoreSubscription(subject, queue, lambda: self.connected, deliver)
        self._attached[key] = (subscription, end)
        self.server.subscribe(subscription)

        def release() -> None:
            self._attached.pop(key, None)
            self.server.unsubscribe(subscription)

        return release

    async def _enter(self, call: str, subject: str, timeout_s: float = _CALL_TIMEOUT_S) -> Fault | None:
        """The start of every call: a scheduling point, the connection, the fault. Raises BusUnavailableError."""
        await asyncio.sleep(0)
        if not self._up.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._up.wait()
            except TimeoutError:
                raise BusUnavailableError("not connected", subject=subject) from None
        if self.closed:
            raise BusUnavailableError("the connection is closed", subject=subject)
        fault = self.faults.draw(call, subject)
        if fault is None:
            return None
        if fault.kind is FaultKind.UNAVAILABLE:
            raise BusUnavailableError("unavailable by a fault", subject=subject)
        if fault.kind is FaultKind.DELAY:
            epoch = self._epoch
            await asyncio.sleep(fault.delay_s)
            if epoch != self._epoch or not self.connected:
                raise UndecidedError("the connection was lost", subject=subject)
        return fault

    async def _read(self, call: str, subject: str) -> None:
        """The start of a call without effect: a lost connection means unavailable."""
        try:
            fault = await self._enter(call, subject)
        except UndecidedError as error:
            raise BusUnavailableError(error.detail, subject=subject) from None
        if fault is not None and fault.kind in (FaultKind.DISCONNECT, FaultKind.DISCONNECT_AFTER):
            self.disconnect(for_s=fault.delay_s)
            raise BusUnavailableError("the connection was lost", subject=subject)

    def _stream(self, name: str) -> MemoryStream:
        stream = self.server.stream(name)
        if stream is None:
            raise BusUnavailableError("stream not found", subject=name, code=topology_apply.STREAM_NOT_FOUND)
        return stream

    # --- publishing ---

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        msg_id: str | None = None,
        expect_last: int | None = None,
        headers: Mapping[str, str] | None = None,
        ttl_s: int | None = None,
        timeout_s: float = 2.0,
    ) -> PubAck:
        named: dict[str, str] = {}
        if msg_id is not None:
            named[MSG_ID] = msg_id
        if expect_last is not None:
            named[EXPECTED] = str(expect_last)
        if ttl_s is not None:
            named[TTL] = f"{ttl_s}s"
        named.update(headers or {})
        self._check(subject, data, named)
        fault = await self._enter("publish", subject, timeout_s)
        kind = None if fault is None else fault.kind
        if fault is not None and kind in _LOST:
            if kind is FaultKind.LATE:
                loop = asyncio.get_running_loop()
                loop.call_later(fault.delay_s, self._store_late, subject, data, named)
            elif kind is FaultKind.DISCONNECT:
                self.disconnect(for_s=fault.delay_s)
            raise UndecidedError(f"no acknowledgement: {kind}", subject=subject)
        ack = await self._stored(subject, data, named, timeout_s, live=kind is not FaultKind.LOSE_LIVE)
        if fault is not None and kind in (FaultKind.LOSE_ACK, FaultKind.DISCONNECT_AFTER):
            if kind is FaultKind.DISCONNECT_AFTER:
                self.disconnect(for_s=fault.delay_s)
            raise UndecidedError(f"no acknowledgement: {kind}", subject=subject)
        return ack

    async def _stored(
        self, subject: str, data: bytes, headers: Mapping[str, str], timeout_s: float, *, live: bool
    ) -> PubAck:
        heard = self.server.route(Message(subject, data, "", headers))
        try:
            stored = self.server.store(subject, data, headers, live=live)
        except RefusedError as refused:
            raise _publish_error(subject, refused) from None
        if stored is not None:
            return stored.ack
        if not heard:
            raise BusUnavailableError("no stream takes this subject", subject=subject, code=503)
        await asyncio.sleep(timeout_s)
        raise UndecidedError(f"no acknowledgement within {timeout_s:g} s", subject=subject)

    def _store_late(self, subject: str, data: bytes, headers: Mapping[str, str]) -> None:
        try:
            self.server.store(subject, data, headers)
        except RefusedError:
            pass  # nobody waits for its answer any more

    async def send(self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None) -> None:
        named = dict(headers or {})
        self._check(subject, data, named)
        fault = await self._enter("send", subject)
        if fault is not None and fault.kind is FaultKind.LOSE_MESSAGE:
            return
        self.server.route(Message(subject, data, "", named))
        self._store_late(subject, data, named)

    def _check(self, subject: str, data: bytes, headers: Mapping[str, str]) -> None:
        natsheaders.check_subject(subject)
        natsheaders.encode(headers)
        size = len(data) + header_bytes(headers)
        if size > PAYLOAD_BYTES_MAX:
            raise MessageTooLargeError(f"{size} bytes with headers, the limit is {PAYLOAD_BYTES_MAX}", subject=subject)

    # --- reading ---

    async def last(self, stream: str, subject: str, *, leader: bool = True) -> StoredMessage | None:
        await self._read("last", subject)
        return self._stream(stream).last(subject, below=None if leader else self.server.visible(stream))

    async def at(self, stream: str, sequence: int) -> StoredMessage | None:
        await self._read("at", stream)
        return self._stream(stream).get(sequence)

    async def next_after(self, stream: str, sequence: int, filter_subject: str) -> StoredMessage | None:
        await self._read("next_after", filter_subject)
        return next(self._stream(stream).after(sequence, filter_subject), None)

    async def read(
        self, stream: str, after: int, filter_subject: str, *, limit: int = 500, bytes_max: int = 4 << 20
    ) -> Sequence[StoredMessage]:
        await self._read("read", filter_subject)
        visible = self.server.visible(stream)
        batch: list[StoredMessage] = []
        size = 0
        for message in self._stream(stream).after(after, filter_subject):
            if len(batch) >= limit or size >= bytes_max or (visible is not None and message.sequence > visible):
                break
            batch.append(message)
            size += size_of(message.subject, message.data, message.headers)
        return batch

    async def subjects(self, stream: str, filter_subject: str) -> Mapping[str, int]:
        await self._read("subjects", filter_subject)
        return self._stream(stream).subjects(filter_subject)

    async def state(self, stream: str) -> StreamState | None:
        await self._read("state", stream)
        found = self.server.stream(stream)
        if found is None:
            return None
        return StreamState(
            stream,
            found.created,
            found.messages,
            found.bytes,
            found.first_sequence,
            found.last_sequence,
            int(found.config.get("max_bytes", -1)),
        )

    async def consumer(self, stream: str, durable: str) -> ConsumerState | None:
        await self._read("consumer", stream)
        found = self.server.consumers.get((stream, durable))
        return None if found is None else found.state(self.server.clock.now_ns())

    async def delete_consumer(self, stream: str, durable: str) -> None:
        await self._read("delete_consumer", stream)
        self.server.consumers.pop((stream, durable), None)

    async def purge(self, stream: str, subject: str, *, up_to: int | None = None) -> int:
        await self._read("purge", subject)
        return self._stream(stream).purge(subject, up_to)

    async def erase(self, stream: str, sequence: int) -> bool:
        await self._read("erase", str(sequence))
        return self._stream(stream).remove(sequence)

    async def delete_stream(self, stream: str) -> None:
        await self._read("delete_stream", stream)
        self.server.delete_stream(stream)

    async def ensure(self, topology: Topology) -> None:
        await self._read("ensure", "")
        await topology_apply.apply(self.server.api, topology)

    async def diff(self, topology: Topology) -> Sequence[str]:
        await self._read("diff", "")
        return await topology_apply.diff(self.server.api, topology)

    # --- delivery ---

    def jobs(self, stream: str, durable: str, *, in_flight_max: int = 256) -> AsyncGenerator[Job, None]:
        return job_stream(self, stream, durable, in_flight_max)

    async def subscribe(self, subject: str, *, queue: str = "", buffer_bytes_max: int = 8 << 20) -> Subscription:
        self._open()
        return _MemorySubscription(self, subject, queue, buffer_bytes_max)

    async def live(
        self, subject: str, *, buffer_bytes_max: int = 32 << 20, keep: Callable[[bytes], bool] | None = None
    ) -> LiveSubscription:
        self._open()
        return _MemoryLive(self, subject, buffer_bytes_max, keep)

    def _open(self) -> None:
        if self.closed:
            raise BusUnavailableError("the connection is closed")

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Message:
        named = dict(headers or {})
        self._check(subject, data, named)
        try:
            fault = await self._enter("request", subject, timeout_s)
        except UndecidedError as error:
            raise NoReplyError(error.detail, subject=subject, no_responders=False) from None
        kind = None if fault is None else fault.kind
        if fault is not None and kind in _LOST:
            if kind is FaultKind.DISCONNECT:
                self.disconnect(for_s=fault.delay_s)
            raise NoReplyError(f"no reply: {kind}", subject=subject, no_responders=False)
        answer = await self._asked(subject, data, named, timeout_s)
        if fault is not None and kind in (FaultKind.LOSE_ACK, FaultKind.DISCONNECT_AFTER):
            if kind is FaultKind.DISCONNECT_AFTER:
                self.disconnect(for_s=fault.delay_s)
            raise NoReplyError(f"no reply: {kind}", subject=subject, no_responders=False)
        return answer

    async def _asked(self, subject: str, data: bytes, headers: Mapping[str, str], timeout_s: float) -> Message:
        inbox = f"_INBOX.memory.{next(_inboxes)}"
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def answered(message: Message) -> None:
            if not future.done():
                future.set_result(message)

        self.server.inboxes[inbox] = answered
        try:
            heard = self.server.route(Message(subject, data, inbox, headers))
            if not heard and not self._acked(subject, data, headers, answered):
                raise NoReplyError("nobody answers there", subject=subject, no_responders=True)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise NoReplyError(f"no reply within {timeout_s:g} s", subject=subject, no_responders=False) from None
        finally:
            del self.server.inboxes[inbox]

    def _acked(
        self, subject: str, data: bytes, headers: Mapping[str, str], answered: Callable[[Message], None]
    ) -> bool:
        """A stream answers a request to one of its subjects with its acknowledgement."""
        try:
            stored = self.server.store(subject, data, headers)
        except RefusedError as refused:
            answer: dict[str, Any] = {"error": refused.error}
        else:
            if stored is None:
                return False
            answer = {"stream": stored.ack.stream, "seq": stored.ack.sequence}
        answered(Message("", json.dumps(answer).encode()))
        return True

    def serve(
        self, subject: str, handler: Handler, *, queue: str = "", name: str, concurrency_max: int = 64
    ) -> AbstractAsyncContextManager[None]:
        return self._serving(subject, handler, queue, concurrency_max)

    @asynccontextmanager
    async def _serving(self, subject: str, handler: Handler, queue: str, concurrency_max: int) -> AsyncIterator[None]:
        def respond(reply: str, answer: bytes) -> None:
            if self.connected:
                self.server.route(Message(reply, answer))

        pool = HandlerPool(handler, Endpoint(subject, queue), concurrency_max, lambda: self.payload_bytes_max, respond)
        release = self.attach(subject, queue, pool.put, lambda: None)
        try:
            yield
        finally:
            release()
            await pool.finish()

    async def barrier(self) -> None:
        try:
            fault = await self._enter("barrier", "")
        except UndecidedError as error:
            raise NoReplyError(error.detail, subject="", no_responders=False) from None
        if fault is not None and fault.kind in (FaultKind.DISCONNECT, FaultKind.DISCONNECT_AFTER):
            self.disconnect(for_s=fault.delay_s)
            raise NoReplyError("the connection was lost", subject="", no_responders=False)


def _publish_error(subject: str, refused: RefusedError) -> BusError:
    code, text = refused.error["err_code"], refused.error["description"]
    if code == 10071:
        return WrongLastSequenceError(int(text.rpartition(" ")[2]), subject=subject)
    if code == 10054:
        return MessageTooLargeError(text, subject=subject, code=code)
    return BusUnavailableError(text, subject=subject, code=code)
