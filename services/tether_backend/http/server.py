"""uvicorn inside our own process frame: our socket, our signals, and a way to abort a connection.

A reader that takes nothing keeps its socket open and its write waiting; closing such a connection politely waits for
it. `ABORT` in the request's extensions is the transport's `abort`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tether.api import PROBLEM_TYPE
from tether.errors import Code, FieldProblem, problem
from tether_backend.http.errors import ProblemResponse

ABORT: Final = "tether.abort"
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
        ws="none",
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
