"""What is notified, and what becomes of a notification. Pure; its shell is `tether_backend.webhooks`.

    interaction.requested  an approval or a question waits for a human
    response.ended         a response has its outcome (also: it failed before it began, or was superseded)

    pending ──2xx──▶ delivered
       │  └──another answer, or none──▶ pending, later (WEBHOOK_BACKOFF_S)
       └──the last attempt failed──▶ dead ──retry──▶ pending

A notification's id is derived from the event's identity and the endpoint, never from its position or from a delivery:
whatever is read again after a recovery makes the same id, whose record exists. A record is kept for longer than the log
keeps the event.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterator
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from tether import events as ev
from tether.events import ConversationEvent, Event
from tether.frames import Frame
from tether.limits import WEBHOOK_BACKOFF_S, WEBHOOK_DETAIL_CHARS_MAX, WEBHOOK_RETRY_AFTER_MAX_S
from tether.subjects import EventAddress

Kind = Literal["interaction.requested", "response.ended"]
KINDS: Final[tuple[Kind, ...]] = ("interaction.requested", "response.ended")
State = Literal["pending", "delivered", "dead"]
_CODES_OF_NO_RESPONSE: Final = {ev.RESPONSE_FAILED: "failed", ev.RESPONSE_SUPERSEDED: "superseded"}
_ERROR_CHARS_MAX: Final = 300


class Notice(BaseModel):
    """What a receiver gets as `data`. `identity` names the event; `at` in unix milliseconds."""

    model_config = ConfigDict(frozen=True)

    kind: Kind
    identity: str
    tenant: str
    workspace: str
    conversation: str
    execution: str | None = None
    at: int
    data: dict[str, Any]


class Notification(BaseModel):
    """`tether_notifications/{tenant}.{endpoint}.{id}`. `body`: the bytes of every attempt. Times in unix ms."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    v: Literal[1] = 1
    id: str
    endpoint: str
    kind: Kind
    conversation: str
    execution: str | None = None
    body: str
    state: State = "pending"
    attempts: int = 0
    due_at: int = 0
    created_at: int = 0
    settled_at: int | None = None
    status: int | None = None
    error: str | None = None
    round: int = Field(default=0, description="how often a dead one was put back")

    def value(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True)


def notices_of(address: EventAddress, content: Frame | ConversationEvent) -> Iterator[Notice]:
    """Every notice that a stored message of the log makes."""
    if isinstance(content, Frame):
        for event in content.events:
            found = _of_execution(address, event)
            if found is not None:
                yield found
        return
    outcome = _CODES_OF_NO_RESPONSE.get(content.type)
    if outcome is None:
        return
    body = content.body
    data = {"outcome": outcome, "request": body.get("request"), "response": body.get("response")}
    if outcome == "failed":
        data["error"] = {"code": body.get("code"), "detail": _text(body.get("detail"))}
        data["retryable"] = bool(body.get("retryable"))
    else:
        data["superseded_by"] = body.get("by")
    yield _notice(address, "response.ended", f"_/{content.id}", content.at, data, execution=None)


def _of_execution(address: EventAddress, event: Event) -> Notice | None:
    body = event.body
    identity = f"{address.execution}/{event.ordinal}"
    if event.type == ev.INTERACTION_REQUESTED:
        data = {
            "interaction": body.get("interaction"),
            "asks": body.get("kind"),
            "name": _text(body.get("name")),
            "description": _text(body.get("description")),
        }
        return _notice(address, "interaction.requested", identity, event.at, data, execution=address.execution)
    if event.type == ev.RESPONSE_ENDED:
        # There is one per execution: its ordinal may differ where a lost end was made up for.
        identity = f"{address.execution}/{ev.RESPONSE_ENDED}"
        error = body.get("error")
        data = {"outcome": body.get("outcome")}
        if isinstance(error, dict):
            data["error"] = {"code": error.get("code"), "detail": _text(error.get("detail"))}
        return _notice(address, "response.ended", identity, event.at, data, execution=address.execution)
    return None


def _notice(
    address: EventAddress, kind: Kind, identity: str, at: int, data: dict[str, Any], *, execution: str | None
) -> Notice:
    return Notice(
        kind=kind,
        identity=identity,
        tenant=address.tenant,
        workspace=address.workspace,
        conversation=address.conversation,
        execution=execution,
        at=at,
        data={name: value for name, value in data.items() if value not in (None, "")},
    )


def _text(value: object) -> str | None:
    return value[:WEBHOOK_DETAIL_CHARS_MAX] if isinstance(value, str) else None


def notification_id(notice: Notice, endpoint: str) -> str:
    """Stable: the same event and endpoint give the same id, for ever."""
    parts = (notice.tenant, notice.conversation, notice.kind, notice.identity, endpoint)
    return "ntf_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


# --- what becomes of it ---


def attempted(
    note: Notification, *, now_ms: int, status: int | None, error: str | None, retry_after_s: float | None
) -> Notification:
    """After one attempt. `status` of the answer, None where none came; `error` says why then."""
    attempts = note.attempts + 1
    told = {"attempts": attempts, "status": status, "error": None if error is None else error[:_ERROR_CHARS_MAX]}
    if status is not None and 200 <= status < 300:
        return note.model_copy(update={**told, "error": None, "state": "delivered", "settled_at": now_ms})
    if attempts > len(WEBHOOK_BACKOFF_S):
        return note.model_copy(update={**told, "state": "dead", "settled_at": now_ms})
    wait_s = max(float(WEBHOOK_BACKOFF_S[attempts - 1]), min(retry_after_s or 0.0, WEBHOOK_RETRY_AFTER_MAX_S))
    return note.model_copy(update={**told, "due_at": now_ms + int(wait_s * 1000)})


def revived(note: Notification, now_ms: int) -> Notification:
    """A dead one, or one that waits, is due now; a delivered one stays as it is."""
    if note.state == "delivered":
        return note
    update = {"state": "pending", "attempts": 0, "due_at": now_ms, "settled_at": None, "round": note.round + 1}
    return note.model_copy(update=update)


def signature(secret: bytes, notification: str, timestamp_s: int, body: bytes) -> str:
    """The `webhook-signature` of the Standard Webhooks specification: `v1,` and the HMAC-SHA256 in base64."""
    signed = b"%s.%d.%s" % (notification.encode(), timestamp_s, body)
    return "v1," + base64.b64encode(hmac.digest(secret, signed, "sha256")).decode()
