"""Processes by identity, out of /proc.

A pid is reused; what names a process for longer than an instant is pid, start time and the machine's boot. Signals go
through a pidfd that was opened before the identity was compared, so they reach that process or none.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_STATE: Final = 0  # fields of /proc/{pid}/stat behind the command's closing bracket
_PARENT: Final = 1
_START_TICKS: Final = 19
_ENVIRON_BYTES_MAX: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Identity:
    """`start_ticks`: since the machine's boot `machine_boot`."""

    pid: int
    start_ticks: int
    machine_boot: str


def machine_boot() -> str:
    """The kernel's id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def identify(pid: int) -> Identity | None:
    """The identity of a living process; None where it is gone or a zombie."""
    fields = _stat(pid)
    if fields is None or fields[_STATE] in "ZX":
        return None
    return Identity(pid, int(fields[_START_TICKS]), machine_boot())


def parent_of(pid: int) -> int:
    """The parent's pid, 0 where the process is gone."""
    fields = _stat(pid)
    return 0 if fields is None else int(fields[_PARENT])


def is_alive(identity: Identity) -> bool:
    return identity.pid > 0 and identify(identity.pid) == identity


def open_process(identity: Identity) -> int | None:
    """A pidfd of exactly this process, or None where it is gone. The caller closes it."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except OSError:
        return None
    if is_alive(identity):
        return descriptor
    os.close(descriptor)
    return None


def send_signal(identity: Identity, number: signal.Signals) -> bool:
    """Signal exactly this process; False where it is gone."""
    descriptor = open_process(identity)
    if descriptor is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


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


def with_environ(variable: str, value: str) -> list[Identity]:
    """Living processes that were started with exactly this variable; never this process itself."""
    own = os.getpid()
    found = (identify(pid) for pid in pids() if pid != own and environ_has(pid, variable, value))
    return [identity for identity in found if identity is not None]


def reap(pid: int) -> int | None:
    """The exit code of an own child that has ended (-signal where it was killed); None for a process that was
    adopted, whose exit code only its parent learns."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if done else None
