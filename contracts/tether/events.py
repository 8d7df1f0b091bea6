"""Events: what happened in an execution (numbered) or in a conversation (`_`, identified).

An execution's event has an **ordinal**, from 1 without holes, given before any merging; a merged delta covers
`ordinal..last`. Its identity everywhere is `(conversation, execution, ordinal)`. A conversation-level event has no
ordinal: its identity is `(conversation, id)`, `id` = `{request}/{type}` or a control id; its order is the sequence.

`body` is a JSON object whose shape `BODIES[type]` gives. Readers keep unknown types and ignore them.
Times are unix milliseconds (`at`), of the clock of whoever recorded the input that made the event.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from tether.ids import Token
from tether.limits import NUMBER_MAX

Outcome = Literal["completed", "failed", "cancelled", "stopped", "drained", "lost", "never_started"]
GapReason = Literal[
    "spool_evicted", "retention_gap", "durability_gap", "corrupt", "position_changed", "quarantined", "limit"
]
InteractionOutcome = Literal["answered", "denied", "expired", "cancelled"]
ToolStatus = Literal["ok", "error", "interrupted"]
ReceiptStatus = Literal["accepted", "delivered", "settled", "rejected", "unknown"]
ModelRequestState = Literal["started", "retrying", "failed", "completed"]

Count = Annotated[int, Field(ge=-NUMBER_MAX, le=NUMBER_MAX)]  # what a column, and JSON's numbers, hold

EXECUTION_STARTED: Final = "execution.started"
EXECUTION_ENDED: Final = "execution.ended"
SESSION_BOUND: Final = "session.bound"
SESSION_RECOVERED: Final = "session.recovered"
TEXT_DELTA: Final = "text.delta"
TEXT_COMPLETED: Final = "text.completed"
TEXT_DISCARDED: Final = "text.discarded"
REASONING_DELTA: Final = "reasoning.delta"
REASONING_COMPLETED: Final = "reasoning.completed"
TOOL_STARTED: Final = "tool.started"
TOOL_PROGRESS: Final = "tool.progress"
TOOL_COMPLETED: Final = "tool.completed"
INTERACTION_REQUESTED: Final = "interaction.requested"
INTERACTION_RESOLVED: Final = "interaction.resolved"
CONTROL_RECEIPT: Final = "control.receipt"
MODEL_REQUEST: Final = "model.request"
USAGE: Final = "usage"
BACKGROUND: Final = "background"
TURN_COMPLETED: Final = "turn.completed"
RESPONSE_ENDED: Final = "response.ended"
GAP: Final = "gap"
RAW: Final = "raw"
PROMPT_ADMITTED: Final = "prompt.admitted"
RESPONSE_CREATED: Final = "response.created"
RESPONSE_FAILED: Final = "response.failed"
RESPONSE_SUPERSEDED: Final = "response.superseded"
RECOVERY: Final = "recovery"
CONVERSATION_DELETED: Final = "conversation.deleted"


def request_event_id(request: str, kind: str, attempt: int = 1) -> str:
    """The id of a conversation-level event about a request; from the second attempt on it names the attempt."""
    return f"{request}/{kind}" if attempt == 1 else f"{request}/{attempt}/{kind}"


# Deltas: adjacent ones of one segment may be merged in a frame.
DELTAS: Final = frozenset({TEXT_DELTA, REASONING_DELTA, TOOL_PROGRESS})


class Body(BaseModel):
    """Base of event bodies: unknown fields are kept out of the way, not refused (newer writers)."""

    model_config = ConfigDict(extra="ignore")


class Redactable(Body):
    """What may hold the agent's words. `redacted`: how many secrets were replaced in it by `[redacted:NAME]`; absent
    where none was."""

    redacted: int | None = None


class BlobRef(Body):
    """Content kept in `BLOBS_{tenant}`: `digest` sha-256 in hex, `bytes` its length, UTF-8 JSON or text."""

    digest: str
    bytes: int
    kind: Literal["artifact", "checkpoint"] = "artifact"


class ExecutionStarted(Body):
    """The claim: the process exists only after this is stored. `target` as in `ids.ExecutionTarget`. Again, with the
    next `process`, where the execution goes on in another process, as none of the one before was of use.
    `key_source`: where the agent's key comes from (names of variables and of a file, never a value)."""

    boot: str
    instance: str
    process: int
    target: dict[str, Any]
    agent: str
    request: str
    adapter_version: str
    resumed_from: str | None = None
    key_source: str | None = None


