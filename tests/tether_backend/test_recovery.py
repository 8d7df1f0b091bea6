"""Rows that lack something are repaired from the collector's snapshot: once, told once, and only where it is proven."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support_backend import Backend, Log, ended, ensure_tenants, event, eventually, running_backend, text_delta
from support_snapshots import Collector, serving, snapshot_from
from support_websocket import SocketReader
from tether import events as ev
from tether import subjects
from tether.bus import NatsBus
from tether.events import ConversationEvent, Event
from tether.fold import ExecutionState
from tether.frames import decode
from tether.ports import Bus
from tether.testing import MemoryBus, MemoryServer
from tether_backend import recovery
from tether_backend.metrics import Metrics
from tether_backend.projector import Projector
from tether_backend.recovery import RecoveryWorker
from tether_backend.store.engine import Database, open_database
from tether_backend.store.history import History

LOST = "the part that was evicted"


def story(log: Log) -> list[Event]:
    """1 started, 2–4 what gets lost, 5 what is still in the log."""
    return [
        log.started("e1"),
        event(2, ev.TEXT_COMPLETED, {"segment": "a", "text": LOST}),
        event(3, ev.USAGE, {"turn": "u1", "input_tokens": 1, "output_tokens": 2}),
        event(4, ev.MODEL_REQUEST, {"state": "retrying", "attempt": 2}),
        event(5, ev.TEXT_COMPLETED, {"segment": "b", "text": "still there"}),
    ]


async def write_with_a_hole(log: Log) -> None:
    """The log begins at ordinal 5: what was before is gone."""
    events = story(log)
    first = await log.frame("e1", events[:4])
    await log.frame("e1", events[4:])
    await log.bus.purge(subjects.events_stream(log.tenant), log.subject("e1"), up_to=first + 1)


async def notes(log: Log) -> list[ConversationEvent]:
    """Recovery notes in the conversation's log."""
    batch = await log.bus.read(subjects.events_stream(log.tenant), 0, log.subject("_"))
    found = [decode(one.subject, one.data) for one in batch]
    return [one for one in found if isinstance(one, ConversationEvent) and one.type == ev.RECOVERY]


async def notes_of_failure(log: Log) -> list[str]:
    batch = await log.bus.read(subjects.events_stream(log.tenant), 0, log.subject("_"))
    found = [decode(one.subject, one.data) for one in batch]
    return [one.type for one in found if isinstance(one, ConversationEvent) and one.type == ev.RESPONSE_FAILED]


@dataclass
class World:
    bus: Bus
    log: Log
    collector: Collector
    database: Database
    tenant: str

    def worker(self, projector: Projector, **more: Any) -> RecoveryWorker:
        made = RecoveryWorker(
            self.bus, self.database, projector.writer, self.tenant, lambda _: False, Metrics(), **more
        )
        made.core.unknown_grace_s = 0.0
        return made

    async def state(self, execution: str = "e1") -> ExecutionState:
        found = await History(self.database).state(self.tenant, execution)
        assert found is not None
        return found[1]


@pytest.fixture
async def world(bus: NatsBus, tenant: str, tmp_path: Path) -> AsyncIterator[World]:
    await ensure_tenants(bus, [tenant])
    log = Log(bus, tenant)
    database = await open_database(f"sqlite+aiosqlite:///{tmp_path / 'db.sqlite3'}")
    try:
        async with serving(Collector(bus, log)) as collector:
            yield World(bus, log, collector, database, tenant)
    finally:
        await database.close()


@contextlib.asynccontextmanager
async def working(projector: Projector, worker: RecoveryWorker) -> AsyncIterator[None]:
    tasks = [
        asyncio.create_task(projector.run(), name="projector"),
        asyncio.create_task(worker.run(), name="recovery"),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, Exception):
                raise found


def counted(worker: RecoveryWorker, outcome: str) -> float:
    return float(worker._metrics.recoveries.labels(outcome)._value.get())


