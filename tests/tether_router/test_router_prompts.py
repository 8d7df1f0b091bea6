"""Prompts through whole routers on the memory bus, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from support_router import Sandbox, a_prompt, derived, routing, until, virtual, world
from tether import subjects
from tether.errors import Code, problem
from tether.testing import FaultKind, MemoryBus, MemoryServer


def buses(count: int) -> list[MemoryBus]:
    server = MemoryServer()
    return [MemoryBus(server, name=f"bus-{number}") for number in range(count)]


@virtual
async def test_a_prompt_becomes_one_command_one_pair_of_events_and_an_answer() -> None:
    one, outside = buses(2)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(one), sandbox.running():
        await stage.send(a_prompt())
        await stage.settled()
        await sandbox.claims(1)
    response, execution = derived()
    told = await stage.told()
    assert [event.id for event in told] == ["r1/prompt.admitted", "r1/response.created"]
    assert told[0].body["content"] == [{"type": "text", "text": "hello"}]
    assert told[1].body["execution"] == execution
    record = await stage.request()
    assert record is not None and record.done is not None
    assert (record.state, record.done.status, record.done.response) == ("done", "admitted", response)
    last = await outside.last(subjects.events_stream("acme"), subjects.event("acme", "w1", "c1", "_"))
    assert last is not None
    assert (record.done.cursor_sequence, record.done.cursor_stored_at_ns) == (last.sequence, last.stored_at_ns)
    assert sandbox.claimed == [execution]


@virtual
async def test_p1_the_same_request_at_once_and_an_hour_later_on_two_routers_is_one_execution_with_one_answer() -> None:
    one, two, outside = buses(3)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(one), routing(two), sandbox.running():
        await asyncio.gather(*(stage.send(a_prompt(), again=f"/{number}") for number in range(4)))
        await stage.settled()
        first = await stage.request()
        await sandbox.claims(1)
        await sandbox.finish(sandbox.claimed[0])
        await stage.state_is("idle")
        await asyncio.sleep(3600)
        await stage.send(a_prompt())
        await stage.settled()
        assert await stage.request() == first
        await asyncio.sleep(60)
    assert sandbox.claimed == [derived()[1]]
    assert [event.id for event in await stage.told()] == ["r1/prompt.admitted", "r1/response.created"]
    assert (await stage.owner()).state == "idle"


@virtual
async def test_p2_the_same_id_with_another_payload_is_a_conflict_that_touches_nothing() -> None:
    one, outside = buses(2)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(one), sandbox.running():
        await stage.send(a_prompt())
        await stage.settled()
        before = await stage.request()
        other = a_prompt(text="something else")
        await stage.send(other)
        await stage.settled()
        assert await stage.request() == before
    told = await stage.told()
    assert [event.id for event in told[:2]] == ["r1/prompt.admitted", "r1/response.created"]
    assert told[2].id == f"r1/{other.digest[:8]}/response.failed"
    assert told[2].body["code"] == "REQUEST_CONFLICT"
    assert len(told) == 3
    assert sandbox.claimed == [derived()[1]]
    assert sandbox.interjected == []


@virtual
async def test_p3_prompts_of_one_conversation_run_in_stream_order_with_one_cli_at_any_time() -> None:
    one, two, outside = buses(3)
    stage = await world(outside)
    sandbox = Sandbox(outside, refuse=problem(Code.SESSION_STREAM_NOT_ACTIVE, "ended", ended=True))
    names = [f"r{number}" for number in range(6)]
    async with routing(one), routing(two), sandbox.running():
        for name in names:
            await stage.send(a_prompt(name))
        for count in range(1, len(names) + 1):
            await sandbox.claims(count)
            await sandbox.end_response(sandbox.claimed[-1])
            await asyncio.sleep(7)
            assert len(sandbox.claimed) == count, "no prompt starts before the proof"
            await sandbox.end(sandbox.claimed[-1])
        await stage.settled(len(names))
    assert sandbox.claimed == [derived(name)[1] for name in names]
    assert sandbox.most_active == 1
    admitted = [event.id for event in await stage.told() if event.type == "prompt.admitted"]
    assert admitted == [f"{name}/prompt.admitted" for name in names]


@virtual
async def test_many_conversations_are_admitted_in_parallel_while_one_waits() -> None:
    one, outside = buses(2)
    stage = await world(outside)
    sandbox = Sandbox(outside, hold_claims=True)
    async with routing(one), sandbox.running():
        await stage.send(a_prompt("first"))
        for number in range(6):
            await stage.send(a_prompt(f"waits{number}"))
        for number in range(40):
            await stage.send(a_prompt(f"other{number}", conversation=f"d{number}"))

        async def only_those_that_wait_are_left() -> bool:
            return await stage.waiting() == 6

        await until(only_those_that_wait_are_left, "41 prompts settled", timeout_s=5)


@virtual
async def test_p6_p10_a_prompt_waits_for_the_proof_and_is_answered_within_moments_of_it() -> None:
    one, outside = buses(2)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    loop = asyncio.get_running_loop()
    async with routing(one), sandbox.running():
        await stage.send(a_prompt("r1"))
        await sandbox.claims(1)
        await sandbox.end_response(sandbox.claimed[0])
        await stage.state_is("exiting")
        await stage.send(a_prompt("r2"))
        await asyncio.sleep(12)
        assert len(sandbox.claimed) == 1
        ended_s = loop.time()
        await sandbox.end(sandbox.claimed[0])
        await sandbox.claims(2)
        assert loop.time() - ended_s < 0.2, "the end itself wakes the prompt that waits"
        await stage.settled(2)
    assert sandbox.claimed[1] == derived("r2")[1]
    assert not any(event.type in ("response.failed", "response.superseded") for event in await stage.told())


@virtual
async def test_p7_a_cold_start_slower_than_every_timeout_settles_the_request_once() -> None:
    one, two, outside = buses(3)
    stage = await world(outside)
    sandbox = Sandbox(outside, hold_claims=True)
    async with routing(one), routing(two), sandbox.running():
        await stage.send(a_prompt())
        await stage.settled()
        await stage.send(a_prompt("r2"))
        await asyncio.sleep(900)
        assert (await stage.owner()).state == "starting"
        sandbox.hold_claims = False
        await sandbox.claims(1)
        await stage.settled(2)
    assert sandbox.claimed == [derived()[1]]
    assert sandbox.interjected == ["hello"]
    record = await stage.request("r2")
    assert record is not None and record.done is not None
    assert (record.done.status, record.done.response) == ("interjected", derived()[0])


@virtual
async def test_a_native_session_is_resumed_only_once_it_was_bound_as_resumable() -> None:
    one, outside = buses(2)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(one), sandbox.running():
        await stage.send(a_prompt("r1"))
        await sandbox.claims(1)
        await sandbox.tell(sandbox.claimed[0], "session.bound", {"native_session": "s1", "resumable": False})
        await sandbox.finish(sandbox.claimed[0])
        await stage.send(a_prompt("r2"))
        await sandbox.claims(2)
        assert (await stage.owner()).native_session is None
        await sandbox.tell(sandbox.claimed[1], "session.bound", {"native_session": "s2", "resumable": True})
        await sandbox.finish(sandbox.claimed[1])
        await stage.send(a_prompt("r3"))
        await sandbox.claims(3)
        record = await stage.owner()
    assert record.native_session == "s2"
    assert record.target is not None and record.target.native_session == "s2"
    assert record.generation == 3


@virtual
async def test_a_conversation_that_lives_in_another_workspace_is_refused_as_invalid() -> None:
    one, outside = buses(2)
    stage = await world(outside)
    async with routing(one):
        await stage.send(a_prompt("r1", workspace="w1"))
        await stage.settled()
        await stage.send(a_prompt("r2", workspace="w2"))
        await stage.settled(2)
    record = await stage.request("r2")
    assert record is not None and record.done is not None and record.done.problem is not None
    assert (record.state, record.done.problem.code) == ("done", Code.INVALID)
    assert [event.id for event in await stage.told(workspace="w2")] == ["r2/response.failed"]
    commands = await outside.state(subjects.COMMANDS_STREAM)
    assert commands is not None and commands.messages == 1


@virtual
async def test_a_tenant_without_streams_is_waited_for_and_nothing_is_failed() -> None:
    one, outside = buses(2)
    stage = await world(outside)
    await outside.delete_stream(subjects.events_stream("acme"))
    async with routing(one):
        await stage.send(a_prompt())
        await asyncio.sleep(60)
        assert await stage.waiting() == 1
        await world(outside)
        await stage.settled(timeout_s=2)  # however often it was tried before
    record = await stage.request()
    assert record is not None and record.done is not None and record.done.status == "admitted"


@virtual
async def test_a_router_that_was_away_closes_at_its_start_what_ended_meanwhile() -> None:
    one, two, outside = buses(3)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with sandbox.running():
        async with routing(one) as shut_down:
            await stage.send(a_prompt())
            await sandbox.claims(1)
            await stage.state_is("running")
            await shut_down()
        await sandbox.tell(sandbox.claimed[0], "session.bound", {"native_session": "s1", "resumable": True})
        await sandbox.finish(sandbox.claimed[0])
        async with routing(two):
            await stage.state_is("idle", timeout_s=5)
    record = await stage.owner()
    assert record.native_session == "s1"
    assert [stone.execution for stone in record.tombstones] == [derived()[1]]


@virtual
async def test_an_end_whose_live_copy_was_lost_is_closed_by_the_sweep_within_a_minute() -> None:
    one, outside = buses(2)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(one), sandbox.running():
        await stage.send(a_prompt())
        await sandbox.claims(1)
        await stage.state_is("running")
        await asyncio.sleep(5)  # the sweeps of the start are over
        outside.faults.add("publish", FaultKind.LOSE_LIVE, subject="tether.event.>", times=2)
        await sandbox.finish(sandbox.claimed[0])
        await asyncio.sleep(1)
        assert (await stage.owner()).state == "running", "the live copies were lost"
        await stage.state_is("idle", timeout_s=61)


@virtual
async def test_an_unclaimed_start_is_left_alone_however_long_it_takes() -> None:
    one, outside = buses(2)
    stage = await world(outside)
    async with routing(one):
        await stage.send(a_prompt())
        await stage.settled()
        await asyncio.sleep(7200)
    assert (await stage.owner()).state == "starting"
    assert [event.type for event in await stage.told()] == ["prompt.admitted", "response.created"]


@virtual
async def test_a_start_that_was_given_up_frees_the_conversation() -> None:
    one, outside = buses(2)
    stage = await world(outside)
    sandbox = Sandbox(outside, hold_claims=True)
    async with routing(one), sandbox.running():
        await stage.send(a_prompt())
        await stage.settled()
        execution = derived()[1]
        sandbox._frames[execution] = (subjects.EventAddress("acme", "w1", "c1", execution), 0, 0)
        sandbox.active += 1
        await sandbox.end(execution, outcome="never_started")
        await stage.state_is("idle", timeout_s=5)
        sandbox.hold_claims = False
        await stage.send(a_prompt("r2"))
        await sandbox.claims(1)

        async def acked_as_stale() -> bool:
            return sandbox.stale == [execution]

        await until(acked_as_stale, "the command of the ended start comes to nothing")
    assert sandbox.claimed == [derived("r2")[1]]


@virtual
async def test_shutdown_gives_back_what_waits_and_another_router_takes_it_at_once() -> None:
    one, two, outside = buses(3)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with sandbox.running():
        async with routing(one) as shut_down:
            await stage.send(a_prompt())
            await sandbox.claims(1)
            await sandbox.end_response(sandbox.claimed[0])
            await stage.state_is("exiting")
            await stage.send(a_prompt("r2"))

            async def opened() -> bool:
                return await stage.request("r2") is not None

            await until(opened, "the prompt is in hand")
            await asyncio.wait_for(shut_down(), 1)
        await sandbox.end(sandbox.claimed[0])
        async with routing(two):
            await sandbox.claims(2, timeout_s=10)


@virtual
async def test_routers_whose_connection_comes_and_goes_lose_and_double_nothing() -> None:
    one, two, outside = buses(3)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    names = [f"r{number}" for number in range(12)]
    async with routing(one), routing(two), sandbox.running():
        for index, name in enumerate(names):
            (one, two)[index % 2].disconnect(for_s=1.5)
            await stage.send(a_prompt(name))
            await sandbox.claims(index + 1)
            await sandbox.finish(sandbox.claimed[-1])
            await stage.state_is("idle")
        await stage.settled(len(names))
    assert sandbox.claimed == [derived(name)[1] for name in names]
    assert len({event.id for event in await stage.told()}) == len(await stage.told()) == 2 * len(names)


@pytest.mark.parametrize("seed", range(6))
def test_seeded_faults_of_the_bus_never_lose_or_double_a_prompt(seed: int) -> None:
    @virtual
    async def run() -> None:
        one, two, outside = buses(3)
        stage = await world(outside)
        sandbox = Sandbox(outside)
        rates = {
            "publish": {
                FaultKind.LOSE_ACK: 0.08,
                FaultKind.LOSE_MESSAGE: 0.08,
                FaultKind.LATE: 0.04,
                FaultKind.UNAVAILABLE: 0.05,
                FaultKind.DELAY: 0.1,
            },
            "last": {FaultKind.UNAVAILABLE: 0.03, FaultKind.DELAY: 0.1},
            "ack": {FaultKind.LOSE_MESSAGE: 0.1},
        }
        for number, faulty in enumerate((one, two)):
            faulty.faults.random(seed * 2 + number, rates, delay_max_s=2.0)
        async with routing(one), routing(two), sandbox.running():
            for index in range(8):
                await stage.send(a_prompt(f"r{index}"))
                await sandbox.claims(index + 1, timeout_s=2000)
                await sandbox.finish(sandbox.claimed[-1])
                await stage.state_is("idle", timeout_s=2000)
            await stage.settled(8, timeout_s=2000)
        assert sandbox.claimed == [derived(f"r{index}")[1] for index in range(8)]
        told = [event.id for event in await stage.told()]
        assert len(told) == len(set(told)) == 16
        assert len(one.faults.fired) + len(two.faults.fired) > 20

    run()
