"""One reader of a conversation, from a cursor to the live end, whatever the transport: `sse` and `ws` are its sinks.

    before headers   token, ids, cursor (422), the bus (503), the end that `until` asks for reached already
    open             the first frame carries an id
    judge            cursor changed → problem, snapshot; evicted → snapshot (problem where an ordinal is missing)
    round            mailbox in place; read the log up to the feed's position of then, and up to the watermark
                     the mailbox overflowed meanwhile → another round
    live             drain the mailbox; one write for all that waits; a silence → a heartbeat
                     overflow → cut: the connection is given up, the cursor stays good
                     stale → round · the log changed → judge, round · service stops → end

Once a stream is open it is never turned into an error: while the bus is away it waits, with heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tether import events as ev
from tether import subjects
from tether.api import PAGE_DEFAULT, ConversationHistory
from tether.cursor import Cursor, Standing
from tether.cursor import judge as judge_cursor
from tether.deletion import DeletionRecord, check_not_deleted, deleted_problem, deletion_of
from tether.errors import BusError, Code, Problem, ProblemError, problem
from tether.events import ConversationEvent
from tether.failpoints import failpoint
from tether.ids import default_workspace
from tether.limits import SSE_BUFFER_BYTES_MAX, SSE_HEARTBEAT_S
from tether.ports import Bus, StreamState
from tether_backend.core.stream import Hole, LogMessage, ReaderView, Until, Wire, decode_stored
from tether_backend.feed import Feed, Mailbox, Turn
from tether_backend.runtime import Deps

_log = structlog.get_logger("tether.stream")
STALL_S: Final = 30.0  # one write may take so long; a reader that takes nothing for longer is cut
_RETRY_S: Final = 0.25
_IDLE_LOOK_S: Final = 0.5  # between looks at the owner record, for `until=idle`
_LAG_WAIT_S: Final = 0.02
_WRITE_BYTES_MAX: Final = 256 * 1024  # of one write while replaying


class CutError(Exception):
    """The reader was too slow, or its connection is gone."""


class Sink(Protocol):
    """Where a course writes: one connection."""

    async def write(self, data: bytes) -> None:
        """Whole frames of the reader's wire. Returns once there is room for more; raises OSError where it is gone."""

    def cut(self) -> None:
        """Give the connection up, and a write that hangs with it. Never waits."""


class Ending(Enum):
    """How a course was over."""

    END = "end"  # what `until` asked for was told
    STOPPED = "stopped"  # the service stops
    CUT = "cut"  # too slow
    LEFT = "left"  # the reader's side is done


@dataclass(frozen=True, slots=True)
class Opening:
    """What was decided before a stream is opened. `over`: the end that `until` asks for lies before the cursor."""

    view: ReaderView
    found: Standing
    over: bool


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


def proven(deps: Deps, tenant: str) -> None:
    """Rows of a database that may be an older copy are not shown. Raises ProblemError."""
    if not deps.projectors[tenant].bound.is_set():
        raise ProblemError(problem(Code.RUNTIME_UNAVAILABLE, "the projection is not bound yet", retry_after_s=1.0))


async def open_stream(
    deps: Deps, tenant: str, conversation: str, cursor: str | None, until: str | None, wire: Wire
) -> Opening:
    """Everything that may refuse a reader. Raises InvalidError (`cursor`, `until`), ProblemError, BusError,
    SQLAlchemyError."""
    deps.quotas.judge_reader(tenant)
    asked = None if until is None else Until.parse(until)
    at = Cursor.beginning() if not cursor else Cursor.decode(cursor, tenant, conversation)
    if not deps.bus.connected or not deps.feeds[tenant].ready.is_set():
        raise ProblemError(problem(Code.RUNTIME_UNAVAILABLE, "the log cannot be read yet", retry_after_s=1.0))
    await check_not_deleted(deps.bus, tenant, conversation)
    found, state = await standing(deps.bus, subjects.events_stream(tenant), at)
    if found is not Standing.CURRENT:
        proven(deps, tenant)
    view = ReaderView(tenant, conversation, at, 0 if state is None else state.last_sequence, asked, wire)
    if asked is not None and asked.response is not None:
        await _resolve_until(deps, view, asked.response)
    over = asked is not None and bool(cursor) and found is Standing.CURRENT and await _reached(deps, view, asked)
    return Opening(view, found, over)


