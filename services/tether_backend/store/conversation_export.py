"""The rows of a conversation in order, in bounded pieces, for its export.

Each piece is a read of its own, so a slow reader holds no transaction open: a conversation that goes on meanwhile may
be told further than it was when the export began, and one that is deleted breaks off (the caller looks).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from tether import events as ev
from tether.api import UsageView
from tether.export_format import (
    ExportedExecution,
    ExportedItem,
    ExportedMessage,
    ExportedNote,
    ExportedResponse,
)
from tether.fold import ExecutionState
from tether_backend.store import schema
from tether_backend.store.engine import Database

ENTRIES_MAX: Final = 64  # of one read; a prompt may have half a megabyte
ITEMS_MAX: Final = 8  # likewise; an item may have some megabytes
# Of a response's row: told with it.
_OF_RESPONSES: Final = frozenset({ev.RESPONSE_CREATED, ev.RESPONSE_FAILED, ev.RESPONSE_SUPERSEDED})
Exported = ExportedMessage | ExportedResponse | ExportedNote


async def workspace_of(database: Database, tenant: str, conversation: str) -> str | None:
    """None where no row knows the conversation."""
    table = schema.conversations.c
    async with database.read() as connection:
        return await connection.scalar(
            sa.select(table.workspace).where(table.tenant == tenant, table.conversation == conversation)
        )


async def entries_of(database: Database, tenant: str, conversation: str) -> AsyncIterator[Exported]:
    """Messages, responses with the head of their execution (no items), notes; last, executions that no response names.
    Raises SQLAlchemyError."""
    after = 0
    while True:
        async with database.read() as connection:
            found, after = await _page(connection, tenant, conversation, after)
        for entry in found:
            yield entry
        if not after:
            break
    async with database.read() as connection:
        orphans = await _orphans(connection, tenant, conversation)
    for execution in orphans:
        yield ExportedResponse(at=execution.started_at or 0, state="created", execution=execution)


async def items_of(database: Database, tenant: str, execution: str) -> AsyncIterator[ExportedItem]:
    """In order of position, without the content of blobs. Raises SQLAlchemyError."""
    its = schema.items.c
    after = -1
    while True:
        query = (
            sa.select(its.position, its.state)
            .where(its.tenant == tenant, its.execution == execution, its.position > after)
            .order_by(its.position)
            .limit(ITEMS_MAX)
        )
        async with database.read() as connection:
            rows = (await connection.execute(query)).all()
        for row in rows:
            after = row.position
            yield ExportedItem.model_validate({"position": row.position, "item": row.state})
        if len(rows) < ITEMS_MAX:
            return


async def _page(connection: AsyncConnection, tenant: str, conversation: str, after: int) -> tuple[list[Exported], int]:
    """The entries behind a place, and the last one's; 0 where there are no more."""
    table = schema.entries.c
    query = (
        sa.select(schema.entries)
        .where(table.tenant == tenant, table.conversation == conversation, table.place > after)
        .order_by(table.place)
        .limit(ENTRIES_MAX)
    )
    rows = (await connection.execute(query)).all()
    if not rows:
        return [], 0
    last = rows[-1].place if len(rows) == ENTRIES_MAX else 2**62
    replies = schema.responses.c
    answers = await connection.execute(
        sa.select(schema.responses)
        .where(
            replies.tenant == tenant,
            replies.conversation == conversation,
            replies.place > after,
            replies.place <= last,
        )
        .order_by(replies.place)
    )
    responses = {row.place: row for row in answers}
    found: list[Exported] = []
    for row in rows:
        response = responses.pop(row.place, None)
        if response is not None:
            found.append(await _response(connection, tenant, response))
        elif row.type not in _OF_RESPONSES:
            found.append(_entry(row))
    for response in responses.values():  # whose own entry is not there
        found.append(await _response(connection, tenant, response))
    return found, rows[-1].place if len(rows) == ENTRIES_MAX else 0


def _entry(row: Any) -> ExportedMessage | ExportedNote:
    body = row.body
    if row.type != ev.PROMPT_ADMITTED:
        return ExportedNote(at=row.at, type=row.type, body=body)
    return ExportedMessage(
        at=row.at,
        request=str(body.get("request", "")),
        author=body.get("author"),
        content=[part for part in body.get("content", []) if isinstance(part, dict)],
        into=body.get("into"),
    )


async def _response(connection: AsyncConnection, tenant: str, row: Any) -> ExportedResponse:
    execution = None
    if row.execution is not None:
        table = schema.executions
        query = sa.select(table).where(table.c.tenant == tenant, table.c.execution == row.execution)
        found = (await connection.execute(query)).one_or_none()
        execution = None if found is None else await _execution(connection, tenant, found)
    return ExportedResponse(
        at=row.at,
        response=row.response,
        request=row.request,
        state=row.state,
        error=row.error,
        superseded_by=row.superseded_by,
        execution=execution,
    )


async def _execution(connection: AsyncConnection, tenant: str, row: Any) -> ExportedExecution:
    state = ExecutionState.model_validate({**row.state, "items": []})
    spent = schema.usage
    used = await connection.execute(
        sa.select(spent).where(spent.c.tenant == tenant, spent.c.execution == row.execution).order_by(spent.c.turn)
    )
    return ExportedExecution(
        execution=row.execution,
        state=state.phase,
        agent=state.agent,
        model=state.model,
        cli_version=state.cli_version,
        native_session=state.native_session,
        started_at=state.started_at,
        ended_at=state.ended_at,
        outcome=state.outcome,
        exit=state.exit,
        error=state.error,
        proof=state.proof,
        partial=state.partial,
        receipts=state.receipts,
        usage=[UsageView.model_validate(one._asdict()) for one in used],
    )


async def _orphans(connection: AsyncConnection, tenant: str, conversation: str) -> list[ExportedExecution]:
    runs, replies = schema.executions.c, schema.responses.c
    named = sa.select(replies.execution).where(
        replies.tenant == tenant, replies.conversation == conversation, replies.execution.is_not(None)
    )
    query = (
        sa.select(schema.executions)
        .where(runs.tenant == tenant, runs.conversation == conversation, runs.execution.not_in(named))
        .order_by(runs.updated_at)
    )
    rows = (await connection.execute(query)).all()
    return [await _execution(connection, tenant, row) for row in rows]
