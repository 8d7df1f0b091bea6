"""Killing what is left of a process whose keeper is gone, found by the marker in its environment.

The keeper gives every CLI `TETHER_PROCESS_NONCE={nonce}`, and whatever the CLI starts inherits it. A CLI dies with
its keeper; its children may have been elsewhere at that moment. Two passes in a row must find nothing: between them
a process that was being forked shows up.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Final

MARKER: Final = b"TETHER_PROCESS_NONCE="
CLEAN_PASSES: Final = 2
PASS_PAUSE_S: Final = 0.02
SWEEP_S: Final = 10.0  # what is not gone by then cannot be killed (another user's, or stuck in the kernel)
ENVIRON_BYTES_MAX: Final = 1 << 20


async def sweep(nonce_prefix: str) -> bool:
    """Kill every process whose nonce begins so; True once nothing is left, False where something could not go."""
    return await asyncio.to_thread(_sweep, b"\0" + MARKER + nonce_prefix.encode())


def _sweep(needle: bytes) -> bool:
    deadline = time.monotonic() + SWEEP_S
    clean = 0
    while clean < CLEAN_PASSES:
        found = _living(needle)
        clean = 0 if found else clean + 1
        for pid in found:
            _kill(pid, needle)
        if time.monotonic() > deadline:
            return False
        time.sleep(PASS_PAUSE_S)
    return True


def _living(needle: bytes) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):  # noqa: PTH208 - thousands of names, of which few are looked at
        if entry.isdigit() and int(entry) != os.getpid() and _matches(int(entry), needle):
            found.append(int(entry))
    return found


def _matches(pid: int, needle: bytes) -> bool:
    try:
        with Path(f"/proc/{pid}/environ").open("rb") as file:
            return needle in b"\0" + file.read(ENVIRON_BYTES_MAX)
    except OSError:
        return False  # gone, a zombie, or not ours to see


def _kill(pid: int, needle: bytes) -> None:
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        # Looked at again behind the handle: the number may be another process's by now.
        if _matches(pid, needle):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        pass
    finally:
        os.close(handle)
