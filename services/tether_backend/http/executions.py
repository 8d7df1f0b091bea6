"""Executions and controls."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import Response

from tether.api import (
    ITEMS_PAGE_MAX,
    ControlAnswer,
    ControlBody,
    ExecutionList,
    ExecutionSnapshot,
    ExecutionView,
    ItemList,
)
from tether.cursor import Cursor
from tether.errors import Code, ProblemError, problem
from tether.fold import ExecutionState
from tether.ids import TOKEN_PATTERN, ExecutionTarget, new_id
from tether.limits import EXECUTION_TOKEN_CONVERSATION
from tether.snapshot import Snapshot, Watermark, take
from tether.snapshots import Absence, Found, Snapshots, target_of
from tether.subjects import EventAddress
from tether_backend.http.controls import (
    Settled,
    answer_of,
    ask_receipt,
    find_target,
    no_execution,
    receipt_of,
    send,
    settled,
)
from tether_backend.http.parse import (
    LIMIT_DEFAULT,
    ExecutionId,
    Limit,
    Who,
    With,
    body_of,
    control_id_of,
    decode_page,
    encode_page,
)
from tether_backend.runtime import Deps
from tether_backend.store.history import Place

router = APIRouter()
Phase = Literal["active", "starting", "running", "waiting", "exiting", "ended"]


@router.get("/v1/executions", response_model=ExecutionList)
async def list_executions(
    who: Who,
    deps: With,
    limit: Limit = LIMIT_DEFAULT,
    page: Annotated[str | None, Query()] = None,
    conversation: Annotated[str | None, Query(pattern=TOKEN_PATTERN)] = None,
    state: Annotated[Phase | None, Query()] = None,
) -> Any:
    """Newest first. `state=active`: every one that has not ended."""
    views, after = await deps.history.executions(
        who.tenant, limit=limit, after=decode_page(page), conversation=conversation, state=state
    )
    answer = ExecutionList(executions=views, next_page=encode_page(after))
    return JSONResponse(answer.model_dump(mode="json", exclude_none=True))


@router.get("/v1/executions/{execution}", response_model=ExecutionView)
async def get_execution(execution: ExecutionId, who: Who, deps: With) -> Any:
    """As the projection has it, with the target of the owner record where it owns its conversation."""
    view = await deps.history.execution(who.tenant, execution)
    if view is not None:
        owner = await deps.runtime.owner(who.tenant, view.workspace, view.conversation)
    else:
        owner = await deps.runtime.owner_of_execution(who.tenant, execution)
    target = None if owner is None else owner.target
    if view is None and target is not None:
        view = ExecutionView(
            execution=execution,
            conversation=target.conversation,
            workspace=target.workspace,
            response=target.response,
            generation=target.execution_generation,
            state="starting",
        )
    if view is None:
        raise ProblemError(problem(Code.NOT_FOUND, "execution: there is none of this id"))
    if target is not None and target.execution == execution:
        view = view.model_copy(update={"target": target})
    return JSONResponse(view.model_dump(mode="json", exclude_none=True))


@router.get("/v1/executions/{execution}/items", response_model=ItemList)
async def get_items(
    execution: ExecutionId,
    who: Who,
    deps: With,
    after: Annotated[int, Query(ge=-1, le=2**31 - 1)] = -1,
    limit: Annotated[int, Query(ge=1, le=ITEMS_PAGE_MAX)] = LIMIT_DEFAULT,
) -> Any:
    found = await deps.history.items(who.tenant, execution, after=after, limit=limit)
    if found is None:
        raise ProblemError(problem(Code.NOT_FOUND, "execution: there is none of this id"))
    return JSONResponse(found.model_dump(mode="json", exclude_none=True))


@router.get("/v1/executions/{execution}/snapshot", response_model=ExecutionSnapshot)
async def get_snapshot(execution: ExecutionId, who: Who, deps: With) -> Any:
    """Of a living execution from its collector, of one that has ended folded from the log, else the collector's final
    one; what none of them has, from the projection's rows. Reading wakes no sandbox."""
    place = await deps.history.place(who.tenant, execution)
    owner = None
    if place is not None:
        owner = await deps.runtime.owner(who.tenant, place.workspace, place.conversation)
    else:
        owner = await deps.runtime.owner_of_execution(who.tenant, execution)
    target = owner.target if owner is not None and owner.target is not None else None
    if target is not None and target.execution == execution:
        place = place or Place(target.workspace, target.conversation, execution)
    if place is None:
        raise ProblemError(problem(Code.NOT_FOUND, "execution: there is none of this id"))
    address = EventAddress(who.tenant, place.workspace, place.conversation, execution)
    rows = await deps.history.state(who.tenant, execution)
    found = await Snapshots(deps.bus, who.tenant).get(address, None if rows is None else known_target(rows[1]))
    if isinstance(found, Found):
        return _snapshot_answer(who.tenant, place, found.source, found.snapshot)
    if rows is None and found.why is Absence.CAPABILITY_MISSING:
        raise ProblemError(problem(Code.CAPABILITY_MISSING, found.detail))
    return await _from_rows(deps, who.tenant, place, target)


