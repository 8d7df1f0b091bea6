"""What a target is, and the registry of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from tether.errors import InvalidError
from tether.limits import KIB

Shape = Literal["json", "lines", "bytes", "text", "spool"]
Features = Iterable[Hashable]
_NAMED: Final = re.compile(r"^[^:]*: |[0-9]+|'[^']*'")

CPU_S: Final = 4.0  # of one input, on whatever machine: most take less than 5 ms
MEMORY_BYTES_MAX: Final = 384 * 1024 * KIB  # of address space beyond what the child had before its first input


@dataclass(frozen=True, slots=True)
class Target:
    """`run` answers features of its input; whatever it raises is a finding. `shape`: how inputs are mutated, and what
    the corpus has. `seeds`: good inputs that are made of the code or of recordings, so they need not be committed.
    `bytes_max`: of an input. `traced`: prefixes of module names whose lines are features. `cpu_s`: of CPU time that one
    input may take."""

    name: str
    group: str
    shape: Shape
    run: Callable[[bytes], Features]
    seeds: Callable[[], Iterable[bytes]]
    bytes_max: int = 32 * KIB
    traced: tuple[str, ...] = ("tether.",)
    cpu_s: float = CPU_S


def refusal(error: InvalidError) -> Features:
    """What an input was refused for, without the names in it: they are the input's own."""
    return [("refused", _NAMED.sub("", error.problem.detail or "")[:60])]


class LawBrokenError(AssertionError):
    """A target's own law does not hold for an input."""


def law(holds: bool, what: str) -> None:
    if not holds:
        raise LawBrokenError(what)