async def test_a_hole_is_filled_from_the_collectors_snapshot_and_told_once_in_history_and_log(world: World) -> None:
    await write_with_a_hole(world.log)
    await world.log.own("e1")
    projector = Projector(world.bus, world.database, world.tenant, Metrics())
    worker = world.worker(projector)

    async def has_gap() -> bool:
        found = await History(world.database).state(world.tenant, "e1")
        return found is not None and found[1].partial

    async def repaired() -> bool:
        return counted(worker, "repaired") == 1

    async with working(projector, worker):
        await eventually(has_gap, "the gap is recorded")
        page = await History(world.database).conversation(
            world.tenant, "c1", cursor="", workspace="w", before=None, limit=50
        )
        assert [(one.first, one.last) for one in page.gaps] == [(1, 4)] and page.executions[0].partial
        world.collector.snapshot = snapshot_from(world.log, "e1", story(world.log))
        await world.collector.register()  # another instance: its identity is new, so it is asked at once
        worker._writer.marked.set()
        await eventually(repaired, "the rows are repaired")

        async def shown() -> bool:
            now = await History(world.database).conversation(
                world.tenant, "c1", cursor="", workspace="w", before=None, limit=50
            )
            return len(now.recoveries) == 1

        await eventually(shown, "the note is in the history")
    state = await world.state()
    assert state.text == f"{LOST}\n\nstill there" and not state.partial and state.applied == 5
    page = await History(world.database).conversation(
        world.tenant, "c1", cursor="", workspace="w", before=None, limit=50
    )
    assert page.gaps == [] and [one.output_tokens for one in page.usage] == [2]
    (told,) = page.recoveries
    assert (told.stream, told.model_request) == ("resumed", "retrying")
    assert (told.execution, told.first, told.last) == ("e1", 1, 4)
    assert len(await notes(world.log)) == 1


class KilledError(Exception):
    """The process dies here."""


COLD_STEPS = ("consumer_deleted", "unfinished_marked", "consumer_made", "told", "caught_up")
REPAIR_STEPS = ("snapshot_read", "merged", "note_told", "settled")


@pytest.mark.parametrize("step", [*COLD_STEPS, *REPAIR_STEPS])
async def test_a_process_killed_at_any_step_of_a_cold_start_or_a_repair_is_completed_by_the_next(
    world: World, step: str
) -> None:
    await write_with_a_hole(world.log)
    await world.log.own("e1")
    world.collector.snapshot = snapshot_from(world.log, "e1", story(world.log))
    await world.collector.register()
    died: list[str] = []

    def die(name: str) -> None:
        if name == step and not died:
            died.append(name)
            raise KilledError(step)

    first = Projector(world.bus, world.database, world.tenant, Metrics(), step=die)
    tasks = [
        asyncio.create_task(first.run(), name="projector"),
        asyncio.create_task(world.worker(first, step=die).run(), name="recovery"),
    ]
    async with asyncio.timeout(20):
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert died == [step]

    second = Projector(world.bus, world.database, world.tenant, Metrics())
    worker = world.worker(second)

    async def complete() -> bool:
        found = await History(world.database).state(world.tenant, "e1")
        waiting = await worker._rows.wanted()
        return found is not None and found[1].text.startswith(LOST) and not found[1].partial and not waiting

    async with working(second, worker):
        await eventually(complete, "the rows are whole")
    state = await world.state()
    assert state.applied == 5 and state.usage.turns == 1
    # A repair that came before the projection met the hole had nothing given up to tell of.
    assert len(await notes(world.log)) <= 1
    if step in ("note_told", "settled"):
        assert len(await notes(world.log)) == 1


