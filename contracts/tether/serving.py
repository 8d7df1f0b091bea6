"""Answering requests with bounded concurrency: at most `concurrency_max` handlers, a bounded queue before them.

What does not fit is not answered (the asker reads that as `unknown`) and counted. A handler that raises is logged with
its traceback and answers nothing: a core request carries only questions whose lost answer is harmless.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from tether.ports import Handler, Message

_log = structlog.get_logger("tether.bus")
_WAITING_MAX: Final = 1024  # requests that wait for a handler
_FINISH_S: Final = 2.0  # what running handlers get when serving ends
_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(slots=True)
class Endpoint:
    """One served subject, and its counters (processing time in nanoseconds)."""

    subject: str
    queue: str
    requests: int = 0
    errors: int = 0
    last_error: str = ""
    processing_ns: int = 0
    name: str = field(init=False)

    def __post_init__(self) -> None:
        tokens = [token for token in self.subject.split(".") if token not in ("*", ">")]
        self.name = _NAME.sub("-", tokens[-1] if tokens else "all")

    def failed(self, error: str) -> None:
        self.errors += 1
        self.last_error = error

    def info(self) -> dict[str, Any]:
        return {"name": self.name, "subject": self.subject, "queue_group": self.queue, "metadata": {}}

    def stats(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "subject": self.subject,
            "queue_group": self.queue,
            "num_requests": self.requests,
            "num_errors": self.errors,
            "last_error": self.last_error,
            "processing_time": self.processing_ns,
            "average_processing_time": self.processing_ns // self.requests if self.requests else 0,
        }


class HandlerPool:
    """Runs one endpoint's handler. `respond(reply subject, answer)` sends an answer, or drops it when it cannot."""

    def __init__(
        self,
        handler: Handler,
        endpoint: Endpoint,
        concurrency_max: int,
        answer_bytes_max: Callable[[], int],
        respond: Callable[[str, bytes], None],
    ) -> None:
        self._handler = handler
        self._endpoint = endpoint
        self._concurrency_max = concurrency_max
        self._answer_bytes_max = answer_bytes_max
        self._respond = respond
        self._waiting: deque[Message] = deque()
        self._running: set[asyncio.Task[None]] = set()

    def put(self, message: Message) -> None:
        if len(self._waiting) >= _WAITING_MAX:
            self._endpoint.failed("too many requests wait")
            return
        self._waiting.append(message)
        self._start()

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._concurrency_max:
            task = asyncio.get_running_loop().create_task(
                self._handle(self._waiting.popleft()), name=f"serve-{self._endpoint.subject}"
            )
            self._running.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._start()

    async def _handle(self, message: Message) -> None:
        endpoint = self._endpoint
        endpoint.requests += 1
        start_ns = time.perf_counter_ns()
        try:
            answer = await self._handler(message)
        except Exception as error:  # noqa: BLE001 - the boundary: one bad request must not end the service
            endpoint.failed(f"{type(error).__name__}: {error}")
            _log.exception("bus_handler_failed", subject=message.subject)
            return
        finally:
            endpoint.processing_ns += time.perf_counter_ns() - start_ns
        if answer is None or not message.reply:
            return
        if len(answer) > self._answer_bytes_max():
            endpoint.failed(f"an answer of {len(answer)} bytes is too large")
            _log.error("bus_answer_too_large", subject=message.subject, size_bytes=len(answer))
            return
        self._respond(message.reply, answer)

    async def finish(self) -> None:
        """Let running handlers end, briefly; then cancel them."""
        self._waiting.clear()
        if not self._running:
            return
        _, late = await asyncio.wait(set(self._running), timeout=_FINISH_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
