"""What a hostile CLI tries under a real keeper: to gain privileges, to look into other processes, to leave a core, to
fork without end, to reach what is not its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from support_keeper import KeeperRig, Running
from tether_collector.keeper_link import LaunchError
from tether_collector.spool_reader import SpoolReader

PYTHON = "/usr/bin/python3"  # one that every user may start
NOBODY = 65534
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs a CLI as another user")
python = pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason="there is no python3 that every user may start")


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[KeeperRig]:
    async with KeeperRig(tmp_path) as keepers:
        yield keepers


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may enter, which those of a test's own are not below."""
    folder = Path(tempfile.mkdtemp(prefix="tether-confine-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


async def said(rig: KeeperRig, source: str, *, cwd: Path | None = None, **changes: Any) -> dict[str, object]:
    """The JSON object that a CLI of this source printed."""
    cli = await rig.launch([PYTHON, "-c", source], cwd=str(cwd or rig.folder), **changes)
    return await answer_of(cli)


async def answer_of(cli: Running) -> dict[str, object]:
    await cli.until_proof()
    lines = [line for line in cli.lines() if line.startswith(b"{")]
    assert lines, (cli.lines("stderr"), [record.meta for record in cli.records])
    answer: dict[str, object] = json.loads(lines[0])
    return answer


STATUS = """
import json, os, resource
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines() if ":" in line)
print(json.dumps({
    "uid": os.getresuid(), "gid": os.getresgid(), "groups": os.getgroups(), "nnp": int(status["NoNewPrivs"]),
    "core": resource.getrlimit(resource.RLIMIT_CORE), "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "umask": status["Umask"].strip(), "caps": int(status["CapEff"], 16), "fds": sorted(os.listdir("/proc/self/fd"))[:4],
}))
"""


@python
async def test_a_cli_has_no_new_privileges_no_core_and_its_limits(rig: KeeperRig) -> None:
    found = await said(rig, STATUS, confine={"umask": 0o077, "limits": {"files": 300}})
    assert found["nnp"] == 1
    assert found["core"] == [0, 0]
    assert found["files"] == [300, 300]
    assert found["umask"] == "0077"
    assert found["fds"] == ["0", "1", "2", "3"], "the fourth reads the folder"


@root
@python
@pytest.mark.parametrize("isolation", ["auto", "subreaper"])
async def test_a_cli_of_another_user_has_nothing_of_roots(rig: KeeperRig, shared: Path, isolation: str) -> None:
    confine = {"uid": NOBODY, "gid": NOBODY}
    found = await said(rig, STATUS, cwd=shared, confine=confine, isolation=isolation)
    assert (found["uid"], found["gid"]) == ([NOBODY] * 3, [NOBODY] * 3)
    assert (found["groups"], found["caps"]) == ([], 0)
    assert found["nnp"] == 1


GAIN = """
import json, os, subprocess
found = {}
for name in ("plain", "setuid"):
    done = subprocess.run(["./" + name, "-c", "import os; print(os.geteuid())"], capture_output=True, text=True)
    found[name] = done.stdout.strip() or done.stderr[-200:]
print(json.dumps(found))
"""


@root
@python
async def test_a_setuid_program_gains_nothing(rig: KeeperRig, shared: Path) -> None:
    """The same with new privileges allowed gains root: the test's program works."""
    for name, mode in (("plain", 0o755), ("setuid", 0o4755)):
        shutil.copy(os.path.realpath(PYTHON), shared / name)  # noqa: ASYNC240
        (shared / name).chmod(mode)
    environment = {"PYTHONHOME": "/usr", "PATH": os.environ["PATH"]}
    base = {"uid": NOBODY, "gid": NOBODY}
    found = await said(rig, GAIN, cwd=shared, confine=base, env=environment)
    assert found == {"plain": str(NOBODY), "setuid": str(NOBODY)}
    if os.statvfs(shared).f_flag & os.ST_NOSUID:
        pytest.skip("the folder of temporary files knows no setuid")
    allowed = {**base, "new_privileges": True}
    assert (await said(rig, GAIN, cwd=shared, confine=allowed, env=environment, process_generation=2))["setuid"] == "0"


def victim_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], env={"SECRET": "of-the-collector"})


