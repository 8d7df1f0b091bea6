"""The executions of one collector: those that live, as shells with a task each; the ended ones, from the journal.

The only place that adds and removes them. A conversation has at most one living execution here, and a start that was
accepted is found again by its control id or its execution's id.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import structlog

from tether.ids import ExecutionTarget
from tether.limits import DISCOVERY_ENTRIES_MAX
from tether.sandbox import ExecutionSummary
from tether.snapshot import Snapshot
from tether_collector import metrics
from tether_collector.core.retention import Ended, to_forget
from tether_collector.execution_shell import ExecutionShell, Surroundings, now_ms
from tether_collector.journal import Start
from tether_collector.recovery_files import delete_final, final_bytes, read_final

HOUSEKEEPING_S: Final = 60.0


class Executions:
    """Runs its shells in `group`: one that fails unexpectedly ends the collector, which starts over from disk."""

    def __init__(self, around: Surroundings, group: asyncio.TaskGroup) -> None:
        self.around = around
        self._group = group
        self._living: dict[str, ExecutionShell] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended: list[ExecutionSummary] | None = None
        self._restoring: set[str] = set()

    def recover(self) -> int:
        """Go on with everything whose end is not in the log; how many these are."""
        for start in self.around.journal.unended():
            self.begin(start)
            metrics.recoveries.inc()
        return len(self._living)

    def begin(self, start: Start) -> ExecutionShell:
        """Run a journaled start."""
        shell = ExecutionShell(self.around, start)
        self._living[start.execution] = shell
        task = self._group.create_task(self._run(shell), name=f"execution:{start.execution}")
        self._tasks[start.execution] = task
        self.around.changed()
        return shell

    async def _run(self, shell: ExecutionShell) -> None:
        await shell.run()
        if shell.ended:
            self._ended = None
            self._living.pop(shell.start.execution, None)
            self._tasks.pop(shell.start.execution, None)
            self.around.changed()
            if not self._living:
                gc.collect()  # nobody waits now, and the system gets back what a flood held

    async def put_back(self, start: Start) -> None:
        """Tell an ended execution again, as far as the log has lost it."""
        self._restoring.add(start.execution)
        try:
            await ExecutionShell(self.around, start, restoring=True).run()
            metrics.recoveries.inc()
        finally:
            self._restoring.discard(start.execution)
            self._ended = None

    async def over(self) -> None:
        """Return once nothing lives and nothing is put back."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))
            await asyncio.sleep(0)

    def living(self) -> Iterator[ExecutionShell]:
        return iter(list(self._living.values()))

    def get(self, execution: str) -> ExecutionShell | None:
        return self._living.get(execution)

    def of_conversation(self, conversation: str) -> ExecutionShell | None:
        """The living execution of a conversation, the latest where an earlier one is still being told."""
        for shell in reversed(self._living.values()):
            if shell.start.conversation == conversation:
                return shell
        return None

    def ended(self) -> list[ExecutionSummary]:
        """Within the retention, the latest first."""
        if self._ended is None:
            self._ended = self.around.journal.ended(DISCOVERY_ENTRIES_MAX)
        return self._ended

    def summaries(self) -> list[ExecutionSummary]:
        return [*(shell.summary() for shell in self._living.values()), *self.ended()]

    def final(self, target: ExecutionTarget) -> Snapshot | None:
        """The final snapshot of exactly this target."""
        snapshot = read_final(self.around.settings.state_dir, target.execution)
        return None if snapshot is None or snapshot.target.differs(target) is not None else snapshot

    async def flush(self) -> None:
        """Stop reading spools and wait until what was read is stored."""
        await asyncio.gather(*(shell.settle() for shell in self.living()))

    async def leave(self) -> None:
        """Let go of everything; keepers and CLIs run on."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def housekeeping(self) -> None:
        """The task that deletes what is beyond its retention or over a quota."""
        state_dir = self.around.settings.state_dir
        while True:
            known = {name: at for name, at in self.around.journal.ended_at().items() if name not in self._restoring}
            sizes = await asyncio.to_thread(_sizes, state_dir, list(known))
            metrics.spool_bytes.set(sum(sizes.values()) + await asyncio.to_thread(self._living_bytes))
            gone = to_forget([Ended(name, at, sizes[name]) for name, at in known.items()], now_ms())
            if gone:
                self.around.journal.forget([one.execution for one in gone])
                self._ended = None
                await asyncio.to_thread(_delete, state_dir, gone)
                metrics.evictions.inc(len(gone))
                structlog.get_logger("tether.collector").info("executions_forgotten", count=len(gone))
            await asyncio.sleep(HOUSEKEEPING_S)

    def _living_bytes(self) -> int:
        folder = self.around.settings.state_dir / "executions"
        return sum(_bytes_below(folder / name) for name in list(self._living))


def _sizes(state_dir: Path, executions: Sequence[str]) -> dict[str, int]:
    """Bytes on disk of each."""
    return {name: final_bytes(state_dir, name) + _bytes_below(state_dir / "executions" / name) for name in executions}


def _bytes_below(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size += path.lstat().st_size
    return size


def _delete(state_dir: Path, gone: Sequence[Ended]) -> None:
    for one in gone:
        delete_final(state_dir, one.execution)
        shutil.rmtree(state_dir / "executions" / one.execution, ignore_errors=True)
