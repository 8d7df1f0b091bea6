"""The problems of `/openapi.json`: each as a route really gives it, with the context that it has."""

from __future__ import annotations

from typing import Final

from tether.api import IDEMPOTENCY_HEADER, PAGE_MAX
from tether.errors import Code
from tether.ids import TOKEN_REMEDY
from tether.limits import HTTP_BODY_BYTES_MAX, WAITING_PROMPTS_MAX
from tether_backend.http import openapi_examples as ex
from tether_backend.http.openapi import Refusal

UNAUTHENTICATED: Final = Refusal.of(
    "unauthenticated", Code.UNAUTHENTICATED, "send a valid token: Authorization: Bearer …"
)
FORBIDDEN_HOST: Final = Refusal.of(
    "forbidden_host", Code.FORBIDDEN, "host: must be a name of this service (TETHER_HTTP_HOSTS)", field="host"
)
FORBIDDEN_ORIGIN: Final = Refusal.of(
    "forbidden_origin",
    Code.FORBIDDEN,
    "origin: must be this service's own or configured (TETHER_HTTP_ORIGINS)",
    field="origin",
)
FAILED: Final = Refusal.of(
    "failed", Code.RUNTIME_UNAVAILABLE, "the request failed here; it is logged", status=500, retryable=True
)
NO_DATABASE: Final = Refusal.of(
    "no_database", Code.RUNTIME_UNAVAILABLE, "the database does not answer for now", retry_after_s=1.0
)
NO_BUS: Final = Refusal.of(
    "no_bus", Code.RUNTIME_UNAVAILABLE, "the message bus does not answer for now", retry_after_s=1.0
)
NO_LOG: Final = Refusal.of("no_log", Code.RUNTIME_UNAVAILABLE, "the log cannot be read yet", retry_after_s=1.0)
NOT_BOUND: Final = Refusal.of(
    "not_bound", Code.RUNTIME_UNAVAILABLE, "the projection is not bound yet", retry_after_s=1.0
)
TOO_LARGE: Final = Refusal.of(
    "too_large", Code.INVALID, f"body: must be at most {HTTP_BODY_BYTES_MAX} bytes", field="body", status=413
)
BAD_ID: Final = Refusal.of(
    "bad_id",
    Code.INVALID,
    f"path.conversation: {TOKEN_REMEDY}",
    field="path.conversation",
)
BAD_EXECUTION: Final = Refusal.of(
    "bad_execution",
    Code.INVALID,
    f"path.execution: {TOKEN_REMEDY}",
    field="path.execution",
)
BAD_CONTROL_PATH: Final = Refusal.of(
    "bad_control_path",
    Code.INVALID,
    f"path.control: {TOKEN_REMEDY}",
    field="path.control",
)
BAD_LIMIT: Final = Refusal.of(
    "bad_limit",
    Code.INVALID,
    f"query.limit: must be at most {PAGE_MAX}",
    field="query.limit",
)
BAD_PAGE: Final = Refusal.of(
    "bad_page", Code.INVALID, "query.page: must be a next_page that this list gave, unchanged", field="query.page"
)
BAD_CURSOR: Final = Refusal.of(
    "bad_cursor",
    Code.INVALID,
    "cursor: must be a cursor that this conversation's events or history gave, unchanged",
    field="cursor",
)
BAD_UNTIL: Final = Refusal.of("bad_until", Code.INVALID, "until: must be response:{id} or idle", field="until")
BAD_BODY: Final = Refusal.of("bad_body", Code.INVALID, "request_id: is required", field="request_id")
BAD_WORKSPACE: Final = Refusal.of(
    "bad_workspace",
    Code.INVALID,
    "workspace: must be the conversation's own: it is fixed by the first message",
    field="workspace",
)
BAD_CONTROL: Final = Refusal.of(
    "bad_control",
    Code.INVALID,
    f"control_id: must equal the header {IDEMPOTENCY_HEADER}, or be left out",
    field="control_id",
)
BAD_DECISION: Final = Refusal.of(
    "bad_decision", Code.INVALID, "decision: must be one of allow or deny", field="decision"
)
SEVERAL_ASK: Final = Refusal.of(
    "several_ask",
    Code.INVALID,
    "execution: must be named: several executions have a pending interaction of this id",
    field="execution",
)
NO_CONVERSATION: Final = Refusal.of("no_conversation", Code.NOT_FOUND, "conversation: there is none of this id")
DELETED: Final = Refusal.of(
    "deleted",
    Code.CONVERSATION_DELETED,
    "conversation: it was deleted; use another id",
    deletion="del_5f0c7d1e2a3b",
    free_at=1_767_312_000_000,
)
NO_EXECUTION: Final = Refusal.of("no_execution", Code.NOT_FOUND, "execution: there is none of this id")
NO_INTERACTION: Final = Refusal.of(
    "no_interaction", Code.NOT_FOUND, "interaction: the conversation has none of this id"
)
NO_CONTROL: Final = Refusal.of("no_control", Code.NOT_FOUND, "control: none of this id is known; name its execution")
NOT_ASKED: Final = Refusal.of(
    "not_asked",
    Code.TARGET_UNKNOWN,
    "no such interaction was asked",
    interaction=ex.INTERACTION,
    control_id=ex.CONTROL,
    execution=ex.EXECUTION,
)
NOT_KNOWN: Final = Refusal.of(
    "not_known",
    Code.TARGET_UNKNOWN,
    "this sandbox does not know the execution",
    control_id="ctl-7",
    execution=ex.EXECUTION,
)
NOT_LOGGED: Final = Refusal.of(
    "not_logged", Code.TARGET_UNKNOWN, "nothing of the execution is logged yet", retry_after_s=1.0
)
STALE: Final = Refusal.of(
    "stale",
    Code.TARGET_STALE,
    "the execution does not own its conversation any more",
    current=ex.json_of(ex.TARGET),
)
OVER: Final = Refusal.of(
    "over",
    Code.SESSION_STREAM_NOT_ACTIVE,
    "the response has ended",
    ended=True,
    control_id="ctl-7",
    execution=ex.EXECUTION,
)
SETTLED: Final = Refusal.of(
    "settled",
    Code.INTERACTION_SETTLED,
    "the interaction is answered",
    execution=ex.EXECUTION,
    state="answered",
    control=ex.CONTROL,
)
CONTROL_CONFLICT: Final = Refusal.of(
    "control_conflict",
    Code.REQUEST_CONFLICT,
    "this control id was used with another payload",
    control_id="ctl-7",
    execution=ex.EXECUTION,
)
RECOVERING: Final = Refusal.of(
    "recovering",
    Code.RUNTIME_UNAVAILABLE,
    "the execution is being recovered",
    control_id="ctl-7",
    execution=ex.EXECUTION,
)
CONFLICT: Final = Refusal.of(
    "conflict",
    Code.REQUEST_CONFLICT,
    "request_id: was used with another payload; take a new id for a new request",
    request_id=ex.REQUEST,
)
NOTHING_ACTIVE: Final = Refusal.of(
    "nothing_active",
    Code.SESSION_STREAM_NOT_ACTIVE,
    "no execution is active to interject into; send with mode auto under a new request id to start one",
)
BUSY: Final = Refusal.of(
    "busy",
    Code.SESSION_BUSY,
    "the execution that is active cannot take a message now; wait for its end, or send with mode takeover under a new "
    "request id",
    retryable=True,
)
QUEUE_FULL: Final = Refusal.of(
    "queue_full",
    Code.QUOTA_EXCEEDED,
    f"{WAITING_PROMPTS_MAX} messages wait in this conversation already",
    retry_after_s=1.0,
    limit="waiting_prompts",
    value=WAITING_PROMPTS_MAX,
    scope="conversation",
)
TOO_OFTEN: Final = Refusal.of(
    "too_often",
    Code.QUOTA_EXCEEDED,
    "600 messages a minute are allowed to this tenant",
    retry_after_s=0.1,
    limit="prompts_per_minute",
    value=600,
    scope="tenant",
    reset_at=1_767_225_660_000,
)
TOO_MUCH: Final = Refusal.of(
    "too_much",
    Code.QUOTA_EXCEEDED,
    "the tenant's log and blobs hold 1073741900 of 1073741824 bytes: delete what is not needed",
    limit="stored_bytes",
    value=1_073_741_824,
    scope="tenant",
    used=1_073_741_900,
)
TOO_MANY_READERS: Final = Refusal.of(
    "too_many_readers",
    Code.QUOTA_EXCEEDED,
    "4096 event streams of this tenant are open already: close some, or follow several in one",
    retry_after_s=5.0,
    limit="readers",
    value=4096,
    scope="tenant",
)
SUPERSEDED: Final = Refusal.of(
    "superseded",
    Code.REQUEST_SUPERSEDED,
    "request req-9 takes the conversation over, and was sent after this one",
    by="req-9",
)
TAKEOVER_STALE: Final = Refusal.of(
    "takeover_stale",
    Code.TARGET_STALE,
    "boot of the execution that is registered is not that of the owner record",
    retryable=True,
)
TAKEOVER_UNKNOWN: Final = Refusal.of(
    "takeover_unknown", Code.TARGET_UNKNOWN, "no registered sandbox says that it has the execution"
)
TAKEOVER_CANNOT: Final = Refusal.of(
    "takeover_cannot",
    Code.CAPABILITY_MISSING,
    "the sandbox's collector cannot stop one execution exactly (executionTargetStopV1); interrupt it, or wait",
    retryable=True,
)
STOP_UNCONFIRMED: Final = Refusal.of("stop_unconfirmed", Code.STOP_UNCONFIRMED, "nobody answers for the stop")
MESSAGE_LOST: Final = Refusal.of(
    "message_lost",
    Code.EXECUTION_DURABILITY_GAP,
    "the end of the execution that got the message is not in the log, so it is not known whether the message had "
    "reached it; look at what was done, then send again",
    retryable=True,
)
LEASE_HELD: Final = Refusal.of(
    "lease_held",
    Code.LEASE_NOT_READY,
    "control.default.ws.garden-42 is held by backend-5f0c7d1e2a3b",
    retry_after_s=5.0,
    holder="backend-5f0c7d1e2a3b",
)
NOT_A_WEBSOCKET: Final = Refusal.of(
    "not_a_websocket",
    Code.INVALID,
    "header.Upgrade: must be websocket: this path is for WebSocket clients; "
    "`events` gives the same as server-sent events",
    field="header.Upgrade",
    status=426,
)
BAD_TICKET: Final = Refusal.of(
    "bad_ticket", Code.UNAUTHENTICATED, "ticket: must be one that was given for this conversation, unchanged"
)
NO_FILE: Final = Refusal.of("no_file", Code.NOT_FOUND, "file: the page has none of this name")
BAD_PATH: Final = Refusal.of("bad_path", Code.INVALID, "path: must not have an encoded slash", field="path")
UNDECIDED: Final = Refusal.of(
    "undecided",
    Code.RUNTIME_UNAVAILABLE,
    "the execution ended before it was known whether the message had reached it; look, then send again",
    retryable=True,
)

EDGE: Final = (UNAUTHENTICATED, FORBIDDEN_HOST, FORBIDDEN_ORIGIN, FAILED)
