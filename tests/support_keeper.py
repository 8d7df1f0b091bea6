"""Real keepers with real processes for tests: launch, read to a condition, leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tether_collector.keeper_link import Gone, KeeperLink, LaunchSpec, adopt, keeper_lives, launch
from tether_collector.spool_reader import SpoolGap, SpoolReader, SpoolRecord

DEADLINE_S = 20.0
POLL_S = 0.01


async def eventually(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for a condition that nothing announces (the end of a foreign process)."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(POLL_S)


def python_cli(source: str) -> list[str]:
    """The argument list of a small CLI written in Python."""
    return [sys.executable, "-S", "-E", "-u", "-c", source]


def pid_namespaces_permitted() -> bool:
    """True where a child may enter a new PID namespace."""
    pid = os.posix_spawnp("unshare", ["unshare", "--pid", "--fork", "true"], {"PATH": os.environ["PATH"]})
    return os.waitpid(pid, 0)[1] == 0


def living_with(text: str) -> list[int]:
    """Processes (zombies aside) whose command line contains the text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                state = (entry / "stat").read_text().rpartition(") ")[2][:1]
                if text.encode() in (entry / "cmdline").read_bytes() and state not in "ZX":
                    found.append(int(entry.name))
    return found


@dataclass
class Running:
    """A launched keeper and what was read of its spool."""

    link: KeeperLink
    directory: Path
    spec: LaunchSpec
    reader: SpoolReader
    records: list[SpoolRecord] = field(default_factory=list)
    gaps: list[SpoolGap] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.records[-1].number if self.records else 0

    def take(self) -> None:
        """Read what is there."""
        while True:
            batch = self.reader.read(self.last, 1024 * 1024)
            if batch.gap is not None:
                self.gaps.append(batch.gap)
            self.records += batch.records
            if batch.at_end:
                return

    async def until(self, condition: Callable[[SpoolRecord], bool], deadline_s: float = DEADLINE_S) -> SpoolRecord:
        """The first record for which the condition holds, waiting for pushes of the keeper."""
        checked = 0
        async with asyncio.timeout(deadline_s):
            while True:
                self.take()
                for record in self.records[checked:]:
                    if condition(record):
                        return record
                checked = len(self.records)
                await self.link.wait_records(self.last)

    async def until_kind(self, kind: str, data: bytes | None = None) -> SpoolRecord:
        return await self.until(lambda r: r.kind == kind and (data is None or r.data == data))

    async def until_proof(self, deadline_s: float = DEADLINE_S) -> SpoolRecord:
        return await self.until(lambda r: r.kind == "proof", deadline_s)

    def kinds(self) -> list[str]:
        return [record.kind for record in self.records]

    def lines(self, kind: str = "stdout") -> list[bytes]:
        return [record.data for record in self.records if record.kind == kind]

    async def adopt(self) -> Running:
        """The same keeper through a new link and a new reader, as a restarted collector has them."""
        link = await adopt(self.directory, self.spec.nonce)
        assert not isinstance(link, Gone)
        return Running(link, self.directory, self.spec, SpoolReader(self.directory))


class KeeperRig:
    """Launches keepers in one temporary folder and ends all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"PATH": os.environ["PATH"]}
        self._running: list[Running] = []
        self._pids: list[int] = []

    def spec(self, argv: Iterable[str], **changes: Any) -> LaunchSpec:
        plain = LaunchSpec(
            nonce=f"nonce-{uuid.uuid4().hex}",
            execution=f"e{len(self._running)}",
            process_generation=1,
            argv=list(argv),
            cwd=str(self.folder),
            env=self.environment,
        )
        return replace(plain, **changes)

    async def launch(self, argv: Iterable[str], *, directory: Path | None = None, **changes: Any) -> Running:
        spec = self.spec(argv, **changes)
        folder = directory or self.folder / "executions" / spec.execution / str(spec.process_generation)
        link = await launch(folder, spec)
        running = Running(link, folder, spec, SpoolReader(folder))
        self._running.append(running)
        self._pids.append(link.hello.pid)
        return running

    async def __aenter__(self) -> KeeperRig:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for running, pid in zip(self._running, self._pids, strict=True):
            running.link.close()
            running.reader.close()
            if keeper_lives(running.directory):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        for running in self._running:
            await eventually(lambda r=running: not keeper_lives(r.directory), "keeper gone")  # type: ignore[misc]
            crash = running.directory / "keeper.crash"
            assert not crash.exists(), crash.read_text()
