"""uvicorn inside our own process frame: our socket, our signals, and a way to abort a connection.

A reader that takes nothing keeps its socket open and its write waiting; closing such a connection politely waits for
it. `ABORT` in a request's extensions is the transport's `abort`; `CLOSE` in a WebSocket's writes the close frame at
once, behind whatever waits, and aborts where the peer does not take it in time.

A request's line may hold a ticket, so the WebSocket protocol, which would log it, says only warnings.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any, Final, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.http11 import Request

from tether.api import PROBLEM_TYPE, WsClose
from tether.errors import Code, FieldProblem, problem
from tether.limits import WS_MESSAGE_BYTES_MAX, WS_PING_S, WS_PONG_S
from tether_backend.http.errors import ProblemResponse

ABORT: Final = "tether.abort"
CLOSE: Final = "tether.close"
CLOSE_S: Final = 2.0  # for the peer to take the close frame and answer it
_BACKLOG: Final = 1024
_KEEP_ALIVE_S: Final = 75
_GRACE_S: Final = 5  # of open requests when the service stops


class Protocol(HttpToolsProtocol):
    """uvicorn's, with `ABORT`, and with a problem document for what is no HTTP."""

    def send_400_response(self, msg: str) -> None:
        what = problem(
            Code.INVALID, "request: is not valid HTTP", fields=(FieldProblem(field="request", remedy="send HTTP/1.1"),)
        )
        body = ProblemResponse(what.model_copy(update={"status": 400})).body
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: {PROBLEM_TYPE}\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + bytes(body))
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"call": self.transport.abort}}


_quiet: Final = logging.getLogger("tether.websocket")
_quiet.setLevel(logging.WARNING)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's, with `CLOSE`. Its own ways to close wait for room in the transport, or linger until it is empty."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = self.conn.logger = _quiet
        self.conn.debug = False
        self._closed_by_us = False

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if hasattr(self, "scope"):  # else it was no handshake, and has been answered
            extensions = cast(dict[str, Any], self.scope["extensions"])
            extensions[CLOSE] = {"call": self.close_now}

    def close_now(self, code: int, reason: str) -> None:
        """Once; later calls change nothing."""
        if self._closed_by_us:
            return
        self._closed_by_us = True
        self.stop_keepalive()
        self.writable.set()  # a write that waits for room goes on, and finds the connection closed
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        try:
            self.conn.send_close(code, reason)
        except InvalidState:  # it is being closed already, by the peer or for its silence
            self.transport.abort()
            return
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.close_timer = self.loop.call_later(CLOSE_S, self.transport.abort)

    async def send(self, message: ASGISendEvent) -> None:
        await self.writable.wait()
        if self._closed_by_us:
            raise ClientDisconnected
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True  # refused; else uvicorn takes it for a handshake without an answer

    def shutdown(self) -> None:
        if self.handshake_complete and not self.close_sent:
            self.close_now(WsClose.STOPPED, "the service stops; connect again from the cursor")
        elif not self._closed_by_us:
            super().shutdown()


class Server(uvicorn.Server):
    """Leaves signals to `tether.service`; `should_exit` ends it. `up` is set once it accepts."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket; port 0 takes a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: ASGIApp) -> Server:
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws=WebSocketProtocol,
        ws_max_size=WS_MESSAGE_BYTES_MAX,
        ws_ping_interval=WS_PING_S,
        ws_ping_timeout=WS_PONG_S,
        ws_per_message_deflate=False,  # memory for each reader, and time for each write
        loop="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )
    return Server(config)
