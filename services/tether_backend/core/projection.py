"""The projection, pure: frames of an execution → changes of its rows. The shell is `store.projection`.

A `Builder` is the fold of one execution plus the order of its items. `apply` trims what the rows contain by ordinal
and answers Hole where ordinals are missing; `changes()` are the upserts since the last call: one per touched item
whatever the number of events.

`Kept` is the memory of builders: executions that have not ended, bounded in estimated bytes. A builder that was let go
is loaded from its rows when its execution goes on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tether import events as ev
from tether.events import Event, GapReason
from tether.fold import Applied, ExecutionFold, ExecutionState, Item
from tether.frames import Frame
from tether.limits import KIB, MIB
from tether.subjects import EventAddress

BUILDER_BYTES: Final = 8 * KIB  # estimated, of a builder without items
ITEM_BYTES: Final = 1536  # estimated, of an item without its content
_EVENT_BYTES: Final = 128  # of an event's JSON that are not its content
IDLE_BYTES_MAX: Final = 64 * MIB  # builders that the last batch did not touch go first, from here on
BUILDERS_BYTES_MAX: Final = 256 * MIB  # and then any, but one: reloading the busy ones at every batch costs more
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
    """Rows to upsert. `head` is the state without items; `usage` and `receipts` by turn and control id. `given_up`: the
    first ordinal of each gap that was recorded because nobody had its events."""

    address: EventAddress
    head: ExecutionState
    items_total: int
    items: tuple[ItemChange, ...]
    usage: tuple[dict[str, Any], ...]
    receipts: tuple[dict[str, Any], ...]
    at: int
    given_up: tuple[int, ...] = ()


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
        case ev.SESSION_RECOVERED:
            return (f"session/{event.ordinal}",)
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
    size_bytes: int = BUILDER_BYTES  # estimated, and never too small by much
    _dirty: dict[str, None] = field(default_factory=dict)
    _usage: list[dict[str, Any]] = field(default_factory=list)
    _receipts: list[dict[str, Any]] = field(default_factory=list)
    _given_up: list[int] = field(default_factory=list)
    _changed: bool = False
    # What lies before the next message in the log: nothing that is known, a frame that was believed, or what was not.
    behind: Literal["unknown", "believed", "refused"] = "unknown"
    place: int = 0  # of the last message that was believed; 0 where none was, in this process
    searched: int = 0  # the log was looked through up to this sequence
    limits_told: int = 0
    _limited: int = 0

    @staticmethod
    def load(address: EventAddress, state: ExecutionState, keys: Sequence[str]) -> Builder:
        """From rows: `state` with its items, whose keys are `keys`, in order."""
        loaded = Builder(address, ExecutionFold(state), {key: index for index, key in enumerate(keys)})
        loaded.limits_told = loaded._limited = loaded.fold.limited
        for item in state.items:
            loaded.size_bytes += ITEM_BYTES + sum(len(value) for _, value in item if isinstance(value, str))
        return loaded

    @staticmethod
    def replaced(address: EventAddress, state: ExecutionState, at: int) -> Builder:
        """One whose rows are all to be written anew, from a merged state."""
        made = Builder.load(address, state, [f"{item.kind}/{item.id}" for item in state.items])
        made.at, made._changed = at, True
        made._dirty = dict.fromkeys(made.positions)
        made._usage = [dict(body) for body in state.usage_by_turn.values()]
        made._receipts = [{"at": at, **body} for body in state.receipts.values()]
        return made

    @property
    def applied(self) -> int:
        return self.fold.applied

    @property
    def waiting(self) -> int:
        """How many items `changes` would tell."""
        return len(self._dirty)

    def apply(self, frame: Frame, size_bytes: int = 0) -> bool:
        """Apply what is new of a frame of so many bytes; False where ordinals before it are missing (nothing is
        applied then)."""
        if frame.first > self.applied + 1:
            return False
        if frame.last > self.applied:
            self.size_bytes += max(0, size_bytes - _EVENT_BYTES * len(frame.events))
        for event in frame.events:
            self._apply(event)
        self.behind = "believed"
        return True

    def limited(self) -> bool:
        """Whether a bound of what is kept was reached since the last call."""
        told, self.limits_told = self.limits_told, self.fold.limited
        return self.limits_told > told

    def skip_to(self, ordinal: int, reason: GapReason) -> None:
        """The ordinals before `ordinal` are not to be had: recorded once, as an item."""
        first = self.applied + 1
        self.fold.skip_to(ordinal, reason)
        if self.applied >= first:
            self._touch(f"gap/skip-{first}")
            self._given_up.append(first)
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
        if self.fold.limited > self._limited:
            self._limited = self.fold.limited
            for key in self.fold.limits():
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
        if key not in self.positions:
            self.positions[key] = len(self.positions)
            self.size_bytes += ITEM_BYTES
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
            given_up=tuple(self._given_up),
        )
        self._dirty.clear()
        self._usage.clear()
        self._receipts.clear()
        self._given_up.clear()
        self._changed = False
        return change


class Kept:
    """Builders by execution, least recently used first; `size_bytes` is kept as they change."""

    def __init__(self, idle_bytes_max: int = IDLE_BYTES_MAX, bytes_max: int = BUILDERS_BYTES_MAX) -> None:
        self._idle_bytes_max = idle_bytes_max
        self._bytes_max = bytes_max
        self._builders: OrderedDict[str, tuple[Builder, int]] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._builders)

    def get(self, execution: str) -> Builder | None:
        known = self._builders.get(execution)
        return None if known is None else known[0]

    def put(self, builder: Builder) -> None:
        """Keep it as it is now: the most recently used. One whose execution has ended is let go."""
        execution = builder.address.execution
        self._drop(execution)
        if not builder.fold.ended:
            self._builders[execution] = (builder, builder.size_bytes)
            self.size_bytes += builder.size_bytes

    def trim(self, busy: Collection[str]) -> None:
        """Let go of what is too much; `busy`: what the last batch touched."""
        while len(self._builders) > 1:
            oldest = next(iter(self._builders))
            if self.size_bytes <= (self._bytes_max if oldest in busy else self._idle_bytes_max):
                return
            self._drop(oldest)

    def drop(self, execution: str) -> None:
        """Its rows were written by another: load them when it goes on."""
        self._drop(execution)

    def clear(self) -> None:
        self._builders.clear()
        self.size_bytes = 0

    def _drop(self, execution: str) -> None:
        known = self._builders.pop(execution, None)
        if known is not None:
            self.size_bytes -= known[1]


def _change(key: str, position: int, item: Item) -> ItemChange:
    status = getattr(item, "state", "")
    return ItemChange(key, position, item.kind, status, item.model_dump(mode="json", exclude_none=True))
