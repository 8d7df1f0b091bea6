"""rss_growth_mib_10min: whether any process of the set grows under a steady load."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tether_bench import processes
from tether_bench.rig import END_S, Rig, cursor_of
from tether_bench.stats import Figure, Target, Trend, blocks, trend
from tether_bench.tap import BenchError

NAME: Final = "rss_growth_mib_10min"
SOAK_S: Final = 600.0
WARM_UP_S: Final = 120.0  # of the same load before; a shorter soak has a shorter one
VERDICT_S: Final = 300.0  # of soak: below it a slope says nothing of ten minutes
FLOOR_MIB: Final = 2.0  # what an allocator keeps or gives back in one piece
BLOCKS: Final = 20
_CONVERSATIONS: Final = 6
_SAMPLE_S: Final = 1.0
# A tool with output, a stream of deltas, a text: 2.5 s of an agent's usual work.
_SCRIPT: Final = "!tool Bash 20 2000\n!deltas 100 20\n!say done"


@dataclass(slots=True)
class _Sampler:
    """One thread; `values`: process → (seconds, MiB)."""

    pids: dict[str, int]
    values: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    problem: str = ""

    def take(self) -> None:
        now_s = time.monotonic()
        for name, pid in self.pids.items():
            self.values.setdefault(name, []).append((now_s, processes.rss_mib(pid)))


@contextlib.contextmanager
def _sampling(sampler: _Sampler) -> Iterator[None]:
    stop = threading.Event()

    def run() -> None:
        try:
            while not stop.wait(_SAMPLE_S):
                sampler.take()
        except BenchError as error:
            sampler.problem = str(error)

    thread = threading.Thread(target=run, name="bench-rss", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def soak(rig: Rig, soak_s: float) -> list[Figure]:
    """A figure for each process. Raises BenchError where a process ended meanwhile."""
    sampler = _Sampler(processes.pids(rig.state, rig.warm()))
    _load(rig, min(WARM_UP_S, soak_s / 3))
    begun_s = time.monotonic()
    with _sampling(sampler):
        cycles = _load(rig, soak_s)
    if sampler.problem:
        raise BenchError(f"{sampler.problem}: nothing can be said of its memory")
    took_s = time.monotonic() - begun_s
    note = f"{took_s:.0f} s of {cycles * _CONVERSATIONS} executions in {_CONVERSATIONS} conversations"
    return [figure_of(name, values, soak_s, note) for name, values in sampler.values.items()]


def figure_of(name: str, samples: list[tuple[float, float]], soak_s: float, note: str) -> Figure:
    """Growth in ten minutes at the measured slope. Flat: within the noise (see the package), or below `FLOOR_MIB`."""
    found: Trend = trend(blocks(samples, BLOCKS))
    growth = found.slope * SOAK_S
    target = None
    if soak_s >= VERDICT_S:
        noise = max(FLOOR_MIB, (found.slope - found.low) * SOAK_S)
        target = Target("at most", noise, "noise")
    else:
        note = f"{note}; too short for a verdict"
    return Figure(NAME, "MiB", (growth,), target=target, key=name, note=note)


def _load(rig: Rig, seconds: float) -> int:
    """Executions in all conversations, again and again, each time with new readers that begin with the history."""
    until_s = time.monotonic() + seconds
    conversations = [f"soak-{number}" for number in range(1, _CONVERSATIONS + 1)]
    cycles = 0
    while time.monotonic() < until_s:
        with rig.tap() as tap, rig.http() as client:
            streams = [rig.follow(tap, name, cursor_of(client, name)) for name in conversations]
            for name in conversations:
                rig.prompt(client, name, _SCRIPT)
            for stream in streams:
                rig.wait(lambda s=stream: s.closed or s.has(b'"execution.ended"'), END_S, "the executions of one cycle")  # type: ignore[misc]
                if stream.closed:
                    raise BenchError("a reader's stream was closed")
        cycles += 1
    return cycles
