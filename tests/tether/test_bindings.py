"""What readers ask records for before they believe a message of the log."""

from __future__ import annotations

import time

import pytest

from tether import topology
from tether.bindings import Bindings
from tether.frame_rules import Refusal
from tether.subjects import EventAddress
from tether.testing import MemoryBus, MemoryServer


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 65, "r.*", "é", "never-made"])
async def test_a_request_that_nobody_can_have_made_is_refused_and_breaks_no_reader(request_id: str) -> None:
    bus = MemoryBus(MemoryServer())
    await bus.ensure(topology.base())
    address = EventAddress("t", "w", "c", "_")
    now_ns = time.time_ns()
    assert await Bindings(bus, "t").request(address, request_id, now_ns, now_ns) is Refusal.NOT_ADMITTED
