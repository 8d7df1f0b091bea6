"""Leases: the pure core by cases, the shell over a bus whose writes fail and whose time is virtual."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tether import subjects, topology
from tether.errors import Code, ProblemError
from tether.kv import Bucket
from tether.lease import (
    Clock,
    Delete,
    Effect,
    Failed,
    Held,
    Input,
    Lease,
    Lost,
    Refused,
    Released,
    Renew,
    State,
    Stop,
    Waiting,
    WakeAt,
    Written,
    decide,
    token_of,
)
from tether.testing import FaultKind, MemoryBus, MemoryServer

KEY = "control.acme.w.c"


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBus(MemoryServer()) as connected:
        await connected.ensure(topology.base())
        yield connected


def lease(bus: MemoryBus, holder: str) -> Lease:
    bucket = Bucket(bus, subjects.LEASES)
    return Lease(bucket, KEY, holder=holder, ttl_s=15, renew_s=5.0, value={"execution": "e"})


def test_the_core_acquires_renews_retries_loses_and_releases() -> None:
    def step(state: State, event: Input) -> tuple[State, tuple[Effect, ...]]:
        return decide(state, event, 15, 5.0)

    held, effects = step(Waiting(), Written(100.0, 7))
    assert (held, effects) == (Held(7, 7, 115.0, 105.0), (WakeAt(105.0),))
    assert step(held, Clock(104.0)) == (held, (WakeAt(105.0),))
    assert step(held, Clock(105.0)) == (held, (Renew(7, 7),))
    renewed, _ = step(held, Written(105.0, 9))
    assert renewed == Held(7, 9, 120.0, 110.0)
    retrying, effects = step(renewed, Failed(110.0))
    assert retrying == Held(7, 9, 120.0, 110.25) and effects == (WakeAt(110.25),)
    assert step(retrying, Failed(120.0))[0] == Lost(7, "not renewed in time")
    assert step(retrying, Clock(120.0))[0] == Lost(7, "not renewed in time")
    assert step(renewed, Refused(None))[0] == Lost(7, "expired")
    assert step(renewed, Refused("b"))[0] == Lost(7, "taken by b")
    assert step(renewed, Stop()) == (Released(7), (Delete(9),))
    for final in (Lost(7, "expired"), Released(7)):
        events: tuple[Input, ...] = (Written(1.0, 99), Refused("b"), Failed(1.0), Clock(1e9), Stop())
        for event in events:
            assert step(final, event) == (final, ())


@pytest.mark.virtual_time
async def test_the_token_is_the_first_revision_and_stays_through_renewals(bus: MemoryBus) -> None:
    mine = lease(bus, "a")
    token = await mine.acquire()
    bucket = Bucket(bus, subjects.LEASES)
    entry = await bucket.get(KEY)
    assert entry is not None and entry.revision == token == token_of(entry) == mine.token
    assert "token" not in entry.value
    keeping = asyncio.create_task(mine.keep())
    await asyncio.sleep(60)
    entry = await bucket.get(KEY)
    assert entry is not None and entry.revision > token
    assert token_of(entry) == token == mine.token
    assert {key: entry.value[key] for key in ("holder", "execution", "token")} == {
        "holder": "a",
        "execution": "e",
        "token": token,
    }
    with pytest.raises(ProblemError) as taken:
        await lease(bus, "b").acquire()
    assert taken.value.problem.code is Code.LEASE_NOT_READY and taken.value.problem.retryable
    await mine.release()
    assert await keeping == "released"
    assert not mine.held
    other = await lease(bus, "b").acquire()
    assert other > token


@pytest.mark.virtual_time
async def test_a_lease_that_is_not_renewed_expires_and_its_holder_knows_first(bus: MemoryBus) -> None:
    mine = lease(bus, "a")
    await mine.acquire()
    await asyncio.sleep(14.9)
    assert mine.held
    await asyncio.sleep(0.1)
    assert not mine.held
    await asyncio.sleep(0.1)
    token = await lease(bus, "b").acquire()
    assert await mine.keep() == "not renewed in time"
    with pytest.raises(ProblemError):
        _ = mine.token
    assert token > 0


@pytest.mark.virtual_time
@pytest.mark.parametrize("kind", [FaultKind.LOSE_ACK, FaultKind.LOSE_MESSAGE, FaultKind.UNAVAILABLE, FaultKind.LATE])
async def test_renewals_survive_doubtful_answers(bus: MemoryBus, kind: FaultKind) -> None:
    mine = lease(bus, "a")
    token = await mine.acquire()
    keeping = asyncio.create_task(mine.keep())
    bus.faults.add("publish", kind, times=20, delay_s=0.1)
    await asyncio.sleep(100)
    assert mine.held and mine.token == token and not keeping.done()
    await mine.release()
    assert await keeping == "released"


@pytest.mark.virtual_time
async def test_a_holder_that_is_cut_off_gives_up_before_another_can_hold(bus: MemoryBus) -> None:
    mine = lease(bus, "a")
    await mine.acquire()
    keeping = asyncio.create_task(mine.keep())
    await asyncio.sleep(7)
    bus.disconnect()
    other = MemoryBus(bus.server)
    while True:
        try:
            await lease(other, "b").acquire()
            break
        except ProblemError:
            await asyncio.sleep(0.5)
    assert not mine.held
    bus.reconnect()
    reason = await keeping
    assert reason in ("not renewed in time", "taken by b")
    await other.close()


@pytest.mark.virtual_time
async def test_a_lease_whose_key_was_taken_is_lost_by_name(bus: MemoryBus) -> None:
    mine = lease(bus, "a")
    token = await mine.acquire()
    keeping = asyncio.create_task(mine.keep())
    bucket = Bucket(bus, subjects.LEASES)
    await bucket.delete(KEY, revision=token)
    await lease(bus, "b").acquire()
    assert await keeping == "taken by b"


@pytest.mark.virtual_time
async def test_a_release_while_a_renewal_is_under_way_ends_both_and_stops_nothing_else(bus: MemoryBus) -> None:
    held = lease(bus, "first")
    await held.acquire()
    keeping = asyncio.create_task(held.keep(), name="keep")
    bus.faults.add("publish", FaultKind.DELAY, delay_s=3.0)
    await asyncio.sleep(6.0)  # the renewal was sent at 5 s and is not answered yet
    await asyncio.wait_for(held.release(), 10)
    assert await asyncio.wait_for(keeping, 10) == "released"
    assert await Bucket(bus, subjects.LEASES).get(KEY) is None


async def test_a_lease_is_acquired_above_a_token_that_is_known_and_its_renewals_carry_it_on(bus: MemoryBus) -> None:
    first = lease(bus, "one")
    natural = await first.acquire(above=0)
    await first.release()
    second = lease(bus, "two")
    assert await second.acquire(above=natural + 100) == natural + 101 == second.token
    entry = await Bucket(bus, subjects.LEASES).get(KEY)
    assert entry is not None and token_of(entry) == natural + 101 > entry.revision
    await second._renew(entry.revision, second.token)
    assert second.held and second.token == natural + 101
    await second.release()
    assert await Bucket(bus, subjects.LEASES).get(KEY) is None
