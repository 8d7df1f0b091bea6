"""A set of the bench's own around a piece of measuring, which runs in a worker thread."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tether_bench.rig import Rig
from tether_cli.set import ephemeral

T = TypeVar("T")


async def with_set(
    work: Callable[[Rig], T],
    *,
    short: bool,
    say: Callable[[str], None],
    limit_s: float,
    soak_s: float = 0.0,
    log_bytes: int | None = None,
) -> tuple[T, Rig]:
    """Start a set, do the work within `limit_s`, end the set. Cancelled: the work stops at its next wait, and all is
    ended. `log_bytes`: the quota of its log and of its blob store, where an ephemeral set's own is too small."""
    with tempfile.TemporaryDirectory(prefix="tether-bench-") as name:
        folder = Path(name)
        agents = folder / "agents.toml"
        agents.write_text(
            f'[agents.scripted]\nenv = {{ TETHER_SCRIPTED_TRUTH = "{folder}/truth" }}\n',
            encoding="utf-8",
        )
        begun_s = time.monotonic()
        async with ephemeral(agents_file=agents, log_bytes=log_bytes) as state:
            rig = Rig(state, folder, short, say=say, deadline_s=begun_s + limit_s, soak_s=soak_s)
            say(f"a set is up ({time.monotonic() - begun_s:.0f} s)")
            working = asyncio.create_task(asyncio.to_thread(work, rig), name="bench-measure")
            try:
                return await asyncio.shield(working), rig
            finally:
                rig.stopping.set()
                await asyncio.wait({working})


async def until_signal(
    work: Callable[[Rig], T],
    *,
    short: bool,
    say: Callable[[str], None],
    limit_s: float,
    soak_s: float = 0.0,
    log_bytes: int | None = None,
) -> tuple[T, Rig]:
    """The same; SIGTERM cancels it."""
    task = asyncio.current_task()
    assert task is not None
    with contextlib.suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await with_set(work, short=short, say=say, limit_s=limit_s, soak_s=soak_s, log_bytes=log_bytes)
