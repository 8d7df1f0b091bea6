"""The demo's readers: each collects what it got as plain events, the way the oracle wants them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tether import Client
from tether.client.items import ConversationItem, ExecutionItem, GapItem, Item, PositionChanged, SnapshotItem
from tether.events import RESPONSE_ENDED


@dataclass(slots=True)
class Reader:
    """What one reader got. `breaks`: how often its connection was broken off; it goes on from its cursor alone."""

    name: str
    events: list[dict[str, Any]] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    breaks: int = 0
    cursor: str | None = None
    ended: bool = False

    def take(self, item: Item) -> None:
        self.cursor = item.cursor
        match item:
            case ExecutionItem():
                event = {"type": item.type, "body": item.event.body, "execution": item.execution}
                self.events.append(event)
                self.ended = self.ended or item.type == RESPONSE_ENDED
            case ConversationItem():
                pass
            case GapItem() | SnapshotItem() | PositionChanged():
                self.trouble.append(type(item).__name__)
            case _:
                pass

    async def read(self, client: Client, conversation: str) -> None:
        """Without interruption, until the response has ended."""
        async with contextlib.aclosing(client.follow(conversation, cursor=self.cursor)) as items:
            async for item in items:
                self.take(item)
                if self.ended:
                    return

    async def read_broken(self, client: Client, conversation: str, every: int) -> None:
        """The connection is broken off after each `every` items; the next one knows nothing but the cursor."""
        while not self.ended:
            count = 0
            async with contextlib.aclosing(client.follow(conversation, cursor=self.cursor)) as items:
                async for item in items:
                    self.take(item)
                    count += 1
                    if self.ended:
                        return
                    if count >= every:
                        break
            self.breaks += 1


def show(event: Mapping[str, Any]) -> str | None:
    """One line for the terminal, or None for what the demo does not show."""
    body = event["body"]
    match event["type"]:
        case "text.completed":
            return f"  agent   {body['text'].strip()}"
        case "tool.started":
            return f"  tool    {body['name']} started"
        case "tool.completed":
            return f"  tool    {body['status']}: {body.get('output')}"
        case "interaction.requested":
            return f"  asks    may {body['name']} run?"
        case "interaction.resolved":
            return f"  answer  {body['outcome']}"
        case "response.ended":
            return f"  end     {body['outcome']}"
        case "execution.ended":
            return f"  proof   {(body.get('proof') or {}).get('method')}"
        case _:
            return None
