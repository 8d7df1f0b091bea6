"""A TCP proxy on a port of its own, between a client and a service: connections cut, held, or let through."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Proxy:
    """`cut` resets every connection; while `held`, bytes of the service stay here and connections stay open."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._through = asyncio.Event()
        self._through.set()
        self.port = 0
        self.connections = 0  # accepted so far

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> int:
        """How many were cut."""
        pairs = tuple(self._pairs)
        for near, far in pairs:
            near.transport.abort()
            far.transport.abort()
        return len(pairs)

    def hold(self) -> None:
        self._through.clear()

    def release(self) -> None:
        self._through.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            from_service, to_service = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, to_service)
        self._pairs.add(pair)
        copies = [
            asyncio.create_task(self._copy(reader, to_service, holds=False), name="proxy-up"),
            asyncio.create_task(self._copy(from_service, writer, holds=True), name="proxy-down"),
        ]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._pairs.discard(pair)
            for copy in copies:
                copy.cancel()
            await asyncio.gather(*copies, return_exceptions=True)
            for each in pair:
                each.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, holds: bool) -> None:
        while data := await reader.read(1 << 16):
            if holds:
                await self._through.wait()
            writer.write(data)
            await writer.drain()


@contextlib.asynccontextmanager
async def running_proxy(port: int) -> AsyncIterator[Proxy]:
    """In front of this port of loopback."""
    proxy = Proxy(port)
    server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
