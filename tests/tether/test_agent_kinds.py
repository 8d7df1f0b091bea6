"""An agent that nobody has is refused; where nobody says, nothing is."""

from __future__ import annotations

import json

import pytest

from tether import subjects
from tether.agent_kinds import KnownAgents
from tether.errors import InvalidError
from tether.ports import Message
from tether.testing import MemoryBus, MemoryServer


async def test_an_unknown_agent_is_refused_by_name_and_a_known_one_is_asked_for_once() -> None:
    bus, asked = MemoryBus(MemoryServer()), 0

    async def answer(_: Message) -> bytes:
        nonlocal asked
        asked += 1
        return json.dumps({"v": 1, "agents": ["claude", "scripted"]}).encode()

    known = KnownAgents()
    async with bus.serve(subjects.agent("agents"), answer, queue="q", name="tether-agent"):
        with pytest.raises(InvalidError, match=r"agent\.kind: there is no agent nope; there is: claude, scripted"):
            await known.check(bus, "nope")
        await known.check(bus, "claude")
        await known.check(bus, "scripted")
        assert asked == 1
        with pytest.raises(InvalidError):
            await known.check(bus, "nope")
        assert asked == 2, "it may be there by now"
    await known.check(bus, "scripted")


async def test_without_an_agent_service_or_with_one_that_cannot_say_nothing_is_refused() -> None:
    bus, known = MemoryBus(MemoryServer()), KnownAgents()
    await known.check(bus, "nope")

    async def older(_: Message) -> bytes:
        return b'{"v": 1, "problem": {"code": "NOT_FOUND"}}'

    async with bus.serve(subjects.agent("agents"), older, queue="q", name="tether-agent"):
        await known.check(bus, "nope")
