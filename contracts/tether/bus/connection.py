"""Questions and answers over one inbox subscription: the base of publisher, reader, pull loop and barrier.

Every question carries its own reply subject `{inbox}.{token}`; one subscription on `{inbox}.*` gets all answers, one
dictionary finds who waits. A question to a sandbox has `tether.reply.{tenant}.{workspace}.{asker}.{token}` instead: a
sandbox may answer there for its own workspace only. It sees the token of what it is asked, and could guess the next
one, so an answer counts only on exactly the subject that was given.

A question that waits when the connection is lost fails at once (`ConnectionLostError`): its answer can no longer come.
One that finds the connection down waits for it within its own time and has then not been sent.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections.abc import Callable
from typing import Any, Final

import structlog

from tether import metrics, subjects
from tether import natsheaders as wire_headers
from tether.bus.config import HEADERS_BYTES_MAX, BusConfig
from tether.bus.wire import Wire
from tether.errors import BusError, BusUnavailableError, MessageTooLargeError, NoReplyError, PermissionDeniedError

_log = structlog.get_logger("tether.bus")
NO_RESPONDERS: Final = 503
ATTEMPTS: Final = 3
_OWN_DELAY_S: Final = 0.5


class AnswerTimeoutError(Exception):
    """Sent, and no answer came in time."""


class ConnectionLostError(Exception):
    """Sent, and the connection was lost before the answer."""


# raw headers, data
Answer = tuple[bytes | None, bytes]


class _Waiting:
    """Who waits for answers on one reply subject. `many` gets every answer, else the first settles the future."""

    __slots__ = ("future", "many", "reply", "subject", "timer")

    def __init__(
        self, subject: str, reply: str, future: asyncio.Future[Answer], many: Callable[[Answer], bool] | None
    ) -> None:
        self.subject = subject
        self.reply = reply
        self.future = future
        self.many = many
        self.timer: asyncio.TimerHandle | None = None


class Connection:
    """The wire with its inbox. Owns the watchdog that replaces a connection which no longer answers."""

    def __init__(self, config: BusConfig) -> None:
        self.config = config
        self._asker = secrets.token_hex(8)
        self.inbox = f"{config.inbox_prefix}.{self._asker}"
        self._heard: set[str] = set()  # subscriptions to answers of sandboxes, one for each tenant that was asked
        self._waiting: dict[str, _Waiting] = {}
        self._tokens = itertools.count(1)
        self._lost_hooks: list[Callable[[], None]] = []
        self._closed_hooks: dict[object, Callable[[], None]] = {}
        self._denied_hooks: list[tuple[str, Callable[[PermissionDeniedError], None]]] = []
        self._watchdog: asyncio.Task[None] | None = None
        self.closed = False
        self._inbox_denied: PermissionDeniedError | None = None
        self.wire = Wire(self._lost, self._denied)

    async def open(self) -> None:
        await self.wire.open(self.config)
        self.wire.sub(f"{self.inbox}.*", "", self._answered, self._inbox_refused)
        try:
            await self.barrier()
        except BaseException:
            await self.close()
            raise
        self._watchdog = asyncio.get_running_loop().create_task(self._watch(), name=f"bus-watchdog-{self.config.name}")
        self._watchdog.add_done_callback(_tell)

    async def close(self) -> None:
        self.closed = True
        if self._watchdog is not None:
            self._watchdog.cancel()
            await asyncio.gather(self._watchdog, return_exceptions=True)
        self.wire.up.set()  # whoever waits for the connection hears that it is closed
        await self.wire.shut()
        for hook in list(self._closed_hooks.values()):
            hook()
        self._closed_hooks.clear()

    @property
    def connected(self) -> bool:
        return not self.closed and self.wire.is_connected and self.wire.up.is_set()

    @property
    def payload_bytes_max(self) -> int:
        return self.wire.max_payload - HEADERS_BYTES_MAX

    def on_lost(self, hook: Callable[[], None]) -> Callable[[], None]:
        """Call `hook` whenever the connection is lost; returns how to stop that."""
        self._lost_hooks.append(hook)
        return lambda: self._lost_hooks.remove(hook)

    def on_closed(self, hook: Callable[[], None]) -> Callable[[], None]:
        """Call `hook` when this connection is closed for good; returns how to stop that."""
        key = object()
        self._closed_hooks[key] = hook
        return lambda: self._closed_hooks.pop(key, None) and None

    def on_denied(self, subject: str, hook: Callable[[PermissionDeniedError], None]) -> Callable[[], None]:
        """Call `hook` when publishing to `subject` is refused; returns how to stop that."""
        entry = (subject, hook)
        self._denied_hooks.append(entry)
        return lambda: self._denied_hooks.remove(entry)

    async def ready(self, subject: str, size_bytes: int, timeout_s: float) -> None:
        """Wait until something may be sent. Raises BusUnavailableError, MessageTooLargeError: nothing was sent."""
        wire_headers.check_subject(subject)
        if size_bytes > self.wire.max_payload:
            raise MessageTooLargeError(
                f"{size_bytes} bytes with headers, the limit is {self.wire.max_payload}", subject=subject
            )
        if self.closed:
            raise BusUnavailableError("the connection is closed", subject=subject)
        if self._inbox_denied is not None:
            raise self._inbox_denied
        if self.connected and self.wire.has_room:
            return
        try:
            async with asyncio.timeout(timeout_s):
                while not (self.connected and self.wire.has_room):
                    await self.wire.up.wait()
                    if self.closed:
                        raise BusUnavailableError("the connection is closed", subject=subject)
                    await self.wire.room()
                    if not self.wire.is_connected:
                        await asyncio.sleep(0.01)  # between the loss and its notice
        except TimeoutError:
            raise BusUnavailableError("not connected", subject=subject) from None

    def send(self, subject: str, data: bytes, *, headers: bytes | None = None, reply: str = "") -> None:
        self.wire.pub(subject, reply, data, headers)

    async def ask(self, subject: str, data: bytes, *, headers: bytes | None = None, timeout_s: float) -> Answer:
        """One question, its first answer. Raises what `ready` raises, AnswerTimeoutError, ConnectionLostError,
        PermissionDeniedError."""
        loop = asyncio.get_running_loop()
        wire_headers.check_subject(subject)
        size_bytes = len(data) + (len(headers) if headers else 0)
        if size_bytes > self.wire.max_payload or not (self.connected and self.wire.has_room):
            start_s = loop.time()
            await self.ready(subject, size_bytes, timeout_s)
            timeout_s = max(0.001, timeout_s - (loop.time() - start_s))
        token, waiting = self._expect(subject, None, timeout_s)
        self.wire.pub(subject, waiting.reply, data, headers)
        try:
            return await waiting.future
        finally:
            self._forget(token)

    async def ask_many(self, subject: str, data: bytes, *, take: Callable[[Answer], bool], timeout_s: float) -> None:
        """One question with many answers: `take` gets each and returns whether it was the last; all within the time.
        Raises as `ask`."""
        await self.ready(subject, len(data), timeout_s)
        token, waiting = self._expect(subject, take, timeout_s)
        self.wire.pub(subject, waiting.reply, data, None)
        try:
            await waiting.future
        finally:
            self._forget(token)

    async def api(self, subject: str, request: Any = None, *, once: bool = False) -> dict[str, Any]:
        """A JetStream API request, asked again while unanswered (unless `once`). The answer may carry `error`.
        Raises BusUnavailableError, PermissionDeniedError."""
        data = b"" if request is None else json.dumps(request, separators=(",", ":")).encode()
        raw, body = await self.question(subject, data, attempts=1 if once else ATTEMPTS)
        status, description, _ = wire_headers.parse(raw)
        if status == NO_RESPONDERS:
            raise BusUnavailableError("no JetStream answers", subject=subject, code=NO_RESPONDERS)
        if status:
            raise BusUnavailableError(description or "unexpected status", subject=subject, code=status)
        answer: dict[str, Any] = json.loads(body)
        return answer

    async def question(self, subject: str, data: bytes, *, attempts: int = ATTEMPTS) -> Answer:
        """A question that may be asked again, within `api_timeout_s` in all: what a stream without a leader does not
        answer is lost, not late. A missing answer is BusUnavailableError."""
        timeout_s = self.config.api_timeout_s
        for attempt in range(attempts):
            try:
                return await self.ask(subject, data, timeout_s=timeout_s / attempts)
            except AnswerTimeoutError:
                continue
            except ConnectionLostError:
                if attempt + 1 == attempts:
                    raise BusUnavailableError("the connection was lost", subject=subject) from None
        raise BusUnavailableError(f"no answer within {timeout_s:g} s", subject=subject)

    async def barrier(self, timeout_s: float | None = None) -> None:
        """A round trip to the own inbox. Raises NoReplyError, BusUnavailableError.

        Where publishing to the own inbox is not permitted the refusal is the round trip: servers handle one
        connection's commands in order.
        """
        subject = f"{self.inbox}.b"
        timeout_s = timeout_s or self.config.api_timeout_s
        await self.ready(subject, 0, timeout_s)
        token, waiting = self._expect(subject, None, timeout_s)
        waiting.subject = f"{self.inbox}.{token}"
        self.wire.pub(waiting.subject, "", b"", None)
        try:
            await waiting.future
        except AnswerTimeoutError:
            raise NoReplyError("no round trip in time", subject=subject, no_responders=False) from None
        except ConnectionLostError:
            raise NoReplyError("the connection was lost", subject=subject, no_responders=False) from None
        except PermissionDeniedError:
            if self._inbox_denied is not None:
                raise
        finally:
            self._forget(token)

    # --- who waits ---

    def _expect(self, subject: str, many: Callable[[Answer], bool] | None, timeout_s: float) -> tuple[str, _Waiting]:
        loop = asyncio.get_running_loop()
        token = f"{next(self._tokens):x}"
        base = subjects.reply_base(subject)
        if base is not None and (answers := subjects.replies(base, self._asker)) not in self._heard:
            self._heard.add(answers)
            self.wire.sub(answers, "", self._answered, self._replies_refused)
        reply = f"{self.inbox}.{token}" if base is None else f"{base}.{self._asker}.{token}"
        waiting = _Waiting(subject, reply, loop.create_future(), many)
        waiting.timer = loop.call_later(timeout_s, self._expire, token, timeout_s)
        self._waiting[token] = waiting
        return token, waiting

    def _forget(self, token: str) -> None:
        waiting = self._waiting.pop(token, None)
        if waiting is None:
            return
        if waiting.timer is not None:
            waiting.timer.cancel()
        if waiting.future.done() and not waiting.future.cancelled():
            waiting.future.exception()  # seen, even where the caller was cancelled meanwhile

    def _expire(self, token: str, timeout_s: float) -> None:
        waiting = self._waiting.get(token)
        if waiting is not None and not waiting.future.done():
            waiting.future.set_exception(AnswerTimeoutError(f"no answer within {timeout_s:g} s"))

    def _answered(self, subject: bytes, reply: bytes, raw: bytes | None, data: bytes) -> None:
        where = subject.decode()
        waiting = self._waiting.get(where.rpartition(".")[2])
        if waiting is None or waiting.future.done() or where != waiting.reply:
            return
        if waiting.many is None or waiting.many((raw, data)):
            waiting.future.set_result((raw, data))

    def _lost(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(ConnectionLostError("the connection was lost"))
        for hook in list(self._lost_hooks):
            hook()

    def _denied(self, subject: str) -> None:
        """A refused publish, by its subject in lower case: every question on it fails (the server names no more)."""
        matched = False
        for waiting in self._waiting.values():
            if subject in (waiting.subject.lower(), waiting.reply.lower()) and not waiting.future.done():
                matched = True
                waiting.future.set_exception(
                    PermissionDeniedError("publishing is not permitted", subject=waiting.subject)
                )
        for exact, hook in list(self._denied_hooks):
            if exact.lower() == subject:
                matched = True
                hook(PermissionDeniedError("publishing is not permitted", subject=exact))
        if not matched:
            _log.warning("bus_publish_denied", subject=subject)

    def _inbox_refused(self, error: PermissionDeniedError) -> None:
        self._inbox_denied = error
        for waiting in self._waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(error)

    def _replies_refused(self, error: PermissionDeniedError) -> None:
        """This user may not hear sandboxes: whoever waits for one is told, and so is the next who asks."""
        self._heard.discard(error.subject or "")
        for waiting in self._waiting.values():
            if waiting.reply.startswith("tether.reply.") and not waiting.future.done():
                waiting.future.set_exception(error)

    async def _watch(self) -> None:
        """A stall without a closed socket (a stopped server, a dead read loop) shows only in a missing round trip."""
        while True:
            await asyncio.sleep(self.config.watchdog_interval_s)
            if not self.connected:
                continue
            epoch, start_s = self.wire.epoch, asyncio.get_running_loop().time()
            if self.wire.reading:
                try:
                    await self.barrier(self.config.watchdog_answer_s)
                    metrics.bus_probe_seconds.observe(asyncio.get_running_loop().time() - start_s)
                    continue
                except BusError as error:
                    late_s = asyncio.get_running_loop().time() - start_s - self.config.watchdog_answer_s
                    if self.wire.epoch != epoch or not self.connected or late_s > _OWN_DELAY_S:
                        continue  # replaced meanwhile, or it was this process that stood still
                    _log.warning("bus_stalled", error=str(error), epoch=epoch)
                    metrics.bus_stalls.inc()
            self.wire.replace_connection()


def _tell(task: asyncio.Task[None]) -> None:
    """The watchdog's end is seen by someone: a bug in it must not be silent."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("bus_watchdog_ended", exc_info=error)
