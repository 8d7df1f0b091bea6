"""The database: engine, dialect's upsert, read and write transactions, migrations under a lock, the database's id.

SQLite (the default) and PostgreSQL. A write transaction of SQLite begins IMMEDIATE, so that two writers queue instead
of failing in the middle; readers go on beside it (WAL). A read transaction sees one state of the database throughout.
SQLite's own queue is none: who waits there looks again and again, and may be overtaken for ever. So the writers of one
process queue here, in order of arrival: however much one tenant has to write, the others' transactions come in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pydantic_core
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from tether.settings import ConfigurationError
from tether_backend.store import schema

_MIGRATIONS: Final = Path(__file__).parent / "migrations"
_DATABASE_ID: Final = "database_id"
_ADVISORY_LOCK: Final = 7_308_321_905  # an arbitrary number of this product, for pg_advisory_lock
_BUSY_MS: Final = 10_000  # a writer of SQLite waits so long for another
_ROWS_MAX: Final = 256  # rows of one call: wording them holds the event loop, some milliseconds each time


def upsert_statement(insert: Any, table: sa.Table, replace: bool) -> Any:
    """Of a dialect's INSERT of one row with every column: ON CONFLICT replace the other columns, or do nothing."""
    keys = [column.name for column in table.primary_key]
    if not replace:
        return insert.on_conflict_do_nothing(index_elements=keys)
    rest = {column.name: insert.excluded[column.name] for column in table.c if column.name not in keys}
    return insert.on_conflict_do_update(index_elements=keys, set_=rest)


class Database:
    """An open, migrated database. `id` was drawn when it was first migrated and travels with every copy of it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.id = ""
        self._postgres = engine.dialect.name == "postgresql"
        self._upserts: dict[tuple[str, bool], Any] = {}
        # Of SQLite's writers; a connection is taken only by the one whose turn it is, so readers always find one.
        self._turn: asyncio.Lock | contextlib.nullcontext[None] = (
            contextlib.nullcontext() if self._postgres else asyncio.Lock()
        )

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """One transaction: committed where the block ends, rolled back where it raises."""
        async with self._turn, self.engine.execution_options(tether_write=True).begin() as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        async with self.engine.connect() as connection:
            if self._postgres:
                await connection.execution_options(isolation_level="REPEATABLE READ")
            yield connection

    def insert(self, table: sa.Table) -> Any:
        """The dialect's INSERT, which knows ON CONFLICT."""
        return (postgresql.insert if self._postgres else sqlite.insert)(table)

    async def upsert(
        self, connection: AsyncConnection, table: sa.Table, rows: Sequence[dict[str, Any]], *, replace: bool = True
    ) -> None:
        """Insert rows, each with every column; on the same primary key replace the other columns, or keep what is
        there. Of rows with the same key the last counts (`replace`), or the first."""
        await self.execute_many(connection, self._upsert(table, replace), rows)

    async def execute_many(self, connection: AsyncConnection, statement: Any, rows: Sequence[dict[str, Any]]) -> None:
        """A statement for one row, compiled once, with each of the rows as its parameters."""
        for start in range(0, len(rows), _ROWS_MAX):
            await connection.execute(statement, rows[start : start + _ROWS_MAX])

    def _upsert(self, table: sa.Table, replace: bool) -> Any:
        known = self._upserts.get((table.name, replace))
        if known is None:
            known = self._upserts[table.name, replace] = upsert_statement(self.insert(table), table, replace)
        return known

    async def alive(self) -> bool:
        try:
            async with self.read() as connection:
                await connection.execute(sa.select(sa.literal(1)))
        except (SQLAlchemyError, OSError):
            return False
        return True

    async def emptied_log(self) -> bool:
        """Write SQLite's write-ahead log into the file and empty it; False where a reader was in the way. PostgreSQL
        keeps its own log, and reuses what rows held after its own vacuum: True."""
        if self._postgres:
            return True
        async with self.engine.connect() as connection:
            raw = await connection.get_raw_connection()
            driver = raw.driver_connection
            assert driver is not None
            cursor = await driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            row = await cursor.fetchone()
            await cursor.close()
        return row is not None and row[0] == 0

    async def close(self) -> None:
        await self.engine.dispose()


def _to_json(value: Any) -> str:
    return pydantic_core.to_json(value).decode()


def _configure_sqlite(engine: AsyncEngine) -> None:
    @sa.event.listens_for(engine.sync_engine, "connect")
    def connected(connection: Any, _: object) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
        cursor.execute("PRAGMA secure_delete=ON")  # what was deleted is not in the file's free pages
        cursor.close()

    @sa.event.listens_for(engine.sync_engine, "begin")
    def begin(connection: sa.Connection) -> None:
        write = connection.get_execution_options().get("tether_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _migrate(connection: sa.Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        # Alembic's way to say that it does not know the revision that stands in the database.
        detail = f"TETHER_DATABASE_URL: its schema is not one that this version knows ({error}); run the newer version"
        raise ConfigurationError([f"{detail}, or name an empty database: it is filled from the log"]) from None


async def _identify(database: Database) -> str:
    async with database.write() as connection:
        row = {"key": _DATABASE_ID, "value": f"db{secrets.token_hex(10)}"}
        await database.upsert(connection, schema.meta, [row], replace=False)
        found = await connection.scalar(sa.select(schema.meta.c.value).where(schema.meta.c.key == _DATABASE_ID))
    assert found is not None
    return str(found)


async def open_database(url: str) -> Database:
    """Open, migrate to the newest schema (one process at a time) and identify. Raises SQLAlchemyError, OSError, and
    ConfigurationError for a schema of a newer version."""
    parsed = make_url(url)
    file = parsed.database if parsed.get_backend_name() == "sqlite" else None
    if file:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
    engine = create_async_engine(
        parsed, pool_pre_ping=not file, json_serializer=_to_json, json_deserializer=pydantic_core.from_json
    )
    if parsed.get_backend_name() == "sqlite":
        _configure_sqlite(engine)
    database = Database(engine)
    try:
        if file:
            lock = _file_lock(Path(f"{file}.migrate.lock"))
            await asyncio.to_thread(lock.__enter__)
            try:
                await _upgrade(database)
            finally:
                lock.__exit__(None, None, None)
        else:
            await _upgrade(database)
        database.id = await _identify(database)
    except BaseException:
        await database.close()
        raise
    return database


async def _upgrade(database: Database) -> None:
    async with database.write() as connection:
        await connection.run_sync(_migrate)
