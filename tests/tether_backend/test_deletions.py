"""A deleted conversation in the rows and to readers: gone, raised by nothing that comes late, its neighbours whole."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from support_backend import (
    Backend,
    Log,
    Reader,
    Sse,
    ended,
    ensure_tenants,
    event,
    eventually,
    project_all,
    projecting,
    running_backend,
)
from tether import events as ev
from tether import subjects
from tether.bindings import Bindings
from tether.deletion import DeletionRecord, begin_deletion
from tether.kv import Bucket
from tether.limits import NUMBER_MAX
from tether.testing import MemoryBus, MemoryServer
from tether.testing.clock import VirtualClock
from tether_backend.metrics import Metrics
from tether_backend.projector import Projector
from tether_backend.store import deletions, schema
from tether_backend.store.engine import Database, open_database

TENANT: Final = "acme"
MARKER: Final = "MARKER-of-what-is-deleted"


@contextlib.asynccontextmanager
async def database_in(folder: Path) -> AsyncIterator[Database]:
    database = await open_database(f"sqlite+aiosqlite:///{folder / 'db.sqlite3'}")
    try:
        yield database
    finally:
        await database.close()


def a_bus() -> MemoryBus:
    """Its clock is ours: a deletion is of a time."""
    return MemoryBus(MemoryServer(clock=VirtualClock(time.time_ns())))


def projector(bus: MemoryBus, database: Database) -> Projector:
    return Projector(bus, database, TENANT, Metrics())


async def told(bus: MemoryBus, conversation: str, text: str) -> Log:
    """A whole conversation, its text in a message, in an answer and in a tool's output."""
    log = Log(bus, TENANT, conversation)
    name = f"e-{conversation}"
    await log.prompt(f"q-{conversation}", f"r-{conversation}", name, text)
    await log.own(name)
    done = {"segment": "s1", "text": f"{text} answered"}
    tool = {"tool": "t1", "status": "ok", "output": text}
    used = {"turn": "1", "input_tokens": 3, "output_tokens": 4}
    events = [
        log.started(name),
        event(2, ev.TEXT_COMPLETED, done),
        event(3, ev.TOOL_STARTED, {"tool": "t1", "name": "dig", "input": {"what": text}}),
        event(4, ev.TOOL_COMPLETED, tool),
        event(5, ev.USAGE, used),
        *ended(6),
    ]
    await log.frame(name, events)
    return log


async def deleted(bus: MemoryBus, log: Log, *, until: int = NUMBER_MAX, deletion: str = "del_1") -> None:
    """As a router does it: the record, then the log. (Here the log is left as it is: late messages.)"""
    now_ms = time.time_ns() // 1_000_000
    await log.own(None)
    await begin_deletion(bus, TENANT, log.conversation, deletion=deletion, force=False, by="", now_ms=now_ms)
    await log.note(ev.CONVERSATION_DELETED, f"{deletion}/{until}", {"deletion": deletion, "until": until})


def is_in(folder: Path) -> bool:
    """The marker, in any file of the database."""
    return any(MARKER.encode() in path.read_bytes() for path in folder.glob("db.sqlite3*"))


async def frames_until(reader: Reader, last: Callable[[Sse], bool]) -> list[Sse]:
    found: list[Sse] = []
    while not found or not last(found[-1]):
        frame = await reader.next()
        assert frame is not None, "the stream ended before"
        found.append(frame)
    return found


async def rows_of(database: Database, conversation: str) -> dict[str, int]:
    found = {}
    async with database.read() as connection:
        for name, table in schema.METADATA.tables.items():
            if "conversation" in table.c and name != "deletions":
                rows = await connection.execute(table.select().where(table.c.conversation == conversation))
                found[name] = len(rows.all())
    return {name: count for name, count in found.items() if count}


async def test_rows_go_with_the_event_and_the_neighbours_stay(tmp_path: Path) -> None:
    bus = a_bus()
    async with running_backend(bus, [TENANT], tmp_path) as backend:
        doomed = await told(bus, "doomed", MARKER)
        await told(bus, "calm", "neighbour")
        await backend.projected("doomed", "e-doomed", 7)
        before = await rows_of(backend.deps.database, "calm")
        assert len(before) >= 5
        await deleted(bus, doomed)

        async def gone() -> bool:
            return not await rows_of(backend.deps.database, "doomed")

        await eventually(gone, "no row")
        assert await rows_of(backend.deps.database, "calm") == before
        answer = await backend.client.get("/v1/conversations/doomed")
        assert (answer.status_code, answer.json()["code"]) == (410, "CONVERSATION_DELETED")
        listed = (await backend.client.get("/v1/conversations")).json()["conversations"]
        assert [one["conversation"] for one in listed] == ["calm"]


