"""nats-py's client with a synchronous send path, direct dispatch and a connection that never gives up.

This is the only place that touches nats-py's inner parts (the dependency is pinned to one minor version for it).
What is replaced, and the defect that each replacement removes:

* `_process_msg`: hands each message to the subscription's function at once. nats-py's queue per subscription drops
  messages in silence at its limits; here whoever subscribes has a bounded buffer that says when it overflowed.
* `_flusher`, `_flush_pending`: sending never awaits and never swallows a cancellation (nats-py's does both).
* `flush`: nothing. A flush that times out kills the read loop when its PONG arrives late, and it is no barrier.
* `_attempt_reconnect`, `_connect_to_server`: the old transport is aborted (closing one waits for a peer that may be
  stopped), unsent bytes are dropped (a publish whose caller was told "undecided" is not sent behind its back), and
  whoever waits for an answer hears of the loss at once.
* `_process_err`: permission errors go to who caused them; any other error reconnects instead of closing for ever.

A connection has an **epoch**: it grows before the first message of a new connection can be delivered, so what was
subscribed or read under an older epoch may have missed messages.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, Final

import structlog
from nats import errors as nats_errors
from nats.aio.client import Client, Srv
from nats.aio.subscription import Subscription as NatsSubscription

from tether import metrics
from tether.bus.config import CONNECT_ATTEMPT_S, PENDING_BYTES_MAX, PING_INTERVAL_S, PINGS_OUTSTANDING_MAX, BusConfig
from tether.errors import BusUnavailableError, PermissionDeniedError

# subject, reply, raw headers, data
Deliver = Callable[[bytes, bytes, bytes | None, bytes], None]
Denied = Callable[[PermissionDeniedError], None]

_log = structlog.get_logger("tether.bus")
_PUBLISH_DENIED: Final = re.compile(r'permissions violation for publish (?:to|with reply of) "([^"]+)"')
_SUBSCRIBE_DENIED: Final = re.compile(r'permissions violation for subscription to "([^"]+)"')
_CANCELS_MAX: Final = 50
_CANCEL_WAIT_S: Final = 0.1
_CLOSE_S: Final = 0.5  # what a close may take to send what is pending


class Wire(Client):
    """One connection. `on_lost` runs once per lost connection, `on_denied(subject)` for refused publishes."""

    def __init__(self, on_lost: Callable[[], None], on_denied: Callable[[str], None]) -> None:
        super().__init__()
        self.epoch = 0
        self.up = asyncio.Event()
        self._on_lost = on_lost
        self._on_denied = on_denied
        self._deliver: dict[int, tuple[Deliver, Denied | None]] = {}
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._refused: str | None = None
        self._told: str | None = None  # the connection error that was logged last

    # --- opening and closing ---

    async def open(self, config: BusConfig) -> None:
        """Connect within `connect_timeout_s`. Raises PermissionDeniedError, BusUnavailableError."""
        options: dict[str, Any] = {
            "servers": list(config.servers),
            "name": config.name,
            "error_cb": self._error,
            "reconnected_cb": self._reconnected,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": config.reconnect_wait_s,
            "connect_timeout": CONNECT_ATTEMPT_S,
            "ping_interval": PING_INTERVAL_S,
            "max_outstanding_pings": PINGS_OUTSTANDING_MAX,
            "inbox_prefix": config.inbox_prefix,
            "user": config.user,
            "password": config.password,
            "token": config.token,
            "user_credentials": config.creds_file,
            "nkeys_seed_str": config.nkey_seed,
            "tls": config.tls,
            "tls_hostname": config.tls_hostname,
            "skip_subject_validation": True,
        }
        connecting = asyncio.get_running_loop().create_task(
            self.connect(**{key: value for key, value in options.items() if value is not None}), name="nats-connect"
        )
        try:
            deadline = asyncio.get_running_loop().time() + config.connect_timeout_s
            while not connecting.done():
                left_s = deadline - asyncio.get_running_loop().time()
                await asyncio.wait({connecting}, timeout=max(0.0, min(0.1, left_s)))
                if self._refused is not None:
                    raise PermissionDeniedError(f"the server refused the connection: {self._refused}")
                if left_s <= 0:
                    raise BusUnavailableError(f"no NATS server answered within {config.connect_timeout_s:g} s")
            await connecting
        except BaseException:
            await _end(connecting)
            await self.shut()
            raise
        self.up.set()

    async def shut(self) -> None:
        """Send what is pending (briefly), then close. Never blocks on a peer that does not read."""
        if self._reading_task is not None:
            self._reading_task.cancel()  # the end of the stream is not an error then
        transport: Any = self._transport
        if self.is_connected and transport is not None:
            try:
                async with asyncio.timeout(_CLOSE_S):
                    transport.writelines(self._pending)
                    transport.close()
                    await transport.wait_closed()
            except (TimeoutError, OSError):
                pass  # the abort below is the end of it
        self._wake.set()  # the flusher sees the new status and ends
        self._lose()
        self._abort_transport()
        await self.close()
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task, self._reconnection_task):
            if task is not None and task is not asyncio.current_task():
                await _end(task)

    def replace_connection(self) -> None:
        """Drop this connection now and reconnect, whatever state the peer is in."""
        if self.is_closed or self.is_reconnecting or not self.is_connected:
            return
        self._lose()
        self._abort_transport()
        self._status = Client.RECONNECTING
        self._ps.reset()
        if self._reconnection_task is not None and not self._reconnection_task.done():
            self._reconnection_task.cancel()
        self._reconnection_task = asyncio.get_running_loop().create_task(
            self._attempt_reconnect(), name="nats-reconnect"
        )

    @property
    def reading(self) -> bool:
        return self._reading_task is not None and not self._reading_task.done()

    # --- sending, without a single await ---

    def pub(self, subject: str, reply: str, data: bytes, headers: bytes | None = None) -> None:
        """Queue one message for sending. The caller has checked sizes and that the connection is up."""
        if headers is None:
            head = f"PUB {subject} {reply} {len(data)}\r\n".encode()
            command = b"%b%b\r\n" % (head, data)
        else:
            head = f"HPUB {subject} {reply} {len(headers)} {len(headers) + len(data)}\r\n".encode()
            command = b"%b%b%b\r\n" % (head, headers, data)
        self._queue(command)

    def sub(self, subject: str, queue: str, deliver: Deliver, denied: Denied | None = None) -> int:
        """Subscribe; renewed by itself on every reconnect."""
        self._sid += 1
        sid = self._sid
        self._deliver[sid] = (deliver, denied)
        self._subs[sid] = NatsSubscription(self, sid, subject, queue=queue)
        if self.is_connected:
            self._queue(f"SUB {subject} {queue} {sid}\r\n".encode())
        return sid

    def unsub(self, sid: int) -> None:
        if self._deliver.pop(sid, None) is None:
            return
        self._subs.pop(sid, None)
        if self.is_connected:
            self._queue(f"UNSUB {sid}\r\n".encode())

    async def room(self) -> None:
        """Wait until the unsent bytes are within their bound."""
        while not self._room.is_set():
            await self._room.wait()

    @property
    def has_room(self) -> bool:
        return self._room.is_set()

    def _queue(self, command: bytes) -> None:
        self._pending.append(command)
        self._pending_data_size += len(command)
        if self._pending_data_size > PENDING_BYTES_MAX:
            self._room.clear()
        self._wake.set()

    # --- what nats-py calls ---

    async def _flusher(self) -> None:
        transport: Any = self._transport
        while self.is_connected and self._transport is transport:
            await self._wake.wait()
            self._wake.clear()
            if not self.is_connected or self._transport is not transport:
                return
            if not self._pending:
                continue
            batch, self._pending, self._pending_data_size = self._pending, [], 0
            try:
                transport.writelines(batch)
                # What was handed over counts as sent: while the peer does not read, drain holds us here and
                # `_pending` grows until `room` makes publishers wait.
                await transport.drain()
            except OSError as error:
                await self._process_op_err(error)
                return
            self._room.set()

    async def _flush_pending(self, force_flush: bool = False) -> None:
        self._wake.set()

    async def _send_command(self, cmd: bytes, priority: bool = False) -> None:
        self._queue(cmd)

    async def flush(self, timeout: float = 0) -> None:
        return

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        found = self._deliver.get(sid)
        if found is not None:
            try:
                found[0](subject, reply, headers, data)
            except Exception:  # noqa: BLE001 - the boundary of the read loop: an exception here would end it in silence
                _log.exception("bus_delivery_failed", subject=subject.decode("utf-8", "replace"))

    async def _process_pong(self) -> None:
        self._pings_outstanding = 0
        self._pongs.clear()

    async def _process_err(self, err_msg: str) -> None:
        text = err_msg.strip("'")
        if "permissions violation" in text:
            self._permission(text)
            return
        if "authorization violation" in text or "authentication" in text:
            self._refused = text
        _log.warning("bus_server_error", error=text)
        await self._process_op_err(nats_errors.Error(f"nats: {text}"))

    async def _process_connect_init(self) -> None:
        self.epoch += 1
        await super()._process_connect_init()

    async def _connect_to_server(self, s: Srv) -> None:
        newest = self._reconnection_task
        if newest is not None and newest is not asyncio.current_task():
            raise asyncio.CancelledError  # replaced, and its cancellation was lost (see `_end`)
        self._lose()
        self._abort_transport()
        self._transport = None
        await super()._connect_to_server(s)

    async def _attempt_reconnect(self) -> None:
        self._lose()
        self._abort_transport()
        await super()._attempt_reconnect()

    async def _reconnected(self) -> None:
        self._told = None
        self.up.set()
        _log.info("bus_reconnected", epoch=self.epoch)
        metrics.bus_reconnects.inc()

    async def _error(self, error: Exception) -> None:
        """Never raises: an exception here kills nats-py's read loop."""
        text = str(error) or type(error).__name__
        lowered = text.lower()
        if "authorization violation" in lowered or "authentication" in lowered:
            self._refused = text
        if text != self._told:
            self._told = text
            _log.warning("bus_connection_error", error=text)

    def _lose(self) -> None:
        self.up.clear()
        self._pending, self._pending_data_size = [], 0
        self._room.set()
        self._on_lost()

    def _abort_transport(self) -> None:
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()

    def _permission(self, text: str) -> None:
        """Servers name the subject; nats-py gives the text in lower case."""
        found = _PUBLISH_DENIED.search(text)
        if found is not None:
            self._on_denied(found.group(1))
            return
        found = _SUBSCRIBE_DENIED.search(text)
        if found is None:
            _log.warning("bus_permission_denied", error=text)
            return
        subject = found.group(1)
        for sid, sub in list(self._subs.items()):
            if sub.subject.lower() == subject and sid in self._deliver:
                _, denied = self._deliver.pop(sid)
                self._subs.pop(sid, None)
                if denied is not None:
                    denied(PermissionDeniedError("subscribing is not permitted", subject=sub.subject))


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel until it is done: `asyncio.wait_for` of Python 3.11 loses a cancellation that meets its result, and
    nats-py then connects on for ever."""
    for _ in range(_CANCELS_MAX):
        if task.done():
            break
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_WAIT_S)
    else:
        _log.error("bus_task_does_not_end", task=task.get_name())
        return
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.debug("bus_task_ended", task=task.get_name(), error=str(error))
