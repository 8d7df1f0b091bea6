"""`GET /v1/conversations/{c}/events`: a reader's course as server-sent events.

The connection of a reader that takes nothing is aborted: a polite close would wait for it. `retry:` says when a
browser's EventSource connects again, another time for each, so that readers of a service that restarts come one by one.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tether.api import EVENT_STREAM_TYPE
from tether.limits import SSE_RETRY_MS
from tether_backend.http.course import Course, Ending, Opening
from tether_backend.http.server import ABORT
from tether_backend.quotas import ReaderPlace
from tether_backend.runtime import Deps


class EventStream(Response):
    """An ASGI response that is one reader. Everything before the headers has been decided."""

    media_type = EVENT_STREAM_TYPE

    def __init__(self, deps: Deps, opening: Opening, place: ReaderPlace) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._deps = deps
        self._opening = opening
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sink = _Sink(send, scope.get("extensions", {}).get(ABORT, {}).get("call"))
        ending = await Course(self._deps, self._opening, sink).run(_disconnected(receive))
        if ending in (Ending.END, Ending.STOPPED):
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Sink:
    def __init__(self, send: Send, abort: Callable[[], None] | None) -> None:
        self._send = send
        self._abort = abort
        self._greeting = b"retry: %d\n\n" % random.randint(*SSE_RETRY_MS)

    async def write(self, data: bytes) -> None:
        greeting, self._greeting = self._greeting, b""
        await self._send({"type": "http.response.body", "body": greeting + data, "more_body": True})

    def cut(self) -> None:
        if self._abort is not None:
            self._abort()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
