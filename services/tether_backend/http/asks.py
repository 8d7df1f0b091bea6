"""Requests over a conversation's WebSocket: the HTTP routes' own functions, asked by a message, answered by a frame.

    {"ask", "op", "body"}  →  {"frame": "reply", "id": null, "data": {"ask", "status", "body"}}

What is validated, refused and repeatable is decided where the HTTP routes have it decided; here is only what a message
adds: which function, about this conversation alone, and a bound. An ask is under way until its reply is in the
transport. Of WS_ASKS_MAX more, each is refused by a reply, which is sent before another message is read: a client that
takes no replies is not read either. Replies that wait count to the reader's bound (see `course`).

A reader that leaves is an HTTP client that hangs up: what it asked goes on, and its reply is nobody's. A service that
stops gives the asks under way the time that it gives HTTP requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, get_args

import structlog
from starlette.responses import Response
from starlette.websockets import WebSocket

from tether import tracing
from tether.api import FRAME_REPLY, MessageRequest, WsAnswer, WsAsk, WsControl, WsReceipt
from tether.errors import InvalidError
from tether.ids import check_token
from tether.jsonsafe import loads_object
from tether.limits import WS_ASKS_MAX, WS_MESSAGE_BYTES_MAX
from tether.quotas import exceeded
from tether_backend.config import Principal
from tether_backend.core.stream import WEBSOCKET
from tether_backend.http.conversations import give
from tether_backend.http.course import STALL_S, Course, Sink
from tether_backend.http.errors import FAILURES, ProblemResponse, failed_here, of_failure
from tether_backend.http.executions import end, look_up
from tether_backend.http.messages import submit
from tether_backend.http.parse import model_of
from tether_backend.runtime import Deps

_log = structlog.get_logger("tether.http")
_ROUTE: Final = "/v1/conversations/{conversation}/ws"
_OPS: Final[frozenset[str]] = frozenset(get_args(WsAsk.model_fields["op"].annotation))
_TOO_MANY: Final = exceeded(
    "asks",
    WS_ASKS_MAX,
    "connection",
    f"{WS_ASKS_MAX} asks are under way on this connection; wait for a reply",
    retry_after_s=0.1,
)


def readable(message: dict[str, Any]) -> dict[str, Any] | None:
    """The message as an object whose `ask` can be replied to; None where it is none."""
    text = message.get("text")
    if text is None:
        return None
    try:
        value = loads_object(text.encode(), "message", bytes_max=WS_MESSAGE_BYTES_MAX)
        check_token(value.get("ask"), "ask")
    except InvalidError:
        return None
    return value


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, and the conversation that may be asked about."""

    deps: Deps
    who: Principal
    conversation: str

    async def answer(self, value: dict[str, Any]) -> Response:
        """What the HTTP request of the same meaning is answered. Never raises: this is an ask's outermost frame."""
        try:
            return await self._judge(model_of(value, WsAsk))
        except FAILURES as error:
            return ProblemResponse(of_failure(error))
        except Exception as error:  # noqa: BLE001 - the process boundary of a request
            _log.error("http_failed", path=_ROUTE, exc_info=error)
            return ProblemResponse(failed_here())

    async def _judge(self, ask: WsAsk) -> Response:
        deps, tenant, conversation = self.deps, self.who.tenant, self.conversation
        match ask.op:
            case "send":
                return await submit(deps, self.who, conversation, model_of(ask.body, MessageRequest))
            case "answer":
                given = model_of(ask.body, WsAnswer)
                return await give(deps, tenant, conversation, given.interaction, given, given.control_id)
            case "interrupt" | "stop" as verb:
                ended = model_of(ask.body, WsControl)
                return await end(deps, tenant, ended.execution, verb, ended.control_id, within=conversation)
            case "control":
                asked = model_of(ask.body, WsReceipt)
                return await look_up(deps, tenant, asked.control_id, asked.execution, within=conversation)


class Asks:
    """One connection's. `tasks` owns what is under way; `hold` tells the connection how many more replies it owes."""

    def __init__(
        self, websocket: WebSocket, asker: Asker, course: Course, sink: Sink, hold: Callable[[int], None]
    ) -> None:
        self._websocket = websocket
        self._asker = asker
        self._course = course
        self._sink = sink
        self._hold = hold
        self._under_way = 0
        self.unreadable = False

    async def take(self, tasks: asyncio.TaskGroup) -> None:
        """Until the peer is gone, or says what cannot be replied to (`unreadable`)."""
        while True:
            message = await self._websocket.receive()
            if message["type"] != "websocket.receive":
                return
            value = readable(dict(message))
            if value is None:
                self.unreadable = True
                return
            if self._under_way >= WS_ASKS_MAX:
                await self._reply(value, ProblemResponse(_TOO_MANY), 0.0)
                await asyncio.sleep(0)  # many small messages come at once: they would hold the loop
                continue
            self._under_way += 1
            self._hold(1)
            # The connection's own span has ended: each ask begins a trace.
            tasks.create_task(self._serve(value), name="websocket-ask", context=tracing.detached())
            await asyncio.sleep(0)

    async def _serve(self, value: dict[str, Any]) -> None:
        start_s = time.perf_counter()
        asker = self._asker
        try:
            with tracing.scope(
                "WebSocket ask",
                kind="server",
                facts={"op": _op(value)},
                tenant=asker.who.tenant,
                conversation=asker.conversation,
            ) as span:
                answer = await asker.answer(value)
                span.set(status=answer.status_code)
                if answer.status_code >= 500:
                    span.failed(str(answer.status_code))
            await self._reply(value, answer, time.perf_counter() - start_s)
        finally:
            self._under_way -= 1
            self._hold(-1)

    async def _reply(self, value: dict[str, Any], answer: Response, took_s: float) -> None:
        metrics, route = self._asker.deps.metrics, f"{_ROUTE}#{_op(value)}"
        metrics.requests.labels(route, "WS", str(answer.status_code)).inc()
        metrics.request_s.labels(route).observe(took_s)
        ask = value["ask"].encode()
        data = b'{"ask":"%s","status":%d,"body":%s}' % (ask, answer.status_code, bytes(answer.body))
        frame = WEBSOCKET.frame(FRAME_REPLY, data, None)
        try:
            with self._course.holding(len(frame)):
                async with asyncio.timeout(STALL_S):
                    await self._sink.write(frame)
        except TimeoutError:
            self._course.cut()
        except ConnectionError:
            pass  # the reader has left; what it asked is done all the same


def _op(value: dict[str, Any]) -> str:
    op = value.get("op")
    return op if isinstance(op, str) and op in _OPS else "unknown"
