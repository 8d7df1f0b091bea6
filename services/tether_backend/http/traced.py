"""Requests in traces and log lines: whom and what a request is about, and a span for each that was let in, in the trace
that its `traceparent` names.

A stream (SSE, WebSocket) is told by the span of its opening, which ends when the stream has begun.
Probes and scrapes are not told.
"""

from __future__ import annotations

import re
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tether import tracing
from tether.ids import TOKEN_PATTERN

UNTOLD: Final = frozenset({"/healthz", "/readyz", "/metrics"})
_STREAM: Final = b"text/event-stream"
_HEADER: Final = tracing.HEADER.encode()
_TOKEN: Final = re.compile(TOKEN_PATTERN)


class Traced:
    """An ASGI layer inside the edge: who asks is known here."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in UNTOLD:
            await self._app(scope, receive, send)
            return
        value = next((value for name, value in scope["headers"] if name == _HEADER), None)
        headers = {} if value is None else {tracing.HEADER: value.decode("latin-1")}
        begun = _Begun(scope, send)
        with (
            tracing.scope("HTTP request", kind="server", headers=headers) as span,
            tracing.identified(span, **_identity(scope)),
        ):
            begun.span = span
            try:
                await self._app(scope, receive, begun)
            finally:
                begun.told()


class _Begun:
    """`send`, which tells the span how the answer begins."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.span = tracing.Span()
        self._scope = scope
        self._send = send
        self._is_told = False

    async def __call__(self, message: Message) -> None:
        match message["type"]:
            case "http.response.start":
                status = int(message["status"])
                self.span.set(status=status)
                if status >= 500:
                    self.span.failed(str(status))
                if any(name == b"content-type" and value.startswith(_STREAM) for name, value in message["headers"]):
                    self.told(opened="sse")
            case "websocket.accept":
                self.told(opened="websocket")
            case _:
                pass
        await self._send(message)

    def told(self, opened: str | None = None) -> None:
        """Name the span by its route, once; a stream's ends here."""
        if self._is_told:
            return
        self._is_told = True
        method = self._scope.get("method", "WS")
        route = getattr(self._scope.get("route"), "path_format", None) or "unknown"  # without convertors
        self.span.name(f"{method} {route}")
        self.span.set(method=method, route=route, opened=opened)
        if opened is not None:
            self.span.end()


def _identity(scope: Scope) -> dict[str, str]:
    """Tenant and, as far as the path names them, conversation or execution."""
    found = {}
    principal = scope.get("state", {}).get("principal")
    if principal is not None:
        found["tenant"] = principal.tenant
    match scope["path"].split("/"):
        case ["", "v1", "conversations", name, *_] if _TOKEN.fullmatch(name):
            found["conversation"] = name
        case ["", "v1", "executions", name, *_] if _TOKEN.fullmatch(name):
            found["execution"] = name
        case _:
            pass
    return found
