"""How fast a sandbox may write to the log: a quota of events and bytes per second, over all its executions.

What is too fast waits, before it is sent: the writer then takes no more from the spool, the spool fills up to its own
quota, the keeper stops reading, and the CLI's next write blocks. Nothing is lost and nothing is shed; a drain is not
paced, so that it does not miss its grace for output that was let in before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tether.limits import FRAME_EVENTS_MAX
from tether_collector import metrics

BURST_S: Final = 1.0  # so much of the allowance may be used at once
AHEAD_S: Final = 0.5  # of the allowance, read from the spool before it may be sent
AHEAD_EVENTS_MIN: Final = 64
SLACK_S: Final = 5.0


class Pace:
    """One sandbox's. 0: no limit. `lifted` says when nothing is paced."""

    def __init__(self, events_per_s: int, event_bytes_per_s: int) -> None:
        self._events_per_s = events_per_s
        self._bytes_per_s = event_bytes_per_s
        self.lifted: Callable[[], bool] = lambda: False
        self._free_at_s = 0.0

    @property
    def limited(self) -> bool:
        return bool(self._events_per_s or self._bytes_per_s)

    @property
    def ahead_events(self) -> int | None:
        """How many events may wait in memory; None: as many as without a limit."""
        return max(AHEAD_EVENTS_MIN, round(AHEAD_S * self._events_per_s)) if self._events_per_s else None

    @property
    def silence_s(self) -> float:
        """A writer that is only paced stores something at least so often."""
        return SLACK_S + (2 * FRAME_EVENTS_MAX / self._events_per_s if self._events_per_s else 0.0)

    async def wait(self, events: int, size_bytes: int) -> None:
        """Until so much may be sent."""
        if not self.limited or self.lifted():
            return
        now_s = asyncio.get_running_loop().time()
        cost_s = events / self._events_per_s if self._events_per_s else 0.0
        if self._bytes_per_s:
            cost_s = max(cost_s, size_bytes / self._bytes_per_s)
        self._free_at_s = max(self._free_at_s, now_s - BURST_S) + cost_s
        wait_s = self._free_at_s - now_s
        if wait_s > 0:
            metrics.paced_seconds.inc(wait_s)
            await asyncio.sleep(wait_s)
