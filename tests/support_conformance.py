"""The harness that brings a real nats-server, however it runs, to the bus's conformance suite."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from tether import topology
from tether.bus import connect
from tether.ports import Bus, LiveSubscription


def log_of(tenant: str, *, replicas: int = 1) -> topology.Topology:
    """The log alone: the suite needs no more of a tenant."""
    whole = topology.tenant(tenant, replicas=replicas, max_bytes=16 << 20)
    return topology.Topology(streams=whole.streams[:1])


class NatsHarness:
    """`urls`: one connection each is used for what `interest` sends."""

    def __init__(self, urls: list[str], tenant: str, replicas: int) -> None:
        self.tenant = tenant
        self.replicas = replicas
        self.dedupe_first = replicas > 1
        self._urls = urls
        self._stack = AsyncExitStack()
        self.bus: Bus

    async def open(self) -> None:
        self.bus = await self.connect()

    async def connect(self) -> Bus:
        return await self._stack.enter_async_context(await connect(self._urls[0], name="conformance"))

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def interest(self, live: LiveSubscription) -> None:
        for url in self._urls[1:]:
            async with await connect(url, name="interest") as other:
                for _ in range(100):
                    await other.send(f"tether.live.{self.tenant}.interest", b"")
                    if await live.next(0.05) is not None:
                        break
        while await live.next(0.1) is not None:
            pass

    async def close(self) -> None:
        await self._stack.aclose()
