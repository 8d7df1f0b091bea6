"""One gate per conversation: prompts of one conversation are handled one at a time, those of others meanwhile.

Who waits for a conversation to move on is woken by `wake`. A wake between a decision and the wait for it is not lost:
a visit remembers how often the conversation had been woken when it last looked. Gates exist only while visited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class _Gate:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.visits = 0
        self.wakes = 0
        self.woken = asyncio.Event()


class Visit:
    """One delivery's stay at a gate."""

    def __init__(self, gate: _Gate) -> None:
        self._gate = gate
        self._seen = gate.wakes

    @property
    def lock(self) -> asyncio.Lock:
        return self._gate.lock

    @property
    def others(self) -> int:
        """How many more deliveries are at this gate."""
        return self._gate.visits - 1

    def look(self) -> None:
        """What happened until now is about to be read."""
        self._seen = self._gate.wakes

    async def woken(self, timeout_s: float) -> bool:
        """Wait until something happens that was not looked at; False when `timeout_s` has passed."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._gate.wakes == self._seen:
                    await self._gate.woken.wait()
        except TimeoutError:
            return False
        return True


class Gates:
    """The gates of one router."""

    def __init__(self) -> None:
        self._gates: dict[str, _Gate] = {}

    def __len__(self) -> int:
        return len(self._gates)

    @contextmanager
    def visit(self, key: str) -> Iterator[Visit]:
        gate = self._gates.setdefault(key, _Gate())
        gate.visits += 1
        try:
            yield Visit(gate)
        finally:
            gate.visits -= 1
            if gate.visits == 0:
                del self._gates[key]

    def wake(self, key: str) -> bool:
        """Something happened in the conversation. False where nobody is here who could care."""
        gate = self._gates.get(key)
        if gate is None:
            return False
        gate.wakes += 1
        gate.woken.set()  # wakes those who wait now; who comes later compares the count
        gate.woken = asyncio.Event()
        return True

    def wake_all(self) -> None:
        for key in list(self._gates):
            self.wake(key)
