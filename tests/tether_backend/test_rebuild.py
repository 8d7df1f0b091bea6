"""A database that is lost or older, a log that was put back, a server killed just after acks: noticed, rebuilt, and
nothing fires twice."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from support_backend import Log, ended, ensure_tenants, event, eventually, project_all, projecting, text_delta
from support_nats import NatsServer, running_server
from support_webhooks import receiving, working
from tether import events as ev
from tether import subjects, topology
from tether.bus import NatsBus, connect
from tether.cursor import tag_of
from tether.errors import BusError
from tether.events import ConversationEvent, Event
from tether.fold import ExecutionFold, ExecutionState
from tether.frames import Frame, decode
from tether.kv import Bucket
from tether_backend.metrics import Metrics
from tether_backend.projector import Projector
from tether_backend.store.engine import Database, open_database
from tether_backend.store.history import History
from tether_backend.webhooks.config import Endpoint
from tether_backend.webhooks.service import Webhooks

SECRET = b"0123456789abcdef01234567"


def run(log: Log, execution: str, text: str = "hello") -> list[Event]:
    return [
        log.started(execution),
        event(2, ev.INTERACTION_REQUESTED, {"interaction": "i1", "kind": "approval", "name": "Bash"}),
        event(3, ev.TEXT_COMPLETED, {"segment": "a", "text": text}),
        event(4, ev.USAGE, {"turn": "u1", "input_tokens": 10, "output_tokens": 5, "cost_usd": 0.5}),
        *ended(5),
    ]


def binds(metrics: Metrics) -> dict[str, float]:
    """How projections began, without those that never did."""
    found = {
        sample.labels["outcome"]: sample.value
        for sample in next(iter(metrics.binds.collect())).samples
        if sample.name.endswith("_total")
    }
    return {path: count for path, count in found.items() if count}


async def folds(bus: NatsBus, log: Log) -> dict[str, ExecutionState]:
    """What the log says, read by nobody's product code but the fold."""
    found: dict[str, ExecutionFold] = {}
    after = 0
    while batch := await bus.read(subjects.events_stream(log.tenant), after, f"tether.event.{log.tenant}.>"):
        for stored in batch:
            after = stored.sequence
            frame = decode(stored.subject, stored.data)
            if isinstance(frame, Frame):
                fold = found.setdefault(subjects.parse_event(stored.subject).execution, ExecutionFold())
                for one in frame.events:
                    fold.apply(one)
            else:
                assert isinstance(frame, ConversationEvent)
    return {execution: fold.freeze() for execution, fold in found.items()}


async def rows(database: Database, tenant: str, names: Sequence[str]) -> dict[str, ExecutionState]:
    history = History(database)
    found = {name: await history.state(tenant, name) for name in names}
    return {name: one[1] for name, one in found.items() if one is not None}


@pytest.mark.parametrize("what", ["lost", "older"])
async def test_a_lost_or_older_database_is_noticed_and_rebuilt_and_webhooks_and_usage_do_not_repeat(
    bus: NatsBus, tenant: str, tmp_path: Path, what: str
) -> None:
    """R12."""
    await ensure_tenants(bus, [tenant])
    log = Log(bus, tenant)
    path, backup = tmp_path / "db.sqlite3", tmp_path / "backup.sqlite3"
    url = f"sqlite+aiosqlite:///{path}"
    async with receiving() as receiver:
        endpoint = Endpoint(
            "chat", tenant, frozenset({"interaction.requested", "response.ended"}), receiver.url, SECRET
        )
        hooks = Webhooks(bus, tenant, [endpoint], Metrics())

        async def delivered() -> bool:
            notes = [note async for _, note in hooks.outbox.written_after(0)]
            return len(notes) == 4 and all(note.state == "delivered" for note in notes)

        async with working(hooks):
            await log.prompt("q1", "r1", "e1")
            await log.frame("e1", run(log, "e1"))
            database = await open_database(url)
            await project_all(Projector(bus, database, tenant, Metrics()), bus)
            await database.close()
            shutil.copy(path, backup)
            await log.prompt("q2", "r2", "e2")
            await log.frame("e2", run(log, "e2", "again"))
            database = await open_database(url)
            await project_all(Projector(bus, database, tenant, Metrics()), bus)
            before = await rows(database, tenant, ["e1", "e2"])
            await database.close()
            await eventually(delivered, "four notifications")

            path.unlink()
            if what == "older":
                shutil.copy(backup, path)
            database = await open_database(url)
            try:
                metrics = Metrics()
                await project_all(Projector(bus, database, tenant, metrics), bus)
                assert binds(metrics) == {"first" if what == "lost" else "database_older": 1}
                assert await rows(database, tenant, ["e1", "e2"]) == before == await folds(bus, log)
                page = await History(database).conversation(
                    tenant, "c1", cursor="", workspace="w", before=None, limit=50
                )
                assert [(one.request) for one in page.messages] == ["q1", "q2"]
                assert [(one.execution, one.input_tokens) for one in page.usage] == [("e1", 10), ("e2", 10)]
            finally:
                await database.close()
            await eventually(delivered, "still four notifications")
        # A second pass over everything that is due finds nothing to tell.
        async with working(Webhooks(bus, tenant, [endpoint], Metrics())):
            await log.frame("e3", run(log, "e3"))

            async def more() -> bool:
                return len(receiver.bodies) >= 6

            await eventually(more, "the next execution's two")
        assert len(receiver.ids) == len(set(receiver.ids)) == 6


