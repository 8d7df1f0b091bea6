"""See the package's docstring."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from tether.errors import TetherError
from tether_bench import report, session
from tether_bench.__main__ import environment
from tether_bench.compare import rounds, table
from tether_bench.compare.contender import Contender
from tether_bench.compare.install import InstallError, install, pins
from tether_bench.compare.others import OTHERS
from tether_bench.compare.rounds import Results
from tether_bench.compare.tether import Pipe, Tether
from tether_bench.rig import Rig
from tether_bench.tap import BenchError
from tether_cli.output import CliError

LIMIT_S: Final = 1200.0
NAMES: Final = ("tether", *OTHERS, "pipe")


@dataclass(slots=True)
class Compared:
    """`missing`: what could not be measured, with the reason."""

    results: dict[str, Results] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def contenders(rig: Rig, names: Sequence[str], compared: Compared) -> list[Contender]:
    """Those that are there, in order."""
    found: list[Contender] = []
    for name in names:
        if name in OTHERS:
            pin_name, make = OTHERS[name]
            pin = pins()[pin_name]
            if not pin.installed:
                compared.missing.append(f"{name}: not installed (python -m tether_bench.compare install)")
                continue
            found.append(make(pin, rig.folder))
        else:
            found.append(Tether(rig) if name == "tether" else Pipe(rig))
    return found


def compare(rig: Rig, names: Sequence[str]) -> Compared:
    compared = Compared()
    with contextlib.ExitStack() as stack:
        up: list[Contender] = []
        for contender in contenders(rig, names, compared):
            try:
                contender.start()
            except BenchError as error:
                compared.missing.append(f"{contender.name}: {error}")
                continue
            stack.callback(contender.stop)
            up.append(contender)
            compared.results[contender.name] = Results()
            compared.versions[contender.name] = contender.version
        _measure(rig, up, compared)
    return compared


def _measure(rig: Rig, up: Sequence[Contender], compared: Compared) -> None:
    """Every contender in turn, in each round."""
    seconds = 1.0 if rig.short else 3.0
    number = 1 if rig.short else 3
    for _ in range(number):
        for contender in up:
            into = compared.results[contender.name]
            work = partial(rounds.latency, rig, contender, 1, seconds, into)
            _attempt(rig, compared, contender, "latency x1", work)
            work = partial(rounds.latency, rig, contender, 20, seconds, into)
            _attempt(rig, compared, contender, "latency x20", work)
            work = partial(rounds.flood_and_reconnect, rig, contender, into)
            _attempt(rig, compared, contender, "flood, reconnect", work)
    for _ in range(number):
        for contender in up:
            for what in contender.kills:
                work = partial(rounds.kill, rig, contender, what, compared.results[contender.name])
                _attempt(rig, compared, contender, f"kill {what}", work)


def _attempt(rig: Rig, compared: Compared, contender: Contender, what: str, work: Callable[[], None]) -> None:
    if rig.stopping.is_set():
        return
    begun_s = time.monotonic()
    try:
        work()
    except (BenchError, TetherError, OSError, KeyError) as error:
        compared.missing.append(f"{contender.name}, {what}: {error or type(error).__name__}")
        rig.say(compared.missing[-1])
        return
    rig.say(f"{contender.name}, {what}: {time.monotonic() - begun_s:.1f} s")


def _install(names: Sequence[str]) -> int:
    failed = False
    for name, pin in pins().items():
        if names and name not in names:
            continue
        try:
            told = "installed" if install(pin) else "was there"
        except InstallError as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        print(f"{name} {pin.version}: {told} ({pin.folder})")
    return 1 if failed else 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tether_bench.compare", description="Tether beside what one would pick instead."
    )
    parser.add_argument("do", choices=["install", "run"])
    parser.add_argument("--short", action="store_true", help="one short round")
    parser.add_argument("--only", nargs="+", default=[], choices=NAMES, metavar="CONTENDER", help=", ".join(NAMES))
    parser.add_argument("--report", type=Path, default=Path("reports/compare.json"), metavar="PATH")
    given = parser.parse_args(arguments)
    if given.do == "install":
        return _install(given.only)

    def say(text: str) -> None:
        print(f"compare: {text}", file=sys.stderr, flush=True)

    names = [name for name in NAMES if not given.only or name in given.only]
    where = environment(["run", *arguments[1:]]) | {"command": " ".join(["python -m tether_bench.compare", *arguments])}
    try:
        compared, _ = asyncio.run(
            session.until_signal(lambda rig: compare(rig, names), short=given.short, say=say, limit_s=LIMIT_S)
        )
    except CliError as error:
        say(str(error))
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("interrupted")
        return 130
    report.write(given.report, table.document(compared.results, compared.versions, compared.missing, where))
    print(table.table(compared.results, compared.versions))
    for reason in compared.missing:
        print(f"not measured: {reason}")
    print(f"written to {given.report}")
    return 0 if compared.results and not compared.missing else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
