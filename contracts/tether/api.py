"""The HTTP API as types: what the backend answers and the SDK reads. Errors are `tether.errors.Problem` documents.

Every path is below `/v1`; a bearer token names the tenant. Ids follow `ids.TOKEN_PATTERN`. Times are unix milliseconds.
A `cursor` is opaque and bound to tenant and conversation: `GET /v1/conversations/{c}/events?cursor=…` goes on after it.

The event stream (SSE) has these frames, each with `id:` = the cursor after it where it moves the cursor:

    event: open       data: StreamOpen      first, before any event; its id is where the reader stands
    (no name)         data: StreamEvent     one event; `replay` is true until the stream's end as of the connect
    event: live       data: StreamLive      the replay is over: what follows is new
    event: problem    data: Problem         CURSOR_POSITION_CHANGED or RETENTION_GAP; a `snapshot` follows
    event: snapshot   data: StreamSnapshot  replaces what the reader knew, by identity: shown text stays. One follows a
                                            live `recovery` event, too: it has what had been given up
    event: end        data: StreamEnd       what `until` asked for has come; a reconnect after it gets 204
    : hb                                    a heartbeat

A response that was cut is continued by `Last-Event-ID` or `?cursor=` with the last id seen.

`GET /v1/conversations/{c}/ws?cursor=…` gives the same frames over a WebSocket, each as one text message
`{"frame": name, "id": cursor or null, "data": {…}}`: `message` is an event, `hb` a heartbeat. A refusal is an HTTP
answer to the handshake, as to any request. It is closed with a code of `WsClose`. What a client sends there is a
`WsAsk`, a request about this conversation; each gets one frame `reply`, anywhere among the others, with what the HTTP
request would have been answered.

Where no header can be sent (a browser's EventSource and WebSocket), `?ticket=` of `StreamTicket` opens either of them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from tether.errors import Problem
from tether.events import Outcome, ReceiptStatus
from tether.ids import ExecutionTarget, Token
from tether.limits import KIB
from tether.prompt import AgentSpec, Continuation, Mode, ResumeChoice, TextContent

PROBLEM_TYPE: Final = "application/problem+json"
EVENT_STREAM_TYPE: Final = "text/event-stream"
IDEMPOTENCY_HEADER: Final = "Idempotency-Key"  # names the control id of interrupt, stop and answer
LAST_EVENT_ID_HEADER: Final = "Last-Event-ID"

FRAME_OPEN: Final = "open"
FRAME_EVENT: Final = "message"  # SSE's default name: the `event:` line is left out
FRAME_LIVE: Final = "live"
FRAME_PROBLEM: Final = "problem"
FRAME_SNAPSHOT: Final = "snapshot"
FRAME_END: Final = "end"
FRAME_HEARTBEAT: Final = "hb"  # of a WebSocket; of an event stream a comment
FRAME_REPLY: Final = "reply"  # of a WebSocket: WsReply, to one WsAsk


class WsClose(IntEnum):
    """Why the service closes a conversation's WebSocket. Whatever the code, the cursor stays good."""

    END = 1000  # what `until` asked for has come (the frame `end` says so): do not connect again
    STOPPED = 1001  # the service stops: connect again, to it or to another
    NOT_AN_ASK = 1003  # the client sent what has no `ask` to reply to
    NO_MESSAGES = 1003  # the former name
    TOO_LARGE = 1009  # the client sent a message beyond WS_MESSAGE_BYTES_MAX
    SLOW = 4408  # more waits than SSE_BUFFER_BYTES_MAX, or nothing was taken for long: connect again from the cursor


PAGE_DEFAULT: Final = 50  # entries of a list
PAGE_MAX: Final = 200
ITEMS_PAGE_MAX: Final = 1000  # items of one answer, over all its executions
INTERACTION_CHARS_MAX: Final = 256  # of an interaction's id, which is the agent's own


