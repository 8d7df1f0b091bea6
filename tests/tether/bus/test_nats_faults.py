"""The real bus over a real server that is stopped, killed, restarted, or refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

from support_nats import NatsServer, running_cluster, running_server
from tether import subjects, topology
from tether.bus import BusConfig, NatsBus, connect
from tether.errors import (
    BusError,
    BusUnavailableError,
    NoReplyError,
    PermissionDeniedError,
    SlowReaderError,
    UndecidedError,
    WrongLastSequenceError,
)
from tether.ports import Job, Message


@pytest.fixture
def own_server() -> Iterator[NatsServer]:
    """One that a test may harm."""
    with running_server() as server:
        yield server


@pytest.fixture
async def own_bus(own_server: NatsServer) -> AsyncIterator[NatsBus]:
    async with await connect(own_server.url, name="harmed") as bus:
        await bus.ensure(topology.base())
        await bus.ensure(topology.tenant("acme", max_bytes=16 << 20))
        yield bus


async def until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + within_s
    while not condition():
        assert loop.time() < deadline_s, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.02)


async def in_thread(action: Callable[[], object]) -> None:
    await asyncio.to_thread(action)


T = TypeVar("T")
EVENT = subjects.event("acme", "w", "c", "e")
LOG = subjects.events_stream("acme")


async def test_a_publish_in_flight_when_the_server_is_killed_is_undecided_at_once(
    own_server: NatsServer, own_bus: NatsBus
) -> None:
    own_server.stop()
    start_s = time.monotonic()
    publishing = [
        asyncio.create_task(own_bus.publish(f"{EVENT}{n}", b"x", msg_id=f"{n}", expect_last=0, timeout_s=60.0))
        for n in range(50)
    ]
    await asyncio.sleep(0)
    await in_thread(own_server.kill)
    results = await asyncio.gather(*publishing, return_exceptions=True)
    assert time.monotonic() - start_s < 15
    assert all(isinstance(result, UndecidedError) for result in results)
    assert not own_bus.connected


async def test_after_kill_and_restart_everything_acked_is_there_and_all_traffic_resumes(
    own_server: NatsServer, own_bus: NatsBus
) -> None:
    live = await own_bus.live("tether.live.acme.>")
    core = await own_bus.subscribe("core")
    await own_bus.barrier()
    jobs = own_bus.jobs(subjects.PROMPTS_STREAM, subjects.ROUTER_DURABLE)
    first = await own_bus.publish(EVENT, b"1", msg_id="1", expect_last=0)
    await own_bus.publish("tether.prompt.acme.w.c", b"one")
    job = await anext(jobs)
    assert await job.ack(confirm=True)
    waiting = asyncio.ensure_future(anext(jobs))
    epoch = own_bus.epoch

    await in_thread(own_server.restart)

    second = await own_bus.publish(EVENT, b"2", msg_id="2", expect_last=first.sequence, timeout_s=20.0)
    assert own_bus.epoch > epoch
    assert [m.data for m in await own_bus.read(LOG, 0, "tether.event.acme.>")] == [b"1", b"2"]
    copies = [await live.next(20.0)]
    while len(copies) < 2:
        if (copy := await live.next(20.0)) is not None:  # None once: the connection was lost
            copies.append(copy)
    assert [(copy.sequence, copy.previous) for copy in copies if copy] == [
        (first.sequence, 0),
        (second.sequence, first.sequence),
    ]
    await own_bus.send("core", b"again")
    message = await core.next(20.0)
    assert message is not None and message.data == b"again"
    start_s = time.monotonic()
    await own_bus.publish("tether.prompt.acme.w.c", b"two")
    async with asyncio.timeout(20):
        resumed = await waiting
    assert resumed.message.data == b"two"
    assert time.monotonic() - start_s < 6
    assert await resumed.ack(confirm=True)
    await jobs.aclose()


async def test_who_waits_for_a_live_copy_hears_at_once_that_the_connection_was_lost(
    own_server: NatsServer, own_bus: NatsBus
) -> None:
    live = await own_bus.live("tether.live.acme.>")
    waiting = asyncio.ensure_future(live.next(3600.0))
    await own_bus.barrier()
    await in_thread(own_server.kill)
    async with asyncio.timeout(20):
        assert await waiting is None
    waiting = asyncio.ensure_future(live.next(3600.0))
    await in_thread(own_server.restart)
    await own_bus.publish(EVENT, b"1", msg_id="1", expect_last=0, timeout_s=20.0)
    async with asyncio.timeout(20):
        copy = await waiting
    assert copy is not None and copy.data == b"1"
    await live.close()
    hooks = own_bus._connection._lost_hooks
    assert not [hook for hook in hooks if getattr(hook, "__self__", None) is live], "nothing is told to a closed one"


async def test_a_server_that_stops_without_closing_is_noticed_and_the_bus_returns_with_it(
    own_server: NatsServer, own_bus: NatsBus
) -> None:
    subscription = await own_bus.subscribe("core")
    jobs = own_bus.jobs(subjects.PROMPTS_STREAM, subjects.ROUTER_DURABLE)
    waiting: asyncio.Future[Job] = asyncio.ensure_future(anext(jobs))
    await own_bus.barrier()
    epoch = own_bus.epoch
    own_server.stop()
    try:
        start_s = time.monotonic()
        publishing = asyncio.create_task(own_bus.publish(EVENT, b"1", msg_id="1", expect_last=0, timeout_s=60.0))
        with pytest.raises(UndecidedError):
            await publishing
        assert time.monotonic() - start_s < 15
        assert not own_bus.connected
        with pytest.raises(BusUnavailableError):
            await own_bus.publish(EVENT, b"1", msg_id="1", expect_last=0, timeout_s=0.2)
    finally:
        own_server.cont()
    await until(lambda: own_bus.connected and own_bus.epoch > epoch, 20.0, "the bus is back")
    # The publish before may have been stored when the server went on: the retry rule tells.
    with contextlib.suppress(WrongLastSequenceError):
        await own_bus.publish(EVENT, b"1", msg_id="1", expect_last=0, timeout_s=20.0)
    assert [m.data for m in await own_bus.read(LOG, 0, EVENT)] == [b"1"]
    await own_bus.send("core", b"back")
    message = await subscription.next(20.0)
    assert message is not None and message.data == b"back"
    await own_bus.publish("tether.prompt.acme.w.c", b"p")
    async with asyncio.timeout(20):
        assert (await waiting).message.data == b"p"
    await jobs.aclose()


async def test_a_long_stop_of_four_seconds_is_survived_without_a_lost_or_doubled_event(
    own_server: NatsServer, own_bus: NatsBus
) -> None:
    writer = Writer(own_bus)
    async with asyncio.TaskGroup() as group:
        group.create_task(writer.run(), name="writer")
        await until(lambda: writer.last > 100, 20, "the writer writes")
        own_server.stop()
        await asyncio.sleep(4.0)
        own_server.cont()
        before = writer.last
        await until(lambda: writer.last > before + 100, 20, "the writer goes on after the stop")
        await in_thread(own_server.restart)
        before = writer.last
        await until(lambda: writer.last > before + 100, 20, "the writer goes on after the kill")
        writer.done.set()
    assert await stored_numbers(own_bus) == list(range(1, writer.written + 1))


class Writer:
    """Numbered events by the retry rule, one in flight: same bytes and id again, read and judge."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus
        self.last = 0
        self.written = 0
        self.done = asyncio.Event()

    async def run(self) -> None:
        while not self.done.is_set():
            await self._write(b"%d" % (self.written + 1))
            self.written += 1

    async def _write(self, data: bytes) -> None:
        while True:
            try:
                ack = await self.bus.publish(EVENT, data, msg_id=data.decode(), expect_last=self.last, timeout_s=0.5)
                if not ack.duplicate:
                    self.last = ack.sequence
                    return
            except WrongLastSequenceError:
                pass
            except (UndecidedError, BusUnavailableError):
                await asyncio.sleep(0.02)
                continue
            found = await retry(lambda: self.bus.last(LOG, EVENT))
            if found is not None and found.data == data:
                self.last = found.sequence
                return


