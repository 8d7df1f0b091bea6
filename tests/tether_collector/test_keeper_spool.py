"""Keeper and spool together: rotation, release, back-pressure, speed."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support_keeper import KeeperRig, python_cli
from tether_collector.keeper.core import DRAIN_S
from tether_collector.keeper_link import KeeperRefusedError
from tether_collector.spool_reader import SpoolReader

COUNTING = "import sys\nfor i in range({n}):\n    print(i)\nsys.stdin.readline()\n"


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[KeeperRig]:
    async with KeeperRig(tmp_path) as keepers:
        yield keepers


async def test_a_rotation_under_load_loses_and_repeats_nothing_and_each_state_covers_what_is_before_it(
    rig: KeeperRig,
) -> None:
    cli = await rig.launch(python_cli(COUNTING.format(n=60_000)))
    states = 0
    while not cli.lines() or cli.lines()[-1] != b"59999":
        await cli.link.wait_records(cli.last)
        last = await cli.link.pause()
        cli.take()
        assert cli.last == last, "nothing is recorded while paused"
        number = await cli.link.rotate(f"covers {last}".encode(), last)
        assert number == last + 1
        states += 1
    assert states > 1
    for record in cli.records:
        if record.kind == "state":
            assert record.meta == {"state_record": record.number - 1}
            assert record.data == f"covers {record.number - 1}".encode()
    assert cli.lines() == [str(i).encode() for i in range(60_000)]
    latest = cli.reader.latest_state()
    assert latest is not None and latest.first_record == latest.state_record + 1
    fresh = SpoolReader(cli.directory)
    assert fresh.read(latest.state_record).records[0].kind == "state"
    fresh.close()


async def test_a_state_that_is_behind_is_refused_and_reading_goes_on(rig: KeeperRig) -> None:
    cli = await rig.launch(["cat"])
    await cli.link.append("note", {"n": 1})
    last = await cli.link.pause()
    await cli.link.append("note", {"n": 2})
    with pytest.raises(KeeperRefusedError, match="stale_state"):
        await cli.link.rotate(b"old", last)
    await cli.link.stdin("c", b"goes on\n")
    await cli.until_kind("stdout", b"goes on")
    assert "state" not in cli.kinds()


async def test_a_pause_without_a_rotation_ends_by_itself(rig: KeeperRig) -> None:
    cli = await rig.launch(["cat"])
    last = await cli.link.pause()
    started = time.monotonic()
    await cli.link.stdin("c", b"held back\n")
    cli.take()
    assert (cli.lines(), last) == ([], 0)
    await cli.until_kind("stdout", b"held back")
    assert 1.5 < time.monotonic() - started < 6


async def test_a_rotation_inside_a_long_line_is_refused(rig: KeeperRig) -> None:
    source = "import os, sys\nos.write(1, b'x' * 100)\nsys.stdin.readline()\nos.write(1, b'y\\n')\nsys.stdin.readline()"
    cli = await rig.launch(python_cli(source), line_chunk_bytes=64)
    await cli.until(lambda r: r.meta.get("cont") is True)
    with pytest.raises(KeeperRefusedError, match="mid_line"):
        await cli.link.rotate(b"s", await cli.link.pause())
    await cli.link.stdin("go", b"\n")
    rest = await cli.until(lambda r: r.kind == "stdout" and "cont" not in r.meta)
    assert rest.data == b"x" * 36 + b"y"
    assert await cli.link.rotate(b"s", await cli.link.pause()) == rest.number + 1


async def test_segments_grow_to_their_size_without_a_collector_and_go_when_released_behind_a_state(
    rig: KeeperRig,
) -> None:
    cli = await rig.launch(python_cli(COUNTING.format(n=20_000)), segment_bytes_max=64 * 1024)
    await cli.until_kind("stdout", b"19999")
    folder = cli.directory / "spool"
    # A segment ends with the read that fills it: short lines of one 64 KiB read make up to 2 MiB of records.
    sizes = [path.stat().st_size for path in sorted(folder.iterdir())]
    assert len(sizes) > 2 and all(size >= 64 * 1024 for size in sizes[:-1])
    assert await cli.link.release(cli.last, 0) == ()
    number = await cli.link.rotate(b"all", await cli.link.pause())
    deleted = await cli.link.release(number - 1, 0)
    assert deleted[0] == 1
    assert [path.name for path in folder.iterdir()] == [f"{number:012d}.seg"]
    await cli.link.stdin("go", b"\n")
    await cli.until_proof()
    assert cli.gaps == []


async def test_beyond_the_quota_the_cli_is_held_back_until_something_is_released(rig: KeeperRig) -> None:
    source = COUNTING.format(n=200_000)
    cli = await rig.launch(python_cli(source), segment_bytes_max=64 * 1024, spool_quota_bytes=1024 * 1024)
    held = await cli.until(lambda r: r.kind == "note")
    assert held.meta == {"note": "backpressure", "on": True}
    status = await cli.link.status()
    assert status.backpressure and status.spool_bytes < 2 * 1024 * 1024
    assert status.last_record == held.number, "nothing is read while held back"
    while not cli.lines() or cli.lines()[-1] != b"199999":
        number = await cli.link.rotate(b"s", await cli.link.pause())
        cli.take()
        await cli.link.release(number - 1, 0)
        await cli.until(
            lambda r, n=number: r.data == b"199999" or (r.number > n and r.meta.get("on") is True)  # type: ignore[misc]
        )
        assert sum(path.stat().st_size for path in (cli.directory / "spool").iterdir()) < 2 * 1024 * 1024
    assert cli.lines() == [str(i).encode() for i in range(200_000)]
    assert cli.gaps == []


async def test_a_cli_that_ends_while_held_back_loses_nothing_that_is_in_the_pipe(rig: KeeperRig) -> None:
    source = "for i in range(4_000): print(i)\n"
    cli = await rig.launch(python_cli(source), segment_bytes_max=4096, spool_quota_bytes=64 * 1024)
    await cli.until_proof()
    assert cli.lines() == [str(i).encode() for i in range(4_000)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("no privilege to mount a small disk here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


async def test_a_full_disk_holds_the_cli_back_and_nothing_is_lost_when_there_is_room_again(
    small_disk: Path, rig: KeeperRig
) -> None:
    cli = await rig.launch(python_cli("for i in range(50_000): print(i)"), directory=small_disk / "k")
    async with asyncio.timeout(20):
        while not (await cli.link.status()).spool_blocked:
            pass  # each question waits for its answer
    with pytest.raises(KeeperRefusedError, match="spool_blocked"):
        await cli.link.stdin("c", b"x" * 500_000)
    remount = ["mount", "-o", "remount,size=64m", str(small_disk)]
    await (await asyncio.create_subprocess_exec(*remount)).wait()
    await cli.until_proof()
    assert cli.lines() == [str(i).encode() for i in range(50_000)]
    assert cli.gaps == [] and "stdin" not in cli.kinds()
    cli.link.close()


async def test_what_a_cli_printed_before_it_ended_on_a_full_disk_is_read_when_there_is_room_again(
    small_disk: Path, tmp_path: Path, rig: KeeperRig
) -> None:
    go = tmp_path / "go"
    source = f"""
