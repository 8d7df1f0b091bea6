"""`python -m tether_chaos --seed N --rounds K --seconds S`: see the package. Writes `reports/chaos.json`.

CHAOS_SEED, CHAOS_MINUTES            in place of --seed and --minutes
--state FILE --until-kills 1000      goes on from what FILE holds, until there are so many kills
--failpoints [--only NAME…]          a kill at every failpoint of the code instead of seeded rounds
--flatness N                         restarts every service N times and looks at what grows
--flat-load EVENTS                   so many events of load, and what grows; an hour is 700000
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import structlog

from tether_chaos import report
from tether_chaos.judge import COLUMNS
from tether_chaos.plan import SERVICES, draw
from tether_chaos.round import Result, Round
from tether_cli.output import CliError

_SHOWN_MAX = 40
_SETUP = ("seconds", "conversations", "workspaces", "services", "rate", "nodes")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tether_chaos", description="Load, seeded faults, and the oracle's verdict.")
    seed = os.environ.get("CHAOS_SEED", "1")
    minutes = os.environ.get("CHAOS_MINUTES")
    parser.add_argument("--seed", type=int, default=seed, help="of the first round; the others count on from it")
    parser.add_argument("--stride", type=int, default=1, help="from one round's seed to the next: shards share no seed")
    parser.add_argument("--rounds", type=int, help="how many (3, where nothing else ends the run)")
    parser.add_argument("--minutes", type=float, default=minutes, help="no further round is begun after so long")
    parser.add_argument("--until-kills", type=int, help="rounds until so many kills are in the state")
    parser.add_argument("--state", type=Path, help="a file that keeps every round; a later run goes on from it")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long faults hit in each round")
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--workspaces", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1.0, help="faults a second")
    parser.add_argument("--nodes", type=int, choices=(1, 3), default=1, help="nats-servers; 3: a cluster")
    parser.add_argument("--services", default=",".join(SERVICES), help="which are hit, by comma; empty: none")
    parser.add_argument("--keep", type=Path, help="a folder for the data of rounds that fail")
    parser.add_argument("--failpoints", action="store_true", help="a kill at each failpoint of the code")
    parser.add_argument("--only", default="", help="with --failpoints: only names that contain this")
    parser.add_argument("--flatness", type=int, metavar="N", help="restarts of each service")
    parser.add_argument("--flat-load", type=int, metavar="EVENTS", help="load of so many events; an hour is 700000")
    options = parser.parse_args(argv)
    unknown = sorted({name for name in options.services.split(",") if name} - set(SERVICES))
    if unknown:
        parser.error(f"--services: unknown {', '.join(unknown)}; known: {', '.join(SERVICES)}")
    if options.rounds is None and options.minutes is None and options.until_kills is None:
        options.rounds = 3
    return options


def one_round(options: argparse.Namespace, seed: int) -> Result:
    services = tuple(name for name in options.services.split(",") if name)
    plan = draw(
        seed,
        conversations=options.conversations,
        workspaces=options.workspaces,
        seconds=options.seconds,
        services=services,
        rate=options.rate,
        nodes=options.nodes,
    )
    folder = Path(tempfile.mkdtemp(prefix="tether-chaos-"))
    try:
        keep = None if options.keep is None else options.keep / f"seed-{seed}"
        result = asyncio.run(Round(plan, folder, keep).run())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def show(result: Result, options: argparse.Namespace) -> None:
    word = "FAIL" if result.violations else "ok"
    print(
        f"seed {result.seed}: {word}  {sum(result.kills.values())} kills in {len(result.faults_done)} faults, "
        f"{result.prompts} prompts, {result.executions} executions, {result.events} events, "
        f"readers broken off {result.breaks} times, {result.seconds:.0f} s, "
        f"all over {result.recovery_s:.1f} s after the last fault, "
        f"{len(result.operations)} operations on sandboxes, {result.drained} executions cut by a drain",
        flush=True,
    )
    if not result.violations:
        return
    for line in [*result.faults_done, *result.operations]:
        print(f"    {line}")
    for line in result.violations[:_SHOWN_MAX]:
        print(f"  ! {line}")
    setup = " ".join(f"--{name} {getattr(options, name)}" for name in _SETUP)
    print(f"  again: python -m tether_chaos --seed {result.seed} --rounds 1 {setup} --keep DIR", flush=True)


def rounds(options: argparse.Namespace, state: report.State) -> None:
    setup: dict[str, Any] = {name: getattr(options, name) for name in _SETUP}
    began_s, done = time.monotonic(), 0
    while True:
        enough = (
            (options.rounds is not None and done >= options.rounds)
            or (options.minutes is not None and time.monotonic() - began_s >= 60 * options.minutes)
            or (options.until_kills is not None and state.kills >= options.until_kills)
        )
        if enough:
            return
        result = one_round(options, state.next_seed(options.seed, options.stride))
        state.add(report.entry(result, setup))
        show(result, options)
        done += 1


def seeded(options: argparse.Namespace) -> int:
    try:
        state = report.State(options.state)
    except (ValueError, KeyError) as error:
        raise CliError(f"--state: {error}", remedy="name a file of this tool, or a new one") from None
    rounds(options, state)
    clean = report.write(state.rounds)
    print(report.table(state.rounds))
    if clean:
        print("chaos: nothing lost, nothing doubled, nothing ran twice")
        return 0
    counted = any(one["counts"][column] for one in state.rounds for column in COLUMNS)
    what = "" if counted else " (no event was lost or doubled; what was found is above)"
    print(f"chaos: FAILED{what}; seeds {', '.join(map(str, report.failed(state.rounds)))}")
    return 1


def main() -> int:
    options = arguments()
    # What a client says when its server is killed is expected here.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs have it ignored
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))  # ends a round's set in order
    try:
        if options.failpoints:
            from tether_chaos.failpoint_run import command as failpoints

            return failpoints(options.only, options.keep)
        if options.flatness is not None:
            from tether_chaos.flatness import command as flatness

            return flatness(options.flatness)
        if options.flat_load is not None:
            from tether_chaos.flat_load import command as flat_load

            return flat_load(options.flat_load)
        return seeded(options)
    except CliError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