async def stored_numbers(bus: NatsBus) -> list[int]:
    stored: list[int] = []
    after = 0
    while batch := await bus.read(LOG, after, EVENT):
        stored += [int(message.data) for message in batch]
        after = batch[-1].sequence
    return stored


@pytest.mark.r3
async def test_in_a_cluster_the_leaders_death_loses_and_doubles_nothing_and_jobs_go_on() -> None:
    with running_cluster() as cluster:
        async with await connect(cluster.url, name="cluster") as bus:
            await settled(bus, topology.tenant("acme", replicas=3, max_bytes=16 << 20))
            await settled(bus, topology.base(replicas=3))
            jobs = bus.jobs(subjects.PROMPTS_STREAM, subjects.ROUTER_DURABLE)
            waiting = asyncio.ensure_future(anext(jobs))
            writer = Writer(bus)
            async with asyncio.TaskGroup() as group:
                group.create_task(writer.run(), name="writer")
                await until(lambda: writer.written > 50, 20, "the writer writes")
                leader = await leader_of(bus, LOG)
                (server,) = [server for server in cluster.servers if server.name == leader]
                await in_thread(server.kill)
                before = writer.written
                await until(lambda: writer.written > before + 50, 30, "the writer goes on without the leader")
                await retry(lambda: bus.publish("tether.prompt.acme.w.c", b"p", msg_id="p"))
                async with asyncio.timeout(20):
                    job = await waiting
                assert job.message.data == b"p"
                await in_thread(server.start)
                before = writer.written
                await until(lambda: writer.written > before + 50, 30, "the writer goes on with three")
                writer.done.set()
            await jobs.aclose()

            async def whole() -> bool:
                return await stored_numbers(bus) == list(range(1, writer.written + 1))

            for _ in range(100):  # a follower that has just returned may lag
                if await retry(whole):
                    return
                await asyncio.sleep(0.05)
            raise AssertionError(f"{writer.written} written, stored: {await stored_numbers(bus)}")