PEEK = """
import ctypes, json, os, sys
found = {}
def tried(name, deed):
    try:
        found[name] = str(deed())[:80]
    except OSError as error:
        found[name] = type(error).__name__
for pid in sys.argv[1].split(","):
    tried("environ " + pid, lambda: open(f"/proc/{pid}/environ", "rb").read())
    tried("memory " + pid, lambda: open(f"/proc/{pid}/mem", "rb").read(1))
    tried("descriptors " + pid, lambda: os.listdir(f"/proc/{pid}/fd"))
    tried("kill " + pid, lambda: os.kill(int(pid), 9))
    libc = ctypes.CDLL(None, use_errno=True)
    found["trace " + pid] = libc.ptrace(16, int(pid), 0, 0)
print(json.dumps(found))
"""


@root
@python
@pytest.mark.parametrize("isolation", ["auto", "subreaper"])
async def test_a_cli_sees_nothing_of_the_keeper_and_of_the_collector(
    rig: KeeperRig, shared: Path, isolation: str
) -> None:
    """In a namespace they are not there; without one they are another user's."""
    victim = victim_process()
    try:
        confine = {"uid": NOBODY, "gid": NOBODY}
        # The parent of the CLI is the keeper, or the init of its namespace: a copy of the keeper's memory, with keys.
        source = PEEK.replace("sys.argv[1]", f"f'{victim.pid},{{os.getppid() or 1}}'")
        found = await said(rig, source, cwd=shared, confine=confine, isolation=isolation)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
    assert len(found) == 10
    refused = {"PermissionError", "FileNotFoundError", "ProcessLookupError", -1}
    assert {name: how for name, how in found.items() if how not in refused} == {}


@root
@python
async def test_the_memory_of_the_keeper_is_closed_to_its_own_user(shared: Path) -> None:
    """A keeper of an ordinary user, whose CLI is the same user's: the keys in its memory are the keeper's alone."""
    source = PEEK.replace("sys.argv[1]", "str(os.getppid())").replace("os.kill(int(pid), 9)", "None")
    found = await as_nobody(shared, source, isolation="subreaper")
    [pid] = {name.split()[1] for name in found}
    assert found[f"memory {pid}"] == found[f"environ {pid}"] == found[f"descriptors {pid}"] == "PermissionError"
    assert found[f"trace {pid}"] == -1


