"""L3, L4, L5, L8, L9 over the shell: following a conversation on the memory bus and on a real nats-server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from support_backend import Log, event
from support_log import LogWriter, Reader
from support_nats import NatsServer, running_server
from support_snapshots import Collector, serving, snapshot_from
from tether import events as ev
from tether import subjects, topology
from tether.bus import NatsBus, connect
from tether.client import Client
from tether.client.backoff import Backoff
from tether.client.follow import Follower, Where
from tether.client.items import CaughtUp, ExecutionItem
from tether.client.nats_records import Records
from tether.cursor import Cursor
from tether.errors import Code, InvalidError, ProblemError
from tether.ports import Bus
from tether.subjects import EventAddress
from tether.testing import FaultKind, MemoryBus, MemoryServer

WAIT_S = 60.0


async def no_snapshot(_: EventAddress) -> None:
    return None


def follower(bus: Bus, tenant: str, cursor: str | None = None, **options: Any) -> Follower:
    where = Where(tenant, "w", "c")
    start = Cursor.beginning() if cursor is None else Cursor.decode(cursor, tenant, "c")
    return Follower(bus, where, start, options.pop("snapshots", no_snapshot), **options)


async def read(reader: Reader, source: Follower, until: Callable[[Reader], bool], *, timeout_s: float = WAIT_S) -> None:
    """Take items until `until`; then leave, as a reader that disconnects."""
    async with asyncio.timeout(timeout_s), aclosing(source.run()) as items:
        async for item in items:
            reader.take(item)
            if until(reader):
                return


@pytest.fixture(params=["memory", "nats"])
async def two(request: pytest.FixtureRequest, tenant: str) -> AsyncIterator[tuple[Bus, Bus]]:
    """A writer's and a reader's connection to the same log."""
    if request.param == "memory":
        server = MemoryServer()
        async with MemoryBus(server, name="writer") as writer, MemoryBus(server, name="reader") as reader:
            await writer.ensure(topology.tenant(tenant))
            yield writer, reader
        return
    nats: NatsServer = request.getfixturevalue("nats_server")
    async with await connect(nats.url, name="writer") as one, await connect(nats.url, name="reader") as other:
        await one.ensure(topology.tenant(tenant, max_bytes=64 << 20))
        yield one, other


async def test_a_reader_may_come_before_the_first_prompt_when_nobody_knows_the_workspace(
    two: tuple[Bus, Bus], tenant: str
) -> None:
    writer, bus = two
    await writer.ensure(topology.base())
    log, reader = LogWriter(writer, tenant), Reader()
    client = Client.nats(bus, tenant=tenant)
    async with asyncio.timeout(WAIT_S), aclosing(client.follow("c")) as items:
        async for item in items:
            reader.take(item)
            if isinstance(item, CaughtUp):
                await log.created("e1")
                await log.frame("e1", 5)
            if reader.got.get("e1", [0])[-1] == 5:
                break
    assert reader.got["e1"] == [1, 2, 3, 4, 5]


async def test_a_reader_that_disconnects_100_times_gets_each_of_5000_events_once(
    two: tuple[Bus, Bus], tenant: str
) -> None:
    writer, bus = two
    log = LogWriter(writer, tenant)
    rng = random.Random(3)
    total = 5000

    async def write() -> None:
        await log.created("e1")
        while log.last.get("e1", 0) < total:
            await log.frame("e1", min(rng.randint(1, 12), total - log.last.get("e1", 0)))
            if rng.random() < 0.02:
                await log.note()

    reader = Reader()
    async with asyncio.TaskGroup() as group:
        group.create_task(write(), name="writer")
        await read(reader, follower(bus, tenant), lambda _: True)  # leaves with its very first item
        for _ in range(100):
            here, want = reader.count, rng.randint(1, 90)
            await read(
                reader,
                follower(bus, tenant, reader.cursor),
                lambda now, here=here, want=want: (  # type: ignore[misc]
                    now.count >= here + want or now.got.get("e1", [0])[-1] == total
                ),
            )
    if reader.count < total + log.notes:
        await read(reader, follower(bus, tenant, reader.cursor), lambda now: now.count == total + log.notes)
    assert reader.got == {"e1": list(range(1, total + 1))}
    assert reader.notes == [f"n{number}" for number in range(1, log.notes + 1)]
    assert not reader.gaps and not reader.changed and not reader.snapshots


async def test_a_reader_that_leaves_before_its_first_event_loses_nothing(two: tuple[Bus, Bus], tenant: str) -> None:
    writer, bus = two
    log, reader = LogWriter(writer, tenant), Reader()
    await read(reader, follower(bus, tenant), lambda now: now.caught_up > 0)
    await log.frame("e1", 3)
    await read(reader, follower(bus, tenant, reader.cursor), lambda now: now.count == 3)
    assert reader.got == {"e1": [1, 2, 3]}


async def test_a_reader_that_leaves_inside_a_frame_goes_on_inside_it(two: tuple[Bus, Bus], tenant: str) -> None:
    writer, bus = two
    log, reader = LogWriter(writer, tenant), Reader()
    await log.frame("e1", 10)
    for expected in range(1, 11):
        await read(reader, follower(bus, tenant, reader.cursor), lambda now, n=expected: now.count == n)  # type: ignore[misc]
    assert reader.got == {"e1": list(range(1, 11))}


BOUNDARIES = ("live", "barrier", "state", "at", "read", "next_after")


class Interposed:
    """A bus that lets something happen right before or after one call, once."""

    def __init__(self, bus: Bus, call: str, when: str, happen: Callable[[], Any]) -> None:
        self._bus = bus
        self._at = (call, when)
        self._happen = happen
        self.happened = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._bus, name)
        if name != self._at[0]:
            return found

        async def call(*args: Any, **named: Any) -> Any:
            if self._at[1] == "before":
                await self._once()
            answer = await found(*args, **named)
            if self._at[1] == "after":
                await self._once()
            return answer

        return call

    async def _once(self) -> None:
        if not self.happened:
            self.happened = True
            await self._happen()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", BOUNDARIES)
async def test_an_event_published_at_any_boundary_of_attach_is_given_once(
    two: tuple[Bus, Bus], tenant: str, call: str, when: str
) -> None:
    writer, bus = two
    log, reader = LogWriter(writer, tenant), Reader()
    await log.created("e1")
    await log.frame("e1", 2)
    await read(reader, follower(bus, tenant), lambda now: now.count == 3)

    async def publish() -> None:
        await log.frame("e1", 2)
        await log.note()

    between = Interposed(bus, call, when, publish)
    source = follower(between, tenant, reader.cursor)
    await read(reader, source, lambda now: now.count == 6 and now.caught_up > 0)
    assert between.happened
    assert reader.got == {"e1": [1, 2, 3, 4]}
    assert reader.notes == ["n1", "n2"]


async def test_what_was_stored_before_is_replay_and_what_comes_later_is_not(two: tuple[Bus, Bus], tenant: str) -> None:
    writer, bus = two
    log = LogWriter(writer, tenant)
    await log.frame("e1", 3)
    flags: list[bool] = []
    async with asyncio.timeout(WAIT_S), aclosing(follower(bus, tenant).run()) as items:
        async for item in items:
            if isinstance(item, CaughtUp):
                await log.frame("e1", 2)
            elif isinstance(item, ExecutionItem):
                flags.append(item.replay)
                if len(flags) == 5:
                    break
    assert flags == [True, True, True, False, False]


async def test_a_stream_made_anew_is_a_changed_position_never_an_empty_success(
    two: tuple[Bus, Bus], tenant: str
) -> None:
    writer, bus = two
    log, reader = LogWriter(writer, tenant), Reader()
    await log.frame("e1", 5)
    await log.note()
    await read(reader, follower(bus, tenant), lambda now: now.caught_up > 0)
    await writer.delete_stream(subjects.events_stream(tenant))
    await writer.ensure(topology.tenant(tenant, max_bytes=64 << 20))
    anew = LogWriter(writer, tenant)
    await anew.frame("e2", 2)
    await anew.frame("e2", 2)
    await read(reader, follower(bus, tenant, reader.cursor), lambda now: now.got.get("e2") == [1, 2, 3, 4])
    assert reader.changed == 1
    assert "e1" not in reader.got


async def test_a_stream_made_anew_under_a_living_reader_is_noticed(two: tuple[Bus, Bus], tenant: str) -> None:
    writer, bus = two
    log, reader = LogWriter(writer, tenant), Reader()
    await log.frame("e1", 3)
    await log.frame("e1", 3)
    async with asyncio.timeout(WAIT_S), aclosing(follower(bus, tenant, silence_s=0.1).run()) as items:
        async for item in items:
            reader.take(item)
            if reader.caught_up == 1 and not reader.changed and reader.count == 6:
                await writer.delete_stream(subjects.events_stream(tenant))
                await writer.ensure(topology.tenant(tenant, max_bytes=64 << 20))
                await LogWriter(writer, tenant).frame("e2", 4)
            if reader.got.get("e2") == [1, 2, 3, 4]:
                break
    assert reader.changed == 1


async def test_a_lost_live_copy_is_found_by_the_silence_probe(tenant: str) -> None:
    server = MemoryServer()
    async with MemoryBus(server) as writer, MemoryBus(server) as bus:
        await writer.ensure(topology.tenant(tenant))
        log, reader = LogWriter(writer, tenant), Reader()
        await log.frame("e1", 1)
        async with asyncio.timeout(WAIT_S), aclosing(follower(bus, tenant, silence_s=0.05).run()) as items:
            async for item in items:
                reader.take(item)
                if isinstance(item, CaughtUp):
                    writer.faults.add("publish", FaultKind.LOSE_LIVE)
                    await log.frame("e1", 1, end=True)
                if reader.got.get("e1", [])[-1:] == [4]:
                    break
    assert reader.got == {"e1": [1, 2, 3, 4]}


async def test_lost_copies_and_lost_connections_in_any_mix_lose_and_double_nothing(tenant: str) -> None:
    seed = random.randrange(1 << 30)
    server = MemoryServer(seed=seed)
    rng = random.Random(seed)
    print(f"seed {seed}")
    async with MemoryBus(server) as writer, MemoryBus(server) as bus:
        await writer.ensure(topology.tenant(tenant))
        writer.faults.random(seed, {"publish": {FaultKind.LOSE_LIVE: 0.2}})
        bus.faults.random(
            seed,
            {
                call: {FaultKind.DISCONNECT: 0.05, FaultKind.UNAVAILABLE: 0.05}
                for call in ("read", "next_after", "state", "barrier", "at")
            },
            delay_max_s=0.02,
        )
        log, reader = LogWriter(writer, tenant), Reader()

        async def write() -> None:
            for _ in range(400):
                execution = rng.choice(["e1", "e2"])
                if execution not in log.last:
                    await log.created(execution)
                await log.frame(execution, rng.randint(1, 4))
                if rng.random() < 0.1:
                    await log.note()
                if rng.random() < 0.02:
                    bus.disconnect(for_s=0.01)
                await asyncio.sleep(0)
            writer.faults.clear()
            bus.faults.clear()

        def complete(now: Reader) -> bool:
            got = {execution: ordinals[-1] for execution, ordinals in now.got.items()}
            return done.done() and got == log.last and len(now.notes) == log.notes

        async with asyncio.TaskGroup() as group:
            done = group.create_task(write(), name="writer")
            source = follower(bus, tenant, silence_s=0.02, backoff=Backoff(quick=1 << 30))
            await read(reader, source, complete)
        assert source.attaches > 1
    assert {key: list(range(1, last + 1)) for key, last in log.last.items()} == reader.got
    assert not reader.gaps and not reader.snapshots


async def test_a_reader_that_is_too_slow_is_attached_again_and_loses_nothing(two: tuple[Bus, Bus], tenant: str) -> None:
    writer, bus = two
    log, reader = LogWriter(writer, tenant), Reader()
    await log.frame("e1", 1)
    source = follower(bus, tenant, buffer_bytes_max=4096)
    async with asyncio.timeout(WAIT_S), aclosing(source.run()) as items:
        async for item in items:
            reader.take(item)
            if isinstance(item, CaughtUp):
                for _ in range(40):  # while this reader is busy
                    await log.frame("e1", 5)
                await bus.barrier()
            if reader.got["e1"][-1] == 201:
                break
    assert reader.got == {"e1": list(range(1, 202))}
    assert source.attaches > 1


async def test_an_evicted_beginning_is_one_gap_and_the_rest_is_given(two: tuple[Bus, Bus], tenant: str) -> None:
    writer, bus = two
    log, reader = LogWriter(writer, tenant), Reader()
    for _ in range(4):
        last = await log.frame("e1", 2)
    await writer.purge(subjects.events_stream(tenant), subjects.event(tenant, "w", "c", "e1"), up_to=last)
    await read(reader, follower(bus, tenant), lambda now: now.caught_up > 0)
    assert [(gap.first, gap.last, gap.reason) for gap in reader.gaps] == [(1, 6, "retention_gap")]
    assert reader.got == {"e1": [6, 7, 8]}


async def test_what_the_log_no_longer_has_is_given_as_the_collectors_snapshot_and_no_gap(
    two: tuple[Bus, Bus], tenant: str
) -> None:
    writer, bus = two
    await writer.ensure(topology.base())
    hand = Log(writer, tenant, conversation="c", workspace="w")
    await hand.own("e1")
    log, reader = LogWriter(writer, tenant), Reader()
    for _ in range(4):
        last = await log.frame("e1", 2)
    await writer.purge(subjects.events_stream(tenant), subjects.event(tenant, "w", "c", "e1"), up_to=last)
    events = [event(n, ev.TEXT_COMPLETED, {"segment": f"s{n}", "text": f"e1-{n}"}) for n in range(1, 7)]
    collector = Collector(writer, hand, snapshot=snapshot_from(hand, "e1", events))
    async with serving(collector):
        await collector.register()
        source = follower(bus, tenant, snapshots=Records(bus, tenant).beyond_log)
        await read(reader, source, lambda now: now.caught_up > 0)
    assert reader.gaps == [] and collector.asked == ["i1"]
    assert [state.text.count("e1-") for one in reader.snapshots for state in one.executions.values()] == [6]
    assert reader.got == {"e1": [6, 7, 8]}


async def test_an_older_collector_is_not_asked_and_the_gap_says_what_is_missing(
    two: tuple[Bus, Bus], tenant: str
) -> None:
    writer, bus = two
    await writer.ensure(topology.base())
    hand = Log(writer, tenant, conversation="c", workspace="w")
    await hand.own("e1")
    log, reader = LogWriter(writer, tenant), Reader()
    await log.frame("e1", 2)
    last = await log.frame("e1", 2)
    await writer.purge(subjects.events_stream(tenant), subjects.event(tenant, "w", "c", "e1"), up_to=last)
    collector = Collector(writer, hand, can=False)
    async with serving(collector):
        await collector.register()
        source = follower(bus, tenant, snapshots=Records(bus, tenant).beyond_log)
        await read(reader, source, lambda now: now.caught_up > 0)
    assert [(gap.first, gap.last) for gap in reader.gaps] == [(1, 2)] and collector.asked == []
    assert reader.gaps[0].detail.startswith("CAPABILITY_MISSING")
    assert reader.got == {"e1": [2, 3, 4]}


async def test_a_cursor_of_another_conversation_is_refused(tenant: str) -> None:
    token = Cursor.beginning().encode(tenant, "other")
    with pytest.raises(InvalidError, match="another tenant or conversation"):
        Cursor.decode(token, tenant, "c")


async def test_patience_ends_with_a_problem_that_says_the_bus_is_away(tenant: str) -> None:
    async with MemoryBus(MemoryServer()) as bus:  # no stream of this tenant
        source = follower(bus, tenant, patience_s=0.2)
        with pytest.raises(ProblemError) as told:
            await read(Reader(), source, lambda _: False)
    assert told.value.problem.code is Code.RUNTIME_UNAVAILABLE


async def test_a_server_killed_and_restarted_in_mid_follow_loses_and_doubles_nothing(tenant: str) -> None:
    with running_server() as server:
        async with await connect(server.url, name="writer") as writer, await connect(server.url, name="reader") as bus:
            await writer.ensure(topology.tenant(tenant, max_bytes=64 << 20))
            reader = Reader()
            source = follower(bus, tenant)
            async with asyncio.TaskGroup() as group:
                log = LogWriter(writer, tenant)
                group.create_task(_write_over_restarts(server, writer, log), name="writer")
                await read(reader, source, lambda now: now.got.get("e1", [0])[-1] == 603)
    assert source.attaches >= 3  # each restart cost one
    assert reader.got == {"e1": list(range(1, 604))}
    assert not reader.gaps and not reader.changed


async def _write_over_restarts(server: NatsServer, writer: NatsBus, log: LogWriter) -> None:
    """Frames with message ids, sent again in doubt; the server is killed twice between them."""
    from tether import events as ev
    from tether.errors import BusError
    from tether.events import Event
    from tether.frames import Frame, Position, encode

    subject = subjects.event(log.tenant, log.workspace, log.conversation, "e1")
    for number in range(201):
        if number in (60, 140):
            await asyncio.to_thread(server.restart)
        first = 3 * number + 1
        events = [
            Event(ordinal=n, at=n, type=ev.TEXT_COMPLETED, body={"segment": f"s{n}", "text": "x"})
            for n in range(first, first + 3)
        ]
        data = encode(Frame(first=first, last=first + 2, pos=Position(record=0, index=0), events=events))
        while True:
            try:
                await writer.publish(subject, data, msg_id=f"frame-{number}")
                break
            except BusError:
                await asyncio.sleep(0.05)
