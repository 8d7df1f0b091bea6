"""A receiver of webhooks: an HTTP server that keeps what it got."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from tether_backend.http.server import listen, url_of
from tether_backend.webhooks.service import Webhooks


@dataclass
class Receiver:
    """An HTTP server that answers `statuses` in turn (the last one for ever) and keeps what it got."""

    statuses: list[int] = field(default_factory=lambda: [204])
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    url: str = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        self.bodies.append(body)
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        await send({"type": "http.response.start", "status": status, "headers": [(b"location", self.url.encode())]})
        await send({"type": "http.response.body", "body": b""})

    @property
    def ids(self) -> list[str]:
        return [one["webhook-id"] for one in self.headers]

    def data(self, index: int = -1) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.bodies[index])
        return found


@contextlib.asynccontextmanager
async def receiving(*statuses: int) -> AsyncIterator[Receiver]:
    receiver = Receiver(list(statuses) or [204])
    listener = listen("127.0.0.1", 0)
    receiver.url = url_of(listener) + "/hook?key=do-not-show"
    server = uvicorn.Server(uvicorn.Config(receiver, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listener]), name="receiver")
    try:
        yield receiver
    finally:
        server.should_exit = True
        await task
        listener.close()


@contextlib.asynccontextmanager
async def working(hooks: Webhooks) -> AsyncIterator[None]:
    task = asyncio.create_task(hooks.run(), name="webhooks")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
