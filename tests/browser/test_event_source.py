"""A browser's plain `EventSource` with a ticket: it goes on by itself, until its ticket has expired."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support_backend import Backend, Log, ended, ensure_tenants, running_backend, write_tokens
from support_backend_process import backend_process
from support_nats import NatsServer
from support_proxy import Proxy, running_proxy
from support_stream_page import event_source, freeze, got, keys, ticket, visit, wait_for, write
from tether.bus import NatsBus
from tether.limits import TICKET_LIFE_S

if TYPE_CHECKING:
    from playwright.async_api import Page


@pytest.fixture
async def backend(bus: NatsBus, tenant: str, tmp_path: Path) -> AsyncIterator[Backend]:
    async with running_backend(bus, [tenant], tmp_path) as running:
        yield running


@pytest.fixture
async def proxy(backend: Backend) -> AsyncIterator[Proxy]:
    async with running_proxy(backend.port) as running:
        yield running


async def stream(page: Page, tenant: str, **query: str) -> None:
    more = "".join(f"&{name}={value}" for name, value in query.items())
    await event_source(page, f"/v1/conversations/c1/events?ticket={await ticket(page, tenant)}{more}")


async def test_it_reconnects_by_itself_and_sees_each_event_once_in_order(
    page: Page, proxy: Proxy, bus: NatsBus, tenant: str
) -> None:
    log = Log(bus, tenant)
    await log.frame("e1", [log.started("e1")])
    await visit(page, proxy.url)
    await stream(page, tenant)
    total = 1
    for cuts in range(4):
        await write(log, "e1", total + 1, total + 60)
        await wait_for(page, f"got.opened === {cuts + 1} && got.events.length > {total + cuts * 7}")
        assert proxy.cut() > 0
        await write(log, "e1", total + 61, total + 90)  # while it is away, or comes back
        total += 90
    await wait_for(page, f"got.events.length >= {total}")
    told = await got(page)
    assert told["events"] == keys("e1", range(1, total + 1))
    assert told["opened"] == 5 and told["errors"] == 4


async def test_a_tab_that_was_suspended_goes_on_where_it_was(
    page: Page, proxy: Proxy, bus: NatsBus, tenant: str
) -> None:
    log = Log(bus, tenant)
    await log.frame("e1", [log.started("e1")])
    await visit(page, proxy.url)
    await stream(page, tenant)
    await wait_for(page, "got.live === 1")
    for was_cut in (False, True):
        await freeze(page, "frozen")
        start = 301 if was_cut else 2
        await write(log, "e1", start, start + 298)
        if was_cut:
            proxy.cut()
        await freeze(page, "active")
        await wait_for(page, f"got.events.length >= {start + 298}")
    assert (await got(page))["events"] == keys("e1", range(1, 600))


async def test_a_backend_that_is_killed_and_started_again_is_found_again(
    page: Page, bus: NatsBus, nats_server: NatsServer, tenant: str, tmp_path: Path
) -> None:
    write_tokens(tmp_path / "tokens.json", [tenant])
    await ensure_tenants(bus, [tenant])
    log = Log(bus, tenant)
    await log.frame("e1", [log.started("e1")])
    async with backend_process(nats_server, tenant, tmp_path) as (child, port):
        await visit(page, f"http://127.0.0.1:{port}")
        await stream(page, tenant)
        await write(log, "e1", 2, 100)
        await wait_for(page, "got.events.length > 20")
        child.kill()
        await child.wait()
    await write(log, "e1", 101, 200)
    async with backend_process(nats_server, tenant, tmp_path, port):
        await write(log, "e1", 201, 300)
        await wait_for(page, "got.events.length >= 300")
    assert (await got(page))["events"] == keys("e1", range(1, 301))


async def test_it_closes_where_its_ticket_has_expired_and_another_one_goes_on_from_the_last_id(
    page: Page, proxy: Proxy, bus: NatsBus, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(bus, tenant)
    await log.frame("e1", [log.started("e1")])
    await visit(page, proxy.url)
    await stream(page, tenant)
    await wait_for(page, "got.live === 1")
    with monkeypatch.context() as later:
        now_ns = time.time_ns()
        later.setattr("tether_backend.http.edge.time.time_ns", lambda: now_ns + round((TICKET_LIFE_S + 1) * 1e9))
        await write(log, "e1", 2, 4)  # the open stream outlives its ticket
        await wait_for(page, "got.events.length === 4")
        proxy.cut()
        await wait_for(page, "window.source.readyState === EventSource.CLOSED")
    first = await got(page)
    await write(log, "e1", 5, 6)
    await stream(page, tenant, cursor=first["last"])
    await wait_for(page, "got.events.length === 2")
    assert first["events"] + (await got(page))["events"] == keys("e1", range(1, 7))


async def test_204_after_the_end_stops_it_for_good(page: Page, proxy: Proxy, bus: NatsBus, tenant: str) -> None:
    log = Log(bus, tenant)
    await log.prompt("q1", "r1", "e1")
    await log.own("e1")
    await visit(page, proxy.url)
    await stream(page, tenant, until="response:r1")
    await log.frame("e1", [log.started("e1"), *ended(2)])
    await wait_for(page, "window.source.readyState === EventSource.CLOSED")
    told = await got(page)
    assert told["events"] == ["q1/prompt.admitted", "q1/response.created", "e1/1", "e1/2"]
    assert told["opened"] == 1 and told["errors"] == 2  # the stream's end, and the answer 204