async def leader_of(bus: NatsBus, stream: str) -> str:
    answer = await bus.api(f"$JS.API.STREAM.INFO.{stream}")
    cluster = answer["cluster"]
    assert isinstance(cluster, dict)
    return str(cluster["leader"])


async def settled(bus: NatsBus, topo: topology.Topology) -> None:
    """A cluster that has just started has no leader for a moment."""
    async with asyncio.timeout(60):
        await retry(lambda: bus.ensure(topo))


async def retry(call: Callable[[], Awaitable[T]]) -> T:
    while True:
        try:
            return await call()
        except BusError:
            await asyncio.sleep(0.05)


async def test_a_publish_while_disconnected_waits_for_the_connection_and_is_otherwise_not_sent(
    own_server: NatsServer, own_bus: NatsBus
) -> None:
    await in_thread(own_server.kill)
    await until(lambda: not own_bus.connected, 20, "the loss is noticed")
    with pytest.raises(BusUnavailableError):
        await own_bus.publish(EVENT, b"lost", timeout_s=0.1)
    with pytest.raises(BusUnavailableError):
        await own_bus.request("x", b"", timeout_s=0.1)
    waiting = asyncio.create_task(own_bus.publish(EVENT, b"kept", expect_last=0, timeout_s=20.0))
    await asyncio.sleep(0)
    await in_thread(own_server.start)
    await waiting
    assert [m.data for m in await own_bus.read(LOG, 0, EVENT)] == [b"kept"]


