"""A whole backend in the test's process over any bus; a collector and a router played by hand; an SSE reader.

The collector's part writes frames as a collector would: by compare-and-set on its subject, with ordinals without holes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from support_admission import admit_conversation, admit_execution, admit_request
from support_openapi import documented
from tether import events as ev
from tether import subjects, topology
from tether.events import ConversationEvent, Event
from tether.frames import Frame, Position, encode, encode_event, message_id
from tether.ids import ExecutionTarget, default_workspace
from tether.kv import Bucket
from tether.owner import OwnerRecord, OwnerState, Tombstone
from tether.ports import Bus
from tether.subjects import parse_event
from tether_backend.config import BackendSettings, load_tokens
from tether_backend.http.app import create_app
from tether_backend.http.server import listen, make_server, url_of
from tether_backend.projector import Projector
from tether_backend.runtime import Deps
from tether_backend.service import assemble, recovery_worker
from tether_backend.store.engine import Database, open_database

DEADLINE_S = 30.0


async def eventually(condition: Callable[[], Awaitable[Any]], what: str, timeout_s: float = DEADLINE_S) -> Any:
    """The first true value of `condition`. Raises AssertionError naming `what`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = await condition()
        if value:
            return value
        assert time.monotonic() < deadline_s, f"{what} did not happen within {timeout_s:g} s"
        await asyncio.sleep(0.01)


# --- the log ---


def text_delta(ordinal: int, text: str, *, segment: str = "s1", offset: int = 0, at: int = 1000) -> Event:
    body = {"segment": segment, "text": text, "offset": offset}
    return Event(ordinal=ordinal, at=at + ordinal, type=ev.TEXT_DELTA, body=body)


def event(ordinal: int, kind: str, body: dict[str, Any], *, at: int = 1000) -> Event:
    return Event(ordinal=ordinal, at=at + ordinal, type=kind, body=body)


@dataclass
class Log:
    """One conversation's part of the log, written in order."""

    bus: Bus
    tenant: str
    conversation: str = "c1"
    workspace: str = ""
    _last: dict[str, int] = field(default_factory=dict)
    _admitted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.workspace = self.workspace or default_workspace(self.conversation)

    def subject(self, execution: str) -> str:
        return subjects.event(self.tenant, self.workspace, self.conversation, execution)

    async def admit(self, execution: str) -> None:
        """As the router does before anything of it is logged."""
        if execution not in self._admitted:
            self._admitted.add(execution)
            await admit_execution(self.bus, self.tenant, self.workspace, self.conversation, execution)

    async def frame(self, execution: str, events: Sequence[Event]) -> int:
        """Store one frame; its stream sequence."""
        await self.admit(execution)
        frame = Frame(first=events[0].ordinal, last=events[-1].end, pos=Position(record=0, index=0), events=[*events])
        subject = self.subject(execution)
        data = encode(frame)
        ack = await self.bus.publish(
            subject,
            data,
            msg_id=message_id(parse_event(subject), frame, data),
            expect_last=self._last.get(execution, 0),
        )
        self._last[execution] = ack.sequence
        return ack.sequence

    async def note(self, kind: str, id_: str, body: dict[str, Any], *, at: int = 500) -> int:
        """Store one conversation-level event."""
        await admit_conversation(self.bus, self.tenant, self.workspace, self.conversation)
        if kind in (ev.PROMPT_ADMITTED, ev.RESPONSE_CREATED):
            await admit_request(self.bus, self.tenant, self.workspace, self.conversation, str(body.get("request")))
        item = ConversationEvent(id=id_, generation=1, at=at, type=kind, body=body)
        ack = await self.bus.publish(self.subject("_"), encode_event(item), msg_id=f"{self.conversation}/{id_}")
        return ack.sequence

    async def prompt(self, request: str, response: str, execution: str, text: str = "hello") -> int:
        first = await self.note(
            ev.PROMPT_ADMITTED,
            f"{request}/prompt.admitted",
            {"request": request, "prompt_sequence": 1, "content": [{"type": "text", "text": text}]},
        )
        await self.note(
            ev.RESPONSE_CREATED,
            f"{request}/response.created",
            {
                "request": request,
                "response": response,
                "response_generation": 1,
                "execution": execution,
                "execution_generation": 1,
                "agent": "scripted",
            },
        )
        return first

    def target(self, execution: str, response: str = "r1") -> ExecutionTarget:
        return ExecutionTarget(
            tenant=self.tenant,
            workspace=self.workspace,
            conversation=self.conversation,
            response=response,
            response_generation=1,
            execution=execution,
            execution_generation=1,
            sandbox="sbx",
            boot="boot1",
            process_generation=1,
        )

    def started(self, execution: str, ordinal: int = 1) -> Event:
        body = {
            "boot": "boot1",
            "instance": "i1",
            "process": 1,
            "target": self.target(execution).model_dump(mode="json", exclude_none=True),
            "agent": "scripted",
            "request": "q1",
            "adapter_version": "1",
        }
        return event(ordinal, ev.EXECUTION_STARTED, body)

    async def own(self, execution: str | None, state: OwnerState = "running") -> None:
        """Write the owner record and the conversation's workspace, as the router does."""
        conversations = Bucket(self.bus, subjects.CONVERSATIONS)
        key = subjects.conversation_key(self.tenant, self.conversation)
        if await conversations.get(key) is None:
            await conversations.create(key, {"workspace": self.workspace}, op="test")
        record = OwnerRecord(
            state=state if execution else "idle",
            target=self.target(execution) if execution else None,
        )
        owners = Bucket(self.bus, subjects.OWNERS)
        key = subjects.owner_key(self.tenant, self.workspace, self.conversation)
        entry = await owners.get(key)
        if entry is not None:
            before = owners.parse(entry, OwnerRecord)
            stones = before.tombstones
            if before.target is not None and before.target.execution != execution:
                ended = before.target.execution
                stones = (*stones, Tombstone(execution=ended, outcome="completed", at=1))
            record = record.model_copy(update={"tombstones": stones})
        op = f"op{time.monotonic_ns()}"
        if entry is None:
            await owners.create(key, record.value(), op=op)
        else:
            await owners.update(key, record.value(), op=op, revision=entry.revision)


