"""A conversation's reader over a WebSocket, by the `websockets` client: its frames, its cursor, how it was closed."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from support_backend import DEADLINE_S, Sse, token_of


class SocketReader:
    """Like `support_backend.Reader`: `open` connects, with the last cursor seen; `next` is None once it is closed."""

    def __init__(self, port: int, tenant: str, conversation: str = "c1") -> None:
        self._port = port
        self._token = token_of(tenant)
        self._conversation = conversation
        self._connection: ClientConnection | None = None
        self.cursor: str | None = None
        self.close_code: int | None = None
        self.close_reason = ""
        self.frames: list[str] = []

    @property
    def connection(self) -> ClientConnection:
        assert self._connection is not None
        return self._connection

    async def open(
        self,
        cursor: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        small: bool = False,
        path: str | None = None,
        **query: str,
    ) -> SocketReader:
        """Raises InvalidStatus where the handshake is refused. `headers` instead of the token's; `small`: with buffers
        that are full at once."""
        await self.close()
        cursor = cursor if cursor is not None else self.cursor
        asked = {**({"cursor": cursor} if cursor else {}), **query}
        path = path or f"/v1/conversations/{self._conversation}/ws"
        plug = socket.socket()
        if small:
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        plug.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plug, ("127.0.0.1", self._port))
        self._connection = await connect(
            f"ws://127.0.0.1:{self._port}{path}" + (f"?{urlencode(asked)}" if asked else ""),
            sock=plug,
            additional_headers={"Authorization": f"Bearer {self._token}"} if headers is None else headers,
            compression=None,
            proxy=None,
            max_size=16 << 20,
            max_queue=4,
            ping_interval=None,
        )
        return self

    async def next(self, timeout_s: float = DEADLINE_S) -> Sse | None:
        """The next frame; None once it is closed, and then `close_code` says how."""
        try:
            async with asyncio.timeout(timeout_s):
                text = await self.connection.recv()
        except ConnectionClosed as closed:
            self.close_code = closed.rcvd.code if closed.rcvd is not None else 1006
            self.close_reason = closed.rcvd.reason if closed.rcvd is not None else ""
            return None
        assert isinstance(text, str)
        value = json.loads(text)
        assert set(value) == {"frame", "id", "data"}
        self.frames.append(value["frame"])
        if value["id"] is not None:
            self.cursor = value["id"]
        return Sse(value["frame"], value["data"], value["id"])

    async def events(self, count: int) -> list[Sse]:
        """The next `count` events, other frames passed over. Raises ConnectionError where it is closed."""
        found: list[Sse] = []
        while len(found) < count:
            one = await self.next()
            if one is None:
                raise ConnectionError(f"closed ({self.close_code}) after {len(found)} of {count} events")
            if one.name == "message":
                found.append(one)
        return found

    async def until(self, name: str) -> list[Sse]:
        """The frames up to the first of this name."""
        found: list[Sse] = []
        while not found or found[-1].name != name:
            one = await self.next()
            assert one is not None, f"closed ({self.close_code} {self.close_reason}) before {name}"
            found.append(one)
        return found

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.transport.abort()
            self._connection = None


async def refused(reader: SocketReader, *args: Any, **more: Any) -> tuple[int, dict[str, Any]]:
    """Status and problem document of a handshake that is refused."""
    try:
        await reader.open(*args, **more)
    except InvalidStatus as error:
        answer = error.response
        assert answer.headers["Content-Type"] == "application/problem+json", answer
        return answer.status_code, json.loads(answer.body)
    raise AssertionError("the handshake was not refused")
