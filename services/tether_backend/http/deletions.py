"""`DELETE /v1/conversations/{c}`: a deletion is ordered, and goes on by itself (see `tether.deletion`).

It is answered at once with 202 and the operation; `…/deletion` tells how it stands, also when all else of the
conversation is gone. A repetition joins what runs.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from tether.deletion import DeletionView, begin_deletion, deletion_of
from tether.errors import Code, InvalidError, ProblemError, problem
from tether.ids import TOKEN_PATTERN, new_id
from tether_backend.http.parse import ConversationId, Who, With

router = APIRouter()
_QUERY: Final = ("deletion_id", "force")


@router.delete("/v1/conversations/{conversation}", status_code=202, response_model=DeletionView)
async def delete_conversation(
    conversation: ConversationId,
    request: Request,
    who: Who,
    deps: With,
    deletion_id: Annotated[str | None, Query(pattern=TOKEN_PATTERN)] = None,
    force: Annotated[bool, Query()] = False,
) -> Any:
    for name in request.query_params:
        if name not in _QUERY:  # nothing is deleted on a word that was not understood
            raise InvalidError(f"query.{name}", f"is not known here; give {', '.join(_QUERY)}")
    record = await begin_deletion(
        deps.bus,
        who.tenant,
        conversation,
        deletion=deletion_id or new_id("del"),
        force=force,
        by=who.name,
        now_ms=time.time_ns() // 1_000_000,
    )
    return _told(DeletionView.of(record), 202)


@router.get("/v1/conversations/{conversation}/deletion", response_model=DeletionView)
async def get_deletion(conversation: ConversationId, who: Who, deps: With) -> Any:
    record = await deletion_of(deps.bus, who.tenant, conversation)
    if record is None:
        raise ProblemError(problem(Code.NOT_FOUND, "conversation: no deletion of it is known"))
    return _told(DeletionView.of(record))


def _told(view: DeletionView, status: int = 200) -> JSONResponse:
    return JSONResponse(view.model_dump(mode="json", exclude_none=True), status_code=status)
