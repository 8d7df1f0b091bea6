"""`GET /v1/conversations/{c}/events`: one reader's stream, from a cursor to the live end.

    before headers   token, ids, cursor (422), the bus (503), the end that `until` asks for reached already (204)
    open             the first frame carries an id
    judge            cursor changed → problem, snapshot; evicted → snapshot (problem where an ordinal is missing)
    round            mailbox in place; read the log up to the feed's position of then, and up to the watermark
                     the mailbox overflowed meanwhile → another round
    live             drain the mailbox; one write for all that waits; a silence → a heartbeat
                     overflow → cut: the connection is aborted, the cursor stays good
                     stale → round · the log changed → judge, round · service stops → end of the response

Once headers are out a stream is never turned into an error: while the bus is away it waits, with heartbeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

import structlog
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tether import subjects
from tether.api import EVENT_STREAM_TYPE, PAGE_DEFAULT, ConversationHistory
from tether.cursor import Cursor, Standing
from tether.cursor import judge as judge_cursor
from tether.errors import BusError, Code, problem
from tether.ids import default_workspace
from tether.limits import SSE_BUFFER_BYTES_MAX, SSE_HEARTBEAT_S
from tether.ports import Bus, StreamState
from tether_backend.core.stream import HEARTBEAT, Hole, LogMessage, ReaderView, decode
from tether_backend.feed import Feed, Mailbox, Turn
from tether_backend.http.server import ABORT
from tether_backend.runtime import Deps

_log = structlog.get_logger("tether.sse")
STALL_S: Final = 30.0  # one write may take so long; a reader that takes nothing for longer is cut
_RETRY_S: Final = 0.25
_IDLE_LOOK_S: Final = 0.5  # between looks at the owner record, for `until=idle`
_LAG_WAIT_S: Final = 0.02
_WRITE_BYTES_MAX: Final = 256 * 1024  # of one write while replaying


class CutError(Exception):
    """The reader was too slow, or its connection is gone."""


async def standing(bus: Bus, stream: str, cursor: Cursor) -> tuple[Standing, StreamState | None]:
    """What the log says of a cursor, and the log's state. Raises BusError."""
    state = await bus.state(stream)
    if state is None:
        return (Standing.CURRENT if cursor.sequence == 0 else Standing.CHANGED), None
    message = await bus.at(stream, cursor.sequence) if 0 < cursor.sequence <= state.last_sequence else None
    return judge_cursor(cursor, message, last_sequence=state.last_sequence), state


async def history_page(
    deps: Deps, tenant: str, conversation: str, before: int | None, limit: int
) -> ConversationHistory:
    """One page of history, its cursor taken before the rows. Raises BusError, SQLAlchemyError."""
    await deps.caught_up(tenant)
    cursor = await deps.runtime.floor(tenant)
    return await deps.history.conversation(
        tenant,
        conversation,
        cursor=cursor.encode(tenant, conversation),
        workspace=default_workspace(conversation),
        before=before,
        limit=limit,
    )


