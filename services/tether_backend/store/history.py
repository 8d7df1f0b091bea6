"""Reading the projection: history pages, lists, what a route needs to know of an execution, response or control."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from pydantic import TypeAdapter, ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from tether import events as ev
from tether.api import (
    ITEMS_PAGE_MAX,
    ConversationHistory,
    ConversationView,
    ExecutionView,
    FailureView,
    GapView,
    InteractionView,
    ItemList,
    ItemView,
    MessageView,
    RecoveryView,
    ResponseView,
    UsageView,
)
from tether.fold import ExecutionState
from tether.limits import EXECUTION_TOKEN_CONVERSATION
from tether_backend.store import schema
from tether_backend.store.engine import Database

# The kinds that have an index of their own. A partial index serves only a query that names its kind literally.
KINDS: Final = {kind: sa.literal(kind, literal_execute=True) for kind in ("interaction", "gap")}

_ITEMS: Final = TypeAdapter(list[ItemView])
_ITEM_COLUMNS: Final = tuple(schema.items.c[name] for name in ("execution", "item", "position", "kind", "state"))


@dataclass(frozen=True, slots=True)
class Place:
    """Where an execution lives."""

    workspace: str
    conversation: str
    execution: str


class History:
    """Queries of one tenant at a time; every method is one read transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def conversation(
        self, tenant: str, conversation: str, *, cursor: str, workspace: str, before: int | None, limit: int
    ) -> ConversationHistory:
        """One page. `cursor` was taken before this call; `workspace` is used where no row knows one."""
        async with self._database.read() as connection:
            row = await _conversation_row(connection, tenant, conversation)
            entries = await _entries(connection, tenant, conversation, before, limit + 1)
            more = len(entries) > limit
            entries = entries[-limit:] if more else entries
            first = entries[0].place if more else 0
            responses = await _responses(connection, tenant, conversation, first, before)
            names = [one.execution for one in responses if one.execution]
            if not more:  # the oldest page also has executions that no response names (their entries are gone)
                names += await _orphans(connection, tenant, conversation)
            executions = await _execution_rows(connection, tenant, names)
            items = await _items(connection, tenant, names, ITEMS_PAGE_MAX)
            interactions = await _by_kind(connection, tenant, names, "interaction")
            gaps = await _by_kind(connection, tenant, names, "gap")
            pending = await _pending(connection, tenant, [conversation])
            used = await _usage(connection, tenant, names)
        states = {one.execution: ExecutionState.model_validate(one.state) for one in executions}
        return ConversationHistory(
            conversation=conversation,
            workspace=row.workspace if row is not None else workspace,
            cursor=cursor,
            messages=_messages(entries, responses),
            responses=[_response(one, states) for one in responses if one.state != "failed" or one.execution],
            failures=[_failure(one) for one in responses if one.state == "failed" and not one.execution],
            executions=[
                _execution(one, states[one.execution], pending.get(one.execution, 0), responses) for one in executions
            ],
            items=items,
            interactions=[_interaction(one) for one in interactions],
            gaps=[_gap(one) for one in gaps],
            usage=used,
            recoveries=[_recovery(one) for one in entries if one.type == ev.RECOVERY],
            items_omitted=sum(one.items for one in executions) - len(items),
            before=first if more else None,
        )

    async def conversations(
        self, tenant: str, *, limit: int, after: tuple[int, str] | None
    ) -> tuple[list[ConversationView], tuple[int, str] | None]:
        """Newest first; the second value continues after the last."""
        table = schema.conversations.c
        query = sa.select(schema.conversations).where(table.tenant == tenant)
        if after is not None:
            at, name = after
            query = query.where((table.updated_at < at) | ((table.updated_at == at) & (table.conversation < name)))
        query = query.order_by(table.updated_at.desc(), table.conversation.desc()).limit(limit + 1)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
            names = [row.conversation for row in rows[:limit]]
            active = await _active(connection, tenant, names)
            waiting: dict[str, int] = {}
            for (name, _), count in (await _pending_rows(connection, tenant, names)).items():
                waiting[name] = waiting.get(name, 0) + count
        views = [
            ConversationView(
                conversation=row.conversation,
                workspace=row.workspace,
                created_at=row.created_at,
                updated_at=row.updated_at,
                messages=row.messages,
                active_execution=active.get(row.conversation),
                pending_interactions=waiting.get(row.conversation, 0),
            )
            for row in rows[:limit]
        ]
        last = rows[limit - 1] if len(rows) > limit else None
        return views, None if last is None else (last.updated_at, last.conversation)

    async def executions(
        self,
        tenant: str,
        *,
        limit: int,
        after: tuple[int, str] | None,
        conversation: str | None = None,
        state: str | None = None,
    ) -> tuple[list[ExecutionView], tuple[int, str] | None]:
        table = schema.executions.c
        query = sa.select(schema.executions).where(table.tenant == tenant)
        if conversation is not None:
            query = query.where(table.conversation == conversation)
        if state == "active":
            query = query.where(table.phase != "ended")
        elif state is not None:
            query = query.where(table.phase == state)
        if after is not None:
            at, name = after
            query = query.where((table.updated_at < at) | ((table.updated_at == at) & (table.execution < name)))
        query = query.order_by(table.updated_at.desc(), table.execution.desc()).limit(limit + 1)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
            views = await _views(connection, tenant, rows[:limit])
        last = rows[limit - 1] if len(rows) > limit else None
        return views, None if last is None else (last.updated_at, last.execution)

    async def execution(self, tenant: str, execution: str) -> ExecutionView | None:
        table = schema.executions.c
        async with self._database.read() as connection:
            query = sa.select(schema.executions).where(table.tenant == tenant, table.execution == execution)
            views = await _views(connection, tenant, (await connection.execute(query)).all())
        return views[0] if views else None

    async def state(self, tenant: str, execution: str) -> tuple[Place, ExecutionState] | None:
        """An execution's whole folded state."""
        table = schema.executions.c
        its = schema.items.c
        async with self._database.read() as connection:
            row = (
                await connection.execute(
                    sa.select(schema.executions).where(table.tenant == tenant, table.execution == execution)
                )
            ).one_or_none()
            if row is None:
                return None
            items = await connection.scalars(
                sa.select(its.state).where(its.tenant == tenant, its.execution == execution).order_by(its.position)
            )
            whole = {**row.state, "items": list(items)}
        return Place(row.workspace, row.conversation, execution), ExecutionState.model_validate(whole)

    async def items(self, tenant: str, execution: str, *, after: int, limit: int) -> ItemList | None:
        table = schema.executions.c
        its = schema.items.c
        async with self._database.read() as connection:
            applied = await connection.scalar(
                sa.select(table.applied).where(table.tenant == tenant, table.execution == execution)
            )
            if applied is None:
                return None
            rows = (
                await connection.execute(
                    sa.select(*_ITEM_COLUMNS)
                    .where(its.tenant == tenant, its.execution == execution, its.position > after)
                    .order_by(its.position)
                    .limit(limit + 1)
                )
            ).all()
        more = len(rows) > limit
        items = _item_views(rows[:limit])
        return ItemList(execution=execution, applied=applied, items=items, after=items[-1].position if more else None)

    async def place(self, tenant: str, execution: str) -> Place | None:
        table = schema.executions.c
        replies = schema.responses.c
        async with self._database.read() as connection:
            row = (
                await connection.execute(
                    sa.select(table.workspace, table.conversation).where(
                        table.tenant == tenant, table.execution == execution
                    )
                )
            ).one_or_none()
            if row is None:  # created, and nothing of it is logged yet
                talks = schema.conversations.c
                row = (
                    await connection.execute(
                        sa.select(talks.workspace, talks.conversation)
                        .join(
                            schema.responses,
                            (replies.tenant == talks.tenant) & (replies.conversation == talks.conversation),
                        )
                        .where(replies.tenant == tenant, replies.execution == execution)
                        .limit(1)
                    )
                ).one_or_none()
        return None if row is None else Place(row.workspace, row.conversation, execution)

    async def response(self, tenant: str, conversation: str, response: str) -> tuple[str | None, bool] | None:
        """(execution, whether it has ended) of a response; None where no row names it."""
        table = schema.responses.c
        runs = schema.executions.c
        async with self._database.read() as connection:
            row = (
                await connection.execute(
                    sa.select(table.execution, table.state).where(
                        table.tenant == tenant, table.conversation == conversation, table.response == response
                    )
                )
            ).one_or_none()
            if row is None:
                return None
            state = await connection.scalar(
                sa.select(runs.state).where(runs.tenant == tenant, runs.execution == row.execution)
            )
        ended = row.state != "created" or bool(state and (state.get("response_outcome") or state.get("outcome")))
        return row.execution, ended

    async def interactions(self, tenant: str, conversation: str, interaction: str) -> list[InteractionView]:
        """All of this id in the conversation, the pending ones first."""
        its = schema.items.c
        async with self._database.read() as connection:
            rows = (
                await connection.execute(
                    sa.select(schema.items).where(
                        its.tenant == tenant,
                        its.conversation == conversation,
                        its.kind == KINDS["interaction"],
                        its.item == f"interaction/{interaction}",
                    )
                )
            ).all()
        views = [_interaction(row) for row in rows]
        return sorted(views, key=lambda view: view.state != "pending")

    async def receipt(self, tenant: str, control: str, execution: str | None) -> tuple[str, dict[str, Any]] | None:
        """(execution, receipt) of a control that the log knows."""
        table, runs = schema.receipts.c, schema.executions.c
        query = sa.select(schema.receipts).where(table.tenant == tenant, table.control == control)
        if execution is not None:
            # Of its own conversation: another one's sandbox may tell of any control.
            where = sa.select(runs.conversation).where(runs.tenant == tenant, runs.execution == execution)
            late = (table.execution == EXECUTION_TOKEN_CONVERSATION) & (table.conversation == where.scalar_subquery())
            query = query.where((table.execution == execution) | late)
        async with self._database.read() as connection:
            rows = (await connection.execute(query.order_by(table.at.desc()).limit(2))).all()
        if not rows or len({row.conversation for row in rows}) > 1:
            return None  # several tell of it: only who names the execution can be answered
        return rows[0].execution, dict(rows[0].body)


