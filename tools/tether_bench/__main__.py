"""See the package's docstring for what is measured and how."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tether.errors import TetherError
from tether_bench import (
    answering,
    attaching,
    collectors,
    draining,
    first_event,
    latency,
    memory,
    readers,
    report,
    resuming,
    session,
    soak,
    takeover,
    throughput,
)
from tether_bench.rig import Rig
from tether_bench.stats import Figure
from tether_bench.tap import BenchError
from tether_cli.nats_server import find_binary
from tether_cli.output import CliError

SHORT_S: Final = 142.0  # of measuring; the rest of 150 s is the set's end
FULL_S: Final = 1200.0
Measure = Callable[[Rig, Sequence[str]], list[Figure]]

# In this order. Each group measures its figures together.
GROUPS: Final[tuple[tuple[tuple[str, ...], Measure], ...]] = (
    (("added_latency_ms_p50_x1",), lambda rig, names: latency.added_latency(rig, 1, names)),
    (
        ("added_latency_ms_p50_x20", "added_latency_ms_p99_x20"),
        lambda rig, names: latency.added_latency(rig, 20, names),
    ),
    (("added_latency_ms_p50_x100",), lambda rig, names: latency.added_latency(rig, 100, names)),
    (("first_event_ms_p50", "first_output_ms_p50"), lambda rig, _: first_event.first_event(rig)),
    ((answering.NAME, answering.RECEIPT), lambda rig, _: answering.answers(rig)),
    ((takeover.NAME,), lambda rig, _: takeover.takeovers(rig)),
    (
        ("collector_lines_per_s", "collector_stored_lines_per_s"),
        lambda rig, _: throughput.collector_lines(rig),
    ),
    ((collectors.NAME,), lambda rig, _: collectors.four_collectors(rig)),
    (("projection_events_per_s",), lambda rig, _: throughput.projection_events(rig)),
    ((readers.CUT, readers.P99, readers.P50), lambda rig, _: readers.thousand_readers(rig)),
    (tuple(attaching.name_of(size) for size in attaching.SIZES), attaching.attaches),
    ((soak.NAME,), lambda rig, _: soak.soak(rig, rig.soak_s)),
)
# After the memory is looked at: they have many sandboxes, and hundreds of MiB in the blob store.
LIVES: Final[tuple[tuple[tuple[str, ...], Measure], ...]] = (
    ((resuming.WARM,), lambda rig, _: resuming.warm(rig)),
    ((resuming.COLD,), lambda rig, _: resuming.cold(rig)),
    ((draining.drain_name(draining.FEW),), lambda rig, _: draining.drains(rig, draining.FEW)),
    ((draining.drain_name(draining.MANY),), lambda rig, _: draining.drains(rig, draining.MANY)),
    (
        (*(draining.checkpoint_name(size) for size in draining.SIZES_MIB), draining.STORED),
        draining.checkpoints,
    ),
)
MEMORY: Final = ("rss_mib", "keeper_rss_mib")
NOT_SHORT: Final = frozenset(
    {"added_latency_ms_p50_x100", draining.drain_name(draining.MANY), draining.checkpoint_name(500)}
)
ONLY_SHORT: Final = frozenset({draining.drain_name(draining.FEW)})  # or by name
ASKED: Final = frozenset({soak.NAME})  # only by name, or by `--soak-s`
NAMES: Final = (
    *(name for names, _ in GROUPS for name in names),
    *MEMORY,
    *(name for names, _ in LIVES for name in names),
)


def chosen(only: Sequence[str], *, short: bool, soaked: bool = False) -> list[str]:
    """The figures to measure, in order. Each of `only` is a name, else the beginning of names. `soaked`: the soak as
    well. Raises ValueError."""
    picked: set[str] = set()
    for asked in only:
        found = {asked} if asked in NAMES else {name for name in NAMES if name.startswith(asked)}
        if not found:
            raise ValueError(f"no figure is called {asked}; there are {', '.join(NAMES)}")
        picked |= found
    if not only:
        picked = set(NAMES) - ASKED - (NOT_SHORT if short else ONLY_SHORT)
    if soaked:
        picked.add(soak.NAME)
    return [name for name in NAMES if name in picked]


def measured(rig: Rig, names: Sequence[str]) -> list[Figure]:
    """Every figure of `names`; one that cannot be measured has a problem instead of a value."""
    figures: list[Figure] = []
    idle: dict[str, float] = {}
    if "rss_mib" in names:

        def begin() -> list[Figure]:
            idle.update(memory.measure(rig))
            return []

        figures += _attempt(rig, ["rss_mib"], begin)
    if "keeper_rss_mib" in names:
        figures += _attempt(rig, ["keeper_rss_mib"], lambda: memory.keeper(rig))
    figures += _of_groups(rig, names, GROUPS)
    if idle:
        alone = not any(name in names for group, _ in GROUPS for name in group)
        figures += _attempt(rig, ["rss_mib"], lambda: memory.loaded(rig, idle, alone=alone))
    return figures + _of_groups(rig, names, LIVES)


def _of_groups(rig: Rig, names: Sequence[str], groups: Sequence[tuple[tuple[str, ...], Measure]]) -> list[Figure]:
    figures: list[Figure] = []
    for group, measure in groups:
        wanted = [name for name in names if name in group]
        if wanted:
            figures += _attempt(rig, wanted, lambda wanted=wanted, measure=measure: measure(rig, wanted))  # type: ignore[misc]
    return figures


def _attempt(rig: Rig, names: Sequence[str], measure: Callable[[], list[Figure]]) -> list[Figure]:
    if rig.stopping.is_set():
        return [Figure(name, "", problem="stopped") for name in names]
    begun_s = time.monotonic()
    try:
        figures = measure()
    except (BenchError, TetherError, OSError, KeyError) as error:
        rig.say(f"{', '.join(names)}: {error or type(error).__name__}")
        return [Figure(name, "", problem=str(error) or type(error).__name__) for name in names]
    rig.say(f"{', '.join(names)}: {time.monotonic() - begun_s:.0f} s")
    return figures


def environment(arguments: Sequence[str]) -> dict[str, Any]:
    """What the figures depend on; no date and no name of the machine."""
    version = subprocess.run([find_binary(), "--version"], capture_output=True, text=True, check=False, timeout=10)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "command": " ".join(["python -m tether_bench", *arguments]),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / (1 << 30), 1),
        "load_1m_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "nats_server": version.stdout.strip().removeprefix("nats-server: "),
        "database": "sqlite",
    }


def allowed_s(names: Sequence[str], *, short: bool, seconds: float | None, soak_s: float) -> float:
    """How long the measuring may take; a soak comes on top."""
    longer_s = soak.WARM_UP_S + soak_s if soak.NAME in names else 0.0
    return (seconds or (SHORT_S if short else FULL_S)) + longer_s


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tether_bench", description="Measure Tether on this machine.")
    parser.add_argument("--short", action="store_true", help="fewer and shorter rounds; within 150 s on two cores")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="these figures (names or their beginnings)"
    )
    parser.add_argument("--seconds", type=float, metavar="N", help="time for all of it, on a slower machine")
    parser.add_argument(
        "--soak-s",
        type=float,
        metavar="N",
        help=f"{soak.NAME} over so many seconds as well (with --only: {soak.SOAK_S:g})",
    )
    parser.add_argument("--report", type=Path, default=Path("reports/bench.json"), metavar="PATH")
    given = parser.parse_args(arguments)
    try:
        names = chosen(given.only, short=given.short, soaked=given.soak_s is not None)
    except ValueError as error:
        parser.error(str(error))

    def say(text: str) -> None:
        print(f"bench: {text}", file=sys.stderr, flush=True)

    where = environment(arguments)
    figures: list[Figure] = []
    try:
        with contextlib.suppress(BenchError):  # told by the figure that needs them; the set inherits the limit
            readers.raise_descriptors()
        soak_s = given.soak_s or soak.SOAK_S
        figures, rig = asyncio.run(
            session.until_signal(
                lambda rig: measured(rig, names),
                short=given.short,
                say=say,
                limit_s=allowed_s(names, short=given.short, seconds=given.seconds, soak_s=soak_s),
                soak_s=soak_s,
                log_bytes=draining.log_bytes(names, short=given.short),
            )
        )
    except CliError as error:
        say(str(error))
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("interrupted")
        return 130
    content = report.document(figures, rig.losses, where)
    report.write(given.report, content)
    print(report.table(figures))
    print("\n" + "\n".join(report.cpu_lines(figures)))
    print(f"lost {rig.losses.lost}, duplicated {rig.losses.duplicated}")
    for example in rig.losses.examples:
        print(f"  {example}")
    print(f"verdict: {content['verdict']}; written to {given.report}")
    return 0 if content["verdict"] == "pass" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
