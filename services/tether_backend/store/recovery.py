"""Rows of `recoveries`: which executions are to be repaired, kept until they are. See `core.recovery`.

A gap is marked in the transaction that records it, a cold start marks in the one that takes its number, and a repair
settles in the one that writes the merged rows: a crash between loses no candidate and repairs none twice.
A repair that is to be told stays as `note` until the log has the event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from tether import events as ev
from tether.cursor import tag_of
from tether.fold import Applied, ExecutionFold, ExecutionState
from tether.frames import Frame
from tether.merge import Merged
from tether.ports import Bus
from tether.snapshot import Snapshot
from tether.subjects import EventAddress
from tether_backend.core.projection import ExecutionChange
from tether_backend.core.recovery import Why
from tether_backend.core.stream import decode
from tether_backend.store import schema
from tether_backend.store.engine import Database

SCAN_MAX: Final = 256  # rows of one scan; what is left out has its turn once these are settled


@dataclass(frozen=True, slots=True)
class Wanted:
    """An execution that is to be repaired, and what its rows say. `note`: it is repaired, and this is to be told."""

    address: EventAddress
    why: Why
    mark: int
    ended: bool
    partial: bool
    since_ms: int
    target: dict[str, Any] | None
    note: dict[str, Any] | None = None


async def mark_given_up(database: Database, connection: AsyncConnection, changes: Sequence[ExecutionChange]) -> bool:
    """Mark the executions of which ordinals were given up; whether there are any."""
    rows = [
        {
            "tenant": change.address.tenant,
            "execution": change.address.execution,
            "conversation": change.address.conversation,
            "workspace": change.address.workspace,
            "mark": change.given_up[-1],
            "why": "hole",
            "at": change.at,
            "note": None,
        }
        for change in changes
        if change.given_up
    ]
    statement = database.insert(schema.recoveries)
    newer = {name: statement.excluded[name] for name in ("mark", "why", "at")}  # a note that waits is kept
    marking = statement.on_conflict_do_update(index_elements=["tenant", "execution"], set_=newer)
    await database.execute_many(connection, marking, rows)
    return bool(rows)


async def mark_unfinished(database: Database, connection: AsyncConnection, tenant: str) -> None:
    """Mark every execution that the rows call unfinished; one that is marked already keeps its mark."""
    runs = schema.executions.c
    rows = await connection.execute(
        sa.select(runs.execution, runs.conversation, runs.workspace, runs.applied, runs.updated_at).where(
            runs.tenant == tenant, _unfinished()
        )
    )
    marked = [
        {
            "tenant": tenant,
            "execution": row.execution,
            "conversation": row.conversation,
            "workspace": row.workspace,
            "mark": row.applied + 1,
            "why": "cold",
            "at": row.updated_at,
            "note": None,
        }
        for row in rows
    ]
    await database.upsert(connection, schema.recoveries, marked, replace=False)


def _unfinished() -> Any:
    """As the partial index has it, word by word."""
    return schema.executions.c.phase != sa.literal("ended", literal_execute=True)


async def drop_items(connection: AsyncConnection, tenant: str, execution: str) -> None:
    its = schema.items.c
    await connection.execute(sa.delete(schema.items).where(its.tenant == tenant, its.execution == execution))


async def settle(connection: AsyncConnection, tenant: str, execution: str, note: dict[str, Any] | None) -> None:
    """Nothing is missing any more. With a note it stays until that is told; a note that waits already is kept."""
    table = schema.recoveries
    mine = (table.c.tenant == tenant) & (table.c.execution == execution)
    if note is not None:
        await connection.execute(sa.update(table).where(mine).values(note=note))
    else:
        await connection.execute(sa.delete(table).where(mine, table.c.note.is_(None)))


def note_of(execution: str, merged: Merged) -> dict[str, Any] | None:
    """What is told of a repair: that Tether's stream was resumed, and apart from it what became of the model's request.
    None where nothing had been given up."""
    if not merged.filled:
        return None
    state = merged.state
    known = (state.model_request or {}).get("state")
    if known is None and state.response_outcome is not None:
        known = "completed" if state.response_outcome == "completed" else "failed"
    return ev.Recovery(
        stream="resumed",
        model_request=known or "unknown",
        execution=execution,
        first=min(first for first, _ in merged.filled),
        last=max(last for _, last in merged.filled),
    ).model_dump(exclude_none=True)


class Recoveries:
    """Queries of one tenant; each is one transaction."""

    def __init__(self, database: Database, tenant: str) -> None:
        self._database = database
        self._tenant = tenant

    async def wanted(self) -> list[Wanted]:
        """What is marked."""
        table, runs = schema.recoveries.c, schema.executions.c
        query = (
            sa.select(
                table.execution,
                table.conversation,
                table.workspace,
                table.mark,
                table.why,
                table.at,
                table.note,
                runs.phase,
                runs.updated_at,
                runs.state,
            )
            .select_from(
                schema.recoveries.outerjoin(
                    schema.executions, (runs.tenant == table.tenant) & (runs.execution == table.execution)
                )
            )
            .where(table.tenant == self._tenant)
            .order_by(table.at.desc())
            .limit(SCAN_MAX)
        )
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return [self._wanted(row, cast(Why, row.why), row.mark, row.note) for row in rows]

    async def unfinished(self, after: str) -> list[Wanted]:
        """What the rows call unfinished, whether marked or not: a page of those whose name comes after this one."""
        runs = schema.executions.c
        query = (
            sa.select(
                runs.execution, runs.conversation, runs.workspace, runs.phase, runs.updated_at, runs.state, runs.applied
            )
            .where(runs.tenant == self._tenant, _unfinished(), runs.execution > after)
            .order_by(runs.execution)
            .limit(SCAN_MAX)
        )
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return [self._wanted(row, "unknown", row.applied + 1, None) for row in rows]

    def _wanted(self, row: Any, why: Why, mark: int, note: dict[str, Any] | None) -> Wanted:
        state = row.state or {}
        since_ms = state.get("ended_at") or row.updated_at or 0
        return Wanted(
            address=EventAddress(self._tenant, row.workspace, row.conversation, row.execution),
            why=why,
            mark=mark,
            ended=row.phase == "ended",
            partial=bool(state.get("partial", row.phase is None)),
            since_ms=int(since_ms),
            target=state.get("target"),
            note=note,
        )

    async def note(self, execution: str) -> dict[str, Any] | None:
        """What is to be told of it."""
        table = schema.recoveries.c
        query = sa.select(table.note).where(table.tenant == self._tenant, table.execution == execution)
        async with self._database.read() as connection:
            found = await connection.scalar(query)
        return None if found is None else dict(found)

    async def settled(self, execution: str, mark: int) -> None:
        """Forget a mark: nothing is to be repaired, or the note was told. One that was made anew meanwhile stays,
        without the note."""
        table = schema.recoveries
        mine = (table.c.tenant == self._tenant) & (table.c.execution == execution)
        async with self._database.write() as connection:
            await connection.execute(sa.delete(table).where(mine, table.c.mark == mark))
            await connection.execute(sa.update(table).where(mine).values(note=None))


async def with_suffix(bus: Bus, stream: str, address: EventAddress, snapshot: Snapshot) -> ExecutionState:
    """The snapshot and every event after it that the log has in order."""
    fold = ExecutionFold(snapshot.state)
    mark = snapshot.watermark
    at = await bus.at(stream, mark.sequence) if mark.sequence else None
    # Position is not identity: of another stream the log is read from its beginning, and trimmed by ordinal.
    after = mark.sequence if at is not None and tag_of(at.stored_at_ns) == mark.tag else 0
    while True:
        batch = await bus.read(stream, after, address.subject)
        for stored in batch:
            after = stored.sequence
            frame = decode(stored.subject, stored.sequence, stored.stored_at_ns, stored.data).content
            if isinstance(frame, Frame) and any(fold.apply(event) is Applied.HOLE for event in frame.events):
                return fold.freeze()
        if not batch and await bus.next_after(stream, after, address.subject) is None:
            return fold.freeze()
