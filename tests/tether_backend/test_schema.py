"""The migrations make the schema that the code has, from nothing and from a database of an earlier version."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext

import tether_backend.store.engine as engine
from tether_backend.store import schema
from tether_backend.store.engine import open_database
from tether_backend.store.recovery import Recoveries


def _differences(connection: sa.Connection) -> list[object]:
    found = compare_metadata(MigrationContext.configure(connection), schema.METADATA)
    # SQLite does not tell the condition of a partial index: those are compared by name.
    return [one for one in found if one[0] not in ("remove_index", "add_index")] + [
        one for one in found if one[0] == "add_index" and one[1].name not in _indexes(connection)
    ]


def _indexes(connection: sa.Connection) -> set[str]:
    inspector = sa.inspect(connection)
    return {str(index["name"]) for table in inspector.get_table_names() for index in inspector.get_indexes(table)}


async def test_the_migrations_make_the_tables_that_the_code_has(tmp_path: Path) -> None:
    database = await open_database(f"sqlite+aiosqlite:///{tmp_path / 'db.sqlite3'}")
    try:
        async with database.read() as connection:
            assert await connection.run_sync(_differences) == []
            named = await connection.run_sync(_indexes)
        assert {index.name for table in schema.METADATA.tables.values() for index in table.indexes} <= named
    finally:
        await database.close()


async def test_a_database_of_an_earlier_version_keeps_its_rows_and_gets_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "db.sqlite3"
    made = sa.create_engine(f"sqlite:///{path}")
    with made.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(engine._MIGRATIONS))
        config.attributes["connection"] = connection
        command.upgrade(config, "0002")
    made.dispose()
    with sqlite3.connect(path) as raw:
        raw.execute(
            "INSERT INTO executions "
            "(tenant, execution, conversation, workspace, applied, phase, items, updated_at, state)"
            " VALUES ('t', 'e1', 'c1', 'w', 4, 'running', 0, 1, '{}')"
        )
    raw.close()
    database = await open_database(f"sqlite+aiosqlite:///{path}")
    try:
        rows = Recoveries(database, "t")
        assert [(one.address.execution, one.mark) for one in await rows.unfinished("")] == [("e1", 5)]
        assert await rows.wanted() == []
    finally:
        await database.close()


async def test_what_is_unfinished_is_found_by_its_index(tmp_path: Path) -> None:
    database = await open_database(f"sqlite+aiosqlite:///{tmp_path / 'db.sqlite3'}")
    try:
        async with database.read() as connection:
            plan = await connection.exec_driver_sql(
                "EXPLAIN QUERY PLAN SELECT execution FROM executions WHERE tenant = 't' AND phase != 'ended' "
                "AND execution > '' ORDER BY execution LIMIT 256"
            )
            told = " ".join(str(row) for row in plan)
        assert "executions_open" in told and "SCAN executions " not in told, told
    finally:
        await database.close()
