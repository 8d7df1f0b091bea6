"""The HTTP shell: one thread per connection, loopback only, every request recorded.

A request's record is in `requests` (and in the log) before its first answer byte goes out, so whoever has an answer
finds its request there. API keys are compared and forgotten: a record says `accepted`, `refused` or `absent`.
"""

from __future__ import annotations

import contextlib
import gzip
import hmac
import json
import select
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from fake_models import anthropic, openai
from fake_models.script import (
    Counters,
    Directive,
    DirectiveError,
    Hang,
    HttpError,
    Plan,
    Reply,
    Sse,
    Turn,
    choose,
    plan,
)

BODY_BYTES_MAX: Final = 64 << 20
_REQUESTS_KEPT_MAX: Final = 10_000
_SECRET_HEADERS: Final = frozenset({"authorization", "x-api-key", "api-key", "cookie", "proxy-authorization"})


@dataclass(frozen=True, slots=True)
class Protocol:
    """One API: how to read a conversation and how to write a reply."""

    turns: Callable[[Mapping[str, Any]], list[Turn]]
    whole: Callable[[Reply, Mapping[str, Any]], dict[str, Any]]
    events: Callable[[Reply, Mapping[str, Any]], Iterator[Sse]]
    error: Callable[[int, str], dict[str, Any]]


ANTHROPIC: Final = Protocol(anthropic.turns_of, anthropic.message, anthropic.events, anthropic.error_body)
RESPONSES: Final = Protocol(openai.response_turns, openai.response, openai.response_events, openai.error_body)
CHAT: Final = Protocol(openai.chat_turns, openai.chat, openai.chat_events, openai.error_body)
_ROUTES: Final = {"/messages": ANTHROPIC, "/responses": RESPONSES, "/chat/completions": CHAT}


