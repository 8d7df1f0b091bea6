"""Every kind of client goes on from its cursor, or is told why not: event stream, WebSocket, the SDK over both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from support_backend import Backend, Log, Sse, ended, running_backend, text_delta, token_of
from support_websocket import SocketReader
from tether import subjects, topology
from tether.bus import NatsBus
from tether.client import Client
from tether.client.items import CaughtUp, ExecutionItem, GapItem, PositionChanged, SnapshotItem
from tether.errors import ProblemError

KINDS = ("sse", "websocket", "sdk over http", "sdk over nats")
Until = Callable[["Told"], bool]


@dataclass
class Told:
    """What one connection told, in order."""

    events: list[tuple[str, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    applied: dict[str, int] = field(default_factory=dict)  # of the newest snapshot
    live: bool = False
    cursor: str | None = None

    def frame(self, one: Sse) -> None:
        self.cursor = one.id or self.cursor
        match one.name:
            case "message" if one.data.get("execution"):
                self.events.append((one.data["execution"], one.data["ordinal"]))
            case "problem":
                self.problems.append(one.data["code"])
            case "snapshot":
                self.applied = {run["execution"]: run["applied"] for run in one.data["history"]["executions"]}
            case "live":
                self.live = True

    def item(self, item: Any) -> None:
        self.cursor = item.cursor or self.cursor
        match item:
            case ExecutionItem():
                self.events.append((item.execution, item.ordinal))
            case PositionChanged():
                self.problems.append("CURSOR_POSITION_CHANGED")
            case GapItem():
                self.problems.append("RETENTION_GAP")
            case SnapshotItem():
                self.applied = {name: state.applied for name, state in item.executions.items()}
            case CaughtUp():
                self.live = True

    def has(self, execution: str, ordinal: int) -> bool:
        return (execution, ordinal) in self.events or self.applied.get(execution, 0) >= ordinal


@dataclass
class Reading:
    """A client of one kind. Each `read` is a connection of its own."""

    kind: str
    backend: Backend
    bus: NatsBus
    tenant: str

    async def read(self, cursor: str | None, until: Until, *, conversation: str = "c1") -> Told:
        told = Told(cursor=cursor)
        async with asyncio.timeout(30):
            if self.kind in ("sse", "websocket"):
                await self._frames(told, cursor, until, conversation)
            else:
                await self._items(told, cursor, until, conversation)
        return told

    async def _frames(self, told: Told, cursor: str | None, until: Until, conversation: str) -> None:
        reader: Any = (
            self.backend.reader(conversation, self.tenant)
            if self.kind == "sse"
            else SocketReader(self.backend.port, self.tenant, conversation)
        )
        await reader.open(cursor)
        if getattr(reader, "status", 200) != 200:
            raise RefusedError(reader.status)
        while not until(told):
            one = await reader.next()
            assert one is not None
            told.frame(one)
        await reader.close()

    async def _items(self, told: Told, cursor: str | None, until: Until, conversation: str) -> None:
        over_http = self.kind == "sdk over http"
        client = (
            Client.http(self.backend.url, token_of(self.tenant))
            if over_http
            else Client.nats(self.bus, tenant=self.tenant)
        )
        async with client, aclosing(client.follow(conversation, cursor)) as items:
            async for item in items:
                told.item(item)
                if until(told):
                    return


class RefusedError(Exception):
    pass


@pytest.fixture
async def backend(bus: NatsBus, tenant: str, tmp_path: Path) -> AsyncIterator[Backend]:
    async with running_backend(bus, [tenant], tmp_path) as running:
        yield running


@pytest.fixture(params=KINDS)
def reading(request: pytest.FixtureRequest, backend: Backend, bus: NatsBus, tenant: str) -> Reading:
    return Reading(request.param, backend, bus, tenant)


async def begun(reading: Reading) -> Log:
    log = Log(reading.bus, reading.tenant)
    await log.own("e1")
    return log


async def test_a_client_that_leaves_before_its_first_event_loses_nothing(reading: Reading) -> None:
    log = await begun(reading)
    await log.prompt("q0", "r0", "e0")
    first = await reading.read(None, lambda told: told.live)
    assert first.cursor is not None and first.events == []
    await log.frame("e1", [log.started("e1"), text_delta(2, "a")])
    again = await reading.read(first.cursor, lambda told: told.has("e1", 2))
    assert (again.events, again.problems) == ([("e1", 1), ("e1", 2)], [])


async def test_a_cursor_within_a_frame_goes_on_within_it(reading: Reading) -> None:
    log = await begun(reading)
    await log.frame("e1", [log.started("e1"), *(text_delta(n, "x", offset=n - 2) for n in range(2, 6))])
    first = await reading.read(None, lambda told: len(told.events) == 2)
    again = await reading.read(first.cursor, lambda told: told.has("e1", 5))
    assert again.events == [("e1", 3), ("e1", 4), ("e1", 5)]


async def test_a_stale_cursor_of_a_log_made_anew_is_told_and_the_new_log_given(reading: Reading) -> None:
    log = await begun(reading)
    await log.frame("e1", [log.started("e1"), text_delta(2, "old")])
    await reading.backend.projected("c1", "e1", 2)
    old = (await reading.read(None, lambda told: told.has("e1", 2))).cursor
    await reading.bus.delete_stream(subjects.events_stream(reading.tenant))
    await reading.bus.ensure(topology.tenant(reading.tenant, max_bytes=64 << 20))
    anew = Log(reading.bus, reading.tenant)
    await anew.frame("e2", [anew.started("e2"), text_delta(2, "new"), text_delta(3, "er", offset=3)])
    again = await reading.read(old, lambda told: told.has("e2", 3))
    assert again.problems == ["CURSOR_POSITION_CHANGED"]
    assert len(again.events) == len(set(again.events))


async def test_a_stale_cursor_before_the_retained_range_is_no_gap_where_nothing_is_missing(reading: Reading) -> None:
    log = await begun(reading)
    await log.frame("e1", [log.started("e1"), text_delta(2, "shown")])
    shown = await reading.read(None, lambda told: told.has("e1", 2))
    await log.frame("e2", [log.started("e2")])
    await reading.backend.projected("c1", "e2", 1)
    await reading.bus.purge(subjects.events_stream(reading.tenant), log.subject("e1"))
    await log.frame("e2", [text_delta(2, "on"), *ended(3)])
    again = await reading.read(shown.cursor, lambda told: told.has("e2", 4))
    assert again.problems == []


async def test_a_foreign_cursor_is_refused_before_anything_is_told(reading: Reading) -> None:
    log = await begun(reading)
    await log.frame("e1", [log.started("e1")])
    cursor = (await reading.read(None, lambda told: told.has("e1", 1))).cursor
    with pytest.raises((RefusedError, InvalidStatus, ProblemError)) as refused:
        await reading.read(cursor, lambda told: told.live, conversation="c2")
    told = refused.value
    if isinstance(told, ProblemError):
        assert told.problem.status == 422 and told.problem.fields[0].field == "cursor"
    else:
        assert "422" in str(told)
