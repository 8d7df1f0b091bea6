"""`python -m tether_chaos --seed N --rounds K --seconds S`: see the package. Writes `reports/chaos.json`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import structlog

from tether_chaos.plan import SERVICES, draw
from tether_chaos.round import Result, Round
from tether_cli.output import CliError

_SHOWN_MAX = 40


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tether_chaos", description="Load, seeded faults, and the oracle's verdict.")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the others count on from it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long faults hit in each round")
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--workspaces", type=int, default=3)
    parser.add_argument("--services", default=",".join(SERVICES), help="which are hit, by comma; empty: none")
    parser.add_argument("--keep", type=Path, help="a folder for the data of rounds that fail")
    options = parser.parse_args(argv)
    unknown = sorted({name for name in options.services.split(",") if name} - set(SERVICES))
    if unknown:
        parser.error(f"--services: unknown {', '.join(unknown)}; known: {', '.join(SERVICES)}")
    return options


def one_round(options: argparse.Namespace, seed: int) -> Result:
    services = tuple(name for name in options.services.split(",") if name)
    plan = draw(
        seed,
        conversations=options.conversations,
        workspaces=options.workspaces,
        seconds=options.seconds,
        services=services,
    )
    folder = Path(tempfile.mkdtemp(prefix="tether-chaos-"))
    try:
        result = asyncio.run(Round(plan, folder).run())
        if result.violations and options.keep is not None:
            shutil.copytree(
                folder, options.keep / f"seed-{seed}", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock")
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def show(result: Result, options: argparse.Namespace) -> None:
    word = "FAIL" if result.violations else "ok"
    print(
        f"seed {result.seed}: {word}  {len(result.faults_done)} faults, {result.prompts} prompts, "
        f"{result.executions} executions, {result.events} events, readers broken off {result.breaks} times, "
        f"{result.seconds:.0f} s, all over {result.recovery_s:.1f} s after the last fault",
        flush=True,
    )
    if not result.violations:
        return
    for line in result.faults_done:
        print(f"    {line}")
    for line in result.violations[:_SHOWN_MAX]:
        print(f"  ! {line}")
    print(
        f"  again: python -m tether_chaos --seed {result.seed} --rounds 1 --seconds {options.seconds:g} "
        f"--conversations {options.conversations} --workspaces {options.workspaces} --services {options.services} "
        "--keep DIR",
        flush=True,
    )


def report(results: list[Result]) -> bool:
    clean = bool(results) and not any(result.violations for result in results)
    figures = {
        "rounds": len(results),
        "seeds": [result.seed for result in results],
        "failed_seeds": [result.seed for result in results if result.violations],
        "faults": sum(len(result.faults_done) for result in results),
        "prompts": sum(result.prompts for result in results),
        "executions": sum(result.executions for result in results),
        "events": sum(result.events for result in results),
        "violations": sum(len(result.violations) for result in results),
        "recovery_s_max": round(max((result.recovery_s for result in results), default=0.0), 1),
    }
    environment = {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count()}
    Path("reports").mkdir(exist_ok=True)
    value = {"verdict": "pass" if clean else "fail", "figures": figures, "environment": environment}
    Path("reports/chaos.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    return clean


def main() -> int:
    options = arguments()
    # What a client says when its server is killed is expected here.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))  # ends a round's set in order
    results: list[Result] = []
    try:
        for seed in range(options.seed, options.seed + options.rounds):
            results.append(one_round(options, seed))
            show(results[-1], options)
    except CliError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    clean = report(results)
    print("chaos: nothing lost, nothing doubled, nothing ran twice" if clean else "chaos: FAILED")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
