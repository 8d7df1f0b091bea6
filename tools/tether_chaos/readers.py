"""Readers that are broken off and go on from their cursor alone, and that remember everything they were given.

sse      what a browser does: the event stream, `Last-Event-ID` on reconnect; nothing is dropped or repaired
ws       a WebSocket with `cursor` on reconnect, likewise bare
http     the SDK over HTTP      nats     the SDK over NATS      durable  the SDK's named reader
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidHandshake, WebSocketException

from tether import Client
from tether.api import StreamEvent
from tether.client.items import ConversationItem, ExecutionItem, GapItem, Item, PositionChanged, SnapshotItem
from tether.client.sse import SseParser, StreamDamagedError
from tether.errors import BusError, ProblemError
from tether.events import Event
from tether_chaos.outages import Receipt
from tether_chaos.plan import ReaderKind
from tether_cli.state import SetState

# Before a bare reader connects again: longer while nobody answers.
_PAUSE_MIN_S: Final = 0.1
_PAUSE_MAX_S: Final = 1.0
_SILENT_S: Final = 25.0
_AGAIN: Final = frozenset({502, 503, 504})

Frames = AsyncGenerator[tuple[str, str, str], None]  # name, data, cursor


@dataclass(slots=True)
class Got:
    """What one reader got of one conversation, in order. `receipts`: when each event of an execution came."""

    name: str
    kind: ReaderKind = "nats"
    executions: dict[str, list[Event]] = field(default_factory=dict)
    conversation: list[str] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    breaks: int = 0
    cursor: str | None = None
    first_cursor: str | None = None  # behind the first event of an execution
    receipts: list[Receipt] = field(default_factory=list)
    begins: dict[str, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    pulse: asyncio.Event = field(default_factory=asyncio.Event)  # set at each event

    def take(self, item: Item) -> None:
        self.cursor = item.cursor
        match item:
            case ExecutionItem():
                self.first_cursor = self.first_cursor or item.cursor
                self.take_event(item.execution, item.event)
            case ConversationItem():
                self.conversation.append(item.event.id)
            case GapItem() | SnapshotItem() | PositionChanged():
                self.trouble.append(f"{type(item).__name__} {getattr(item, 'reason', '')}")
            case _:
                pass

    def take_event(self, execution: str, event: Event) -> None:
        now_s = time.time()
        self.executions.setdefault(execution, []).append(event)
        self.receipts.append(Receipt(now_s, event.at / 1000))
        self.begins.setdefault(execution, now_s)
        self.ends[execution] = now_s
        self.pulse.set()

    def take_frame(self, name: str, data: str, cursor: str) -> None:
        """A frame of the event stream or the WebSocket, as it is."""
        if cursor:
            self.cursor = cursor
        if name in ("problem", "snapshot"):
            self.trouble.append(f"{name} {data[:200]}")
        if name != "message":
            return
        value = StreamEvent.model_validate_json(data)
        if value.execution is not None and value.ordinal is not None:
            event = Event(ordinal=value.ordinal, last=value.last, at=value.at, type=value.type, body=value.body)
            self.take_event(value.execution, event)
        elif value.id is not None:
            self.conversation.append(value.id)

    def has(self, ends: dict[str, int]) -> bool:
        """Everything up to these ordinals, by execution."""
        return all(
            (events := self.executions.get(execution)) is not None and events[-1].end >= last
            for execution, last in ends.items()
        )


async def read_on(got: Got, client: Client, conversation: str, rng: random.Random) -> None:
    """By the SDK, until cancelled."""
    durable = got.name.replace(" ", "-") if got.kind == "durable" else None
    while True:
        most = _most(rng)
        count = 0
        try:
            following = client.follow(conversation, cursor=got.cursor, durable=durable)
            async with contextlib.aclosing(following) as items:
                async for item in items:
                    got.take(item)
                    count += 1
                    if count >= most:
                        break
        except (ProblemError, BusError) as error:
            got.trouble.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.5)
        got.breaks += 1


async def read_bare(got: Got, up: SetState, conversation: str, rng: random.Random) -> None:
    """By SSE or WebSocket without the SDK, until cancelled."""
    pause_s = _PAUSE_MIN_S
    # One client for all connections of this reader: making one loads certificates, which takes longer than a stream.
    async with httpx2.AsyncClient(base_url=up.http_url, trust_env=False) as client:
        while True:
            most, count = _most(rng), 0
            frames = (
                _event_stream(client, up.token, conversation, got.cursor)
                if got.kind == "sse"
                else _web_socket(up, conversation, got.cursor)
            )
            try:
                async with contextlib.aclosing(frames) as coming:
                    async for name, data, cursor in coming:
                        pause_s = _PAUSE_MIN_S
                        got.take_frame(name, data, cursor)
                        count += 1
                        if count >= most:
                            break
            except _ServerError as error:
                if error.status not in _AGAIN:
                    got.trouble.append(str(error))
            except (httpx2.TransportError, StreamDamagedError, WebSocketException, OSError, TimeoutError):
                pass  # the service was killed: again, from the cursor
            got.breaks += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)


def _most(rng: random.Random) -> int:
    return rng.choice((1, 7, 40, 400, 4_000, 4_000))


class _ServerError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:200]}")
        self.status = status


async def _event_stream(client: httpx2.AsyncClient, token: str, conversation: str, cursor: str | None) -> Frames:
    headers = {"authorization": f"Bearer {token}", "accept": "text/event-stream"}
    if cursor is not None:
        headers["last-event-id"] = cursor
    timeout = httpx2.Timeout(_SILENT_S, connect=2.0)
    path = f"/v1/conversations/{conversation}/events"
    async with client.stream("GET", path, headers=headers, timeout=timeout) as answer:
        if answer.status_code != 200:
            raise _ServerError(answer.status_code, (await answer.aread()).decode("utf-8", "replace"))
        parser = SseParser()
        async for chunk in answer.aiter_bytes():
            for event in parser.feed(chunk):
                yield event.name, event.data, event.id if event.own_id else ""


async def _web_socket(up: SetState, conversation: str, cursor: str | None) -> Frames:
    url = f"{up.http_url.replace('http://', 'ws://')}/v1/conversations/{conversation}/ws"
    url += "" if cursor is None else f"?cursor={cursor}"
    headers = {"Authorization": f"Bearer {up.token}"}
    try:
        connection = await connect(
            url, additional_headers=headers, compression=None, proxy=None, max_size=16 << 20, open_timeout=5.0
        )
    except InvalidHandshake as error:
        status = getattr(getattr(error, "response", None), "status_code", 503)
        raise _ServerError(int(status), str(error)) from None
    try:
        while True:
            async with asyncio.timeout(_SILENT_S):
                text = await connection.recv()
            frame: dict[str, Any] = json.loads(text)
            yield frame["frame"], json.dumps(frame["data"]), frame["id"] or ""
    finally:
        connection.transport.abort()
