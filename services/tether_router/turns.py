"""A tenant's share of a router: so many prompts in hand, so many of them worked on at the same time.

All prompts come by one consumer, in the order of their storing. A tenant that sends thousands must not keep the others
waiting behind them: what is beyond its share is given back at once, unread, and comes again later (`Shares`); and of
what is in hand only a few are worked on at once, since every step of every admission shares one event loop (`Turns`).
A turn is not held while a sandbox is asked: a tenant whose sandboxes do not answer still gets its other prompts in.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

TENANT_SHARE: Final = 4  # a tenant may have a quarter of what a router has in hand
TENANT_WORKING_MAX: Final = 4  # admissions of one tenant that are worked on at once


class Shares:
    """How many prompts of each tenant are in hand. `tenant_max`: of one."""

    def __init__(self, tenant_max: int) -> None:
        self._tenant_max = tenant_max
        self._in_hand: Counter[str] = Counter()

    def enter(self, tenant: str) -> bool:
        """False where the tenant has its share already; else `leave` belongs to it."""
        if self._in_hand[tenant] >= self._tenant_max:
            return False
        self._in_hand[tenant] += 1
        return True

    def leave(self, tenant: str) -> None:
        self._in_hand[tenant] -= 1
        if not self._in_hand[tenant]:
            del self._in_hand[tenant]


class Turn:
    """One prompt's. Held between `take` and `give`; in `away` others have it."""

    def __init__(self, semaphore: asyncio.Semaphore | None) -> None:
        self._semaphore = semaphore
        self._held = False

    async def take(self) -> None:
        if self._semaphore is not None:
            await self._semaphore.acquire()
            self._held = True

    def give(self) -> None:
        if self._semaphore is not None and self._held:
            self._held = False
            self._semaphore.release()

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Something outside is waited for. Taken again afterwards, unless the wait was cancelled: then nothing more is
        done in this turn."""
        self.give()
        try:
            yield
        except asyncio.CancelledError:
            raise
        except BaseException:
            await self.take()
            raise
        await self.take()


NO_TURN: Final = Turn(None)


class Turns:
    """By tenant. `tenant_max` None: a set of one tenant has nobody to wait for."""

    def __init__(self, tenant_max: int | None) -> None:
        self._tenant_max = tenant_max
        self._semaphores: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[Turn]:
        if self._tenant_max is None:
            yield NO_TURN
            return
        semaphore = self._semaphores.setdefault(tenant, asyncio.Semaphore(self._tenant_max))
        self._users[tenant] += 1
        turn = Turn(semaphore)
        try:
            await turn.take()
            try:
                yield turn
            finally:
                turn.give()
        finally:
            self._users[tenant] -= 1
            if not self._users[tenant]:
                del self._users[tenant], self._semaphores[tenant]