async def _conversation_row(connection: AsyncConnection, tenant: str, conversation: str) -> Any:
    table = schema.conversations.c
    query = sa.select(schema.conversations).where(table.tenant == tenant, table.conversation == conversation)
    return (await connection.execute(query)).one_or_none()


async def _entries(
    connection: AsyncConnection, tenant: str, conversation: str, before: int | None, limit: int
) -> list[Any]:
    """The newest entries before a place, in order."""
    table = schema.entries.c
    query = sa.select(schema.entries).where(table.tenant == tenant, table.conversation == conversation)
    if before is not None:
        query = query.where(table.place < before)
    rows = (await connection.execute(query.order_by(table.place.desc()).limit(limit))).all()
    return list(reversed(rows))


async def _responses(
    connection: AsyncConnection, tenant: str, conversation: str, first: int, before: int | None
) -> list[Any]:
    table = schema.responses.c
    query = sa.select(schema.responses).where(
        table.tenant == tenant, table.conversation == conversation, table.place >= first
    )
    if before is not None:
        query = query.where(table.place < before)
    return list((await connection.execute(query.order_by(table.place))).all())


async def _orphans(connection: AsyncConnection, tenant: str, conversation: str) -> list[str]:
    runs = schema.executions.c
    replies = schema.responses.c
    named = sa.select(replies.execution).where(
        replies.tenant == tenant, replies.conversation == conversation, replies.execution.is_not(None)
    )
    query = sa.select(runs.execution).where(
        runs.tenant == tenant, runs.conversation == conversation, runs.execution.not_in(named)
    )
    return list(await connection.scalars(query.order_by(runs.updated_at)))


