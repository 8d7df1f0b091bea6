"""A sandbox's collector as a process of its own, in its own session: it outlives the agent service.

A collector is spawned with its boot id in the environment (`TETHER_BOOT`), which no other process has: keepers are
started with an empty environment, CLIs with an allow-list. It is adopted by pid, start time, machine boot and that
variable together. Its output goes to a log file beside the sandbox's own file.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tether.processes import ProcessId, identify, is_running, machine_boot, open_process
from tether_agent.providers import procfs

BOOT_VARIABLE: Final = "TETHER_BOOT"
LOG_BYTES_MAX: Final = 8 << 20  # then it is put aside, once
TAIL_BYTES: Final = 2048
# What a collector may take over of the agent service's environment: where things lie, locale, temp, certificates,
# proxies. Agents' keys are not in it: they go by file.
INHERITED: Final = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "TZ", "LANG", "LANGUAGE"),
    *("LC_ALL", "LC_CTYPE", "LC_MESSAGES", "LC_COLLATE", "LC_NUMERIC", "LC_TIME"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)


class CollectorProcess:
    """One living collector, spawned here or adopted."""

    def __init__(self, identity: ProcessId, descriptor: int) -> None:
        self.identity = identity
        self._descriptor = descriptor

    @property
    def alive(self) -> bool:
        return is_running(self.identity)

    def signal(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            pass

    async def wait(self) -> int | None:
        """Until it has ended; its exit code where it is our child and this is the first to ask, else None."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        # A descriptor of one's own: the reader of a waiter that is being cancelled is removed later than this is added.
        descriptor = os.dup(self._descriptor)
        try:
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
        finally:
            os.close(descriptor)
        return procfs.reap(self.identity.pid)

    def close(self) -> None:
        """Give the descriptor back; the process goes on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def adopt(recorded: ProcessId | None, boot: str) -> CollectorProcess | None:
    """The collector of this boot if it lives: as recorded, or found by its environment where it was spawned right
    before a crash and never written down."""
    candidates: list[ProcessId] = []
    if recorded is not None:
        candidates = [recorded] if procfs.environ_has(recorded.pid, BOOT_VARIABLE, boot) else []
    else:
        candidates = procfs.with_environ(BOOT_VARIABLE, boot)
    for identity in candidates:
        descriptor = open_process(identity)
        if descriptor is not None:
            return CollectorProcess(identity, descriptor)
    return None


def spawn(command: Sequence[str], environment: Mapping[str, str], log: Path) -> CollectorProcess:
    """Start a collector. Raises OSError where that is not possible."""
    bound(log)
    pid = os.posix_spawn(
        command[0],
        list(command),
        dict(environment),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
    )
    # Our own child: its pid cannot be another's before it is reaped.
    descriptor = os.pidfd_open(pid)
    identity = identify(pid)
    if identity is None:  # it has ended already: wait() says so at once
        identity = ProcessId(pid, 0, machine_boot())
    return CollectorProcess(identity, descriptor)


def bound(log: Path) -> None:
    """Put aside what a log holds beyond its bound. A running collector appends to the same file, so it is copied and
    cut, not moved: lines that come in between are lost to the log."""
    try:
        if log.stat().st_size <= LOG_BYTES_MAX:
            return
        shutil.copyfile(log, log.with_name(log.name + ".1"))
        os.truncate(log, 0)
    except FileNotFoundError:
        pass


def tail_of(log: Path) -> str:
    """The last lines of a collector's log, for who asks why it does not start."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return ""
