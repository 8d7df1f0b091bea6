"""Writing the projection: one transaction per batch of log messages. Rows change by `core.projection`.

In the transaction, in this order: bump the batch number (somebody else's bump means another projector is at work: give
up; until the commit it also locks every other projector out), read up to where the executions' rows are, trim what they
contain, fill holes from the log, write. Each table is written by one statement with many rows.

The event loop is given back between frames and between some hundreds of rows: readers of live streams share it.

Executions are put in order by their ordinals. Conversation-level events form no chain, so each time one is delivered
its subject is read from the log from where this process knows it, and what is new (by id) is applied in order of the
log: a redelivery in another order changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa
import structlog
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from tether import events as ev
from tether import subjects
from tether.events import ConversationEvent
from tether.fold import ExecutionState
from tether.frame_rules import Refusal
from tether.frames import Frame
from tether.merge import Merged, merge, own_gaps
from tether.ports import Bus
from tether.snapshot import Snapshot
from tether.subjects import EventAddress
from tether_backend.core.projection import Builder, ExecutionChange, Kept
from tether_backend.core.stream import LogMessage, decode
from tether_backend.metrics import Metrics
from tether_backend.screen import Screen, refuse
from tether_backend.store import recovery, schema
from tether_backend.store.deletions import Deletions, Tombstone, is_deletion, kept
from tether_backend.store.engine import Database

_log = structlog.get_logger("tether.projection")
_ITEMS_MAX: Final = 256  # touched items of one execution before they are worded
_POSITIONS_MAX: Final = 4096  # conversations whose place in the log is remembered
_ENTRY_ID_MAX: Final = 256
# Whose rows these would be is not so: nothing of such a message is looked at.
_OUTSIDE: Final = frozenset({Refusal.NOT_ADMITTED, Refusal.FOREIGN_CONVERSATION, Refusal.FOREIGN_EXECUTION})


class SupersededError(Exception):
    """The batch number is not the one expected: another projector writes to this database."""


class ProjectionWriter:
    """One tenant's (and shard's) rows. One instance writes at a time; a failed batch forgets what it had in memory."""

    def __init__(
        self, bus: Bus, database: Database, tenant: str, shard: int, metrics: Metrics, *, kept: Kept | None = None
    ) -> None:
        self._bus = bus
        self._database = database
        self._tenant = tenant
        self._shard = shard
        self._metrics = metrics
        self._stream = subjects.events_stream(tenant)
        self._touch = _touch_statement(database)
        self.screen = Screen(bus, database, tenant)
        self._deletions = Deletions(bus, database, tenant)
        self._stones: Mapping[str, Tombstone] = {}  # of the batch that is being written
        self._builders = Kept() if kept is None else kept
        self._lock = asyncio.Lock()  # a repair never falls between the parts of a batch
        self._committed: int | None = None  # the number that rows of this process stand at
        self.marked = asyncio.Event()  # something is to be repaired
        # conversation → `_` is applied up to this sequence, stored at this time (a new stream uses sequences again)
        self._sequences: OrderedDict[str, tuple[int, int]] = OrderedDict()

    async def number(self) -> int:
        """The last committed batch's number; 0 where there is none."""
        table = schema.projections
        async with self._database.read() as connection:
            found = await connection.scalar(
                sa.select(table.c.number).where(table.c.tenant == self._tenant, table.c.shard == self._shard)
            )
        return int(found or 0)

    def stand_at(self, number: int) -> None:
        """The number that the next batch follows."""
        self._committed = number

    async def renumber(self, number: int) -> None:
        """The cold path: take a number that does not fall behind the bucket's, and have every execution that the rows
        call unfinished looked at again. One transaction."""
        async with self._lock, self._database.write() as connection:
            row = {"tenant": self._tenant, "shard": self._shard, "number": number}
            await self._database.upsert(connection, schema.projections, [row])
            await recovery.mark_unfinished(self._database, connection, self._tenant)
        self._committed = number
        self.marked.set()

    async def merge(self, address: EventAddress, snapshot: Snapshot, *, tell: bool, now_ms: int) -> Merged | None:
        """An attach's steps 3 to 5 for one execution's rows: the snapshot, what the log has after it, merged into the
        rows by identity. All or nothing. `tell`: what was given up and is there now is to be told by a note.
        None where the snapshot and the log together reach less far than the rows. Raises SupersededError,
        SQLAlchemyError, BusError."""
        async with self._lock:
            state = await recovery.with_suffix(self._bus, self._stream, address, snapshot)
            async with self._database.write() as connection:
                await self._still_mine(connection)
                head = (await self._applied(connection, [address.execution])).get(address.execution)
                rows = Builder(address) if head is None else await self._load(connection, address)
                mine = rows.fold.freeze()
                merged = merge(mine, state)
                if state.applied < mine.applied or await self._deletions.bars_now(connection, address.conversation):
                    return None
                if not merged.changed and own_gaps(mine):
                    return merged
                note = recovery.note_of(address.execution, merged) if tell else None
                if merged.changed:
                    await recovery.drop_items(connection, self._tenant, address.execution)
                    builder = Builder.replaced(address, merged.state, now_ms)
                    changes: list[ExecutionChange] = []
                    _tell(builder, changes)
                    await self._write_executions(connection, changes)
                if not own_gaps(merged.state):
                    await recovery.settle(connection, self._tenant, address.execution, note)
            self._builders.drop(address.execution)
            return merged

    async def _still_mine(self, connection: AsyncConnection) -> None:
        """Locks other projectors out until the transaction ends, as a batch does."""
        table = schema.projections
        mine = (table.c.tenant == self._tenant) & (table.c.shard == self._shard)
        result = await connection.execute(
            sa.update(table).where(mine, table.c.number == self._committed).values(number=self._committed)
        )
        if result.rowcount != 1:
            raise SupersededError(f"a repair of {self._tenant}/{self._shard}")

    def forget(self) -> None:
        """Drop what is kept in memory: the log may have changed, or a batch was not committed."""
        self._builders.clear()
        self._sequences.clear()
        self.screen.bindings.forget()
        self._deletions.forget()

    async def commit(self, number: int, messages: Sequence[LogMessage]) -> None:
        """Apply a batch as batch `number`. All or nothing. What the `screen` refused is left out; what is found out by
        applying it (an ordinal that lies, something behind the end, a bound) has a `refusal` afterwards.
        Raises SupersededError, SQLAlchemyError, BusError."""
        async with self._lock:
            await self._commit(number, [one for one in messages if one.refusal not in _OUTSIDE or is_deletion(one)])

    async def _commit(self, number: int, delivered: Sequence[LogMessage]) -> None:
        try:
            fresh = await self._deletions.obey(delivered)
            if fresh:
                self.forget()
            async with self._database.write() as connection:
                await self._bump(connection, number)
                self._stones = await self._deletions.write(connection, fresh, delivered)
                messages = kept(delivered, self._stones)
                await self._conversations(connection, [one for one in messages if one.address.conversation_level])
                busy = await self._executions(
                    connection, [one for one in messages if not one.address.conversation_level]
                )
        except BaseException:
            self.forget()
            raise
        self._committed = number
        await self._deletions.clean()
        for builder in busy:
            self._builders.put(builder)
        self._builders.trim({builder.address.execution for builder in busy})
        while len(self._sequences) > _POSITIONS_MAX:
            self._sequences.popitem(last=False)

    async def _bump(self, connection: AsyncConnection, number: int) -> None:
        table = schema.projections
        mine = (table.c.tenant == self._tenant) & (table.c.shard == self._shard)
        bump = sa.update(table).where(mine, table.c.number == number - 1).values(number=number)
        result = await connection.execute(bump)
        if result.rowcount != 1 and number == 1:
            row = {"tenant": self._tenant, "shard": self._shard, "number": 0}
            await self._database.upsert(connection, table, [row], replace=False)
            result = await connection.execute(bump)
        if result.rowcount != 1:
            raise SupersededError(f"batch {number} of {self._tenant}/{self._shard}")

    # --- executions ---

    async def _executions(self, connection: AsyncConnection, messages: Sequence[LogMessage]) -> list[Builder]:
        """The builders that were used: as they are, once this is committed."""
        by_execution: dict[str, list[LogMessage]] = {}
        for message in messages:
            by_execution.setdefault(message.address.execution, []).append(message)
        if not by_execution:
            return []
        applied = await self._applied(connection, by_execution)
        used: list[Builder] = []
        changes: list[ExecutionChange] = []
        for execution, its in by_execution.items():
            have, ended = applied.get(execution, (None, False))
            if have is not None and all(_within(message, have) for message in its):
                continue  # delivered again: nothing to load the execution for
            if ended:
                for message in its:  # nor for what comes behind its end
                    if not _within(message, have or 0):
                        _refuse_behind_end(message)
                continue
            builder = await self._builder(connection, its[0].address, have)
            used.append(builder)
            await self._apply(builder, sorted(its, key=lambda one: one.sequence), changes)
        await self._write_executions(connection, changes)
        return used

    async def _applied(self, connection: AsyncConnection, names: Iterable[str]) -> dict[str, tuple[int, bool]]:
        """Up to where the rows are, and whether they have the end."""
        table = schema.executions
        rows = await connection.execute(
            sa.select(table.c.execution, table.c.applied, table.c.phase).where(
                table.c.tenant == self._tenant, table.c.execution.in_(sorted(names))
            )
        )
        return {row.execution: (row.applied, row.phase == "ended") for row in rows}

    async def _builder(self, connection: AsyncConnection, address: EventAddress, applied: int | None) -> Builder:
        """The execution as its rows have it: from memory where that is the same, else from the rows."""
        known = self._builders.get(address.execution)
        if known is not None and known.applied == (applied or 0):
            return known
        return Builder(address) if applied is None else await self._load(connection, address)

    async def _load(self, connection: AsyncConnection, address: EventAddress) -> Builder:
        mine = schema.executions.c
        head = await connection.scalar(
            sa.select(mine.state).where(mine.tenant == self._tenant, mine.execution == address.execution)
        )
        its = schema.items.c
        rows = await connection.execute(
            sa.select(its.item, its.state)
            .where(its.tenant == self._tenant, its.execution == address.execution)
            .order_by(its.position)
        )
        found = [(row.item, row.state) for row in rows]
        state = ExecutionState.model_validate({**(head or {}), "items": [item for _, item in found]})
        return Builder.load(address, state, [key for key, _ in found])

    async def _apply(self, builder: Builder, messages: Sequence[LogMessage], changes: list[ExecutionChange]) -> None:
        """What changes goes to `changes`, the newest last."""
        for message in messages:
            await asyncio.sleep(0)
            frame = message.content
            if not isinstance(frame, Frame):
                self._metrics.unreadable.inc()
                builder.behind = "refused"
            elif builder.fold.ended and frame.last > builder.applied:
                _refuse_behind_end(message)
            elif await self._in_order(builder, message, frame):
                builder.place = message.sequence
                if builder.limited():
                    refuse(message, Refusal.LIMIT, ", ".join(builder.fold.limits()))
            if builder.waiting >= _ITEMS_MAX:
                _tell(builder, changes)
        _tell(builder, changes)

    async def _in_order(self, builder: Builder, message: LogMessage, frame: Frame) -> bool:
        """Apply a frame, with what is missing before it; False where it lies about its ordinals."""
        if builder.apply(frame, message.size_bytes):
            return True
        await self._fill(builder, message)
        if builder.apply(frame, message.size_bytes):
            return True
        if await self._lies(builder):
            refuse(message, Refusal.ORDINAL, f"first: must be {builder.applied + 1}, got {frame.first}")
            builder.behind = "refused"
            return False
        _log.warning("projection_gap", subject=message.address.subject, ordinal=builder.applied + 1)
        self._give_up(builder, frame, message.size_bytes)
        return True

    async def _lies(self, builder: Builder) -> bool:
        """Whether the message before is there and was believed: then nothing is missing, whatever a frame says."""
        if builder.behind != "believed" or not builder.place:
            return False
        return await self._bus.at(self._stream, builder.place) is not None

    def _give_up(self, builder: Builder, frame: Frame, size_bytes: int) -> None:
        self._metrics.lost.inc()
        builder.skip_to(frame.first, "quarantined" if builder.behind == "refused" else "retention_gap")
        builder.apply(frame, size_bytes)

    async def _fill(self, builder: Builder, message: LogMessage) -> None:
        """Ordinals before this message's are missing: take them from the log, as far as it has them. What was looked
        through once is not read again, however many holes there are."""
        self._metrics.holes.inc()
        while builder.searched < message.sequence - 1:
            batch = await self._bus.read(self._stream, builder.searched, message.address.subject)
            for stored in batch:
                if stored.sequence >= message.sequence:
                    builder.searched = message.sequence - 1
                    return
                builder.searched = stored.sequence
                frame = decode(stored.subject, stored.sequence, stored.stored_at_ns, stored.data).content
                if not isinstance(frame, Frame):
                    builder.behind = "refused"
                elif builder.fold.ended or builder.apply(frame, len(stored.data)):
                    builder.place = stored.sequence
                elif await self._lies(builder):
                    builder.behind = "refused"
                else:
                    self._give_up(builder, frame, len(stored.data))
                    builder.place = stored.sequence
            if not batch:
                return

    async def _write_executions(self, connection: AsyncConnection, changes: Sequence[ExecutionChange]) -> None:
        if not changes:
            return
        await self._touch_conversations(
            connection, [(one.address.conversation, one.address.workspace, one.at) for one in changes]
        )
        newest = {one.address.execution: one for one in changes}
        await self._database.upsert(connection, schema.executions, [_execution_row(one) for one in newest.values()])
        if await recovery.mark_given_up(self._database, connection, changes):
            self.marked.set()
        items = [
            {
                "tenant": change.address.tenant,
                "execution": change.address.execution,
                "position": item.position,
                "conversation": change.address.conversation,
                "item": item.key,
                "kind": item.kind,
                "status": item.status,
                "state": item.state,
            }
            for change in changes
            for item in change.items
        ]
        await self._database.upsert(connection, schema.items, items)
        usage = [_usage_row(change.address, one) for change in changes for one in change.usage]
        await self._database.upsert(connection, schema.usage, [one for one in usage if one], replace=False)
        receipts = [_receipt_row(change.address, one, one["at"]) for change in changes for one in change.receipts]
        await self._database.upsert(connection, schema.receipts, [one for one in receipts if one])

    async def _touch_conversations(self, connection: AsyncConnection, touched: Iterable[tuple[str, str, int]]) -> None:
        """Create or touch the rows of conversations: (name, workspace, at)."""
        rows: dict[str, dict[str, Any]] = {}
        for name, workspace, at in touched:
            at = max(at, rows[name]["updated_at"] if name in rows else at)
            rows[name] = {
                "tenant": self._tenant,
                "conversation": name,
                "workspace": workspace,
                "created_at": at,
                "updated_at": at,
                "next_place": 1,
                "messages": 0,
            }
        await self._database.execute_many(connection, self._touch, list(rows.values()))

    # --- conversation-level events ---

    async def _conversations(self, connection: AsyncConnection, messages: Sequence[LogMessage]) -> None:
        by_conversation: dict[str, list[LogMessage]] = {}
        for message in messages:
            by_conversation.setdefault(message.address.conversation, []).append(message)
        for its in by_conversation.values():
            await self._entries(connection, its)

    async def _entries(self, connection: AsyncConnection, delivered: Sequence[LogMessage]) -> None:
        address = delivered[0].address
        newest = max(delivered, key=lambda message: message.sequence)
        target = newest.sequence
        known, known_at_ns = self._sequences.get(address.conversation, (0, 0))
        if any(one.sequence <= known and one.stored_at_ns > known_at_ns for one in delivered):
            known = 0  # younger, at an older place: the log was made anew or put back
        if known >= target:
            return
        messages = {message.sequence: message for message in delivered if message.sequence > known}
        after = known
        while after < target:
            batch = await self._bus.read(self._stream, after, address.subject)
            for stored in batch:
                if stored.sequence <= target:
                    messages[stored.sequence] = decode(
                        stored.subject, stored.sequence, stored.stored_at_ns, stored.data
                    )
            if not batch:
                break
            after = batch[-1].sequence
        await self.screen.notes(messages.values())  # those that were read here, too
        ordered = kept((messages[sequence] for sequence in sorted(messages)), self._stones)
        believed = (one.content for one in ordered if one.refusal is None)
        readable = [event for event in believed if isinstance(event, ConversationEvent)]
        self._metrics.unreadable.inc(len(ordered) - len(readable))
        await self._write_entries(connection, address, readable)
        self._sequences[address.conversation] = (target, newest.stored_at_ns)
        self._sequences.move_to_end(address.conversation)

    async def _write_entries(
        self, connection: AsyncConnection, address: EventAddress, events: Sequence[ConversationEvent]
    ) -> None:
        ids = {_entry_id(event) for event in events}
        table = schema.entries
        seen = set(
            await connection.scalars(
                sa.select(table.c.id).where(
                    table.c.tenant == self._tenant,
                    table.c.conversation == address.conversation,
                    table.c.id.in_(sorted(ids)),
                )
            )
        )
        fresh = []
        for event in events:
            if _entry_id(event) not in seen:
                seen.add(_entry_id(event))
                fresh.append(event)
        if not fresh:
            return
        at = max(event.at for event in fresh)
        await self._touch_conversations(connection, [(address.conversation, address.workspace, at)])
        talks = schema.conversations.c
        mine = (talks.tenant == self._tenant) & (talks.conversation == address.conversation)
        place, count = (await connection.execute(sa.select(talks.next_place, talks.messages).where(mine))).one()
        rows = []
        for event in fresh:
            rows.append(
                {
                    "tenant": self._tenant,
                    "conversation": address.conversation,
                    "id": _entry_id(event),
                    "place": place,
                    "type": event.type[:64],
                    "at": event.at,
                    "body": event.body,
                }
            )
            await self._fold(connection, address, event, place)
            place += 1
            count += event.type == ev.PROMPT_ADMITTED
        await self._database.upsert(connection, table, rows, replace=False)
        await connection.execute(sa.update(schema.conversations).where(mine).values(next_place=place, messages=count))

    async def _fold(
        self, connection: AsyncConnection, address: EventAddress, event: ConversationEvent, place: int
    ) -> None:
        """One event into `responses` and `receipts`, as `tether.conversation_fold.ConversationFold` does it."""
        try:
            body = ev.body_of(event)
        except ValidationError as error:
            _log.error("projection_bad_body", subject=address.subject, id=event.id, problems=error.error_count())
            return
        base = {"tenant": self._tenant, "conversation": address.conversation}
        match body:
            case ev.ResponseCreated():
                row = {
                    **base,
                    "response": body.response,
                    "request": body.request,
                    "place": place,
                    "generation": body.response_generation,
                    "execution": body.execution,
                    "agent": body.agent,
                    "at": event.at,
                    "state": "created",
                    "error": None,
                    "superseded_by": None,
                }
                await self._database.upsert(connection, schema.responses, [row])
            case ev.ResponseFailed():
                await self._failed(connection, base, body, event.at, place)
            case ev.ResponseSuperseded():
                table = schema.responses.c
                await connection.execute(
                    sa.update(schema.responses)
                    .where(
                        table.tenant == self._tenant,
                        table.conversation == address.conversation,
                        table.response == body.response,
                    )
                    .values(state="superseded", superseded_by=body.by)
                )
            case ev.ControlReceipt():
                receipt = _receipt_row(address, dict(event.body), event.at)
                await self._database.upsert(connection, schema.receipts, [] if receipt is None else [receipt])
            case _:
                pass

    async def _failed(
        self, connection: AsyncConnection, base: dict[str, Any], body: ev.ResponseFailed, at: int, place: int
    ) -> None:
        error: dict[str, Any] = {"code": body.code, "detail": body.detail, "retryable": body.retryable}
        if body.choices:
            error["choices"] = list(body.choices)
        response = body.response or f"{body.request}/failed"
        table = schema.responses.c
        result = await connection.execute(
            sa.update(schema.responses)
            .where(
                table.tenant == base["tenant"],
                table.conversation == base["conversation"],
                table.response == response,
            )
            .values(state="failed", error=error)
        )
        if result.rowcount == 0:
            row = {
                **base,
                "response": response,
                "request": body.request,
                "place": place,
                "generation": 0,
                "execution": None,
                "agent": None,
                "at": at,
                "state": "failed",
                "error": error,
                "superseded_by": None,
            }
            await self._database.upsert(connection, schema.responses, [row])


