"""Tickets: what opens a stream where no header can be sent, and nothing else."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from support_backend import Backend, Log, running_backend, token_of, write_tokens
from support_websocket import SocketReader, refused
from tether.errors import Problem
from tether.limits import TICKET_LIFE_S
from tether.testing import MemoryBus, MemoryServer
from tether_backend import tickets
from tether_backend.config import Principal, Tokens, load_tokens
from tether_backend.http import edge

ANN = Principal("acme", "ann")
BOB = Principal("acme", "bob")
EVE = Principal("evil", "ann")
NOW_MS = 1_800_000_000_000


def tokens(*entries: tuple[str, Principal]) -> Tokens:
    return Tokens(tuple((token.encode().ljust(32, b"\0"), principal) for token, principal in entries))


KNOWN = tokens(("a", ANN), ("b", BOB), ("e", EVE))


def test_a_ticket_stands_for_its_principal_and_its_conversation_until_it_expires() -> None:
    for principal in (ANN, BOB, EVE):
        made = tickets.issue(KNOWN, principal, "c1", NOW_MS)
        assert made.expires_at == NOW_MS + TICKET_LIFE_S * 1000
        for now_ms in (NOW_MS, made.expires_at):
            assert tickets.check(KNOWN, made.ticket, "c1", now_ms) == principal
        late = tickets.check(KNOWN, made.ticket, "c1", made.expires_at + 1)
        assert isinstance(late, Problem) and late.status == 401 and "expired" in late.detail
        other = tickets.check(KNOWN, made.ticket, "c2", NOW_MS)
        assert isinstance(other, Problem) and other.status == 401 and "expired" not in other.detail


def test_a_ticket_dies_with_its_token_and_lives_with_the_same_tokens_elsewhere() -> None:
    made = tickets.issue(KNOWN, ANN, "c1", NOW_MS)
    replica = tokens(("e", EVE), ("b", BOB), ("a", ANN))
    assert tickets.check(replica, made.ticket, "c1", NOW_MS) == ANN
    for changed in (tokens(("b", BOB)), tokens(("z", ANN)), tokens(("a", BOB)), tokens(("a", EVE))):
        assert isinstance(tickets.check(changed, made.ticket, "c1", NOW_MS), Problem)


@given(st.text(max_size=80))
def test_text_that_nobody_gave_is_no_ticket(text: str) -> None:
    assert isinstance(tickets.check(KNOWN, text, "c1", NOW_MS), Problem)


@given(st.integers(0, 54), st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"))
def test_a_ticket_with_any_character_changed_is_refused(place: int, character: str) -> None:
    made = tickets.issue(KNOWN, ANN, "c1", NOW_MS).ticket
    changed = made[:place] + character + made[place + 1 :]
    found = tickets.check(KNOWN, changed, "c1", NOW_MS)
    # The last character has bits that no byte holds.
    assert changed == made or isinstance(found, Problem) or (place == len(made) - 1 and found == ANN)


def test_a_ticket_tells_neither_token_nor_principal() -> None:
    entries = ((b"\x07" * 32, Principal("t", "n")),)
    made = tickets.issue(Tokens(entries), entries[0][1], "c1", NOW_MS)
    assert len(made.ticket) == 55 and b"\x07\x07" not in base64.urlsafe_b64decode(made.ticket + "=")


# --- over HTTP ---

TENANT, OTHER = "acme", "umbrella"


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Backend]:
    bus = MemoryBus(MemoryServer())
    async with running_backend(bus, [TENANT, OTHER], tmp_path) as running:
        log = Log(bus, TENANT)
        await log.frame("e1", [log.started("e1")])
        yield running


async def ticket_of(backend: Backend, conversation: str = "c1", tenant: str = TENANT) -> str:
    answer = await backend.client.post(f"/v1/conversations/{conversation}/tickets", headers=backend.headers(tenant))
    assert answer.status_code == 201 and answer.headers["cache-control"] == "no-store"
    value: dict[str, Any] = answer.json()
    assert 0 < value["expires_at"] / 1000 - time.time() <= TICKET_LIFE_S + 1
    assert token_of(tenant) not in answer.text
    return str(value["ticket"])


async def opens(backend: Backend, ticket: str, conversation: str = "c1") -> bool:
    """Whether a ticket opens both streams; they never differ."""
    path = f"/v1/conversations/{conversation}/events"
    async with (
        httpx2.AsyncClient(base_url=backend.url) as client,
        client.stream("GET", path, params={"ticket": ticket}) as answer,
    ):
        over_sse = answer.status_code == 200
        if not over_sse:
            assert answer.status_code == 401 and json.loads(await answer.aread())["code"] == "UNAUTHENTICATED"
    reader = SocketReader(backend.port, TENANT, conversation)
    if over_sse:
        await reader.open(headers={}, ticket=ticket)
        assert (await reader.until("live"))[0].name == "open"
        await reader.close()
    else:
        status, problem = await refused(reader, headers={}, ticket=ticket)
        assert status == 401 and problem["code"] == "UNAUTHENTICATED"
    return over_sse


async def test_a_ticket_opens_the_streams_of_its_conversation_alone(backend: Backend) -> None:
    ticket = await ticket_of(backend)
    assert await opens(backend, ticket)
    assert await opens(backend, ticket)  # until it expires; so that a browser's own reconnect works
    assert not await opens(backend, ticket, "c2")
    assert not await opens(backend, ticket[:-4] + "AAAA")
    assert not await opens(backend, "")
    # Another tenant's ticket opens that tenant's conversation of the same name, which is empty.
    theirs = await ticket_of(backend, tenant=OTHER)
    reader = await SocketReader(backend.port, OTHER).open(headers={}, ticket=theirs)
    assert [one.name for one in await reader.until("live")] == ["open", "live"]
    await reader.close()


async def test_nothing_else_takes_a_ticket(backend: Backend) -> None:
    ticket = await ticket_of(backend)
    for method, path in (
        ("GET", "/v1/conversations"),
        ("GET", "/v1/conversations/c1"),
        ("GET", "/v1/sandboxes"),
        ("GET", "/metrics"),
        ("POST", "/v1/conversations/c1/messages"),
        ("POST", "/v1/conversations/c1/tickets"),
        ("POST", "/v1/conversations/c1/events"),
        ("POST", "/v1/executions/e1/stop"),
    ):
        answer = await backend.client.request(method, path, params={"ticket": ticket}, headers={"Authorization": ""})
        assert answer.status_code == 401, path
    answer = await backend.client.get("/v1/conversations", headers={"Authorization": f"Bearer {ticket}"})
    assert answer.status_code == 401
    # A header that is sent counts: a ticket does not mend a wrong token.
    status, _ = await refused(
        SocketReader(backend.port, TENANT), headers={"Authorization": "Bearer wrong"}, ticket=ticket
    )
    assert status == 401


async def test_a_ticket_is_no_way_round_the_origin(backend: Backend) -> None:
    ticket = await ticket_of(backend)
    status, problem = await refused(
        SocketReader(backend.port, TENANT), headers={"Origin": "https://evil.example"}, ticket=ticket
    )
    assert status == 403 and problem["fields"][0]["field"] == "origin"


async def test_an_expired_ticket_is_refused_and_an_open_stream_outlives_its_own(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = await ticket_of(backend)
    reader = await SocketReader(backend.port, TENANT).open(headers={}, ticket=ticket)
    await reader.until("live")
    later_ns = time.time_ns() + round((TICKET_LIFE_S + 1) * 1e9)
    monkeypatch.setattr("tether_backend.http.edge.time.time_ns", lambda: later_ns)
    assert not await opens(backend, ticket)
    log = Log(backend.deps.bus, TENANT, "c1")
    await log.note("recovery", "n1", {})
    assert [one.key for one in await reader.events(1)] == ["n1"]
    await reader.close()


async def test_a_ticket_survives_a_restart_and_holds_on_a_replica_with_its_own_database(tmp_path: Path) -> None:
    bus = MemoryBus(MemoryServer())
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    async with running_backend(bus, [TENANT, OTHER], tmp_path / "one") as first:
        ticket = await ticket_of(first)
    async with running_backend(bus, [TENANT, OTHER], tmp_path / "two") as second:
        assert await opens(second, ticket)


async def test_a_removed_token_takes_its_tickets_with_it(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "tokens.json", [TENANT, OTHER])
    before = load_tokens(path, (TENANT, OTHER))
    now_ms = time.time_ns() // 1_000_000
    made = tickets.issue(before, Principal(TENANT, f"user of {TENANT}"), "c1", now_ms)
    path.write_text(json.dumps([one for one in json.loads(path.read_text()) if one["tenant"] == OTHER]))
    after = load_tokens(path, (TENANT, OTHER))
    assert isinstance(tickets.check(after, made.ticket, "c1", now_ms), Problem)


async def test_no_log_line_has_the_ticket_of_a_request(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    ticket = await ticket_of(backend)
    caplog.set_level(logging.DEBUG)
    caplog.set_level(1, "uvicorn.error")
    with capture_logs() as structured:
        structlog.get_logger().info("captured")
        assert await opens(backend, ticket)
        assert not await opens(backend, ticket, "c2")
        await refused(SocketReader(backend.port, TENANT), headers={}, ticket=ticket, path="/nowhere")
    clients = ("httpx2", "httpcore2", "websockets.client")  # of this test, in the same process
    server = [one.getMessage() for one in caplog.records if not one.name.startswith(clients)]
    assert structured and server and all(ticket not in text for text in [*map(str, structured), *server])
    assert not [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]


async def test_paths_behind_the_edge_see_no_ticket() -> None:
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/v1/conversations/c1/events"}
    scope["query_string"] = b"cursor=a%2Fb&ticket=x&until=idle&ticket=y"
    assert edge.take_ticket(scope) == edge.Ticket("x", "c1")
    assert scope["query_string"] == b"cursor=a%2Fb&until=idle"
    scope["path"], scope["query_string"] = "/v1/conversations", b"%74icket=x&page=p"
    assert edge.take_ticket(scope) is None and scope["query_string"] == b"page=p"