async def test_a_deleted_consumer_and_a_stream_made_anew_begin_anew_and_the_rest_is_fast(
    bus: NatsBus, tenant: str, tmp_path: Path
) -> None:
    await ensure_tenants(bus, [tenant])
    log = Log(bus, tenant)
    await log.frame("e1", run(log, "e1"))
    database = await open_database(f"sqlite+aiosqlite:///{tmp_path / 'db.sqlite3'}")
    try:
        metrics = Metrics()
        first = Projector(bus, database, tenant, metrics)
        await project_all(first, bus)
        await project_all(Projector(bus, database, tenant, metrics), bus)
        assert binds(metrics) == {"first": 1, "fast": 1}
        await bus.delete_consumer(first.stream, first.durable)
        await project_all(Projector(bus, database, tenant, metrics), bus)
        assert binds(metrics) == {"first": 1, "fast": 1, "consumer_gone": 1}
        await bus.delete_stream(first.stream)
        await bus.ensure(topology.tenant(tenant, max_bytes=64 << 20))
        anew = Log(bus, tenant)
        await anew.frame("e2", run(anew, "e2"))
        await project_all(Projector(bus, database, tenant, metrics), bus)
        assert binds(metrics)["consumer_gone"] == 2
        assert set(await rows(database, tenant, ["e1", "e2"])) == {"e1", "e2"}
    finally:
        await database.close()


async def test_an_evicted_place_begins_anew_and_is_a_gap_only_where_an_ordinal_is_missing(
    bus: NatsBus, tenant: str, tmp_path: Path
) -> None:
    """L6: recorded once, however often it begins anew; what the rows have stays."""
    await ensure_tenants(bus, [tenant])
    log = Log(bus, tenant)
    await log.frame("e1", [log.started("e1"), text_delta(2, "shown")])
    database = await open_database(f"sqlite+aiosqlite:///{tmp_path / 'db.sqlite3'}")
    try:
        metrics = Metrics()
        await project_all(Projector(bus, database, tenant, metrics), bus)
        await log.frame("e1", [text_delta(3, " and lost", offset=5)])
        last = await log.frame("e1", [text_delta(4, "!", offset=14)])
        await bus.purge(subjects.events_stream(tenant), log.subject("e1"), up_to=last)
        for _ in range(3):
            projector = Projector(bus, database, tenant, metrics)
            await project_all(projector, bus)
            await bus.delete_consumer(projector.stream, projector.durable)
        assert binds(metrics) == {"first": 1, "evicted": 1, "consumer_gone": 2}
        state = (await rows(database, tenant, ["e1"]))["e1"]
        page = await History(database).conversation(tenant, "c1", cursor="", workspace="w", before=None, limit=50)
        assert [(one.first, one.last, one.reason) for one in page.gaps] == [(3, 3, "retention_gap")]
        assert state.partial and page.executions[0].partial and state.applied == 4
        assert page.items[0].state["text"].startswith("shown")
    finally:
        await database.close()


async def _reconnected(bus: NatsBus, epoch: int) -> None:
    async def again() -> bool:
        return bus.epoch >= epoch and bus.connected

    await eventually(again, "the bus is back")


def _put_back(server: NatsServer, older: Path, part: Path) -> None:
    server.kill()
    shutil.rmtree(part)
    shutil.copytree(older, part)
    server.start()


