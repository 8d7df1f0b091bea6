"""rss_mib and keeper_rss_mib: what each process of the set holds."""

from __future__ import annotations

from typing import Final

from tether_bench import processes
from tether_bench.rig import END_S, START_S, Rig
from tether_bench.stats import Figure, Target
from tether_bench.throughput import flood

KEEPER_TARGET_MIB: Final = 12.0
_LOAD_LINES: Final = 20_000


def measure(rig: Rig) -> dict[str, float]:
    """MiB by process, of the set and of the one sandbox."""
    return {name: processes.rss_mib(pid) for name, pid in processes.pids(rig.state, rig.warm()).items()}


def loaded(rig: Rig, idle: dict[str, float], *, alone: bool) -> list[Figure]:
    """The figures, at the end of a run; `alone`: nothing else has loaded the set."""
    if alone:
        flood(rig, _LOAD_LINES)
    figures = []
    for name, value in measure(rig).items():
        figures.append(Figure("rss_mib", "MiB", (idle[name],), key=f"{name}_idle"))
        figures.append(Figure("rss_mib", "MiB", (value,), key=f"{name}_loaded"))
    return figures


def keeper(rig: Rig) -> list[Figure]:
    """Of keepers that each hold a waiting CLI."""
    rig.warm()
    values: list[float] = []
    for _ in range(3):
        conversation, go = rig.name("keeper"), rig.folder / rig.name("go")
        with rig.tap() as tap, rig.http() as client:
            stream = rig.follow(tap, conversation)
            execution = rig.prompt(client, conversation, f"!say here\n!wait_file {go}")
            try:
                rig.wait(lambda s=stream: s.has(b'"text.completed"'), START_S, "an agent's start")  # type: ignore[misc]
                values.append(processes.rss_mib(processes.keeper_of(execution)))
            finally:
                go.touch()
            rig.wait(lambda s=stream: s.has(b'"execution.ended"'), END_S, "an execution's end")  # type: ignore[misc]
    return [Figure("keeper_rss_mib", "MiB", tuple(values), target=Target("at most", KEEPER_TARGET_MIB))]
