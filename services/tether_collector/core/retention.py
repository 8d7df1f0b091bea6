"""What a collector keeps of ended executions, and what goes first. Pure.

Kept for the retention's time, counted from the end's own time; within it at most so many, and so many bytes on disk.
Over a limit the oldest go first, but none within its grace: a reader may still be on its way to it.
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
    """An ended execution on disk: `bytes` of its snapshot, spool and folder; `ended_at` in unix milliseconds."""

    execution: str
    ended_at: int
    bytes: int


def to_forget(
    ended: Sequence[Ended],
    now_ms: int,
    *,
    entries_max: int = RECOVERY_ENTRIES_MAX,
    bytes_max: int = SNAPSHOT_DISK_BYTES_MAX,
) -> list[Ended]:
    """Those whose files go now, oldest first."""
    oldest_first = sorted(ended, key=lambda one: (one.ended_at, one.execution))
    count, size = len(oldest_first), sum(one.bytes for one in oldest_first)
    expired_before = now_ms - int(TERMINAL_RETENTION_S * 1000)
    graced_after = now_ms - int(TERMINAL_DISK_GRACE_S * 1000)
    gone: list[Ended] = []
    for one in oldest_first:
        over = count > entries_max or size > bytes_max
        if one.ended_at >= expired_before and not (over and one.ended_at < graced_after):
            continue
        gone.append(one)
        count -= 1
        size -= one.bytes
    return gone
