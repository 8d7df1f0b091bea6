"""`python -m tether_fuzz [TARGET…] [--seconds N] [--seed S] [--short]`; `--list` names the targets.

`--seconds` is for each group (contract, collector, http). The first two run beside each other, each in one child at a
time, then the third; so all of it takes twice the seconds, and the starting and ending of what is asked. A group's
seconds are shared among its targets.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tether_fuzz import corpus, edge
from tether_fuzz.engine import check
from tether_fuzz.guard import Finding, Result, keep, run_all
from tether_fuzz.targets import TARGETS

SECONDS: Final = 60.0
SHORT_SECONDS: Final = 24.0
REPORTS: Final = Path("reports/fuzz")
HTTP: Final = "http"


def main() -> int:
    options = _options()
    if options.list:
        for target in TARGETS.values():
            print(f"{target.name:32}{target.group}")
        print(f"{HTTP:32}{HTTP}")
        return 0
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    seconds = options.seconds or (SHORT_SECONDS if options.short else SECONDS)
    chosen = options.targets or [*TARGETS, HTTP]
    print(f"seed {seed}, {seconds:g} s for each group", flush=True)
    begun_s = time.monotonic()
    results = _in_groups(chosen, seconds, seed, update=options.update_corpus)
    if HTTP in chosen:
        results += edge.run(seconds, seed)
    return _report(results, seed, time.monotonic() - begun_s)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tether_fuzz", description="Fuzzes whatever reads what others wrote.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all of them, where none is named")
    parser.add_argument("--seconds", type=float, help=f"for each group; {SECONDS:g} where it is not given")
    parser.add_argument("--seed", type=int, help="drawn and printed where it is not given")
    parser.add_argument("--short", action="store_true", help=f"{SHORT_SECONDS:g} s for each group")
    parser.add_argument("--list", action="store_true", help="name the targets")
    parser.add_argument("--update-corpus", action="store_true", help="write the corpus anew, from what the run found")
    options = parser.parse_args()
    unknown = sorted(set(options.targets) - {*TARGETS, HTTP})
    if unknown:
        parser.error(f"unknown target {unknown[0]}; --list names them")
    return options


def _in_groups(chosen: list[str], seconds: float, seed: int, *, update: bool) -> list[Result]:
    groups: dict[str, list[str]] = {}
    for name in chosen:
        if name != HTTP:
            groups.setdefault(TARGETS[name].group, []).append(name)
    with ThreadPoolExecutor(max_workers=max(1, len(groups))) as pool:
        runs = [
            pool.submit(run_all, names, seconds / len(names), seed, workers=1, update=update)
            for names in groups.values()
        ]
        return [result for run in runs for result in run.result()]


def _report(results: list[Result], seed: int, took_s: float) -> int:
    print(f"{'target':32}{'inputs':>10}{'lines':>8}{'features':>10}{'findings':>10}")
    for result in results:
        print(f"{result.target:32}{result.inputs:>10}{result.lines:>8}{result.features:>10}{len(result.findings):>10}")
    findings = [finding for result in results for finding in result.findings]
    for finding in findings:
        _show(finding)
    print(f"{sum(result.inputs for result in results)} inputs in {took_s:.0f} s, {len(findings)} findings, seed {seed}")
    return 1 if findings else 0


def _show(finding: Finding) -> None:
    path = keep(finding, REPORTS)
    print(f"\n! {finding.target}: {finding.kind}: {finding.where}\n  {path}\n  {finding.data[:200]!r}")
    print("\n".join(f"  {line}" for line in finding.text.splitlines()[-8:]))


def replay(name: str, *, only: str = "*") -> list[str]:
    """What is wrong with the corpus of a target now, for each input that breaks it. `only`: names of files."""
    target = TARGETS[name]
    found = []
    for path in corpus.files(name):
        if not path.match(only):
            continue
        told = check(target, path.read_bytes())
        if isinstance(told, tuple):
            found.append(f"{name}/{path.name}: {told[0]} {told[1]}\n{told[2]}")
    return found


if __name__ == "__main__":
    sys.exit(main())
