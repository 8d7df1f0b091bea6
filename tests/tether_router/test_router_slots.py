"""Running executions are limited where they begin: never more than there are places, and every prompt has its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from support_router import TENANT, Sandbox, a_prompt, routing, until, virtual, world
from tether import subjects, topology
from tether.ids import ExecutionTarget
from tether.kv import Bucket
from tether.owner import OwnerRecord, Tombstone
from tether.ports import Bus
from tether.quotas import Limits, Place, Quotas, QuotasFile, RunningRecord, TenantQuota
from tether.testing import MemoryBus, MemoryServer
from tether_router.core import slots as core
from tether_router.records import Records
from tether_router.slots import Slots
from tether_router.turns import Shares, Turn, Turns

NOW_MS = 1_700_000_000_000


def want(key: str, execution: str = "e", limit: int = 2, workspace_limit: int = 0) -> core.Want:
    return core.Want(key, execution, NOW_MS, limit, key.rpartition(".")[0] + ".", workspace_limit)


def held(*keys: str) -> RunningRecord:
    return RunningRecord(held={key: Place(execution="e", at=NOW_MS) for key in keys})


def idle(*buried: str) -> OwnerRecord:
    return OwnerRecord(tombstones=tuple(Tombstone(execution=one, outcome="completed", at=1) for one in buried))


# --- places ---


def test_a_conversation_keeps_its_place_for_its_next_execution_and_another_finds_none() -> None:
    full = held("t.w.a", "t.w.b")
    assert core.take(full, want("t.w.c")) == core.Full("", 2)
    assert core.take(full, want("t.w.a")) == core.Held(None)
    kept = core.take(full, want("t.w.a", "later"))
    assert isinstance(kept, core.Held) and kept.record is not None
    assert kept.record.held["t.w.a"].execution == "later" and len(kept.record.held) == 2


def test_a_workspaces_limit_is_its_own() -> None:
    record = held("t.w1.a")
    assert core.take(record, want("t.w1.b", limit=5, workspace_limit=1)) == core.Full("workspace", 1)
    assert isinstance(core.take(record, want("t.w2.b", limit=5, workspace_limit=1)), core.Held)
    assert isinstance(core.take(held("t.w10.a"), want("t.w1.b", limit=5, workspace_limit=1)), core.Held)


def test_an_idle_owner_frees_a_place_at_once_only_if_it_tells_of_that_execution() -> None:
    place = Place(execution="e1", at=NOW_MS)
    assert core.is_free(place, idle("e1"), NOW_MS)
    assert not core.is_free(place, idle("older"), NOW_MS), "the record of the new one is about to be written"
    assert core.is_free(place, idle("older"), NOW_MS + core.YOUNG_MS + 1), "it never was"
    assert not core.is_free(place, OwnerRecord(state="exiting"), NOW_MS + 10**9)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=60), st.integers(1, 4))
def test_no_sequence_of_takes_and_ends_holds_more_than_the_limit(steps: list[tuple[str, bool]], limit: int) -> None:
    record = RunningRecord()
    for number, (name, takes) in enumerate(steps):
        key = f"t.w.{name}"
        if takes:
            outcome = core.take(record, want(key, f"e{number}", limit))
            record = outcome.record or record if isinstance(outcome, core.Held) else record
        elif key in record.held:
            record = core.free(record, {key: record.held[key].execution})
            assert key not in record.held
        assert len(record.held) <= limit
        assert core.free(record, dict.fromkeys(record.held, "another")) == record, "an older end frees nothing"


# --- several routers ---


async def a_bus(server: MemoryServer) -> Bus:
    bus = MemoryBus(server)
    await bus.ensure(topology.base())
    return bus


def slots_on(bus: Bus, limits: Limits, *, total: int = 0, quotas: Quotas | None = None) -> Slots:
    return Slots(bus, Records(bus), quotas or Quotas(limits), lambda: NOW_MS, total=total)


async def own(bus: Bus, conversation: str, execution: str, *, runs: bool, tenant: str = TENANT) -> OwnerRecord:
    """The owner record as the router would have left it."""
    target = ExecutionTarget(
        tenant=tenant,
        workspace="w1",
        conversation=conversation,
        response="r",
        response_generation=1,
        execution=execution,
        execution_generation=1,
        sandbox="s",
    )
    record = OwnerRecord(state="running", target=target, generation=1) if runs else idle(execution)
    bucket, key = Bucket(bus, subjects.OWNERS), subjects.owner_key(tenant, "w1", conversation)
    entry = await bucket.get(key)
    if entry is None:
        await bucket.create(key, record.value(), op=f"{execution}{runs}")
    else:
        await bucket.update(key, record.value(), op=f"{execution}{runs}", revision=entry.revision)
    return record


async def taken(slots: Slots, names: Iterable[str], tenant: str = TENANT) -> list[str]:
    found = []
    for name in names:
        if await slots.take(a_prompt(name, tenant=tenant, conversation=name), f"e-{name}") is None:
            found.append(name)
    return found


@virtual
async def test_two_routers_together_give_no_more_places_than_there_are() -> None:
    server = MemoryServer()
    buses = [await a_bus(server) for _ in range(2)]
    routers = [slots_on(bus, Limits(running_executions=3)) for bus in buses]
    names = [f"c{number}" for number in range(12)]
    for name in names:
        await own(buses[0], name, f"e-{name}", runs=True)
    found = await asyncio.gather(taken(routers[0], names[::2]), taken(routers[1], names[1::2]))
    assert sum(len(one) for one in found) == 3


@virtual
async def test_a_place_whose_router_died_is_found_by_another_one_that_has_no_room() -> None:
    server = MemoryServer()
    bus = await a_bus(server)
    limits = Limits(running_executions=1)
    await own(bus, "gone", "e-gone", runs=True)
    assert await taken(slots_on(bus, limits), ["gone"]) == ["gone"]
    await own(bus, "gone", "e-gone", runs=False)  # its end was followed by nobody here
    assert await taken(slots_on(bus, limits), ["next"]) == ["next"]


@virtual
async def test_an_end_that_was_seen_frees_the_place_and_wakes_the_oldest_prompt_that_waits() -> None:
    bus = await a_bus(MemoryServer())
    slots = slots_on(bus, Limits(running_executions=1))
    await own(bus, "a", "e-a", runs=True)
    assert await taken(slots, ["a", "b"]) == ["a"]
    waiting = a_prompt("b", conversation="b")
    assert slots.hopeless(waiting), "nothing is read for it again"
    assert not slots.hopeless(a_prompt("x", conversation="a")), "it may join what runs"
    assert not slots.hopeless(a_prompt("x", conversation="b", mode="interject"))
    order: list[int] = []

    async def waits(sequence: int) -> None:
        await slots.freed(TENANT, sequence, 60)
        order.append(sequence)

    async with asyncio.TaskGroup() as group:
        for sequence in (7, 3, 5):
            group.create_task(waits(sequence))
        await asyncio.sleep(1)
        slots.seen(subjects.owner_key(TENANT, "w1", "a"), await own(bus, "a", "e-a", runs=False))
        await asyncio.sleep(1)
        assert order == [3]
        assert not slots.hopeless(waiting)
        slots.wake_all()
    assert sorted(order) == [3, 5, 7]
    assert await taken(slots, ["b"]) == ["b"]


@virtual
async def test_the_sets_places_are_given_to_tenants_in_turn() -> None:
    bus = await a_bus(MemoryServer())
    slots = slots_on(bus, Limits(), total=1)
    await own(bus, "a", "e-a", runs=True, tenant="t1")
    assert await taken(slots, ["a"], "t1") == ["a"]
    woken: list[str] = []

    async def waits(tenant: str, sequence: int) -> None:
        await slots.freed(tenant, sequence, 600)
        woken.append(tenant)

    async with asyncio.TaskGroup() as group:
        for sequence in range(4):
            group.create_task(waits("t1", sequence))
        group.create_task(waits("t2", 10))
        await asyncio.sleep(1)
        for number in range(3):
            name = f"n{number}"
            slots.seen(
                subjects.owner_key("t1", "w1", "a" if not number else f"n{number - 1}"),
                idle("e-a" if not number else f"e-n{number - 1}"),
            )
            await asyncio.sleep(1)
            await own(bus, name, f"e-{name}", runs=True, tenant="t1")
            assert await taken(slots, [name], "t1") == [name]
        assert woken == ["t1", "t2", "t1"]
        slots.wake_all()


@virtual
async def test_without_a_place_of_the_set_the_tenants_own_is_given_back() -> None:
    bus = await a_bus(MemoryServer())
    quotas = Quotas(Limits(), QuotasFile(tenants={"t2": TenantQuota(running_executions=5)}))
    slots = slots_on(bus, Limits(), total=1, quotas=quotas)
    await own(bus, "a", "e-a", runs=True, tenant="t1")
    assert await taken(slots, ["a"], "t1") == ["a"]
    full = await slots.take(a_prompt("b", tenant="t2", conversation="b"), "e-b")
    assert full == core.Full("service", 1)
    record = await Bucket(bus, subjects.QUOTAS).record(subjects.running_key("t2"), RunningRecord)
    assert record is not None and not record.held


# --- whole routers ---


@virtual
async def test_prompts_beyond_the_limit_wait_and_all_of_them_run_in_the_order_of_their_storing() -> None:
    server = MemoryServer()
    bus, outside = MemoryBus(server), MemoryBus(server)
    stage, sandbox = await world(outside), Sandbox(outside)
    async with routing(bus, router_quota_running_executions=2), sandbox.running():
        for number in range(9):
            await stage.send(a_prompt(f"r{number}", conversation=f"c{number}"))
        for count in range(2, 10):
            await sandbox.claims(count)
            await asyncio.sleep(20)
            assert len(sandbox.claimed) == count, "no more than two run at once"
            await sandbox.finish(sandbox.claimed[count - 2])
        await stage.settled(9)
        for number in range(9):
            request = await stage.request(f"r{number}")
            assert request is not None and request.done is not None and request.done.status == "admitted"
    assert [command.request_id for command in sandbox.commands] == [f"r{number}" for number in range(9)]


@virtual
async def test_two_routers_keep_the_sets_limit_and_a_message_into_what_runs_needs_no_place() -> None:
    server = MemoryServer()
    one, two, outside = MemoryBus(server), MemoryBus(server), MemoryBus(server)
    stage, sandbox = await world(outside), Sandbox(outside)
    settings = {"router_quota_running_total": 1}
    async with routing(one, **settings), routing(two, **settings), sandbox.running():
        for number in range(3):
            await stage.send(a_prompt(f"r{number}", conversation=f"c{number}"))
        await sandbox.claims(1)
        running = sandbox.commands[0].target.conversation
        await stage.state_is("running", running)
        await stage.send(a_prompt("joins", conversation=running))

        async def joined() -> bool:
            return bool(sandbox.interjected)

        await until(joined, "the message into the running execution")
        for count in (1, 2, 3):
            await sandbox.claims(count)
            await asyncio.sleep(20)
            assert len(sandbox.claimed) == count
            await sandbox.finish(sandbox.claimed[-1])
        await stage.settled(4)


# --- shares and turns ---


def test_a_tenant_has_its_share_of_what_is_in_hand_and_no_more() -> None:
    shares = Shares(2)
    assert [shares.enter("noisy") for _ in range(4)] == [True, True, False, False]
    assert shares.enter("quiet")
    shares.leave("noisy")
    assert shares.enter("noisy") and not shares.enter("noisy")


@virtual
async def test_a_tenant_works_on_so_many_prompts_at_once_while_anothers_go_on() -> None:
    turns, inside, most = Turns(2), 0, 0

    async def work(tenant: str) -> float:
        nonlocal inside, most
        async with turns.turn(tenant):
            inside += tenant == "noisy"
            most = max(most, inside)
            await asyncio.sleep(1)
            inside -= tenant == "noisy"
        return asyncio.get_running_loop().time()

    began_s = asyncio.get_running_loop().time()
    quiet, *_ = await asyncio.gather(work("quiet"), *(work("noisy") for _ in range(10)))
    assert most == 2
    assert quiet - began_s < 1.5, "it waited for none of the others"


@virtual
async def test_who_waits_outside_lets_others_in_and_takes_its_turn_again_also_after_a_failure() -> None:
    turns = Turns(1)
    order: list[str] = []

    async def asks(turn: Turn) -> None:
        async with turn.away():
            await asyncio.sleep(5)
            raise ValueError("no answer")

    async def first() -> None:
        async with turns.turn("t") as turn:
            try:
                await asks(turn)
            except ValueError:
                order.append("first")
                await asyncio.sleep(1)
                order.append("still first")

    async def second() -> None:
        await asyncio.sleep(1)
        async with turns.turn("t"):
            order.append("second")
        await asyncio.sleep(4.5)
        async with turns.turn("t"):
            order.append("third")

    await asyncio.gather(first(), second())
    assert order == ["second", "first", "still first", "third"]


@virtual
async def test_a_cancelled_wait_outside_leaves_the_turn_free_and_not_twice() -> None:
    turns = Turns(1)

    async def hangs() -> None:
        async with turns.turn("t") as turn, turn.away():
            await asyncio.sleep(1000)

    async def works() -> None:
        async with turns.turn("t"):
            await asyncio.sleep(1)

    keeper = asyncio.create_task(hangs())
    await asyncio.sleep(1)
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    began_s = asyncio.get_running_loop().time()
    await asyncio.gather(works(), works())
    assert asyncio.get_running_loop().time() - began_s >= 2.0, "one at a time, as before"