class SessionBound(Redactable):
    """The CLI's own session. `resumable` only after a first completed item of it (agents: init is no proof)."""

    native_session: str
    resumable: bool = False
    cli_version: str | None = None
    model: str | None = None
    cwd: str | None = None


class SessionRecovered(Redactable):
    """The CLI begins with a session of its own, and with the conversation's history in place of the one it lost.

    `from`: the session that is lost, where one was; the new one is told by `session.bound`. `process`: the generation
    of the process that gets the history. `why`: the CLI said that the session does not exist (`not_found`), who sent
    the prompt chose the history (`chosen`), or a drain or takeover cut the turn before its session could be resumed
    (`cut`). `source`: the CLI's own file (`native`) or the rows of the projection
    (`export`). `rows`: how many it got, the latest; `partial`: some are left out or cut.
    """

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    from_: str | None = Field(default=None, alias="from")
    process: int
    why: Literal["not_found", "chosen", "cut"]
    source: Literal["native", "export"]
    rows: int = 0
    partial: bool = False
    detail: str | None = None


class Delta(Redactable):
    """`offset`: length of the segment's text before this delta, in Unicode code points, so that a merged delta
    which overlaps what a reader has can be cut exactly."""

    segment: str
    text: str
    offset: int
    parent: str | None = None


class TextCompleted(Redactable):
    """The segment's whole text; only this is history. `partial`: cut off by an interrupt. With `blob`, `text` is a
    preview of the first bytes and `chars` the whole length in code points."""

    segment: str
    text: str
    partial: bool = False
    parent: str | None = None
    blob: BlobRef | None = None
    chars: int | None = None


class TextDiscarded(Body):
    """The deltas of the segment are void: the model's request was made anew."""

    segment: str
    reason: str = "model_request_retried"


class ToolStarted(Redactable):
    tool: str
    name: str
    input: Any = None
    parent: str | None = None
    blob: BlobRef | None = None


class ToolProgress(Redactable):
    tool: str
    text: str
    offset: int


class ToolCompleted(Redactable):
    """`output` is text or JSON as the CLI gave it, or a preview where `blob` is set."""

    tool: str
    status: ToolStatus
    output: Any = None
    blob: BlobRef | None = None
    detail: str | None = None


class Question(Body):
    id: str
    question: str
    header: str | None = None
    options: list[dict[str, Any]] = Field(default_factory=list)
    multiple: bool = False


class InteractionRequested(Redactable):
    """The CLI waits for a human. `approval`: may the tool run with `input`; `question`: `questions` want answers.

    `options` of an approval: what the agent offers (`id`, `label`, `kind`: allow_once, allow_always, reject_once,
    reject_always), where it offers more than allow and deny; an answer may name one as `answers.option`.

    `offered`: the answer that was given when the session, in an earlier process, asked the same, and of which it is not
    known that it was applied (`decision`, and where given `text`, `input`, `answers`, `control`). It is given again by
    nobody but who answers."""

    interaction: str
    kind: Literal["approval", "question"]
    name: str = ""
    input: Any = None
    tool: str | None = None
    description: str | None = None
    questions: list[Question] = Field(default_factory=list)
    options: list[dict[str, Any]] = Field(default_factory=list)
    offered: dict[str, Any] | None = None
    blob: BlobRef | None = None


class InteractionResolved(Redactable):
    interaction: str
    outcome: InteractionOutcome
    control: str | None = None
    detail: str | None = None


