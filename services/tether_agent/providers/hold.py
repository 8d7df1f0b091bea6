"""Nothing is started while everything is being stopped, nor right after.

Whoever stops all sandboxes ends the agent service next (`tether down`), by a signal that comes a moment later. A start
or a drain that waited for a sandbox's lock meanwhile, or that is tried again in that moment, would start a collector
that nobody ends. It is told to come back, and does: in the next service, or in this one if it goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tether_agent.providers import NotReadyError

HOLD_S: Final = 3.0  # more than a start or a drain waits before it is tried again, and than a signal takes


class Hold:
    """One provider's."""

    def __init__(self) -> None:
        self._stopping = 0
        self._until_s = 0.0

    @contextmanager
    def stopping(self) -> Iterator[None]:
        self._stopping += 1
        try:
            yield
        finally:
            self._stopping -= 1
            self._until_s = asyncio.get_running_loop().time() + HOLD_S

    def check(self) -> None:
        """Raises NotReadyError. To be asked with the sandbox's lock held, right before something is started."""
        if self._stopping or asyncio.get_running_loop().time() < self._until_s:
            raise NotReadyError("the sandboxes were just told to stop")
