"""A router's stop is taken only while the owner record names it."""

from __future__ import annotations

import asyncio

import pytest

from support_router import virtual, world
from tether import owner, subjects
from tether.control import Authority, ControlRequest
from tether.errors import BusError, Code, ProblemError
from tether.ids import ExecutionTarget
from tether.kv import Bucket
from tether.owner import OwnerRecord
from tether.testing import MemoryBus, MemoryServer
from tether_collector.stop_authority import check_takeover

KEY = subjects.owner_key("acme", "w1", "c1")
TARGET = ExecutionTarget(
    tenant="acme",
    workspace="w1",
    conversation="c1",
    response="rsp1",
    response_generation=1,
    execution="exe1",
    execution_generation=1,
    sandbox="s1",
    boot="b1",
    process_generation=1,
)
RUNNING = OwnerRecord(state="running", target=TARGET, request="r1", generation=1)


def stopping(control: str = "stop1", target: ExecutionTarget = TARGET) -> OwnerRecord:
    decision = owner.decide(
        RUNNING.model_copy(update={"target": target}), owner.TakeOver(target.execution, control, "r2", 5)
    )
    assert isinstance(decision, owner.Accepted)
    return decision.record


def request(token: int, control: str = "stop1") -> ControlRequest:
    authority = Authority(kind="owner", holder="router", token=token)
    return ControlRequest(control=control, verb="stop", target=TARGET, authority=authority)


async def stored(bus: MemoryBus, record: OwnerRecord) -> int:
    return (await Bucket(bus, subjects.OWNERS).create(KEY, record.value(), op="a")).revision


@virtual
async def test_the_stop_that_the_record_names_is_taken() -> None:
    bus = MemoryBus(MemoryServer())
    await world(bus)
    revision = await stored(bus, stopping())
    await check_takeover(bus, request(revision), TARGET)


@pytest.mark.parametrize(
    "record",
    [
        RUNNING,
        stopping("stop2"),
        stopping(target=TARGET.model_copy(update={"execution": "exe2"})),
        OwnerRecord(generation=1),
    ],
    ids=["a takeover that has failed", "another takeover's", "another execution", "idle"],
)
def test_a_stop_that_the_record_does_not_name_is_refused_and_may_be_tried_again(record: OwnerRecord) -> None:
    @virtual
    async def run() -> None:
        bus = MemoryBus(MemoryServer())
        await world(bus)
        revision = await stored(bus, record)
        with pytest.raises(ProblemError, match="does not name this stop") as caught:
            await check_takeover(bus, request(revision), TARGET)
        assert (caught.value.problem.code, caught.value.problem.retryable) == (Code.LEASE_NOT_READY, True)

    run()


@virtual
async def test_a_replica_that_lags_is_read_again() -> None:
    bus = MemoryBus(MemoryServer())
    await world(bus)
    revision = await stored(bus, RUNNING)

    async def catch_up() -> None:
        await asyncio.sleep(0.1)
        await Bucket(bus, subjects.OWNERS).update(KEY, stopping().value(), op="b", revision=revision)

    async with asyncio.TaskGroup() as group:
        group.create_task(catch_up(), name="catch-up")
        await check_takeover(bus, request(revision + 1), TARGET)


@virtual
async def test_a_record_that_nobody_can_read_lets_nothing_through() -> None:
    bus = MemoryBus(MemoryServer())
    await world(bus)
    await bus.publish(f"$KV.{subjects.OWNERS}.{KEY}", b'{"state": 7}')
    with pytest.raises(BusError):
        await check_takeover(bus, request(1), TARGET)