class _In(BaseModel):
    """A request's body: unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _Out(BaseModel):
    """An answer: readers ignore fields that they do not know."""

    model_config = ConfigDict(extra="ignore", frozen=True)


# --- messages ---


class MessageRequest(_In):
    """`POST /v1/conversations/{c}/messages`. The same `request_id` with the same payload is the same request: it may
    be sent again at any time and gets the same answer. `workspace` defaults to one of the conversation's own.

    `resume`: after RESUME_FAILED, what becomes of the agent's session: `fresh` forgets it, `history` makes a new one
    from the conversation's history. `continuation`: `continue` lets a turn that a drain cuts go on by itself after the
    resume; without it the next message decides."""

    request_id: Token
    content: Annotated[tuple[TextContent, ...], Field(min_length=1, max_length=64)]
    agent: AgentSpec = AgentSpec()
    workspace: Token | None = None
    mode: Mode = "auto"
    resume: ResumeChoice | None = None
    continuation: Continuation | None = None


class MessageAccepted(_Out):
    """202. `pending`: durably accepted, its outcome was not known within the wait; ask again with the same request.

    `response_id`: of an interjection the running response. `cursor`: the events of this request come after it.
    """

    request_id: str
    status: Literal["admitted", "interjected", "pending"]
    response_id: str | None = None
    execution_id: str | None = None
    attempt: int = 1
    cursor: str


# --- the conversation as the projection has it ---


class MessageView(_Out):
    """A user's message. `into`: the running response that it joined. `place` orders messages and responses."""

    request: str
    place: int
    at: int
    content: list[dict[str, Any]]
    into: str | None = None
    response: str | None = None
    author: str | None = None


class ResponseView(_Out):
    """The answer to one admitted prompt. `outcome` is None while it is under way."""

    response: str
    request: str
    place: int
    generation: int
    execution: str
    agent: str
    at: int
    outcome: Outcome | Literal["superseded"] | None = None
    error: dict[str, Any] | None = None
    ended_at: int | None = None
    superseded_by: str | None = None


class FailureView(_Out):
    """A request that came to nothing before or instead of an execution."""

    request: str
    place: int
    at: int
    code: str
    detail: str
    retryable: bool = False
    response: str | None = None


class ItemView(_Out):
    """One piece of an execution's output: `state` is the folded item (see `tether.fold`), `position` its order."""

    execution: str
    item: str
    position: int
    kind: str
    state: dict[str, Any]


class InteractionView(_Out):
    """Something that waits, or waited, for a human: `tether.fold.InteractionItem` with its execution. `offered`: an
    answer to the same question in an earlier process, of which it is not known that it was applied (`decision`, `text`,
    `input`, `answers`, `control`): give it again by answering with it."""

    execution: str
    interaction: str
    asks: Literal["approval", "question"]
    state: Literal["pending", "answered", "denied", "expired", "cancelled"]
    name: str = ""
    tool: str | None = None
    input: Any = None
    description: str | None = None
    questions: list[dict[str, Any]] = Field(default_factory=list)
    options: list[dict[str, Any]] = Field(default_factory=list)
    offered: dict[str, Any] | None = None
    control: str | None = None


class GapView(_Out):
    """Events `first..last` that are not to be had (None: unknown), told once."""

    execution: str
    first: int | None = None
    last: int | None = None
    reason: str
    detail: str | None = None


class RecoveryView(_Out):
    """What had been given up and is there again. `stream` is Tether's own stream (`resumed`); `model_request` is what
    became of the model's request, which is another thing: started, retrying, failed, completed or unknown.
    `first..last`: the ordinals of `execution`. `salvaged`: what a lost sandbox's volume still had."""

    place: int
    at: int
    stream: str | None = None
    model_request: str | None = None
    execution: str | None = None
    first: int | None = None
    last: int | None = None
    salvaged: dict[str, Any] | None = None


class UsageView(_Out):
    execution: str
    turn: str
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    cost_usd: float | None = None
    model: str | None = None


