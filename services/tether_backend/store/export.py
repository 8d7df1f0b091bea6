"""The rows of a conversation as turns, for its history as an agent is given it (`core.export`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from tether import events as ev
from tether.limits import HISTORY_ROWS_MAX
from tether_backend.core.export import Said, Turn
from tether_backend.store import schema
from tether_backend.store.engine import Database

_KINDS = ("text", "tool")


async def turns_of(
    database: Database, tenant: str, workspace: str, conversation: str, before: str | None
) -> tuple[list[Turn], bool] | None:
    """(turns, oldest first; whether there are older ones), as one read. None where the workspace has no such
    conversation. `before`: id of the first entry that is not to be told, if there is one and it has a row."""
    async with database.read() as connection:
        talks = schema.conversations.c
        known = await connection.scalar(
            sa.select(talks.workspace).where(talks.tenant == tenant, talks.conversation == conversation)
        )
        if known != workspace:
            return None
        bound = None if before is None else await _place(connection, tenant, conversation, before)
        responses = await _responses(connection, tenant, conversation, bound)
        prompts = await _prompts(connection, tenant, conversation, bound)
        more = len(responses) > HISTORY_ROWS_MAX or len(prompts) > HISTORY_ROWS_MAX
        responses, prompts = responses[:HISTORY_ROWS_MAX], prompts[:HISTORY_ROWS_MAX]
        return await _turns(connection, tenant, responses, prompts), more


async def _place(connection: AsyncConnection, tenant: str, conversation: str, entry: str) -> int | None:
    table = schema.entries.c
    return await connection.scalar(
        sa.select(table.place).where(table.tenant == tenant, table.conversation == conversation, table.id == entry)
    )


async def _responses(connection: AsyncConnection, tenant: str, conversation: str, bound: int | None) -> Sequence[Any]:
    """The newest first."""
    table = schema.responses.c
    query = sa.select(schema.responses).where(table.tenant == tenant, table.conversation == conversation)
    if bound is not None:
        query = query.where(table.place < bound)
    return (await connection.execute(query.order_by(table.place.desc()).limit(HISTORY_ROWS_MAX + 1))).all()


async def _prompts(connection: AsyncConnection, tenant: str, conversation: str, bound: int | None) -> Sequence[Any]:
    """The newest first."""
    table = schema.entries.c
    query = sa.select(table.place, table.at, table.body).where(
        table.tenant == tenant, table.conversation == conversation, table.type == ev.PROMPT_ADMITTED
    )
    if bound is not None:
        query = query.where(table.place < bound)
    return (await connection.execute(query.order_by(table.place.desc()).limit(HISTORY_ROWS_MAX + 1))).all()


async def _turns(
    connection: AsyncConnection, tenant: str, responses: Sequence[Any], prompts: Sequence[Any]
) -> list[Turn]:
    """In order of place: a prompt before the response that it began."""
    began = {row.body.get("request"): Said(row.at, row.body.get("content") or ()) for row in prompts}
    placed: list[tuple[int, Turn]] = []
    by_response: dict[str, Turn] = {}
    room = HISTORY_ROWS_MAX + 1
    for row in responses:
        turn = Turn(prompt=began.pop(row.request, None))
        if row.execution is not None:
            items, missing = await _items(connection, tenant, row.execution, room)
            turn.items, turn.missing = items, missing
            room = max(0, room - len(items))
        by_response[row.response] = turn
        placed.append((row.place, turn))
    for row in reversed(prompts):
        joined = by_response.get(row.body.get("into") or "")
        if joined is not None:
            joined.joined.append(Said(row.at, row.body.get("content") or ()))
            began.pop(row.body.get("request"), None)
    for row in prompts:  # that no response is known of
        if (said := began.pop(row.body.get("request"), None)) is not None:
            placed.append((row.place, Turn(prompt=said)))
    return [turn for _, turn in sorted(placed, key=lambda one: one[0])]


async def _items(
    connection: AsyncConnection, tenant: str, execution: str, limit: int
) -> tuple[list[dict[str, Any]], bool]:
    """The execution's newest texts and tools, in order; whether some are missing."""
    its, runs = schema.items.c, schema.executions.c
    state = await connection.scalar(sa.select(runs.state).where(runs.tenant == tenant, runs.execution == execution))
    missing = bool(state and state.get("partial"))
    query = (
        sa.select(its.state)
        .where(its.tenant == tenant, its.execution == execution, its.kind.in_(_KINDS))
        .order_by(its.position.desc())
        .limit(limit)
    )
    rows = list(await connection.scalars(query))
    rows.reverse()
    return rows, missing