class ControlReceipt(Redactable):
    control: str
    verb: str
    status: ReceiptStatus
    reason: str | None = None
    detail: str | None = None
    interaction: str | None = None


class ModelRequest(Redactable):
    """The model's HTTP request, apart from Tether's own stream. `delay_ms`: wait before the next attempt."""

    state: ModelRequestState
    attempt: int | None = None
    attempts_max: int | None = None
    delay_ms: int | None = None
    http_status: int | None = None
    detail: str | None = None


class Usage(Body):
    """Per turn, not cumulative; `turn` makes it idempotent for billing. Tokens are counts, cost in USD."""

    turn: Annotated[str, Field(max_length=256)]
    input_tokens: Count = 0
    output_tokens: Count = 0
    cache_read_tokens: Count = 0
    cache_write_tokens: Count = 0
    cost_usd: Annotated[float, Field(allow_inf_nan=False)] | None = None
    model: Annotated[str, Field(max_length=256)] | None = None


class Background(Redactable):
    """Work of the CLI that outlives its turn."""

    id: str
    state: Literal["started", "completed"]
    description: str | None = None


class TurnCompleted(Redactable):
    turn: str
    outcome: Literal["completed", "failed", "interrupted"]
    reason: str | None = None
    detail: str | None = None
    duration_ms: int | None = None


class ErrorBody(Body):
    """`choices`: what the next prompt's `resume` may say after RESUME_FAILED."""

    code: str
    detail: str = ""
    choices: list[Literal["fresh", "history"]] | None = None


class ResponseEnded(Redactable):
    """Readers stop waiting. `error` where the outcome is not completed."""

    outcome: Outcome
    error: ErrorBody | None = None


class Proof(Body):
    """How it is known that nothing of the process is left."""

    method: Literal[
        "pid_namespace", "cgroup", "subreaper_sweep", "keeper_gone", "never_spawned", "provider", "not_needed"
    ]
    at: int
    detail: str | None = None


class ExecutionEnded(Redactable):
    """An execution's last event: the fence. `exit`: return code, or `-signal`. `tail: unknown` where the volume was
    out of reach. `checkpoint`: of a drained one, the id of what a resume goes on from; where that could not be made,
    `error` says CHECKPOINT_FAILED."""

    outcome: Outcome
    proof: Proof | None = None
    exit: int | None = None
    tail: Literal["complete", "unknown"] = "complete"
    error: ErrorBody | None = None
    checkpoint: str | None = None


class Gap(Redactable):
    """Events that are not to be had: ordinals `from..to` where known, else spool records."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    from_: int | None = Field(default=None, alias="from")
    to: int | None = None
    reason: GapReason
    detail: str | None = None


class Raw(Redactable):
    """A line that no rule maps, bounded: `preview` of it and its length in bytes."""

    stream: Literal["stdout", "stderr"]
    preview: str
    bytes: int
    why: str
    blob: BlobRef | None = None


class PromptAdmitted(Body):
    """A user's message. `into`, `into_execution`: the running response and execution that an interjection joined."""

    request: str
    prompt_sequence: int
    content: list[dict[str, Any]]
    into: str | None = None
    into_execution: str | None = None
    author: str | None = None


class ResponseCreated(Body):
    request: Token
    response: Token
    response_generation: Count
    execution: Token
    execution_generation: Count
    agent: Annotated[str, Field(max_length=64)]


class ResponseFailed(Body):
    """The request came to nothing before or instead of an execution. `code`: a wire code; `choices` as in ErrorBody."""

    request: Token
    response: Token | None = None
    code: str
    detail: str = ""
    retryable: bool = False
    choices: list[Literal["fresh", "history"]] | None = None


class ResponseSuperseded(Body):
    request: Token
    response: Token
    by: Annotated[str, Field(max_length=64)]


class Recovery(Body):
    """`stream`: Tether's stream was resumed; `model_request`: what happened to the model's request; apart.
    `first..last` of `execution`: the ordinals that were missing and are there again."""

    stream: str | None = None
    model_request: str | None = None
    execution: str | None = None
    first: int | None = None
    last: int | None = None
    salvaged: dict[str, Any] | None = None


