"""The entry process as a process: signals, orphans, crashes. A collector of few lines stands under it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support_nats import wait_until
from tether.processes import identify
from tether_collector.init import files

MAIN = Path(files.__file__).with_name("__main__.py")
# Writes one line for each thing that happens to it. `keeper` makes a process that outlives it, as keepers do.
COLLECTOR = """
import os, signal, subprocess, sys, time
log = open(os.environ["LOG"], "a", buffering=1)
def told(number, _):
    log.write(f"signal {number}\\n")
    sys.exit(int(os.environ.get("CODE", "0")) if number == 15 else 0)
for number in (1, 15):
    signal.signal(number, told)
if os.environ.get("KEEPER") and not os.path.exists(os.environ["KEEPER"]):
    code = "import os,time,sys;p=sys.argv[1];f=open(p+'.new','w');f.write(str(os.getpid()));f.close()"
    code += ";os.rename(p+'.new',p);time.sleep(60)"
    if os.fork() == 0:
        os.setsid()
        subprocess.Popen([sys.executable, "-I", "-S", "-c", code, os.environ["KEEPER"]])
        os._exit(0)
log.write(f"up {os.getpid()} {os.environ.get('TOLD')} {signal.pthread_sigmask(signal.SIG_BLOCK, [])}\\n")
time.sleep(60)
"""


class Sandbox:
    """One entry process over COLLECTOR."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "run"
        self.folder.mkdir()
        self.log, self.keeper = root / "log", root / "keeper"
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(MAIN), "run", str(self.folder), "--", sys.executable, "-c", COLLECTOR],
            stderr=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "NOT_PASSED": "on"},
        )

    def put(self, **variables: str) -> None:
        told = {"LOG": str(self.log), "KEEPER": str(self.keeper), "TOLD": "it", **variables}
        give(self.folder, {files.ENVIRONMENT: json.dumps(told), "secret": "s3"})

    def lines(self, kind: str) -> list[str]:
        found = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in found if line.startswith(kind)]

    def until(self, kind: str, count: int) -> str:
        wait_until(lambda: len(self.lines(kind)) >= count, f"{count} lines {kind}")
        return self.lines(kind)[-1]

    def keeper_lives(self) -> bool:
        return self.keeper.exists() and identify(int(self.keeper.read_text())) is not None

    def end(self) -> int:
        return self.process.wait(20)


def give(folder: Path, content: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-I", "-S", str(MAIN), "put", str(folder)]
    return subprocess.run(command, input=json.dumps(content).encode(), capture_output=True, timeout=20, check=False)


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()
    assert made.process.stderr is not None
    made.process.stderr.close()
    pids = [int(line.split()[1]) for line in made.lines("up")]
    pids += [int(made.keeper.read_text())] if made.keeper.exists() else []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_it_waits_for_its_files_and_passes_on_only_what_it_should(sandbox: Sandbox) -> None:
    sandbox.put()
    assert "it" in sandbox.until("up", 1)
    assert stat.S_IMODE((sandbox.folder / "secret").stat().st_mode) == 0o600
    pid = int(sandbox.lines("up")[0].split()[1])
    assert b"NOT_PASSED" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert sandbox.lines("up")[0].endswith("set()"), "no signal is blocked for it"


def test_sighup_puts_a_new_collector_over_a_living_keeper_with_what_was_put_meanwhile(sandbox: Sandbox) -> None:
    sandbox.put()
    sandbox.until("up", 1)
    wait_until(sandbox.keeper.exists, "the keeper")
    sandbox.put(TOLD="news")
    sandbox.process.send_signal(signal.SIGHUP)
    assert "news" in sandbox.until("up", 2)
    assert sandbox.lines("signal") == ["signal 1"]
    assert sandbox.keeper_lives()


def test_a_crashed_collector_is_followed_by_another_over_the_living_keeper(sandbox: Sandbox) -> None:
    sandbox.put()
    first = sandbox.until("up", 1)
    wait_until(sandbox.keeper.exists, "the keeper")
    os.kill(int(first.split()[1]), signal.SIGKILL)
    assert sandbox.until("up", 2) != first
    assert sandbox.keeper_lives()


def test_sigterm_drains_and_the_collectors_end_is_its_own(sandbox: Sandbox) -> None:
    sandbox.put(KEEPER="")
    sandbox.until("up", 1)
    sandbox.process.send_signal(signal.SIGTERM)
    assert sandbox.end() == 0
    assert sandbox.lines("signal") == ["signal 15"]
    assert len(sandbox.lines("up")) == 1


def test_what_a_drain_leaves_behind_is_ended_and_told(sandbox: Sandbox) -> None:
    sandbox.put()
    sandbox.until("up", 1)
    wait_until(sandbox.keeper_lives, "the keeper")
    sandbox.process.send_signal(signal.SIGTERM)
    assert sandbox.end() == 75
    assert not sandbox.keeper_lives()


def test_sigusr1_ends_everything_without_a_drain(sandbox: Sandbox) -> None:
    sandbox.put()
    sandbox.until("up", 1)
    wait_until(sandbox.keeper_lives, "the keeper")
    sandbox.process.send_signal(signal.SIGUSR1)
    assert sandbox.end() == 75
    assert sandbox.lines("signal") == ["signal 1"]
    assert not sandbox.keeper_lives()


def test_orphans_are_reaped(sandbox: Sandbox) -> None:
    sandbox.put()
    sandbox.until("up", 1)
    wait_until(sandbox.keeper_lives, "the keeper")
    keeper = int(sandbox.keeper.read_text())
    os.kill(keeper, signal.SIGKILL)
    gone: Callable[[], bool] = lambda: not Path(f"/proc/{keeper}").exists()  # noqa: E731
    wait_until(gone, "the end of the zombie")


@pytest.mark.parametrize(
    ("content", "remedy"),
    [([], b"must map names to texts"), ({"../x": ""}, b"names must be"), ({"a": 1}, b"must map names to texts")],
)
def test_files_that_cannot_be_used_are_refused_and_none_is_written(tmp_path: Path, content: Any, remedy: bytes) -> None:
    done = give(tmp_path, content)
    assert (done.returncode, remedy in done.stderr) == (1, True)
    assert list(tmp_path.iterdir()) == []
