"""Ending processes by identity (`tether.processes`)."""

from __future__ import annotations

import os
import select
import signal

from tether.processes import ProcessId, open_process, send_signal


def wait_gone(process: ProcessId, timeout_s: float) -> bool:
    """Wait for the end of a process that is nobody's child here; False where it lives on."""
    descriptor = open_process(process)
    if descriptor is None:
        return True
    try:
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
