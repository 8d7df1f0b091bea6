"""What of the tenant's log was refused, for operators (see `tether.quarantine`). Read from its stream, newest first."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from tether.errors import Code, ProblemError, problem
from tether.ids import TOKEN_PATTERN
from tether.limits import NUMBER_MAX
from tether.quarantine import NumberedEntry, QuarantineList, read_entry, read_page
from tether_backend.http.parse import LIMIT_DEFAULT, Limit, Who, With

router = APIRouter()
Named = Annotated[str | None, Query(pattern=TOKEN_PATTERN)]


@router.get("/v1/quarantine", response_model=QuarantineList)
async def list_quarantine(
    who: Who,
    deps: With,
    workspace: Named = None,
    conversation: Named = None,
    before: Annotated[int | None, Query(ge=1, le=NUMBER_MAX)] = None,
    limit: Limit = LIMIT_DEFAULT,
) -> Any:
    entries, following = await read_page(
        deps.bus, who.tenant, before=before, limit=limit, workspace=workspace or "*", conversation=conversation or "*"
    )
    return QuarantineList(entries=entries, next_page=following)


@router.get("/v1/quarantine/{entry}", response_model=NumberedEntry)
async def get_quarantined(entry: Annotated[int, Path(ge=1, le=NUMBER_MAX)], who: Who, deps: With) -> Any:
    found = await read_entry(deps.bus, who.tenant, entry)
    if found is None:
        raise ProblemError(problem(Code.NOT_FOUND, "entry: there is none of this id, or it is no longer kept"))
    return found
