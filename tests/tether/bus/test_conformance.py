"""One suite, four buses: memory as one server and as replicated, nats-server alone and as a cluster of three."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from support_nats import NatsCluster, NatsServer, running_cluster
from tether import topology
from tether.bus import connect
from tether.errors import BusError
from tether.ports import Bus, LiveSubscription
from tether.testing import MemoryBus, MemoryServer
from tether.testing.conformance import BusConformance


def log_of(tenant: str, *, replicas: int = 1) -> topology.Topology:
    """The log alone: the suite needs no more of a tenant."""
    whole = topology.tenant(tenant, replicas=replicas, max_bytes=16 << 20)
    return topology.Topology(streams=whole.streams[:1])


class MemoryHarness:
    replicas = 1

    def __init__(self, tenant: str, *, replicated: bool) -> None:
        self.tenant = tenant
        self.dedupe_first = replicated
        self.server = MemoryServer(replicated=replicated)
        self.bus: Bus = MemoryBus(self.server)
        self._others: list[MemoryBus] = []

    async def connect(self) -> Bus:
        self._others.append(MemoryBus(self.server))
        return self._others[-1]

    async def pause(self, seconds: float) -> None:
        self.server.clock.advance(seconds)
        for _ in range(10):
            await asyncio.sleep(0)

    async def interest(self, live: LiveSubscription) -> None:
        return

    async def close(self) -> None:
        for bus in (self.bus, *self._others):
            await bus.close()


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


@pytest.fixture(scope="session")
def nats_cluster() -> Iterator[NatsCluster]:
    with running_cluster() as cluster:
        yield cluster


async def ensured(bus: Bus, topo: topology.Topology) -> None:
    """A cluster that has just started has no leader for a moment."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await bus.ensure(topo)
            except BusError:
                await asyncio.sleep(0.2)


class TestMemory(BusConformance):
    @pytest.fixture
    async def harness(self, tenant: str) -> AsyncIterator[MemoryHarness]:
        harness = MemoryHarness(tenant, replicated=False)
        await harness.bus.ensure(log_of(tenant))
        yield harness
        await harness.close()


class TestMemoryReplicated(BusConformance):
    @pytest.fixture
    async def harness(self, tenant: str) -> AsyncIterator[MemoryHarness]:
        harness = MemoryHarness(tenant, replicated=True)
        await harness.bus.ensure(log_of(tenant))
        yield harness
        await harness.close()


class TestNats(BusConformance):
    @pytest.fixture
    async def harness(self, nats_server: NatsServer, tenant: str) -> AsyncIterator[NatsHarness]:
        harness = NatsHarness([nats_server.url], tenant, 1)
        await harness.open()
        await harness.bus.ensure(log_of(tenant))
        yield harness
        await harness.close()


@pytest.mark.r3
class TestNatsReplicated(BusConformance):
    @pytest.fixture
    async def harness(self, nats_cluster: NatsCluster, tenant: str) -> AsyncIterator[NatsHarness]:
        harness = NatsHarness([server.url for server in nats_cluster.servers], tenant, 3)
        await harness.open()
        await ensured(harness.bus, log_of(tenant, replicas=3))
        yield harness
        await harness.close()
