"""One suite, four buses: memory as one server and as replicated, nats-server alone and as a cluster of three."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from support_conformance import NatsHarness, log_of
from support_nats import NatsCluster, NatsServer, running_cluster
from tether import topology
from tether.errors import BusError
from tether.ports import Bus, LiveSubscription
from tether.testing import MemoryBus, MemoryServer
from tether.testing.conformance import BusConformance


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
