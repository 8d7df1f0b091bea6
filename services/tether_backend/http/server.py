"""uvicorn inside our own process frame: our socket, our signals, and a way to abort a connection.

A reader that takes nothing keeps its socket open and its write waiting; closing such a connection politely waits for
it. `ABORT` in a request's extensions is the transport's `abort`; `CLOSE` in a WebSocket's writes the close frame at
once, behind whatever waits, and aborts where the peer does not take it in time. Its `hold` counts the replies that are
under way, for which a stop waits.

A request's line may hold a ticket, so the WebSocket protocol, which would log it, says only warnings.

Whoever connects has no token yet, so what a connection may cost is bounded before anything is judged: a request must
be there as a whole within REQUEST_S, its head within HEAD_BYTES_MAX; a connection that asks nothing is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Final, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.exceptions import InvalidState
from websockets.frames import Frame
from websockets.http11 import Request, Response

from tether.api import PROBLEM_TYPE, WsClose
from tether.errors import Code, FieldProblem, problem
from tether.limits import WS_MESSAGE_BYTES_MAX, WS_PING_S, WS_PONG_S
from tether_backend.http.errors import ProblemResponse

ABORT: Final = "tether.abort"
CLOSE: Final = "tether.close"
CLOSE_S: Final = 2.0  # for the peer to take the close frame and answer it
REQUEST_S: Final = 60.0  # from its first byte, or from the connection, until a request is there as a whole
HEAD_BYTES_MAX: Final = 64 * 1024  # of a request's head; also of trailers and of whatever else is no body
_BACKLOG: Final = 1024
_KEEP_ALIVE_S: Final = 75
_GRACE_S: Final = 5  # of open requests when the service stops
_REPLIES_S: Final = 4.0  # of a WebSocket's replies then: its close frame goes out within the grace


def _refusal(status: HTTPStatus, remedy: str) -> tuple[Headers, bytes]:
    """Headers and body of an answer to what never was a request."""
    what = problem(Code.INVALID, f"request: {remedy}", fields=(FieldProblem(field="request", remedy=remedy),))
    body = bytes(ProblemResponse(what.model_copy(update={"status": status.value})).body)
    return Headers({"content-type": PROBLEM_TYPE, "content-length": str(len(body)), "connection": "close"}), body


class Protocol(HttpToolsProtocol):
    """uvicorn's, with `ABORT`, with bounds, and with a problem document for what is no HTTP."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0  # that came since the last head or piece of a body was complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            return
        if self._head_bytes > HEAD_BYTES_MAX:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"its head must be at most {HEAD_BYTES_MAX} bytes")
        elif self.timeout_keep_alive_task is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_request()  # neither a request nor an answer is under way

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, "is not valid HTTP")

    def _refuse(self, status: HTTPStatus, remedy: str) -> None:
        headers, body = _refusal(status, remedy)
        self.transport.write(Response(status.value, status.phrase, headers, body).serialize())
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"call": self.transport.abort}}
        self._expect_request()

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self._request_came()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self._request_came()
        super().handle_websocket_upgrade()

    def _expect_request(self) -> None:
        if self._request_timer is None:
            self._request_timer = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _request_came(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


_quiet: Final = logging.getLogger("tether.websocket")
_quiet.setLevel(logging.WARNING)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's, with `CLOSE`. Its own ways to close wait for room in the transport, or linger until it is empty; it
    leaves a handshake that it cannot read without an answer, and fills a connection that nobody reads with pongs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = self.conn.logger = _quiet
        self.conn.debug = False
        self.conn.reject = self._reject  # type: ignore[method-assign]
        self._closed_by_us = False
        self._late_pongs = b""  # of the last pings that came while there was no room
        self._message = bytearray()  # what has come of the peer's
        self._replies = 0  # that are under way
        self._stop_timer: asyncio.TimerHandle | None = None  # set once the service stops

    def _reject(self, status: HTTPStatus | int, text: str) -> Response:
        """A handshake's refusal, by the protocol or by uvicorn: as every refusal is told."""
        status = HTTPStatus(status)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            headers, body = _refusal(status, "failed here; it is logged")
        else:
            headers, body = _refusal(
                status, "must be a WebSocket handshake: GET, version 13, a key of 16 bytes in base64"
            )
        return Response(status.value, status.phrase, headers, body)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.handshake_initiated:  # the head comes at once: what it was cannot be read
            remedy = "must be a WebSocket handshake: GET without a body, at most 128 headers of at most 8 KiB each"
            headers, body = _refusal(HTTPStatus.BAD_REQUEST, remedy)
            self.transport.write(Response(400, HTTPStatus.BAD_REQUEST.phrase, headers, body).serialize())
            self.transport.close()

    def handle_ping(self) -> None:
        """A peer that pings and reads nothing is owed the last pongs alone."""
        pongs = b"".join(self.conn.data_to_send())
        if self.writable.is_set():
            self.transport.write(pongs)
        elif pongs:
            self._late_pongs = pongs

    def resume_writing(self) -> None:
        late, self._late_pongs = self._late_pongs, b""
        if late and not self.close_sent:
            self.transport.write(late)
        super().resume_writing()

    def handle_text(self, event: Frame) -> None:
        self.curr_msg_data_type = "text"
        self._collect(event)

    def handle_bytes(self, event: Frame) -> None:
        self.curr_msg_data_type = "bytes"
        self._collect(event)

    def handle_cont(self, event: Frame) -> None:
        self._collect(event)

    def _collect(self, event: Frame) -> None:
        """The protocol bounds the bytes of a message; here its fragments, empty ones too, cost nothing besides."""
        self._message += event.data
        if event.fin:
            self.frames, self._message = [bytes(self._message)], bytearray()
            if self.curr_msg_data_type == "text" and not self.close_sent and not _is_utf8(self.frames[0]):
                self.conn.send_close(1007)  # uvicorn does so as well, and tells of it as of a failure of ours
                self.handle_parser_exception()
                return
            self.send_receive_event_to_app()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if hasattr(self, "scope"):  # else it was no handshake, and has been answered
            extensions = cast(dict[str, Any], self.scope["extensions"])
            extensions[CLOSE] = {"call": self.close_now, "hold": self.hold}

    def hold(self, count: int) -> None:
        """So many replies more (or less) are under way. A stop waits for them, as for open requests."""
        self._replies += count
        if not self._replies and self._stop_timer is not None:
            self._stop()

    def _stop(self) -> None:
        self.close_now(WsClose.STOPPED, "the service stops; connect again from the cursor")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stop_timer is not None:
            self._stop_timer.cancel()
            self._stop_timer = None
        super().connection_lost(exc)

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
        if self._closed_by_us or (self.close_sent and message["type"] == "websocket.send"):
            raise ClientDisconnected  # closed by us, or by the protocol for what the peer has sent
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True  # refused; else uvicorn takes it for a handshake without an answer

    def shutdown(self) -> None:
        if self.handshake_complete and not self.close_sent:
            if not self._replies:
                self._stop()
            elif self._stop_timer is None:
                self._stop_timer = self.loop.call_later(_REPLIES_S, self._stop)
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
