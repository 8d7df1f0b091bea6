"""The fold: events → state, one builder used by collector, projection, SDK and console.

The law that the product rests on, for every watermark w, with duplicates, re-deliveries and re-cut frames thrown in:

    fold(snapshot at w, events after w) = fold(all events)

`ExecutionFold.apply` takes an execution's events in order of ordinal and answers Applied, Duplicate or Hole; after a
Hole the reader fetches what is missing, or calls `skip_to` and the gap is part of the state, once. The builder is
mutable and O(1) amortised per event (growing text is a list of pieces); `freeze()` makes the state, which shares with
the builder every item that grows no more.
What a state keeps is bounded, whatever its sandbox writes: what is beyond a bound is told once, as a gap
`limit`, and changes nothing else. Behind `execution.ended` nothing is believed.
The fold of the conversation-level events is `tether.conversation_fold`.
The common types are read without validating a whole body; a body that is not just what it should be is validated.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar, Final, Literal

from pydantic import ValidationError

from tether import events as ev
from tether.events import Event
from tether.fold_bounds import LIMIT_KEY, TOOL_CONTENT, size, weight
from tether.fold_state import (
    ExecutionState,
    GapItem,
    InteractionItem,
    Item,
    Phase,
    RawItem,
    SessionItem,
    State,
    TextItem,
    ToolItem,
    UsageTotal,
)
from tether.growing import GrowingText
from tether.limits import (
    BACKGROUND_MAX,
    EXECUTION_CHARS_MAX,
    EXECUTION_ITEMS_MAX,
    INTERACTIONS_OPEN_MAX,
    ITEM_CHARS_MAX,
    RECEIPTS_MAX,
    TURNS_MAX,
    TYPE_CHARS_MAX,
)

__all__ = [
    "RAW_ITEMS_MAX",
    "Applied",
    "ExecutionFold",
    "ExecutionState",
    "GapItem",
    "InteractionItem",
    "Item",
    "Phase",
    "RawItem",
    "SessionItem",
    "State",
    "TextItem",
    "ToolItem",
    "UsageTotal",
]

RAW_ITEMS_MAX: Final = 200  # raw lines kept in a state; further ones are counted


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
        self._ended = base.outcome is not None
        self._pending = sum(_is_pending(item) for item in self._items.values())
        self._chars = sum(map(weight, self._items.values())) + sum(map(size, base.receipts.values()))  # that are kept
        self.limited = sum(key.startswith(LIMIT_KEY) for key in self._items)  # bounds that were told
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
        if self._ended:
            self._limit("after_end", event, "something was said behind the execution's end", "quarantined")
        elif handler is not None:
            try:
                handler(self, event)
            except (ValidationError, KeyError, TypeError):
                # A writer that lies about a body must not stop its readers; what it said is told as missing.
                why = f"{event.type[:TYPE_CHARS_MAX]} has a bad body"
                self._gap(str(event.ordinal), "corrupt", event.ordinal, event.end, why, event)
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
            if len(self._items) >= EXECUTION_ITEMS_MAX:
                self._too_many(event)
                return
            item = TextItem(kind=kind, id=body["segment"], parent=body.get("parent"))
        if item.state == "streaming":
            self._grow(key, item, item.text, event)

    def _grow(self, key: str, item: TextItem | ToolItem, so_far: str, event: Event) -> None:
        growing = self._growing.get(key)
        if growing is None:
            growing = GrowingText(so_far)
        size, whole = growing.add(event.body, min(ITEM_CHARS_MAX - growing.length, EXECUTION_CHARS_MAX - self._chars))
        self._chars += size
        self._growing[key] = growing
        self._items.setdefault(key, item)
        if not whole:
            self._limit("text", event, "more text than is kept of one item, or of one execution")
        if (more := _redacted(event.body)) != 0:
            self._replace(key, redacted=item.redacted + more)

    def _completed(self, event: Event) -> None:
        body = event.body
        kind: Literal["text", "reasoning"] = "text" if event.type == ev.TEXT_COMPLETED else "reasoning"
        if len(body) == 2 and type(segment := body.get("segment")) is str and type(text := body.get("text")) is str:
            self._complete(kind, segment, None, {"state": "completed", "text": text}, event)
            return
        typed = ev.TextCompleted.model_validate(body)
        changes: dict[str, Any] = {"state": "partial" if typed.partial else "completed"}
        # A preview never replaces the whole text that the deltas (or an earlier completion) gave already.
        whole = self._length(f"{kind}/{typed.segment}")
        if typed.blob is None or typed.chars is None or whole != typed.chars:
            changes["text"] = typed.text
            changes["blob"] = None if typed.blob is None else typed.blob.model_dump()
            changes["redacted"] = typed.redacted or 0
        self._complete(kind, typed.segment, typed.parent, changes, event)

    def _complete(
        self,
        kind: Literal["text", "reasoning"],
        segment: str,
        parent: str | None,
        changes: dict[str, Any],
        event: Event,
    ) -> None:
        key = f"{kind}/{segment}"
        if "text" in changes:
            more = len(changes["text"]) - (self._length(key) if key in self._items else 0)
            if not self._has_room(key, more, event):
                return
            self._chars += more
        growing = self._growing.pop(key, None)
        item = self._items.get(key)
        if item is not None:
            parent = item.parent
            if "text" not in changes:
                changes["text"] = item.text if growing is None else growing.value()
                changes["blob"] = item.blob
                changes["redacted"] = item.redacted
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
                self._chars -= self._length(key)
                self._growing.pop(key, None)
                self._replace(key, state="discarded", text="")

    def _tool(self, tool: str, event: Event, changes: dict[str, Any]) -> None:
        """Its content is counted as it is put: what it says anew takes the place of what it said."""
        key = f"tool/{tool}"
        item = self._items.get(key)
        more = 0
        for name, value in changes.items():
            if name in TOOL_CONTENT:
                had = None if item is None else getattr(item, name)
                more += (0 if value is None else size(value)) - (0 if had is None else size(had))
        if not self._has_room(key, more, event):
            return
        self._chars += more
        growing = self._growing.pop(key, None) if "state" in changes else None
        if growing is not None:
            changes["progress"] = growing.value()
        if item is not None:
            self._replace(key, **changes)
        else:
            self._items[key] = ToolItem(id=tool, **changes)

    def _tool_started(self, event: Event) -> None:
        body = ev.ToolStarted.model_validate(event.body)
        told: dict[str, Any] = {"name": body.name, "input": body.input, "parent": body.parent}
        if body.redacted:
            told["redacted"] = self._redacted_in(f"tool/{body.tool}") + body.redacted
        self._tool(body.tool, event, told)

    def _tool_progress(self, event: Event) -> None:
        key = f"tool/{event.body['tool']}"
        item = self._items.get(key)
        if item is None:
            if len(self._items) >= EXECUTION_ITEMS_MAX:
                self._too_many(event)
                return
            item = ToolItem(id=event.body["tool"])
        self._grow(key, item, item.progress, event)

    def _tool_completed(self, event: Event) -> None:
        body = ev.ToolCompleted.model_validate(event.body)
        blob = None if body.blob is None else body.blob.model_dump()
        told = {"state": body.status, "output": body.output, "detail": body.detail, "blob": blob}
        if body.redacted:
            told["redacted"] = self._redacted_in(f"tool/{body.tool}") + body.redacted
        self._tool(body.tool, event, told)

    def _redacted_in(self, key: str) -> int:
        """How many secrets an item has had so far."""
        item = self._items.get(key)
        return 0 if item is None else int(item.redacted)

    def _requested(self, event: Event) -> None:
        body = ev.InteractionRequested.model_validate(event.body)
        key = f"interaction/{body.interaction}"
        if key not in self._items:
            if self._pending >= INTERACTIONS_OPEN_MAX:
                self._limit("interactions", event, f"more than {INTERACTIONS_OPEN_MAX} wait for a human at once")
                return
            item = InteractionItem(
                id=body.interaction,
                asks=body.kind,
                name=body.name,
                input=body.input,
                tool=body.tool,
                description=body.description,
                questions=[question.model_dump() for question in body.questions],
                options=body.options,
                offered=body.offered,
                redacted=body.redacted or 0,
            )
            if not self._put(item, event):
                return
            self._pending += 1
        self._phase_from_interactions()

    def _resolved(self, event: Event) -> None:
        body = ev.InteractionResolved.model_validate(event.body)
        key = f"interaction/{body.interaction}"
        item = self._items.get(key)
        if item is not None and item.state == "pending":
            self._replace(key, state=body.outcome, control=body.control)
            self._pending -= 1
        self._phase_from_interactions()

    def _phase_from_interactions(self) -> None:
        if self._state.phase in ("running", "waiting"):
            self._state.phase = "waiting" if self._pending else "running"

    def _raw(self, event: Event) -> None:
        if self._raw_count >= RAW_ITEMS_MAX:
            self._state.raw_omitted += 1
            return
        self._raw_count += 1
        body = ev.Raw.model_validate(event.body)
        told = {"stream": body.stream, "preview": body.preview, "bytes": body.bytes, "why": body.why}
        self._put(RawItem(id=str(event.ordinal), redacted=body.redacted or 0, **told), event)

    def _put(self, item: RawItem | GapItem | SessionItem | InteractionItem, event: Event | None) -> bool:
        """`event`: what made it, and may be too much; without one it is always put."""
        key, more = _key(item), weight(item)
        if event is not None and not self._has_room(key, more, event):
            return False
        old = self._items.get(key)
        self._chars += more - (0 if old is None else weight(old))
        self._items[key] = item
        return True

    def _gap(
        self,
        key: str,
        reason: str,
        first: int | None,
        last: int | None,
        detail: str | None,
        event: Event | None = None,
    ) -> None:
        self._state.partial = True
        self._put(GapItem(id=key, reason=reason, from_ordinal=first, to_ordinal=last, detail=detail), event)

    # --- bounds ---

    def limits(self) -> list[str]:
        """The keys of the items that tell of bounds which were reached."""
        return [key for key in self._items if key.startswith(LIMIT_KEY)] if self.limited else []

    def _has_room(self, key: str, more: int, event: Event) -> bool:
        """For so many code points more in the item `key`; where there is none that is told."""
        if len(self._items) < EXECUTION_ITEMS_MAX and self._chars + more <= EXECUTION_CHARS_MAX:
            return True
        if len(self._items) >= EXECUTION_ITEMS_MAX and key not in self._items:
            self._too_many(event)
            return False
        if more > 0 and self._chars + more > EXECUTION_CHARS_MAX:
            self._limit("content", event, "more content than is kept of one execution")
            return False
        return True

    def _too_many(self, event: Event) -> None:
        self._limit("items", event, f"more than {EXECUTION_ITEMS_MAX} items are not kept of one execution")

    def _limit(self, what: str, event: Event, detail: str, reason: ev.GapReason = "limit") -> None:
        """Told once of each bound: from this event on, what exceeds it is left out."""
        if f"{LIMIT_KEY}{what}" not in self._items:
            self.limited += 1
            self._gap(f"limit-{what}", reason, event.ordinal, None, detail)

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
            ),
            event,
        )

    def _model_request(self, event: Event) -> None:
        self._state.model_request = {**event.body, "at": event.at}

    def _usage(self, event: Event) -> None:
        body = ev.Usage.model_validate(event.body)
        state = self._state
        if body.turn in state.usage_by_turn:
            return
        if len(state.usage_by_turn) >= TURNS_MAX:
            self._limit("turns", event, f"the usage of more than {TURNS_MAX} turns")
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
            if len(open_work) >= BACKGROUND_MAX:
                self._limit("background", event, f"more than {BACKGROUND_MAX} works in the background")
                return
            open_work.append(body.id)
        elif body.state == "completed" and body.id in open_work:
            open_work.remove(body.id)

    def _turn(self, event: Event) -> None:
        self._state.turns_completed += 1

    def _receipt(self, event: Event) -> None:
        body = ev.ControlReceipt.model_validate(event.body)
        receipt = body.model_dump(exclude_none=True)
        known = self._state.receipts.get(body.control)
        more = size(receipt) - size(known)
        if (known is None and len(self._state.receipts) >= RECEIPTS_MAX) or self._chars + more > EXECUTION_CHARS_MAX:
            self._limit("receipts", event, f"more than {RECEIPTS_MAX} receipts")
            return
        self._chars += more
        self._state.receipts[body.control] = receipt

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
        self._pending, self._ended = 0, True
        for key, item in list(self._items.items()):
            if (left := _LEFT_OPEN.get(getattr(item, "state", ""))) is not None:
                growing = self._growing.pop(key, None)
                whole = item if growing is None else _with_text(item, growing)
                self._items[key] = whole.model_copy(update={"state": left})

    def _gap_event(self, event: Event) -> None:
        body = ev.Gap.model_validate(event.body)
        self._gap(str(event.ordinal), body.reason, body.from_, body.to, body.detail, event)

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


def _redacted(body: dict[str, Any]) -> int:
    """Of a delta, whose body is not validated."""
    count = body.get("redacted", 0)
    return count if type(count) is int else 0


def _with_text(item: Any, growing: GrowingText) -> Any:
    name = "progress" if isinstance(item, ToolItem) else "text"
    return item.model_copy(update={name: growing.value()})


def _is_pending(item: Any) -> bool:
    return isinstance(item, InteractionItem) and item.state == "pending"
