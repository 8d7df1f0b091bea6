"""What /proc says of processes beyond their identity (`tether.processes`): parents, environments, commands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tether.processes import ProcessId, identify, stat_fields

_PARENT: Final = 1  # field of /proc/{pid}/stat behind the command's closing bracket
_ENVIRON_BYTES_MAX: Final = 4 << 20


def parent_of(pid: int) -> int:
    """The parent's pid, 0 where the process is gone."""
    fields = stat_fields(pid)
    return 0 if fields is None else int(fields[_PARENT])


def _read(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(_ENVIRON_BYTES_MAX)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


def environ_has(pid: int, variable: str, value: str) -> bool:
    """Whether the process was started with exactly this variable."""
    entry = f"{variable}={value}".encode()
    return entry in _read(f"/proc/{pid}/environ").split(b"\0")


def argv_of(pid: int) -> list[str]:
    return [part.decode("utf-8", "surrogateescape") for part in _read(f"/proc/{pid}/cmdline").split(b"\0")[:-1]]


def pids() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def with_environ(variable: str, value: str) -> list[ProcessId]:
    """Living processes that were started with exactly this variable; never this process itself."""
    own = os.getpid()
    found = (identify(pid) for pid in pids() if pid != own and environ_has(pid, variable, value))
    return [identity for identity in found if identity is not None]


def with_environ_prefix(variable: str, prefix: str) -> list[ProcessId]:
    """Living processes whose variable begins so; never this process itself."""
    needle, own = f"\0{variable}={prefix}".encode(), os.getpid()
    found = (identify(pid) for pid in pids() if pid != own and needle in b"\0" + _read(f"/proc/{pid}/environ"))
    return [identity for identity in found if identity is not None]


def reap(pid: int) -> int | None:
    """The exit code of an own child that has ended (-signal where it was killed); None for a process that was
    adopted, whose exit code only its parent learns."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if done else None
