"""The fold: events → state, one builder used by collector, projection, SDK and console.

The law that the product rests on, for every watermark w, with duplicates, re-deliveries and re-cut frames thrown in:

    fold(snapshot at w, events after w) = fold(all events)

`ExecutionFold.apply` takes an execution's events in order of ordinal and answers Applied, Duplicate or Hole; after a
Hole the reader fetches what is missing, or calls `skip_to` and the gap is part of the state, once. The builder is
mutable and O(1) amortised per event (growing text is a list of pieces); `freeze()` makes the state, which shares with
the builder every item that grows no more.
The fold of the conversation-level events is `tether.conversation_fold`.
The common types are read without validating a whole body; a body that is not just what it should be is validated.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tether import events as ev
from tether.events import Event
from tether.growing import GrowingText

RAW_ITEMS_MAX: Final = 200  # raw lines kept in a state; further ones are counted
Phase = Literal["starting", "running", "waiting", "exiting", "ended"]


class State(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Item(State):
    """An item is a value: one that changes is replaced, so states share the items that they have in common."""

    model_config = ConfigDict(frozen=True)


class TextItem(_Item):
    """`state`: streaming (provisional) | completed | partial (cut off) | discarded (void: its text is gone)."""

    kind: Literal["text", "reasoning"] = "text"
    id: str
    state: Literal["streaming", "completed", "partial", "discarded"] = "streaming"
    text: str = ""
    parent: str | None = None
    blob: dict[str, Any] | None = None


class ToolItem(_Item):
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


class InteractionItem(_Item):
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


class RawItem(_Item):
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


class Applied(Enum):
    """What `apply` did. A hole changes nothing: fetch `fold.applied + 1` onwards, or `skip_to`."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    HOLE = "hole"


