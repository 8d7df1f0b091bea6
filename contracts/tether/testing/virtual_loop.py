"""An event loop whose time jumps to the next timer, and in which waiting for nothing is an instant failure.

For in-memory tests: sleeps and timeouts cost nothing, and a test in which every task waits and no timer is pending
fails at once with `DeadlockError` naming each task and the line it waits at, instead of hanging until a timeout.
Work in threads (`asyncio.to_thread`, executors) is waited for in real time; sockets are polled, never waited for.

Use it as a loop factory: `asyncio.Runner(loop_factory=VirtualTimeLoop)`, or with pytest-asyncio through its hook
`pytest_asyncio_loop_factories`.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_THREAD_POLL_S: Final = 0.05  # while a thread works; its result wakes the loop by itself


class DeadlockError(RuntimeError):
    """Every task waits, no timer is pending, no thread works: nothing can ever happen again."""


class _VirtualSelector(selectors.DefaultSelector):
    """Polls real events; where there are none it moves the loop's time instead of waiting."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if self.loop.threads:
            return super().select(_THREAD_POLL_S)
        if timeout is None:
            # Only the loop's own wake-up socket: nobody is left who could write to it.
            if len(self.get_map()) <= 1:
                raise DeadlockError(_describe(self.loop))
            return super().select(_THREAD_POLL_S)
        self.loop.advance(timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module. `time()` is virtual seconds since the loop was made."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        self.threads = 0
        selector = _VirtualSelector()
        selector.loop = self
        super().__init__(selector)
        self._clock_resolution = math.ulp(self._virtual_s)

    def time(self) -> float:
        return self._virtual_s

    def advance(self, seconds: float) -> None:
        """To the next timer exactly: a rounded sum that falls short of it would let who waits for that time wait again,
        for ever, as no time passes by itself here."""
        scheduled = self._scheduled  # type: ignore[attr-defined]
        reached = self._virtual_s + seconds
        self._virtual_s = max(reached, scheduled[0].when()) if scheduled else reached
        self._clock_resolution = math.ulp(self._virtual_s)  # a timer is due when its time has come, not before

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        self.threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        self.threads += 1  # it waits for a thread that ends the executor
        try:
            await super().shutdown_default_executor()
        finally:
            self.threads -= 1

    def _thread_done(self, future: asyncio.Future[Any]) -> None:
        self.threads -= 1


def _describe(loop: asyncio.AbstractEventLoop) -> str:
    lines = ["every task waits and no timer is pending:"]
    for task in asyncio.all_tasks(loop):
        frames = task.get_stack(limit=1)
        where = f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else "nowhere"
        lines.append(f"  {task.get_name()} at {where}")
    return "\n".join(lines)