def _touch_statement(database: Database) -> Any:
    """A conversation's row: made, or its time moved forward."""
    statement = database.insert(schema.conversations)
    newer = statement.excluded.updated_at
    return statement.on_conflict_do_update(
        index_elements=["tenant", "conversation"],
        set_={"updated_at": newer},
        where=newer > schema.conversations.c.updated_at,
    )


def _refuse_behind_end(message: LogMessage) -> None:
    refuse(message, Refusal.AFTER_END, "must not go on behind execution.ended")


def _within(message: LogMessage, applied: int) -> bool:
    return isinstance(message.content, Frame) and message.content.last <= applied


def _tell(builder: Builder, changes: list[ExecutionChange]) -> None:
    change = builder.changes()
    if change is not None:
        changes.append(change)


def _entry_id(event: ConversationEvent) -> str:
    return event.id[:_ENTRY_ID_MAX]


def _execution_row(change: ExecutionChange) -> dict[str, Any]:
    return {
        "tenant": change.address.tenant,
        "execution": change.address.execution,
        "conversation": change.address.conversation,
        "workspace": change.address.workspace,
        "applied": change.head.applied,
        "phase": change.head.phase,
        "items": change.items_total,
        "updated_at": change.at,
        "state": change.head.model_dump(mode="json", exclude={"items"}, exclude_none=True),
    }


def _usage_row(address: EventAddress, body: dict[str, Any]) -> dict[str, Any] | None:
    try:
        usage = ev.Usage.model_validate(body)
    except ValidationError:
        return None
    return {
        "tenant": address.tenant,
        "execution": address.execution,
        "conversation": address.conversation,
        **usage.model_dump(),
    }


def _receipt_row(address: EventAddress, body: dict[str, Any], at: int) -> dict[str, Any] | None:
    try:
        receipt = ev.ControlReceipt.model_validate(body)
    except ValidationError:
        return None
    return {
        "tenant": address.tenant,
        "conversation": address.conversation,
        "control": receipt.control[:64],
        "execution": address.execution,
        "at": at,
        "body": receipt.model_dump(exclude_none=True),
    }