async def _resolve_until(deps: Deps, view: ReaderView, response: str) -> None:
    """Which execution answers the response: from the rows, the owner record, or the log."""
    row = await deps.history.response(view.tenant, view.conversation, response)
    if row is not None and row[0] is not None:
        view.until_execution = row[0]
        return
    workspace = await deps.runtime.workspace(view.tenant, view.conversation)
    if workspace is None:
        return
    owner = await deps.runtime.owner(view.tenant, workspace, view.conversation)
    if owner is not None and owner.target is not None and owner.target.response == response:
        view.until_execution = owner.target.execution


async def _reached(deps: Deps, view: ReaderView, until: Until) -> bool:
    """Whether the end that is asked for lies at or before the cursor."""
    stream = subjects.events_stream(view.tenant)
    if until.response is None:
        every = f"tether.event.{view.tenant}.*.{view.conversation}.*"
        following = await deps.bus.next_after(stream, view.read_after, every)
        whole = following is None or (following.sequence == view.cursor.sequence and _rest(view, following) == 0)
        return whole and await deps.runtime.idle(view.tenant, view.conversation)
    row = await deps.history.response(view.tenant, view.conversation, until.response)
    if view.until_execution is None:
        return row is not None and row[1]
    subject = f"tether.event.{view.tenant}.*.{view.conversation}.{view.until_execution}"
    after = view.read_after
    seen_end = row is not None and row[1]
    while True:
        batch = await deps.bus.read(stream, after, subject)
        for stored in batch:
            after = stored.sequence
            message = decode_stored(stored)
            start = view.cursor.index if stored.sequence == view.cursor.sequence else 0
            events = [] if message is None else getattr(message.content, "events", [])
            if any(event.type == ev.RESPONSE_ENDED for event in events[start:]):
                return False
            # The response's end comes before its execution's, in the same frame or an earlier one.
            seen_end = seen_end or any(event.type == ev.EXECUTION_ENDED for event in events)
        if not batch:
            return seen_end


def _rest(view: ReaderView, stored: Any) -> int:
    message = decode_stored(stored)
    return 0 if message is None else max(0, message.count - view.cursor.index)


