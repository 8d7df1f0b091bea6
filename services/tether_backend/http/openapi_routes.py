"""What each route is for, what it takes, answers and refuses: the texts and examples of `/openapi.json`.

A refusal stands here only if the route can really give it; live answers are checked against this list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel

from tether.api import (
    EVENT_STREAM_TYPE,
    FRAME_END,
    FRAME_EVENT,
    FRAME_HEARTBEAT,
    FRAME_LIVE,
    FRAME_OPEN,
    FRAME_PROBLEM,
    FRAME_REPLY,
    FRAME_SNAPSHOT,
    IDEMPOTENCY_HEADER,
    LAST_EVENT_ID_HEADER,
    AnswerRequest,
    ControlAnswer,
    ControlBody,
    ConversationHistory,
    ConversationList,
    ExecutionList,
    ExecutionSnapshot,
    ExecutionView,
    Health,
    ItemList,
    MessageAccepted,
    MessageRequest,
    StreamEnd,
    StreamEvent,
    StreamLive,
    StreamOpen,
    StreamSnapshot,
    StreamTicket,
    WsAnswer,
    WsClose,
    WsControl,
    WsReceipt,
    WsReply,
)
from tether.errors import Problem
from tether.ids import TOKEN_PATTERN
from tether.limits import (
    ADMISSION_WAIT_S,
    CONTROL_REPLY_S,
    HTTP_BODY_BYTES_MAX,
    SSE_HEARTBEAT_S,
    TICKET_LIFE_S,
    WS_ASKS_MAX,
    WS_MESSAGE_BYTES_MAX,
)
from tether_backend.http import openapi_examples as ex
from tether_backend.http import openapi_refusals as no
from tether_backend.http.openapi import Answer, Body, Parameter, Route
from tether_backend.http.openapi_deletions import DELETION_ROUTES
from tether_backend.http.openapi_quarantine import QUARANTINE_ROUTES
from tether_backend.http.openapi_sandboxes import SANDBOX_ROUTES
from tether_backend.http.openapi_webhooks import WEBHOOK_ROUTES

_A_TOKEN: Final = "must be 1 to 64 of the characters A-Z a-z 0-9 _ -"
_CONTROL: Final = (
    *(*no.EDGE, no.TOO_LARGE, no.BAD_CONTROL, no.NO_EXECUTION, no.NOT_KNOWN, no.STALE, no.OVER),
    *(no.LEASE_HELD, no.CONTROL_CONFLICT, no.RECOVERING, no.NO_BUS, no.NO_DATABASE),
)

CONVERSATION: Final = Parameter(f"The conversation's id, chosen by its client: {_A_TOKEN}.", ex.CONVERSATION)
EXECUTION: Final = Parameter("The execution's id, as an accepted message or a list gives it.", ex.EXECUTION)
LIMIT: Final = Parameter("At most so many entries.", 20)
PAGE: Final = Parameter("The `next_page` of the answer before, unchanged.", ex.NEXT_PAGE)
IDEMPOTENCY: Final = Parameter(
    "The control's id: the same again has no second effect. The same as `control_id` in the body.",
    "ctl-7",
    place="header",
    schema={"pattern": TOKEN_PATTERN},
)
CURSOR: Final = Parameter(
    "Go on after this id of an event (or `cursor` of an answer); without it from the beginning.", ex.cursor(207)
)
UNTIL: Final = Parameter(
    "End the stream at the end of a response (`response:{id}`), or when nothing runs or waits (`idle`).",
    f"response:{ex.RESPONSE}",
)

TICKET: Final = Parameter(
    "A ticket instead of the token, for a browser's EventSource or WebSocket, which can send no header.",
    ex.TICKET.ticket,
    place="query",
)
_STREAM: Final = (
    *(no.BAD_TICKET, no.BAD_ID, no.BAD_CURSOR, no.BAD_UNTIL, no.NO_LOG, no.NOT_BOUND, no.NO_BUS, no.NO_DATABASE),
    no.TOO_MANY_READERS,
    no.DELETED,
)
_FRAMES: Final[Mapping[str, type[BaseModel]]] = {
    FRAME_OPEN: StreamOpen,
    FRAME_EVENT: StreamEvent,
    FRAME_LIVE: StreamLive,
    FRAME_PROBLEM: Problem,
    FRAME_SNAPSHOT: StreamSnapshot,
    FRAME_END: StreamEnd,
}

_PAGE_HEADERS: Final = {
    "ETag": "The version; send it back as `If-None-Match`",
    "Content-Security-Policy": "Own scripts only, own origin only",
}
_RECEIPT: Final = (
    "The receipt as it stands: `accepted → delivered → settled`, or `rejected`. 202: no reply within "
    f"{CONTROL_REPLY_S:g} s, nothing was sent again; ask `GET /v1/controls/{{control}}`."
)
_NOT_CONFIRMED: Final = Answer("Whether it was taken is not known", ControlAnswer, {"unknown": ex.json_of(ex.UNKNOWN)})

CONVERSATION_ROUTES: Final[Mapping[str, Route]] = {
    "GET /v1/conversations": Route(
        "Conversations",
        "listConversations",
        "List conversations",
        "The tenant's conversations, the one that changed last first.",
        {200: Answer("One page", ConversationList, {"page": ex.json_of(ex.CONVERSATIONS)})},
        (*no.EDGE, no.BAD_LIMIT, no.BAD_PAGE, no.NO_DATABASE),
        {"limit": LIMIT, "page": PAGE},
    ),
    "GET /v1/conversations/{conversation}": Route(
        "Conversations",
        "getConversation",
        "Read a conversation's history",
        "One page of messages, responses, executions and their items, the newest page first. `cursor` was taken before "
        "the rows were read: follow the events from it and drop what `executions[].applied` already contains.",
        {200: Answer("One page", ConversationHistory, {"answered": ex.json_of(ex.HISTORY)})},
        (
            *no.EDGE,
            no.BAD_ID,
            no.BAD_LIMIT,
            no.NO_CONVERSATION,
            no.DELETED,
            no.NOT_BOUND,
            no.NO_BUS,
            no.NO_DATABASE,
        ),
        {
            "conversation": CONVERSATION,
            "limit": Parameter("At most so many messages and responses.", 20),
            "before": Parameter("The `before` of the page before this one.", 201),
        },
    ),
    "POST /v1/conversations/{conversation}/messages": Route(
        "Conversations",
        "sendMessage",
        "Send a message",
        "Durably accepted with 202, then admitted by the router; its outcome is waited for at most "
        f"{ADMISSION_WAIT_S:g} s. The same `request_id` with the same payload is the same request: it may be sent "
        "again at any time, runs once and gets the same answer. `mode`: `auto` joins a response that runs, or waits "
        "for its end; `interject` only joins one; `takeover` stops what runs, with proof, and then starts.",
        {
            202: Answer(
                "Accepted",
                MessageAccepted,
                {
                    "admitted": ex.json_of(ex.ACCEPTED),
                    "interjected": ex.json_of(ex.INTERJECTED),
                    "pending": ex.json_of(ex.PENDING),
                },
            )
        },
        (
            *no.EDGE,
            no.TOO_LARGE,
            no.BAD_ID,
            no.BAD_BODY,
            no.BAD_WORKSPACE,
            no.DELETED,
            no.CONFLICT,
            no.NOTHING_ACTIVE,
            no.BUSY,
            no.QUEUE_FULL,
            no.TOO_OFTEN,
            no.TOO_MUCH,
            no.SUPERSEDED,
            no.TAKEOVER_STALE,
            no.TAKEOVER_UNKNOWN,
            no.TAKEOVER_CANNOT,
            no.STOP_UNCONFIRMED,
            no.MESSAGE_LOST,
            no.UNDECIDED,
            no.NO_BUS,
        ),
        {"conversation": CONVERSATION},
        Body(
            MessageRequest,
            {
                "first": ex.MESSAGE,
                "claude": {
                    "request_id": "req-4",
                    "content": [{"type": "text", "text": "what is in this folder?"}],
                    "agent": {"kind": "claude", "permission_mode": "default"},
                    "workspace": "project-a",
                },
                "interject": {
                    "request_id": "req-2",
                    "content": [{"type": "text", "text": "and the roses"}],
                    "mode": "interject",
                },
                "after RESUME_FAILED": {
                    "request_id": "req-5",
                    "content": [{"type": "text", "text": "look after the garden"}],
                    "resume": "history",
                },
            },
        ),
    ),
    "GET /v1/conversations/{conversation}/events": Route(
        "Conversations",
        "followEvents",
        "Follow a conversation (SSE)",
        "Every event from a cursor on, then live. Each frame that moves the reader has its cursor as `id:`; after a "
        "break send the last one as `Last-Event-ID` (it wins) or `?cursor=`, and nothing is missed or comes twice.\n\n"
        "- A `retry:` line says how long an `EventSource` waits before it connects again.\n"
        "- `open` comes first: its id is where the reader stands.\n"
        "- Frames without a name are events; `replay` is true up to the stream's end as of the connect, then comes "
        "`live`.\n"
        "- `problem` (CURSOR_POSITION_CHANGED, RETENTION_GAP) says that the cursor does not lead on or that events are "
        "gone; the `snapshot` after it replaces what the reader knew. After CONVERSATION_DELETED comes `end`.\n"
        "- `end`: what `until` asked for has come. A reconnect after it gets 204, so an `EventSource` stops.\n"
        f"- Comments (`: hb`) come after {SSE_HEARTBEAT_S:g} s of silence. A reader that is too slow is cut with its "
        "cursor good.\n\n"
        "The data of each frame is JSON: `x-frames` names its schema.",
        {
            200: Answer(
                "The stream",
                examples={"until a response": ex.stream_text(ex.STREAM), "cursor changed": ex.stream_text(ex.CHANGED)},
                media=EVENT_STREAM_TYPE,
                schema={"type": "string"},
                frames=_FRAMES,
            ),
            204: Answer("The end that `until` asks for lies at or before the cursor"),
        },
        (
            *no.EDGE,
            *_STREAM,
        ),
        {
            "conversation": CONVERSATION,
            "cursor": CURSOR,
            "until": UNTIL,
            "ticket": TICKET,
            LAST_EVENT_ID_HEADER: Parameter(
                "The last id seen; a browser's EventSource sends it by itself.", ex.cursor(207), place="header"
            ),
        },
    ),
    "GET /v1/conversations/{conversation}/ws": Route(
        "Conversations",
        "followOverWebSocket",
        "Follow a conversation (WebSocket)",
        "The same frames as `events`, each one text message `{frame, id, data}`; `id` is the cursor after it, null "
        "where the frame does not move the reader. `message` is an event; `hb` comes in a silence.\n\n"
        "A client may ask here what it may ask over HTTP about this conversation, each as one text message "
        "`{ask, op, body}` (`x-asks`): `ask` is a token of its own, `op` one of `send`, `answer`, `interrupt`, `stop`, "
        "`control`, `body` the request's body, with `interaction` or `execution` where the path has it. It gets one "
        "frame `reply` with `{ask, status, body}`: what the HTTP request would have been answered. At most "
        f"{WS_ASKS_MAX} are under way (else a reply 429); a message has at most {WS_MESSAGE_BYTES_MAX} bytes. What has "
        "no `ask` that is a token closes the connection.\n\n"
        "A refusal is an HTTP answer to the handshake. Close codes: "
        + ", ".join(f"{int(code)} {code.name}" for code in WsClose)
        + ". Whatever the code, the cursor stays good. Where the end that `until` asks for lies before the cursor, "
        "`end` follows `open` at once.",
        {
            101: Answer(
                "Upgraded; each message is one frame",
                examples=ex.websocket_messages(),
                schema={
                    "type": "object",
                    "required": ["frame", "id", "data"],
                    "properties": {
                        "frame": {"enum": [*_FRAMES, FRAME_HEARTBEAT, FRAME_REPLY]},
                        "id": {"type": ["string", "null"]},
                        "data": {"type": "object"},
                    },
                },
                frames={**_FRAMES, FRAME_HEARTBEAT: None, FRAME_REPLY: WsReply},
                asks={
                    "send": MessageRequest,
                    "answer": WsAnswer,
                    "interrupt": WsControl,
                    "stop": WsControl,
                    "control": WsReceipt,
                },
            )
        },
        (
            *no.EDGE,
            *_STREAM,
            no.NOT_A_WEBSOCKET,
        ),
        {
            "conversation": CONVERSATION,
            "cursor": CURSOR,
            "until": UNTIL,
            "ticket": TICKET,
            LAST_EVENT_ID_HEADER: Parameter("The last id seen; wins over `cursor`.", ex.cursor(207), place="header"),
        },
        is_websocket=True,
    ),
    "POST /v1/conversations/{conversation}/tickets": Route(
        "Conversations",
        "makeTicket",
        "Get a ticket for a stream",
        f"A permit to open this conversation's `events` and `ws` as `?ticket=`, for {TICKET_LIFE_S:g} s, and nothing "
        "else. A stream that is open stays open after it; over `ws` its holder may ask about this conversation what "
        "the token may. Takes no body.",
        {
            201: Answer(
                "The ticket", StreamTicket, {"one": ex.json_of(ex.TICKET)}, headers={"Cache-Control": "no-store"}
            )
        },
        (*no.EDGE, no.BAD_ID),
        {"conversation": CONVERSATION},
    ),
    "POST /v1/conversations/{conversation}/interactions/{interaction}": Route(
        "Conversations",
        "answerInteraction",
        "Answer an approval or a question",
        "The collector decides: of two answers one wins, the other is told INTERACTION_SETTLED. Without `control_id` "
        "the control is derived from the answer, so the same answer again is the same control. " + _RECEIPT,
        {
            200: Answer("The receipt", ControlAnswer, {"delivered": ex.json_of(ex.DELIVERED)}),
            202: _NOT_CONFIRMED,
        },
        (
            *no.EDGE,
            no.TOO_LARGE,
            no.BAD_ID,
            no.BAD_CONTROL,
            no.BAD_DECISION,
            no.SEVERAL_ASK,
            no.NO_INTERACTION,
            no.NO_EXECUTION,
            no.NOT_ASKED,
            no.DELETED,
            no.STALE,
            no.SETTLED,
            no.LEASE_HELD,
            no.OVER,
            no.CONTROL_CONFLICT,
            no.RECOVERING,
            no.NO_BUS,
            no.NO_DATABASE,
        ),
        {
            "conversation": CONVERSATION,
            "interaction": Parameter("The interaction's id; a slash in it is sent as %2F.", ex.INTERACTION),
            IDEMPOTENCY_HEADER: IDEMPOTENCY,
        },
        Body(
            AnswerRequest,
            {
                "allow": {"decision": "allow"},
                "allow a changed input": {"decision": "allow", "input": {"what": "the roses"}},
                "deny": {"decision": "deny", "text": "not in the garden"},
                "answer a question": {"decision": "allow", "answers": {"q1": ["roses", "tulips"]}},
            },
        ),
    ),
}

EXECUTION_ROUTES: Final[Mapping[str, Route]] = {
    "GET /v1/executions": Route(
        "Executions",
        "listExecutions",
        "List executions",
        "The tenant's executions, the newest first.",
        {200: Answer("One page", ExecutionList, {"page": ex.json_of(ex.EXECUTIONS)})},
        (*no.EDGE, no.BAD_LIMIT, no.BAD_PAGE, no.NO_DATABASE),
        {
            "limit": LIMIT,
            "page": PAGE,
            "conversation": Parameter("Only those of this conversation.", ex.CONVERSATION),
            "state": Parameter("Only those in this state; `active`: every one that has not ended.", "active"),
        },
    ),
    "GET /v1/executions/{execution}": Route(
        "Executions",
        "getExecution",
        "Read an execution",
        "As the projection has it; with `target`, as the owner record has it, where it owns its conversation.",
        {
            200: Answer(
                "The execution",
                ExecutionView,
                {
                    "running": ex.json_of(ex.RUNNING.model_copy(update={"target": ex.TARGET})),
                    "ended": ex.json_of(ex.ENDED),
                },
            )
        },
        (*no.EDGE, no.BAD_EXECUTION, no.NO_EXECUTION, no.NO_BUS, no.NO_DATABASE),
        {"execution": EXECUTION},
    ),
    "GET /v1/executions/{execution}/items": Route(
        "Executions",
        "listItems",
        "Read an execution's items",
        "Texts, tools, interactions, gaps in their order. `after` of the answer asks for the next page.",
        {200: Answer("One page", ItemList, {"whole": ex.json_of(ex.ITEM_LIST)})},
        (*no.EDGE, no.BAD_EXECUTION, no.BAD_LIMIT, no.NO_EXECUTION, no.NO_DATABASE),
        {
            "execution": EXECUTION,
            "after": Parameter("Only items behind this position.", 2),
            "limit": Parameter("At most so many items.", 100),
        },
    ),
    "GET /v1/executions/{execution}/snapshot": Route(
        "Executions",
        "getSnapshot",
        "Read an execution's state",
        "The folded state at a watermark: from its collector while it lives, else folded from the log, else from the "
        "projection. Reading wakes no sandbox. `snapshot` is `docs/schemas/snapshot.json`.",
        {200: Answer("The state", ExecutionSnapshot, {"waiting": ex.json_of(ex.SNAPSHOT)})},
        (*no.EDGE, no.BAD_EXECUTION, no.NO_EXECUTION, no.NOT_LOGGED, no.NO_BUS, no.NO_DATABASE),
        {"execution": EXECUTION},
    ),
    "POST /v1/executions/{execution}/{verb}": Route(
        "Controls",
        "controlExecution",
        "Interrupt or stop an execution",
        "`interrupt` ends the turn, the process may go on; `stop` ends the process, with proof. " + _RECEIPT,
        {
            200: Answer("The receipt", ControlAnswer, {"settled": ex.json_of(ex.STOPPED)}),
            202: _NOT_CONFIRMED,
        },
        (no.BAD_EXECUTION, *_CONTROL),
        {
            "execution": EXECUTION,
            "verb": Parameter("What to do.", "stop"),
            IDEMPOTENCY_HEADER: IDEMPOTENCY,
        },
        Body(ControlBody, {"named": {"control_id": "ctl-7"}}, required=False, description="May be left out."),
    ),
    "GET /v1/controls/{control}": Route(
        "Controls",
        "getControl",
        "Read a control's receipt",
        "What became of a control: the collector's word where the execution lives, else the log's.",
        {
            200: Answer("The receipt", ControlAnswer, {"settled": ex.json_of(ex.STOPPED)}),
            202: _NOT_CONFIRMED,
        },
        (
            *no.EDGE,
            no.BAD_CONTROL_PATH,
            no.NO_CONTROL,
            no.NO_EXECUTION,
            no.STALE,
            no.NO_BUS,
            no.NO_DATABASE,
        ),
        {
            "control": Parameter("The control's id.", "ctl-7"),
            "execution": Parameter("Its execution: needed where the log does not have the control yet.", ex.EXECUTION),
        },
    ),
}

OPERATION_ROUTES: Final[Mapping[str, Route]] = {
    "GET /healthz": Route(
        "Operations",
        "getHealth",
        "Is the process alive?",
        "The event loop turns. Needs no token.",
        {200: Answer("It does", Health, {"alive": ex.json_of(ex.ALIVE)})},
        (),
        is_open=True,
    ),
    "GET /readyz": Route(
        "Operations",
        "getReadiness",
        "Is the service ready?",
        "Bus, database, and per tenant the log and the projection. Needs no token.",
        {
            200: Answer("Every check holds", Health, {"ready": ex.json_of(ex.READY)}),
            503: Answer("A check fails", Health, {"bus is away": ex.json_of(ex.NOT_READY)}),
        },
        (),
        is_open=True,
    ),
    "GET /metrics": Route(
        "Operations",
        "getMetrics",
        "Read metrics",
        "In Prometheus' text format.",
        {200: Answer("Metrics", examples={"one": ex.METRICS}, media="text/plain", schema={"type": "string"})},
        no.EDGE,
    ),
    "GET /openapi.json": Route(
        "Operations",
        "getOpenapi",
        "Read this document",
        "OpenAPI 3.1.",
        {200: Answer("The document", schema={"type": "object"}, examples={"head": {"openapi": "3.1.0"}})},
        no.EDGE,
    ),
}


PAGE_ROUTES: Final[Mapping[str, Route]] = {
    "GET /": Route(
        "Page",
        "getPage",
        "The web page",
        "It needs no token itself; it asks for one and sends it with its requests. `HEAD` is answered, too.",
        {
            200: Answer("The page", media="text/html", schema={"type": "string"}, headers=_PAGE_HEADERS),
            304: Answer("`If-None-Match` names this version"),
        },
        (no.FORBIDDEN_HOST, no.FAILED),
        is_open=True,
    ),
    "GET /static/{file}": Route(
        "Page",
        "getPageFile",
        "A file of the web page",
        "Scripts, style and icon; a name that is none of theirs needs a token to be told so. `HEAD` is answered, too.",
        {
            200: Answer("The file, in its own type", media="*/*", schema={"type": "string"}, headers=_PAGE_HEADERS),
            304: Answer("`If-None-Match` names this version"),
        },
        (no.UNAUTHENTICATED, no.FORBIDDEN_HOST, no.NO_FILE, no.BAD_PATH, no.FAILED),
        {"file": Parameter("The file's name.", "app.js", place="path")},
        is_open=True,
    ),
}


def routes() -> Mapping[str, Route]:
    """By method and path."""
    return {
        **CONVERSATION_ROUTES,
        **DELETION_ROUTES,
        **EXECUTION_ROUTES,
        **SANDBOX_ROUTES,
        **OPERATION_ROUTES,
        **WEBHOOK_ROUTES,
        **QUARANTINE_ROUTES,
        **PAGE_ROUTES,
    }


ABOUT: Final[Mapping[str, Any]] = {
    "info": {
        "summary": "Durable executions of CLI coding agents",
        "description": (
            "Send messages to coding agents, follow what they do as one unbroken stream, answer what they ask, stop "
            "them. A bearer token names the tenant.\n\n"
            "Every refusal is a problem document (RFC 9457, `application/problem+json`): `code` is stable, `retryable` "
            "says whether the same request may succeed later, `fields` names bad input with its remedy. An unknown "
            "path is 404 NOT_FOUND, a method that a path does not take 405 INVALID with `Allow`, a body of more than "
            f"{HTTP_BODY_BYTES_MAX} bytes 413 INVALID.\n\n"
            f"Ids are 1 to 64 of `A-Z a-z 0-9 _ -`. Times are unix milliseconds. Cursors are opaque."
        ),
        "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
    },
    "servers": [{"url": "/", "description": "The backend; `tether up` prints its address and token file"}],
    "tags": [
        {"name": "Conversations", "description": "Messages in, history and events out, answers to what waits"},
        {"name": "Executions", "description": "Runs of a CLI"},
        {"name": "Controls", "description": "Interrupt, stop, and what became of it"},
        {"name": "Sandboxes", "description": "Where executions run: drain, suspend and resume them"},
        {"name": "Page", "description": "The web page and its files"},
        {"name": "Operations", "description": "Probes, metrics, this document"},
    ],
    "security": {
        "type": "http",
        "scheme": "bearer",
        "description": "A token of TETHER_HTTP_TOKENS_FILE; `tether up` writes one and prints its file.",
    },
}
