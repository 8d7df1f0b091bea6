"""The memory server's clock: unix nanoseconds that follow the event loop's time and can be moved on by hand.

With `VirtualTimeLoop` waiting moves it; with any loop `advance` does, at once (leases expire, ids are forgotten).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

_START_NS: Final = 1_700_000_000_000_000_000


class VirtualClock:
    """`now_ns` starts at a fixed date and grows with the running loop's time plus what was advanced."""

    def __init__(self, start_ns: int = _START_NS) -> None:
        self._start_ns = start_ns
        self._advanced_ns = 0
        self._loop_zero_s: float | None = None
        self._elapsed_ns = 0
        self._hooks: list[Callable[[], None]] = []

    def now_ns(self) -> int:
        try:
            loop_s = asyncio.get_running_loop().time()
        except RuntimeError:
            return self._start_ns + self._advanced_ns + self._elapsed_ns
        if self._loop_zero_s is None:
            self._loop_zero_s = loop_s
        self._elapsed_ns = max(self._elapsed_ns, int((loop_s - self._loop_zero_s) * 1e9))
        return self._start_ns + self._advanced_ns + self._elapsed_ns

    def advance(self, seconds: float) -> None:
        """Move the clock on; who waits for a time that has come is woken."""
        self._advanced_ns += int(seconds * 1e9)
        for hook in list(self._hooks):
            hook()

    def on_advance(self, hook: Callable[[], None]) -> None:
        self._hooks.append(hook)
