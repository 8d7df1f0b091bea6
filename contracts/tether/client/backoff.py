"""How long to wait before the next attempt: a few quick ones, then seldom, with jitter, never for ever quicker."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Final

from tether.limits import (
    ATTACH_QUICK_ATTEMPTS,
    CONNECTION_RETRY_MAX_S,
    RECONCILE_INTERVAL_MAX_S,
    RECONCILE_INTERVAL_S,
)
from tether.ports import Bus

_QUICK_MIN_S: Final = 0.05
_QUICK_MAX_S: Final = 2.0
_GROWTH: Final = 1.25  # of the seldom ones
_LOOK_S: Final = 0.2  # between looks whether the connection is back


@dataclass(slots=True)
class Backoff:
    """`next_s()` after each failure, `reset()` after a success. `quick` attempts double to 2 s, then `seldom_s` growing
    to `seldom_max_s`: 30 s to 60 s, where an attempt costs others something."""

    quick: int = ATTACH_QUICK_ATTEMPTS
    seldom_s: float = RECONCILE_INTERVAL_S
    seldom_max_s: float = RECONCILE_INTERVAL_MAX_S
    rng: random.Random = field(default_factory=random.Random)
    failures: int = 0

    def next_s(self, asked_s: float | None = None) -> float:
        """Seconds to wait. `asked_s`: what the peer asked for at least."""
        self.failures += 1
        base: float
        if self.failures <= self.quick:
            base = min(_QUICK_MIN_S * 2 ** (self.failures - 1), _QUICK_MAX_S)
        else:
            grown = _GROWTH ** min(self.failures - self.quick - 1, 64)
            base = min(self.seldom_s * grown, self.seldom_max_s)
        wait_s = base * (0.5 + self.rng.random() / 2)
        return wait_s if asked_s is None else max(wait_s, min(asked_s, RECONCILE_INTERVAL_MAX_S))

    def reset(self) -> None:
        self.failures = 0


def of_connection() -> Backoff:
    """Of a reader whose server cannot be reached: someone waits before it, and an attempt costs one connection."""
    return Backoff(seldom_s=CONNECTION_RETRY_MAX_S, seldom_max_s=CONNECTION_RETRY_MAX_S)


async def pause(bus: Bus, wait_s: float) -> None:
    """Wait so many seconds; a connection of the bus that is made anew meanwhile ends it."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + wait_s
    epoch = bus.epoch
    while (left_s := until_s - loop.time()) > 0 and bus.epoch == epoch:  # noqa: ASYNC110 - the bus has no event
        await asyncio.sleep(min(_LOOK_S, left_s))
