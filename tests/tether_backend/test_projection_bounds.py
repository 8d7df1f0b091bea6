"""What the projection costs is bounded: statements of a batch, size of a batch, memory between batches, pages read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from support_backend import Log, ended, ensure_tenants, event, project_all, text_delta
from tether import events as ev
from tether.api import ITEMS_PAGE_MAX
from tether.events import Event
from tether.fold import ExecutionFold
from tether.frames import Frame, Position
from tether.subjects import EventAddress
from tether.testing import MemoryBus, MemoryServer
from tether_backend.core.projection import ITEM_BYTES, Builder, Kept
from tether_backend.core.stream import LogMessage
from tether_backend.metrics import Metrics
from tether_backend.projector import BATCH_MAX, EVENTS_MAX, Projector
from tether_backend.store import schema
from tether_backend.store.engine import Database, open_database, upsert_statement
from tether_backend.store.history import History
from tether_backend.store.projection import ProjectionWriter

TENANT = "acme"


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    found = await open_database(f"sqlite+aiosqlite:///{tmp_path / 'db.sqlite3'}")
    try:
        yield found
    finally:
        await found.close()


@contextmanager
def statements(database: Database) -> Iterator[list[tuple[str, Any]]]:
    """(SQL, parameters) of everything that is executed in the block."""
    seen: list[tuple[str, Any]] = []

    def before(_c: Any, _cursor: Any, statement: str, parameters: Any, _x: Any, _many: bool) -> None:
        seen.append((statement, parameters))

    sa.event.listen(database.engine.sync_engine, "before_cursor_execute", before)
    try:
        yield seen
    finally:
        sa.event.remove(database.engine.sync_engine, "before_cursor_execute", before)


def address(number: int) -> EventAddress:
    return EventAddress(TENANT, f"w{number}", f"c{number}", f"e{number}")


def message(where: EventAddress, sequence: int, events: Sequence[Event], size_bytes: int = 1000) -> LogMessage:
    frame = Frame(first=events[0].ordinal, last=events[-1].end, pos=Position(record=0, index=0), events=[*events])
    return LogMessage(where, sequence, 1, frame, size_bytes=size_bytes)


def texts(first: int, count: int) -> list[Event]:
    return [event(n, ev.TEXT_COMPLETED, {"segment": f"s{n}", "text": f"text {n}"}) for n in range(first, first + count)]


def writer(database: Database, kept: Kept | None = None) -> ProjectionWriter:
    return ProjectionWriter(MemoryBus(MemoryServer()), database, TENANT, 0, Metrics(), kept=kept)


async def test_the_statements_of_a_batch_do_not_grow_with_its_executions_and_items(database: Database) -> None:
    projection = writer(database)
    counts = []
    for number, executions in enumerate((1, 20), start=1):
        batch = [message(address(100 * number + one), one + 1, texts(1, 12)) for one in range(executions)]
        with statements(database) as seen:
            await projection.commit(number, batch)
        counts.append(len(seen))
        rows = [parameters for sql, parameters in seen if sql.startswith("INSERT INTO items ")]
        assert [len(one) for one in rows] == [12 * executions]
    # The very first batch also makes the projection's own row.
    assert counts[1] <= counts[0] <= 9


async def test_of_rows_with_one_key_the_last_one_is_kept_and_without_replacing_the_first(database: Database) -> None:
    rows = [{"key": "k", "value": str(number)} for number in range(600)]
    for replace, expected in ((False, "0"), (True, "599")):
        async with database.write() as connection:
            await database.upsert(connection, schema.meta, rows, replace=replace)
        async with database.read() as connection:
            query = sa.select(schema.meta.c.value).where(schema.meta.c.key == "k")
            assert await connection.scalar(query) == expected


@pytest.mark.parametrize("replace", [True, False])
def test_what_is_written_is_one_statement_for_one_row_in_postgresql_too(replace: bool) -> None:
    for table in schema.METADATA.sorted_tables:
        statement = upsert_statement(postgresql.insert(table), table, replace)
        names = [column.name for column in table.c]
        dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
        sql = str(statement.compile(dialect=dialect, column_keys=names))
        assert sql.count("VALUES (") == 1 and f"ON CONFLICT ({', '.join(c.name for c in table.primary_key)})" in sql
        assert ("DO UPDATE SET" if replace else "DO NOTHING") in sql


async def test_a_backlog_is_many_batches_bounded_in_events(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = MemoryBus(MemoryServer())
    await ensure_tenants(bus, [TENANT])
    log = Log(bus, TENANT)
    frames = 40
    for number in range(frames):
        first = 1 + number * 512
        await log.frame("e1", [text_delta(n, "x", segment=f"s{n % 7}") for n in range(first, first + 512)])
    projector = Projector(bus, database, TENANT, Metrics())
    sizes: list[int] = []
    commit = projector.writer.commit

    async def counted(number: int, messages: Sequence[LogMessage]) -> None:
        sizes.append(sum(one.count for one in messages))
        await commit(number, messages)

    monkeypatch.setattr(projector.writer, "commit", counted)
    await project_all(projector, bus)
    assert sum(sizes) == frames * 512 and max(sizes) < EVENTS_MAX + 512
    assert len(sizes) >= frames * 512 // EVENTS_MAX


async def test_small_messages_are_bounded_in_number(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = MemoryBus(MemoryServer())
    await ensure_tenants(bus, [TENANT])
    log = Log(bus, TENANT)
    for n in range(1, BATCH_MAX + 100):
        await log.frame("e1", [text_delta(n, "x", offset=n - 1)])
    projector = Projector(bus, database, TENANT, Metrics())
    sizes: list[int] = []
    commit = projector.writer.commit

    async def counted(number: int, messages: Sequence[LogMessage]) -> None:
        sizes.append(len(messages))
        await commit(number, messages)

    monkeypatch.setattr(projector.writer, "commit", counted)
    await project_all(projector, bus)
    assert sum(sizes) == BATCH_MAX + 99 and max(sizes) <= BATCH_MAX


# --- memory ---


def built(number: int, items: int) -> Builder:
    builder = Builder(address(number))
    frame = message(address(number), 1, texts(1, items)).content
    assert isinstance(frame, Frame)
    assert builder.apply(frame, 100 * items)
    return builder


def test_an_execution_that_has_ended_is_not_kept() -> None:
    kept = Kept()
    builder = built(1, 10)
    kept.put(builder)
    assert kept.get("e1") is builder and kept.size_bytes == builder.size_bytes >= 10 * ITEM_BYTES
    builder.apply(Frame(first=11, last=12, pos=Position(record=0, index=0), events=ended(11)))
    kept.put(builder)
    assert kept.get("e1") is None and (len(kept), kept.size_bytes) == (0, 0)


def test_the_least_recently_used_executions_go_first_and_the_size_is_that_of_those_that_stay() -> None:
    each = built(0, 10).size_bytes
    kept = Kept(idle_bytes_max=3 * each, bytes_max=5 * each)
    builders = [built(number, 10) for number in range(8)]
    for builder in builders[:4]:
        kept.put(builder)
    kept.put(builders[0])
    kept.trim({"e0"})
    assert [kept.get(f"e{number}") is not None for number in range(4)] == [True, False, True, True]
    for builder in builders:
        kept.put(builder)
    kept.trim({f"e{number}" for number in range(8)})  # all of them busy: the larger bound counts
    assert [number for number in range(8) if kept.get(f"e{number}")] == [3, 4, 5, 6, 7]
    kept.trim({"e7"})
    assert [number for number in range(8) if kept.get(f"e{number}")] == [5, 6, 7]
    assert kept.size_bytes == 3 * each
    kept.clear()
    assert (len(kept), kept.size_bytes) == (0, 0)


def test_one_execution_stays_however_large_it_is() -> None:
    kept = Kept(idle_bytes_max=1, bytes_max=1)
    kept.put(built(1, 10))
    kept.trim({"e1"})
    assert kept.get("e1") is not None


def test_a_builder_loaded_from_rows_weighs_about_as_much_as_the_one_that_was_let_go() -> None:
    builder = built(1, 200)
    state = builder.fold.freeze()
    loaded = Builder.load(address(1), state, [f"text/{item.id}" for item in state.items])
    assert 0.5 < loaded.size_bytes / builder.size_bytes < 2


async def test_executions_go_on_from_their_rows_when_memory_has_no_room_for_them(database: Database) -> None:
    kept = Kept(idle_bytes_max=1, bytes_max=1)
    projection = writer(database, kept)
    folds = {number: ExecutionFold() for number in range(4)}
    for turn in range(5):
        for number, fold in folds.items():
            events = [text_delta(turn * 2 + 1, "ab", offset=2 * turn), *texts(turn * 2 + 2, 1)]
            for one in events:
                fold.apply(one)
            await projection.commit(turn * 4 + number + 1, [message(address(number), 1 + turn * 4 + number, events)])
            assert len(kept) == 1
    history = History(database)
    for number, fold in folds.items():
        found = await history.state(TENANT, f"e{number}")
        assert found is not None and found[1] == fold.freeze()


async def test_what_comes_again_of_an_ended_execution_is_trimmed_without_loading_it(database: Database) -> None:
    kept = Kept()
    projection = writer(database, kept)
    whole = message(address(1), 1, [*texts(1, 5), *ended(6)])
    await projection.commit(1, [whole])
    assert len(kept) == 0
    with statements(database) as seen:
        await projection.commit(2, [whole])
    assert not [sql for sql, _ in seen if "items" in sql]


# --- pages ---


async def plan(database: Database, sql: str, parameters: Any) -> list[str]:
    async with database.engine.connect() as connection:
        rows = await connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", parameters)
        return [str(row.detail) for row in rows]


async def test_a_page_of_history_reads_nothing_of_an_execution_beyond_the_page(database: Database) -> None:
    count = ITEMS_PAGE_MAX + 500
    asked = {"interaction": "i1", "kind": "approval"}
    events = [event(1, ev.INTERACTION_REQUESTED, asked), *texts(2, count - 1)]
    await writer(database).commit(1, [message(address(1), 1, events)])
    history = History(database)
    with statements(database) as seen:
        page = await history.conversation(TENANT, "c1", cursor="", workspace="w", before=None, limit=50)
        await history.conversations(TENANT, limit=50, after=None)
        await history.execution(TENANT, "e1")
    assert len(page.items) == ITEMS_PAGE_MAX and page.items_omitted == 500
    assert page.items[-1].item == f"text/s{count}" and page.executions[0].pending_interactions == 1
    assert [one.interaction for one in page.interactions] == ["i1"]
    on_items = [(sql, parameters) for sql, parameters in seen if "FROM items" in sql]
    assert len(on_items) >= 5
    for sql, parameters in on_items:
        steps = [step for step in await plan(database, sql, parameters) if "items" in step]
        assert steps and all(step.startswith("SEARCH items") for step in steps), (sql, steps)
        if "kind = " in sql:
            assert all("items_told" in step or "items_asked" in step for step in steps), (sql, steps)
        else:  # in order of the primary key, as far as the page goes
            assert "LIMIT" in sql and "count(" not in sql


async def test_of_many_interactions_the_newest_are_on_the_page(database: Database) -> None:
    count = ITEMS_PAGE_MAX + 3
    projection = writer(database)
    made = [event(n, ev.INTERACTION_REQUESTED, {"interaction": f"i{n}", "kind": "approval"}) for n in range(1, count)]
    await projection.commit(1, [message(address(1), 1, made)])
    page = await History(database).conversation(TENANT, "c1", cursor="", workspace="w", before=None, limit=50)
    assert [one.interaction for one in page.interactions] == [f"i{n}" for n in range(3, count)]
    assert page.executions[0].pending_interactions == count - 1
