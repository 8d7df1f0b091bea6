"""What a reader of a conversation gets, whatever the transport. Each item has the cursor after it and says whether it
is a replay (stored before the reader came): nothing replayed is executed.

    ExecutionItem      one event of an execution; its identity is (execution, ordinal), merged deltas cover more
    ConversationItem   one event of the conversation; its identity is `event.id`
    SnapshotItem       state in place of events: replaces what the reader has of these executions, never with less
    GapItem            ordinals that are not to be had, told once
    PositionChanged    the log is another one than the cursor's: what follows is from its beginning, or a snapshot
    CaughtUp           everything that was stored when the reader came has been given
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tether.api import ConversationHistory
from tether.events import ConversationEvent, Event
from tether.fold import ExecutionState


@dataclass(frozen=True, slots=True)
class ExecutionItem:
    """One event of an execution."""

    conversation: str
    execution: str
    event: Event
    cursor: str
    replay: bool

    @property
    def ordinal(self) -> int:
        return self.event.ordinal

    @property
    def type(self) -> str:
        return self.event.type


@dataclass(frozen=True, slots=True)
class ConversationItem:
    """One event of the conversation."""

    conversation: str
    event: ConversationEvent
    cursor: str
    replay: bool

    @property
    def type(self) -> str:
        return self.event.type


@dataclass(frozen=True, slots=True)
class SnapshotItem:
    """`executions`: their folded states. `history`: over HTTP, the newest page of the whole conversation."""

    conversation: str
    executions: Mapping[str, ExecutionState]
    cursor: str
    history: ConversationHistory | None = None
    replay: bool = True


@dataclass(frozen=True, slots=True)
class GapItem:
    """`execution` None: not known of which. `first..last` inclusive, None where not known."""

    conversation: str
    execution: str | None
    first: int | None
    last: int | None
    reason: str
    cursor: str
    detail: str = ""
    replay: bool = True


@dataclass(frozen=True, slots=True)
class PositionChanged:
    conversation: str
    cursor: str
    detail: str = "the log was made anew or put back: this is another message's place"
    replay: bool = True


@dataclass(frozen=True, slots=True)
class CaughtUp:
    conversation: str
    cursor: str
    replay: bool = field(default=False)


Item = ExecutionItem | ConversationItem | SnapshotItem | GapItem | PositionChanged | CaughtUp
