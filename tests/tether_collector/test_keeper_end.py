"""The end of a CLI and of its keeper: nothing survives, the proof says how that is known."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support_keeper import KeeperRig, Running, eventually, living_with, pid_namespaces_permitted, python_cli
from tether_collector.keeper_link import Gone, KeeperRefusedError, LinkLost, adopt, connect, keeper_lives
from tether_collector.spool_reader import SpoolReader

METHODS = {"pid_namespace": "pid_namespace", "subreaper": "subreaper_sweep"}

# A descendant in its own session that has no living ancestor below the CLI, ignores what can be ignored and holds
# the CLI's stdout and stderr. The tag in its arguments is how the test finds it.
ESCAPING = """
import os, signal, sys, time
tag = sys.argv[1]
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(n, signal.SIG_IGN)
    os.write(1, b'escaped\\n')
    while True:
        time.sleep(60)
os.wait()
sys.stdin.readline()
"""


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[KeeperRig]:
    async with KeeperRig(tmp_path) as keepers:
        yield keepers


@pytest.fixture(params=["pid_namespace", "subreaper"])
def isolation(request: pytest.FixtureRequest) -> str:
    mode = str(request.param)
    if mode == "pid_namespace" and not pid_namespaces_permitted():
        pytest.skip("no privilege for PID namespaces here")
    return mode


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


async def escaping(rig: KeeperRig, isolation: str) -> tuple[Running, str]:
    tag = f"tag-{uuid.uuid4().hex}"
    cli = await rig.launch([*python_cli(ESCAPING), tag], isolation=isolation)
    assert cli.link.hello.isolation == isolation
    await cli.until_kind("stdout", b"escaped")
    assert len(living_with(tag)) >= 2
    return cli, tag


async def test_kill_leaves_nothing_of_a_tree_that_escapes_and_proves_it(rig: KeeperRig, isolation: str) -> None:
    cli, tag = await escaping(rig, isolation)
    started = time.monotonic()
    await cli.link.kill()
    proof = await cli.until_proof()
    assert time.monotonic() - started < 3.0
    assert living_with(tag) == []
    assert (proof.meta["method"], proof.meta["empty"]) == (METHODS[isolation], True)
    assert [r.meta for r in cli.records if r.kind == "exit"] == [{"rc": None, "signal": 9}]
    status = await cli.link.status()
    assert status.state == "proven" and status.proof is not None and status.proof.method == METHODS[isolation]


async def test_a_natural_exit_kills_what_the_cli_left_behind_though_it_holds_the_pipes(
    rig: KeeperRig, isolation: str
) -> None:
    cli, tag = await escaping(rig, isolation)
    started = time.monotonic()
    await cli.link.stdin("go", b"\n")
    await cli.until_proof()
    assert time.monotonic() - started < 3.0
    assert living_with(tag) == []
    eofs = {str(r.meta["stream"]): r.meta.get("forced", False) for r in cli.records if r.kind == "eof"}
    assert eofs == {"stdin": False, "stdout": True, "stderr": True}
    assert [r.kind for r in cli.records[-2:]] == ["exit", "proof"]
    assert cli.records[-2].meta["rc"] == 0


async def test_output_before_the_exit_is_complete_however_fast_the_cli_ends(rig: KeeperRig, isolation: str) -> None:
    source = "import os; os.write(1, b'x' * 99 + b'\\n'); os.write(1, b'%s\\n' * 500 % tuple([b'y' * 99] * 500))"
    cli = await rig.launch(python_cli(source), isolation=isolation)
    await cli.until_proof()
    assert cli.lines() == [b"x" * 99] + [b"y" * 99] * 500


RESPAWNING = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    os.write(1, b'escaped\\n')
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if os.fork():
            os._exit(0)
        time.sleep(0.001)
    os._exit(0)
os.wait()
sys.stdin.readline()
"""


async def test_a_process_that_is_a_new_one_every_millisecond_is_caught_and_never_proven_too_early(
    rig: KeeperRig, isolation: str
) -> None:
    tag = f"tag-{uuid.uuid4().hex}"
    cli = await rig.launch([*python_cli(RESPAWNING), tag], isolation=isolation)
    await cli.until_kind("stdout", b"escaped")
    await cli.link.kill()
    await cli.until_proof()
    # Looked for more than once, since one look can miss it.
    assert [living_with(tag) for _ in range(5)] == [[]] * 5


async def test_a_process_that_dropped_the_marker_is_found_by_ancestry(rig: KeeperRig) -> None:
    tag = f"tag-{uuid.uuid4().hex}"
    child = ["python", "-c", "import time; time.sleep(60)", tag]
    source = f"import os; os.spawnve(os.P_NOWAIT, {sys.executable!r}, {child!r}, {{}})"
    cli = await rig.launch(python_cli(source + "\nimport sys; sys.stdin.readline()"), isolation="subreaper")
    await eventually(lambda: len(living_with(tag)) >= 2, "both are up")
    await cli.link.kill()
    await cli.until_proof()
    assert living_with(tag) == []