async def _execution_rows(connection: AsyncConnection, tenant: str, names: Sequence[str]) -> list[Any]:
    table = schema.executions.c
    query = sa.select(schema.executions).where(table.tenant == tenant, table.execution.in_(names))
    rows = {row.execution: row for row in await connection.execute(query)}
    return [rows[name] for name in names if name in rows]


async def _items(connection: AsyncConnection, tenant: str, names: Sequence[str], limit: int) -> list[ItemView]:
    """Items of these executions in order, at most `limit`, the newest executions' first to be kept."""
    its = schema.items.c
    kept: list[ItemView] = []
    for name in reversed(names):
        if len(kept) >= limit:
            break
        rows = await connection.execute(
            sa.select(*_ITEM_COLUMNS)
            .where(its.tenant == tenant, its.execution == name)
            .order_by(its.position.desc())
            .limit(limit - len(kept))
        )
        kept.extend(_item_views(rows))
    kept.reverse()
    return kept


async def _by_kind(connection: AsyncConnection, tenant: str, names: Sequence[str], kind: str) -> list[Any]:
    """Items of a kind in order, at most a page, the newest to be kept: what still waits is among them."""
    its = schema.items.c
    kept: list[Any] = []
    for name in reversed(names):
        if len(kept) >= ITEMS_PAGE_MAX:
            break
        query = (
            sa.select(schema.items)
            .where(its.tenant == tenant, its.execution == name, its.kind == KINDS[kind])
            .order_by(its.position.desc())
            .limit(ITEMS_PAGE_MAX - len(kept))
        )
        kept.extend(await connection.execute(query))
    kept.reverse()
    return kept


