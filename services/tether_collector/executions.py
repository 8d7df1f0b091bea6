"""The executions of one collector: those that live, as shells with a task each; the ended ones, from the journal.

The only place that adds and removes them. A conversation has at most one living execution here, and a start that was
accepted is found again by its control id or its execution's id.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from tether.deletion import Forgotten
from tether.events import GapReason
from tether.ids import ExecutionTarget
from tether.limits import RECOVERY_ENTRIES_MAX, TERMINAL_RETENTION_S
from tether.sandbox import ExecutionSummary
from tether.snapshot import Snapshot
from tether.walking import bytes_below
from tether_collector import metrics
from tether_collector.core.discovery import candidates
from tether_collector.core.retention import Ended, expired, to_forget
from tether_collector.disk_thread import DiskThread
from tether_collector.execution_shell import ExecutionShell
from tether_collector.forgetting import delete_files
from tether_collector.journal import Start
from tether_collector.recovery_files import delete_final, delete_leftovers, final_bytes, own_files
from tether_collector.surroundings import Surroundings, now_ms

HOUSEKEEPING_S: Final = 60.0
_log = structlog.get_logger("tether.collector")


class Executions:
    """Runs its shells in `group`: one that fails unexpectedly ends the collector, which starts over from disk."""

    def __init__(self, around: Surroundings, group: asyncio.TaskGroup) -> None:
        self.around = around
        self.draining: str | None = None  # the drain because of which nothing is started
        self._group = group
        self._living: dict[str, ExecutionShell] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended: Sequence[ExecutionSummary] | None = None
        self._ended_version = 0
        self._restoring: set[str] = set()
        self._going: set[str] = set()
        self._disk = DiskThread("housekeeping")

    def recover(self) -> int:
        """Go on with everything whose end is not in the log; how many these are."""
        unended = self.around.journal.unended()
        self.around.material.clean({start.execution for start in unended})
        for start in unended:
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
        """Tell an ended execution again, as far as the log has lost it and its spool is there."""
        if start.execution in self._going:
            return
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

    def ended(self) -> Sequence[ExecutionSummary]:
        """Within the retention, the latest first. With those whose final snapshot is not to be had: they say why."""
        version = self.around.journal.gaps_version
        if self._ended is None or self._ended_version != version:
            gaps = {one.target.execution: one for one, _ in self.around.journal.gaps()}
            kept = self.around.journal.ended(RECOVERY_ENTRIES_MAX)
            listed = [gaps.pop(one.target.execution, one) for one in kept]
            self._ended, self._ended_version = [*listed, *gaps.values()], version
        return self._ended

    def summaries(self) -> list[ExecutionSummary]:
        """What discovery may list, in no order."""
        ended = {one.target.execution: one for one in self.ended()}
        found = []
        for name, shell in self._living.items():
            one, known = shell.summary(), ended.pop(name, None)  # its gap may be known before its end is journaled
            found.append(one if known is None else one.model_copy(update={"gap": known.gap}))
        return candidates([*found, *ended.values()])

    def known_ended(self, execution: str) -> ExecutionSummary | None:
        """Of an execution that has ended within the retention, listed or not."""
        start = self.around.journal.start(execution)
        if start is not None:
            return start.summary
        return next((one for one in self.ended() if one.target.execution == execution), None)

    async def final(self, target: ExecutionTarget) -> Snapshot | GapReason | None:
        """The final snapshot of exactly this target, or why there is none any more; None where it is not known, and
        beyond the retention, whether its file is still there or not."""
        found = await self.around.finals.read(target.execution)
        if found is not None:
            other = found.snapshot.target.differs(target) is not None or expired(found.ended_at, now_ms())
            return None if other else found.snapshot
        gap = self.around.journal.gap(target.execution)
        if gap is None or gap[0].target.differs(target) is not None or expired(gap[1], now_ms()):
            return None
        return gap[0].gap

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
        while True:
            await self.clean()
            await asyncio.sleep(HOUSEKEEPING_S)

    async def clean(self) -> None:
        """Once. A gap is journaled before what it tells of is deleted, and the execution's row goes last: a crash in
        between leaves something to be deleted again, never something that nobody knows of."""
        state_dir, journal = self.around.settings.state_dir, self.around.journal
        known = journal.ended_at()
        sizes = await self._disk.run(partial(_sizes, state_dir, list(known)))
        metrics.spool_bytes.set(
            sum(sizes.values()) + await self._disk.run(partial(_living_bytes, state_dir, list(self._living)))
        )
        ours = frozenset([*known, *self._living, *journal.ended_at()])
        orphans = await self._disk.run(partial(own_files, state_dir, ours))
        held = self._restoring | self.around.finals.held
        found = [Ended(name, at, sizes[name], name in held) for name, at in known.items()]
        found += [Ended(one.execution, one.ended_at, one.bytes, one.execution in held) for one in orphans]
        gone = to_forget(found, now_ms())
        self._going = {one.execution for one in gone}
        try:
            await self._forget(gone)
        finally:
            self._going = set()
        withdrawn = await self._disk.run(partial(_saved, state_dir, journal.gaps()))
        for name in withdrawn:
            journal.drop_gap(name)
        trimmed = journal.trim_gaps(now_ms() - int(TERMINAL_RETENTION_S * 1000), RECOVERY_ENTRIES_MAX)
        await self._disk.run(partial(delete_leftovers, state_dir, time.time()))
        if gone or withdrawn or trimmed:
            self._ended = None
            self.around.changed()

    async def forget_conversation(self, conversation: str, sessions: Sequence[str]) -> Forgotten:
        """Delete everything that this volume has of the conversation (see `forgetting`). Raises OSError,
        sqlite3.Error."""
        journal = self.around.journal
        known = journal.of_conversation(conversation)
        told = [name for name in known.executions if name in self._living or name in self._restoring]
        if known.unended or told:
            waits = (*known.unended, *told)[0]
            return Forgotten(clean=False, pending_on=f"execution {waits} is not told to its end")
        self._going = {*known.executions}
        try:
            for name in known.executions:
                await self.around.finals.forget(name)
            names = tuple(dict.fromkeys((*sessions, *known.sessions)))
            doomed = partial(delete_files, self.around.settings.workspace_dir, known.executions, names)
            files = await self._disk.run(doomed)
            self.around.step("conversation_files_deleted")
            journal.forget_conversation(conversation)
        finally:
            self._going = set()
        self.around.blobs.forget()
        self._ended = None
        self.around.changed()
        _log.info("conversation_forgotten", conversation=conversation, executions=len(known.executions), files=files)
        return Forgotten(clean=True, executions=len(known.executions), files=files)

    async def _forget(self, gone: Sequence[Ended]) -> None:
        journal = self.around.journal
        early = 0
        for one in gone:
            start = None if expired(one.ended_at, now_ms()) else journal.start(one.execution)
            if start is not None and start.summary is not None:
                journal.add_gap(start.summary, "retention_gap", one.ended_at)
                _log.warning("final_snapshot_evicted", execution=one.execution, reason="retention_gap")
                early += 1
        if gone:
            self.around.step("gaps_journaled")
            failed = await self._disk.run(partial(_delete, self.around.settings.state_dir, gone))
            self.around.step("finals_deleted")
            for name, error in failed.items():  # tried again with the next round
                _log.warning("execution_not_deleted", execution=name, error=str(error))
            deleted = [one.execution for one in gone if one.execution not in failed]
            journal.forget(deleted)
            metrics.evictions.inc(len(deleted))
            _log.info("executions_forgotten", count=len(deleted), early=early)


def _living_bytes(state_dir: Path, executions: Sequence[str]) -> int:
    return sum(bytes_below(state_dir / "executions" / name) for name in executions)


def _sizes(state_dir: Path, executions: Sequence[str]) -> dict[str, int]:
    """Bytes on disk of each."""
    return {name: final_bytes(state_dir, name) + bytes_below(state_dir / "executions" / name) for name in executions}


def _delete(state_dir: Path, gone: Sequence[Ended]) -> dict[str, OSError]:
    """The files of each; of which it did not work, and why."""
    failed = {}
    for one in gone:
        try:
            delete_final(state_dir, one.execution)
        except OSError as error:
            failed[one.execution] = error
        else:
            shutil.rmtree(state_dir / "executions" / one.execution, ignore_errors=True)
    return failed


def _saved(state_dir: Path, gaps: Sequence[tuple[ExecutionSummary, int]]) -> list[str]:
    """Gaps of durability whose file is there: it was written after its collector had gone."""
    names = [one.target.execution for one, _ in gaps if one.gap == "durability_gap"]
    return [name for name in names if final_bytes(state_dir, name)]
