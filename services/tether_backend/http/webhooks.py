"""The webhook outbox over HTTP: what is configured, what waits, what is dead, and putting it back."""

from __future__ import annotations

import heapq
import time
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query

from tether.api import WebhookDelivery, WebhookDeliveryList, WebhookEndpoint, WebhookList
from tether.errors import Code, ProblemError, problem
from tether.ids import TOKEN_PATTERN
from tether.kv import Conflict, Entry
from tether_backend.core.notices import Notification, State, revived
from tether_backend.http.parse import LIMIT_DEFAULT, Limit, Who, With

router = APIRouter()
Named = Annotated[str, Path(pattern=TOKEN_PATTERN)]


@router.get("/v1/webhooks", response_model=WebhookList)
async def list_webhooks(who: Who, deps: With) -> Any:
    """The tenant's endpoints, without addresses: they may hold a secret."""
    endpoints = deps.webhooks[who.tenant].endpoints
    return WebhookList(
        endpoints=[
            WebhookEndpoint(name=one.name, host=one.host, kinds=sorted(one.kinds))
            for one in sorted(endpoints.values(), key=lambda one: one.name)
        ]
    )


@router.get("/v1/webhooks/deliveries", response_model=WebhookDeliveryList)
async def list_deliveries(
    who: Who,
    deps: With,
    state: Annotated[State | None, Query()] = None,
    endpoint: Annotated[str | None, Query(pattern=TOKEN_PATTERN)] = None,
    limit: Limit = LIMIT_DEFAULT,
) -> Any:
    """The last written first."""
    found: list[tuple[int, Notification]] = []
    async for entry, note in deps.webhooks[who.tenant].outbox.written_after(0):
        if (state is None or note.state == state) and (endpoint is None or note.endpoint == endpoint):
            found.append((entry.revision, note))
    newest = heapq.nlargest(limit, found, key=lambda one: one[0])
    return WebhookDeliveryList(deliveries=[_view(note) for _, note in newest], omitted=len(found) - len(newest))


@router.post("/v1/webhooks/deliveries/{endpoint}/{notification}/retry", response_model=WebhookDelivery)
async def retry_delivery(endpoint: Named, notification: Named, who: Who, deps: With) -> Any:
    """A dead one, or one that waits for its next attempt, is due now; a delivered one stays delivered."""
    outbox = deps.webhooks[who.tenant].outbox
    while True:
        found: tuple[Entry, Notification] | None = await outbox.get(endpoint, notification)
        if found is None:
            raise ProblemError(problem(Code.NOT_FOUND, "notification: there is none of this endpoint and id"))
        entry, note = found
        after = revived(note, time.time_ns() // 1_000_000)
        if after == note:
            return _view(note)
        try:
            await outbox.put(entry, after)
        except Conflict:
            continue  # settled meanwhile: look again
        return _view(after)


def _view(note: Notification) -> WebhookDelivery:
    return WebhookDelivery.model_validate(note.model_dump(exclude={"v", "body", "round"}))
