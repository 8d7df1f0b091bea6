"""What a collector keeps of ended executions, and what goes first. Pure.

Kept for the retention's time, counted from the end's own time; within it at most so many, and so many bytes. Over a
limit the oldest go first, but none within its grace: a reader may still be on its way to it. What is being read or
written is held, and goes another time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tether.limits import (
    RECOVERY_ENTRIES_MAX,
    SNAPSHOT_DISK_BYTES_MAX,
    TERMINAL_DISK_GRACE_S,
    TERMINAL_RETENTION_S,
)


@dataclass(frozen=True, slots=True)
class Ended:
    """An ended execution: `bytes` of its snapshot, spool and folder; `ended_at` in unix milliseconds; `held`: it is
    being read or written."""

    execution: str
    ended_at: int
    bytes: int
    held: bool = False


def expired(ended_at: int, now_ms: int) -> bool:
    """Whether an end is so long ago that nothing of it is kept, or told, any more."""
    return ended_at < now_ms - int(TERMINAL_RETENTION_S * 1000)


def to_forget(
    ended: Sequence[Ended],
    now_ms: int,
    *,
    entries_max: int = RECOVERY_ENTRIES_MAX,
    bytes_max: int = SNAPSHOT_DISK_BYTES_MAX,
    grace_s: float = TERMINAL_DISK_GRACE_S,
) -> list[Ended]:
    """Those that go now, oldest first. What goes without being `expired` is a gap, and has to be told."""
    oldest_first = sorted(ended, key=lambda one: (one.ended_at, one.execution))
    count, size = len(oldest_first), sum(one.bytes for one in oldest_first)
    graced_after = now_ms - int(grace_s * 1000)
    gone: list[Ended] = []
    for one in oldest_first:
        over = count > entries_max or size > bytes_max
        if one.held or not (expired(one.ended_at, now_ms) or (over and one.ended_at < graced_after)):
            continue
        gone.append(one)
        count -= 1
        size -= one.bytes
    return gone