async def test_cancelled_publishes_and_readers_leave_nothing_behind(own_bus: NatsBus) -> None:
    tasks = [asyncio.create_task(own_bus.publish(f"{EVENT}{n}", b"x" * 1000)) for n in range(100)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
    assert not any(isinstance(result, BaseException) for result in results[1::2])
    await own_bus.barrier()
    assert own_bus._connection._waiting == {}


async def test_a_reader_without_end_is_cut_while_others_go_on(own_bus: NatsBus) -> None:
    slow = await own_bus.live("tether.live.acme.>", buffer_bytes_max=50_000)
    quick = await own_bus.live("tether.live.acme.>")
    await own_bus.barrier()
    last = 0
    for _n in range(100):
        last = (await own_bus.publish(EVENT, b"x" * 1000, expect_last=last)).sequence
        copy = await quick.next(20.0)
        assert copy is not None and copy.sequence == last
    with pytest.raises(SlowReaderError):
        await slow.next()


CONFINED = """
accounts {
  T: {
    jetstream: enabled
    users: [
      {user: admin, password: admin},
      {user: box, password: box, permissions: {
        publish: ["tether.event.acme.w.>", "_INBOX_box.>", "$JS.API.DIRECT.GET.EVENTS_acme.tether.event.acme.w.>"],
        subscribe: ["_INBOX_box.>", "tether.control.acme.w.>"],
        allow_responses: true
      }},
      {user: mute, password: mute, permissions: {
        publish: ["tether.event.acme.w.>", "$JS.API.DIRECT.GET.EVENTS_acme.tether.event.acme.w.>"],
        subscribe: ["_INBOX_mute.>", "tether.control.acme.w.>"],
        allow_responses: true
      }}
    ]
  }
}
"""


@pytest.fixture(scope="module")
def confined_server() -> Iterator[NatsServer]:
    with running_server(extra=CONFINED) as server:
        yield server


@pytest.fixture
async def admin(confined_server: NatsServer) -> AsyncIterator[NatsBus]:
    async with await connect(confined_server.url, name="admin", user="admin", password="admin") as bus:
        await bus.ensure(topology.base())
        await bus.ensure(topology.tenant("acme", max_bytes=16 << 20))
        yield bus


@pytest.mark.parametrize("user", ["box", "mute"])
async def test_a_confined_user_does_its_work_and_is_refused_everything_else(
    confined_server: NatsServer, admin: NatsBus, user: str
) -> None:
    """`mute` may not even publish to its own inbox: the refusal is its round trip then."""
    url = confined_server.url
    async with await connect(url, name=user, user=user, password=user, inbox_prefix=f"_INBOX_{user}") as box:
        mine = subjects.event("acme", "w", "c", user)
        ack = await box.publish(mine, b"1", expect_last=0)
        found = await box.last(LOG, mine, leader=False)
        assert found is not None and found.sequence == ack.sequence
        with pytest.raises(PermissionDeniedError):
            await box.publish(subjects.event("acme", "other", "c", "e"), b"1", timeout_s=20.0)
        with pytest.raises(PermissionDeniedError):
            await box.last(LOG, mine)
        with pytest.raises(PermissionDeniedError):
            await box.read(LOG, 0, mine)
        with pytest.raises(PermissionDeniedError):
            await anext(box.jobs(subjects.PROMPTS_STREAM, subjects.ROUTER_DURABLE))
        spying = await box.subscribe("tether.live.acme.>")
        with pytest.raises(PermissionDeniedError):
            await spying.next(20.0)
        with pytest.raises(PermissionDeniedError):
            async with box.serve("tether.control.acme.other.>", echo, name="collector"):
                pass
        async with box.serve("tether.control.acme.w.*", echo, name="collector"):
            answer = await admin.request("tether.control.acme.w.discover", b"?", timeout_s=20.0)
            assert answer.data == b"?"
        await box.barrier()
        assert box.connected and box.epoch == 1


async def echo(message: Message) -> bytes:
    return message.data


async def test_refused_credentials_inboxes_and_absent_servers_are_told_apart(confined_server: NatsServer) -> None:
    url = confined_server.url
    with pytest.raises(PermissionDeniedError):
        await connect(url, name="wrong", user="admin", password="wrong")
    with pytest.raises(PermissionDeniedError):
        await connect(url, name="wrong", user="box", password="box", inbox_prefix="_INBOX")
    start_s = time.monotonic()
    with pytest.raises(BusUnavailableError):
        await connect("nats://127.0.0.1:9", name="absent", connect_timeout_s=0.5)
    assert time.monotonic() - start_s < 10


async def test_served_endpoints_are_listed_as_nats_services(bus: NatsBus) -> None:
    async with bus.serve("tether.agent.start", echo, queue="agents", name="agent-service"):
        await bus.request("tether.agent.start", b"1", timeout_s=20.0)
        ping = json.loads((await bus.request("$SRV.PING.agent-service", b"", timeout_s=20.0)).data)
        assert ping["type"] == "io.nats.micro.v1.ping_response"
        assert ping["name"] == "agent-service"
        info = json.loads((await bus.request(f"$SRV.INFO.agent-service.{ping['id']}", b"", timeout_s=20.0)).data)
        assert info["endpoints"] == [
            {"name": "start", "subject": "tether.agent.start", "queue_group": "agents", "metadata": {}}
        ]
        stats = json.loads((await bus.request("$SRV.STATS.agent-service", b"", timeout_s=20.0)).data)
        assert stats["endpoints"][0]["num_requests"] == 1
    with pytest.raises(NoReplyError) as nobody:
        await bus.request("$SRV.PING.agent-service", b"", timeout_s=0.5)
    assert nobody.value.no_responders


async def test_what_everyone_sees_of_a_connection_holds_no_secret() -> None:
    config = BusConfig(
        servers=("nats://me:pa55@x",), name="n", user="u", password="hunter2", token="t0ken", nkey_seed="seed"
    )
    assert "hunter2" not in repr(config)
    assert "pa55" not in repr(config)
    assert "t0ken" not in repr(config)
    assert "seed=" not in repr(config)
