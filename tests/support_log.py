"""A conversation's log written by hand on any bus: frames and conversation events as the services store them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tether import events as ev
from tether import subjects
from tether.client.items import CaughtUp, ConversationItem, ExecutionItem, GapItem, Item, PositionChanged, SnapshotItem
from tether.events import ConversationEvent, Event
from tether.frames import Frame, Position, encode, encode_event
from tether.ports import Bus


@dataclass
class LogWriter:
    """Writes one conversation. `last` is the last ordinal of each execution."""

    bus: Bus
    tenant: str
    workspace: str = "w"
    conversation: str = "c"
    last: dict[str, int] = field(default_factory=dict)
    notes: int = 0

    async def frame(self, execution: str, count: int = 1, *, end: bool = False) -> int:
        first = self.last.get(execution, 0) + 1
        events = [
            Event(ordinal=n, at=n, type=ev.TEXT_COMPLETED, body={"segment": f"s{n}", "text": f"{execution}-{n}"})
            for n in range(first, first + count)
        ]
        if end:
            first_end = first + count
            events.append(Event(ordinal=first_end, at=1, type=ev.RESPONSE_ENDED, body={"outcome": "completed"}))
            proof = {"method": "pid_namespace", "at": 1}
            body = {"outcome": "completed", "proof": proof}
            events.append(Event(ordinal=first_end + 1, at=1, type=ev.EXECUTION_ENDED, body=body))
        self.last[execution] = events[-1].ordinal
        frame = Frame(first=first, last=events[-1].ordinal, pos=Position(record=0, index=0), events=events)
        subject = subjects.event(self.tenant, self.workspace, self.conversation, execution)
        return (await self.bus.publish(subject, encode(frame))).sequence

    async def note(self, kind: str = ev.RECOVERY, **body: object) -> int:
        self.notes += 1
        event = ConversationEvent(id=f"n{self.notes}", generation=1, at=1, type=kind, body=dict(body))
        subject = subjects.event(self.tenant, self.workspace, self.conversation, "_")
        return (await self.bus.publish(subject, encode_event(event))).sequence

    async def created(self, execution: str, request: str = "q", response: str = "r") -> int:
        return await self.note(
            ev.RESPONSE_CREATED,
            request=request,
            response=response,
            response_generation=1,
            execution=execution,
            execution_generation=1,
            agent="scripted",
        )


@dataclass
class Reader:
    """What a reader got; fails on anything doubled or out of order."""

    got: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    gaps: list[GapItem] = field(default_factory=list)
    snapshots: list[SnapshotItem] = field(default_factory=list)
    changed: int = 0
    caught_up: int = 0
    replayed: int = 0
    cursor: str | None = None

    def take(self, item: Item) -> None:
        self.cursor = item.cursor
        match item:
            case ExecutionItem():
                mine = self.got.setdefault(item.execution, [])
                assert item.ordinal == (mine[-1] if mine else 0) + 1, f"{item.ordinal} after {mine[-1:]}"
                mine.append(item.event.end)
                self.replayed += item.replay
            case ConversationItem():
                assert item.event.id not in self.notes
                self.notes.append(item.event.id)
                self.replayed += item.replay
            case GapItem():
                self.gaps.append(item)
                if item.execution is not None and item.last is not None:
                    self.got.setdefault(item.execution, []).append(item.last)
            case SnapshotItem():
                self.snapshots.append(item)
                for execution, state in item.executions.items():
                    self.got.setdefault(execution, []).append(state.applied)
            case PositionChanged():
                self.changed += 1
                self.got.clear()
                self.notes.clear()
            case CaughtUp():
                self.caught_up += 1

    @property
    def count(self) -> int:
        return sum(len(ordinals) for ordinals in self.got.values()) + len(self.notes)
