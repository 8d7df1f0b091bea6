"""Before the operator goes for good: no AgentTask may keep a finalizer that nobody is left to take away.

1. Every task is deleted. The operator, which still runs, drains and checkpoints it as its lifecycle says.
2. Until none is left, or the time is over.
3. Of what is left the finalizers are taken away, pods first: it is told by name, for it was not proven to have ended,
   and its latest work may not be in a checkpoint.

Each step may be repeated. A task that is being deleted takes no finalizer, so that the operator does not undo step 3;
one that was made in the meantime is deleted in the next round.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import structlog

from tether import kube

LOOK_S: Final = 2.0
_log = structlog.get_logger("tether_operator")


class Tasks(Protocol):
    """What is asked of the API; `Cluster` has it."""

    async def names(self) -> list[str]: ...

    async def delete_task(self, name: str) -> None: ...

    async def strip(self, name: str) -> tuple[str, ...]:
        """Take the finalizers of a task and its pods away. Returns the pods that were not proven to have ended."""
        ...


async def release_all(
    tasks: Tasks,
    *,
    wait_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[str]:
    """The names of the tasks that were let go without the operator. Raises ApiError."""
    until = clock() + wait_s
    while left := await tasks.names():
        for name in left:
            await tasks.delete_task(name)
        if clock() >= until:
            break
        await sleep(LOOK_S)
    for name in left:
        pods = await tasks.strip(name)
        _log.warning("task_let_go", task=name, pods=pods, finalizer=kube.DRAIN)
    return left
