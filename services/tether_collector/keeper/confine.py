"""What is taken from the CLI before it runs: another user, no new privileges, limits, umask.

Everything here is inherited by whatever the CLI starts, and nothing of it can be undone by that:

    limits          soft and hard; no core files, whatever else is said: a core holds keys
    user            groups dropped first; a parent-death signal that was armed is cleared by it and armed again
    no new privs    a setuid program runs as the one who starts it
"""

from __future__ import annotations

import ctypes
import os

from . import linux

TYPE_CHECKING = False  # `typing` costs more than a MiB
if TYPE_CHECKING:
    from .jsonlite import Json

PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
RLIMIT_CORE = 4
RLIMITS = {"file_bytes": 1, "processes": 6, "files": 7, "memory_bytes": 9}
ID_MAX = 2**32 - 2
LIMIT_MAX = 2**62
FIELDS = frozenset(("gid", "limits", "new_privileges", "uid", "umask"))


class Confinement:
    """`uid` -1: as the keeper. `umask` -1: the starter's. `limits`: names of RLIMITS."""

    __slots__ = ("gid", "limits", "new_privileges", "uid", "umask")

    def __init__(self, raw: object, problems: list[str]) -> None:
        """`problems`: where what is wrong is added."""
        given: Json = raw if isinstance(raw, dict) else {}
        if not isinstance(raw, dict):
            problems.append("confine must be an object")
        problems += [f"unknown field confine.{name}" for name in given if name not in FIELDS]
        self.uid = _number(given, "uid", ID_MAX, problems)
        self.gid = _number(given, "gid", ID_MAX, problems)
        if (self.uid < 0) != (self.gid < 0) or self.uid == 0:
            problems.append("confine.uid and confine.gid must be given together, and be no root's")
        self.umask = _number(given, "umask", 0o777, problems)
        self.new_privileges = given.get("new_privileges", False) is True
        limits = given.get("limits", {})
        self.limits: dict[str, int] = {}
        if not isinstance(limits, dict) or any(name not in RLIMITS for name in limits):
            problems.append(f"confine.limits must be an object of {' '.join(sorted(RLIMITS))}")
            limits = {}
        for name in limits:
            self.limits[name] = _number(limits, name, LIMIT_MAX, problems)

    @property
    def other_user(self) -> bool:
        """Whether the CLI runs as another user than the keeper."""
        return self.uid >= 0

    def apply(self, umask: int, dies_with_parent: bool) -> None:
        """In the process that becomes the CLI. Raises OSError."""
        lower(RLIMIT_CORE, 0)
        for name, value in self.limits.items():
            lower(RLIMITS[name], value)
        if self.other_user:
            os.setgroups([])
            os.setresgid(self.gid, self.gid, self.gid)
            os.setresuid(self.uid, self.uid, self.uid)
            if dies_with_parent:
                linux.prctl(linux.PR_SET_PDEATHSIG, linux.SIGKILL)
        if not self.new_privileges:
            linux.prctl(PR_SET_NO_NEW_PRIVS, 1)
        os.umask(umask if self.umask < 0 else self.umask)


def lower(number: int, value: int) -> None:
    """Soft and hard limit, as far as they are not lower already. Raises OSError."""
    pair = (ctypes.c_ulong * 2)()
    linux.check(linux.libc.getrlimit(number, pair), "getrlimit")
    lowest = min(value, pair[0], pair[1])
    pair[0] = pair[1] = lowest
    linux.check(linux.libc.setrlimit(number, pair), "setrlimit")


def hide() -> None:
    """Nobody of the same user reads this process's memory or environment, or traces it; nor do its children that run
    no other program. It leaves no core."""
    linux.prctl(PR_SET_DUMPABLE, 0)


def _number(raw: Json, name: str, most: int, problems: list[str]) -> int:
    value = raw.get(name, -1)
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= most:
        problems.append(f"confine.{name} must be a number from 0 to {most}")
        return -1
    return value
