"""Processes by identity, out of /proc.

A pid is reused; what names a process for longer than an instant is pid, start time and the machine's boot. Signals go
through a pidfd that was opened before the identity was compared, so they reach that process or none.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_STATE: Final = 0  # fields of /proc/{pid}/stat behind the command's closing bracket
_START_TICKS: Final = 19


@dataclass(frozen=True, slots=True)
class ProcessId:
    """`start_ticks`: since the machine's boot `boot`."""

    pid: int
    start_ticks: int
    boot: str


def machine_boot() -> str:
    """The kernel's id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/{pid}/stat behind the command, or None where the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def identify(pid: int) -> ProcessId | None:
    """The identity of a living process; None where it is gone or a zombie."""
    fields = stat_fields(pid)
    if fields is None or fields[_STATE] in "ZX":
        return None
    return ProcessId(pid, int(fields[_START_TICKS]), machine_boot())


def is_running(process: ProcessId) -> bool:
    return process.pid > 0 and identify(process.pid) == process


def open_process(process: ProcessId) -> int | None:
    """A pidfd of exactly this process, or None where it is gone. The caller closes it."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return None
    # The descriptor holds whatever has the pid now; only then is its identity compared.
    if is_running(process):
        return descriptor
    os.close(descriptor)
    return None


def send_signal(process: ProcessId, number: signal.Signals) -> bool:
    """Signal exactly this process; False where it is gone."""
    descriptor = open_process(process)
    if descriptor is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True
