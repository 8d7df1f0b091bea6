"""What no client would send: heads and bodies that are broken, cursors that are none, WebSocket frames of any kind.

Laws: every connection is answered or closed within its time; an answer's status is one that the OpenAPI document has
for that operation, or one that stands before any operation; what is refused is refused by a problem document, and 5xx
by a typed one that may be tried again; a WebSocket is closed for a reason that is the peer's.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from tether_fuzz.mutate import TOKENS, Mutator

ANSWER_S: Final = 45.0  # of one connection on a machine that is busy; a control waits 10 s for its collector
STREAM_S: Final = 1.0  # an event stream, or a socket that keeps silent, is read for so long
READ_BYTES_MAX: Final = 4 << 20
# Before any operation: the head cannot be read, no token, another host, no path, no method, too large, not valid.
BEFORE: Final = frozenset({400, 401, 403, 404, 405, 413, 414, 422, 429, 431})
CLOSES: Final = frozenset({1000, 1001, 1002, 1003, 1007, 1008, 1009, 4408})
_METHODS: Final = ("GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH", "get", "TRACE", "\xe9", "A" * 300)
_SEGMENTS: Final = (
    *("fuzz", "none", "a%2Fb", "%00", "..", ".", "%ff", "\xff", "a" * 65, "%F0%9D%84%9E", "", "a;b", "*", "%", "%zz"),
)
_HEADERS: Final = (
    *("Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: 5, 6"),
    *("Content-Length: \xb2", "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Expect: 100-continue"),
    *("Transfer-Encoding: chunked\r\nContent-Length: 4", "Connection: Upgrade\r\nUpgrade: h2c", "Host: elsewhere"),
    *("Idempotency-Key: \xff", "Idempotency-Key: " + "k" * 300, "Last-Event-ID: \xe9", "Last-Event-ID: " + "A" * 41),
    *("Accept: \x00", "Content-Type: text/plain", "Content-Type: application/json; charset=utf-16", "Origin: null"),
    *(
        "X: " + "a" * 70_000,
        "No-Colon",
        " folded",
        ": empty",
        "A\x00B: c",
        "Traceparent: 00-zz",
        "Traceparent: 00-0-0-1",
    ),
    *("If-None-Match: *", "Range: bytes=0-", "Accept-Encoding: gzip", "X-Forwarded-For: \xff", "Cookie: a=b"),
)
_CHUNKS: Final = (
    b"5\r\nhello\r\n0\r\n\r\n",
    b"FFFFFFFFFFFFFFFF\r\n",
    b"-1\r\n",
    b"5\r\nhell",
    b"0\r\nX: y\r\n\r\n",
    b"zz\r\n\r\n",
)
_MESSAGE: Final = {
    "request_id": "req-fuzz",
    "content": [{"type": "text", "text": "!say fuzz"}],
    "agent": {"kind": "none-of-these"},
    "workspace": "fuzz",
}
_BODIES: Final[tuple[Any, ...]] = (
    _MESSAGE,
    {"decision": "allow", "answers": {"q": ["a"]}, "control_id": "k1", "execution": "e"},
    {"control_id": "k2"},
    {"drain_id": "d1", "grace_s": 1, "reason": "r", "store": "volume", "include": "sessions"},
    {},
)
_ASKS: Final[tuple[dict[str, Any], ...]] = (
    {"ask": "a1", "op": "answer", "body": {"interaction": "i", "decision": "deny", "execution": "none"}},
    {"ask": "a2", "op": "stop", "body": {"execution": "none", "control_id": "k3"}},
    {"ask": "a3", "op": "control", "body": {"control_id": "k3", "execution": "none"}},
    {"ask": "a4", "op": "send", "body": _MESSAGE},
)


@dataclass(frozen=True, slots=True)
class Wrong:
    where: str
    text: str
    data: bytes


@dataclass(slots=True)
class Raw:
    """Against one service. `document`: its OpenAPI document."""

    host: str
    port: int
    token: str
    document: dict[str, Any]
    rng: random.Random
    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[Wrong] = field(default_factory=list)
    _body: Callable[[bytes], bytes] = field(init=False)
    _text: Callable[[bytes], bytes] = field(init=False)
    _operations: list[tuple[str, re.Pattern[str], str, dict[str, Any]]] = field(init=False)

    def __post_init__(self) -> None:
        bodies = [json.dumps(body).encode() for body in (*_BODIES, *_ASKS)]
        self._body = Mutator(self.rng, "json", 200_000, bodies)
        self._text = Mutator(self.rng, "text", 120, [b"AQAAAAAAAAAB__8", b"response:r1", b"idle"])
        self._operations = []
        for path, item in self.document["paths"].items():
            pattern = re.sub(r"\\\{interaction\\\}", ".+", re.escape(path))
            compiled = re.compile(re.sub(r"\\\{[a-z_]+\\\}", "[^/]+", pattern))
            for method in ("get", "post", "delete", "put", "patch"):
                if method in item:
                    self._operations.append((method.upper(), compiled, path, item[method]))

    def one(self) -> None:
        """One connection."""
        what = self.rng.random()
        if what < 0.2:
            self._socket()
        elif what < 0.35:
            self._stream()
        else:
            self._request()

    def _connected(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=ANSWER_S)

    # --- requests ---

    def _path(self) -> str:
        path = self.rng.choice([one[2] for one in self._operations])
        if self.rng.random() < 0.1:
            path = self.rng.choice(("/", "//", "/v1", "/v1/", "*", "http://x/", "/healthz/", "/static/../x", "/\x00"))
        path = re.sub(r"\{[a-z_]+\}", lambda _: self.rng.choice(_SEGMENTS), path)
        if self.rng.random() < 0.3:
            query = self._text(b"limit=5&page=AA&cursor=AA&state=active").decode("latin-1")
            path += "?" + re.sub(r"[\r\n ]", "+", query)
        return path

    def _head(self, method: str, path: str, more: list[str]) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}"]
        if self.rng.random() < 0.9:
            lines.append(f"Authorization: Bearer {self.token}")
        return "\r\n".join([*lines, *more, "", ""]).encode("latin-1", "replace")

    def _request(self) -> None:
        rng = self.rng
        method = rng.choice(_METHODS) if rng.random() < 0.3 else rng.choice(("GET", "POST"))
        path = self._path()
        body = self._body(json.dumps(rng.choice(_BODIES)).encode())
        more = ["Connection: close"] if rng.random() < 0.8 else []
        more += [rng.choice(_HEADERS) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
        if not any(line.startswith(("Content-Length", "Transfer")) for line in more):
            more.append(f"Content-Length: {len(body)}")
        if any("chunked" in line for line in more):
            body = rng.choice(_CHUNKS)
        data = self._head(method, path, more) + body
        if rng.random() < 0.15:
            at = rng.randrange(len(data))
            data = data[:at] + rng.choice(TOKENS) + data[at + rng.choice((0, 1, 4)) :]
        self._judge(data, self._exchange(data), method, path)

    def _stream(self) -> None:
        """Cursors: of an event stream, and of what it is asked to end with."""
        cursor = re.sub(r"[^!-~]|[&#]", "A", self._text(b"AQAAAAAAAAAB__8AAAAAAAAAAAAAAAA").decode("latin-1"))
        until = re.sub(r"[^!-~]|[&#]", "A", self._text(self.rng.choice((b"response:r1", b"idle"))).decode("latin-1"))
        path = f"/v1/conversations/fuzz/events?cursor={cursor}"
        if self.rng.random() < 0.5:
            path += f"&until={until}"
        more = [f"Last-Event-ID: {cursor[::-1]}"] if self.rng.random() < 0.3 else []
        data = self._head("GET", path, ["Connection: close", *more])
        self._judge(data, self._exchange(data, stream=True), "GET", path)

    def _exchange(self, data: bytes, *, stream: bool = False) -> bytes | None:
        """What came back until the end of the answer; None where nothing was said in time."""
        answer = b""
        with contextlib.suppress(ConnectionError), self._connected() as plug:
            with contextlib.suppress(ConnectionError):
                plug.sendall(data)
            with contextlib.suppress(OSError):
                plug.shutdown(socket.SHUT_WR) if self.rng.random() < 0.5 and not stream else None
            while len(answer) < READ_BYTES_MAX:
                if _is_whole(answer):
                    break
                plug.settimeout(STREAM_S if stream and b"\r\n\r\n" in answer else ANSWER_S)
                try:
                    piece = plug.recv(65_536)
                except TimeoutError:
                    return answer if answer else None
                if not piece:
                    break
                answer += piece
        return answer

    def _judge(self, data: bytes, answer: bytes | None, method: str, path: str) -> None:
        if answer is None:
            self._note("no answer", f"nothing within {ANSWER_S:g} s", data)
            return
        if not answer:
            self.answers["closed"] += 1
            return
        found = re.match(rb"HTTP/1\.[01] (\d{3})", answer)
        if found is None:
            self._note("no HTTP", repr(answer[:200]), data)
            return
        status = int(found[1])
        self.answers[str(status)] += 1
        head, _, body = answer.partition(b"\r\n\r\n")
        if status in (100, 101):
            return
        known = self._statuses(method, path)
        if status not in BEFORE and status not in known:
            self._note(f"status {status}", repr(answer[:600]), data)
        elif status >= 400 and method != "HEAD" and b"application/problem+json" not in head:
            self._note(f"{status} without a problem document", repr(answer[:600]), data)
        elif status >= 500 and b'"retryable":true' not in body.replace(b" ", b""):
            self._note(f"status {status}", repr(answer[:600]), data)

    def _statuses(self, method: str, path: str) -> set[int]:
        bare = re.sub(r"^https?://[^/]*", "", path.partition("?")[0])
        found: set[int] = {200, 204, 304} if method in ("HEAD", "OPTIONS") else set()
        for name, pattern, _, operation in self._operations:
            if name == method and pattern.fullmatch(bare):
                found |= {int(status) for status in operation["responses"] if status.isdigit()}
        return found

    def _note(self, where: str, text: str, data: bytes) -> None:
        if not any(one.where == where for one in self.wrong):
            self.wrong.append(Wrong(where, text, data.replace(self.token.encode(), b"TOKEN")))

    # --- WebSockets ---

    def _socket(self) -> None:
        rng = self.rng
        handshake = ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
        handshake.append(f"Sec-WebSocket-Key: {rng.choice(('dGhlIHNhbXBsZSBub25jZQ==', 'short', ''))}")
        if rng.random() < 0.3:
            handshake.append(
                rng.choice(("Sec-WebSocket-Extensions: permessage-deflate", "Sec-WebSocket-Protocol: \xff"))
            )
        data = self._head("GET", "/v1/conversations/fuzz/ws", handshake)
        frames = [self._frame() for _ in range(rng.randint(1, 6))]
        with contextlib.suppress(ConnectionError), self._connected() as plug:
            plug.sendall(data)
            head = b""
            while b"\r\n\r\n" not in head:
                piece = plug.recv(65_536)
                if not piece:
                    break
                head += piece
            if not head.startswith(b"HTTP/1.1 101"):
                self._judge(data, head, "GET", "/v1/conversations/fuzz/ws")
                return
            self.answers["101"] += 1
            self._talk(plug, frames, data, head.partition(b"\r\n\r\n")[2])

    def _talk(self, plug: socket.socket, frames: list[bytes], data: bytes, came: bytes) -> None:
        sent = b"".join(frames)
        with contextlib.suppress(ConnectionError):
            plug.sendall(sent)
        plug.settimeout(STREAM_S)
        with contextlib.suppress(TimeoutError, ConnectionError):
            while len(came) < READ_BYTES_MAX and (piece := plug.recv(65_536)):
                came += piece
        for opcode, payload in _frames_of(came):
            if opcode == 8 and len(payload) >= 2:
                (code,) = struct.unpack_from(">H", payload)
                self.answers[f"closed {code}"] += 1
                if code not in CLOSES:
                    self._note(f"closed by {code}", repr(payload), data + sent)
            elif opcode == 1:
                self._check_frame(payload, data + sent)

    def _check_frame(self, payload: bytes, data: bytes) -> None:
        try:
            value = json.loads(payload)
        except ValueError:
            self._note("a frame that is no JSON", repr(payload[:300]), data)
            return
        told = value.get("data") or {}
        if (
            value.get("frame") == "reply"
            and told.get("status", 0) >= 500
            and not (told.get("body") or {}).get("retryable")
        ):
            self._note(f"a reply {told.get('status')}", repr(payload[:300]), data)

    def _frame(self) -> bytes:
        rng = self.rng
        payload = json.dumps(rng.choice(_ASKS)).encode()
        if rng.random() < 0.8:
            payload = self._body(payload)
        opcode = rng.choice((1, 1, 1, 1, 1, 2, 0, 8, 9, 10, 3, 15))
        if opcode >= 8 and rng.random() < 0.8:
            payload = payload[:120]
        first = opcode | rng.choice((0x80, 0x80, 0x80, 0x80, 0, 0xC0))
        masked = 0x80 if rng.random() < 0.97 else 0
        length = len(payload) if rng.random() < 0.95 else rng.choice((0, 2**16, 2**31, 2**63))
        if length < 126:
            head = struct.pack(">BB", first, masked | length)
        elif length < 65_536:
            head = struct.pack(">BBH", first, masked | 126, length)
        else:
            head = struct.pack(">BBQ", first, masked | 127, length)
        return head + (b"\0\0\0\0" if masked else b"") + payload


def _is_whole(answer: bytes) -> bool:
    """An answer with its length, all of which is here."""
    head, end, body = answer.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    return bool(end) and found is not None and len(body) >= int(found[1])


def _frames_of(data: bytes) -> list[tuple[int, bytes]]:
    """Of a server: unmasked, whole ones only."""
    found, at = [], 0
    while at + 2 <= len(data):
        opcode, length, head = data[at] & 15, data[at + 1] & 127, 2
        if length == 126 and at + 4 <= len(data):
            (length,), head = struct.unpack_from(">H", data, at + 2), 4
        elif length == 127 and at + 10 <= len(data):
            (length,), head = struct.unpack_from(">Q", data, at + 2), 10
        if at + head + length > len(data):
            break
        found.append((opcode, data[at + head : at + head + length]))
        at += head + length
    return found