class Course:
    """One reader: see the module."""

    def __init__(self, deps: Deps, opening: Opening, sink: Sink) -> None:
        view = opening.view
        self._deps = deps
        self._view = view
        self._found = opening.found
        self._sink = sink
        self._loop = asyncio.get_running_loop()  # to look for it at each write is a system call
        self._feed: Feed = deps.feeds[view.tenant]
        self._filter = f"tether.event.{view.tenant}.*.{view.conversation}.*"
        self._stream = subjects.events_stream(view.tenant)
        self._live_told = False
        self._parts: list[bytes] = []  # to be written together
        self._size_bytes = 0
        self._written_s = 0.0
        self._writing_since_s: float | None = None  # while a write is under way
        self._stalled = False
        self._timer: asyncio.TimerHandle | None = None
        self._mailbox = Mailbox(SSE_BUFFER_BYTES_MAX, self.cut, view.wire)

    @contextlib.contextmanager
    def holding(self, size_bytes: int) -> Iterator[None]:
        """So many bytes wait for this reader besides the stream's: they count to its bound."""
        self._mailbox.hold(size_bytes)
        try:
            yield
        finally:
            self._mailbox.release(size_bytes)

    async def run(self, left: Coroutine[Any, Any, None]) -> Ending:
        """Until it is over; `left` returns once the reader's side is done with it."""
        mailbox = self._mailbox
        self._feed.attach(self._view.conversation, mailbox)
        failpoint("backend.attach.subscribed")
        self._deps.metrics.readers.inc()
        reader = asyncio.create_task(self._read(mailbox), name=f"reader-{self._view.conversation}")
        gone = asyncio.create_task(left, name="reader-left")
        self._watch(reader)
        try:
            await asyncio.wait((reader, gone), return_when=asyncio.FIRST_COMPLETED)
            if self._stalled:
                raise CutError
            if not reader.done():
                return Ending.LEFT
            reader.result()
            return Ending.STOPPED if self._view.end is None else Ending.END
        except CutError:
            self._sink.cut()
            return Ending.CUT
        finally:
            self._feed.detach(self._view.conversation, mailbox)
            self._deps.metrics.readers.dec()
            if self._timer is not None:
                self._timer.cancel()
            for task in (reader, gone):
                task.cancel()
            await asyncio.gather(reader, gone, return_exceptions=True)

    def cut(self) -> None:
        """Too slow: the write that hangs is released by giving the connection up."""
        _log.warning("reader_cut", conversation=self._view.conversation, wire=self._view.wire.name)
        self._deps.metrics.cut.inc()
        self._sink.cut()

    def _watch(self, reader: asyncio.Task[None]) -> None:
        """A write that takes longer than STALL_S ends the reader. One timer for all its writes, set again when it is
        due: a timer of its own for each write costs more than wording what is written."""
        left_s = STALL_S if self._writing_since_s is None else self._writing_since_s + STALL_S - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._watch, reader)
            return
        self._stalled = True
        self.cut()
        reader.cancel()

    def _put(self, data: bytes) -> None:
        self._parts.append(data)
        self._size_bytes += len(data)

    async def _flush(self) -> None:
        """One write of all that was put; `_watch` ends one that hangs. Raises CutError."""
        data = b"".join(self._parts)
        self._parts, self._size_bytes = [], 0
        if not data:
            return
        self._writing_since_s = self._loop.time()
        try:
            await self._sink.write(data)
        except OSError:
            raise CutError from None
        self._writing_since_s = None
        self._written_s = self._loop.time()
        self._deps.metrics.sse_writes.inc()
        self._deps.metrics.sse_bytes.inc(len(data))

    async def _heartbeat(self) -> None:
        if self._loop.time() - self._written_s >= SSE_HEARTBEAT_S:
            self._put(self._view.wire.heartbeat)
            await self._flush()

    async def _read(self, mailbox: Mailbox) -> None:
        """The reader's life; returns when the stream ends. Raises CutError."""
        view = self._view
        self._put(view.open_frame())
        await self._flush()
        failpoint("backend.attach.opened")
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
                failpoint("backend.attach.log_read")
                if mailbox.overflowed or mailbox.turn is not None or view.end is not None:
                    continue
                if not self._live_told:
                    self._live_told = True
                    self._put(view.live_frame())
                mailbox.live = True
                await self._follow(mailbox)
            except (BusError, SQLAlchemyError) as error:
                _log.info("reader_waits", detail=type(error).__name__)
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
        failpoint("backend.attach.snapshot_made")

    async def _fill(self, hole: Hole) -> None:
        """Told once: the problem, and the state with what the projection has of it. The reader stays where it is."""
        what = problem(
            Code.RETENTION_GAP,
            "events of an execution are no longer retained; a snapshot follows",
            execution=hole.execution,
            first=hole.first,
            last=hole.last,
        )
        await self._refresh(what)

    async def _refresh(self, what: Problem | None = None) -> None:
        """The state as the projection has it, for a reader that stays where it is; before it, why."""
        view = self._view
        history = await history_page(self._deps, view.tenant, view.conversation, None, PAGE_DEFAULT)
        view.learn(_applied(history))
        history = history.model_copy(update={"cursor": view.encoded_cursor})
        if what is not None:
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
            # What others wrote there, by whatever workspace's name, is none of its messages.
            lives = await self._feed.bindings.workspace(self._view.conversation) if batch else None
            for stored in batch:
                after = stored.sequence
                message = decode_stored(stored)
                if message is not None and message.address.workspace == lives:
                    yield message
            if batch:
                continue
            # Empty: the end, or a follower that lags. The leader knows.
            following = await bus.next_after(self._stream, after, self._filter)
            if following is None or following.sequence > target:
                return
            await asyncio.sleep(_LAG_WAIT_S)

    async def _take(self, message: LogMessage) -> None:
        """Put what the message adds. A hole that the snapshot does not fill has been told as a gap."""
        view = self._view
        found = view.take(message)
        if isinstance(found, Hole):
            _log.warning("reader_hole", execution=found.execution, first=found.first, last=found.last)
            await self._fill(found)
            found = self._view.take(message)
            if isinstance(found, Hole):
                self._view.accept(found)
                found = self._view.take(message)
        assert not isinstance(found, Hole)
        if (record := await self._deleted(message)) is not None:
            view.finish_deleted(message.cursor(1))
            self._put(view.problem_frame(deleted_problem(record)))
            return
        self._put(found.data)
        if self._repaired(message):
            await self._refresh()

    async def _deleted(self, message: LogMessage) -> DeletionRecord | None:
        """The conversation's deletion, where the message tells of it and it is so: a sandbox may write that, too."""
        event = message.content
        if not isinstance(event, ConversationEvent) or event.type != ev.CONVERSATION_DELETED:
            return None
        record = await deletion_of(self._deps.bus, self._view.tenant, self._view.conversation)
        named = record is not None and record.bars and record.deletion == event.body.get("deletion")
        return record if named else None

    def _repaired(self, message: LogMessage) -> bool:
        """What this reader was told to be missing is there again: it is shown at once."""
        event = message.content
        is_note = isinstance(event, ConversationEvent) and event.type == ev.RECOVERY and "execution" in event.body
        return is_note and message.sequence > self._view.watermark and self._view.end is None

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
            failpoint("backend.attach.live_written")
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
