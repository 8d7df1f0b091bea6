"""Everything that is decided before a route: host, origin, token, the body's size; and the request's figures.

Loopback is no protection against a browser: a page of another origin may send requests to 127.0.0.1, and a name that
resolves to it makes them same-origin (DNS rebinding). So the Host must be a known name and an Origin, where there is
one, must be the host's own or configured. Probes (`/healthz`, `/readyz`) need neither token nor known host.

A WebSocket's handshake is judged as any request is: no preflight and no CORS stands before it. Where it is refused the
answer is HTTP. A conversation's streams may be opened by a ticket instead of a token; it is taken out of the scope
here, so that nothing behind sees or logs it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tether.errors import Code, FieldProblem, Problem, ProblemError, problem
from tether.limits import HTTP_BODY_BYTES_MAX
from tether_backend import tickets
from tether_backend.config import Principal, Tokens
from tether_backend.http import web
from tether_backend.http.errors import ProblemResponse, body_too_large, no_such_path
from tether_backend.metrics import Metrics

OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
_METHODS: Final = frozenset({"WS", "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_AUTHORIZATION_CHARS_MAX: Final = 4096
_TICKET_PATHS: Final = re.compile(r"/v1/conversations/([^/]+)/(?:events|ws)")


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


def _authority(origin: str) -> str | None:
    """The `name:port` of an http(s) origin; None where it is none."""
    scheme, slashes, authority = origin.partition("://")
    return authority if slashes and scheme in ("http", "https") else None


def judge_place(headers: Headers, admission: Admission) -> Problem | None:
    """Host, then Origin: what is asked of everyone, also where no token is needed. Pure."""
    host = headers.get("host", "")
    if host_name(host) not in admission.host_names:
        return _forbidden("host", "must be a name of this service (TETHER_HTTP_HOSTS)")
    origin = headers.get("origin")
    if origin is not None and origin.lower() not in admission.origins and _authority(origin.lower()) != host.lower():
        return _forbidden("origin", "must be this service's own or configured (TETHER_HTTP_ORIGINS)")
    return None


@dataclass(frozen=True, slots=True)
class Ticket:
    """As it was sent, with the conversation whose stream it should open."""

    text: str
    conversation: str


def take_ticket(scope: Scope) -> Ticket | None:
    """The ticket of a stream's request. Wherever one is given, it is no longer in the scope's query afterwards."""
    query: bytes = scope.get("query_string", b"")
    if not query:
        return None
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    scope["query_string"] = urlencode([pair for pair in pairs if pair[0] != "ticket"]).encode()
    given = [value for name, value in pairs if name == "ticket"]
    path = _TICKET_PATHS.fullmatch(scope["path"])
    return Ticket(given[0], path[1]) if given and path is not None and scope.get("method", "GET") == "GET" else None


def judge(headers: Headers, admission: Admission, ticket: Ticket | None, now_ms: int) -> Principal | Problem:
    """Host, then Origin, then the token, or without one the ticket. Pure."""
    place = judge_place(headers, admission)
    if place is not None:
        return place
    if ticket is not None and "authorization" not in headers:
        return tickets.check(admission.tokens, ticket.text, ticket.conversation, now_ms)
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


def denying(scope: Scope, receive: Receive, send: Send) -> Send:
    """`send` of a WebSocket: one that no route takes is refused as any other path is, instead of by an empty 403."""
    is_accepted = False

    async def send_denying(message: Message) -> None:
        nonlocal is_accepted
        is_accepted = is_accepted or message["type"] == "websocket.accept"
        if message["type"] == "websocket.close" and not is_accepted:
            await ProblemResponse(no_such_path())(scope, receive, send)
        else:
            await send(message)

    return send_denying


class Edge:
    """The outermost ASGI layer."""

    def __init__(self, app: ASGIApp, admission: Admission, metrics: Metrics) -> None:
        self._app = app
        self._admission = admission
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            send = denying(scope, receive, send)
        watched = _Watched(send, time.perf_counter())
        try:
            await self._answer(scope, bounded(receive, HTTP_BODY_BYTES_MAX), watched)
        finally:
            self._count(scope, watched)

    async def _answer(self, scope: Scope, receive: Receive, send: _Watched) -> None:
        headers = Headers(scope=scope)
        ticket = take_ticket(scope)
        if scope["path"] in web.PATHS:
            place = judge_place(headers, self._admission)
            if place is not None:
                await ProblemResponse(place)(scope, receive, send)
                return
        elif scope["path"] not in OPEN_PATHS:
            verdict = judge(headers, self._admission, ticket, time.time_ns() // 1_000_000)
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
        path = getattr(scope.get("route"), "path_format", None) or "unknown"
        method = scope.get("method", "WS")  # a WebSocket's handshake has none
        if method not in _METHODS:
            method = "other"
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
        if message["type"] in ("http.response.start", "websocket.http.response.start", "websocket.accept"):
            self.status = message.get("status", 101)
            self.seconds = time.perf_counter() - self._start_s
        await self._send(message)