async def _usage(connection: AsyncConnection, tenant: str, names: Sequence[str]) -> list[UsageView]:
    table = schema.usage.c
    query = sa.select(schema.usage).where(table.tenant == tenant, table.execution.in_(names)).limit(ITEMS_PAGE_MAX)
    rows = await connection.execute(query.order_by(table.execution, table.turn))
    return [UsageView.model_validate(dict(row._mapping)) for row in rows]


async def _active(connection: AsyncConnection, tenant: str, names: Sequence[str]) -> dict[str, str]:
    table = schema.executions.c
    query = sa.select(table.conversation, table.execution).where(
        table.tenant == tenant, table.conversation.in_(names), table.phase != "ended"
    )
    return {row.conversation: row.execution for row in await connection.execute(query.order_by(table.updated_at))}


async def _pending_rows(
    connection: AsyncConnection, tenant: str, conversations: Sequence[str]
) -> dict[tuple[str, str], int]:
    """How many interactions wait for a human, by (conversation, execution)."""
    its = schema.items.c
    query = (
        sa.select(its.conversation, its.execution, sa.func.count().label("total"))
        .where(
            its.tenant == tenant,
            its.conversation.in_(conversations),
            its.kind == KINDS["interaction"],
            its.status == "pending",
        )
        .group_by(its.conversation, its.execution)
    )
    return {(row.conversation, row.execution): row.total for row in await connection.execute(query)}


async def _pending(connection: AsyncConnection, tenant: str, conversations: Sequence[str]) -> dict[str, int]:
    rows = await _pending_rows(connection, tenant, conversations)
    return {execution: count for (_, execution), count in rows.items()}


async def _views(connection: AsyncConnection, tenant: str, rows: Sequence[Any]) -> list[ExecutionView]:
    names = [row.execution for row in rows]
    replies = schema.responses.c
    responses = (
        await connection.execute(
            sa.select(schema.responses).where(replies.tenant == tenant, replies.execution.in_(names))
        )
    ).all()
    pending = await _pending(connection, tenant, sorted({row.conversation for row in rows}))
    return [
        _execution(row, ExecutionState.model_validate(row.state), pending.get(row.execution, 0), responses)
        for row in rows
    ]


