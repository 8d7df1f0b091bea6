"""`GET /v1/conversations/{c}/ws`: a reader's course as WebSocket messages, one text message per frame; and tickets.

    handshake   refused by an HTTP answer with a problem document, as any request: the same judgement as of `events`
    accepted    open … as the course has it; a heartbeat is a frame of its own, since a page does not see pings
    closed      with a code of `WsClose`; a peer that does not take the close frame in time is aborted (1006)

The end that `until` asks for may lie before the cursor: `events` says 204, here the frame `end` follows `open` at once.
What a client sends are requests (see `asks`); where it cannot be replied to, the connection is closed. An end, and a
service that stops, close once the replies under way are sent. The close frame never waits for room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any, Final, cast

from fastapi import APIRouter, Query, WebSocket
from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.websockets import WebSocketDisconnect, WebSocketState

from tether.api import LAST_EVENT_ID_HEADER, StreamTicket, WsClose
from tether.errors import Code, FieldProblem, problem
from tether.ids import check_token
from tether_backend import tickets
from tether_backend.core.stream import WEBSOCKET
from tether_backend.http.asks import Asker, Asks
from tether_backend.http.course import Course, Ending, Opening, open_stream
from tether_backend.http.errors import FAILURES, ProblemResponse, of_failure
from tether_backend.http.parse import ConversationId, Who, With
from tether_backend.http.server import CLOSE
from tether_backend.runtime import Deps

router = APIRouter()
_TURN: Final = 64  # messages that are sent before others have their turn
_REASONS: Final = {
    WsClose.END: "the end that was asked for has come",
    WsClose.STOPPED: "the service stops; connect again from the cursor",
    WsClose.SLOW: "too slow; connect again from the cursor",
    WsClose.NOT_AN_ASK: "a message must be a JSON object with ask, op and body; ask has 1 to 64 of A-Z a-z 0-9 _ -",
}


@router.websocket("/v1/conversations/{conversation}/ws")
async def follow(websocket: WebSocket) -> None:
    try:
        quotas, tenant = _deps(websocket).quotas, websocket.state.principal.tenant
        async with quotas.turn(tenant):
            opening = await _open(websocket)
            place = quotas.reader(tenant)
    except FAILURES as error:
        await websocket.send_denial_response(ProblemResponse(of_failure(error)))
    else:
        with place:
            await _serve(websocket, opening)


async def _open(websocket: WebSocket) -> Opening:
    conversation = check_token(websocket.path_params["conversation"], "path.conversation")
    query = websocket.query_params
    cursor = websocket.headers.get(LAST_EVENT_ID_HEADER) or query.get("cursor")
    tenant = websocket.state.principal.tenant
    opening = await open_stream(_deps(websocket), tenant, conversation, cursor, query.get("until"), WEBSOCKET)
    if opening.over:
        opening.view.finish_before()
    return opening


def _deps(websocket: WebSocket) -> Deps:
    return cast(Deps, websocket.app.state.deps)


async def _serve(websocket: WebSocket, opening: Opening) -> None:
    deps, sink = _deps(websocket), _Sink(websocket)
    await websocket.receive()  # `websocket.connect`
    try:
        await websocket.accept()
    except WebSocketDisconnect:
        return
    course = Course(deps, opening, sink)
    asker = Asker(deps, websocket.state.principal, opening.view.conversation)
    asks = Asks(websocket, asker, course, sink, sink.hold)
    async with asyncio.TaskGroup() as tasks:
        ending = await course.run(asks.take(tasks))
        if ending is Ending.LEFT and asks.unreadable:
            sink.close(WsClose.NOT_AN_ASK)
    match ending:
        case Ending.END:
            sink.close(WsClose.END)
        case Ending.STOPPED:
            sink.close(WsClose.STOPPED)
        case Ending.LEFT | Ending.CUT:
            pass


class _Sink:
    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._close: Callable[[int, str], None] = websocket.scope["extensions"][CLOSE]["call"]
        self.hold: Callable[[int], None] = websocket.scope["extensions"][CLOSE]["hold"]

    async def write(self, data: bytes) -> None:
        try:
            for number, line in enumerate(data.splitlines(), start=1):
                if self._websocket.application_state is not WebSocketState.CONNECTED:
                    raise ConnectionResetError  # another's write has found that out
                await self._websocket.send_text(line.decode())
                if number % _TURN == 0:
                    await asyncio.sleep(0)  # a send waits only for room: many of them would hold the loop
        except WebSocketDisconnect:
            raise ConnectionResetError from None

    def cut(self) -> None:
        self.close(WsClose.SLOW)

    def close(self, code: WsClose) -> None:
        self._close(code, _REASONS[code])


@router.get("/v1/conversations/{conversation}/ws", response_class=Response)
async def upgrade(
    conversation: ConversationId,
    who: Who,
    cursor: Annotated[str | None, Query()] = None,
    until: Annotated[str | None, Query()] = None,
) -> Any:
    """The same frames as `events` over a WebSocket, and requests about the conversation (see `tether.api`)."""
    remedy = "must be websocket: this path is for WebSocket clients; `events` gives the same as server-sent events"
    fields = (FieldProblem(field="header.Upgrade", remedy=remedy),)
    what = problem(Code.INVALID, f"header.Upgrade: {remedy}", fields=fields)
    return ProblemResponse(what.model_copy(update={"status": 426}), headers={"Upgrade": "websocket"})


@router.post("/v1/conversations/{conversation}/tickets", status_code=201, response_model=StreamTicket)
async def post_ticket(conversation: ConversationId, who: Who, deps: With) -> Any:
    """A ticket for this conversation's `events` and `ws` (see `tether_backend.tickets`)."""
    made = tickets.issue(deps.admission.tokens, who, conversation, time.time_ns() // 1_000_000)
    return JSONResponse(made.model_dump(), status_code=201, headers={"Cache-Control": "no-store"})