class ExecutionView(_Out):
    """One run of a CLI. `applied`: the last ordinal that these rows contain, for dropping the overlap by identity.

    `owner`: this execution owns its conversation now (as the owner record says), with `target` as it stands.
    """

    execution: str
    conversation: str
    workspace: str
    response: str | None = None
    generation: int = 0
    state: str
    applied: int = 0
    agent: str | None = None
    native_session: str | None = None
    model: str | None = None
    started_at: int | None = None
    ended_at: int | None = None
    outcome: Outcome | None = None
    proof: dict[str, Any] | None = None
    exit: int | None = None
    error: dict[str, Any] | None = None
    items: int = 0
    pending_interactions: int = 0
    partial: bool = False
    target: ExecutionTarget | None = None


class ConversationView(_Out):
    conversation: str
    workspace: str
    created_at: int
    updated_at: int
    messages: int = 0
    active_execution: str | None = None
    pending_interactions: int = 0


class ConversationList(_Out):
    conversations: list[ConversationView]
    next_page: str | None = None


class ConversationHistory(_Out):
    """`GET /v1/conversations/{c}`: one page, the newest first to be asked, each list in order within it.

    `cursor` was taken before the rows were read: follow the events from it and drop what `executions[].applied` and
    the requests here already contain. `before` asks for the page before this one. `items_omitted`: items of these
    executions that did not fit; `GET /v1/executions/{e}/items?after=` has them.
    """

    conversation: str
    workspace: str
    cursor: str
    messages: list[MessageView]
    responses: list[ResponseView]
    failures: list[FailureView]
    executions: list[ExecutionView]
    items: list[ItemView]
    interactions: list[InteractionView]
    gaps: list[GapView]
    usage: list[UsageView]
    recoveries: list[RecoveryView] = Field(default_factory=list)
    items_omitted: int = 0
    before: int | None = None


class ItemList(_Out):
    """`GET /v1/executions/{e}/items?after=&limit=`, in order of position. `after` asks for the next page."""

    execution: str
    applied: int
    items: list[ItemView]
    after: int | None = None


class ExecutionList(_Out):
    executions: list[ExecutionView]
    next_page: str | None = None


class ExecutionSnapshot(_Out):
    """`GET /v1/executions/{e}/snapshot`. `source`: `collector` (live), `log` (folded) or `projection` (the log is no
    longer whole). `snapshot` is `tether.snapshot.Snapshot` as JSON; `cursor` continues after its watermark."""

    execution: str
    source: Literal["collector", "log", "projection"]
    snapshot: dict[str, Any]
    cursor: str


# --- controls ---


class AnswerRequest(_In):
    """`POST /v1/conversations/{c}/interactions/{id}`. `execution` is needed only where two executions of the
    conversation have an interaction of this id. `control_id` (or the header `Idempotency-Key`) makes it repeatable;
    without either it is derived from the answer, so that sending the same answer again is the same control."""

    decision: Literal["allow", "deny"]
    text: Annotated[str, Field(max_length=64 * KIB)] | None = None
    input: dict[str, Any] | None = None
    answers: Annotated[dict[str, tuple[str, ...]], Field(max_length=64)] = Field(default_factory=dict)
    execution: Token | None = None
    control_id: Token | None = None


class ControlBody(_In):
    """`POST /v1/executions/{e}/interrupt` and `/stop`; the body may be left out."""

    control_id: Token | None = None


class ControlAnswer(_Out):
    """A receipt as it stands: 200, or 202 where `status` is `unknown` (no reply in time, nothing was sent again; ask
    `GET /v1/controls/{control_id}?execution=`). `target` is the current one where the asked one was stale."""

    control_id: str
    execution: str
    verb: str
    status: ReceiptStatus
    problem: Problem | None = None
    target: ExecutionTarget | None = None


# --- the event stream ---