@pytest.mark.parametrize("living", [False, True], ids=["stopped", "living"])
@pytest.mark.parametrize("whole", [False, True], ids=["the log alone", "the whole store"])
async def test_an_older_copy_of_the_log_put_back_is_noticed_and_nothing_that_was_shown_goes(
    tmp_path: Path, tenant: str, whole: bool, living: bool
) -> None:
    """The same sequences hold other messages: a place is no proof, its message's tag is."""
    with running_server() as server:
        streams = server.root / "store" / "jetstream" / "$G" / "streams"
        part = streams.parent if whole else streams / subjects.events_stream(tenant)
        async with await connect(server.url, name="projection") as bus:
            await ensure_tenants(bus, [tenant])
            log = Log(bus, tenant)
            database = await open_database(f"sqlite+aiosqlite:///{tmp_path / 'db.sqlite3'}")
            metrics = Metrics()
            projector = Projector(bus, database, tenant, metrics)
            try:
                await log.frame("e1", [log.started("e1"), text_delta(2, "kept")])
                await project_all(projector, bus)
                server.kill()
                shutil.copytree(part, tmp_path / "older")
                server.start()
                await _reconnected(bus, 2)
                kept = await log.frame("e1", [text_delta(3, " and lost", offset=4)])

                async def shown() -> bool:
                    return (await rows(database, tenant, ["e1"]))["e1"].applied == 3

                async with contextlib.AsyncExitStack() as stack:
                    following = await stack.enter_async_context(contextlib.AsyncExitStack())
                    await following.enter_async_context(projecting(projector))
                    await eventually(shown, "what will be lost is in the rows")
                    if not living:
                        await following.aclose()
                    _put_back(server, tmp_path / "older", part)
                    await _reconnected(bus, 3)
                    anew = Log(bus, tenant, conversation="c2")
                    reused = await anew.frame("e2", run(anew, "e2", "other"))
                    assert reused == kept  # the same place, another message
                    if not living:
                        await stack.enter_async_context(projecting(projector))

                    async def complete() -> bool:
                        found = await rows(database, tenant, ["e2"])
                        return "e2" in found and found["e2"].outcome == "completed"

                    await eventually(complete, "what came at the same places is projected")
                    # Its collector puts the tail back: it is trimmed, and what follows is applied.
                    log._last["e1"] = await _last_of(bus, log, "e1")
                    await log.frame("e1", [text_delta(3, " and lost", offset=4), text_delta(4, "!", offset=13)])

                    async def back() -> bool:
                        return (await rows(database, tenant, ["e1"]))["e1"].applied == 4

                    await eventually(back, "the tail is applied once")
                found = await rows(database, tenant, ["e1", "e2"])
                assert found == await folds(bus, log)
                assert found["e1"].items[0].text == "kept and lost!"  # type: ignore[union-attr]
                if not whole:
                    assert binds(metrics).get("position_changed", 0) == 1, binds(metrics)
            finally:
                await database.close()


async def _last_of(bus: NatsBus, log: Log, execution: str) -> int:
    found = await bus.last(subjects.events_stream(log.tenant), log.subject(execution))
    return 0 if found is None else found.sequence


@pytest.mark.parametrize("step", ["committed", "numbered", "acked"])
async def test_a_server_killed_just_after_acks_redelivers_and_everything_is_applied_once_in_order(
    tmp_path: Path, tenant: str, step: str
) -> None:
    """R15: SIGKILL in the very moment in which a batch was acked (or would have been), three times over."""
    with running_server() as server:
        async with await connect(server.url, name="projection") as bus:
            await ensure_tenants(bus, [tenant])
            log = Log(bus, tenant)
            database = await open_database(f"sqlite+aiosqlite:///{tmp_path / 'db.sqlite3'}")
            kills = 0

            def kill(name: str) -> None:
                nonlocal kills
                if name == step and kills < 3:
                    kills += 1
                    server.kill()
                    server.start()

            projector = Projector(bus, database, tenant, Metrics(), step=kill)
            try:
                async with projecting(projector):
                    for number in range(1, 5):
                        execution = f"e{number}"
                        await _stored(log, execution, run(log, execution, f"text {number}"))
                        name = execution

                        async def projected(name: str = name) -> bool:
                            found = await rows(database, tenant, [name])
                            return name in found and found[name].outcome is not None

                        await eventually(projected, f"{execution} is projected", timeout_s=60)
                assert kills == 3
                names = [f"e{number}" for number in range(1, 5)]
                assert await rows(database, tenant, names) == await folds(bus, log)
                page = await History(database).conversation(
                    tenant, "c1", cursor="", workspace="w", before=None, limit=50
                )
                assert [(one.execution, one.input_tokens) for one in page.usage] == [(name, 10) for name in names]
                assert page.gaps == []
                entry = await Bucket(bus, subjects.PROJECTIONS).get(subjects.projection_key(database.id, tenant, 0))
                assert entry is not None
                at = await bus.at(subjects.events_stream(tenant), entry.value["sequence"])
                assert at is not None and tag_of(at.stored_at_ns) == entry.value["tag"]
            finally:
                await database.close()


async def _stored(log: Log, execution: str, events: list[Event]) -> None:
    """As a collector does: again, until the log has it."""
    deadline_s = time.monotonic() + 30

    while True:
        try:
            await log.frame(execution, events)
        except BusError as error:
            assert time.monotonic() < deadline_s, error
            await asyncio.sleep(0.05)
            continue
        return
