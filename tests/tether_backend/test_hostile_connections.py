"""Connections that nobody has judged yet, and readers that send what is not read: each has its bound and its answer."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from support_backend import Backend, Log, eventually, running_backend, text_delta, token_of
from tether.api import WsClose
from tether.limits import WS_MESSAGE_BYTES_MAX
from tether.testing import MemoryBus, MemoryServer
from tether_backend.http import server

TENANT = "acme"
HANDSHAKE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
)
WS = "/v1/conversations/c1/ws"
PING, TEXT = 9, 1


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Backend]:
    bus = MemoryBus(MemoryServer())
    async with running_backend(bus, [TENANT], tmp_path) as running:
        await Log(bus, TENANT).prompt("q1", "r1", "e1")
        yield running


def request(backend: Backend, path: str, *lines: str, method: str = "GET") -> bytes:
    host = f"Host: 127.0.0.1:{backend.port}"
    return "\r\n".join([f"{method} {path} HTTP/1.1", host, *lines, "", ""]).encode("latin-1")


async def plug(backend: Backend, *, small: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    made = socket.socket()
    if small:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", backend.port))
    return await asyncio.open_connection(sock=made, limit=1 << 16)


async def answered(backend: Backend, data: bytes) -> tuple[int, bytes]:
    """Status and body of an answer behind which the server closes."""
    reader, writer = await plug(backend)
    writer.write(data)
    async with asyncio.timeout(10):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.transport.abort()
    assert b"application/problem+json" in head, head
    return int(head.split()[1]), body


async def follow(backend: Backend, *, small: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await plug(backend, small=small)
    writer.write(request(backend, WS, *HANDSHAKE, f"Authorization: Bearer {token_of(TENANT)}"))
    async with asyncio.timeout(10):
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    return reader, writer


def frame(opcode: int, payload: bytes, *, fin: bool = True) -> bytes:
    return bytes([(0x80 if fin else 0) | opcode, 0x80 | len(payload)]) + b"\0\0\0\0" + payload


@pytest.mark.parametrize("origin", ["http://[::1", "http://[", "https://", "http://a]b", "null", "://", "http://\xe9"])
@pytest.mark.parametrize("path", ["/", "/v1/conversations", WS])
async def test_an_origin_that_is_none_is_refused_as_a_foreign_one(backend: Backend, origin: str, path: str) -> None:
    lines = HANDSHAKE if path == WS else ("Connection: close",)
    status, body = await answered(backend, request(backend, path, f"Origin: {origin}", *lines))
    assert (status, json.loads(body)["fields"][0]["field"]) == (403, "origin")


@pytest.mark.parametrize(
    ("method", "lines", "body", "status"),
    [
        ("POST", (), b"", 405),
        ("GET", ("Content-Length: 5",), b"hello", 400),
        ("POST", ("Content-Length: 5",), b"hello", 400),
        ("GET", ("Transfer-Encoding: chunked",), b"0\r\n\r\n", 400),
        ("GET", tuple(f"X-{number}: a" for number in range(200)), b"", 400),
        ("GET", ("X-Long: " + "a" * 20_000,), b"", 400),
        ("GET", ("Sec-WebSocket-Version: 12",), b"", 400),
    ],
)
async def test_a_handshake_that_is_none_gets_a_problem_document_and_the_connection_is_closed(
    backend: Backend, method: str, lines: tuple[str, ...], body: bytes, status: int
) -> None:
    told = await answered(backend, request(backend, WS, *HANDSHAKE, *lines, method=method) + body)
    assert (told[0], json.loads(told[1])["fields"][0]["field"]) == (status, "request")


@pytest.mark.parametrize(
    "begin",
    [b"GET / HTTP/1.1\r\nX: ", b"GET /", b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: "],
    ids=["header", "line", "trailer"],
)
async def test_a_head_without_an_end_is_cut_off_at_its_bound(backend: Backend, begin: bytes) -> None:
    _, writer = await plug(backend)
    writer.write(begin)
    sent = 0
    with pytest.raises(OSError):
        while sent < 64 << 20:
            writer.write(b"a" * 65_536)
            await writer.drain()
            sent += 65_536
    assert sent < 16 << 20, "what lies in the sockets, and the bound"
    writer.transport.abort()


async def test_a_long_token_and_query_still_fit_in_a_head(backend: Backend) -> None:
    answer = await backend.client.get("/v1/conversations?x=" + "a" * 30_000, headers={"X-Long": "a" * 20_000})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "begin",
    [
        b"",
        b"GET / HT",
        b"\r\n",
        b"POST /v1/conversations/c1/messages HTTP/1.1\r\nContent-Length: 100\r\n\r\nab",
        b"GET /healthz HTTP/1.1\r\n\r\nGET / HT",
    ],
    ids=["nothing", "half a line", "a newline", "half a body", "half of a second request"],
)
async def test_a_connection_that_does_not_finish_its_request_is_given_up(
    backend: Backend, begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.2)
    reader, writer = await plug(backend)
    writer.write(begin)
    async with asyncio.timeout(10):
        try:
            await reader.read()
        except ConnectionResetError:
            pass
    writer.transport.abort()


async def test_a_stream_outlives_the_time_that_a_request_may_take(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.2)
    reader = await backend.reader("c1").open()
    await reader.events(2)
    over_ws, writer = await follow(backend)
    with pytest.raises(TimeoutError):
        await reader.next(timeout_s=0.6) and await reader.next(timeout_s=0.6)
    await Log(backend.deps.bus, TENANT).prompt("q2", "r2", "e2")
    assert str((await reader.events(1))[0].key).startswith("q2/")
    async with asyncio.timeout(10):
        await over_ws.readuntil(b"q2/response.created")
    writer.transport.abort()


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_a_peer_that_pings_and_reads_nothing_is_owed_no_more_than_the_last_pongs(backend: Backend) -> None:
    before = memory_bytes()
    reader, writer = await follow(backend, small=True)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    pings = frame(PING, b"x" * 125) * 500
    for _ in range(32 * 1024 * 1024 // len(pings)):
        writer.write(pings)
        await writer.drain()
    assert memory_bytes() - before < 16 << 20
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    writer.write(frame(PING, b"the last"))
    async with asyncio.timeout(10):
        while b"the last" not in await reader.read(65_536):
            pass
    writer.transport.abort()


async def test_a_message_in_fragments_without_end_costs_its_bytes_up_to_the_bound_of_a_message(
    backend: Backend,
) -> None:
    before = memory_bytes()
    reader, writer = await follow(backend)
    writer.write(frame(TEXT, b"{", fin=False))
    for size in (0, 1):
        pieces = frame(0, b" " * size, fin=False) * 10_000
        for _ in range(10):
            writer.write(pieces)
            await writer.drain()
    left = (WS_MESSAGE_BYTES_MAX - 1 - 10 * 10_000) // 120 - 1  # a ping fits, too
    writer.write(frame(0, b" " * 120, fin=False) * left + frame(PING, b"the last"))
    async with asyncio.timeout(20):
        while b"the last" not in (told := await reader.read(65_536)):
            assert told, "closed before the bound"
        assert memory_bytes() - before < 24 << 20
        writer.write(frame(0, b" " * 120, fin=False) * 2 + frame(0, b" " * 120))
        told = await reader.read()
    assert struct.pack(">H", WsClose.TOO_LARGE) in told[-130:] and b"exceeds limit" in told
    writer.transport.abort()


async def test_readers_that_come_and_go_leave_nothing_behind(backend: Backend) -> None:
    readers = backend.deps.metrics.readers._value

    async def one(kind: str) -> None:
        if kind == "ws":
            _, writer = await follow(backend)
        else:
            _, writer = await plug(backend)
            writer.write(request(backend, WS, *HANDSHAKE) if kind == "refused" else b"GET / HT")
        writer.transport.abort()

    async def gone() -> bool:
        return readers.get() == 0 and not any(task.get_name().startswith("reader-") for task in asyncio.all_tasks())

    await asyncio.gather(*[one(kind) for kind in ("ws", "refused", "half") for _ in range(20)])
    await eventually(gone, "every reader is gone")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a folder of the kernel's
    for _ in range(5):
        await asyncio.gather(*[one(kind) for kind in ("ws", "refused", "half") for _ in range(20)])
    await eventually(gone, "every reader is gone")

    async def closed() -> bool:
        return len(os.listdir("/proc/self/fd")) <= before + 2  # noqa: PTH208

    await eventually(closed, "every descriptor is closed")


@pytest.mark.parametrize("data", [b"rubbish", b'{"v":1,"id":"\\ud800","generation":1,"at":1,"type":"x","body":{}}'])
async def test_what_is_no_message_of_the_log_keeps_nobody_from_what_follows(backend: Backend, data: bytes) -> None:
    for subject in ("w$.c1.e1", "w.c1.e$", "\xe9.c1._", "w.c1.e9"):
        await backend.deps.bus.publish(f"tether.event.{TENANT}.{subject}", data)
    await Log(backend.deps.bus, TENANT).prompt("q2", "r2", "e2")
    reader = await backend.reader("c1").open()
    assert [one.key for one in await reader.events(4)][3] == "q2/response.created"
    over_ws, writer = await follow(backend)
    async with asyncio.timeout(10):
        await over_ws.readuntil(b"q2/response.created")
    writer.transport.abort()
    for until in ("idle", "response:r1", "response:r2"):
        again = await backend.reader("c1").open(reader.cursor, until=until)
        assert again.status in (200, 204)
    assert (await backend.client.get("/v1/controls/k1", params={"execution": "e1"})).status_code in (404, 409)


@pytest.mark.parametrize("until", ["response:\u00b2", "response:", "response:a b", "response:" + "a" * 65, "idle:x"])
async def test_an_end_that_can_never_come_is_refused(backend: Backend, until: str) -> None:
    answer = await backend.client.get("/v1/conversations/c1/events", params={"until": until})
    assert answer.status_code == 422 and answer.json()["fields"][0]["field"] == "until"


async def test_a_peer_whose_frames_are_none_is_closed_for_it_and_nothing_is_told_of_as_a_failure_here(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    log = Log(backend.deps.bus, TENANT)
    for first in range(1, 2000, 500):
        await log.frame("e1", [text_delta(first + more, "x" * 40, offset=40 * more) for more in range(500)])

    async def one(wait: int, sent: bytes, code: int) -> None:
        reader, writer = await follow(backend)
        for _ in range(wait):
            await asyncio.sleep(0)
        writer.write(sent)  # while much is on its way to the peer
        async with asyncio.timeout(20):
            told = await reader.read()
        assert struct.pack(">H", code) in told
        writer.transport.abort()

    for wait in range(6):
        await one(wait, b"\xf3\x80\0\0\0\0", 1002)  # a reserved opcode
        await one(wait, frame(TEXT, b'{"ask":"\xf8"}'), 1007)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("OPTIONS", "/v1/sandboxes/w1", "DELETE, GET"),
        ("POST", "/v1/executions/e1/items", "GET"),
        ("POST", "/v1/executions/e1/snapshot", "GET"),
        ("GET", "/v1/executions/e1/stop", "POST"),
        ("DELETE", "/v1/conversations/c1/interactions/a/b", "POST"),
    ],
)
async def test_a_method_that_a_path_does_not_take_is_refused_with_those_that_it_takes(
    backend: Backend, method: str, path: str, allow: str
) -> None:
    answer = await backend.client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)


async def test_an_execution_takes_no_other_verb_than_those_of_the_document(backend: Backend) -> None:
    assert (await backend.client.post("/v1/executions/e1/kill", json={})).status_code == 404


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_failure_of_the_service(backend: Backend) -> None:
    bearer = f"Authorization: Bearer {token_of(TENANT)}"
    with structlog.testing.capture_logs() as told:
        for path in ("/v1/executions/e1/stop", "/v1/sandboxes/w1/resume", "/v1/conversations/c1/messages"):
            _, writer = await plug(backend)
            writer.write(request(backend, path, bearer, "Content-Length: 100", method="POST") + b'{"a":')
            await writer.drain()
            writer.write_eof()
            writer.close()

        async def counted() -> bool:
            answer = await backend.client.get("/metrics")
            broken = [line for line in answer.text.splitlines() if "_requests" in line and 'status="400"' in line]
            return sum(float(line.rpartition(" ")[2]) for line in broken) >= 3

        await eventually(counted, "each of them is over")
    assert [one for one in told if one["log_level"] in ("error", "critical")] == []


@pytest.mark.parametrize("path", ["/static/a%5Cb", "/v1/executions/a%2Fb", "/v1/sandboxes/a%2fb/drains/d"])
async def test_an_encoded_slash_is_refused_as_the_document_says(backend: Backend, path: str) -> None:
    answer = await backend.client.get(path)
    assert answer.status_code == 422 and answer.json()["fields"][0]["field"].startswith("path")
