"""Deleted conversations in the rows: what the log's `conversation.deleted` does to a database.

    event in a batch ─▶ does `tether_deletions` name this deletion? (a sandbox can write such an event, and no record)
          │ yes
    rows deleted, ROWS_MAX in a transaction ─▶ tombstone, with the batch ─▶ later batches and repairs look at it

A tombstone bars what was stored before its `until`: late frames, and a log that is read again from its beginning. It
holds ids and times, and goes when no log can bring the conversation again. Of SQLite the write-ahead log is emptied
after it, and deleted rows are overwritten in the file (`secure_delete`), so that nothing of them is left on disk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa
import structlog
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from tether import events as ev
from tether.deletion import REMEMBERED_S, deletion_of
from tether.errors import UnreadableRecordError
from tether.events import ConversationEvent
from tether.ports import Bus
from tether_backend.core.stream import LogMessage
from tether_backend.store import schema
from tether_backend.store.engine import Database

ROWS_MAX: Final = 500  # that one transaction deletes: well below 0.1 s
# Executions go last: the other rows of an execution are found by the conversation as well, and none is left behind.
_TABLES: Final = (
    schema.items,
    schema.usage,
    schema.receipts,
    schema.entries,
    schema.responses,
    schema.recoveries,
    schema.executions,
    schema.conversations,
)
_log = structlog.get_logger("tether.projection")


@dataclass(frozen=True, slots=True)
class Tombstone:
    """`until` in unix milliseconds: what was stored before is nobody's."""

    conversation: str
    deletion: str
    until: int

    def bars(self, stored_at_ns: int) -> bool:
        return stored_at_ns // 1_000_000 < self.until


def kept(messages: Iterable[LogMessage], stones: Mapping[str, Tombstone]) -> list[LogMessage]:
    """Those that are no deletion, and that no tombstone bars."""
    return [
        one
        for one in messages
        if not is_deletion(one)
        and not ((stone := stones.get(one.address.conversation)) and stone.bars(one.stored_at_ns))
    ]


def is_deletion(message: LogMessage) -> bool:
    content = message.content
    return isinstance(content, ConversationEvent) and content.type == ev.CONVERSATION_DELETED


class Deletions:
    """One tenant's, in one database."""

    def __init__(self, bus: Bus, database: Database, tenant: str) -> None:
        self._bus = bus
        self._database = database
        self._tenant = tenant
        self._unclean = False  # the write-ahead log may still hold what was deleted
        self._any: bool | None = None  # whether there are tombstones; None: not known

    async def obey(self, messages: Sequence[LogMessage]) -> tuple[Tombstone, ...]:
        """Delete the rows of what the batch says is deleted; the tombstones that are to be written with it. Raises
        SQLAlchemyError, BusError."""
        fresh: dict[str, Tombstone] = {}
        for message in sorted((one for one in messages if is_deletion(one)), key=lambda one: one.sequence):
            if (stone := await self._verified(message)) is not None:
                fresh[stone.conversation] = stone
        for stone in fresh.values():
            count = await self._delete_rows(stone.conversation)
            _log.info("conversation_deleted", tenant=self._tenant, conversation=stone.conversation, rows=count)
        return tuple(fresh.values())

    async def write(
        self, connection: AsyncConnection, fresh: Sequence[Tombstone], messages: Sequence[LogMessage]
    ) -> Mapping[str, Tombstone]:
        """With the batch: its tombstones, and those gone that nothing can come before. Returns all that concern it, by
        conversation."""
        if fresh:
            await self._write(connection, fresh)
        return await self.stones(connection, {one.address.conversation for one in messages})

    def forget(self) -> None:
        """Another process may write tombstones from now on."""
        self._any = None

    async def _verified(self, message: LogMessage) -> Tombstone | None:
        content = message.content
        assert isinstance(content, ConversationEvent)
        try:
            body = ev.ConversationDeleted.model_validate(content.body)
            record = await deletion_of(self._bus, self._tenant, message.address.conversation)
        except (ValidationError, UnreadableRecordError):
            return None
        if record is None or record.deletion != body.deletion or record.workspace != message.address.workspace:
            _log.warning("deletion_not_believed", subject=message.address.subject, sequence=message.sequence)
            return None
        message.refusal = None  # its conversation may have no record any more
        return Tombstone(message.address.conversation, body.deletion, body.until)

    async def stones(self, connection: AsyncConnection, conversations: Iterable[str]) -> dict[str, Tombstone]:
        table = schema.deletions.c
        if self._any is None:  # asked once: most tenants have none
            first = sa.select(table.conversation).where(table.tenant == self._tenant).limit(1)
            self._any = await connection.scalar(first) is not None
        names = sorted(set(conversations))
        if not names or not self._any:
            return {}
        rows = await connection.execute(
            sa.select(table.conversation, table.deletion, table.until).where(
                table.tenant == self._tenant, table.conversation.in_(names)
            )
        )
        return {row.conversation: Tombstone(row.conversation, row.deletion, row.until) for row in rows}

    async def bars_now(self, connection: AsyncConnection, conversation: str) -> bool:
        """Nothing is written to this conversation's rows now."""
        stone = (await self.stones(connection, [conversation])).get(conversation)
        return stone is not None and stone.bars(time.time_ns())

    async def _write(self, connection: AsyncConnection, fresh: Sequence[Tombstone]) -> None:
        self._any = True
        now_ms = time.time_ns() // 1_000_000
        rows = [
            {
                "tenant": self._tenant,
                "conversation": stone.conversation,
                "deletion": stone.deletion,
                "until": stone.until,
                "at": now_ms,
            }
            for stone in fresh
        ]
        await self._database.upsert(connection, schema.deletions, rows)
        table = schema.deletions
        old = table.c.until < now_ms - int(REMEMBERED_S * 1000)
        await connection.execute(sa.delete(table).where(table.c.tenant == self._tenant, old))

    async def _delete_rows(self, conversation: str) -> int:
        """Every row of the conversation, in bounded transactions; a crash in between leaves the rest to the next."""
        total = 0
        self._unclean = True
        for table in _TABLES:
            keys = list(table.primary_key.columns)
            mine = (table.c.tenant == self._tenant) & (table.c.conversation == conversation)
            some = sa.select(*keys).where(mine).limit(ROWS_MAX)
            while True:
                async with self._database.write() as connection:
                    result = await connection.execute(sa.delete(table).where(sa.tuple_(*keys).in_(some)))
                total += result.rowcount
                if result.rowcount < ROWS_MAX:
                    break
                await asyncio.sleep(0)
        return total

    async def clean(self) -> None:
        """Empty the write-ahead log where it may hold what was deleted; tried again where readers are in the way."""
        if self._unclean:
            self._unclean = not await self._database.emptied_log()
