"""An epoll loop of one thread: descriptors, masks and callbacks."""

from __future__ import annotations

import select

TYPE_CHECKING = False  # `typing` costs more than a MiB
if TYPE_CHECKING:
    from collections.abc import Callable

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
BROKEN = select.EPOLLERR | select.EPOLLHUP


class Loop:
    """Level-triggered. A callback gets the event mask; it may add and remove descriptors, its own included."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[int], None]] = {}
        self._masks: dict[int, int] = {}

    def watch(self, fd: int, mask: int, call: Callable[[int], None]) -> None:
        """Add a descriptor or change what is watched. Hang-ups and errors are always reported."""
        if self._masks.get(fd) == mask:
            return
        if fd in self._masks:
            self._epoll.modify(fd, mask)
        else:
            self._epoll.register(fd, mask)
        self._masks[fd] = mask
        self._calls[fd] = call

    def forget(self, fd: int) -> None:
        """Stop watching; idempotent. Must come before the descriptor is closed."""
        if self._masks.pop(fd, None) is not None:
            del self._calls[fd]
            self._epoll.unregister(fd)

    def turn(self, timeout_s: float) -> None:
        """Wait for events (-1: without end) and call back once for each."""
        for fd, mask in self._epoll.poll(timeout_s):
            call = self._calls.get(fd)
            if call is not None:
                call(mask)