class ConversationDeleted(Body):
    """Everything of the conversation before this is erased. `deletion`: the operation, which a record in
    `tether_deletions` must name: a reader believes no other. What is stored before `until` (unix ms) is nobody's: late
    messages of what was deleted. NUMBER_MAX until the id is free again, which is told by another one."""

    deletion: Token
    until: Count


BODIES: Final[dict[str, type[Body]]] = {
    EXECUTION_STARTED: ExecutionStarted,
    EXECUTION_ENDED: ExecutionEnded,
    SESSION_BOUND: SessionBound,
    SESSION_RECOVERED: SessionRecovered,
    TEXT_DELTA: Delta,
    TEXT_COMPLETED: TextCompleted,
    TEXT_DISCARDED: TextDiscarded,
    REASONING_DELTA: Delta,
    REASONING_COMPLETED: TextCompleted,
    TOOL_STARTED: ToolStarted,
    TOOL_PROGRESS: ToolProgress,
    TOOL_COMPLETED: ToolCompleted,
    INTERACTION_REQUESTED: InteractionRequested,
    INTERACTION_RESOLVED: InteractionResolved,
    CONTROL_RECEIPT: ControlReceipt,
    MODEL_REQUEST: ModelRequest,
    USAGE: Usage,
    BACKGROUND: Background,
    TURN_COMPLETED: TurnCompleted,
    RESPONSE_ENDED: ResponseEnded,
    GAP: Gap,
    RAW: Raw,
    PROMPT_ADMITTED: PromptAdmitted,
    RESPONSE_CREATED: ResponseCreated,
    RESPONSE_FAILED: ResponseFailed,
    RESPONSE_SUPERSEDED: ResponseSuperseded,
    RECOVERY: Recovery,
    CONVERSATION_DELETED: ConversationDeleted,
}

_new, _set = object.__new__, object.__setattr__  # past pydantic's own

CONVERSATION_TYPES: Final = frozenset(
    {
        PROMPT_ADMITTED,
        RESPONSE_CREATED,
        RESPONSE_FAILED,
        RESPONSE_SUPERSEDED,
        CONTROL_RECEIPT,
        RECOVERY,
        CONVERSATION_DELETED,
    }
)


class Event(BaseModel):
    """One event of an execution. `last` is set on merged deltas only: it covers ordinals `ordinal..last`."""

    model_config = ConfigDict(extra="ignore")

    ordinal: Annotated[int, Field(ge=1)]
    last: int | None = None
    at: int
    type: str
    body: dict[str, Any]

    @property
    def end(self) -> int:
        """The last ordinal that this event covers."""
        return self.ordinal if self.last is None else self.last

    @classmethod
    def made(cls, ordinal: int, at: int, type_: str, body: dict[str, Any], last: int | None = None) -> Event:
        """An event whose fields are of their types for certain, as the one who writes it knows: not validated (0.5 µs
        where validation takes 1.2 and pydantic's own `model_construct` 1.7), and `body` is not copied."""
        event = _new(cls)
        _set(event, "__dict__", {"ordinal": ordinal, "last": last, "at": at, "type": type_, "body": body})
        _set(event, "__pydantic_fields_set__", {"ordinal", "last", "at", "type", "body"})
        _set(event, "__pydantic_extra__", None)
        _set(event, "__pydantic_private__", None)
        return event


class ConversationEvent(BaseModel):
    """One conversation-level event: a message of its own on the execution token `_`.

    `id` is its identity in the conversation; `generation` the owner generation that its writer saw.
    """

    model_config = ConfigDict(extra="ignore")

    v: Literal[1] = 1
    id: str
    generation: int
    at: int
    type: str
    body: dict[str, Any]


def body_of(event: Event | ConversationEvent) -> Body | None:
    """The typed body, or None for an unknown type. Raises pydantic's ValidationError for a body that lies."""
    model = BODIES.get(event.type)
    return None if model is None else model.model_validate(event.body)
