"""Every sandbox that a test starts is ended after it, whatever the test did."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support_agent import provider_for, settings_for
from support_nats import NatsServer
from tether_agent.config import AgentSettings


@pytest.fixture
async def settings(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[AgentSettings]:
    made = settings_for(nats_server, tmp_path)
    yield made
    provider = provider_for(made, None)
    async with provider.running(restart=False):
        await provider.stop_all()
