"""Final snapshots where the disk does not take them, or takes its time."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from support_shell import eventually
from tether.fold import ExecutionState
from tether.ids import ExecutionTarget
from tether.sandbox import ExecutionSummary
from tether.snapshot import Snapshot, Watermark, take
from tether_collector.finals import FinalSnapshots
from tether_collector.journal import Journal
from tether_collector.recovery_files import FOLDER, delete_leftovers, own_files, read_final, render

NOW_MS = time.time_ns() // 1_000_000


def an_end(number: int) -> tuple[ExecutionSummary, Snapshot]:
    target = ExecutionTarget(
        tenant="t",
        workspace="w",
        conversation="c",
        response="r",
        response_generation=1,
        execution=f"exe_{number}",
        execution_generation=1,
        sandbox="s",
        native_session="n",
    )
    state = ExecutionState(applied=4, outcome="completed")
    snapshot = take(target, state, Watermark(ordinal=4, sequence=9, tag=1), captured_at=NOW_MS)
    return ExecutionSummary(target=target, state="ended", last_ordinal=4), snapshot


class Volume:
    """A state folder whose final snapshots cannot be written while it is `broken`."""

    def __init__(self, root: Path) -> None:
        self.state_dir = root
        self.folder = root / FOLDER
        self.folder.mkdir()
        self.journal = Journal(root / "journal.sqlite3")

    def break_it(self) -> None:
        self.folder.rename(self.state_dir / "aside")
        self.folder.write_text("in the way")

    def mend(self) -> None:
        self.folder.unlink()
        (self.state_dir / "aside").rename(self.folder)

    def hang(self, number: int) -> Path:
        """The next write of this snapshot does not return until somebody reads."""
        path = self.folder / f".exe_{number}.json.{os.getpid()}.tmp"
        os.mkfifo(path)
        return path

    def gaps(self) -> dict[str, str | None]:
        return {one.target.execution: one.gap for one, _ in self.journal.gaps()}


@asynccontextmanager
async def volume(root: Path) -> AsyncIterator[Volume]:
    found = Volume(root)
    try:
        yield found
    finally:
        found.journal.close()


def gone(unsaved: FinalSnapshots) -> Callable[[], Awaitable[bool]]:
    async def empty() -> bool:
        return not unsaved.unsaved

    return empty


async def test_an_end_is_on_disk_once_it_is_kept(tmp_path: Path) -> None:
    async with volume(tmp_path) as disk:
        finals = FinalSnapshots(tmp_path, disk.journal)
        await finals.keep(*an_end(1), NOW_MS)
        found = read_final(tmp_path, "exe_1")
        assert found is not None and (found.snapshot, found.ended_at) == (an_end(1)[1], NOW_MS)
        assert await finals.read("exe_1") == found and not finals.unsaved and not disk.gaps()
        finals.close()


async def test_what_the_disk_refuses_is_a_gap_and_given_from_memory_until_a_later_batch_saves_it(
    tmp_path: Path,
) -> None:
    async with volume(tmp_path) as disk:
        finals = FinalSnapshots(tmp_path, disk.journal, batch_s=0.02)
        disk.break_it()
        await finals.keep(*an_end(1), NOW_MS - 7)
        assert disk.gaps() == {"exe_1": "durability_gap"}
        found = await finals.read("exe_1")
        assert found is not None and found.snapshot == an_end(1)[1]
        batches = asyncio.create_task(finals.run(), name="batches")
        disk.mend()
        await eventually(gone(finals), "the next batch")
        batches.cancel()
        assert disk.gaps() == {}
        [file] = own_files(tmp_path, frozenset())
        assert file.ended_at == NOW_MS - 7, "written later, it still counts from its end"
        finals.close()


async def test_an_end_that_is_told_again_after_a_restart_takes_its_gap_back(tmp_path: Path) -> None:
    async with volume(tmp_path) as disk:
        before = FinalSnapshots(tmp_path, disk.journal)
        disk.break_it()
        await before.keep(*an_end(1), NOW_MS)
        before.close()
        disk.mend()
        after = FinalSnapshots(tmp_path, disk.journal)
        assert disk.gaps() == {"exe_1": "durability_gap"} and await after.read("exe_1") is None
        await after.keep(*an_end(1), NOW_MS)
        assert disk.gaps() == {} and await after.read("exe_1") is not None
        after.close()


async def test_a_shutdown_saves_what_the_disk_takes_by_then(tmp_path: Path) -> None:
    async with volume(tmp_path) as disk:
        finals = FinalSnapshots(tmp_path, disk.journal)
        disk.break_it()
        for number in (1, 2):
            await finals.keep(*an_end(number), NOW_MS)
        disk.mend()
        assert await finals.flush(asyncio.get_running_loop().time() + 5) == []
        assert disk.gaps() == {} and {one.execution for one in own_files(tmp_path, frozenset())} == {"exe_1", "exe_2"}
        finals.close()


async def test_a_disk_that_hangs_costs_no_more_than_the_given_time_and_each_loss_is_told(tmp_path: Path) -> None:
    async with volume(tmp_path) as disk:
        finals = FinalSnapshots(tmp_path, disk.journal, write_wait_s=0.05)
        stuck = disk.hang(1)
        await finals.keep(*an_end(1), NOW_MS)
        assert finals.held == {"exe_1"}, "it is being written"
        await finals.keep(*an_end(2), NOW_MS)
        began_s = asyncio.get_running_loop().time()
        lost = await finals.flush(began_s + 0.2)
        assert asyncio.get_running_loop().time() - began_s < 1
        assert [one.target.execution for one in lost] == ["exe_1", "exe_2"]
        assert disk.gaps() == {"exe_1": "durability_gap", "exe_2": "durability_gap"}
        reader = os.open(stuck, os.O_RDONLY | os.O_NONBLOCK)  # the thread goes on, and ends
        await eventually(gone_from(finals, "exe_2"), "the write behind it")
        os.close(reader)
        assert disk.gaps() == {"exe_1": "durability_gap"}, "a pipe is no file"
        finals.close()


def gone_from(finals: FinalSnapshots, execution: str) -> Callable[[], Awaitable[bool]]:
    async def absent() -> bool:
        return all(one.target.execution != execution for one in finals.unsaved)

    return absent


async def test_memory_has_a_quota_the_oldest_go_first_and_their_gap_stays(tmp_path: Path) -> None:
    async with volume(tmp_path) as disk:
        size = len(render(an_end(1)[1], NOW_MS))
        finals = FinalSnapshots(tmp_path, disk.journal, memory_bytes_max=2 * size)
        disk.break_it()
        for number in (1, 2, 3):
            await finals.keep(*an_end(number), NOW_MS + number)
        assert [one.target.execution for one in finals.unsaved] == ["exe_2", "exe_3"]
        assert await finals.read("exe_1") is None
        disk.mend()
        assert await finals.flush(asyncio.get_running_loop().time() + 5) == []
        assert disk.gaps() == {"exe_1": "durability_gap"}
        finals.close()


async def test_what_is_being_read_is_held_until_it_is_read(tmp_path: Path) -> None:
    async with volume(tmp_path) as disk:
        finals = FinalSnapshots(tmp_path, disk.journal)
        os.mkfifo(disk.folder / "exe_1.json")
        reading = asyncio.create_task(finals.read("exe_1"), name="read")
        await asyncio.sleep(0)
        assert finals.held == {"exe_1"}
        await asyncio.to_thread((disk.folder / "exe_1.json").write_bytes, render(an_end(1)[1], NOW_MS))
        found = await reading
        assert found is not None and found.ended_at == NOW_MS and not finals.held
        finals.close()


def test_only_own_files_are_found_and_only_old_leftovers_deleted(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / "exe_1.json").write_bytes(render(an_end(1)[1], 5))
    (folder / "exe_2.json").write_bytes(render(an_end(2)[1], 6))
    for name in ("notes.json", "notes.txt", ".exe_1.json.7.tmp", ".exe_2.json.8.tmp", ".mine.tmp"):
        (folder / name).write_text("{}")
    os.utime(folder / ".exe_1.json.7.tmp", (1, 1))
    os.utime(folder / "notes.txt", (1, 1))
    assert [(one.execution, one.ended_at) for one in own_files(tmp_path, frozenset(["exe_2"]))] == [("exe_1", 5)]
    assert delete_leftovers(tmp_path, time.time()) == 1
    left = {path.name for path in folder.iterdir()}
    assert left == {"exe_1.json", "exe_2.json", "notes.json", "notes.txt", ".exe_2.json.8.tmp", ".mine.tmp"}
