"""One target's run, in a child process of its own: `python -m tether_fuzz.engine TARGET --seconds N --seed S --slot F`.

The slot is a file that the parent maps as well: a count that grows with every input, the input's length, and the input.
What is found goes to stdout, a JSON object a line: `finding`s, and at the end `done`.
"""

from __future__ import annotations

import argparse
import base64
import gc
import json
import mmap
import random
import re
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

from tether_fuzz import corpus
from tether_fuzz.cover import Coverage, coverage
from tether_fuzz.mutate import Mutator
from tether_fuzz.target import MEMORY_BYTES_MAX, LawBrokenError, Target
from tether_fuzz.targets import TARGETS

SLOT_HEAD: Final = struct.Struct("<QQ")
SLOT_BYTES: Final = 1 << 20
FINDINGS_MAX: Final = 8  # of one run: more are the same again
GROWTH_BYTES_MAX: Final = 96 << 20  # of resident memory over a whole run: what inputs leave behind
SMALLER_S: Final = 4.0  # spent on making a finding smaller
POOL_MAX: Final = 4000
SEEDS_SHARE: Final = 0.4  # of a run, for what is known
_DIGITS: Final = re.compile(r"[0-9]+")


class HangError(BaseException):
    """An input took more CPU time than it may. No `Exception`: nothing that is fuzzed may catch it."""


def too_long(_signal: int, _frame: FrameType | None) -> None:
    """The handler of SIGPROF that `deadline` needs."""
    raise HangError


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Of CPU time, so that a busy machine makes no finding. Raises HangError."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def limit_memory(more_bytes: int) -> None:
    """Of address space, beyond what there is now."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, hard))


def check(target: Target, data: bytes) -> tuple[str, str, str] | set[Hashable]:
    """The input's own features, or what is wrong with it: (kind, where, traceback)."""
    try:
        with deadline(target.cpu_s):
            return set(target.run(data))
    except HangError as error:
        return "hang", _where(error), traceback.format_exc(limit=-12)
    except MemoryError as error:
        return "memory", _where(error), traceback.format_exc(limit=-12)
    except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
        return "crash", f"{type(error).__name__} {_where(error)}", traceback.format_exc(limit=-12)


def _where(error: BaseException) -> str:
    if isinstance(error, LawBrokenError):
        return _DIGITS.sub("0", str(error))
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"


class Run:
    """One run of one target."""

    def __init__(self, target: Target, seed: int, slot: mmap.mmap | None) -> None:
        self.target = target
        self.rng = random.Random(f"{target.name}/{seed}")
        self.slot = slot
        self.pool: list[bytes] = []
        self.features: set[Hashable] = set()
        self.count = 0
        self.found: set[str] = set()
        self._cover: Coverage = coverage(target.traced)
        self._mutate = Mutator(self.rng, target.shape, target.bytes_max, self.pool)

    def note(self, data: bytes) -> None:
        """So that the parent knows the input, whatever becomes of this process."""
        if self.slot is not None:
            self.slot[SLOT_HEAD.size : SLOT_HEAD.size + len(data)] = data
            self.slot[: SLOT_HEAD.size] = SLOT_HEAD.pack(self.count, len(data))

    def one(self, data: bytes) -> bool:
        """Whether it showed anything new."""
        self.count += 1
        self.note(data)
        before = len(self._cover.seen)
        with self._cover.run():
            told = check(self.target, data)
        if isinstance(told, tuple):
            self._finding(data, told)
            return False
        fresh = told - self.features
        self.features |= fresh
        return bool(fresh) or len(self._cover.seen) > before

    def _finding(self, data: bytes, told: tuple[str, str, str]) -> None:
        kind, where, text = told
        if where in self.found or len(self.found) >= FINDINGS_MAX:
            return
        self.found.add(where)
        data = smaller(self.target, data, (kind, where)) if kind == "crash" else data
        say(finding=kind, where=where, text=text, data=base64.b64encode(data).decode())

    def seeds(self, until_s: float) -> None:
        """The corpus and what is good, in an order of this seed: of much, a short run takes a part."""
        known = [*corpus.load(self.target.name), *self.target.seeds()]
        self.rng.shuffle(known)
        for data in known:
            if self.pool and time.monotonic() > until_s:
                break
            if len(data) <= self.target.bytes_max and (self.one(data) or len(self.pool) < 64):
                self.pool.append(data)
        if not self.pool:
            self.pool.append(b"{}")

    def go(self, seconds: float) -> None:
        begun_s = time.monotonic()
        until_s = begun_s + seconds
        self.seeds(begun_s + seconds * SEEDS_SHARE)
        gc.collect()
        resident = resident_bytes()
        while time.monotonic() < until_s:
            # The newest are the least tried.
            recent = self.pool[-32:] if self.rng.random() < 0.5 else self.pool
            data = self._mutate(self.rng.choice(recent))
            if self.one(data) and len(self.pool) < POOL_MAX:
                self.pool.append(data)
        kept = sum(map(len, self.pool))
        gc.collect()
        grown = resident_bytes() - resident - kept
        if grown > GROWTH_BYTES_MAX:
            say(finding="memory", where="over the run", text=f"{grown} bytes are left behind by its inputs", data="")
        say(done=self.count, lines=len(self._cover.seen), features=len(self.features), pool=len(self.pool))


def smaller(target: Target, data: bytes, wanted: tuple[str, str]) -> bytes:
    """Without what the finding does not need: lines, then bytes, by halves."""
    until_s = time.monotonic() + SMALLER_S

    def same(candidate: bytes) -> bool:
        told = check(target, candidate)
        return isinstance(told, tuple) and told[:2] == wanted

    for joint in (b"\n", b""):
        parts: list[bytes] = data.split(joint) if joint else [data[at : at + 1] for at in range(len(data))]
        width = max(1, len(parts) // 2)
        while width and time.monotonic() < until_s:
            at = 0
            while at < len(parts) and time.monotonic() < until_s:
                rest = parts[:at] + parts[at + width :]
                if rest and same(joint.join(rest)):
                    parts = rest
                else:
                    at += width
            width //= 2
        data = joint.join(parts)
    return data


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def minimal(target: Target, inputs: list[bytes], seed: int) -> list[bytes]:
    """Those that each show something which the smaller ones do not."""
    run = Run(target, seed, None)
    return [data for data in sorted(set(inputs), key=len) if len(data) <= target.bytes_max and run.one(data)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tether_fuzz.engine")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--slot", type=Path)
    parser.add_argument("--update-corpus", action="store_true")
    options = parser.parse_args()
    slot = None
    if options.slot is not None:
        with options.slot.open("r+b") as file:
            slot = mmap.mmap(file.fileno(), SLOT_BYTES)
    signal.signal(signal.SIGPROF, too_long)
    target = TARGETS[options.target]
    run = Run(target, options.seed, slot)
    run.one(next(iter(target.seeds()), b"{}"))  # what is imported late is no input's memory
    limit_memory(MEMORY_BYTES_MAX)
    run.go(options.seconds)
    if options.update_corpus:
        known = {bytes(data) for data in target.seeds()}
        fresh = [data for data in minimal(target, [*known, *run.pool], options.seed) if data not in known]
        corpus.replace(target.name, fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