def _messages(entries: Sequence[Any], responses: Sequence[Any]) -> list[MessageView]:
    answers = {row.request: row.response for row in responses if row.execution}
    return [
        MessageView(
            request=row.body.get("request", ""),
            place=row.place,
            at=row.at,
            content=row.body.get("content", []),
            into=row.body.get("into"),
            response=answers.get(row.body.get("request", "")),
            author=row.body.get("author"),
        )
        for row in entries
        if row.type == ev.PROMPT_ADMITTED
    ]


def _response(row: Any, states: dict[str, ExecutionState]) -> ResponseView:
    state = states.get(row.execution or "")
    outcome: Any = None
    error = row.error
    if row.state == "failed":
        outcome = "failed"
    elif row.state == "superseded":
        outcome = "superseded"
    elif state is not None:
        outcome = state.response_outcome or state.outcome
        error = error or state.error
    return ResponseView(
        response=row.response,
        request=row.request,
        place=row.place,
        generation=row.generation,
        execution=row.execution,
        agent=row.agent or "",
        at=row.at,
        outcome=outcome,
        error=error,
        ended_at=(state.response_ended_at or state.ended_at) if state is not None else None,
        superseded_by=row.superseded_by,
    )


def _recovery(row: Any) -> RecoveryView:
    try:
        return RecoveryView(place=row.place, at=row.at, **ev.Recovery.model_validate(row.body).model_dump())
    except ValidationError:
        return RecoveryView(place=row.place, at=row.at)


def _failure(row: Any) -> FailureView:
    error = row.error or {}
    return FailureView(
        request=row.request,
        place=row.place,
        at=row.at,
        code=error.get("code", ""),
        detail=error.get("detail", ""),
        retryable=error.get("retryable", False),
        response=row.response if not row.response.endswith("/failed") else None,
    )


def _execution(row: Any, state: ExecutionState, pending: int, responses: Sequence[Any]) -> ExecutionView:
    mine = next((one for one in responses if one.execution == row.execution), None)
    target = state.target or {}
    outcome: Any = state.outcome
    return ExecutionView(
        execution=row.execution,
        conversation=row.conversation,
        workspace=row.workspace,
        response=mine.response if mine is not None else target.get("response"),
        generation=target.get("execution_generation", 0),
        state=state.phase,
        applied=state.applied,
        agent=state.agent,
        native_session=state.native_session,
        model=state.model,
        started_at=state.started_at,
        ended_at=state.ended_at,
        outcome=outcome,
        proof=state.proof,
        exit=state.exit,
        error=state.error,
        items=row.items,
        pending_interactions=pending,
        partial=state.partial,
    )


def _item_views(rows: Iterable[Any]) -> list[ItemView]:
    """In one go: a page may have a thousand of them."""
    return _ITEMS.validate_python(
        [{"execution": row[0], "item": row[1], "position": row[2], "kind": row[3], "state": row[4]} for row in rows]
    )


def _interaction(row: Any) -> InteractionView:
    state = row.state
    return InteractionView(
        execution=row.execution,
        interaction=state["id"],
        asks=state["asks"],
        state=state["state"],
        name=state.get("name", ""),
        tool=state.get("tool"),
        input=state.get("input"),
        description=state.get("description"),
        questions=state.get("questions", []),
        options=state.get("options", []),
        offered=state.get("offered"),
        control=state.get("control"),
    )


def _gap(row: Any) -> GapView:
    state = row.state
    return GapView(
        execution=row.execution,
        first=state.get("from_ordinal"),
        last=state.get("to_ordinal"),
        reason=state["reason"],
        detail=state.get("detail"),
    )
