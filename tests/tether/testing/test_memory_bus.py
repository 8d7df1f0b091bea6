"""The memory bus's faults, followers and histories; its plain behaviour is in the conformance suite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tether import subjects, topology
from tether.errors import (
    BusUnavailableError,
    NoReplyError,
    UndecidedError,
    WrongLastSequenceError,
)
from tether.ports import Message, StoredMessage
from tether.testing import FaultKind, Faults, MemoryBus, MemoryServer

pytestmark = pytest.mark.virtual_time

EVENT = subjects.event("acme", "w", "c", "e")
LOG = subjects.events_stream("acme")


@pytest.fixture(params=[False, True], ids=["r1", "r3"])
def server(request: pytest.FixtureRequest) -> MemoryServer:
    return MemoryServer(replicated=request.param)


@pytest.fixture
async def bus(server: MemoryServer) -> AsyncIterator[MemoryBus]:
    async with MemoryBus(server) as connected:
        await connected.ensure(topology.base())
        await connected.ensure(topology.tenant("acme", max_bytes=16 << 20))
        yield connected


async def stored(bus: MemoryBus) -> list[bytes]:
    return [message.data for message in await bus.read(LOG, 0, "tether.event.acme.>")]


async def test_a_lost_message_and_a_lost_ack_look_the_same_and_differ_in_the_log(bus: MemoryBus) -> None:
    bus.faults.add("publish", FaultKind.LOSE_MESSAGE)
    with pytest.raises(UndecidedError):
        await bus.publish(EVENT, b"lost", expect_last=0)
    assert await stored(bus) == []
    bus.faults.add("publish", FaultKind.LOSE_ACK)
    with pytest.raises(UndecidedError):
        await bus.publish(EVENT, b"kept", expect_last=0)
    assert await stored(bus) == [b"kept"]
    assert [fired.fault.kind for fired in bus.faults.fired] == [FaultKind.LOSE_MESSAGE, FaultKind.LOSE_ACK]


async def test_a_late_message_is_stored_after_its_caller_was_told_undecided(bus: MemoryBus) -> None:
    bus.faults.add("publish", FaultKind.LATE, delay_s=5.0)
    with pytest.raises(UndecidedError):
        await bus.publish(EVENT, b"late", expect_last=0)
    assert await stored(bus) == []
    await asyncio.sleep(6)
    assert await stored(bus) == [b"late"]


async def test_faults_are_scripted_by_call_subject_and_count(bus: MemoryBus) -> None:
    bus.faults.add("publish", FaultKind.UNAVAILABLE, subject="tether.event.acme.*.c.*", skip=1, times=2)
    await bus.publish("tether.prompt.acme.w.c", b"untouched")
    await bus.publish(EVENT, b"1")
    for _ in range(2):
        with pytest.raises(BusUnavailableError):
            await bus.publish(EVENT, b"2")
    await bus.publish(EVENT, b"3")
    assert await stored(bus) == [b"1", b"3"]


async def test_a_lost_live_copy_shows_as_a_hole_in_the_chain(bus: MemoryBus) -> None:
    live = await bus.live("tether.live.acme.>")
    bus.faults.add("publish", FaultKind.LOSE_LIVE, skip=1)
    for data in (b"1", b"2", b"3"):
        await bus.publish(EVENT, data)
    chain = [await live.next(1), await live.next(1)]
    assert [(copy.previous, copy.sequence) for copy in chain if copy] == [(0, 1), (2, 3)]
    assert await live.next(1) is None


async def test_a_lost_connection_grows_the_epoch_drops_copies_and_comes_back(bus: MemoryBus) -> None:
    live = await bus.live("tether.live.acme.>")
    other = MemoryBus(bus.server)
    bus.faults.add("publish", FaultKind.DISCONNECT, delay_s=3.0)
    with pytest.raises(UndecidedError):
        await bus.publish(EVENT, b"1", expect_last=0)
    assert not bus.connected
    await other.publish(EVENT, b"missed")
    with pytest.raises(BusUnavailableError):
        await bus.publish(EVENT, b"2", timeout_s=1.0)
    ack = await bus.publish(EVENT, b"2", timeout_s=10.0)
    assert bus.epoch == 2
    copy = await live.next(1)
    assert copy is not None and (copy.sequence, copy.previous) == (ack.sequence, 1)
    await other.close()


async def test_a_lagging_follower_hides_the_tail_from_direct_reads_only(bus: MemoryBus) -> None:
    for data in (b"1", b"2", b"3"):
        await bus.publish(EVENT, data)
    bus.server.hold_followers(LOG, 1)
    assert await stored(bus) == [b"1"]
    behind = await bus.last(LOG, EVENT, leader=False)
    ahead = await bus.last(LOG, EVENT)
    assert behind is not None and ahead is not None
    assert (behind.data, ahead.data) == (b"1", b"3")
    bus.server.hold_followers(LOG, None)
    assert await stored(bus) == [b"1", b"2", b"3"]


async def test_a_rolled_back_stream_gives_sequences_out_again(bus: MemoryBus) -> None:
    for n in range(3):
        await bus.publish(EVENT, b"%d" % n, msg_id=f"{n}")
    before = await bus.state(LOG)
    bus.server.roll_back(LOG, 1)
    ack = await bus.publish(EVENT, b"new", expect_last=1, msg_id="2")
    assert (ack.sequence, ack.duplicate) == (2, False)
    after = await bus.state(LOG)
    assert before is not None and after is not None and before.created == after.created
    assert await stored(bus) == [b"0", b"new"]


async def test_a_recreated_stream_is_empty_and_another(bus: MemoryBus) -> None:
    await bus.publish(EVENT, b"1", msg_id="1")
    before = await bus.state(LOG)
    bus.server.recreate(LOG)
    after = await bus.state(LOG)
    assert before is not None and after is not None and before.created != after.created
    assert (await bus.publish(EVENT, b"1", msg_id="1", expect_last=0)).sequence == 1


async def test_retention_drops_the_oldest_by_age_bytes_and_hand(bus: MemoryBus) -> None:
    log = topology.StreamSpec(
        name="S", subjects=("s.>",), description="Small", max_age_s=60, max_bytes=1000, duplicate_window_s=1
    )
    await bus.ensure(topology.Topology(streams=(log,)))
    for n in range(10):
        await bus.publish(f"s.{n % 2}", b"x" * 170)
    state = await bus.state("S")
    assert state is not None
    assert (state.first_sequence, state.last_sequence, state.messages) == (7, 10, 4)
    assert state.bytes <= 1000
    bus.server.evict("S", 8)
    state = await bus.state("S")
    assert state is not None and state.first_sequence == 9
    await asyncio.sleep(61)
    state = await bus.state("S")
    assert state is not None
    assert (state.messages, state.first_sequence, state.last_sequence) == (0, 11, 10)


async def test_a_lost_ack_of_a_job_brings_it_again(bus: MemoryBus) -> None:
    await bus.publish("tether.prompt.acme.w.c", b"p")
    jobs = bus.jobs(subjects.PROMPTS_STREAM, subjects.ROUTER_DURABLE)
    bus.faults.add("ack", FaultKind.LOSE_MESSAGE)
    job = await anext(jobs)
    assert not await job.ack(confirm=True)
    again = await anext(jobs)
    assert again.deliveries == 2
    assert await again.ack(confirm=True)
    await jobs.aclose()


async def test_a_request_whose_reply_is_lost_reads_unknown_though_it_was_handled(bus: MemoryBus) -> None:
    handled: list[bytes] = []

    async def handler(message: Message) -> bytes:
        handled.append(message.data)
        return b"done"

    async with bus.serve("ask", handler, name="asked"):
        bus.faults.add("request", FaultKind.LOSE_ACK)
        with pytest.raises(NoReplyError) as unknown:
            await bus.request("ask", b"1", timeout_s=1.0)
        bus.faults.add("request", FaultKind.LOSE_MESSAGE)
        with pytest.raises(NoReplyError):
            await bus.request("ask", b"2", timeout_s=1.0)
    assert not unknown.value.no_responders
    assert handled == [b"1"]


RATES = {
    "publish": {
        FaultKind.LOSE_MESSAGE: 0.1,
        FaultKind.LOSE_ACK: 0.1,
        FaultKind.LATE: 0.1,
        FaultKind.UNAVAILABLE: 0.1,
        FaultKind.DISCONNECT: 0.05,
        FaultKind.DISCONNECT_AFTER: 0.05,
    },
    "last": {FaultKind.UNAVAILABLE: 0.2, FaultKind.DISCONNECT: 0.05},
}


@pytest.mark.parametrize("seed", range(20))
async def test_the_retry_rule_stores_each_message_once_in_order_whatever_fails(server: MemoryServer, seed: int) -> None:
    """Same bytes and id again while undecided; on 10071 read and judge; `duplicate` counts when it is readable."""
    faults = Faults()
    async with MemoryBus(server, faults=faults) as bus:
        await bus.ensure(topology.tenant("acme", max_bytes=16 << 20))
        faults.random(seed, RATES, delay_max_s=2.0)
        last = 0
        for n in range(60):
            last = await write(bus, b"%d" % n, last)
        faults.clear()
        await asyncio.sleep(3)
        assert await stored(bus) == [b"%d" % n for n in range(60)], f"seed {seed}: {faults.fired}"
    assert len(faults.fired) > 10


async def write(bus: MemoryBus, data: bytes, last: int) -> int:
    while True:
        try:
            ack = await bus.publish(EVENT, data, msg_id=data.decode(), expect_last=last)
            if not ack.duplicate:
                return ack.sequence
        except WrongLastSequenceError:
            pass
        except (UndecidedError, BusUnavailableError):
            continue
        found = await read_last(bus)
        if found is not None and found.data == data:
            return found.sequence


async def read_last(bus: MemoryBus) -> StoredMessage | None:
    while True:
        try:
            return await bus.last(LOG, EVENT)
        except BusUnavailableError:
            continue
