"""Who is asked for a snapshot: never a peer that cannot know the question, never on behalf of another instance."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from support_backend import Log, ended, ensure_tenants, text_delta
from support_snapshots import Collector, serving, snapshot_from
from tether import subjects
from tether.errors import Code, problem
from tether.sandbox import ExecutionSummary
from tether.snapshot import Snapshot
from tether.snapshots import Absence, Absent, Found, Snapshots
from tether.subjects import EventAddress
from tether.testing import MemoryBus, MemoryServer

TENANT = "acme"


@dataclass
class World:
    bus: MemoryBus
    log: Log
    collector: Collector
    snapshots: Snapshots
    address: EventAddress


@pytest.fixture
async def world() -> AsyncIterator[World]:
    bus = MemoryBus(MemoryServer())
    await ensure_tenants(bus, [TENANT])
    log = Log(bus, TENANT)
    collector = Collector(bus, log)
    address = EventAddress(TENANT, log.workspace, log.conversation, "e1")
    async with serving(collector):
        yield World(bus, log, collector, Snapshots(bus, TENANT), address)


def snapshot_of(log: Log, execution: str = "e1", upto: int = 3) -> Snapshot:
    events = [log.started(execution), *(text_delta(n, "x", offset=n - 2) for n in range(2, upto + 1))]
    return snapshot_from(log, execution, events)


async def evict(log: Log, execution: str = "e1") -> None:
    await log.bus.purge(subjects.events_stream(TENANT), log.subject(execution))


async def test_the_collector_of_a_living_execution_is_asked_and_the_log_answers_where_it_cannot(world: World) -> None:
    await world.log.frame("e1", [world.log.started("e1"), text_delta(2, "a")])
    await world.log.own("e1")
    assert await world.snapshots.of_collector(world.log.target("e1")) == Absent(Absence.NO_COLLECTOR)
    found = await world.snapshots.get(world.address)
    assert isinstance(found, Found) and (found.source, found.snapshot.watermark.ordinal) == ("log", 2)
    world.collector.snapshot = snapshot_of(world.log)
    await world.collector.register()
    found = await world.snapshots.get(world.address)
    assert isinstance(found, Found) and (found.source, found.snapshot.captured_at) == ("collector", 7)


async def test_an_older_peer_is_never_sent_the_verb_and_a_whole_log_is_folded_instead(world: World) -> None:
    world.collector.can = False
    world.collector.snapshot = snapshot_of(world.log)
    await world.collector.register()
    await world.log.own("e1")
    await world.log.frame("e1", [world.log.started("e1"), text_delta(2, "a")])
    found = await world.snapshots.get(world.address)
    assert isinstance(found, Found) and found.source == "log"
    await evict(world.log)
    gone = await world.snapshots.get(world.address)
    assert gone == Absent(Absence.CAPABILITY_MISSING) and "CAPABILITY_MISSING" in gone.detail
    assert await world.snapshots.beyond_log(world.address) == gone
    assert world.collector.asked == []


async def test_an_instance_that_was_replaced_between_question_and_answer_is_asked_anew(world: World) -> None:
    world.collector.snapshot = snapshot_of(world.log)
    world.collector.replaced = 2
    await world.collector.register()
    await world.log.own("e1")
    found = await world.snapshots.get(world.address)
    assert isinstance(found, Found) and found.source == "collector"
    assert world.collector.asked == ["i1", "i2", "i3"]


async def test_an_answer_is_not_taken_where_the_instance_that_is_registered_now_lacks_the_capability(
    world: World,
) -> None:
    world.collector.snapshot = snapshot_of(world.log)
    world.collector.replaced, world.collector.older = 1, True
    await world.collector.register()
    await world.log.own("e1")
    assert await world.snapshots.get(world.address) == Absent(Absence.CAPABILITY_MISSING)
    assert world.collector.asked == ["i1"]


async def test_collectors_that_replace_each_other_for_ever_are_no_answer(world: World) -> None:
    world.collector.snapshot = snapshot_of(world.log)
    world.collector.replaced = 99
    await world.collector.register()
    assert await world.snapshots.of_collector(world.log.target("e1")) == Absent(Absence.NO_ANSWER)


async def test_a_snapshot_of_another_target_is_refused(world: World) -> None:
    world.collector.snapshot = snapshot_of(world.log, "e2")
    await world.collector.register()
    assert await world.snapshots.of_collector(world.log.target("e1")) == Absent(Absence.REFUSED)
    world.collector.answer = "rejected"
    assert await world.snapshots.of_collector(world.log.target("e2")) == Absent(Absence.REFUSED)


async def test_a_final_snapshot_that_was_evicted_or_never_written_is_told_as_that(world: World) -> None:
    await world.collector.register()
    world.collector.answer = "rejected"
    for code, why in ((Code.RETENTION_GAP, Absence.NOT_RETAINED), (Code.EXECUTION_DURABILITY_GAP, Absence.NOT_SAVED)):
        world.collector.why = problem(code, "it is gone")
        absent = await world.snapshots.of_collector(world.log.target("e1"))
        assert absent == Absent(why) and code in absent.detail
        assert await world.snapshots.get(world.address, known=world.log.target("e1")) == Absent(why)


async def test_what_has_ended_is_read_from_a_whole_log_and_else_from_the_final_snapshot(world: World) -> None:
    await world.log.frame("e1", [world.log.started("e1"), text_delta(2, "a"), *ended(3)])
    await world.log.own(None)
    world.collector.snapshot = snapshot_of(world.log)
    await world.collector.register()
    found = await world.snapshots.get(world.address)
    assert isinstance(found, Found) and found.source == "log" and found.snapshot.terminal
    assert world.collector.asked == []
    await evict(world.log)
    assert await world.snapshots.get(world.address) == Absent(Absence.NOTHING_LOGGED)
    found = await world.snapshots.get(world.address, known=world.log.target("e1"))
    assert isinstance(found, Found) and found.source == "collector"


async def test_what_has_ended_is_found_without_its_first_event_by_the_list_of_the_collector_that_retains_it(
    world: World,
) -> None:
    await world.log.frame("e1", [world.log.started("e1"), text_delta(2, "a")])
    last = await world.log.frame("e1", ended(3))
    await world.log.own(None)
    world.collector.snapshot = snapshot_of(world.log)
    await world.collector.register()
    await world.bus.purge(subjects.events_stream(TENANT), world.log.subject("e1"), up_to=last)
    assert await world.snapshots.get(world.address) == Absent(Absence.NOT_WHOLE)
    world.collector.listed = (ExecutionSummary(target=world.log.target("e1"), state="ended"),)
    await world.collector.register()
    for found in (await world.snapshots.get(world.address), await world.snapshots.beyond_log(world.address)):
        assert isinstance(found, Found) and found.source == "collector"


async def test_reading_what_has_ended_writes_nothing_and_starts_nothing(world: World) -> None:
    await world.log.frame("e1", [world.log.started("e1"), *ended(2)])
    await world.log.own(None)
    streams = [subjects.PROMPTS_STREAM, "COMMANDS", f"KV_{subjects.OWNERS}", f"KV_{subjects.LEASES}"]
    before = [await world.bus.state(name) for name in streams]
    await world.snapshots.get(world.address)
    await world.snapshots.beyond_log(world.address)
    assert [await world.bus.state(name) for name in streams] == before
