"""What a fold makes: the state of one execution, and its items. See `tether.fold`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Phase = Literal["starting", "running", "waiting", "exiting", "ended"]


class State(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Item(State):
    """An item is a value: one that changes is replaced, so states share the items that they have in common."""

    model_config = ConfigDict(frozen=True)


class _Told(_Item):
    """What the agent said. `redacted`: how many secrets were replaced in it by a mark."""

    redacted: int = 0


class TextItem(_Told):
    """`state`: streaming (provisional) | completed | partial (cut off) | discarded (void: its text is gone)."""

    kind: Literal["text", "reasoning"] = "text"
    id: str
    state: Literal["streaming", "completed", "partial", "discarded"] = "streaming"
    text: str = ""
    parent: str | None = None
    blob: dict[str, Any] | None = None


class ToolItem(_Told):
    """`state`: running | ok | error | interrupted | unknown (the process ended and nobody can tell)."""

    kind: Literal["tool"] = "tool"
    id: str
    state: Literal["running", "ok", "error", "interrupted", "unknown"] = "running"
    name: str = ""
    input: Any = None
    progress: str = ""
    output: Any = None
    parent: str | None = None
    detail: str | None = None
    blob: dict[str, Any] | None = None


class InteractionItem(_Told):
    """A question to a human. `asks`: approval | question. `offered`: as `events.InteractionRequested` has it."""

    kind: Literal["interaction"] = "interaction"
    id: str
    state: Literal["pending", "answered", "denied", "expired", "cancelled"] = "pending"
    asks: Literal["approval", "question"] = "approval"
    name: str = ""
    input: Any = None
    tool: str | None = None
    description: str | None = None
    questions: list[dict[str, Any]] = Field(default_factory=list)
    options: list[dict[str, Any]] = Field(default_factory=list)
    offered: dict[str, Any] | None = None
    control: str | None = None


class SessionItem(_Item):
    """From here on the agent is in a session of its own, with the conversation's history in place of the one that is
    lost (`from_session`): see `events.SessionRecovered`. `id`: the ordinal of its event."""

    kind: Literal["session"] = "session"
    id: str
    process: int
    why: Literal["not_found", "chosen", "cut"]
    source: Literal["native", "export"]
    rows: int = 0
    partial: bool = False
    from_session: str | None = None
    detail: str | None = None


class RawItem(_Told):
    kind: Literal["raw"] = "raw"
    id: str
    stream: str
    preview: str
    bytes: int
    why: str


class GapItem(_Item):
    """What is missing here, told once. `from_ordinal..to_ordinal` inclusive where known."""

    kind: Literal["gap"] = "gap"
    id: str
    reason: str
    from_ordinal: int | None = None
    to_ordinal: int | None = None
    detail: str | None = None


Item = Annotated[TextItem | ToolItem | InteractionItem | SessionItem | RawItem | GapItem, Field(discriminator="kind")]


class UsageTotal(State):
    """Sum over turns, each counted once."""

    turns: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    cost_usd: float | None = None


class ExecutionState(State):
    """Everything that the events up to `applied` say of one execution. Times are unix milliseconds."""

    applied: int = 0
    phase: Phase = "starting"
    outcome: str | None = None
    response_outcome: str | None = None
    error: dict[str, Any] | None = None
    agent: str | None = None
    request: str | None = None
    target: dict[str, Any] | None = None
    native_session: str | None = None
    resumable: bool = False
    model: str | None = None
    cli_version: str | None = None
    started_at: int | None = None
    response_ended_at: int | None = None
    ended_at: int | None = None
    proof: dict[str, Any] | None = None
    exit: int | None = None
    tail: str = "complete"
    items: list[Item] = Field(default_factory=list)
    usage: UsageTotal = UsageTotal()
    usage_by_turn: dict[str, dict[str, Any]] = Field(default_factory=dict)
    turns_completed: int = 0
    model_request: dict[str, Any] | None = None
    background: list[str] = Field(default_factory=list)
    receipts: dict[str, dict[str, Any]] = Field(default_factory=dict)
    raw_omitted: int = 0
    partial: bool = False

    @property
    def text(self) -> str:
        """The completed text of the agent itself (not of its subagents), in order."""
        return "\n\n".join(
            item.text
            for item in self.items
            if isinstance(item, TextItem)
            and item.kind == "text"
            and item.parent is None
            and item.state in ("completed", "partial")
        )

    def pending(self) -> list[InteractionItem]:
        return [item for item in self.items if isinstance(item, InteractionItem) and item.state == "pending"]