async def as_nobody(shared: Path, source: str, isolation: str = "auto", options: str = "{}") -> dict[str, object]:
    """The answer of a CLI whose keeper is an ordinary user's: the package and what is written lie where that user may
    read and write."""
    package = shared / "app" / "tether_collector"
    keeper = Path(sys.modules["tether_collector"].__path__[0]) / "keeper"
    shutil.copytree(keeper, package / "keeper", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").touch()
    state = shared / "state"
    state.mkdir()
    os.chown(state, NOBODY, NOBODY)
    spec = {"v": 1, "nonce": "nonce-0123456789abcdef", "execution": "e1", "process_generation": 1, "env": {}}
    spec |= {"argv": [PYTHON, "-c", source], "cwd": str(state), "isolation": isolation, "linger_s": 0}
    spec |= {"confine": json.loads(options)}
    done = subprocess.run(  # noqa: ASYNC221
        [PYTHON, "-S", "-E", str(package / "keeper" / "__main__.py"), "--dir", str(state / "k")],
        input=json.dumps(spec).encode(),
        capture_output=True,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        env={},
        timeout=30,
        check=True,
    )
    ready = json.loads(done.stdout.splitlines()[0])
    assert ready["ready"], ready
    return await printed(state / "k", spec["nonce"], str(ready["isolation"]))


async def printed(folder: Path, nonce: object, isolation: str) -> dict[str, object]:
    reader = SpoolReader(folder)
    try:
        async with asyncio.timeout(30):
            while True:
                batch = reader.read(0, 1 << 20)
                if any(record.kind == "proof" for record in batch.records):
                    break
                await asyncio.sleep(0.02)
    finally:
        reader.close()
    lines = [record.data for record in batch.records if record.data.startswith(b"{")]
    errors = [record.data for record in batch.records if record.kind == "stderr"]
    assert lines, errors
    answer: dict[str, object] = json.loads(lines[0])
    return {**answer, **({"isolation": isolation} if "ppid" in answer else {})}


NAMESPACE = """
import json, os
print(json.dumps({
    "ppid": os.getppid(), "pids": sorted(int(n) for n in os.listdir("/proc") if n.isdigit())[:3], "uid": os.getuid(),
    "caps": [l.split()[1] for l in open("/proc/self/status") if l.startswith("CapEff")],
}))
"""


@root
@python
async def test_an_ordinary_users_cli_gets_a_pid_namespace_where_user_namespaces_are_allowed(shared: Path) -> None:
    allowed = subprocess.run(["unshare", "--user", "--pid", "--fork", "true"], user=NOBODY, group=NOBODY, check=False)  # noqa: ASYNC221
    found = await as_nobody(shared, NAMESPACE)
    if allowed.returncode != 0:
        assert found["isolation"] == "subreaper", "the fallback is named"
        pytest.skip("user namespaces are not allowed here")
    assert found["isolation"] == "pid_namespace"
    assert (found["ppid"], found["uid"]) == (1, NOBODY)
    assert found["pids"] == [1, 2] or found["pids"] == [1, 2, 3], "it sees its own processes only"
    assert found["caps"] == ["0000000000000000"]


FORK = """
import json, os, time
made = 0
try:
    while made < 400:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        made += 1
except BlockingIOError as error:
    print(json.dumps({"made": made, "error": type(error).__name__}), flush=True)
"""


@root
@python
@pytest.mark.parametrize("isolation", ["auto", "subreaper"])
async def test_a_fork_bomb_ends_at_the_limit_and_all_of_it_is_gone_with_the_proof(
    rig: KeeperRig, shared: Path, isolation: str
) -> None:
    user = 54321  # a user of whom there is nothing else: the limit counts all of a user's
    confine = {"uid": user, "gid": user, "limits": {"processes": 40}}
    found = await said(rig, FORK, cwd=shared, confine=confine, isolation=isolation)
    assert found["error"] == "BlockingIOError"
    assert isinstance(found["made"], int)
    assert 30 <= found["made"] < 40
    assert processes_of(user) == []


def processes_of(user: int) -> list[str]:
    return [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit() and owner_of(entry) == user]


def owner_of(entry: Path) -> int | None:
    try:
        return entry.stat().st_uid
    except OSError:
        return None


CRASH = """
import json, os, signal
pid = os.fork()
if pid == 0:
    os.kill(os.getpid(), signal.SIGSEGV)
_, status = os.waitpid(pid, 0)
with open("made", "w") as file:
    file.write("x")
print(json.dumps({"core": os.WCOREDUMP(status), "files": os.listdir(".")}))
"""


@python
async def test_a_crash_leaves_no_core_and_files_are_the_users_alone(rig: KeeperRig, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    found = await said(rig, CRASH, cwd=folder, confine={"umask": 0o077, "limits": {"file_bytes": 1 << 20}})
    assert found == {"core": False, "files": ["made"]}
    assert stat.S_IMODE((folder / "made").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("confine", "problem"),
    [
        ({"uid": 0, "gid": 5}, "no root's"),
        ({"uid": 5}, "given together"),
        ({"limits": {"cpu": 1}}, "confine.limits must be an object of"),
        ({"limits": {"files": -3}}, "confine.files must be a number"),
        ({"umask": 0o1777}, "confine.umask must be a number"),
        ({"shell": 1}, "unknown field confine.shell"),
    ],
)
async def test_a_bad_confinement_is_refused_by_name(rig: KeeperRig, confine: dict[str, object], problem: str) -> None:
    with pytest.raises(LaunchError) as failure:
        await rig.launch(["cat"], confine=confine)
    assert failure.value.code == "invalid_spec"
    assert problem in failure.value.detail
