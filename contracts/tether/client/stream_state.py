"""What a reader of the HTTP event stream knows: its cursor, what it has by identity, whether it has caught up. Pure.

Frames in, items out. The state outlives connections: after a reconnect the server replays from the last id, and what
comes again is dropped by (execution, ordinal) or the event's id, never by position.
"""

from __future__ import annotations

from tether.api import ConversationHistory, StreamEvent, StreamSnapshot
from tether.client.follow import SeenIds
from tether.client.items import CaughtUp, ConversationItem, ExecutionItem, GapItem, Item, PositionChanged, SnapshotItem
from tether.client.views import states_of
from tether.errors import Code, Problem
from tether.events import ConversationEvent, Event


class StreamReader:
    def __init__(self, conversation: str, cursor: str | None) -> None:
        self.conversation = conversation
        self.cursor = cursor
        self.ended = False
        self._applied: dict[str, int] = {}
        self._ids = SeenIds()
        self._caught_up = False

    def _at(self, cursor: str) -> str:
        if cursor:
            self.cursor = cursor
        return self.cursor or ""

    def opened(self, cursor: str) -> list[Item]:
        self._at(cursor)
        return []

    def event(self, data: str, cursor: str) -> list[Item]:
        value = StreamEvent.model_validate_json(data)
        at = self._at(cursor)
        # After a reconnect the server calls replay what was stored meanwhile; to the caller that is new.
        replay = value.replay and not self._caught_up
        if value.execution is not None and value.ordinal is not None:
            event = Event(ordinal=value.ordinal, last=value.last, at=value.at, type=value.type, body=value.body)
            if event.end <= self._applied.get(value.execution, 0):
                return []
            self._applied[value.execution] = event.end
            return [ExecutionItem(self.conversation, value.execution, event, at, replay)]
        if value.id is None or not self._ids.add(value.id):
            return []
        told = ConversationEvent(
            id=value.id, generation=value.generation or 0, at=value.at, type=value.type, body=value.body
        )
        return [ConversationItem(self.conversation, told, at, replay)]

    def live(self, cursor: str) -> list[Item]:
        at = self._at(cursor)
        if self._caught_up:
            return []
        self._caught_up = True
        return [CaughtUp(self.conversation, at)]

    def problem(self, data: str, cursor: str | None) -> list[Item]:
        what = Problem.model_validate_json(data)
        at = self._at(cursor or "")
        if what.code is Code.CURSOR_POSITION_CHANGED:
            self._applied.clear()
            self._ids.clear()
            self._caught_up = False
            return [PositionChanged(self.conversation, at, what.detail)]
        reason = "retention_gap" if what.code is Code.RETENTION_GAP else "corrupt"
        context = what.context
        execution = context.get("execution")
        return [
            GapItem(
                self.conversation,
                execution if isinstance(execution, str) else None,
                _whole(context.get("first")),
                _whole(context.get("last")),
                reason,
                at,
                what.detail,
                not self._caught_up,
            )
        ]

    def snapshot(self, data: str, cursor: str) -> list[Item]:
        history: ConversationHistory = StreamSnapshot.model_validate_json(data).history
        at = self._at(cursor)
        for view in history.executions:
            self._applied[view.execution] = max(self._applied.get(view.execution, 0), view.applied)
        return [SnapshotItem(self.conversation, states_of(history), at, history)]

    def end(self, cursor: str) -> list[Item]:
        self._at(cursor)
        self.ended = True
        return []


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