class ExecutionFold:
    """Builder of one `ExecutionState`. Start empty, or from a snapshot's state."""

    def __init__(self, state: ExecutionState | None = None) -> None:
        base = ExecutionState() if state is None else state
        self._items: dict[str, Any] = {_key(item): item for item in base.items}
        self._state = base.model_copy(update={"items": []}).model_copy(deep=True)
        self._growing: dict[str, GrowingText] = {}  # of streaming segments and of tools that tell their progress
        self._raw_count = sum(isinstance(item, RawItem) for item in self._items.values())

    @property
    def applied(self) -> int:
        """The last ordinal that is in the state."""
        return self._state.applied

    @property
    def phase(self) -> Phase:
        return self._state.phase

    @property
    def response_ended(self) -> bool:
        return self._state.response_outcome is not None

    @property
    def ended(self) -> bool:
        return self._state.outcome is not None

    def apply(self, event: Event) -> Applied:
        """Apply the next event. Unknown types count as applied and change nothing else."""
        if event.end <= self._state.applied:
            return Applied.DUPLICATE
        if event.ordinal > self._state.applied + 1:
            return Applied.HOLE
        handler = self._HANDLERS.get(event.type)
        if handler is not None:
            try:
                handler(self, event)
            except (ValidationError, KeyError, TypeError):
                # A writer that lies about a body must not stop its readers; what it said is told as missing.
                self._gap(str(event.ordinal), "corrupt", event.ordinal, event.end, f"{event.type} has a bad body")
        self._state.applied = event.end
        return Applied.APPLIED

    def skip_to(self, ordinal: int, reason: ev.GapReason) -> None:
        """Give up the ordinals before `ordinal`: the state says so, is partial, and goes on from there."""
        first = self._state.applied + 1
        if ordinal <= first:
            return
        self._gap(f"skip-{first}", reason, first, ordinal - 1, None)
        self._state.applied = ordinal - 1

    def doubt(self, first: int, last: int, reason: ev.GapReason, detail: str) -> None:
        """What was applied for these ordinals may say less than the log: the state tells so, and is partial."""
        self._gap(f"doubt-{first}", reason, first, last, detail)

    def freeze(self) -> ExecutionState:
        """The state as of `applied`; the builder can go on."""
        frozen = self.head()
        items = dict(self._items)
        for key, text in self._growing.items():
            items[key] = _with_text(items[key], text)
        frozen.items = list(items.values())
        return frozen

    def head(self) -> ExecutionState:
        """The state without its items: for whoever keeps items one by one."""
        return self._state.model_copy(deep=True)

    def keys(self) -> list[str]:
        """The keys `kind/id` of all items, in order."""
        return list(self._items)

    def has(self, key: str) -> bool:
        """Whether there is an item with this key `kind/id`."""
        return key in self._items

    def item(self, key: str) -> Item | None:
        """One item as of `applied`, by its key `kind/id`."""
        item: Item | None = self._items.get(key)
        text = self._growing.get(key)
        return item if item is None or text is None else _with_text(item, text)

    # --- items ---

    def _replace(self, key: str, **changes: Any) -> None:
        self._items[key] = self._items[key].model_copy(update=changes)

    def _delta(self, event: Event) -> None:
        body = event.body
        kind: Literal["text", "reasoning"] = "text" if event.type == ev.TEXT_DELTA else "reasoning"
        key = f"{kind}/{body['segment']}"
        item = self._items.get(key)
        if item is None:
            item = TextItem(kind=kind, id=body["segment"], parent=body.get("parent"))
        if item.state == "streaming":
            self._grow(key, item, item.text, body)

    def _grow(self, key: str, item: TextItem | ToolItem, so_far: str, body: dict[str, Any]) -> None:
        growing = self._growing.get(key)
        if growing is None:
            growing = GrowingText(so_far)
        growing.add(body)
        self._growing[key] = growing
        self._items.setdefault(key, item)

    def _completed(self, event: Event) -> None:
        body = event.body
        kind: Literal["text", "reasoning"] = "text" if event.type == ev.TEXT_COMPLETED else "reasoning"
        if len(body) == 2 and type(segment := body.get("segment")) is str and type(text := body.get("text")) is str:
            self._complete(kind, segment, None, {"state": "completed", "text": text})
            return
        typed = ev.TextCompleted.model_validate(body)
        changes: dict[str, Any] = {"state": "partial" if typed.partial else "completed"}
        # A preview never replaces the whole text that the deltas (or an earlier completion) gave already.
        whole = self._length(f"{kind}/{typed.segment}")
        if typed.blob is None or typed.chars is None or whole != typed.chars:
            changes["text"] = typed.text
            changes["blob"] = None if typed.blob is None else typed.blob.model_dump()
        self._complete(kind, typed.segment, typed.parent, changes)

    def _complete(
        self, kind: Literal["text", "reasoning"], segment: str, parent: str | None, changes: dict[str, Any]
    ) -> None:
        key = f"{kind}/{segment}"
        growing = self._growing.pop(key, None)
        item = self._items.get(key)
        if item is not None:
            parent = item.parent
            if "text" not in changes:
                changes["text"] = item.text if growing is None else growing.value()
                changes["blob"] = item.blob
        self._items[key] = TextItem(kind=kind, id=segment, parent=parent, **changes)

    def _length(self, key: str) -> int:
        """Of the text that an item has, in code points."""
        growing, item = self._growing.get(key), self._items.get(key)
        return growing.length if growing is not None else 0 if item is None else len(item.text)

    def _discarded(self, event: Event) -> None:
        for kind in ("text", "reasoning"):
            key = f"{kind}/{event.body['segment']}"
            item = self._items.get(key)
            if item is not None and item.state == "streaming":
                self._growing.pop(key, None)
                self._replace(key, state="discarded", text="")

    def _tool(self, tool: str, **changes: Any) -> None:
        key = f"tool/{tool}"
        if key in self._items:
            self._replace(key, **changes)
        else:
            self._items[key] = ToolItem(id=tool, **changes)

    def _tool_started(self, event: Event) -> None:
        body = ev.ToolStarted.model_validate(event.body)
        self._tool(body.tool, name=body.name, input=body.input, parent=body.parent)

    def _tool_progress(self, event: Event) -> None:
        key = f"tool/{event.body['tool']}"
        item = self._items.get(key) or ToolItem(id=event.body["tool"])
        self._grow(key, item, item.progress, event.body)

    def _tool_completed(self, event: Event) -> None:
        body = ev.ToolCompleted.model_validate(event.body)
        blob = None if body.blob is None else body.blob.model_dump()
        growing = self._growing.pop(f"tool/{body.tool}", None)
        progress = {} if growing is None else {"progress": growing.value()}
        self._tool(body.tool, state=body.status, output=body.output, detail=body.detail, blob=blob, **progress)

    def _requested(self, event: Event) -> None:
        body = ev.InteractionRequested.model_validate(event.body)
        key = f"interaction/{body.interaction}"
        if key not in self._items:
            self._items[key] = InteractionItem(
                id=body.interaction,
                asks=body.kind,
                name=body.name,
                input=body.input,
                tool=body.tool,
                description=body.description,
                questions=[question.model_dump() for question in body.questions],
                options=body.options,
                offered=body.offered,
            )
        self._phase_from_interactions()

    def _resolved(self, event: Event) -> None:
        body = ev.InteractionResolved.model_validate(event.body)
        key = f"interaction/{body.interaction}"
        item = self._items.get(key)
        if item is not None and item.state == "pending":
            self._replace(key, state=body.outcome, control=body.control)
        self._phase_from_interactions()

    def _phase_from_interactions(self) -> None:
        if self._state.phase in ("running", "waiting"):
            waiting = any(
                isinstance(item, InteractionItem) and item.state == "pending" for item in self._items.values()
            )
            self._state.phase = "waiting" if waiting else "running"

    def _raw(self, event: Event) -> None:
        if self._raw_count >= RAW_ITEMS_MAX:
            self._state.raw_omitted += 1
            return
        self._raw_count += 1
        body = ev.Raw.model_validate(event.body)
        self._put(
            RawItem(id=str(event.ordinal), stream=body.stream, preview=body.preview, bytes=body.bytes, why=body.why)
        )

    def _put(self, item: RawItem | GapItem | SessionItem) -> None:
        self._items[_key(item)] = item

    def _gap(self, key: str, reason: str, first: int | None, last: int | None, detail: str | None) -> None:
        self._state.partial = True
        self._put(GapItem(id=key, reason=reason, from_ordinal=first, to_ordinal=last, detail=detail))

    # --- the execution itself ---

    def _started(self, event: Event) -> None:
        """Told again where the execution goes on in another process: the target is another, the beginning is not."""
        body = ev.ExecutionStarted.model_validate(event.body)
        state = self._state
        if state.phase == "starting":
            state.phase = "running"
        if state.started_at is None:
            state.started_at = event.at
        state.agent, state.request, state.target = body.agent, body.request, body.target

    def _bound(self, event: Event) -> None:
        body = ev.SessionBound.model_validate(event.body)
        state = self._state
        state.native_session = body.native_session
        state.resumable = state.resumable or body.resumable
        state.model = body.model or state.model
        state.cli_version = body.cli_version or state.cli_version

    def _recovered(self, event: Event) -> None:
        body = ev.SessionRecovered.model_validate(event.body)
        self._put(
            SessionItem(
                id=str(event.ordinal),
                process=body.process,
                why=body.why,
                source=body.source,
                rows=body.rows,
                partial=body.partial,
                from_session=body.from_,
                detail=body.detail,
            )
        )

    def _model_request(self, event: Event) -> None:
        self._state.model_request = {**event.body, "at": event.at}

    def _usage(self, event: Event) -> None:
        body = ev.Usage.model_validate(event.body)
        state = self._state
        if body.turn in state.usage_by_turn:
            return
        state.usage_by_turn[body.turn] = body.model_dump(exclude_none=True)
        total = state.usage
        cost = total.cost_usd
        if body.cost_usd is not None:
            cost = (cost or 0.0) + body.cost_usd
        state.usage = UsageTotal(
            turns=total.turns + 1,
            input_tokens=total.input_tokens + body.input_tokens,
            output_tokens=total.output_tokens + body.output_tokens,
            cache_read_tokens=total.cache_read_tokens + body.cache_read_tokens,
            cache_write_tokens=total.cache_write_tokens + body.cache_write_tokens,
            cost_usd=cost,
        )

    def _background(self, event: Event) -> None:
        body = ev.Background.model_validate(event.body)
        open_work = self._state.background
        if body.state == "started" and body.id not in open_work:
            open_work.append(body.id)
        elif body.state == "completed" and body.id in open_work:
            open_work.remove(body.id)

    def _turn(self, event: Event) -> None:
        self._state.turns_completed += 1

    def _receipt(self, event: Event) -> None:
        body = ev.ControlReceipt.model_validate(event.body)
        self._state.receipts[body.control] = body.model_dump(exclude_none=True)

    def _response_ended(self, event: Event) -> None:
        body = ev.ResponseEnded.model_validate(event.body)
        state = self._state
        if state.response_outcome is None:
            state.response_outcome, state.response_ended_at = body.outcome, event.at
            state.error = None if body.error is None else body.error.model_dump()
            state.phase = "exiting"

    def _execution_ended(self, event: Event) -> None:
        body = ev.ExecutionEnded.model_validate(event.body)
        state = self._state
        state.phase, state.outcome, state.ended_at = "ended", body.outcome, event.at
        state.proof = None if body.proof is None else body.proof.model_dump(exclude_none=True)
        state.exit, state.tail = body.exit, body.tail
        state.partial = state.partial or body.tail == "unknown"
        if state.error is None and body.error is not None:
            state.error = body.error.model_dump()
        for key, item in list(self._items.items()):
            if (left := _LEFT_OPEN.get(getattr(item, "state", ""))) is not None:
                growing = self._growing.pop(key, None)
                whole = item if growing is None else _with_text(item, growing)
                self._items[key] = whole.model_copy(update={"state": left})

    def _gap_event(self, event: Event) -> None:
        body = ev.Gap.model_validate(event.body)
        self._gap(str(event.ordinal), body.reason, body.from_, body.to, body.detail)

    _HANDLERS: ClassVar[dict[str, Callable[[ExecutionFold, Event], None]]] = {
        ev.EXECUTION_STARTED: _started,
        ev.SESSION_BOUND: _bound,
        ev.SESSION_RECOVERED: _recovered,
        ev.TEXT_DELTA: _delta,
        ev.REASONING_DELTA: _delta,
        ev.TEXT_COMPLETED: _completed,
        ev.REASONING_COMPLETED: _completed,
        ev.TEXT_DISCARDED: _discarded,
        ev.TOOL_STARTED: _tool_started,
        ev.TOOL_PROGRESS: _tool_progress,
        ev.TOOL_COMPLETED: _tool_completed,
        ev.INTERACTION_REQUESTED: _requested,
        ev.INTERACTION_RESOLVED: _resolved,
        ev.RAW: _raw,
        ev.MODEL_REQUEST: _model_request,
        ev.USAGE: _usage,
        ev.BACKGROUND: _background,
        ev.TURN_COMPLETED: _turn,
        ev.CONTROL_RECEIPT: _receipt,
        ev.RESPONSE_ENDED: _response_ended,
        ev.EXECUTION_ENDED: _execution_ended,
        ev.GAP: _gap_event,
    }


# What an item that is open becomes when its process has ended.
_LEFT_OPEN: Final = {"running": "unknown", "pending": "expired", "streaming": "partial"}


def _key(item: Any) -> str:
    return f"{item.kind}/{item.id}"


def _with_text(item: Any, growing: GrowingText) -> Any:
    name = "progress" if isinstance(item, ToolItem) else "text"
    return item.model_copy(update={name: growing.value()})