class StreamOpen(_Out):
    """`heartbeat_s`: the longest silence of a connection that lives."""

    conversation: str
    cursor: str
    heartbeat_s: float | None = None


class StreamEvent(_Out):
    """One event. Of an execution: `execution` and `ordinal` (`last` where a merged delta covers more). Of the
    conversation: `id` and `generation`. Identity is (execution, ordinal) or id. `at` in unix milliseconds."""

    execution: str | None = None
    ordinal: int | None = None
    last: int | None = None
    id: str | None = None
    generation: int | None = None
    at: int
    type: str
    body: dict[str, Any]
    replay: bool = False


class StreamLive(_Out):
    cursor: str


class StreamSnapshot(_Out):
    """The conversation's state (its newest page); the events go on after `history.cursor`."""

    history: ConversationHistory


class StreamEnd(_Out):
    """`until` as asked for, empty where nothing was; `response` with its outcome where a response ended. Outcome
    `deleted`: the conversation was deleted, whatever was asked for; the problem before it says so."""

    until: str
    cursor: str
    response: str | None = None
    outcome: str | None = None


class WsAnswer(AnswerRequest):
    """`body` of the ask `answer`: `POST /v1/conversations/{c}/interactions/{interaction}`."""

    interaction: Annotated[str, Field(min_length=1, max_length=INTERACTION_CHARS_MAX)]


class WsControl(ControlBody):
    """`body` of the asks `interrupt` and `stop`: `POST /v1/executions/{execution}/{op}`."""

    execution: Token


class WsReceipt(_In):
    """`body` of the ask `control`: `GET /v1/controls/{control_id}?execution=`."""

    control_id: Token
    execution: Token


class WsAsk(_In):
    """What a client sends over a conversation's WebSocket: the HTTP request of the same meaning, as one text message.

    `ask` is the client's own, for its reply. `body`: of `send` a MessageRequest, of `answer` a WsAnswer, of `interrupt`
    and `stop` a WsControl, of `control` a WsReceipt. An execution of another conversation is as one that is not there.
    """

    ask: Token
    op: Literal["send", "answer", "interrupt", "stop", "control"]
    body: dict[str, Any]


class WsReply(_Out):
    """The data of a frame `reply`: status and body as the HTTP request would have been answered, or a problem document.
    A connection that breaks before it leaves the ask in doubt: ask again, here or over HTTP, under the same
    `request_id` or `control_id`."""

    ask: str
    status: int
    body: dict[str, Any]


class StreamTicket(_Out):
    """201 of `POST /v1/conversations/{c}/tickets`. `ticket` opens this conversation's `events` and `ws` as whom the
    token named, until `expires_at` (unix milliseconds), and nothing else. An open stream stays open after it, and over
    `ws` whoever holds the ticket may ask what its token may, about this conversation."""

    ticket: str
    expires_at: int


# --- webhooks ---


class WebhookEndpoint(_Out):
    """An address that is notified. `host` is all that is shown of it."""

    name: str
    host: str
    kinds: list[str]


class WebhookList(_Out):
    endpoints: list[WebhookEndpoint]


class WebhookDelivery(_Out):
    """One notification to one endpoint: `pending` until `due_at`, `delivered`, or `dead` after the last attempt.

    `status` and `error` are the last attempt's. Times in unix milliseconds."""

    id: str
    endpoint: str
    kind: str
    conversation: str
    execution: str | None = None
    state: Literal["pending", "delivered", "dead"]
    attempts: int = 0
    created_at: int = 0
    due_at: int = 0
    settled_at: int | None = None
    status: int | None = None
    error: str | None = None


class WebhookDeliveryList(_Out):
    """`omitted`: how many more there are."""

    deliveries: list[WebhookDelivery]
    omitted: int = 0


# --- health ---


class Health(_Out):
    """`/healthz` (the loop turns) and `/readyz` (each check by name; 503 while one fails)."""

    status: Literal["ok", "unavailable"]
    checks: dict[str, bool] = Field(default_factory=dict)