async def test_nothing_of_it_is_left_in_the_databases_files(tmp_path: Path) -> None:
    bus = a_bus()
    async with running_backend(bus, [TENANT], tmp_path) as backend:
        doomed = await told(bus, "doomed", MARKER)
        await backend.projected("doomed", "e-doomed", 7)
        assert is_in(tmp_path)
        await deleted(bus, doomed)

        async def gone() -> bool:
            return not is_in(tmp_path)

        await eventually(gone, "no marker in the database, its log and its index")


async def test_a_crash_before_the_rows_are_all_gone_leaves_the_rest_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = a_bus()

    await ensure_tenants(bus, [TENANT])
    log = await told(bus, "doomed", MARKER)
    async with database_in(tmp_path) as database:
        await project_all(projector(bus, database), bus)
        await deleted(bus, log)
        table = deletions._TABLES[2]

        class BrokenError(OSError):
            pass

        real = database.write
        writes = 0

        @contextlib.asynccontextmanager
        async def breaks() -> AsyncIterator[Any]:
            nonlocal writes
            writes += 1
            if writes == 3:
                raise BrokenError(table.name)
            async with real() as connection:
                yield connection

        monkeypatch.setattr(database, "write", breaks)

        async def gone() -> bool:
            return writes > 3 and not await rows_of(database, "doomed")

        async with projecting(projector(bus, database)):
            await eventually(gone, "no row, after it broke")


async def test_an_event_that_no_record_names_deletes_nothing(tmp_path: Path) -> None:
    """A sandbox may write it to its conversation's log."""
    bus = a_bus()
    async with running_backend(bus, [TENANT], tmp_path) as backend:
        log = await told(bus, "c1", "stays")
        await log.note(ev.CONVERSATION_DELETED, "forged", {"deletion": "del_forged", "until": NUMBER_MAX})
        await log.prompt("q2", "r2", "e2", "and goes on")

        async def applied() -> Any:
            found = (await backend.client.get("/v1/conversations/c1")).json()
            return found if len(found.get("messages", [])) == 2 else None

        found = await eventually(applied, "both messages")
        assert found["executions"][0]["outcome"] == "completed"


async def test_a_reader_is_told_why_its_stream_ends_and_a_forged_event_ends_none(tmp_path: Path) -> None:
    bus = a_bus()
    async with running_backend(bus, [TENANT], tmp_path) as backend:
        log = await told(bus, "c1", "something")
        reader = backend.reader("c1")
        await reader.open()
        await log.note(ev.CONVERSATION_DELETED, "forged", {"deletion": "del_forged", "until": NUMBER_MAX})
        frames = await frames_until(reader, lambda frame: frame.data.get("id") == "forged")
        assert frames[-1].data["type"] == "conversation.deleted", "told as any event, and nothing ends"
        await deleted(bus, log)
        frames = await frames_until(reader, lambda frame: frame.name == "end")
        problems = [frame.data for frame in frames if frame.name == "problem"]
        assert [one["code"] for one in problems] == ["CONVERSATION_DELETED"]
        assert frames[-1].data["outcome"] == "deleted"


async def test_what_comes_late_or_is_read_again_raises_nothing(tmp_path: Path) -> None:
    bus = a_bus()
    async with running_backend(bus, [TENANT], tmp_path) as backend:
        log = await told(bus, "doomed", MARKER)
        await backend.projected("doomed", "e-doomed", 7)
        await deleted(bus, log)
        await log.prompt("q-late", "r-late", "e-late", MARKER)
        await log.frame("e-late", [log.started("e-late")])
        await told(bus, "after", "projected behind it")
        await backend.projected("after", "e-after", 7)
        assert await rows_of(backend.deps.database, "doomed") == {}
    # Another database reads the whole log, which here still has everything.
    (tmp_path / "other").mkdir()
    async with database_in(tmp_path / "other") as database:
        await project_all(projector(bus, database), bus)
        assert await rows_of(database, "doomed") == {}
        assert await rows_of(database, "after")


