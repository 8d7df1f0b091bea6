"""The local provider's state directory: held by one agent service, its collectors' logs kept within their bound."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
from pathlib import Path
from typing import Final

from tether_agent.providers import collector_process, sandbox_file

LOCK_WAIT_S: Final = 10.0  # for an agent service that is just ending
LOGS_LOOK_S: Final = 60.0
_POLL_S: Final = 0.25


async def hold(path: Path) -> contextlib.AbstractContextManager[object]:
    """The lock, until the context ends. Raises RuntimeError where another agent service keeps it."""
    handle = (path / "lock").open("a")
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if loop.time() > deadline_s:
                handle.close()
                raise RuntimeError(f"another agent service holds {path}") from None
            await asyncio.sleep(_POLL_S)
        else:
            return contextlib.closing(handle)


async def bound_logs(path: Path) -> None:
    """The task that keeps collectors' logs within their bound, however long they run."""
    while True:
        for log in (path / sandbox_file.FOLDER).glob("*/collector.log"):
            await asyncio.to_thread(collector_process.bound, log)
        await asyncio.sleep(LOGS_LOOK_S)
