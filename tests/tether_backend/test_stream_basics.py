"""The event stream over a real nats-server: order, marks, ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support_backend import Backend, Log, ended, running_backend, text_delta
from tether.bus import NatsBus


@pytest.fixture
async def backend(bus: NatsBus, tenant: str, tmp_path: Path) -> AsyncIterator[Backend]:
    async with running_backend(bus, [tenant], tmp_path) as running:
        yield running


async def test_the_first_frame_carries_an_id_before_any_event_and_history_is_marked_as_replay(
    backend: Backend, bus: NatsBus, tenant: str
) -> None:
    log = Log(bus, tenant)
    await log.prompt("q1", "r1", "e1")
    await log.frame("e1", [log.started("e1"), text_delta(2, "a"), text_delta(3, "b", offset=1)])
    reader = await backend.reader("c1", tenant).open()
    first = await reader.next()
    assert first is not None and first.name == "open" and first.id
    got = await reader.events(5)
    assert [one.data["replay"] for one in got] == [True] * 5
    assert [one.key for one in got[2:]] == [("e1", 1), ("e1", 2), ("e1", 3)]
    live = await reader.next()
    assert live is not None and live.name == "live"
    await log.frame("e1", [text_delta(4, "c", offset=2)])
    more = await reader.events(1)
    assert more[0].data["replay"] is False and more[0].key == ("e1", 4)
    await reader.close()


async def test_a_stream_until_a_response_ends_with_it_and_a_reconnect_after_it_gets_204(
    backend: Backend, bus: NatsBus, tenant: str
) -> None:
    log = Log(bus, tenant)
    await log.prompt("q1", "r1", "e1")
    await log.own("e1")
    reader = await backend.reader("c1", tenant).open(until="response:r1")
    await log.frame("e1", [log.started("e1"), text_delta(2, "a"), *ended(3)])
    frames = []
    while (one := await reader.next()) is not None:
        frames.append(one)
    assert frames[-1].name == "end" and frames[-1].data["outcome"] == "completed"
    assert [one.key for one in frames if one.name == "message"][-1] == ("e1", 3)  # nothing after the response's end
    await reader.open(until="response:r1")
    assert reader.status == 204
    await reader.close()


async def test_history_has_what_the_log_says_and_a_cursor_that_goes_on(
    backend: Backend, bus: NatsBus, tenant: str
) -> None:
    log = Log(bus, tenant)
    await log.prompt("q1", "r1", "e1")
    await log.frame("e1", [log.started("e1"), text_delta(2, "ab"), text_delta(3, "c", offset=2)])
    history = await backend.projected("c1", "e1", 3)
    assert [one["request"] for one in history["messages"]] == ["q1"]
    assert history["responses"][0]["response"] == "r1"
    assert history["items"][0]["state"]["text"] == "abc"
    await log.frame("e1", [text_delta(4, "d", offset=3)])
    reader = await backend.reader("c1", tenant).open(history["cursor"], query=True)
    seen = []
    while ("e1", 4) not in seen:
        seen += [one.key for one in await reader.events(1)]
    assert set(seen) <= {("e1", n) for n in range(1, 5)} | {"q1/prompt.admitted", "q1/response.created"}
    await reader.close()
