"""Runs targets in children, and ends those that answer no more; what is found is kept.

A child tells of its findings itself. One that dies, or shows no new input for STALL_S, cannot: its slot has the input
that it was at, which is the finding then; the rest of the target's time goes to another child.
"""

from __future__ import annotations

import base64
import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tether_fuzz.corpus import name_of
from tether_fuzz.engine import SLOT_BYTES, SLOT_HEAD

STALL_S: Final = 60.0  # without a new input: code that lets no signal through, on a machine that is busy
OVER_S: Final = 90.0  # beyond its seconds, until a child is given up: it makes its last finding smaller, and starts
POLL_S: Final = 0.25
RESTARTS_MAX: Final = 3
ENGINE: Final = (sys.executable, "-m", "tether_fuzz.engine")


@dataclass(frozen=True, slots=True)
class Finding:
    target: str
    kind: str
    where: str
    text: str
    data: bytes


@dataclass(slots=True)
class Result:
    """`inputs`: how many were tried; `lines`, `features`: how many of them were seen at last."""

    target: str
    inputs: int = 0
    lines: int = 0
    features: int = 0
    findings: list[Finding] = field(default_factory=list)


def run_all(targets: list[str], seconds: float, seed: int, *, workers: int, update: bool = False) -> list[Result]:
    """Each target for its seconds, `workers` of them at once."""
    with ThreadPoolExecutor(max_workers=workers) as pool:
        return list(pool.map(lambda name: run_one(name, seconds, seed, update=update), targets))


def run_one(target: str, seconds: float, seed: int, *, update: bool = False) -> Result:
    result = Result(target)
    until_s = time.monotonic() + seconds
    for attempt in range(RESTARTS_MAX + 1):
        left_s = max(0.5, until_s - time.monotonic())
        if _child(result, left_s, seed + 1_000_003 * attempt, update=update) or time.monotonic() >= until_s:
            break
    return result


def _child(result: Result, seconds: float, seed: int, *, update: bool) -> bool:
    """Whether it came to its end by itself."""
    with tempfile.NamedTemporaryFile(prefix="tether-fuzz-") as slot_file:
        slot_file.truncate(SLOT_BYTES)
        slot = mmap.mmap(slot_file.fileno(), SLOT_BYTES)
        argv = [*ENGINE, result.target, "--seconds", f"{seconds:.2f}"]
        argv += ["--seed", str(seed), "--slot", slot_file.name, *(["--update-corpus"] if update else [])]
        complaint: list[bytes] = []
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment()) as child:
            threads = [
                threading.Thread(target=_listen, args=(child, result), name="fuzz-stdout"),
                threading.Thread(target=_complaints, args=(child, complaint), name="fuzz-stderr"),
            ]
            for thread in threads:
                thread.start()
            stalled = _watch(child, slot, seconds)
            for thread in threads:
                thread.join()
        if child.returncode == 0:
            return True
        count, size = SLOT_HEAD.unpack(slot[: SLOT_HEAD.size])
        data = slot[SLOT_HEAD.size : SLOT_HEAD.size + size]
        result.inputs += count
        text = b"".join(complaint).decode("utf-8", "replace")[-4000:]
        where = f"no answer for {STALL_S:g} s" if stalled else f"the process ended with {child.returncode}"
        result.findings.append(Finding(result.target, "hang" if stalled else "crash", where, text, data))
        slot.close()
        return False


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONHASHSEED": "0", "PYTHONFAULTHANDLER": "1"}


def _watch(child: subprocess.Popen[bytes], slot: mmap.mmap, seconds: float) -> bool:
    """Until the child has ended, or had to be ended: then True."""
    seen, since_s = -1, time.monotonic()
    until_s = since_s + seconds + OVER_S
    while child.poll() is None:
        now_s = time.monotonic()
        (count, _) = SLOT_HEAD.unpack(slot[: SLOT_HEAD.size])
        if count != seen:
            seen, since_s = count, now_s
        if now_s - since_s > STALL_S or now_s > until_s:
            child.send_signal(signal.SIGABRT)  # shows where it is
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5.0)
            child.kill()
            child.wait()
            return True
        time.sleep(POLL_S)
    return False


def _listen(child: subprocess.Popen[bytes], result: Result) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        told = json.loads(line)
        if "finding" in told:
            data = base64.b64decode(told["data"])
            result.findings.append(Finding(result.target, told["finding"], told["where"], told["text"], data))
        else:
            result.inputs += told["done"]
            result.lines, result.features = told["lines"], told["features"]


def _complaints(child: subprocess.Popen[bytes], into: list[bytes]) -> None:
    assert child.stderr is not None
    into.append(child.stderr.read())


def keep(finding: Finding, folder: Path) -> Path:
    """The input, and beside it what happened. A finding that is mended moves to the corpus, as `fault-…`."""
    place = folder / finding.target
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"fault-{name_of(finding.data or finding.where.encode())}"
    path.write_bytes(finding.data)
    path.with_suffix(".txt").write_text(f"{finding.kind}: {finding.where}\n\n{finding.text}", encoding="utf-8")
    return path