def known_target(state: ExecutionState) -> ExecutionTarget | None:
    """As the rows have it."""
    try:
        return ExecutionTarget.model_validate(state.target or {})
    except ValidationError:
        return None


async def _from_rows(deps: Deps, tenant: str, place: Place, target: ExecutionTarget | None) -> Any:
    cursor = await deps.runtime.floor(tenant)
    found = await deps.history.state(tenant, place.execution)
    if found is None:
        raise ProblemError(problem(Code.TARGET_UNKNOWN, "nothing of the execution is logged yet", retry_after_s=1.0))
    mark = Watermark(ordinal=found[1].applied, sequence=cursor.sequence, tag=cursor.tag)
    return _snapshot_answer(tenant, place, "projection", _taken(found[1], place, tenant, target, mark))


def _taken(
    state: ExecutionState, place: Place, tenant: str, target: ExecutionTarget | None, mark: Watermark
) -> Snapshot:
    if target is None or target.execution != place.execution:
        target = target_of(state, EventAddress(tenant, place.workspace, place.conversation, place.execution))
    at = state.ended_at or state.response_ended_at or state.started_at or 0
    return take(target, state, mark, captured_at=at)


def _snapshot_answer(tenant: str, place: Place, source: str, snapshot: Snapshot) -> JSONResponse:
    mark = snapshot.watermark
    cursor = Cursor(mark.sequence, tag=mark.tag) if mark.sequence else Cursor.beginning()
    return JSONResponse(
        {
            "execution": place.execution,
            "source": source,
            "snapshot": snapshot.model_dump(mode="json", exclude_none=True),
            "cursor": cursor.encode(tenant, place.conversation),
        }
    )


class _Verb(Convertor[str]):
    """Other last segments are other paths: of those that can only be read, the method is refused."""

    regex = "interrupt|stop"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("verb", _Verb())


@router.post("/v1/executions/{execution}/{verb:verb}", response_model=ControlAnswer)
async def control_execution(
    execution: ExecutionId,
    verb: Annotated[Literal["interrupt", "stop"], Path()],
    request: Request,
    who: Who,
    deps: With,
) -> Any:
    """`interrupt` ends the turn, `stop` the process. The body may be left out."""
    body = await body_of(request, ControlBody, optional=True)
    return await end(deps, who.tenant, execution, verb, control_id_of(request, body.control_id))


async def end(
    deps: Deps,
    tenant: str,
    execution: str,
    verb: Literal["interrupt", "stop"],
    control: str | None,
    *,
    within: str | None = None,
) -> Response:
    """A turn, or a process, under the control id that the client chose, or else a new one. `within`: see `find_target`.
    Raises ProblemError, BusError, SQLAlchemyError."""
    control = control or new_id("ctl")
    target = await find_target(deps, tenant, execution, control, within=within)
    return await send(deps, target, verb, control, {})


@router.get("/v1/controls/{control}", response_model=ControlAnswer)
async def get_control(
    control: Annotated[str, Path(pattern=TOKEN_PATTERN)],
    who: Who,
    deps: With,
    execution: Annotated[str | None, Query(pattern=TOKEN_PATTERN)] = None,
) -> Any:
    """What became of a control: the collector's word where the execution lives, else the log's."""
    return await look_up(deps, who.tenant, control, execution)


async def look_up(
    deps: Deps, tenant: str, control: str, execution: str | None, *, within: str | None = None
) -> Response:
    """The receipt as it stands. `within`: see `find_target`; what is of no execution is of no conversation either.
    Raises ProblemError, BusError, SQLAlchemyError."""
    await deps.caught_up(tenant)
    known = await receipt_of(deps, tenant, control, execution)
    named = execution or (known.execution if known is not None else None)
    if named is None or named == EXECUTION_TOKEN_CONVERSATION:
        if within is not None:
            raise no_execution()
        if known is None:
            raise ProblemError(problem(Code.NOT_FOUND, "control: none of this id is known; name its execution"))
        return answer_of(settled(known, "", control), known.execution)
    target = await find_target(deps, tenant, named, control, within=within)
    if isinstance(target, Settled):
        return answer_of(settled(target, "", control), named)
    return answer_of(await ask_receipt(deps, target, control), named)