async def test_once_the_id_is_free_a_new_conversation_has_its_own_rows_alone(tmp_path: Path) -> None:
    bus = a_bus()
    async with running_backend(bus, [TENANT], tmp_path) as backend:
        log = await told(bus, "again", MARKER)
        await deleted(bus, log)
        until = bus.server.clock.now_ns() // 1_000_000 + 1
        await log.note(ev.CONVERSATION_DELETED, "del_1/free", {"deletion": "del_1", "until": until})
        await freed(bus, "again")
        bus.server.clock.advance(0.01)
        await log.prompt("q-new", "r-new", "e-new", "a new life")
        await log.frame("e-new", [log.started("e-new"), *ended(2)])
        found = await backend.projected("again", "e-new", 3)
        assert [one["request"] for one in found["messages"]] == ["q-new"]
        assert [one["execution"] for one in found["executions"]] == ["e-new"]


async def freed(bus: MemoryBus, conversation: str) -> None:
    bucket = Bucket(bus, subjects.DELETIONS)
    entry = await bucket.get(subjects.deletion_key(TENANT, conversation))
    assert entry is not None
    record = bucket.parse(entry, DeletionRecord).model_copy(update={"state": "freed"})
    await bucket.update(entry.key, record.value(), op="op", revision=entry.revision)


async def test_orders_over_http_join_and_are_refused_by_name(tmp_path: Path) -> None:
    bus = a_bus()
    async with running_backend(bus, [TENANT], tmp_path) as backend:
        log = await told(bus, "c1", "something")
        await busy(backend, log)
        await log.own(None)
        first = (await backend.client.delete("/v1/conversations/c1?deletion_id=mine")).json()
        again = await backend.client.delete("/v1/conversations/c1")
        assert (again.status_code, again.json()["deletion"]) == (202, "mine")
        assert first["state"] == "running"
        shown = await backend.client.get("/v1/conversations/c1/deletion")
        assert shown.json() == first
        for path, status, code in (
            ("/v1/conversations/c9", 404, "NOT_FOUND"),
            ("/v1/conversations/c1?forec=true", 422, "INVALID"),
        ):
            refused = await backend.client.delete(path)
            assert (refused.status_code, refused.json()["code"]) == (status, code)
        assert (await backend.client.get("/v1/conversations/c9/deletion")).status_code == 404
        assert (await backend.client.get("/v1/conversations/c1/export")).status_code == 410


async def busy(backend: Backend, log: Log) -> None:
    refused = await backend.client.delete("/v1/conversations/c1")
    assert (refused.status_code, refused.json()["code"]) == (409, "SESSION_BUSY")
    assert refused.json()["context"]["execution"] == "e-c1"
    assert (await backend.client.get("/v1/conversations/c1/deletion")).status_code == 404, "nothing was ordered"


async def test_a_deleted_conversation_may_live_elsewhere_afterwards() -> None:
    """What is remembered of workspaces is forgotten with it."""
    bus = a_bus()

    await ensure_tenants(bus, [TENANT])
    bindings = Bindings(bus, TENANT)
    await Bucket(bus, subjects.CONVERSATIONS).create(f"{TENANT}.c1", {"workspace": "w1"}, op="op")
    assert await bindings.workspace("c1") == "w1"
    bindings.forget()
    entry = await Bucket(bus, subjects.CONVERSATIONS).get(f"{TENANT}.c1")
    assert entry is not None
    await Bucket(bus, subjects.CONVERSATIONS).delete(f"{TENANT}.c1", revision=entry.revision)
    await Bucket(bus, subjects.CONVERSATIONS).create(f"{TENANT}.c1", {"workspace": "w2"}, op="op2")
    assert await bindings.workspace("c1") == "w2"


def test_sqlite_overwrites_what_is_deleted(tmp_path: Path) -> None:
    """The default leaves it in free pages: the setting is what the promise stands on."""

    async def opened() -> None:
        async with database_in(tmp_path) as database, database.engine.connect() as connection:
            assert (await connection.exec_driver_sql("PRAGMA secure_delete")).scalar() == 1

    asyncio.run(opened())
    with closing(sqlite3.connect(tmp_path / "db.sqlite3")) as plain:
        assert plain.execute("SELECT count(*) FROM deletions").fetchone() == (0,)
