"""rss_mib and keeper_rss_mib: what each process of the set holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tether_bench.rig import END_S, START_S, Rig
from tether_bench.stats import Figure, Target
from tether_bench.tap import BenchError
from tether_bench.throughput import flood
from tether_cli import state

PROCESSES: Final = ("router", "agent", "backend", "collector", "nats")
KEEPER_TARGET_MIB: Final = 12.0
_LOAD_LINES: Final = 20_000
_KEEPER: Final = b"keeper/__main__.py"


def measure(rig: Rig, workspace: str) -> dict[str, float]:
    """MiB by process, of the set and the collector of this workspace."""
    now = state.read(state.Paths(Path(rig.state.data)))
    if now is None:
        raise BenchError("the set's state file is gone")
    pids = {name: process.pid for name, process in now.children.items()}
    pids["collector"] = _collector(Path(rig.state.data), rig.state.tenant, workspace)
    return {name: rss_mib(pids[name]) for name in PROCESSES}


def loaded(rig: Rig, workspace: str, idle: dict[str, float], *, alone: bool) -> list[Figure]:
    """The figures, at the end of a run; `alone`: nothing else has loaded the set."""
    if alone:
        flood(rig, workspace, _LOAD_LINES)
    now = measure(rig, workspace)
    figures = []
    for name in PROCESSES:
        figures.append(Figure("rss_mib", "MiB", (idle[name],), key=f"{name}_idle"))
        figures.append(Figure("rss_mib", "MiB", (now[name],), key=f"{name}_loaded"))
    return figures


def keeper(rig: Rig, workspace: str) -> list[Figure]:
    """Of keepers that each hold a waiting CLI."""
    values: list[float] = []
    for _ in range(3):
        conversation, go = rig.name("keeper"), rig.folder / rig.name("go")
        with rig.tap() as tap, rig.http() as client:
            stream = rig.follow(tap, conversation)
            execution = rig.prompt(client, conversation, f"!say here\n!wait_file {go}", workspace)
            try:
                rig.wait(lambda s=stream: s.has(b'"text.completed"'), START_S, "an agent's start")  # type: ignore[misc]
                values.append(rss_mib(_keeper(execution)))
            finally:
                go.touch()
            rig.wait(lambda s=stream: s.has(b'"execution.ended"'), END_S, "an execution's end")  # type: ignore[misc]
    return [Figure("keeper_rss_mib", "MiB", tuple(values), target=Target("at most", KEEPER_TARGET_MIB))]


def rss_mib(pid: int) -> float:
    """Raises BenchError where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise BenchError(f"process {pid} is gone") from None
    for line in text.splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise BenchError(f"process {pid} has ended")


def _collector(data: Path, tenant: str, workspace: str) -> int:
    path = state.Paths(data).agent / "sandboxes" / f"{tenant}.{workspace}" / "sandbox.json"
    try:
        pid = int(json.loads(path.read_bytes())["pid"])
    except (FileNotFoundError, ValueError, KeyError):
        pid = 0
    if not pid:
        raise BenchError(f"no collector of workspace {workspace}")
    return pid


def _keeper(execution: str) -> int:
    """By its command line, which names the execution's folder."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if _KEEPER in words and execution.encode() in words:
            return int(folder.name)
    raise BenchError(f"no keeper of {execution}")
