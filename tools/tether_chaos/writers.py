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
STRANGER_LOOKS: Final = 10  # after so many a process is no agent and becomes none
_MARKER: Final = b"TETHER_PROCESS_NONCE="
_AGENT: Final = b"scripted_agent"


class WriterWatch:
    """`run` is a task; `seen`: sets of executions whose agents lived at the same time, and how often that was seen."""

    def __init__(self, truth: Path) -> None:
        self._truth = f"TETHER_SCRIPTED_TRUTH={truth}".encode()
        self._known: dict[tuple[int, int], str] = {}
        self._strangers: dict[tuple[int, int], int] = {}  # how often each was looked at: it may be before its exec
        self.seen: dict[frozenset[str], int] = defaultdict(int)
        self.doubled: dict[str, int] = defaultdict(int)  # executions with two agents of their own
        self.looks = 0

    async def run(self) -> None:
        while True:
            self.look(await asyncio.to_thread(_processes))
            await asyncio.sleep(LOOK_S)

    def look(self, processes: Set[tuple[int, int]]) -> None:
        """`processes`: pid and start time of all that live."""
        self.looks += 1
        self._strangers = {key: count for key, count in self._strangers.items() if key in processes}
        living: dict[str, int] = defaultdict(int)
        for key in processes:
            execution = self._known.get(key) or self._new(key)
            if execution is not None:
                living[execution] += 1
        for execution, count in living.items():
            if count > 1:
                self.doubled[execution] += 1
        if len(living) > 1:
            self.seen[frozenset(living)] += 1

    def _new(self, key: tuple[int, int]) -> str | None:
        looks = self._strangers.get(key, 0)
        if looks >= STRANGER_LOOKS:
            return None
        self._strangers[key] = looks + 1
        execution = self._execution(key[0])
        if execution is not None:
            self._known[key] = execution
        return execution

    def _execution(self, pid: int) -> str | None:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return None
        if self._truth not in environment or not any(word.endswith(_AGENT) for word in words):
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


def _processes() -> set[tuple[int, int]]:
    """Pid and start time of every process that is no zombie."""
    found = set()
    for name in os.listdir("/proc"):  # noqa: PTH208 - hundreds of entries, ten times a second
        if not name.isdecimal():
            continue
        try:
            text = Path(f"/proc/{name}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        fields = text[text.rindex(")") + 2 :].split()
        if fields[0] not in ("Z", "X"):
            found.add((int(name), int(fields[19])))
    return found