async def test_a_keeper_killed_outright_takes_the_cli_with_it(rig: KeeperRig, isolation: str) -> None:
    cli, tag = await escaping(rig, isolation)
    await cli.link.stdin("c", b"")
    pids = living_with(tag)
    os.kill(cli.link.hello.pid, signal.SIGKILL)
    if isolation == "pid_namespace":
        await eventually(lambda: living_with(tag) == [], "everything in the namespace gone")
    else:
        # Without a namespace only the CLI itself is promised; the test clears the rest away.
        await eventually(lambda: cli.link.hello.pid_cli not in living_with(tag), "the CLI gone")
        for pid in living_with(tag):
            assert pid in pids
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(LinkLost):
        await cli.link.status()
    await eventually(lambda: not keeper_lives(cli.directory), "lock free")
    assert await adopt(cli.directory, cli.spec.nonce) == Gone(spawned=True)
    assert await adopt(rig.folder / "never", cli.spec.nonce) == Gone(spawned=False)
    cli.take()
    assert "exit" not in cli.kinds() and cli.lines() == [b"escaped"]


async def test_sigterm_to_the_keeper_kills_everything_writes_the_proof_and_leaves(
    rig: KeeperRig, isolation: str
) -> None:
    cli, tag = await escaping(rig, isolation)
    os.kill(cli.link.hello.pid, signal.SIGTERM)
    await eventually(lambda: not keeper_lives(cli.directory), "keeper gone")
    assert living_with(tag) == []
    cli.take()
    assert cli.kinds()[-2:] == ["exit", "proof"]


async def test_an_init_that_is_killed_is_an_exit_that_says_so(rig: KeeperRig) -> None:
    if not pid_namespaces_permitted():
        pytest.skip("no privilege for PID namespaces here")
    cli = await rig.launch(["sleep", "60"], isolation="pid_namespace")
    os.kill(parent_of(cli.link.hello.pid_cli), signal.SIGKILL)
    await cli.until_proof()
    assert cli.records[-2].meta == {"rc": None, "signal": 9, "init_died": True}


async def test_in_a_namespace_the_cli_sees_its_own_processes_only(rig: KeeperRig) -> None:
    if not pid_namespaces_permitted():
        pytest.skip("no privilege for PID namespaces here")
    source = "import os; print(os.getpid(), sorted(int(n) for n in os.listdir('/proc') if n.isdigit()))"
    cli = await rig.launch(python_cli(source), isolation="pid_namespace")
    await cli.until_proof()
    assert cli.lines() == [b"2 [1, 2]"]


async def test_a_collector_that_dies_is_replaced_while_the_cli_works_on_and_nothing_is_lost(rig: KeeperRig) -> None:
    source = (
        "import sys, time\nfor i in range(400):\n    print(i, flush=True)\n    time.sleep(0.001)\n"
        "sys.stdin.readline()\nprint('end')"
    )
    cli = await rig.launch(python_cli(source))
    await cli.until_kind("stdout", b"20")
    pid_cli = cli.link.hello.pid_cli
    cli.link.close()
    cli.reader.close()
    with pytest.raises(LinkLost):
        await cli.link.status()
    again = await cli.adopt()
    assert (again.link.hello.pid_cli, again.link.hello.exited) == (pid_cli, None)
    await again.link.stdin("c", b"\n")
    await again.until_proof()
    assert again.lines() == [str(i).encode() for i in range(400)] + [b"end"]
    assert again.gaps == []
    again.link.close()
    again.reader.close()


async def test_the_newest_owner_wins_and_the_one_before_is_told_and_refused(rig: KeeperRig) -> None:
    cli = await rig.launch(["cat"])
    second = await cli.adopt()
    with pytest.raises(KeeperRefusedError, match="superseded"):
        await cli.link.stdin("old", b"old\n")
    assert cli.link.superseded and not second.link.superseded
    assert [last async for last in cli.link.pushes()] == []
    await second.link.stdin("new", b"new\n")
    await second.until_kind("stdout", b"new")
    assert (await cli.link.status()).state == "running"
    assert second.lines() == [b"new"]
    second.link.close()
    second.reader.close()


async def test_an_observer_reads_and_may_not_write(rig: KeeperRig) -> None:
    cli = await rig.launch(["cat"])
    observer = await connect(cli.directory, cli.spec.nonce, "observer")
    with pytest.raises(KeeperRefusedError, match="not_owner"):
        await observer.kill()
    await cli.link.append("note", {"n": 1})
    assert await observer.wait_records(0) == 1
    assert not cli.link.superseded
    observer.close()


async def test_another_nonce_is_refused(rig: KeeperRig) -> None:
    cli = await rig.launch(["cat"])
    with pytest.raises(KeeperRefusedError, match="wrong_nonce"):
        await adopt(cli.directory, "another-nonce-entirely")
    assert (await cli.link.status()).state == "running"


async def test_shutdown_is_refused_before_the_proof_and_obeyed_after_it(rig: KeeperRig) -> None:
    cli = await rig.launch(["cat"])
    with pytest.raises(KeeperRefusedError, match="not_ended"):
        await cli.link.shutdown()
    await cli.link.close_stdin()
    await cli.until_proof()
    await cli.link.shutdown()
    await eventually(lambda: not keeper_lives(cli.directory), "keeper gone")
    assert await adopt(cli.directory, cli.spec.nonce) == Gone(spawned=True)
    reader = SpoolReader(cli.directory)
    assert reader.read(0).records[-1].kind == "proof"
    reader.close()
