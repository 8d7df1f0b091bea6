"""A reader whose connection takes nothing: its write may hang for STALL_S, then it is cut. Real nats-server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support_backend import Backend, Log, event, eventually, running_backend
from tether import events as ev
from tether.bus import NatsBus
from tether_backend.http import course


@pytest.fixture
async def backend(bus: NatsBus, tenant: str, tmp_path: Path) -> AsyncIterator[Backend]:
    async with running_backend(bus, [tenant], tmp_path) as running:
        yield running


async def test_a_write_that_hangs_for_too_long_cuts_the_reader_though_its_buffer_never_overflowed(
    backend: Backend, bus: NatsBus, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "STALL_S", 0.3)
    log = Log(bus, tenant)
    await log.frame("e1", [log.started("e1")])
    text = "x" * 8000
    for first in range(2, 1002, 20):  # 8 MB that are there before it attaches: a replay, more than sockets hold
        completed = [(n, {"segment": f"s{n}", "text": text}) for n in range(first, first + 20)]
        await log.frame("e1", [event(n, ev.TEXT_COMPLETED, body) for n, body in completed])
    quick = await backend.reader("c1", tenant).open()
    assert len(await quick.events(1001)) == 1001  # one that takes what it gets is not cut
    stalled = await backend.reader("c1", tenant).open(small=True)
    await stalled.events(1)
    cut = backend.deps.metrics.cut

    async def was_cut() -> bool:
        return bool(cut._value.get() == 1)

    await eventually(was_cut, "the stalled reader was cut")
    assert backend.deps.feeds[tenant]._mailboxes.keys() == {"c1"}  # the other one still reads
    await log.frame("e1", [event(1002, ev.TEXT_COMPLETED, {"segment": "s", "text": "on"})])
    assert [one.data["ordinal"] for one in await quick.events(1)] == [1002]
    await quick.close()
    await stalled.close()
