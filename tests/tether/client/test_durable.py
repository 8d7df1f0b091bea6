"""A durable reader: at least once from the server, once to a caller that keeps cursors, in the log's order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import pytest

from support_log import LogWriter, Reader
from support_nats import NatsServer
from tether import fold, subjects, topology
from tether.bus import connect
from tether.client.backoff import Backoff
from tether.client.durable import DurableFollower, durable_name
from tether.client.follow import Where
from tether.client.items import CaughtUp, ExecutionItem
from tether.client.nats_records import Records
from tether.cursor import Cursor
from tether.ports import Bus
from tether.testing import FaultKind, MemoryBus, MemoryServer

WAIT_S = 60.0


@pytest.fixture(params=["memory", "nats"])
async def bus(request: pytest.FixtureRequest, tenant: str) -> AsyncIterator[Bus]:
    if request.param == "memory":
        async with MemoryBus(MemoryServer()) as memory:
            await memory.ensure(topology.tenant(tenant))
            yield memory
        return
    nats: NatsServer = request.getfixturevalue("nats_server")
    async with await connect(nats.url, name="durable") as connected:
        await connected.ensure(topology.tenant(tenant, max_bytes=64 << 20))
        yield connected


def durable(bus: Bus, tenant: str, cursor: str | None = None, *, in_flight_max: int = 8) -> DurableFollower:
    start = Cursor.beginning() if cursor is None else Cursor.decode(cursor, tenant, "c")
    return DurableFollower(bus, Where(tenant, "w", "c"), "me", start, silence_s=0.2, in_flight_max=in_flight_max)


async def read(reader: Reader, source: DurableFollower, until: Callable[[Reader], bool]) -> None:
    async with asyncio.timeout(WAIT_S), aclosing(source.run()) as items:
        async for item in items:
            reader.take(item)
            if until(reader):
                return


async def test_the_server_keeps_the_position_of_a_named_reader(bus: Bus, tenant: str) -> None:
    log, first, second = LogWriter(bus, tenant), Reader(), Reader()
    await log.created("e1")
    await log.frame("e1", 3)
    await read(first, durable(bus, tenant), lambda now: now.caught_up > 0)
    assert first.got == {"e1": [1, 2, 3]} and first.notes == ["n1"]
    await log.frame("e1", 2)
    second.got["e1"] = [3]
    await read(second, durable(bus, tenant), lambda now: now.caught_up > 0)
    assert second.got == {"e1": [3, 4, 5]}
    assert second.notes == []


async def test_what_was_not_acked_comes_again_and_a_kept_cursor_makes_it_once(bus: Bus, tenant: str) -> None:
    log, reader = LogWriter(bus, tenant), Reader()
    for _ in range(30):
        await log.frame("e1", 4)
    await log.note()
    for stop_at in (1, 2, 7, 40, 41, 90):  # inside frames and between them
        await read(reader, durable(bus, tenant, reader.cursor), lambda now, n=stop_at: now.count >= n)  # type: ignore[misc]
    await read(reader, durable(bus, tenant, reader.cursor), lambda now: now.count == 121)
    assert reader.got == {"e1": list(range(1, 121))}
    assert reader.notes == ["n1"]


async def test_without_a_cursor_the_last_unacked_message_comes_again_and_no_other(bus: Bus, tenant: str) -> None:
    log, first, second = LogWriter(bus, tenant), Reader(), Reader()
    for _ in range(10):
        await log.frame("e1", 1)
    await read(first, durable(bus, tenant), lambda now: now.count == 5)
    second.got["e1"] = [4]
    await read(second, durable(bus, tenant), lambda now: now.got["e1"][-1] == 10)
    assert second.got == {"e1": [4, 5, 6, 7, 8, 9, 10]}


async def test_everything_is_acked_in_the_end(bus: Bus, tenant: str) -> None:
    log = LogWriter(bus, tenant)
    for _ in range(20):
        await log.frame("e1", 2)
    last = await log.note()
    await read(Reader(), durable(bus, tenant), lambda now: now.caught_up > 0)
    state = await bus.consumer(subjects.events_stream(tenant), durable_name("me", "c"))
    assert state is not None
    assert (state.ack_floor, state.ack_pending) == (last, 0)


async def test_a_message_that_nobody_can_read_is_passed_over_and_shows_as_a_gap(bus: Bus, tenant: str) -> None:
    log, reader = LogWriter(bus, tenant), Reader()
    await log.frame("e1", 2)
    for execution in ("e1", "_"):
        await bus.publish(subjects.event(tenant, "w", "c", execution), b"\xff rubbish")
    log.last["e1"] += 2
    await log.frame("e1", 1)
    await log.note()
    await read(reader, durable(bus, tenant), lambda now: now.caught_up > 0)
    assert reader.got == {"e1": [1, 2, 4, 5]} and reader.notes == ["n1"]
    assert [(gap.first, gap.last) for gap in reader.gaps] == [(3, 4)]
    folded = await Records(bus, tenant).fold(f"tether.event.{tenant}.w.c.>")
    state = folded.folds["e1"].freeze()
    assert state.applied == 5 and state.partial
    assert [(gap.from_ordinal, gap.to_ordinal) for gap in state.items if isinstance(gap, fold.GapItem)] == [(3, 4)]


async def test_live_events_are_no_replay(bus: Bus, tenant: str) -> None:
    log = LogWriter(bus, tenant)
    await log.frame("e1", 2)
    flags: list[bool] = []
    async with asyncio.timeout(WAIT_S), aclosing(durable(bus, tenant).run()) as items:
        async for item in items:
            if isinstance(item, CaughtUp):
                await log.frame("e1", 2)
            elif isinstance(item, ExecutionItem):
                flags.append(item.replay)
                if len(flags) == 4:
                    break
    assert flags == [True, True, False, False]


async def test_a_stream_made_anew_is_a_changed_position(bus: Bus, tenant: str) -> None:
    log, reader = LogWriter(bus, tenant), Reader()
    await log.frame("e1", 3)
    async with asyncio.timeout(WAIT_S), aclosing(durable(bus, tenant).run()) as items:
        async for item in items:
            reader.take(item)
            if isinstance(item, CaughtUp) and not reader.changed:
                await bus.delete_stream(subjects.events_stream(tenant))
                await bus.ensure(topology.tenant(tenant, max_bytes=64 << 20))
                await LogWriter(bus, tenant).frame("e2", 4)
            if reader.got.get("e2") == [1, 2, 3, 4]:
                break
    assert reader.changed == 1


async def test_redeliveries_behind_younger_messages_are_given_once_and_in_order(tenant: str) -> None:
    server = MemoryServer()
    async with MemoryBus(server) as writer, MemoryBus(server) as bus:
        await writer.ensure(topology.tenant(tenant))
        log, reader = LogWriter(writer, tenant), Reader()
        await log.frame("e1", 1)
        async with asyncio.timeout(WAIT_S), aclosing(durable(bus, tenant).run()) as items:
            async for item in items:
                reader.take(item)
                if isinstance(item, CaughtUp):
                    for _ in range(5):
                        await log.frame("e1", 2)
                if reader.got.get("e1", [])[-1:] == [4]:
                    bus.disconnect(for_s=0.05)  # what is on its way comes again only after the ack wait
                    for _ in range(5):
                        await log.frame("e1", 2)
                    await log.note()
                if reader.notes:
                    break
    assert reader.got == {"e1": list(range(1, 22))}


async def test_a_reader_that_waits_for_its_next_attempt_goes_on_at_once_when_the_connection_is_back(
    tenant: str,
) -> None:
    server = MemoryServer()
    async with MemoryBus(server) as writer, MemoryBus(server) as bus:
        await writer.ensure(topology.tenant(tenant))
        log, reader = LogWriter(writer, tenant), Reader()
        await log.frame("e1", 2)
        bus.faults.add("state", FaultKind.DISCONNECT, delay_s=0.1)  # the first question; back after so long
        seldom = Backoff(quick=0, seldom_s=3600.0, seldom_max_s=3600.0)
        source = DurableFollower(bus, Where(tenant, "w", "c"), "me", Cursor.beginning(), silence_s=0.2, backoff=seldom)
        await read(reader, source, lambda now: now.got.get("e1") == [1, 2])
    assert seldom.failures == 0 and [fired.call for fired in bus.faults.fired] == ["state"]
