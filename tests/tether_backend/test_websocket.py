"""A conversation over a WebSocket: the same course as the event stream's, refusals before it, close codes behind it."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support_backend import Backend, Log, Sse, ended, event, eventually, running_backend, text_delta
from support_websocket import SocketReader, refused
from tether import events as ev
from tether import subjects, topology
from tether.api import WsClose
from tether.bus import NatsBus
from tether.limits import WS_MESSAGE_BYTES_MAX
from tether.testing import MemoryBus, MemoryServer
from tether_backend.http import course

EVENTS = 4000
DISCONNECTS = 100
TCP_ESTABLISHED = "01"  # as /proc/net/tcp writes it


@pytest.fixture
async def backend(bus: NatsBus, tenant: str, tmp_path: Path) -> AsyncIterator[Backend]:
    async with running_backend(bus, [tenant], tmp_path) as running:
        yield running


@pytest.fixture
async def reader(backend: Backend, tenant: str) -> AsyncIterator[SocketReader]:
    made = SocketReader(backend.port, tenant)
    yield made
    await made.close()


async def test_frames_come_as_one_text_message_each_in_the_order_of_the_event_stream(
    backend: Backend, reader: SocketReader, bus: NatsBus, tenant: str
) -> None:
    log = Log(bus, tenant)
    await log.prompt("q1", "r1", "e1")
    await log.frame("e1", [log.started("e1"), text_delta(2, "a\n\u2028b"), text_delta(3, "c", offset=4)])
    await reader.open()
    over_ws = await reader.until("live")
    other = await backend.reader("c1", tenant).open()
    over_sse: list[Sse] = []
    while not over_sse or over_sse[-1].name != "live":
        one = await other.next()
        assert one is not None
        over_sse.append(one)
    assert over_ws == over_sse
    assert [one.name for one in over_ws] == ["open", *["message"] * 5, "live"]
    assert over_ws[0].data["heartbeat_s"] > 0 and over_ws[4].data["body"]["text"] == "a\n\u2028b"
    await log.frame("e1", [text_delta(4, "d", offset=5)])
    [live] = await reader.events(1)
    assert live.key == ("e1", 4) and live.data["replay"] is False
    await other.close()


async def _write(log: Log, total: int, chance: random.Random) -> None:
    await log.frame("e1", [log.started("e1")])
    ordinal = 2
    while ordinal <= total:
        size = min(chance.randint(1, 12), total - ordinal + 1)
        await log.frame("e1", [text_delta(n, "x", offset=n - 2) for n in range(ordinal, ordinal + size)])
        ordinal += size


async def test_a_reader_that_disconnects_100_times_during_4000_events_sees_each_once_in_order(
    reader: SocketReader, bus: NatsBus, tenant: str
) -> None:
    seed = 77
    chance = random.Random(seed)
    writer = asyncio.create_task(_write(Log(bus, tenant), EVENTS, random.Random(seed + 1)), name="writer")
    got: list[int] = []
    disconnects = 0
    while len(got) < EVENTS:
        await reader.open()
        # So many frames (not all are events) before the next disconnect; after the last one, all the rest.
        frames = chance.randint(0, 60) if disconnects < DISCONNECTS else 2 * EVENTS
        while frames and len(got) < EVENTS:
            frames -= 1
            one = await reader.next()
            assert one is not None
            if one.name == "message":
                got.append(one.data["ordinal"])
        if disconnects < DISCONNECTS:
            await reader.close()
            disconnects += 1
    await writer
    assert disconnects == DISCONNECTS, f"seed {seed}: only {disconnects} disconnects"
    assert got == list(range(1, EVENTS + 1)), f"seed {seed}"


async def test_until_ends_with_a_frame_and_a_normal_close_and_so_does_a_connect_after_that_end(
    reader: SocketReader, bus: NatsBus, tenant: str
) -> None:
    log = Log(bus, tenant)
    await log.prompt("q1", "r1", "e1")
    await log.own("e1")
    await reader.open(until="response:r1")
    await log.frame("e1", [log.started("e1"), text_delta(2, "a"), *ended(3)])
    frames = await reader.until("end")
    assert frames[-1].data["outcome"] == "completed"
    assert await reader.next() is None and reader.close_code == WsClose.END
    await reader.open(until="response:r1")
    assert [one.name for one in await reader.until("end")] == ["open", "end"]
    assert await reader.next() is None and reader.close_code == WsClose.END


async def test_a_silence_has_heartbeats_that_do_not_move_the_cursor(
    reader: SocketReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "SSE_HEARTBEAT_S", 0.05)
    await reader.open()
    frames = await reader.until("hb")
    assert frames[-1] == Sse("hb", {}, None) and reader.cursor == frames[-2].id


async def test_a_stalled_reader_is_cut_with_its_cursor_intact_and_does_not_slow_another(
    backend: Backend, bus: NatsBus, tenant: str
) -> None:
    log = Log(bus, tenant)
    await log.frame("e1", [log.started("e1")])
    stalled, quick = SocketReader(backend.port, tenant), SocketReader(backend.port, tenant)
    await stalled.open(small=True)
    await stalled.until("live")
    await quick.open()
    await quick.until("live")
    text = "x" * 8000
    total = 1200  # 10 MB: more than sockets, transport and mailbox hold
    for first in range(2, total + 1, 20):
        numbers = range(first, min(first + 20, total + 1))
        events = [event(n, ev.TEXT_DELTA, {"segment": "s", "text": text, "offset": (n - 2) * 8000}) for n in numbers]
        await log.frame("e1", events)
        await quick.events(len(events))  # it has each frame before the next is written

    async def was_cut() -> bool:
        return bool(backend.deps.metrics.cut._value.get() == 1)

    await eventually(was_cut, "the stalled reader was cut")
    seen = [1]
    with pytest.raises(ConnectionError):
        while True:
            seen += [one.data["ordinal"] for one in await stalled.events(1)]
    # It reads on at once, so the close frame behind what waited still reaches it.
    assert stalled.close_code == WsClose.SLOW and len(seen) < total
    await stalled.open()
    seen += [one.data["ordinal"] for one in await stalled.events(total - len(seen))]
    assert seen == list(range(1, total + 1))
    await stalled.close()
    await quick.close()


async def test_a_peer_that_takes_nothing_at_all_is_aborted_soon_after_it_was_cut(
    backend: Backend, bus: NatsBus, tenant: str
) -> None:
    log = Log(bus, tenant)
    await log.frame("e1", [log.started("e1")])
    with socket.socket() as plug:
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        await asyncio.to_thread(plug.connect, ("127.0.0.1", backend.port))
        head = (
            "GET /v1/conversations/c1/ws HTTP/1.1",
            f"Host: 127.0.0.1:{backend.port}",
            f"Authorization: {backend.headers()['Authorization']}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        )
        plug.sendall(("\r\n".join(head) + "\r\n\r\n").encode())
        readers = backend.deps.metrics.readers._value

        async def reads() -> bool:
            return bool(readers.get() == 1)

        await eventually(reads, "the reader is attached")
        text = "x" * 60_000
        ordinal = 2
        while readers.get() == 1:
            await log.frame("e1", [text_delta(ordinal, text, offset=(ordinal - 2) * len(text))])
            ordinal += 1

        here, there = backend.port, plug.getsockname()[1]

        async def aborted() -> bool:
            table = await asyncio.to_thread(Path("/proc/net/tcp").read_text)
            rows = [line.split() for line in table.splitlines()[1:]]
            ends = {(int(row[1].rpartition(":")[2], 16), int(row[2].rpartition(":")[2], 16)): row[3] for row in rows}
            return ends.get((here, there)) != TCP_ESTABLISHED

        await eventually(aborted, "the service let the connection go", timeout_s=10)


async def test_a_message_that_cannot_be_replied_to_closes_the_connection_and_says_what_a_message_is(
    reader: SocketReader,
) -> None:
    for message in ("{}", b"\0", '{"op": "stop"}', "[]", '{"ask": "a b"}', '{"ask": 1}', "{", b'{"ask": "a1"}'):
        await reader.open()
        await reader.until("live")
        await reader.connection.send(message)
        assert await reader.next() is None
        assert reader.close_code == WsClose.NOT_AN_ASK and "ask has 1 to 64 of A-Z a-z 0-9 _ -" in reader.close_reason
    await reader.open()
    await reader.connection.send("x" * (WS_MESSAGE_BYTES_MAX + 1))
    while await reader.next() is not None:
        pass
    assert reader.close_code == WsClose.TOO_LARGE


async def test_pings_of_the_client_are_answered(reader: SocketReader) -> None:
    await reader.open()
    await reader.until("live")
    await asyncio.wait_for(await reader.connection.ping(), 10)


async def test_a_service_that_stops_closes_with_going_away_also_a_reader_that_is_busy(
    bus: NatsBus, tenant: str, tmp_path: Path
) -> None:
    log = Log(bus, tenant)
    async with running_backend(bus, [tenant], tmp_path) as backend:
        await log.frame("e1", [log.started("e1")])
        idle, busy = SocketReader(backend.port, tenant), SocketReader(backend.port, tenant)
        await idle.open()
        await idle.until("live")
        await busy.open(small=True)
        await busy.until("live")
        text = "x" * 60_000
        for ordinal in range(2, 12):  # more than its socket holds, less than its mailbox
            await log.frame("e1", [text_delta(ordinal, text, offset=(ordinal - 2) * len(text))])
        await idle.events(10)
    for reader in (idle, busy):
        while await reader.next() is not None:
            pass
        assert reader.close_code == WsClose.STOPPED, reader.close_reason
        await reader.close()


# --- cursors that do not lead on ---


async def test_a_stream_made_anew_gives_an_old_cursor_a_problem_and_a_snapshot_and_goes_on(
    backend: Backend, bus: NatsBus, tenant: str
) -> None:
    log = Log(bus, tenant)
    await log.frame("e1", [log.started("e1"), text_delta(2, "old")])
    await backend.projected("c1", "e1", 2)
    staying, coming = SocketReader(backend.port, tenant), SocketReader(backend.port, tenant)
    await staying.open()
    await staying.until("live")
    old = staying.cursor
    await bus.delete_stream(subjects.events_stream(tenant))
    await bus.ensure(topology.tenant(tenant, max_bytes=64 << 20))
    anew = Log(bus, tenant)
    await anew.frame("e2", [anew.started("e2"), text_delta(2, "new")])
    await coming.open(old)
    for reader in (staying, coming):
        [*_, problem] = await reader.until("problem")
        assert problem.id is None and problem.data["code"] == "CURSOR_POSITION_CHANGED"
        snapshot = await reader.next()
        assert snapshot is not None and snapshot.name == "snapshot" and snapshot.id == reader.cursor
        history = snapshot.data["history"]
        assert "old" in [item["state"].get("text") for item in history["items"]]
        applied = {one["execution"]: one["applied"] for one in history["executions"]}
        have = set(range(1, applied.get("e2", 0) + 1))
        while have != {1, 2}:
            [one] = await reader.events(1)
            have.add(one.data["ordinal"])
        await reader.close()


async def test_a_start_that_nobody_has_any_more_is_told_once_and_the_rest_follows(tmp_path: Path, tenant: str) -> None:
    bus = MemoryBus(MemoryServer())
    async with running_backend(bus, [tenant], tmp_path, project=False) as backend:
        log = Log(bus, tenant)
        first = await log.frame("e1", [log.started("e1"), text_delta(2, "gone")])
        await log.frame("e1", [text_delta(3, "here", offset=4)])
        await bus.purge(subjects.events_stream(tenant), log.subject("e1"), up_to=first + 1)
        project = asyncio.create_task(backend.deps.projectors[tenant].run(), name="projector")
        try:
            await backend.projected("c1", "e1", 3)
            reader = await SocketReader(backend.port, tenant).open()
            names = [one.name for one in await reader.until("live")]
            assert names.count("problem") == 1 and names.count("snapshot") == 1
            await log.frame("e1", [text_delta(4, "more", offset=8)])
            assert [one.key for one in await reader.events(1)] == [("e1", 4)]
            await reader.close()
        finally:
            project.cancel()
            await asyncio.gather(project, return_exceptions=True)


# --- refusals ---


async def test_the_handshake_is_refused_by_the_same_problems_as_a_request(
    bus: NatsBus, tenant: str, tmp_path: Path
) -> None:
    other = f"{tenant}b"
    async with running_backend(bus, [tenant, other], tmp_path) as backend:
        log = Log(bus, tenant)
        await log.frame("e1", [log.started("e1")])
        reader = SocketReader(backend.port, tenant)
        token = backend.headers()
        await reader.open()
        await reader.until("live")
        cursor = reader.cursor
        assert cursor is not None
        await reader.close()
        reader.cursor = None

        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic abc"}):
            status, problem = await refused(reader, headers=headers)
            assert status == 401 and problem["code"] == "UNAUTHENTICATED"
        # A WebSocket is not covered by CORS: any page may try.
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
            status, problem = await refused(reader, headers={**token, "Origin": origin})
            assert status == 403 and problem["fields"][0]["field"] == "origin"
        status, problem = await refused(SocketReader(backend.port, tenant, "c2"), cursor)
        assert status == 422 and problem["fields"][0]["field"] == "cursor"
        status, problem = await refused(SocketReader(backend.port, other), cursor)
        assert status == 422 and problem["fields"][0]["field"] == "cursor"
        status, problem = await refused(reader, until="forever")
        assert status == 422 and problem["fields"][0]["field"] == "until"
        status, problem = await refused(reader, path="/v1/conversations/a.b/ws")
        assert status == 422 and problem["fields"][0]["field"] == "path.conversation"
        status, problem = await refused(reader, path="/v1/conversations/c1%2Fws")
        assert status == 422 and problem["fields"][0]["field"] == "path"
        for path in ("/", "/v1/conversations/c1/events", "/v1/conversations/c1/ws/", "/static/tether.js"):
            status, problem = await refused(reader, path=path)
            assert status == 404 and problem["code"] == "NOT_FOUND"
        # The own origin is let in.
        await reader.open(headers={**token, "Origin": backend.url})
        assert (await reader.until("live"))[0].name == "open"
        await reader.close()


async def test_a_handshake_while_the_bus_is_away_gets_503_and_open_connections_wait_and_lose_nothing(
    tmp_path: Path, tenant: str
) -> None:
    server = MemoryServer()
    bus, writing = MemoryBus(server), MemoryBus(server)
    async with running_backend(bus, [tenant], tmp_path, project=False) as backend:
        log = Log(writing, tenant)
        await log.frame("e1", [log.started("e1")])
        reader = await SocketReader(backend.port, tenant).open()
        await reader.events(1)
        bus.disconnect(for_s=0.3)
        status, problem = await refused(SocketReader(backend.port, tenant))
        assert status == 503 and problem["code"] == "RUNTIME_UNAVAILABLE" and problem["retry_after_s"] > 0
        await log.frame("e1", [text_delta(2, "while away")])
        assert [one.key for one in await reader.events(1)] == [("e1", 2)]
        await reader.close()


async def test_a_request_without_an_upgrade_is_told_to_upgrade(backend: Backend) -> None:
    answer = await backend.client.get("/v1/conversations/c1/ws")
    assert answer.status_code == 426 and answer.headers["upgrade"] == "websocket"
    assert answer.json()["fields"][0]["field"] == "header.Upgrade"


async def test_figures_count_websockets_by_their_route(backend: Backend, reader: SocketReader) -> None:
    await reader.open()
    await reader.until("live")
    text = (await backend.client.get("/metrics")).text
    assert "tether_sse_readers 1.0" in text
    await reader.close()

    async def counted() -> bool:
        told = (await backend.client.get("/metrics")).text
        return 'method="WS",route="/v1/conversations/{conversation}/ws",status="101"' in told

    await eventually(counted, "the handshake is counted")
