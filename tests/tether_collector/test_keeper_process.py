"""One CLI under a real keeper: launch, output, stdin, environment, and what the process costs."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop

from support_keeper import KeeperRig, eventually, living_with, python_cli
from tether_collector.keeper_link import KeeperRefusedError, LaunchError, keeper_lives, launch
from tether_collector.spool_reader import LineJoiner, SpoolReader

RSS_MAX_KIB = 12 * 1024
MIB = 1024 * 1024


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[KeeperRig]:
    async with KeeperRig(tmp_path) as keepers:
        yield keepers


def rss_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def children_here() -> dict[int, str]:
    """Children of the test process and their states."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid): Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] for pid in pids}


async def test_a_whole_life_is_recorded_in_order_with_numbers_without_holes(rig: KeeperRig) -> None:
    cli = await rig.launch(["sh", "-c", "read a; echo out $a; echo err $a >&2; exit 3"])
    assert (await cli.link.stdin("c1", b"hello\n")).status == "written"
    await cli.until_proof()
    assert [r.number for r in cli.records] == list(range(1, len(cli.records) + 1))
    assert cli.kinds()[:2] == ["stdin", "stdin_done"]
    assert cli.records[0].data == b"hello\n"
    assert cli.records[0].meta == {"control_id": "c1"}
    assert cli.records[1].meta == {"control_id": "c1", "result": "written"}
    assert cli.lines("stdout") == [b"out hello"]
    assert cli.lines("stderr") == [b"err hello"]
    assert sorted(str(r.meta["stream"]) for r in cli.records if r.kind == "eof") == ["stderr", "stdin", "stdout"]
    assert cli.kinds()[-2:] == ["exit", "proof"]
    assert cli.records[-2].meta == {"rc": 3, "signal": None}
    assert cli.records[-1].meta["empty"] is True
    assert all(a.at_us <= b.at_us for a, b in zip(cli.records, cli.records[1:], strict=False))


async def test_the_keeper_stays_small_idle_and_after_a_flood(rig: KeeperRig) -> None:
    cli = await rig.launch(
        python_cli(
            "import sys\n"
            "sys.stdin.readline()\n"
            "for i in range(40):\n"
            "    sys.stdout.write(('x' * 200 + chr(10)) * 2000)\n"
            "sys.stdout.write('y' * 5_000_000 + chr(10))\n"
            "print('done')\n"
            "sys.stdin.readline()\n"
        )
    )
    idle = rss_kib(cli.link.hello.pid)
    await cli.link.stdin("go", b"\n")
    await cli.until_kind("stdout", b"done")
    busy = rss_kib(cli.link.hello.pid)
    print(f"keeper VmRSS: {idle} KiB idle, {busy} KiB after 21 MB")
    assert max(idle, busy) <= RSS_MAX_KIB


async def test_bytes_pass_unchanged_nul_half_characters_carriage_returns_and_no_last_newline(rig: KeeperRig) -> None:
    lines = [b"a\0b", b"", b"\xc3", b"\xa9 rest", b"cr\r", b"\xf5TR\x01 looks like a record"]
    blob = b"\n".join(lines) + b"\nlast without newline \xe2\x82"
    cli = await rig.launch(python_cli(f"import os; os.write(1, {blob!r})"))
    await cli.until_proof()
    out = [r for r in cli.records if r.kind == "stdout"]
    assert [r.data for r in out] == [*lines, b"last without newline \xe2\x82"]
    assert [r.meta for r in out] == [{}] * len(lines) + [{"eol": False}]


async def test_a_line_of_10_mib_arrives_in_chunks_and_is_joined_whole(rig: KeeperRig) -> None:
    source = "import sys; sys.stdout.write(''.join(f'{i:09d},' for i in range(1048576)) + chr(10) + 'next' + chr(10))"
    cli = await rig.launch(python_cli(source))
    await cli.until_proof()
    out = [r for r in cli.records if r.kind == "stdout"]
    assert [r.meta.get("cont", False) for r in out] == [True] * 39 + [False, False]
    assert {len(r.data) for r in out[:39]} == {256 * 1024}
    joiner = LineJoiner()
    lines = [line for r in cli.records if (line := joiner.feed(r))]
    expected = "".join(f"{i:09d}," for i in range(MIB)).encode()
    assert [line.data for line in lines] == [expected, b"next"]
    assert (lines[0].first_record, lines[0].last_record) == (out[0].number, out[39].number)


