"""Merging a newer state of an execution into the one that a reader has, by identity. Pure.

The newer one (a snapshot with what followed it) decides, but less never replaces more:

    completed text that was not explicitly discarded    stays, and the result is `partial`
    a settled tool or interaction                       is not opened again
    an answer that is offered again                     stays offered
    a whole text                                        is not replaced by its preview
    the end of the execution                            is never followed by anything that runs

A gap that only this reader had (it gave ordinals up, `ExecutionFold.skip_to`) goes once the newer state covers it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tether.fold import (
    ExecutionState,
    GapItem,
    InteractionItem,
    Item,
    RawItem,
    SessionItem,
    TextItem,
    ToolItem,
    UsageTotal,
)

OWN_GAP: Final = "skip-"  # ids of gaps that a reader recorded itself; the log's have the event's ordinal
_TOOL_RANK: Final = {"running": 0, "unknown": 1, "interrupted": 2, "ok": 2, "error": 2}
_KEPT_HEAD: Final = (
    "response_outcome",
    "error",
    "agent",
    "request",
    "target",
    "native_session",
    "model",
    "cli_version",
    "started_at",
    "response_ended_at",
    "model_request",
)


@dataclass(frozen=True, slots=True)
class Merged:
    """`filled`: ordinals `first..last` that the reader had given up and now has. `changed`: the state is another."""

    state: ExecutionState
    changed: bool
    filled: tuple[tuple[int, int], ...] = ()

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Ordinals that are still given up."""
        return own_gaps(self.state)


def own_gaps(state: ExecutionState) -> list[tuple[int, int]]:
    """Ordinals that the reader of this state had to give up."""
    return [
        (item.from_ordinal, item.to_ordinal)
        for item in state.items
        if isinstance(item, GapItem) and item.id.startswith(OWN_GAP) and item.from_ordinal and item.to_ordinal
    ]


def merge(mine: ExecutionState, theirs: ExecutionState) -> Merged:
    """`theirs` must reach as far as `mine`; one that does not, or that runs where mine has ended, changes nothing."""
    if theirs.applied < mine.applied or (mine.outcome is not None and theirs.outcome is None):
        return Merged(mine, changed=False)
    items, lost = _items(mine, theirs)
    remaining = {item.id for item in items if isinstance(item, GapItem)}
    filled = tuple(gap for gap in own_gaps(mine) if f"{OWN_GAP}{gap[0]}" not in remaining)
    usage_by_turn = {**mine.usage_by_turn, **theirs.usage_by_turn}
    update: dict[str, Any] = {
        "items": items,
        "usage_by_turn": usage_by_turn,
        "usage": theirs.usage if len(usage_by_turn) == len(theirs.usage_by_turn) else _total(usage_by_turn),
        "receipts": {**mine.receipts, **theirs.receipts},
        "resumable": mine.resumable or theirs.resumable,
        "raw_omitted": max(mine.raw_omitted, theirs.raw_omitted),
        "turns_completed": max(mine.turns_completed, theirs.turns_completed),
        "partial": theirs.partial or lost,
    }
    for name in _KEPT_HEAD:
        if getattr(theirs, name) is None:
            update[name] = getattr(mine, name)
    state = theirs.model_copy(update=update)
    return Merged(state, changed=state != mine, filled=filled)


def _items(mine: ExecutionState, theirs: ExecutionState) -> tuple[list[Item], bool]:
    """Theirs in their order, each with what mine knows better; what only mine has stays behind what it followed.
    Whether something stayed that theirs should have had."""
    known = {_key(item): item for item in mine.items}
    named = {_key(item) for item in theirs.items}
    behind: dict[str | None, list[Item]] = {}
    lost = False
    previous: str | None = None
    for item in mine.items:
        key = _key(item)
        if key in named:
            previous = key
        elif _stays(item, theirs):
            behind.setdefault(previous, []).append(item)
            lost = lost or not isinstance(item, GapItem | RawItem | SessionItem)
    merged: list[Item] = list(behind.get(None, ()))
    for item in theirs.items:
        key = _key(item)
        better, less = _item(known.get(key), item)
        lost = lost or less
        merged += [better, *behind.get(key, ())]
    return merged, lost


def _key(item: Item) -> str:
    return f"{item.kind}/{item.id}"


def _stays(item: Item, theirs: ExecutionState) -> bool:
    """Whether an item that theirs does not have is kept."""
    match item:
        case GapItem():
            own = item.id.startswith(OWN_GAP)
            return not own or item.to_ordinal is None or item.to_ordinal > theirs.applied
        case TextItem(state="streaming"):
            return theirs.partial and theirs.outcome is None  # provisional: a whole state that lacks it voids it
        case _:
            return True


def _item(mine: Any, theirs: Item) -> tuple[Item, bool]:
    """The one of both that says more, and whether theirs said less than had been shown."""
    match theirs:
        case TextItem() if isinstance(mine, TextItem):
            return _text(mine, theirs)
        case ToolItem() if isinstance(mine, ToolItem):
            if _TOOL_RANK[mine.state] > _TOOL_RANK[theirs.state]:
                return mine, theirs.state == "unknown"
            gone = {
                name: getattr(mine, name)
                for name in ("name", "input", "output", "progress", "parent")
                if not getattr(theirs, name) and getattr(mine, name)
            }
            return (theirs.model_copy(update=gone) if gone else theirs), False
        case InteractionItem() if isinstance(mine, InteractionItem):
            if mine.state != "pending" and theirs.state == "pending":
                return mine, False
            if theirs.offered is None and mine.offered is not None:
                return theirs.model_copy(update={"offered": mine.offered}), False
            return theirs, False
        case _:
            return theirs, False


def _text(mine: TextItem, theirs: TextItem) -> tuple[TextItem, bool]:
    if theirs.state == "discarded":
        return theirs, False
    if mine.state == "discarded":
        return (theirs, False) if theirs.state == "completed" else (mine, False)
    if mine.state == "completed" and theirs.state != "completed":
        return mine, True
    preview = theirs.blob is not None and mine.blob is None
    shorter = len(theirs.text) < len(mine.text)
    if shorter and (preview or theirs.state != "completed"):
        state = theirs.state if mine.state != "completed" else mine.state
        return mine.model_copy(update={"state": state}), False
    return theirs, False


def _total(usage_by_turn: dict[str, dict[str, Any]]) -> UsageTotal:
    """As the fold adds it up: each turn once."""
    costs = [body["cost_usd"] for body in usage_by_turn.values() if body.get("cost_usd") is not None]

    def tokens(name: str) -> int:
        return sum(int(body.get(name, 0)) for body in usage_by_turn.values())

    return UsageTotal(
        turns=len(usage_by_turn),
        input_tokens=tokens("input_tokens"),
        output_tokens=tokens("output_tokens"),
        cache_read_tokens=tokens("cache_read_tokens"),
        cache_write_tokens=tokens("cache_write_tokens"),
        cost_usd=sum(costs) if costs else None,
    )
