"""A sandbox as a container: what the engine says of it, and what follows. Pure.

    lives ──────────────────────────────────────────────▶ nothing
    ended, its boot was drained, or all was told ────────▶ Stopped
    ended, no collector of it was ever ready ────────────▶ Failed     nothing ran in it that could be told
    ended otherwise ─────────────────────────────────────▶ Recover    a collector that starts nothing tells the rest
    not to be found, and the engine never saw it end ────▶ Unproven   no time makes this a proof

With a container's first process the kernel ends every other process of it, so its end is the end of all that ran in
it. That a container is not there says nothing by itself: an engine can lose sight of what it started.
"""

from __future__ import annotations

from dataclasses import dataclass

LIVING = frozenset({"running", "paused", "restarting"})
OVER = frozenset({"exited", "dead"})


@dataclass(frozen=True, slots=True)
class Container:
    """What the engine says of a container that it knows. `started_at`, `finished_at`: its own words."""

    id: str
    name: str
    status: str
    started_at: str = ""
    finished_at: str = ""
    exit_code: int = 0
    out_of_memory: bool = False
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def lives(self) -> bool:
        return self.status in LIVING

    def label(self, name: str) -> str:
        return dict(self.labels).get(name, "")


@dataclass(frozen=True, slots=True)
class Died:
    """The engine's record of the end of a container that it does not know any more."""

    exit_code: int
    at: str


@dataclass(frozen=True, slots=True)
class End:
    """`proof`: how it is known that nothing of the container lives. `code`: of its first process, None where that is
    not known."""

    proof: str
    code: int | None


def end_of(id_: str, started_at: str, seen: Container | None, died: Died | None, rebooted: bool) -> End | None:
    """The end of the container `id_` in the run that began at `started_at`; None where there is no proof of one."""
    short = id_[:12]
    if seen is not None and seen.id == id_:
        if seen.status in OVER:
            reason = ", out of memory" if seen.out_of_memory else ""
            told = f"the engine says that container {short} ended with {seen.exit_code} at {seen.finished_at}{reason}"
            return End(told, seen.exit_code)
        if seen.status == "created":
            return End(f"container {short} was never started", None)
        if started_at and seen.lives and seen.started_at != started_at:
            return End(f"the engine started container {short} anew at {seen.started_at}", None)
        return None
    if died is not None:
        return End(f"the engine saw container {short} end with {died.exit_code} at {died.at}", died.exit_code)
    if rebooted:
        return End(f"the machine was booted anew since container {short} was started", None)
    return None


@dataclass(frozen=True, slots=True)
class Stopped:
    """Nothing more is to be told of it."""


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str


@dataclass(frozen=True, slots=True)
class Recover:
    pass


@dataclass(frozen=True, slots=True)
class Unproven:
    pass


After = Stopped | Failed | Recover | Unproven
EX_CONFIG = 78


def after(end: End | None, *, used: bool, recovery: bool, released: bool, drained: bool) -> After:
    """What becomes of a sandbox whose container does not live. `used`: a collector of it was ready. `released`: its
    record says that nothing of it is to run. `drained`: a checkpoint of this very boot is referenced."""
    if end is None:
        return Unproven()
    if released or (end.code == 0 and (recovery or drained)):
        return Stopped()
    if used or recovery:
        return Recover()
    if end.code == EX_CONFIG:
        return Failed("the collector refuses its configuration")
    if end.code is None:
        return Stopped()
    return Failed(f"its container ended with {end.code} before the collector was ready")
