"""collectors_4_lines_per_s: four sandboxes flood at once; one of them alone in the same rounds is the baseline."""

from __future__ import annotations

from typing import Final

from tether_bench.processes import CpuMeter, pids
from tether_bench.rig import WORKSPACE, Rig, lines_of
from tether_bench.stats import Figure
from tether_bench.tap import BenchError
from tether_bench.throughput import FLOOD_S, floods

COLLECTORS: Final = 4
NAME: Final = "collectors_4_lines_per_s"
_BUDGET_S: Final = 8.0  # of a short run's rounds


def four_collectors(rig: Rig) -> list[Figure]:
    """All lines together over the time from the first line of any until the projection has acked the last of all."""
    rounds, lines = (2, 5_000) if rig.short else (3, 20_000)
    rig.warm()
    workspaces = [WORKSPACE, *(f"{WORKSPACE}-{number}" for number in range(2, COLLECTORS + 1))]
    for workspace in workspaces[1:]:
        rig.warm(workspace)
    four: list[float] = []
    one: list[float] = []
    bare: list[float] = []
    cpu = CpuMeter(pids(rig.state))
    for _ in rig.rounds(rounds, _BUDGET_S):
        bare.append(_bare_lines(rig, lines))
        one.append(floods(rig, COLLECTORS * lines, [WORKSPACE])[0])
        cpu.start()
        four.append(floods(rig, lines, workspaces)[0])
        cpu.stop()
    return [
        Figure(
            NAME,
            "lines/s",
            tuple(four),
            {"one": tuple(one), "pipes": tuple(bare)},
            note=f"{COLLECTORS} collectors × {lines:,} lines, stored and projected; one collector: all lines",
            cpu_us=cpu.per(len(four) * COLLECTORS * lines),
        )
    ]


def _bare_lines(rig: Rig, lines: int) -> float:
    """The same agents at once on bare pipes, read by one thread."""
    with rig.tap() as tap, rig.bare_agents(tap, [f"!lines {lines}"] * COLLECTORS) as agents:
        times: list[float] = []
        for pipe, _ in agents:
            rig.wait(lambda p=pipe: p.has(b'"result"'), FLOOD_S, "a bare flood")  # type: ignore[misc]
            times += [received_s for received_s, line in lines_of(pipe) if line["type"] == "text"]
    if len(times) != COLLECTORS * lines:
        raise BenchError(f"{len(times)} of {COLLECTORS * lines} lines came over bare pipes")
    return len(times) / (max(times) - min(times))
