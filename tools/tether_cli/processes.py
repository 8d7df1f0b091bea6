"""Processes by identity: pid, start time and the machine's boot. A pid alone may be another's by now."""

from __future__ import annotations

import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

_START_TIME_FIELD = 19  # of /proc/{pid}/stat, counted behind the command's closing bracket
_STATE_FIELD = 0


@dataclass(frozen=True, slots=True)
class ProcessId:
    """`start_ticks`: since the machine's boot `boot`."""

    pid: int
    start_ticks: int
    boot: str


def machine_boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def identify(pid: int) -> ProcessId | None:
    """The identity of a living process, or None (a zombie lives no more)."""
    fields = _stat(pid)
    if fields is None or fields[_STATE_FIELD] in "ZX":
        return None
    return ProcessId(pid, int(fields[_START_TIME_FIELD]), machine_boot())


def is_running(process: ProcessId) -> bool:
    return process.pid > 0 and identify(process.pid) == process


def send_signal(process: ProcessId, number: signal.Signals) -> bool:
    """Signal exactly this process; False where it is gone."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        # The descriptor holds whatever has the pid now; only then is its identity compared.
        if not is_running(process):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def wait_gone(process: ProcessId, timeout_s: float) -> bool:
    """Wait for the end of a process that is nobody's child here; False where it lives on."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if not is_running(process):
            return True
        readable, _, _ = select.select([descriptor], [], [], timeout_s)
        return bool(readable)
    finally:
        os.close(descriptor)


def end(process: ProcessId, *, term_s: float) -> bool:
    """SIGTERM, then SIGKILL after `term_s`. True once it is gone."""
    if not send_signal(process, signal.SIGTERM) or wait_gone(process, term_s):
        return True
    send_signal(process, signal.SIGKILL)
    return wait_gone(process, 5.0)