class RequestError(Exception):
    """An answer with this status and no more."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FakeModels:
    """The server as a context manager; it listens from construction on.

    `requests` holds one record per request: method, path, key, headers without secrets, and for model calls
    directive, step, stream, model and the newest user text.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        log: Path | None = None,
        log_bodies: bool = False,
        require_key: str | None = None,
    ) -> None:
        self.requests: list[dict[str, Any]] = []
        self.counters = Counters()
        self.require_key = require_key
        self.log_bodies = log_bodies
        self.stopping = threading.Event()
        self._started_at = time.monotonic()
        self._lock = threading.Lock()
        self._server = _Server(port, self)
        self._log = log.open("a", encoding="utf-8") if log is not None else None
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="fake-models")

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeModels:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.hang_up()
        self._server.server_close()  # waits for the connections' threads
        if self._log is not None:
            self._log.close()

    def record(self, entry: dict[str, Any]) -> None:
        entry["t"] = round(time.monotonic() - self._started_at, 3)
        with self._lock:
            if len(self.requests) < _REQUESTS_KEPT_MAX:
                self.requests.append(entry)
            if self._log is not None:
                self._log.write(json.dumps(entry) + "\n")
                self._log.flush()


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True

    def __init__(self, port: int, owner: FakeModels) -> None:
        self.owner = owner
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)

    def opened(self, connection: socket.socket) -> None:
        with self._open_lock:
            self._open.add(connection)

    def closed(self, connection: socket.socket) -> None:
        with self._open_lock:
            self._open.discard(connection)

    def hang_up(self) -> None:
        """End what connections wait for: the next request on a kept-alive one, a reader that does not read."""
        with self._open_lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60.0
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.opened(self.connection)

    def finish(self) -> None:
        self.server.closed(self.connection)
        super().finish()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Requests are recorded, not printed."""

    def do_HEAD(self) -> None:
        self._record({})
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self._record({})
        if self.path.partition("?")[0].endswith("/models"):
            model = {"id": "fake-model", "object": "model", "created": 0, "owned_by": "fake"}
            self._json(200, {"object": "list", "data": [model]})
        else:
            self._json(404, anthropic.error_body(404, "no such path"))

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        protocol = next((p for suffix, p in _ROUTES.items() if path.endswith(suffix)), None)
        make_error = protocol.error if protocol is not None else anthropic.error_body
        try:
            body = self._body()
            if path.endswith("/messages/count_tokens"):
                self._record({})
                self._check_key()
                self._json(200, {"input_tokens": anthropic.INPUT_TOKENS})
            elif protocol is None:
                self._record({})
                raise RequestError(404, "no such path")
            else:
                self._answer(protocol, body)
        except RequestError as error:
            self._json(error.status, make_error(error.status, str(error)))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
            self._record({"event": "client_disconnected"})

    def _answer(self, protocol: Protocol, body: Mapping[str, Any]) -> None:
        turns = protocol.turns(body)
        directive = choose(turns)
        newest = next((text for kind, text in reversed(turns) if kind == "user"), "")
        facts = {"directive": directive.name, "argument": directive.argument, "step": directive.step}
        more = {"stream": bool(body.get("stream")), "model": body.get("model"), "newest": newest[-500:]}
        self._record(facts | more | ({"body": body} if self.server.owner.log_bodies else {}))
        self._check_key()
        problem = anthropic.problem_of(body) if protocol is ANTHROPIC else None
        if problem is not None:
            raise RequestError(400, problem)
        match self._plan(directive):
            case HttpError(status):
                raise RequestError(status, f"fake {status}")
            case Hang():
                self._hang()
            case Reply() as reply if body.get("stream"):
                self._stream(protocol.events(reply, body), drops=reply.ending == "drop")
            case Reply(ending="whole") as reply:
                self._json(200, protocol.whole(reply, body))
            case Reply():
                raise RequestError(529, "fake failure")

    def _plan(self, directive: Directive) -> Plan:
        try:
            return plan(directive, self.server.owner.counters)
        except DirectiveError as error:
            raise RequestError(400, str(error)) from None

    # --- in ---------------------------------------------------------------------------------------------------

    def _body(self) -> Mapping[str, Any]:
        length = self.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > BODY_BYTES_MAX:
            self.close_connection = True
            raise RequestError(413, f"a body has at most {BODY_BYTES_MAX} bytes")
        raw = self.rfile.read(int(length))
        try:
            match self.headers.get("content-encoding", "identity"):
                case "gzip":
                    raw = gzip.decompress(raw)
                case "deflate":
                    raw = zlib.decompress(raw)
                case "identity":
                    pass
                case other:
                    raise RequestError(415, f"content-encoding {other!r} is not known")
            body = json.loads(raw or b"{}")
        except (ValueError, OSError, EOFError, zlib.error, RecursionError) as error:
            raise RequestError(400, f"the body is not JSON: {type(error).__name__}") from None
        if not isinstance(body, dict):
            raise RequestError(400, "the body is not an object")
        return body

    def _given_key(self) -> str | None:
        bearer = self.headers.get("authorization", "")
        return self.headers.get("x-api-key") or bearer.removeprefix("Bearer ").strip() or None

    def _key_state(self) -> str:
        given, wanted = self._given_key(), self.server.owner.require_key
        if given is None:
            return "absent"
        return "accepted" if wanted is None or hmac.compare_digest(given.encode(), wanted.encode()) else "refused"

    def _check_key(self) -> None:
        if self.server.owner.require_key is not None and self._key_state() != "accepted":
            raise RequestError(401, "invalid x-api-key")

    def _record(self, facts: Mapping[str, Any]) -> None:
        headers = {name.lower(): value for name, value in self.headers.items() if name.lower() not in _SECRET_HEADERS}
        base = {"method": self.command, "path": self.path, "key": self._key_state(), "headers": headers}
        self.server.owner.record({**base, **facts})

    # --- out --------------------------------------------------------------------------------------------------

    def _json(self, status: int, answer: Mapping[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if status == 429:
            self.send_header("retry-after", "0")
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, events: Iterator[Sse], *, drops: bool) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("cache-control", "no-cache")
        self.send_header("connection", "close")
        self.end_headers()
        for event in events:
            self.wfile.write(event.encode())
            if event.delay_s and self.server.owner.stopping.wait(event.delay_s):
                return
        if drops:
            # Without lingering a close sends a reset, as a connection that breaks does.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.wfile.flush()
            self.connection.close()

    def _hang(self) -> None:
        """Until the client goes away or the server stops."""
        self.close_connection = True
        while not self.server.owner.stopping.is_set():
            readable, _, _ = select.select([self.connection], [], [], 0.1)
            if readable and self.connection.recv(1, socket.MSG_PEEK) == b"":
                self._record({"event": "client_disconnected"})
                return
