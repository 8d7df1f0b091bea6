"""resume_warm_ms_p95, resume_cold_s_p95: a prompt to a suspended sandbox, until the resumed session's first event."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from tether.limits import MIB
from tether_bench.draining import GRACE_S
from tether_bench.rig import Rig
from tether_bench.sandboxes import RECALL, directory, drained, empty, fill, made, turn
from tether_bench.stats import Figure, Target, percentile

WARM: Final = "resume_warm_ms_p95"
COLD: Final = "resume_cold_s_p95"
ABOVE_MS: Final = 500.0
_COLD_BYTES: Final = 1 * MIB  # of files beside the session


def warm(rig: Rig) -> list[Figure]:
    """Each round: as many starts in a sandbox that is awake, then a conversation that is suspended and goes on."""
    rounds, times = (1, 5) if rig.short else (3, 10)
    resumed: list[float] = []
    claimed: list[float] = []
    own: list[float] = []
    for _ in rig.rounds(rounds, 0.0):
        own.append(_awake(rig, times))
        told = _resumed(rig, times, lambda workspace: drained(rig, workspace))
        resumed.append(percentile([printed for _, printed in told], 0.95))
        claimed.append(percentile([claim for claim, _ in told], 0.95))
    baselines = {"own start": tuple(own), "claim": tuple(claimed)}
    figure = Figure(WARM, "ms", tuple(resumed), baselines, note="POST → the resumed session's first event")
    return [with_target(figure)]


def with_target(figure: Figure) -> Figure:
    """At most ABOVE_MS above the CLI's own start in the same rounds."""
    limit = figure.baseline("own start") + ABOVE_MS
    target = Target("at most", limit, f"own start + {ABOVE_MS:g}")
    return Figure(figure.name, figure.unit, figure.rounds, figure.baselines, target, note=figure.note)


def cold(rig: Rig) -> list[Figure]:
    """The same with a checkpoint in the blob store and a volume that is gone."""
    rounds, times = (1, 3) if rig.short else (2, 8)
    resumed: list[float] = []
    own: list[float] = []
    for _ in rig.rounds(rounds, 0.0):
        own.append(_awake(rig, times) / 1000)
        told = _resumed(rig, times, lambda workspace: _moved(rig, workspace))
        resumed.append(percentile([printed for _, printed in told], 0.95) / 1000)
    note = "restored from the blob store with 1 MiB of files"
    return [Figure(COLD, "s", tuple(resumed), {"own start": tuple(own)}, note=note)]


def _moved(rig: Rig, workspace: str) -> None:
    """A new checkpoint in the blob store, and no volume."""
    fill(directory(rig, workspace) / "files", _COLD_BYTES)
    drained(rig, workspace, store="both", include="workspace", grace_s=GRACE_S)
    empty(rig, workspace)


def _awake(rig: Rig, times: int) -> float:
    """The CLI's own start, p95 in ms: new conversations in a sandbox that is new and has run one."""
    with made(rig, "awake") as (workspace,):
        turn(rig, rig.name("awake"), RECALL, workspace)
        return percentile([turn(rig, rig.name("awake"), RECALL, workspace).printed_ms for _ in range(times)], 0.95)


def _resumed(rig: Rig, times: int, sleep: Callable[[str], object]) -> list[tuple[float, float]]:
    """ms to claim and first event after each sleep of one conversation's sandbox; each time the agent must remember
    every turn before, once."""
    took: list[tuple[float, float]] = []
    with made(rig, "resume") as (workspace,):
        turn(rig, workspace, RECALL, workspace)  # a conversation by the same name
        for number in range(1, times + 1):
            sleep(workspace)
            told = turn(rig, workspace, RECALL, workspace)
            took.append((told.claimed_ms, told.printed_ms))
            rig.losses.count("turns that a resumed session remembers", expected=number, distinct=remembered(told.said))
    return took


def remembered(said: str) -> int:
    """How many earlier turns the agent says that it remembers; 0 where it says something else."""
    found = re.match(r"I remember (\d+) earlier turns", said)
    return int(found[1]) if found else 0
