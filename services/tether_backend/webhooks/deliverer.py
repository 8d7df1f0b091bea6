"""Delivering what is due: signed POSTs, several at once, each record's outcome written by compare-and-set.

The outbox is the queue. A look reads what was written since the last one, so what is long delivered costs nothing; the
next look is at the next due time, when something was added (`poke`), or after LOOK_S for what another process put back.
A record is read again right before its delivery, so one that was settled meanwhile is not sent.

What a receiver answers is input from outside: whatever it is, it costs this attempt and nothing else. Each endpoint has
a deliverer of its own, so one that hangs keeps only its own notifications waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

import httpx2
import structlog

from tether.errors import BusError, UnreadableRecordError
from tether.kv import Conflict
from tether.limits import WEBHOOK_CONCURRENCY, WEBHOOK_TIMEOUT_S
from tether_backend.core.notices import Notification, attempted, signature
from tether_backend.metrics import Metrics
from tether_backend.webhooks.config import Endpoint
from tether_backend.webhooks.outbox import Outbox

_log = structlog.get_logger("tether.webhooks")
LOOK_S: Final = 5.0
_RETRY_AFTER_CHARS_MAX: Final = 64
_ANSWER_BYTES_MAX: Final = 64 * 1024  # what an answer says is of no interest, but its end frees the connection
# Of the client and what it is made of: an address, a name, a certificate or an answer may be anything.
_FAILURES: Final = (
    httpx2.HTTPError,
    httpx2.InvalidURL,
    httpx2.StreamError,
    OSError,
    ValueError,
    OverflowError,
    ExceptionGroup,  # of attempts to connect that are made side by side
)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Deliverer:
    """One tenant's, by one process at a time (lease), for these endpoints. `client`: follows no redirect."""

    def __init__(
        self,
        outbox: Outbox,
        endpoints: Mapping[str, Endpoint],
        client: httpx2.AsyncClient,
        metrics: Metrics,
        now_ms: Callable[[], int] = _now_ms,
    ) -> None:
        self._outbox = outbox
        self._endpoints = endpoints
        self._client = client
        self._metrics = metrics
        self._now_ms = now_ms
        self._wake = asyncio.Event()
        self._created = ""  # the outbox's
        self._seen = 0  # the last revision that was looked at
        self._due: dict[tuple[str, str], int] = {}  # (endpoint, id) of what is pending → unix ms

    def poke(self) -> None:
        """Something is due."""
        self._wake.set()

    async def run(self) -> None:
        """For ever; outlives failures of the bus and of receivers."""
        while True:
            self._wake.clear()
            try:
                wait_s = await self._pass()
            except BusError as error:
                _log.warning("webhooks_wait", tenant=self._outbox.tenant, detail=error.detail)
                wait_s = LOOK_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    async def _pass(self) -> float:
        """Deliver everything that is due; seconds until the next look."""
        await self._look()
        now_ms = self._now_ms()
        gate = asyncio.Semaphore(WEBHOOK_CONCURRENCY)
        async with asyncio.TaskGroup() as group:
            for key, _ in sorted((item for item in self._due.items() if item[1] <= now_ms), key=lambda item: item[1]):
                await gate.acquire()
                task = group.create_task(self._deliver(*key), name=f"deliver-{key[1]}")
                task.add_done_callback(lambda _: gate.release())
        if not self._due:
            return LOOK_S
        return min(LOOK_S, max(0.0, (min(self._due.values()) - self._now_ms()) / 1000))

    async def _look(self) -> None:
        """Take in what was written since the last look."""
        state = await self._outbox.state()
        if state is not None and (state.created != self._created or state.last_sequence < self._seen):
            self._created, self._seen = state.created, 0  # made anew, or an older copy of it put back
            self._due.clear()
        only = next(iter(self._endpoints)) if len(self._endpoints) == 1 else None
        async for entry, note in self._outbox.written_after(self._seen, only):
            self._seen = entry.revision
            self._note(note)

    def _note(self, note: Notification) -> None:
        if note.state == "pending" and note.endpoint in self._endpoints:
            self._due[note.endpoint, note.id] = note.due_at
        else:
            self._due.pop((note.endpoint, note.id), None)

    async def _deliver(self, named: str, notification: str) -> None:
        """One attempt. Raises nothing of the bus's or of a receiver's: others are under way beside it."""
        try:
            found = await self._outbox.get(named, notification)
            if found is None or found[1].state != "pending":
                self._due.pop((named, notification), None)
                return
            entry, note = found
            endpoint = self._endpoints[named]
            status, error, retry_after_s = await self._post(endpoint, note)
            after = attempted(note, now_ms=self._now_ms(), status=status, error=error, retry_after_s=retry_after_s)
            await self._outbox.put(entry, after)
        except Conflict:
            return  # put back, or settled, by another: its word stands, and the next look finds it
        except UnreadableRecordError as failed:
            self._due.pop((named, notification), None)  # until it is written again
            _log.warning("webhook_unreadable", tenant=self._outbox.tenant, detail=failed.detail)
            return
        except BusError as failed:
            # Whether it was sent or not: the outbox does not say so, so it is sent again under the same id.
            self._due[named, notification] = self._now_ms() + round(LOOK_S * 1000)
            _log.warning("webhooks_wait", tenant=self._outbox.tenant, detail=failed.detail)
            return
        self._note(after)
        self._metrics.webhooks.labels(after.state if after.state != "pending" else "retried").inc()
        told = _log.info if after.state == "delivered" else _log.warning
        told(
            f"webhook_{'retried' if after.state == 'pending' else after.state}",
            tenant=self._outbox.tenant,
            endpoint=endpoint.name,
            notification=note.id,
            conversation=note.conversation,
            status=status,
            attempts=after.attempts,
            **({} if error is None else {"detail": error}),
        )

    async def _post(self, endpoint: Endpoint, note: Notification) -> tuple[int | None, str | None, float | None]:
        """(status, error, seconds to wait). An address is not told: it may hold a secret."""
        status: int | None = None
        retry_after_s: float | None = None
        try:
            body, timestamp_s = note.body.encode(), self._now_ms() // 1000
            headers = {
                "content-type": "application/json",
                "user-agent": "tether-webhooks",
                "webhook-id": note.id,
                "webhook-timestamp": str(timestamp_s),
                "webhook-signature": signature(endpoint.secret, note.id, timestamp_s, body),
            }
            async with asyncio.timeout(WEBHOOK_TIMEOUT_S):
                async with self._client.stream("POST", endpoint.url, content=body, headers=headers) as answer:
                    status = answer.status_code
                    retry_after_s = _seconds(answer.headers.get("retry-after"))
                    read = 0
                    async for chunk in answer.aiter_raw():
                        read += len(chunk)
                        if read > _ANSWER_BYTES_MAX:
                            break
        except TimeoutError:
            if status is None:
                return None, f"{endpoint.host} did not answer within {WEBHOOK_TIMEOUT_S:g} s", None
        except _FAILURES as error:
            if status is None:
                return None, f"{endpoint.host}: {type(error).__name__}", None
        # The status says it all: what follows it may be cut off, or never end.
        error_text = None if 200 <= status < 300 else f"{endpoint.host} answered {status}"
        return status, error_text, retry_after_s


def _seconds(text: str | None) -> float | None:
    """`Retry-After`: seconds or a date; None for what is neither."""
    if text is None or not text.isascii() or len(text) > _RETRY_AFTER_CHARS_MAX:
        return None
    if text.isdigit():
        return float(text[:9])
    try:
        at = parsedate_to_datetime(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - datetime.now(UTC).timestamp()
    except (ValueError, OverflowError):  # no date, or none that there can be
        return None
