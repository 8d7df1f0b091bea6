"""Who writes in a conversation, seen from outside: living CLI processes by the marker in their environment.

A watcher looks at /proc again and again for as long as a test lasts. Every process of an execution (the CLI, its tools,
what it forked away) carries the marker, whose value begins with the execution's id. A look that finds two executions
counts as two writers only if both are still there after it, so a hand-over between two reads of /proc is none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tether.processes import ProcessId, identify, is_running
from tether_agent.providers import procfs

MARKER: Final = b"TETHER_PROCESS_NONCE="
PAUSE_S: Final = 0.03  # between two looks


def _execution_of(pid: int, root: bytes) -> str | None:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    if root not in environ:
        return None
    for entry in environ.split(b"\0"):
        if entry.startswith(MARKER):
            return entry.removeprefix(MARKER).decode().rpartition("-")[0]
    return None


def living(root: str = "") -> dict[str, list[ProcessId]]:
    """Execution → its living processes, of the set below `root`: ids are derived from requests, and sets of other tests
    may have the same at the same time."""
    found: dict[str, list[ProcessId]] = {}
    for pid in procfs.pids():
        execution = _execution_of(pid, root.encode())
        identity = None if execution is None else identify(pid)
        if execution is not None and identity is not None:
            found.setdefault(execution, []).append(identity)
    return found


class Writers:
    """Watches the set below `root` from its beginning to its end. `together`: sets of executions that lived at the same
    time."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.together: set[frozenset[str]] = set()
        self.seen: set[str] = set()
        self.looks = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="writers")

    def _watch(self) -> None:
        while not self._over.wait(PAUSE_S):
            found = living(self._root)
            self.looks += 1
            self.seen |= found.keys()
            if len(found) > 1:
                still = {name for name, processes in found.items() if any(is_running(one) for one in processes)}
                self.together.add(frozenset(still))

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(10)

    def overlaps(self, executions: Iterable[str]) -> list[Sequence[str]]:
        """Pairs and more of these executions that were seen alive together: there may be none."""
        wanted = frozenset(executions)
        assert wanted & self.seen, "none of them was seen at all"
        return [sorted(names & wanted) for names in self.together if len(names & wanted) > 1]
