"""What `/openapi.json` says of quarantine."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Final

from tether import subjects
from tether.errors import Code
from tether.frame_rules import Refusal as Reason
from tether.ids import TOKEN_REMEDY
from tether.quarantine import NumberedEntry, QuarantineList
from tether_backend.http import openapi_examples as ex
from tether_backend.http import openapi_refusals as no
from tether_backend.http.openapi import Answer, Parameter, Refusal, Route

_TENANT: Final = "acme"
_WORKSPACE: Final = "checkout"
_DATA: Final = b'{"v":1,"first":7,"last":7,"pos":{"record":9,"index":0},"events":[{"ordinal":7,"type":"gap"}]}'
_ENTRY: Final = NumberedEntry(
    id=12,
    reason=Reason.TYPE,
    detail="events.type: response.created is not an execution's to say",
    stream=subjects.events_stream(_TENANT),
    subject=subjects.event(_TENANT, _WORKSPACE, ex.CONVERSATION, ex.EXECUTION),
    tenant=_TENANT,
    workspace=_WORKSPACE,
    conversation=ex.CONVERSATION,
    execution=ex.EXECUTION,
    sequence=207,
    stored_at=ex.AT,
    stored_at_ns=ex.AT * 1_000_000,
    bytes=len(_DATA),
    digest=hashlib.sha256(_DATA).hexdigest(),
    prefix=base64.b64encode(_DATA).decode(),
    last_sequence=207,
    at=ex.AT + 20,
)
_NO_ENTRY: Final = Refusal.of("no_entry", Code.NOT_FOUND, "entry: there is none of this id, or it is no longer kept")
_BAD_WORKSPACE: Final = Refusal.of(
    "bad_workspace", Code.INVALID, f"query.workspace: {TOKEN_REMEDY}", field="query.workspace"
)
_BAD_ENTRY: Final = Refusal.of("bad_entry", Code.INVALID, "path.entry: must be a whole number", field="path.entry")

QUARANTINE_ROUTES: Final[Mapping[str, Route]] = {
    "GET /v1/quarantine": Route(
        "Operations",
        "listQuarantine",
        "List refused messages",
        "What of the tenant's log was not believed, newest first, with the reason. No part of it was acted on.",
        {
            200: Answer(
                "A page", QuarantineList, {"one": ex.json_of(QuarantineList(entries=[_ENTRY], next_page=_ENTRY.id))}
            )
        },
        (*no.EDGE, no.BAD_LIMIT, _BAD_WORKSPACE, no.NO_BUS),
        {
            "workspace": Parameter("Only of this workspace.", _WORKSPACE),
            "conversation": Parameter("Only of this conversation.", ex.CONVERSATION),
            "before": Parameter("The `next_page` of the answer before.", 12),
            "limit": Parameter("At most so many entries.", 20),
        },
    ),
    "GET /v1/quarantine/{entry}": Route(
        "Operations",
        "getQuarantined",
        "Show a refused message",
        "Its place in the log, the reason, its size and digest, and its first bytes in base64.",
        {200: Answer("The entry", NumberedEntry, {"one": ex.json_of(_ENTRY)})},
        (*no.EDGE, _BAD_ENTRY, _NO_ENTRY, no.NO_BUS),
        {"entry": Parameter("Its id, as the list gives it.", 12)},
    ),
}
