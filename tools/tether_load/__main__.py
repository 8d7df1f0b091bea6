"""`python -m tether_load [prompts] [readers] [noisy] [--short]`: see the package. Writes `reports/load.json`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from tether.errors import TetherError
from tether_bench.readers import raise_descriptors
from tether_bench.tap import BenchError
from tether_cli.output import CliError
from tether_load import noisy, prompts, readers, report
from tether_load.report import Finding

NAMES: Final = ("prompts", "readers", "noisy")
DESCRIPTORS: Final = 8192  # a thousand readers, and as many prompts under way, from both ends


def _load(name: str, *, short: bool, say: Callable[[str], None]) -> Coroutine[Any, Any, Finding]:
    match name:
        case "prompts":
            return prompts.run(prompts.SHORT if short else prompts.FULL, say)
        case "readers":
            return readers.run(readers.SHORT if short else readers.FULL, say)
        case _:
            return noisy.run(noisy.SHORT if short else noisy.FULL, say)


async def measured(names: Sequence[str], *, short: bool, say: Callable[[str], None]) -> list[Finding]:
    """One after the other, each with a set of its own."""
    task = asyncio.current_task()
    assert task is not None
    with contextlib.suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    findings = []
    for name in names:
        begun_s = time.monotonic()
        try:
            finding = await _load(name, short=short, say=say)
        except (BenchError, TetherError, CliError, OSError) as error:
            finding = Finding(name, faults=[f"it could not be measured: {error or type(error).__name__}"])
        say(f"{name}: {finding.verdict} after {time.monotonic() - begun_s:.0f} s")
        findings.append(finding)
    return findings


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tether_load", description="Many tenants at once on this machine.")
    parser.add_argument("loads", nargs="*", metavar="LOAD", help=f"of {', '.join(NAMES)}; all where none is named")
    parser.add_argument("--short", action="store_true", help="a small part of each, below 40 s on two cores")
    parser.add_argument("--report", type=Path, default=Path("reports/load.json"), metavar="PATH")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.loads) - set(NAMES)):
        parser.error(f"no load is called {unknown[0]}; there are {', '.join(NAMES)}")

    def say(text: str) -> None:
        print(f"load: {text}", file=sys.stderr, flush=True)

    where = report.environment() | {"command": " ".join(["python -m tether_load", *arguments])}
    with contextlib.suppress(BenchError):  # said by the load that needs them
        raise_descriptors(DESCRIPTORS)
    names = [name for name in NAMES if not given.loads or name in given.loads]
    try:
        findings = asyncio.run(measured(names, short=given.short, say=say))
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("interrupted")
        return 130
    verdicts = {finding.name: finding.verdict for finding in findings}
    content = {"verdicts": verdicts, "environment": where, "loads": {one.name: one.document() for one in findings}}
    given.report.parent.mkdir(parents=True, exist_ok=True)
    given.report.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(report.table(findings))
    print(f"written to {given.report}")
    return 1 if "fail" in verdicts.values() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
