"""The set's processes as the kernel sees them: memory held, CPU time used."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tether_bench.tap import BenchError
from tether_cli import state

NAMES: Final = ("router", "agent", "backend", "collector", "nats")
_KEEPER: Final = b"keeper/__main__.py"
_UTIME: Final = 11  # of /proc/{pid}/stat, counted behind the command's closing bracket; stime is next
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def pids(set_state: state.SetState, workspace: str | None = None) -> dict[str, int]:
    """By name, with the collector of this workspace where one is named. Raises BenchError."""
    now = state.read(state.Paths(Path(set_state.data)))
    if now is None:
        raise BenchError("the set's state file is gone")
    found = {name: process.pid for name, process in now.children.items()}
    if workspace is not None:
        found["collector"] = _collector(set_state, workspace)
    names = [name for name in NAMES if name != "collector" or workspace is not None]
    if missing := [name for name in names if not found.get(name)]:
        raise BenchError(f"not running: {', '.join(missing)}")
    return {name: found[name] for name in names}


def _collector(set_state: state.SetState, workspace: str) -> int:
    path = state.Paths(Path(set_state.data)).agent / "sandboxes" / f"{set_state.tenant}.{workspace}" / "sandbox.json"
    try:
        return int(json.loads(path.read_bytes())["pid"])
    except (FileNotFoundError, ValueError, KeyError):
        raise BenchError(f"no collector of workspace {workspace}") from None


def keeper_of(execution: str) -> int:
    """By its command line, which names the execution's folder."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if _KEEPER in words and execution.encode() in words:
            return int(folder.name)
    raise BenchError(f"no keeper of {execution}")


def rss_mib(pid: int) -> float:
    """Raises BenchError where there is no such process."""
    for line in _read(pid, "status").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise BenchError(f"process {pid} has ended")


def cpu_s(pid: int) -> float:
    """CPU time of all its threads, user and system. Raises BenchError."""
    text = _read(pid, "stat")
    fields = text[text.rindex(")") + 2 :].split()
    return (int(fields[_UTIME]) + int(fields[_UTIME + 1])) / _TICKS


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise BenchError(f"process {pid} is gone") from None


class CpuMeter:
    """CPU time by process over the stretches between `start` and `stop`."""

    def __init__(self, found: Mapping[str, int]) -> None:
        self._pids = found
        self._begun: dict[str, float] = {}
        self.used_s = dict.fromkeys(found, 0.0)

    def start(self) -> None:
        self._begun = {name: cpu_s(pid) for name, pid in self._pids.items()}

    def stop(self) -> None:
        for name, pid in self._pids.items():
            self.used_s[name] += cpu_s(pid) - self._begun[name]

    def per(self, count: int) -> dict[str, float]:
        """CPU µs for each of `count` things."""
        return {name: round(1e6 * used_s / count, 1) for name, used_s in self.used_s.items()}
