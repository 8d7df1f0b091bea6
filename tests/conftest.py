"""Fixtures of general use: a real nats-server per session, a tenant per test, a connected bus."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import pytest
from hypothesis import settings

from support_nats import NatsServer, running_server
from tether import topology
from tether.bus import NatsBus, connect
from tether.testing import ASSERTING_MODULES, VirtualTimeLoop

pytest.register_assert_rewrite(*ASSERTING_MODULES)


if "CI" not in os.environ:  # there Hypothesis brings a profile of its own: derandomized, without deadlines
    settings.register_profile("patient", deadline=None)  # time is judged by the bench
    settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "r3: needs a cluster of three nats-servers")
    config.addinivalue_line("markers", "virtual_time: runs in tether.testing.VirtualTimeLoop (in-memory tests)")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """`@pytest.mark.virtual_time`: waiting costs nothing, and waiting for nothing fails at once."""
    if item.get_closest_marker("virtual_time") is not None:
        return {"virtual": VirtualTimeLoop}
    return {"default": asyncio.new_event_loop}


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """One server for all tests that do it no harm; `support_nats.running_server` gives one to break."""
    with running_server() as server:
        yield server


@pytest.fixture
def tenant() -> str:
    """A tenant name of its own for each test."""
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    """Connected, with the base topology ensured."""
    async with await connect(nats_server.url, name="test") as connected:
        await connected.ensure(topology.base())
        yield connected


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the expected files anew; read the diff")