class EventStream(Response):
    """An ASGI response that is one reader. Everything before the headers has been decided."""

    media_type = EVENT_STREAM_TYPE

    def __init__(self, deps: Deps, view: ReaderView, found: Standing) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._deps = deps
        self._view = view
        self._found = found
        self._feed: Feed = deps.feeds[view.tenant]
        self._filter = f"tether.event.{view.tenant}.*.{view.conversation}.*"
        self._stream = subjects.events_stream(view.tenant)
        self._send: Send | None = None
        self._abort: Callable[[], None] | None = None
        self._live_told = False
        self._parts: list[bytes] = []  # to be written together
        self._size_bytes = 0
        self._written_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._abort = scope.get("extensions", {}).get(ABORT, {}).get("call")
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        mailbox = Mailbox(SSE_BUFFER_BYTES_MAX, self._cut)
        self._feed.attach(self._view.conversation, mailbox)
        self._deps.metrics.readers.inc()
        reader = asyncio.create_task(self._read(mailbox), name=f"sse-{self._view.conversation}")
        gone = asyncio.create_task(_disconnected(receive), name="sse-disconnect")
        try:
            await asyncio.wait((reader, gone), return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except CutError:
            if self._abort is not None:
                self._abort()
        finally:
            self._feed.detach(self._view.conversation, mailbox)
            self._deps.metrics.readers.dec()
            for task in (reader, gone):
                task.cancel()
            await asyncio.gather(reader, gone, return_exceptions=True)

    def _cut(self) -> None:
        """The mailbox overflowed: the write that hangs is released by aborting the connection."""
        _log.warning("sse_reader_cut", conversation=self._view.conversation)
        self._deps.metrics.cut.inc()
        if self._abort is not None:
            self._abort()

    def _put(self, data: bytes) -> None:
        self._parts.append(data)
        self._size_bytes += len(data)

    async def _flush(self) -> None:
        """One write of all that was put. Raises CutError."""
        data = b"".join(self._parts)
        self._parts, self._size_bytes = [], 0
        if not data:
            return
        assert self._send is not None
        try:
            async with asyncio.timeout(STALL_S):
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            self._deps.metrics.cut.inc()
            raise CutError from None
        self._written_s = asyncio.get_running_loop().time()
        self._deps.metrics.sse_writes.inc()
        self._deps.metrics.sse_bytes.inc(len(data))

    async def _heartbeat(self) -> None:
        if asyncio.get_running_loop().time() - self._written_s >= SSE_HEARTBEAT_S:
            self._put(HEARTBEAT)
            await self._flush()

    async def _read(self, mailbox: Mailbox) -> None:
        """The reader's life; returns when the stream ends. Raises CutError."""
        view = self._view
        self._put(view.open_frame())
        await self._flush()
        found: Standing | None = self._found
        while view.end is None and mailbox.turn is not Turn.CLOSED:
            try:
                if mailbox.turn is Turn.RESET:
                    found = None
                mailbox.restart()
                if found is not Standing.CURRENT:
                    await self._rejudge(found)
                    found = Standing.CURRENT
                await self._round()
                if mailbox.overflowed or mailbox.turn is not None or view.end is not None:
                    continue
                if not self._live_told:
                    self._live_told = True
                    self._put(view.live_frame())
                mailbox.live = True
                await self._follow(mailbox)
            except (BusError, SQLAlchemyError) as error:
                _log.info("sse_waits", detail=type(error).__name__)
                await self._flush()  # what was told so far moves the cursor
                await self._heartbeat()
                await asyncio.sleep(_RETRY_S)
        if view.end is not None:
            self._put(view.end_frame())
        await self._flush()

    # --- the log ---

    async def _rejudge(self, found: Standing | None) -> None:
        """The cursor's standing (None: to be asked) → a problem and a snapshot where it no longer leads on."""
        if found is None:
            found, state = await standing(self._deps.bus, self._stream, self._view.cursor)
            if state is not None:
                self._view.watermark = max(self._view.watermark, state.last_sequence)
        if found is not Standing.CURRENT:
            await self._snapshot(found)

    async def _snapshot(self, found: Standing) -> None:
        """What happened and the state, told once both are at hand; the reader goes on from the state's cursor."""
        view = self._view
        history = await history_page(self._deps, view.tenant, view.conversation, None, PAGE_DEFAULT)
        state = await self._deps.bus.state(self._stream)
        if found is Standing.CHANGED:
            what = problem(Code.CURSOR_POSITION_CHANGED, "the log was made anew or put back; a snapshot follows")
            self._put(view.problem_frame(what))
        elif any(gap.reason == "retention_gap" for gap in history.gaps):
            what = problem(Code.RETENTION_GAP, "a part of the conversation is no longer retained; a snapshot follows")
            self._put(view.problem_frame(what))
        cursor = Cursor.decode(history.cursor, view.tenant, view.conversation)
        view.restore(cursor, _applied(history), 0 if state is None else state.last_sequence)
        self._put(view.snapshot_frame(history.model_dump_json(exclude_none=True).encode()))

    async def _fill(self, hole: Hole) -> None:
        """Told once: the problem, and the state with what the projection has of it. The reader stays where it is."""
        view = self._view
        what = problem(
            Code.RETENTION_GAP,
            "events of an execution are no longer retained; a snapshot follows",
            execution=hole.execution,
            first=hole.first,
            last=hole.last,
        )
        history = await history_page(self._deps, view.tenant, view.conversation, None, PAGE_DEFAULT)
        view.learn(_applied(history))
        history = history.model_copy(update={"cursor": view.encoded_cursor})
        self._put(view.problem_frame(what))
        self._put(view.snapshot_frame(history.model_dump_json(exclude_none=True).encode()))

    async def _round(self) -> None:
        """Read the log up to what the mailbox does not have, and to the watermark."""
        target = max(self._feed.position, self._view.watermark)
        async for message in self._messages(target):
            await self._take(message)
            if self._size_bytes >= _WRITE_BYTES_MAX:
                await self._flush()
            if self._view.end is not None:
                break

    async def _messages(self, target: int) -> AsyncIterator[LogMessage]:
        """The conversation's messages after the cursor, until nothing up to `target` is left."""
        bus = self._deps.bus
        after = self._view.read_after
        while after < target:
            batch = await bus.read(self._stream, after, self._filter)
            for stored in batch:
                after = stored.sequence
                yield decode(stored.subject, stored.sequence, stored.stored_at_ns, stored.data)
            if batch:
                continue
            # Empty: the end, or a follower that lags. The leader knows.
            following = await bus.next_after(self._stream, after, self._filter)
            if following is None or following.sequence > target:
                return
            await asyncio.sleep(_LAG_WAIT_S)

    async def _take(self, message: LogMessage) -> None:
        """Put what the message adds. A hole that the snapshot does not fill has been told as a gap."""
        found = self._view.take(message)
        if isinstance(found, Hole):
            _log.warning("sse_hole", execution=found.execution, first=found.first, last=found.last)
            await self._fill(found)
            found = self._view.take(message)
            if isinstance(found, Hole):
                self._view.accept(found)
                found = self._view.take(message)
        assert not isinstance(found, Hole)
        self._put(found.data)

    # --- live ---

    async def _follow(self, mailbox: Mailbox) -> None:
        """Drain the mailbox until the reader must do something else. Raises CutError."""
        view = self._view
        idle = view.until is not None and view.until.response is None
        while True:
            for message in mailbox.take():
                await self._take(message)
                if view.end is not None:
                    return
            await self._flush()
            if mailbox.overflowed:
                raise CutError
            if mailbox.turn is not None:
                return
            if idle and await self._finished_idle(mailbox):
                return
            if not await mailbox.wait(_IDLE_LOOK_S if idle else SSE_HEARTBEAT_S):
                await self._heartbeat()

    async def _finished_idle(self, mailbox: Mailbox) -> bool:
        if not await self._deps.runtime.idle(self._view.tenant, self._view.conversation):
            return False
        # Whatever was logged before the record went idle must have been told.
        following = await self._deps.bus.next_after(self._stream, self._view.cursor.sequence, self._filter)
        if following is not None or mailbox.pending:
            return False
        self._view.finish_idle()
        return True


def _applied(history: ConversationHistory) -> dict[str, int]:
    return {one.execution: one.applied for one in history.executions}


async def _disconnected(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
