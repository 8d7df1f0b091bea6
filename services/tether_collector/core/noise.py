"""Raw events are bounded: a flood of lines that nothing maps must not drown the log.

The first lines of each stream become `raw` events, the rest is counted; when the process is gone one more event per
stream says how many were left out. Counting is by input, so a replay keeps and drops the same lines.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from tether.events import RAW
from tether_collector.core.inputs import Draft

RAW_EVENTS_MAX: Final = 64  # per stream and execution
STDERR_TAIL_LINES: Final = 10  # kept to explain a failed start
STDERR_LINE_CHARS: Final = 300


@dataclass(slots=True)
class _Count:
    kept: int = 0
    dropped: int = 0
    dropped_bytes: int = 0


@dataclass(slots=True)
class Noise:
    """Counters per stream, and the last lines of stderr."""

    stdout: _Count = field(default_factory=_Count)
    stderr: _Count = field(default_factory=_Count)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=STDERR_TAIL_LINES))

    @classmethod
    def load(cls, saved: dict[str, Any]) -> Noise:
        tail = deque[str](saved["tail"], maxlen=STDERR_TAIL_LINES)
        return cls(_Count(**saved["stdout"]), _Count(**saved["stderr"]), tail)

    def dump(self) -> dict[str, Any]:
        streams = {
            name: {"kept": count.kept, "dropped": count.dropped, "dropped_bytes": count.dropped_bytes}
            for name, count in (("stdout", self.stdout), ("stderr", self.stderr))
        }
        return {**streams, "tail": list(self.tail)}

    def admits(self, body: dict[str, Any]) -> bool:
        """Whether this raw event is one of the first."""
        is_stderr = body["stream"] == "stderr"
        count = self.stderr if is_stderr else self.stdout
        if is_stderr:
            self.tail.append(body["preview"][:STDERR_LINE_CHARS])
        if count.kept < RAW_EVENTS_MAX:
            count.kept += 1
            return True
        count.dropped += 1
        count.dropped_bytes += body["bytes"]
        return False

    def summary(self) -> list[Draft]:
        """What was left out, once, at the end."""
        drafts: list[Draft] = []
        for stream, count in (("stdout", self.stdout), ("stderr", self.stderr)):
            if count.dropped:
                why = f"{count.dropped} more lines of {stream} were left out"
                body = {"stream": stream, "preview": "", "bytes": count.dropped_bytes, "why": why}
                drafts.append(Draft(RAW, body))
                count.dropped = count.dropped_bytes = 0
        return drafts