def ended(ordinal: int, outcome: str = "completed") -> list[Event]:
    return [
        event(ordinal, ev.RESPONSE_ENDED, {"outcome": outcome}),
        event(
            ordinal + 1,
            ev.EXECUTION_ENDED,
            {"outcome": outcome, "exit": 0, "proof": {"method": "pid_namespace", "at": 1}},
        ),
    ]


# --- the backend ---

TOKEN = "t0k3n-for-the-tests-only"


@dataclass
class Backend:
    """A running backend. `client` speaks for `tenant`."""

    deps: Deps
    url: str
    tenant: str
    client: httpx2.AsyncClient
    readers: list[Reader] = field(default_factory=list)

    def reader(self, conversation: str, tenant: str | None = None, *, token: str | None = None) -> Reader:
        """An event stream's reader, closed with the backend."""
        found = Reader(self.port, tenant or self.tenant, conversation, token=token)
        self.readers.append(found)
        return found

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def headers(self, tenant: str | None = None) -> dict[str, str]:
        return {"Authorization": f"Bearer {token_of(tenant or self.tenant)}"}

    async def projected(self, conversation: str, execution: str, ordinal: int) -> dict[str, Any]:
        """The history once the projection has applied that much."""

        async def look() -> dict[str, Any] | None:
            answer = await self.client.get(f"/v1/conversations/{conversation}")
            if answer.status_code != 200:
                return None
            value: dict[str, Any] = answer.json()
            applied = {one["execution"]: one["applied"] for one in value["executions"]}
            return value if applied.get(execution, 0) >= ordinal else None

        found: dict[str, Any] = await eventually(look, f"projection of {execution} up to {ordinal}")
        return found


def token_of(tenant: str) -> str:
    return f"{TOKEN}-{tenant}"


def write_tokens(path: Path, tenants: Sequence[str]) -> Path:
    entries = [{"token": token_of(tenant), "tenant": tenant, "name": f"user of {tenant}"} for tenant in tenants]
    path.write_text(json.dumps(entries))
    path.chmod(0o600)
    return path


async def ensure_tenants(bus: Bus, tenants: Sequence[str]) -> None:
    await bus.ensure(topology.base())
    for name in tenants:
        await bus.ensure(topology.tenant(name, max_bytes=64 << 20))


@contextlib.asynccontextmanager
async def running_backend(
    bus: Bus,
    tenants: Sequence[str],
    folder: Path,
    *,
    database: Database | None = None,
    project: bool = True,
    **more_settings: Any,
) -> AsyncIterator[Backend]:
    """Feeds, projectors (without their lease), HTTP on a free port."""
    await ensure_tenants(bus, tenants)
    settings = BackendSettings(
        tenants=",".join(tenants), http_tokens_file=write_tokens(folder / "tokens.json", tenants), **more_settings
    )
    own = database is None
    db = database or await open_database(f"sqlite+aiosqlite:///{folder / 'db.sqlite3'}")
    deps = assemble(settings, load_tokens(settings.http_tokens_file, settings.tenant_names), bus, db)
    listener = listen("127.0.0.1", 0)
    server = make_server(create_app(deps))
    url = url_of(listener)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(feed.run(), name=f"feed-{name}") for name, feed in deps.feeds.items()]
            if project:
                tasks += [group.create_task(one.run(), name="projector") for one in deps.projectors.values()]
                tasks += [group.create_task(recovery_worker(deps, name).run(), name="recovery") for name in tenants]
            web = group.create_task(server.serve(sockets=[listener]), name="http")
            await server.up.wait()
            for feed in deps.feeds.values():
                await feed.ready.wait()
            if project:
                for one in deps.projectors.values():
                    await one.bound.wait()
            headers = {"Authorization": f"Bearer {token_of(tenants[0])}"}
            hooks: Any = {"response": [documented]}
            async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=30.0, event_hooks=hooks) as client:
                backend = Backend(deps, url, tenants[0], client)
                try:
                    yield backend
                finally:
                    for reader in backend.readers:
                        await reader.close()
            for feed in deps.feeds.values():
                feed.close()
            server.should_exit = True
            await web
            for task in tasks:
                task.cancel()
    finally:
        listener.close()
        if own:
            await db.close()


