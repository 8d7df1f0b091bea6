"""The final snapshots of ended executions: written at each end, kept in memory where the disk does not take them.

    end ─▶ memory ─▶ disk, within WRITE_WAIT_S ─▶ saved
              │ fails or hangs: `durability_gap` journaled, so that whoever asks later learns why there is none
              └─▶ tried again every FINAL_SNAPSHOT_BATCH_S and at shutdown ─▶ saved, the gap is withdrawn

An end is written at once instead of waiting for the next batch: a crash in between would lose it, and there is one per
execution. The batch is for what could not be written. Memory has a quota: the oldest go first, and their gap stays.
Readers are served from memory before the disk. Each file counts from its end's own time, however late it is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from tether.ids import ExecutionTarget
from tether.limits import FINAL_SNAPSHOT_BATCH_S, SNAPSHOT_MEMORY_BYTES_MAX
from tether.sandbox import ExecutionSummary
from tether.snapshot import Snapshot
from tether_collector.core.retention import Ended, to_forget
from tether_collector.disk_thread import DiskThread
from tether_collector.journal import Journal
from tether_collector.recovery_files import FinalFile, parse, read_final, render, write_final

WRITE_WAIT_S: Final = 2.0  # an end is not told as ended for so long; then it is told with its gap
_log = structlog.get_logger("tether.collector")


@dataclass(slots=True, eq=False)
class Unsaved:
    """An ended execution's final snapshot that is in memory alone. `ended_at` in unix milliseconds."""

    summary: ExecutionSummary
    data: bytes
    ended_at: int
    writing: asyncio.Future[None] | None = None
    told: bool = False

    @property
    def target(self) -> ExecutionTarget:
        return self.summary.target


class FinalSnapshots:
    """Of one workspace. Everything here is asked on the loop's thread."""

    def __init__(
        self,
        state_dir: Path,
        journal: Journal,
        *,
        batch_s: float = FINAL_SNAPSHOT_BATCH_S,
        write_wait_s: float = WRITE_WAIT_S,
        memory_bytes_max: int = SNAPSHOT_MEMORY_BYTES_MAX,
    ) -> None:
        self._state_dir = state_dir
        self._journal = journal
        self._batch_s = batch_s
        self._write_wait_s = write_wait_s
        self._memory_bytes_max = memory_bytes_max
        self._unsaved: dict[str, Unsaved] = {}
        self._reading: Counter[str] = Counter()
        self._writer = DiskThread("final-snapshots-write")
        self._reader = DiskThread("final-snapshots-read")
        self._closed = False

    async def keep(self, summary: ExecutionSummary, snapshot: Snapshot, ended_at: int) -> None:
        """Returns once it is on disk, or its gap is journaled and it is kept for the next batch."""
        entry = Unsaved(summary, render(snapshot, ended_at), ended_at)
        self._unsaved[summary.target.execution] = entry
        self._fit()
        try:
            async with asyncio.timeout(self._write_wait_s):
                await asyncio.shield(self._write(entry))
        except OSError as error:  # a timeout is one, too
            if self._unsaved.get(summary.target.execution) is entry:
                self._tell(entry, str(error) or "the disk does not answer")

    async def read(self, execution: str) -> FinalFile | None:
        """None where there is none. Not collected while it is being read."""
        entry = self._unsaved.get(execution)
        if entry is not None:
            return parse(entry.data)
        self._reading[execution] += 1
        try:
            return await self._reader.run(partial(read_final, self._state_dir, execution))
        finally:
            self._reading[execution] -= 1
            if not self._reading[execution]:
                del self._reading[execution]

    async def forget(self, execution: str) -> None:
        """Nothing of it is kept, in memory or by a write that is under way. Its file is the caller's to delete."""
        entry = self._unsaved.pop(execution, None)
        if entry is not None and entry.writing is not None:
            await asyncio.wait([entry.writing])

    @property
    def held(self) -> frozenset[str]:
        """What is being read or written."""
        return frozenset([*self._reading, *(name for name, one in self._unsaved.items() if one.writing is not None)])

    @property
    def unsaved(self) -> list[Unsaved]:
        """Oldest end first."""
        return sorted(self._unsaved.values(), key=lambda one: (one.ended_at, one.target.execution))

    async def run(self) -> None:
        """The task that tries again what could not be written."""
        while True:
            await asyncio.sleep(self._batch_s)
            self._fit()
            await self._write_all()

    async def flush(self, until_s: float) -> list[Unsaved]:
        """Write what is unsaved until this time of the loop's clock; what is not saved by then, its gap journaled."""
        try:
            async with asyncio.timeout_at(until_s):
                await self._write_all()
        except TimeoutError:
            pass
        for entry in self.unsaved:
            self._tell(entry, "it was not written before the shutdown")
        return self.unsaved

    def close(self) -> None:
        """Before the journal: a write that ends later leaves its gap for the next collector to withdraw."""
        self._closed = True
        self._writer.close()
        self._reader.close()

    async def _write_all(self) -> None:
        for entry in self.unsaved:
            with contextlib.suppress(OSError):  # it stays for the next time, and its gap is told
                await asyncio.shield(self._write(entry))

    def _write(self, entry: Unsaved) -> asyncio.Future[None]:
        """The write that is under way, or a new one."""
        if entry.writing is None:
            name = entry.target.execution
            entry.writing = self._writer.run(partial(write_final, self._state_dir, name, entry.data))
            entry.writing.add_done_callback(partial(self._written, entry))
        return entry.writing

    def _written(self, entry: Unsaved, future: asyncio.Future[None]) -> None:
        entry.writing = None
        if future.cancelled() or future.exception() is not None or self._closed:
            return
        name = entry.target.execution
        if self._unsaved.get(name) is entry:
            del self._unsaved[name]
        self._journal.drop_gap(name)
        if entry.told:
            _log.info("final_snapshot_saved_late", execution=name)

    def _tell(self, entry: Unsaved, why: str) -> None:
        if entry.told:
            return
        entry.told = True
        self._journal.add_gap(entry.summary, "durability_gap", entry.ended_at)
        _log.error("final_snapshot_unsaved", execution=entry.target.execution, reason="durability_gap", detail=why)

    def _fit(self) -> None:
        """Memory's quota, and the retention."""
        kept = [Ended(name, one.ended_at, len(one.data)) for name, one in self._unsaved.items()]
        now_ms = time.time_ns() // 1_000_000
        for one in to_forget(kept, now_ms, bytes_max=self._memory_bytes_max, grace_s=0):
            self._tell(self._unsaved.pop(one.execution), "more is unsaved than memory may hold")
