"""A TCP proxy between one service and nats-server: its connections are cut, or stall without being closed.

    service ──▶ proxy (a port of its own) ──▶ nats-server (its port is asked for at each connection)

Collectors come through their agent service's proxy, as they are given its URL; the name in a client's CONNECT line
tells whose a connection is. A stall holds both directions, and new connections likewise: nothing is lost, nothing
moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

_BYTES: Final = 1 << 16
_CONNECT: Final = b"CONNECT "
COLLECTOR: Final = "collector"


@dataclass(eq=False, slots=True)
class _Connection:
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    tier: str
    hangs: bool = False  # open, and nothing moves on it any more

    def abort(self) -> None:
        self.near.transport.abort()
        self.far.transport.abort()


class NatsProxy:
    """`tier`: whose proxy this is. `port_of_server` is asked at each connection; `port` is this proxy's own."""

    def __init__(self, tier: str, port_of_server: Callable[[], int]) -> None:
        self.tier = tier
        self.port = 0
        self._port_of_server = port_of_server
        self._connections: set[_Connection] = set()
        self._held: set[str] = set()
        self._released = asyncio.Event()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def cut(self, tier: str) -> int:
        """Reset every connection of a tier; how many there were."""
        chosen = [connection for connection in self._connections if connection.tier == tier]
        for connection in chosen:
            connection.abort()
        return len(chosen)

    def leave_hanging(self, tier: str) -> int:
        """The tier's connections of now stay open and nothing moves on them any more; new ones are let through. How
        many there were."""
        chosen = [connection for connection in self._connections if connection.tier == tier and not connection.hangs]
        for connection in chosen:
            connection.hangs = True
        return len(chosen)

    def moving(self, tier: str) -> int:
        """How many connections of the tier are open and do not hang."""
        return sum(connection.tier == tier and not connection.hangs for connection in self._connections)

    async def stall(self, tier: str, for_s: float) -> None:
        """Nothing of this tier moves for so long."""
        self._held.add(tier)
        try:
            await asyncio.sleep(for_s)
        finally:
            self._held.discard(tier)
            self._released.set()
            self._released = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[NatsProxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for connection in list(self._connections):
                connection.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port_of_server())
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(writer, to_server, self.tier)
        self._connections.add(connection)
        copies = [
            asyncio.create_task(self._copy(reader, to_server, connection, names=True), name="proxy-up"),
            asyncio.create_task(self._copy(from_server, writer, connection, names=False), name="proxy-down"),
        ]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._connections.discard(connection)
            for copy in copies:
                copy.cancel()
            await asyncio.gather(*copies, return_exceptions=True)
            connection.abort()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: _Connection, *, names: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_BYTES):
                if names and data.startswith(_CONNECT):
                    connection.tier = self._tier(data)
                while connection.tier in self._held:
                    await self._released.wait()
                if connection.hangs:
                    await asyncio.get_running_loop().create_future()  # until the proxy ends
                writer.write(data)
                await writer.drain()

    def _tier(self, data: bytes) -> str:
        """Whose connection this is, by the client's name."""
        with contextlib.suppress(ValueError):
            name = json.loads(data[len(_CONNECT) :].partition(b"\r\n")[0]).get("name")
            if str(name).startswith("tether-collector"):
                return COLLECTOR
        return self.tier
