"""Counts living agent processes from outside: what the kernel says, by the marker in each process's environment.

The nonce that a keeper gives its CLI begins with the execution; the log says afterwards of which conversation that was.
Two agents of one conversation in one look are two writers, whatever records and logs say.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Final

LOOK_S: Final = 0.1
STRANGER_LOOKS: Final = 5  # after so many a process is no agent and becomes none
_MARKER: Final = b"TETHER_PROCESS_NONCE="
_AGENT: Final = b"scripted_agent"


class WriterWatch:
    """`run` is a task; `seen`: sets of executions whose agents lived at the same time, and how often that was seen.

    A look costs little, however many processes the machine has: only those that were not there in the look before are
    read. A pid does not come again within one look's time.
    """

    def __init__(self, truth: Path) -> None:
        self._truth = f"TETHER_SCRIPTED_TRUTH={truth}".encode()
        self._agents: dict[int, str] = {}  # pid → execution
        self._strangers: dict[int, int] = {}  # how often each was looked at: it may be before its exec
        self.seen: dict[frozenset[str], int] = defaultdict(int)
        self.doubled: dict[str, int] = defaultdict(int)  # executions with two agents of their own
        self.looks = 0

    async def run(self) -> None:
        while True:
            self.look({int(name) for name in os.listdir("/proc") if name.isdecimal()})  # noqa: PTH208
            await asyncio.sleep(LOOK_S)

    def look(self, pids: Set[int]) -> None:
        """`pids`: of all processes that there are."""
        self.looks += 1
        self._strangers = {pid: count for pid, count in self._strangers.items() if pid in pids}
        self._agents = {pid: execution for pid, execution in self._agents.items() if pid in pids and _lives(pid)}
        for pid in pids:
            looks = self._strangers.get(pid, 0)
            if looks < STRANGER_LOOKS and pid not in self._agents:
                self._strangers[pid] = looks + 1
                execution = self._execution(pid)
                if execution is not None:
                    self._agents[pid] = execution
        living: dict[str, int] = defaultdict(int)
        for execution in self._agents.values():
            living[execution] += 1
        for execution, count in living.items():
            if count > 1:
                self.doubled[execution] += 1
        if len(living) > 1:
            self.seen[frozenset(living)] += 1

    def _execution(self, pid: int) -> str | None:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if not any(word.endswith(_AGENT) for word in words):
                return None
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return None
        if self._truth not in environment or not _lives(pid):
            return None
        nonce = next((entry for entry in environment if entry.startswith(_MARKER)), None)
        return None if nonce is None else nonce[len(_MARKER) :].rpartition(b"-")[0].decode()

    def conflicts(self, conversations: Mapping[str, str]) -> list[str]:
        """One sentence for each pair of executions of one conversation that lived at once."""
        faults = [f"two agents of execution {name} at once, in {count} looks" for name, count in self.doubled.items()]
        pairs: dict[tuple[str, str, str], int] = defaultdict(int)
        for living, count in self.seen.items():
            of: dict[str, list[str]] = defaultdict(list)
            for execution in living:
                if execution in conversations:
                    of[conversations[execution]].append(execution)
            for conversation, executions in of.items():
                for number, first in enumerate(sorted(executions)):
                    for second in sorted(executions)[number + 1 :]:
                        pairs[conversation, first, second] += count
        return faults + [
            f"{conversation}: agents of {first} and {second} lived at once, in {count} looks"
            for (conversation, first, second), count in pairs.items()
        ]


def _lives(pid: int) -> bool:
    """It is there, and no zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text[text.rindex(")") + 2 :][:1] not in ("Z", "X")
