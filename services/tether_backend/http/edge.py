"""Everything that is decided before a route: host, origin, token, the body's size; and the request's figures.

Loopback is no protection against a browser: a page of another origin may send requests to 127.0.0.1, and a name that
resolves to it makes them same-origin (DNS rebinding). So the Host must be a known name and an Origin, where there is
one, must be the host's own or configured. Probes (`/healthz`, `/readyz`) need neither token nor known host.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tether.errors import Code, FieldProblem, Problem, ProblemError, problem
from tether.limits import HTTP_BODY_BYTES_MAX
from tether_backend.config import Principal, Tokens
from tether_backend.http.errors import ProblemResponse, body_too_large
from tether_backend.metrics import Metrics

OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_AUTHORIZATION_CHARS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Admission:
    """Who may come in."""

    tokens: Tokens
    host_names: frozenset[str]
    origins: frozenset[str]


def host_name(authority: str) -> str:
    """The name of `name:port`, `[v6]:port`; empty where it is none."""
    try:
        return (urlsplit(f"//{authority}").hostname or "").lower()
    except ValueError:
        return ""


def judge(headers: Headers, admission: Admission) -> Principal | Problem:
    """Host, then Origin, then the token. Pure."""
    host = headers.get("host", "")
    if host_name(host) not in admission.host_names:
        return _forbidden("host", "must be a name of this service (TETHER_HTTP_HOSTS)")
    origin = headers.get("origin")
    if origin is not None and origin.lower() not in admission.origins:
        parts = urlsplit(origin) if origin.startswith(("http://", "https://")) else None
        if parts is None or parts.netloc.lower() != host.lower():
            return _forbidden("origin", "must be this service's own or configured (TETHER_HTTP_ORIGINS)")
    kind, _, token = headers.get("authorization", "")[:_AUTHORIZATION_CHARS_MAX].partition(" ")
    principal = admission.tokens.find(token.strip()) if kind.lower() == "bearer" and token else None
    if principal is None:
        return problem(Code.UNAUTHENTICATED, "send a valid token: Authorization: Bearer …")
    return principal


def _forbidden(field: str, remedy: str) -> Problem:
    return problem(Code.FORBIDDEN, f"{field}: {remedy}", fields=(FieldProblem(field=field, remedy=remedy),))


def _invalid(field: str, remedy: str) -> Problem:
    return problem(Code.INVALID, f"{field}: {remedy}", fields=(FieldProblem(field=field, remedy=remedy),))


class BodyTooLargeError(ProblemError):
    """Raised out of `receive` as soon as the limit is passed."""


def bounded(receive: Receive, bytes_max: int) -> Receive:
    total = 0

    async def receive_bounded() -> Message:
        nonlocal total
        message = await receive()
        if message["type"] == "http.request":
            total += len(message.get("body", b""))
            if total > bytes_max:
                raise BodyTooLargeError(body_too_large(bytes_max))
        return message

    return receive_bounded


class Edge:
    """The outermost ASGI layer."""

    def __init__(self, app: ASGIApp, admission: Admission, metrics: Metrics) -> None:
        self._app = app
        self._admission = admission
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            elif scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        watched = _Watched(send, time.perf_counter())
        try:
            await self._answer(scope, bounded(receive, HTTP_BODY_BYTES_MAX), watched)
        finally:
            self._count(scope, watched)

    async def _answer(self, scope: Scope, receive: Receive, send: _Watched) -> None:
        headers = Headers(scope=scope)
        if scope["path"] not in OPEN_PATHS:
            verdict = judge(headers, self._admission)
            if isinstance(verdict, Problem):
                await ProblemResponse(verdict)(scope, receive, send)
                return
            scope.setdefault("state", {})["principal"] = verdict
        path = scope.get("raw_path", b"").lower()
        if (b"%2f" in path or b"%5c" in path) and b"/interactions/" not in path:
            # Decoded, it would name another route than it seems to.
            await ProblemResponse(_invalid("path", "must not have an encoded slash"))(scope, receive, send)
            return
        length = headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > HTTP_BODY_BYTES_MAX:
            await ProblemResponse(body_too_large(HTTP_BODY_BYTES_MAX))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _count(self, scope: Scope, watched: _Watched) -> None:
        path = getattr(scope.get("route"), "path", None) or "unknown"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.requests.labels(path, method, str(watched.status)).inc()
        self._metrics.request_s.labels(path).observe(watched.seconds)


class _Watched:
    """`send`, with the status and the time until it was known."""

    def __init__(self, send: Callable[[Message], Awaitable[None]], start_s: float) -> None:
        self._send = send
        self._start_s = start_s
        self.status = 0
        self.seconds = 0.0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.seconds = time.perf_counter() - self._start_s
        await self._send(message)
