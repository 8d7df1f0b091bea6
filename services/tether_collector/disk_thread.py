"""A thread for file operations that may never return: a volume that hangs must hang neither the loop nor the exit.

The loop's own executor is waited for when the process ends, however long that takes; this thread is not. Operations
run one after the other, so what is asked for behind one that hangs waits as well.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class DiskThread:
    """Started with its first operation; ends with the process or by `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, operation: Callable[[], T]) -> asyncio.Future[T]:
        """Its result or exception, once its turn has come. A cancelled future's operation may still run."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._queue.put(partial(_perform, operation, loop, future))
        return future

    def close(self) -> None:
        """What was asked for before is still done, where the disk lets it."""
        self._queue.put(None)

    def _work(self) -> None:
        while (perform := self._queue.get()) is not None:
            perform()


def _perform(operation: Callable[[], T], loop: asyncio.AbstractEventLoop, future: asyncio.Future[T]) -> None:
    try:
        result = operation()
    except Exception as error:  # noqa: BLE001 - whatever it is belongs to whoever asked
        _tell(loop, partial(_fail, future, error))
    else:
        _tell(loop, partial(_settle, future, result))


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(what)
    except RuntimeError:
        pass  # the loop is closed: nobody waits any more


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
