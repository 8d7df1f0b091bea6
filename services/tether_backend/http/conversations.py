"""Conversations: list, history, the event stream, answers to interactions."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from tether.api import (
    EVENT_STREAM_TYPE,
    INTERACTION_CHARS_MAX,
    LAST_EVENT_ID_HEADER,
    AnswerRequest,
    ControlAnswer,
    ConversationHistory,
    ConversationList,
)
from tether.control import AnswerPayload
from tether.deletion import check_not_deleted
from tether.errors import Code, FieldProblem, InvalidError, ProblemError, problem
from tether_backend.core.stream import SSE
from tether_backend.http.controls import find_target, send
from tether_backend.http.course import history_page, open_stream, proven
from tether_backend.http.parse import (
    LIMIT_DEFAULT,
    ConversationId,
    Limit,
    Who,
    With,
    body_of,
    control_id_of,
    decode_page,
    encode_page,
)
from tether_backend.http.sse import EventStream
from tether_backend.runtime import Deps

router = APIRouter()


@router.get("/v1/conversations", response_model=ConversationList)
async def list_conversations(
    who: Who, deps: With, limit: Limit = LIMIT_DEFAULT, page: Annotated[str | None, Query()] = None
) -> Any:
    """Newest first."""
    views, after = await deps.history.conversations(who.tenant, limit=limit, after=decode_page(page))
    return ConversationList(conversations=views, next_page=encode_page(after))


@router.get("/v1/conversations/{conversation}", response_model=ConversationHistory)
async def get_conversation(
    conversation: ConversationId,
    who: Who,
    deps: With,
    limit: Limit = LIMIT_DEFAULT,
    before: Annotated[int | None, Query(ge=1, le=2**62)] = None,
) -> Any:
    """One page of history, the newest first to be asked."""
    await check_not_deleted(deps.bus, who.tenant, conversation)
    proven(deps, who.tenant)
    history = await history_page(deps, who.tenant, conversation, before, limit)
    empty = not (history.messages or history.responses or history.failures or history.executions)
    if empty and before is None and await deps.runtime.workspace(who.tenant, conversation) is None:
        raise ProblemError(problem(Code.NOT_FOUND, "conversation: there is none of this id"))
    # Written at once: a page may have a thousand items.
    return Response(history.model_dump_json(exclude_none=True), media_type="application/json")


@router.get(
    "/v1/conversations/{conversation}/events",
    response_class=Response,
    responses={
        200: {"content": {EVENT_STREAM_TYPE: {}}},
        204: {"description": "the end was reached before the cursor"},
    },
)
async def follow(
    conversation: ConversationId,
    request: Request,
    who: Who,
    deps: With,
    cursor: Annotated[str | None, Query()] = None,
    until: Annotated[str | None, Query()] = None,
) -> Response:
    """The event stream (see `tether.api`). `until`: `response:{id}` or `idle`. `Last-Event-ID` wins over `cursor`:
    a browser's EventSource sends it with the URL that it was opened with."""
    text = request.headers.get(LAST_EVENT_ID_HEADER) or cursor
    async with deps.quotas.turn(who.tenant):
        opening = await open_stream(deps, who.tenant, conversation, text, until, SSE)
        if opening.over:
            return Response(status_code=204)
        return EventStream(deps, opening, deps.quotas.reader(who.tenant))


@router.post(
    "/v1/conversations/{conversation}/interactions/{interaction:path}",
    response_model=ControlAnswer,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": AnswerRequest.model_json_schema()}},
        }
    },
)
async def answer(conversation: ConversationId, interaction: str, request: Request, who: Who, deps: With) -> Any:
    """Answer what waits for a human. The collector decides: of two answers one wins, the other gets its receipt."""
    if not 1 <= len(interaction) <= INTERACTION_CHARS_MAX:
        raise InvalidError("path.interaction", f"must be 1 to {INTERACTION_CHARS_MAX} characters")
    body = await body_of(request, AnswerRequest)
    await check_not_deleted(deps.bus, who.tenant, conversation)
    return await give(deps, who.tenant, conversation, interaction, body, control_id_of(request, body.control_id))


async def give(
    deps: Deps, tenant: str, conversation: str, interaction: str, body: AnswerRequest, control: str | None
) -> Response:
    """An answer, under the control id that the client chose, or else one that is the answer's own. Raises ProblemError,
    BusError, SQLAlchemyError."""
    payload = AnswerPayload(
        interaction=interaction,
        decision=body.decision,
        text=body.text,
        input=body.input,
        answers=body.answers,
    ).model_dump(mode="json", exclude_none=True)
    execution = body.execution or await _execution_of(deps, tenant, conversation, interaction)
    control = control or _derived(tenant, execution, payload)
    target = await find_target(deps, tenant, execution, control, within=conversation)
    return await send(deps, target, "answer", control, payload)


def _derived(tenant: str, execution: str, payload: dict[str, Any]) -> str:
    """The same answer is the same control, whoever repeats it."""
    text = json.dumps([tenant, execution, payload], sort_keys=True, separators=(",", ":"))
    return f"ctl_{hashlib.sha256(text.encode()).hexdigest()[:24]}"


async def _execution_of(deps: Deps, tenant: str, conversation: str, interaction: str) -> str:
    """Where the interaction is: a pending row first, else the execution that owns the conversation."""
    rows = await deps.history.interactions(tenant, conversation, interaction)
    pending = [row for row in rows if row.state == "pending"]
    if len(pending) > 1:
        remedy = "must be named: several executions have a pending interaction of this id"
        raise ProblemError(
            problem(Code.INVALID, f"execution: {remedy}", fields=(FieldProblem(field="execution", remedy=remedy),))
        )
    if pending:
        return pending[0].execution
    workspace = await deps.runtime.workspace(tenant, conversation)
    owner = None if workspace is None else await deps.runtime.owner(tenant, workspace, conversation)
    active = owner.target.execution if owner is not None and owner.target is not None else None
    if rows and active not in {row.execution for row in rows}:
        last = rows[-1]
        raise ProblemError(
            problem(
                Code.INTERACTION_SETTLED,
                f"the interaction is {last.state}",
                execution=last.execution,
                state=last.state,
                control=last.control,
            )
        )
    if active is None:
        raise ProblemError(problem(Code.NOT_FOUND, "interaction: the conversation has none of this id"))
    return active
