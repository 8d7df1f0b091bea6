"""Readers that are broken off and go on from their cursor alone, and that remember everything they were given."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

from tether import Client
from tether.client.items import ConversationItem, ExecutionItem, GapItem, Item, PositionChanged, SnapshotItem
from tether.errors import BusError, ProblemError
from tether.events import Event


@dataclass(slots=True)
class Got:
    """What one reader got of one conversation, in order."""

    name: str
    executions: dict[str, list[Event]] = field(default_factory=dict)
    conversation: list[str] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    breaks: int = 0
    cursor: str | None = None

    def take(self, item: Item) -> None:
        self.cursor = item.cursor
        match item:
            case ExecutionItem():
                self.executions.setdefault(item.execution, []).append(item.event)
            case ConversationItem():
                self.conversation.append(item.event.id)
            case GapItem() | SnapshotItem() | PositionChanged():
                self.trouble.append(f"{type(item).__name__} {getattr(item, 'reason', '')}")
            case _:
                pass

    def has(self, ends: dict[str, int]) -> bool:
        """Everything up to these ordinals, by execution."""
        return all(
            (events := self.executions.get(execution)) is not None and events[-1].end >= last
            for execution, last in ends.items()
        )


async def read_on(got: Got, client: Client, conversation: str, rng: random.Random, enough: asyncio.Event) -> None:
    """Until cancelled. `enough` is set at each item: whoever waits looks whether it is all."""
    while True:
        count, most = 0, rng.choice((1, 7, 40, 40, 400, 4_000))
        try:
            async with contextlib.aclosing(client.follow(conversation, cursor=got.cursor)) as items:
                async for item in items:
                    got.take(item)
                    enough.set()
                    count += 1
                    if count >= most:
                        break
        except (ProblemError, BusError) as error:
            got.trouble.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.5)
        got.breaks += 1