async def test_a_flood_on_stderr_does_not_hold_back_stdout(rig: KeeperRig) -> None:
    source = "import os\nfor i in range(300): os.write(2, b'e' * 99 + b'\\n' + b'f' * 99 + b'\\n')\nprint('through')"
    cli = await rig.launch(python_cli(source))
    await cli.until_proof()
    assert cli.lines("stdout") == [b"through"]
    assert cli.lines("stderr") == [b"e" * 99, b"f" * 99] * 300


async def test_the_environment_is_the_allow_list_and_the_marker_and_nothing_else(rig: KeeperRig) -> None:
    rig.environment = {"PATH": os.environ["PATH"], "MODEL_KEY": "s3cret", "EMPTY": ""}
    cli = await rig.launch(["env", "-0"])
    await cli.until_proof()
    pairs = dict(item.split(b"=", 1) for item in b"\n".join(cli.lines()).split(b"\0") if item)
    wanted = {**rig.environment, "TETHER_PROCESS_NONCE": cli.spec.nonce}
    assert pairs == {k.encode(): v.encode() for k, v in wanted.items()}


async def test_no_secret_of_the_environment_is_on_disk_or_in_an_argument_list(rig: KeeperRig) -> None:
    rig.environment = {"PATH": os.environ["PATH"], "MODEL_KEY": "very-s3cret-value"}
    cli = await rig.launch(["sh", "-c", "read a; true"])
    for path in cli.directory.rglob("*"):
        if path.is_file():
            assert b"very-s3cret-value" not in path.read_bytes()
    assert living_with("very-s3cret-value") == []
    assert b"very-s3cret-value" not in environment_of(cli.link.hello.pid)


