"""The projection, pure: frames of an execution → changes of its rows. The shell is `store.projection`.

A `Builder` is the fold of one execution plus the order of its items. `apply` trims what the rows contain by ordinal
and answers Hole where ordinals are missing; `changes()` are the upserts since the last call: one per touched item
whatever the number of events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tether import events as ev
from tether.events import Event, GapReason
from tether.fold import Applied, ExecutionFold, ExecutionState, Item
from tether.frames import Frame
from tether.subjects import EventAddress

_OPEN: Final = frozenset({"running", "pending", "streaming"})  # states that an execution's end closes


@dataclass(frozen=True, slots=True)
class ItemChange:
    key: str
    position: int
    kind: str
    status: str
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ExecutionChange:
    """Rows to upsert. `head` is the state without items; `usage` and `receipts` by turn and control id."""

    address: EventAddress
    head: ExecutionState
    items_total: int
    items: tuple[ItemChange, ...]
    usage: tuple[dict[str, Any], ...]
    receipts: tuple[dict[str, Any], ...]
    at: int


def touched(event: Event) -> tuple[str, ...]:
    """Keys of the items that an event changes (an execution's end: see `Builder`)."""
    body = event.body
    match event.type:
        case ev.TEXT_DELTA | ev.TEXT_COMPLETED:
            return (f"text/{body.get('segment')}",)
        case ev.REASONING_DELTA | ev.REASONING_COMPLETED:
            return (f"reasoning/{body.get('segment')}",)
        case ev.TEXT_DISCARDED:
            return (f"text/{body.get('segment')}", f"reasoning/{body.get('segment')}")
        case ev.TOOL_STARTED | ev.TOOL_PROGRESS | ev.TOOL_COMPLETED:
            return (f"tool/{body.get('tool')}",)
        case ev.INTERACTION_REQUESTED | ev.INTERACTION_RESOLVED:
            return (f"interaction/{body.get('interaction')}",)
        case ev.RAW:
            return (f"raw/{event.ordinal}",)
        case _:
            return ()


@dataclass(slots=True)
class Builder:
    """One execution while it is being projected. `positions` are in order of appearance, from 0."""

    address: EventAddress
    fold: ExecutionFold = field(default_factory=ExecutionFold)
    positions: dict[str, int] = field(default_factory=dict)
    at: int = 0
    _dirty: dict[str, None] = field(default_factory=dict)
    _usage: list[dict[str, Any]] = field(default_factory=list)
    _receipts: list[dict[str, Any]] = field(default_factory=list)
    _changed: bool = False

    @staticmethod
    def load(address: EventAddress, state: ExecutionState, keys: Sequence[str]) -> Builder:
        """From rows: `state` with its items, whose keys are `keys`, in order."""
        return Builder(address, ExecutionFold(state), {key: index for index, key in enumerate(keys)})

    @property
    def applied(self) -> int:
        return self.fold.applied

    def apply(self, frame: Frame) -> bool:
        """Apply what is new of a frame; False where ordinals before it are missing (nothing is applied then)."""
        if frame.first > self.applied + 1:
            return False
        for event in frame.events:
            self._apply(event)
        return True

    def skip_to(self, ordinal: int, reason: GapReason) -> None:
        """The ordinals before `ordinal` are not to be had: recorded once, as an item."""
        first = self.applied + 1
        self.fold.skip_to(ordinal, reason)
        self._touch(f"gap/skip-{first}")
        self._changed = True

    def _apply(self, event: Event) -> None:
        closing = self._open_items() if event.type == ev.EXECUTION_ENDED else []
        if self.fold.apply(event) is not Applied.APPLIED:
            return
        self._changed = True
        self.at = max(self.at, event.at)
        # A body that lies about its type is a `corrupt` gap in the state (see the fold), under this key.
        for key in (*touched(event), *closing, f"gap/{event.ordinal}"):
            self._touch(key)
        if event.type == ev.USAGE:
            self._usage.append(dict(event.body))
        elif event.type == ev.CONTROL_RECEIPT:
            self._receipts.append({**event.body, "at": event.at})

    def _open_items(self) -> list[str]:
        keys = self.fold.keys()
        return [key for key in keys if getattr(self.fold.item(key), "state", "") in _OPEN]

    def _touch(self, key: str) -> None:
        if not self.fold.has(key):
            return
        self.positions.setdefault(key, len(self.positions))
        self._dirty[key] = None

    def changes(self) -> ExecutionChange | None:
        """What to write since the last call, or None."""
        if not self._changed:
            return None
        items = []
        for key in self._dirty:
            item = self.fold.item(key)
            assert item is not None
            items.append(_change(key, self.positions[key], item))
        change = ExecutionChange(
            address=self.address,
            head=self.fold.head(),
            items_total=len(self.positions),
            items=tuple(items),
            usage=tuple(self._usage),
            receipts=tuple(self._receipts),
            at=self.at,
        )
        self._dirty.clear()
        self._usage.clear()
        self._receipts.clear()
        self._changed = False
        return change


def _change(key: str, position: int, item: Item) -> ItemChange:
    status = getattr(item, "state", "")
    return ItemChange(key, position, item.kind, status, item.model_dump(mode="json", exclude_none=True))