async def test_a_completed_execution_is_never_repaired_and_a_terminal_is_never_followed_by_running(
    world: World,
) -> None:
    """R11: the collector, the owner record and a mark may all say that it runs: the end in the rows stands."""
    log = world.log
    await log.frame("e1", [log.started("e1"), text_delta(2, "all of it"), *ended(3)])
    await log.own("e1")
    world.collector.snapshot = snapshot_from(log, "e1", [log.started("e1"), *(text_delta(n, "x") for n in range(2, 9))])
    await world.collector.register()
    projector = Projector(world.bus, world.database, world.tenant, Metrics())
    worker = world.worker(projector)

    async def projected() -> bool:
        found = await History(world.database).state(world.tenant, "e1")
        return found is not None and found[1].outcome is not None

    async with working(projector, worker):
        await eventually(projected, "the end is projected")
        before = await world.state()
        merged = await projector.writer.merge(log_address(log), world.collector.snapshot, tell=True, now_ms=1)
        assert merged is not None and not merged.changed
        async with world.database.write() as connection:
            await connection.exec_driver_sql(
                "INSERT INTO recoveries (tenant, execution, conversation, workspace, mark, why, at) "
                f"VALUES ('{world.tenant}', 'e1', 'c1', '{log.workspace}', 1, 'cold', 1)"
            )
        projector.writer.marked.set()

        async def forgotten() -> bool:
            return not await worker._rows.wanted()

        await eventually(forgotten, "the mark of a completed execution is dropped")
    assert await world.state() == before and before.phase == "ended"
    assert await notes(log) == [] and world.collector.asked == []


def log_address(log: Log, execution: str = "e1") -> Any:
    return subjects.parse_event(log.subject(execution))


async def test_an_owner_that_cannot_be_reached_for_now_is_no_failure_and_is_asked_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "COLD_CANDIDATE_S", 0.2)
    await write_with_a_hole(world.log)
    await world.log.own("e1")
    world.collector.snapshot = snapshot_from(world.log, "e1", story(world.log))
    world.collector.hangs = True
    await world.collector.register()
    projector = Projector(world.bus, world.database, world.tenant, Metrics())
    worker = world.worker(projector)

    async def timed_out() -> bool:
        return counted(worker, "timed_out") >= 1

    async def repaired() -> bool:
        return counted(worker, "repaired") == 1

    async with working(projector, worker):
        await eventually(timed_out, "the attempt is given up")
        state = await world.state()
        assert state.phase != "ended" and state.outcome is None and state.error is None
        world.collector.hangs = False
        await world.collector.register()  # a new instance is asked at once, not after the back-off
        projector.writer.marked.set()
        await eventually(repaired, "the rows are repaired")
    assert await world.bus.subjects(subjects.PROMPTS_STREAM, f"tether.prompt.{world.tenant}.>") == {}
    assert await notes_of_failure(world.log) == []
    assert (await world.state()).text.startswith(LOST)


async def test_an_older_collector_is_never_asked_and_the_gap_stays_until_it_is_upgraded(world: World) -> None:
    await write_with_a_hole(world.log)
    await world.log.own("e1")
    world.collector.can = False
    world.collector.snapshot = snapshot_from(world.log, "e1", story(world.log))
    await world.collector.register()
    projector = Projector(world.bus, world.database, world.tenant, Metrics())
    worker = world.worker(projector)

    async def refused() -> bool:
        return counted(worker, "capability_missing") >= 1

    async def repaired() -> bool:
        return counted(worker, "repaired") == 1

    async with working(projector, worker):
        await eventually(refused, "the missing capability is noticed")
        assert world.collector.asked == [] and (await world.state()).partial
        world.collector.can = True
        await world.collector.register()
        projector.writer.marked.set()
        await eventually(repaired, "the upgraded collector is asked")
    assert not (await world.state()).partial