async def test_files_are_private_and_the_spawn_record_has_a_hash_in_place_of_the_arguments(rig: KeeperRig) -> None:
    cli = await rig.launch(["sh", "-c", "read a; true secret-argument"])
    for path in [cli.directory, *cli.directory.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
    record = json.loads((cli.directory / "spawn.json").read_text())
    assert record["argv_sha256"] == hashlib.sha256("\0".join(cli.spec.argv).encode()).hexdigest()
    assert record["nonce"] == cli.spec.nonce
    assert record["isolation"] == cli.link.hello.isolation
    assert "secret-argument" not in (cli.directory / "spawn.json").read_text()


async def test_the_cli_gets_default_signals_its_own_session_and_only_three_descriptors(rig: KeeperRig) -> None:
    source = (
        "import os, signal\n"
        "print(os.getsid(0) == os.getpid(), sorted(os.listdir('/proc/self/fd'))[:4])\n"
        "lines = open('/proc/self/status').read().splitlines()\n"
        "print([int(l.split()[1], 16) for l in lines if l.startswith('SigBlk')])\n"
    )
    cli = await rig.launch(python_cli(source))
    await cli.until_proof()
    # The fourth descriptor is the one with which the folder is read.
    assert cli.lines() == [b"True ['0', '1', '2', '3']", b"[0]"]
    # Python itself ignores SIGPIPE, so a shell is asked whether it was handed down ignored.
    shell = await rig.launch(["sh", "-c", "kill -PIPE $$; echo survived"], process_generation=2)
    await shell.until_proof()
    assert [r.meta for r in shell.records if r.kind == "exit"] == [{"rc": None, "signal": signal.SIGPIPE}]


async def test_nothing_is_spawned_where_a_spawn_record_exists(rig: KeeperRig) -> None:
    cli = await rig.launch(["sh", "-c", "read a; exit 0"])
    with pytest.raises(LaunchError) as living:
        await launch(cli.directory, rig.spec(["touch", str(rig.folder / "twice")]))
    await cli.link.close_stdin()
    await cli.until_proof()
    await cli.link.shutdown()
    with pytest.raises(LaunchError) as dead:
        await launch(cli.directory, rig.spec(["touch", str(rig.folder / "twice")]))
    assert (living.value.code, dead.value.code) == ("already_spawned", "already_spawned")
    assert not (rig.folder / "twice").exists()


@pytest.mark.parametrize("isolation", ["auto", "subreaper"])
async def test_a_program_that_does_not_exist_is_a_clean_answer_with_exit_and_proof(
    rig: KeeperRig, isolation: str
) -> None:
    folder = rig.folder / "missing"
    with pytest.raises(LaunchError) as failure:
        await launch(folder, rig.spec(["no-such-program-here"], isolation=isolation))
    assert (failure.value.code, failure.value.errno, failure.value.stage) == ("exec_failed", 2, "exec")
    records = SpoolReader(folder).read(0).records
    assert [r.kind for r in records] == ["exit", "proof"]
    assert records[0].meta["exec_error"] == {
        "stage": "exec",
        "errno": 2,
        "message": "No such file or directory",
    }
    with pytest.raises(LaunchError, match="already_spawned"):
        await launch(folder, rig.spec(["true"]))


async def test_a_missing_working_folder_is_told_apart_from_a_missing_program(rig: KeeperRig) -> None:
    with pytest.raises(LaunchError) as failure:
        await launch(rig.folder / "k", rig.spec(["true"], cwd=str(rig.folder / "nowhere")))
    assert (failure.value.code, failure.value.stage, failure.value.errno) == ("exec_failed", "chdir", 2)


async def test_a_bad_specification_is_refused_with_every_problem_and_leaves_no_spawn_record(rig: KeeperRig) -> None:
    with pytest.raises(LaunchError) as failure:
        await launch(rig.folder / "k", rig.spec([], nonce="short", cwd="relative", env={"A=B": "x"}))
    assert failure.value.code == "invalid_spec"
    for name in ("nonce", "argv", "cwd", "env"):
        assert name in failure.value.detail
    assert not (rig.folder / "k" / "spawn.json").exists()


async def test_launch_leaves_no_zombie_and_the_keeper_is_nobodys_child_here(rig: KeeperRig) -> None:
    cli = await rig.launch(["cat"])
    children = children_here()
    assert "Z" not in children.values()
    assert cli.link.hello.pid not in children
    assert os.getsid(cli.link.hello.pid) != os.getsid(0)


async def test_a_path_longer_than_a_socket_address_works(rig: KeeperRig) -> None:
    deep = rig.folder / ("d" * 120) / ("e" * 120) / "1"
    cli = await rig.launch(["cat"], directory=deep)
    await cli.link.stdin("c", b"x\n")
    await cli.until_kind("stdout", b"x")
    again = await cli.adopt()
    again.link.close()


async def test_closed_stdout_with_a_living_process_is_no_exit(rig: KeeperRig) -> None:
    source = (
        "import os, sys\nos.write(1, b'bye\\n')\nnull = os.open('/dev/null', os.O_WRONLY)\n"
        "os.dup2(null, 1)\nsys.stdin.readline()\nos.write(2, b'alive\\n')\nsys.exit(4)"
    )
    cli = await rig.launch(python_cli(source))
    await cli.until(lambda r: r.kind == "eof" and r.meta["stream"] == "stdout")
    status = await cli.link.status()
    assert (status.state, status.exited) == ("running", None)
    await cli.link.stdin("go", b"\n")
    await cli.until_proof()
    assert cli.lines("stderr") == [b"alive"]
    assert [r.meta["rc"] for r in cli.records if r.kind == "exit"] == [4]


async def test_the_same_control_id_is_written_once(rig: KeeperRig) -> None:
    cli = await rig.launch(["cat"])
    first = await cli.link.stdin("same", b"once\n")
    second = await cli.link.stdin("same", b"once\n")
    assert (first.status, second.status, second.result) == ("written", "known", "written")
    again = await cli.adopt()
    assert (await again.link.stdin("same", b"once\n")).status == "known"
    await again.link.close_stdin()
    await again.until_proof()
    assert again.lines() == [b"once"]
    assert again.kinds().count("stdin") == 1
    again.link.close()
    again.reader.close()


async def test_a_write_cut_by_the_end_of_the_cli_is_partial_and_the_one_behind_it_closed(rig: KeeperRig) -> None:
    cli = await rig.launch(["sleep", "60"])
    assert (await cli.link.stdin("big", b"x" * MIB)).status == "queued"
    assert (await cli.link.stdin("behind", b"y\n")).status == "queued"
    assert (await cli.link.status()).stdin_queued_bytes > MIB // 2
    await cli.link.kill()
    await cli.until_proof()
    done = {r.meta["control_id"]: r.meta["result"] for r in cli.records if r.kind == "stdin_done"}
    assert done == {"big": "partial", "behind": "closed"}
    with pytest.raises(KeeperRefusedError, match="stdin_closed"):
        await cli.link.stdin("late", b"z")
    assert (await cli.link.stdin("big", b"x")).result == "partial"


async def test_stdin_beyond_the_queue_is_refused_and_not_recorded(rig: KeeperRig) -> None:
    cli = await rig.launch(["sleep", "60"])
    for n in range(4):
        await cli.link.stdin(f"c{n}", b"x" * MIB)
    with pytest.raises(KeeperRefusedError, match="stdin_full"):
        await cli.link.stdin("more", b"x" * MIB)
    cli.take()
    assert [r.meta["control_id"] for r in cli.records if r.kind == "stdin"] == ["c0", "c1", "c2", "c3"]


async def test_large_stdin_is_written_as_the_cli_reads_and_closed_behind_it(rig: KeeperRig) -> None:
    cli = await rig.launch(python_cli("import sys, zlib; print(zlib.crc32(sys.stdin.buffer.read()))"))
    data = os.urandom(MIB)
    await cli.link.stdin("big", data)
    await cli.link.close_stdin()
    await cli.until_proof()
    assert cli.lines() == [str(zlib.crc32(data)).encode()]
    assert next(r for r in cli.records if r.kind == "stdin").data == data


async def test_a_cli_that_closes_its_stdin_is_seen_without_a_write(rig: KeeperRig) -> None:
    cli = await rig.launch(["sh", "-c", "exec <&-; sleep 60"])
    await cli.until(lambda r: r.kind == "eof" and r.meta["stream"] == "stdin")
    assert (await cli.link.status()).stdin_open is False


async def test_signals_reach_the_cli_alone_and_are_refused_after_its_end(rig: KeeperRig) -> None:
    cli = await rig.launch(["sh", "-c", "trap 'echo got; exit 9' TERM; echo up; while :; do sleep 0.05; done"])
    await cli.until_kind("stdout", b"up")
    await cli.link.signal("TERM")
    await cli.until_proof()
    assert cli.lines() == [b"up", b"got"]
    with pytest.raises(KeeperRefusedError, match="exited"):
        await cli.link.signal("SIGTERM")
    with pytest.raises(KeeperRefusedError, match="unknown_signal"):
        await cli.link.signal("WINCH")


async def test_inputs_of_the_collector_are_recorded_with_their_meta_and_data(rig: KeeperRig) -> None:
    cli = await rig.launch(["cat"])
    numbers = [
        await cli.link.append("adapter", {"version": "1.2", "kind": "claude"}),
        await cli.link.append("timer", {"id": "watchdog"}, b"\0\xff"),
        await cli.link.append("note"),
    ]
    assert numbers == [1, 2, 3]
    cli.take()
    assert [(r.kind, dict(r.meta), r.data) for r in cli.records] == [
        ("adapter", {"version": "1.2", "kind": "claude"}, b""),
        ("timer", {"id": "watchdog"}, b"\0\xff"),
        ("note", {}, b""),
    ]


def test_launch_and_adopt_work_on_uvloop_too(tmp_path: Path) -> None:
    async def life() -> list[bytes]:
        async with KeeperRig(tmp_path) as rig:
            cli = await rig.launch(["cat"])
            await cli.link.stdin("a", b"first\n")
            await cli.until_kind("stdout", b"first")
            again = await cli.adopt()
            await again.link.stdin("b", b"second\n")
            await again.link.close_stdin()
            await again.until_proof()
            again.link.close()
            again.reader.close()
            return again.lines()

    assert uvloop.run(life()) == [b"first", b"second"]


async def test_a_keeper_without_an_owner_leaves_after_its_time_and_its_files_stay(rig: KeeperRig) -> None:
    cli = await rig.launch(["echo", "kept"], linger_s=0.05)
    await cli.until_proof()
    cli.link.close()
    await eventually(lambda: not keeper_lives(cli.directory), "keeper left")
    fresh = SpoolReader(cli.directory)
    assert [r.kind for r in fresh.read(0).records][-1] == "proof"
    fresh.close()