import os, time
print("first", flush=True)
while not os.path.exists({str(go)!r}): time.sleep(0.01)
for i in range(3_000): print(i)
"""
    cli = await rig.launch(python_cli(source), directory=small_disk / "k")
    await cli.until_kind("stdout", b"first")
    ballast = small_disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    go.touch()
    async with asyncio.timeout(20):
        while (status := await cli.link.status()).state != "draining" or not status.spool_blocked:
            pass  # each question waits for its answer; then it has ended, and what it printed last is in the pipe
    await asyncio.sleep(DRAIN_S + 0.5)  # longer than a stream that nobody closes is waited for
    ballast.unlink()
    await cli.until_proof()
    assert cli.lines() == [b"first", *(str(i).encode() for i in range(3_000))]
    cli.link.close()


async def test_speed_of_a_flood_and_delay_of_a_line(rig: KeeperRig) -> None:
    count = 300_000
    source = f"import os\nline = b'x' * 120 + b'\\n'\nfor i in range({count // 500}): os.write(1, line * 500)\n"
    started = time.perf_counter()
    cli = await rig.launch(python_cli(source))
    await cli.until_proof()
    rate = count / (time.perf_counter() - started)
    assert len(cli.lines()) == count
    echo = await rig.launch(["cat"], process_generation=2)
    delays_us = []
    for n in range(200):
        data = b"%d" % n
        await echo.link.append("note")
        before = time.time_ns() // 1000
        await echo.link.stdin(f"c{n}", data + b"\n")
        record = await echo.until_kind("stdout", data)
        delays_us.append(time.time_ns() // 1000 - max(record.at_us, before))
    p50, p99 = statistics.median(delays_us), statistics.quantiles(delays_us, n=100)[98]
    print(f"{rate:,.0f} lines/s through keeper and reader; arrival to reader p50 {p50:.0f} µs, p99 {p99:.0f} µs")
    assert rate > 5_000
    assert p50 < 20_000