@contextlib.asynccontextmanager
async def projecting(projector: Projector) -> AsyncIterator[None]:
    """The projector works while the block runs. Raises what ended it."""
    work = asyncio.create_task(projector.run(), name="projector")
    try:
        yield
    finally:
        work.cancel()
        found = (await asyncio.gather(work, return_exceptions=True))[0]
        if isinstance(found, Exception):
            raise found


async def project_all(projector: Projector, bus: Bus) -> None:
    """Run a projector until its consumer has nothing left and nothing unacked, then stop it."""

    async def done() -> bool:
        state = await bus.consumer(projector.stream, projector.durable)
        bound = projector.bound.is_set()
        return bound and state is not None and state.pending == 0 and state.ack_pending == 0

    async with projecting(projector):
        await eventually(done, "the projection caught up")


# --- SSE ---


@dataclass(frozen=True)
class Sse:
    name: str
    data: Any
    id: str | None

    @property
    def key(self) -> tuple[str, int] | str:
        """The event's identity."""
        if self.data.get("id") is not None:
            return str(self.data["id"])
        return str(self.data["execution"]), int(self.data["ordinal"])


class Reader:
    """An SSE connection over a plain socket, so that a test may stall it, cut it, and read as little as it likes."""

    def __init__(self, port: int, tenant: str, conversation: str, *, token: str | None = None) -> None:
        self._port = port
        self._token = token or token_of(tenant)
        self._conversation = conversation
        self.cursor: str | None = None
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self._buffer = b""
        self._ended = False
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(
        self, cursor: str | None = None, *, until: str | None = None, query: bool = False, small: bool = False
    ) -> Reader:
        """Connect; with a cursor (or the last id seen) continue. `small`: with buffers that are full at once."""
        await self.close()
        plug = socket.socket()
        if small:
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        plug.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plug, ("127.0.0.1", self._port))
        self._reader, self._writer = await asyncio.open_connection(sock=plug, limit=1 << (16 if small else 22))
        cursor = cursor if cursor is not None else self.cursor
        query_text = "&".join(
            part
            for part in ((f"cursor={cursor}" if cursor and query else ""), f"until={until}" if until else "")
            if part
        )
        path = f"/v1/conversations/{self._conversation}/events" + (f"?{query_text}" if query_text else "")
        lines = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{self._port}", f"Authorization: Bearer {self._token}"]
        if cursor and not query:
            lines.append(f"Last-Event-ID: {cursor}")
        self._writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        self._buffer, self._ended, self.body = b"", False, b""
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
        status, *rest = head.decode().split("\r\n")
        self.status = int(status.split()[1])
        self.headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in rest if line)}
        if self.status != 200 and self.headers.get("content-length", "0") != "0":
            self.body = await self._reader.readexactly(int(self.headers["content-length"]))
        return self

    async def _chunk(self) -> bool:
        """One HTTP chunk into the buffer; False at the end of the response."""
        assert self._reader is not None
        size = int(await self._reader.readline() or b"0", 16)
        if size:
            self._buffer += await self._reader.readexactly(size)
        await self._reader.readline()
        return size > 0

    async def next(self, timeout_s: float = DEADLINE_S) -> Sse | None:
        """The next frame (comments are skipped), None at the end. Raises ConnectionError where it was cut."""
        async with asyncio.timeout(timeout_s):
            while True:
                while b"\n\n" in self._buffer:
                    block, _, self._buffer = self._buffer.partition(b"\n\n")
                    found = _parse(block)
                    if found is not None:
                        if found.id is not None:
                            self.cursor = found.id
                        return found
                if self._ended:
                    return None
                try:
                    self._ended = not await self._chunk()
                except (asyncio.IncompleteReadError, ValueError) as error:
                    raise ConnectionError("the stream was cut") from error

    async def events(self, count: int) -> list[Sse]:
        """The next `count` events, other frames passed over."""
        found: list[Sse] = []
        while len(found) < count:
            one = await self.next()
            assert one is not None, f"the stream ended after {len(found)} of {count} events"
            if one.name == "message":
                found.append(one)
        return found

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None


def _parse(block: bytes) -> Sse | None:
    name, id_, data = "message", None, []
    for line in block.decode().split("\n"):
        key, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if key == "event":
            name = value
        elif key == "id":
            id_ = value
        elif key == "data":
            data.append(value)
    return Sse(name, json.loads("\n".join(data)), id_) if data else None
