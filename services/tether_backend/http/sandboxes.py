"""Sandboxes: what they are, and drain, suspend, resume and delete as operations (see `tether.sandbox_asking`).

What begins one is answered at once with 202 and the operation; `drains/{drain_id}` tells how it stands. A client that
gives no `drain_id` gets a new one in the answer: only one that it chose itself makes a repetition join.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import JSONResponse

from tether import sandbox_asking
from tether.api_sandboxes import (
    REASON_CHARS_MAX,
    DeleteRequest,
    DrainRequest,
    DrainView,
    Purpose,
    ResumeRequest,
    ResumeView,
    SandboxList,
    SandboxView,
    SuspendRequest,
)
from tether.checkpoint import Include, Store
from tether.errors import InvalidError
from tether.ids import TOKEN_PATTERN, new_id
from tether.limits import DRAIN_GRACE_MAX_S
from tether_backend.http.parse import Who, With, body_of
from tether_backend.runtime import Deps

router = APIRouter()
WorkspaceId = Annotated[str, Path(pattern=TOKEN_PATTERN)]
DrainId = Annotated[str, Path(pattern=TOKEN_PATTERN)]


@router.get("/v1/sandboxes", response_model=SandboxList)
async def list_sandboxes(who: Who, deps: With) -> Any:
    return SandboxList(sandboxes=await sandbox_asking.list_sandboxes(deps.bus, who.tenant))


@router.get("/v1/sandboxes/{workspace}", response_model=SandboxView)
async def get_sandbox(workspace: WorkspaceId, who: Who, deps: With) -> Any:
    """From the records: reading wakes no sandbox."""
    return _told(await sandbox_asking.read_sandbox(deps.bus, who.tenant, workspace))


@router.get("/v1/sandboxes/{workspace}/drains/{drain_id}", response_model=DrainView)
async def get_drain(workspace: WorkspaceId, drain_id: DrainId, who: Who, deps: With) -> Any:
    return _told(await sandbox_asking.read_drain(deps.bus, who.tenant, workspace, drain_id))


@router.post("/v1/sandboxes/{workspace}/drain", status_code=202, response_model=DrainView)
async def drain(workspace: WorkspaceId, request: Request, who: Who, deps: With) -> Any:
    body = await body_of(request, DrainRequest, optional=True)
    return await _begin(deps, "drain", who.tenant, workspace, body)


@router.post("/v1/sandboxes/{workspace}/suspend", status_code=202, response_model=DrainView)
async def suspend(workspace: WorkspaceId, request: Request, who: Who, deps: With) -> Any:
    body = await body_of(request, SuspendRequest, optional=True)
    return await _begin(deps, "suspend", who.tenant, workspace, body)


@router.delete("/v1/sandboxes/{workspace}", status_code=202, response_model=DrainView)
async def delete(
    workspace: WorkspaceId,
    request: Request,
    who: Who,
    deps: With,
    drain_id: Annotated[str | None, Query(pattern=TOKEN_PATTERN)] = None,
    grace_s: Annotated[float | None, Query(ge=0, le=DRAIN_GRACE_MAX_S, allow_inf_nan=False)] = None,
    reason: Annotated[str | None, Query(max_length=REASON_CHARS_MAX)] = None,
    store: Annotated[Store | None, Query()] = None,
    include: Annotated[Include | None, Query()] = None,
    checkpoint: Annotated[bool, Query()] = True,
) -> Any:
    for name in request.query_params:
        if name not in DeleteRequest.model_fields:  # nothing is deleted on a word that was not understood
            raise InvalidError(f"query.{name}", f"is not known here; give {', '.join(DeleteRequest.model_fields)}")
    asked = DeleteRequest(
        drain_id=drain_id, grace_s=grace_s, reason=reason, store=store, include=include, checkpoint=checkpoint
    )
    return await _begin(deps, "delete", who.tenant, workspace, asked)


@router.post("/v1/sandboxes/{workspace}/resume", status_code=202, response_model=ResumeView)
async def resume(workspace: WorkspaceId, request: Request, who: Who, deps: With) -> Any:
    await body_of(request, ResumeRequest, optional=True)
    return _told(await sandbox_asking.resume(deps.bus, who.tenant, workspace), 202)


async def _begin(deps: Deps, verb: Purpose, tenant: str, workspace: str, request: DrainRequest) -> JSONResponse:
    drain = request.drain_id or new_id("drn")
    return _told(await sandbox_asking.begin_drain(deps.bus, verb, tenant, workspace, drain, request), 202)


def _told(view: SandboxView | DrainView | ResumeView, status: int = 200) -> JSONResponse:
    return JSONResponse(view.model_dump(mode="json", exclude_none=True), status_code=status)