async def test_an_end_that_the_log_no_longer_has_is_taken_from_the_final_snapshot(world: World) -> None:
    """Another execution owns the conversation, the rows still call this one running."""
    log = world.log
    now_ms = time.time_ns() // 1_000_000  # the retention counts
    whole = [log.started("e1"), text_delta(2, "a"), *ended(3)]
    whole = [one.model_copy(update={"at": now_ms}) for one in whole]
    await log.frame("e1", whole[:2])
    projector = Projector(world.bus, world.database, world.tenant, Metrics())
    worker = world.worker(projector)

    async def begun() -> bool:
        return (await History(world.database).state(world.tenant, "e1")) is not None

    async def over() -> bool:
        return (await world.state()).outcome == "completed"

    async with working(projector, world.worker(projector)):
        await eventually(begun, "the start is projected")
    await log.bus.purge(subjects.events_stream(world.tenant), log.subject("e1"))
    await log.own("e2")
    world.collector.snapshot = snapshot_from(log, "e1", whole)
    await world.collector.register()
    async with working(projector, worker):
        await eventually(over, "the end is taken")
    state = await world.state()
    assert state.phase == "ended" and not state.partial


async def test_an_execution_that_runs_is_left_alone(world: World) -> None:
    log = world.log
    await log.frame("e1", [log.started("e1"), text_delta(2, "a")])
    await log.own("e1")
    await world.collector.register()
    projector = Projector(world.bus, world.database, world.tenant, Metrics())
    worker = world.worker(projector)
    async with working(projector, worker):
        await eventually(lambda: _applied(world, 2), "projected")
        scanned = await worker._scan()
    assert scanned.candidates == [] and world.collector.asked == []


async def _applied(world: World, ordinal: int) -> bool:
    found = await History(world.database).state(world.tenant, "e1")
    return found is not None and found[1].applied >= ordinal


@pytest.mark.parametrize("transport", ["sse", "websocket"])
async def test_an_open_reader_is_told_the_gap_once_and_then_shown_what_was_repaired(
    tmp_path: Path, tenant: str, transport: str
) -> None:
    """L6 on both wires: one problem, however many attempts; what was shown stays; the repair comes as a snapshot."""
    bus = MemoryBus(MemoryServer())
    await ensure_tenants(bus, [tenant])
    log = Log(bus, tenant)
    await log.own("e1")
    await write_with_a_hole(log)
    async with serving(Collector(bus, log)) as collector, running_backend(bus, [tenant], tmp_path) as backend:
        await backend.projected("c1", "e1", 5)
        reader = _reader(backend, tenant, transport)
        await reader.open()
        told = [await _next(reader)]
        while told[-1].name != "live":
            told.append(await _next(reader))
        names = [one.name for one in told]
        assert names.count("problem") == 1 and names.count("snapshot") == 1, names
        snapshot = next(one for one in told if one.name == "snapshot").data["history"]
        assert snapshot["executions"][0]["partial"] is True
        assert [(one["first"], one["last"]) for one in snapshot["gaps"]] == [(1, 4)]
        collector.snapshot = snapshot_from(log, "e1", story(log))
        await collector.register()
        backend.deps.projectors[tenant].writer.marked.set()
        while told[-1].name != "snapshot" or len([one for one in told if one.name == "snapshot"]) < 2:
            told.append(await _next(reader))
        events = [one for one in told if one.name == "message"]
        assert [one.data["type"] for one in events] == ["recovery"]
        assert (events[0].data["body"]["stream"], events[0].data["body"]["model_request"]) == ("resumed", "retrying")
        now = told[-1].data["history"]
        assert now["gaps"] == [] and now["executions"][0]["partial"] is False
        assert [one["state"]["text"] for one in now["items"]] == [LOST, "still there"]
        await log.frame("e1", [text_delta(6, "on", segment="z")])
        assert (await _next(reader)).data["ordinal"] == 6
        assert [one.name for one in told].count("problem") == 1
        await reader.close()


def _reader(backend: Backend, tenant: str, transport: str) -> Any:
    return backend.reader("c1", tenant) if transport == "sse" else SocketReader(backend.port, tenant)


async def _next(reader: Any) -> Any:
    while True:
        one = await reader.next()
        assert one is not None
        if one.name != "hb":
            return one
