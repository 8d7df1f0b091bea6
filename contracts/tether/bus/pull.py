"""A durable pull consumer's messages, for ever: two pulls in flight, replaced when they fall silent.

Each of two slots has one pull request at the server. A pull ends by its count, by a status (408 expired, 409 changed,
404 nothing, 503 nobody there), by silence (no message and no heartbeat for `_SILENCE_S`), or with its connection. An
ended pull is replaced at once, after an error status with back-off; the state is logged when it changes, not each time.

Bounded: what is asked for, buffered and handed out unsettled is together at most `in_flight_max`. A message of a pull
that was given up may still come; it is a valid delivery and is handed out (the excess is at most one pull's count).
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final

import structlog

from tether import natsheaders as wire_headers
from tether.bus.connection import AnswerTimeoutError, Connection, ConnectionLostError
from tether.bus.wire import Deliver
from tether.errors import BusError, PermissionDeniedError
from tether.ports import StoredMessage

_loops = itertools.count(1)
_log = structlog.get_logger("tether.bus")
_EXPIRES_S: Final = 4.0
_HEARTBEAT_S: Final = 0.75
_SILENCE_S: Final = 2.0  # more than two heartbeats
_DOWN_POLL_S: Final = 0.1  # how soon the connection's return is noticed
_BACKOFF_MIN_S: Final = 0.05
_BACKOFF_MAX_S: Final = 1.0
_CONFIRM_S: Final = 2.0
_ENDED: Final = frozenset({404, 408})  # the ordinary ends of a pull: ask again at once


def _now_s() -> float:
    return asyncio.get_running_loop().time()


class NatsJob:
    """One delivery. Its settling is sent at once; `ack(confirm=True)` waits for the server."""

    __slots__ = ("_connection", "_message", "_pull", "_reply", "_settled", "deliveries")

    def __init__(
        self, pull: PullLoop, connection: Connection, message: StoredMessage, reply: str, deliveries: int
    ) -> None:
        self._pull = pull
        self._connection = connection
        self._message = message
        self._reply = reply
        self._settled = False
        self.deliveries = deliveries

    def __del__(self) -> None:
        # A job that its handler dropped (cancelled, crashed) comes again after the ack wait; its place is free.
        self._settle()

    @property
    def message(self) -> StoredMessage:
        return self._message

    async def ack(self, *, confirm: bool = False) -> bool:
        self._settle()
        if not confirm:
            return self._send(b"+ACK")
        try:
            raw, _ = await self._connection.ask(self._reply, b"+ACK", timeout_s=_CONFIRM_S)
        except (AnswerTimeoutError, ConnectionLostError, BusError):
            return False
        return wire_headers.parse(raw)[0] == 0

    async def nak(self, delay_s: float) -> None:
        self._settle()
        delay_ns = max(0, round(delay_s * 1e9))
        self._send(b'-NAK {"delay": %d}' % delay_ns if delay_ns else b"-NAK")

    async def in_progress(self) -> None:
        self._send(b"+WPI")

    async def term(self, reason: str) -> None:
        self._settle()
        self._send(b"+TERM " + reason.replace("\r", " ").replace("\n", " ").encode())

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            self._pull.settled()

    def _send(self, data: bytes) -> bool:
        """A settling that cannot be sent is not kept: the server delivers the message again."""
        if not self._connection.connected:
            return False
        self._connection.send(self._reply, data)
        return True


class _Slot:
    """One pull at the server: how many messages it still owes, and when it was last heard of."""

    __slots__ = ("epoch", "heard_s", "number", "owed")

    def __init__(self) -> None:
        self.number = 0
        self.owed = 0
        self.epoch = 0
        self.heard_s = 0.0


def parse_ack_subject(reply: str) -> tuple[int, int, int]:
    """(deliveries, stream sequence, stored at ns) of `$JS.ACK…`, both forms (the second has domain and account)."""
    parts = reply.split(".")
    at = 4 if len(parts) < 11 else 6
    return int(parts[at]), int(parts[at + 1]), int(parts[at + 3])


class PullLoop:
    """See the module. `run` is the iterator's body; everything else is called from the read loop or by jobs."""

    def __init__(self, connection: Connection, stream: str, durable: str, in_flight_max: int) -> None:
        self._connection = connection
        self._stream = stream
        self._durable = durable
        self._max = max(1, in_flight_max)
        self._slots = (_Slot(), _Slot()) if self._max > 1 else (_Slot(),)
        self._batch = max(1, self._max // len(self._slots))
        self._buffer: deque[NatsJob] = deque()
        self._unsettled = 0
        self._wake = asyncio.Event()
        self._retry_at_s = 0.0
        self._backoff_s = _BACKOFF_MIN_S
        self._state = "ok"
        self._denied: PermissionDeniedError | None = None
        self._subject = wire_headers.check_subject(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}")
        self._inbox = f"{connection.inbox}.p{next(_loops)}"

    def settled(self) -> None:
        self._unsettled -= 1
        self._wake.set()

    async def run(self) -> AsyncGenerator[NatsJob, None]:
        wire = self._connection.wire
        sids = [
            wire.sub(f"{self._inbox}.{index}.*", "", self._deliver(slot), self._refused)
            for index, slot in enumerate(self._slots)
        ]
        forget = self._connection.on_lost(self._lost)
        permit = self._connection.on_denied(self._subject, self._refused)
        try:
            while not self._connection.closed:
                self._wake.clear()
                self._replenish()
                while self._buffer:
                    yield self._buffer.popleft()
                    self._replenish()
                if self._denied is not None:
                    raise self._denied
                await self._sleep()
        finally:
            forget()
            permit()
            for sid in sids:
                wire.unsub(sid)

    async def _sleep(self) -> None:
        """Until something happens, or a slot's silence or the back-off ends."""
        now_s = _now_s()
        until_s = now_s + (_HEARTBEAT_S if self._connection.connected else _DOWN_POLL_S)
        if self._retry_at_s > now_s:
            until_s = min(until_s, self._retry_at_s)
        timer = asyncio.get_running_loop().call_at(until_s, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    def _replenish(self) -> None:
        """Give a new pull to each slot that has none."""
        now_s = _now_s()
        connected, epoch = self._connection.connected, self._connection.wire.epoch
        for index, slot in enumerate(self._slots):
            if slot.owed and slot.epoch == epoch:
                if now_s - slot.heard_s <= _SILENCE_S:
                    continue
                self._told("silent")
            slot.owed = 0
            if not connected or now_s < self._retry_at_s:
                continue
            # A small pull beside one that is at the server would cost a request per message: wait for more room.
            owed = sum(other.owed for other in self._slots)
            batch = min(self._batch, self._max - self._unsettled - owed)
            if batch < 1 or (owed and batch < self._batch // 2):
                continue
            slot.number += 1
            slot.owed, slot.epoch, slot.heard_s = batch, epoch, now_s
            request = {
                "batch": batch,
                "expires": int(_EXPIRES_S * 1e9),
                "idle_heartbeat": int(_HEARTBEAT_S * 1e9),
            }
            self._connection.send(
                self._subject,
                json.dumps(request).encode(),
                reply=f"{self._inbox}.{index}.{slot.number}",
            )

    def _deliver(self, slot: _Slot) -> Deliver:
        def deliver(subject: bytes, reply: bytes, raw: bytes | None, data: bytes) -> None:
            slot.heard_s = _now_s()
            if reply.startswith(b"$JS.ACK."):
                slot.owed = max(0, slot.owed - 1)
                self._message(subject, reply, raw, data)
            else:
                self._status(slot, subject, raw)

        return deliver

    def _message(self, subject: bytes, reply: bytes, raw: bytes | None, data: bytes) -> None:
        where = reply.decode()
        deliveries, sequence, stored_at_ns = parse_ack_subject(where)
        headers = wire_headers.parse(raw)[2] if raw else {}
        message = StoredMessage(subject.decode(), sequence, stored_at_ns, data, headers)
        self._buffer.append(NatsJob(self, self._connection, message, where, deliveries))
        self._unsettled += 1
        self._backoff_s = _BACKOFF_MIN_S
        self._told("ok")
        self._wake.set()

    def _status(self, slot: _Slot, subject: bytes, raw: bytes | None) -> None:
        status, description, _ = wire_headers.parse(raw)
        if status == 100:  # heartbeat
            self._told("ok")
            return
        if subject.rpartition(b".")[2] != b"%d" % slot.number:
            return  # the end of a pull that was given up
        slot.owed = 0
        if status not in _ENDED:
            self._retry_at_s = _now_s() + self._backoff_s
            self._backoff_s = min(_BACKOFF_MAX_S, self._backoff_s * 2)
            self._told(f"{status} {description}".strip())
        self._wake.set()

    def _lost(self) -> None:
        for slot in self._slots:
            slot.owed = 0
        self._retry_at_s = 0.0
        self._backoff_s = _BACKOFF_MIN_S
        self._wake.set()

    def _refused(self, error: PermissionDeniedError) -> None:
        self._denied = error
        self._wake.set()

    def _told(self, state: str) -> None:
        if state == self._state:
            return
        _log.info("bus_pull", stream=self._stream, durable=self._durable, state=state, before=self._state)
        self._state = state
