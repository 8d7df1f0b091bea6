"""A prompt that takes the conversation over: one stop, its proof, no second writer; failures are typed and harmless."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from support_router import FaultyBus, Sandbox, World, a_prompt, admitter, derived, routing, until, virtual, world
from tether import ids, subjects
from tether.control import ControlReply, decode_request
from tether.errors import Code, Problem, problem
from tether.events import Event
from tether.frames import Frame, Position, encode
from tether.ids import ExecutionTarget
from tether.kv import Bucket
from tether.prompt import RequestRecord
from tether.sandbox import CAN_SNAPSHOT, ExecutionSummary
from tether.subjects import EventAddress
from tether.testing import MemoryBus, MemoryServer
from tether_router.core.discovery import Found
from tether_router.discovery import resolve

STOP = ids.control_id("acme", "r2", "stop", 1)


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[tuple[World, Sandbox]]:
    """A router and a sandbox in which r1's execution runs."""
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    sandbox = Sandbox(outside, **options)
    async with routing(MemoryBus(server)), sandbox.running():
        await stage.send(a_prompt("r1"))
        await sandbox.claims(1)
        await stage.state_is("running")
        await stage.settled()
        yield stage, sandbox


async def failure(stage: World, request: str = "r2") -> tuple[str, Problem]:
    record = await stage.request(request)
    assert record is not None and record.done is not None and record.done.problem is not None
    return record.state, record.done.problem


async def ids_told(stage: World) -> list[str]:
    return [event.id for event in await stage.told()]


@virtual
async def test_a_takeover_stops_the_whole_target_once_and_runs_after_the_proof() -> None:
    async with running() as (stage, sandbox):
        await stage.send(a_prompt("r2", "instead", mode="takeover"))
        await sandbox.claims(2)
        await stage.settled(2)
        await stage.state_is("running")
        assert sandbox.claimed == [derived("r1")[1], derived("r2")[1]]
        assert (sandbox.stopped, sandbox.most_active) == ([derived("r1")[1]], 1)
        assert [one for one in sandbox.asked if one[0] == "stop"] == [("stop", STOP)]
        told = await stage.told()
        assert [event.id for event in told] == [
            "r1/prompt.admitted",
            "r1/response.created",
            "r1/response.superseded",
            "r2/prompt.admitted",
            "r2/response.created",
        ]
        assert told[2].body == {"request": "r1", "response": derived("r1")[0], "by": derived("r2")[0]}
        record = await stage.owner()
        assert (record.state, record.pending_request, record.stop_control) == ("running", None, None)
        assert record.buried(derived("r1")[1])
        await sandbox.finish(sandbox.claimed[1])
        await stage.state_is("idle")
        assert (await stage.owner()).superseded is None


@virtual
async def test_a_response_that_had_its_own_end_before_the_stop_took_effect_is_not_superseded() -> None:
    async with running(hold_stops=True) as (stage, sandbox):
        await stage.send(a_prompt("r2", mode="takeover"))
        await stage.state_is("stopping")
        await sandbox.finish(sandbox.claimed[0])
        await sandbox.claims(2)
        await stage.settled(2)
        assert "r1/response.superseded" not in await ids_told(stage)


@virtual
async def test_a_takeover_of_nothing_is_an_admission() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(MemoryBus(server)), sandbox.running():
        await stage.send(a_prompt("r1", mode="takeover"))
        await sandbox.claims(1)
    assert sandbox.asked == []


@pytest.mark.parametrize("claims_late", [False, True])
def test_an_execution_that_has_not_begun_is_taken_over_too(claims_late: bool) -> None:
    @virtual
    async def run() -> None:
        server = MemoryServer()
        outside = MemoryBus(server)
        stage = await world(outside)
        sandbox = Sandbox(outside, hold_claims=True, claims_late=claims_late)
        async with routing(MemoryBus(server)), sandbox.running():
            await stage.send(a_prompt("r1"))
            await stage.settled()
            await stage.send(a_prompt("r2", mode="takeover"))
            await stage.state_is("stopping")
            await asyncio.sleep(200)  # a sandbox that starts cold is slower than every bound
            assert await stage.waiting() == 1
            sandbox.hold_claims = False
            await sandbox.claims(2 if claims_late else 1)
            await stage.settled(2)
            first = [derived("r1")[1]] if claims_late else []
            assert sandbox.claimed == [*first, derived("r2")[1]]
            assert (sandbox.stopped, sandbox.most_active) == (first, 1)
            assert "r1/response.superseded" in await ids_told(stage)

    run()


# --- in order ---


@virtual
async def test_later_prompts_wait_behind_a_takeover_and_the_pending_one_is_who_asked() -> None:
    async with running(hold_stops=True) as (stage, sandbox):
        await stage.send(a_prompt("r2", "instead", mode="takeover"))
        await stage.state_is("stopping")
        await stage.send(a_prompt("r3", "and then"))
        await asyncio.sleep(20)
        record = await stage.owner()
        assert (record.pending_request, record.stop_control) == ("r2", STOP)
        assert await stage.waiting() == 2
        await sandbox.end_stopped(sandbox.claimed[0])
        await sandbox.claims(2)
        await stage.settled(3)
    assert sandbox.claimed == [derived("r1")[1], derived("r2")[1]]
    assert sandbox.interjected == ["and then"]


@virtual
async def test_of_several_takeovers_the_last_has_the_conversation_and_the_others_are_superseded_by_name() -> None:
    async with running(hold_stops=True) as (stage, sandbox):
        await stage.send(a_prompt("r2", mode="takeover"))
        await stage.state_is("stopping")
        await stage.send(a_prompt("r3", mode="takeover"))
        await stage.send(a_prompt("r4", mode="takeover"))
        await sandbox.end_stopped(sandbox.claimed[0])
        await sandbox.claims(2)
        await stage.settled(4)
        assert sandbox.claimed == [derived("r1")[1], derived("r4")[1]]
        assert [one for one in sandbox.asked if one[0] == "stop"] == [("stop", STOP)]
        for request in ("r2", "r3"):
            state, why = await failure(stage, request)
            assert (state, why.code, why.context) == ("done", Code.REQUEST_SUPERSEDED, {"by": "r4"})
        told = await stage.told()
        assert [event.id for event in told][2:] == [
            "r2/response.failed",
            "r3/response.failed",
            "r1/response.superseded",
            "r4/prompt.admitted",
            "r4/response.created",
        ]
        assert told[4].body["by"] == derived("r4")[0]
        assert (await stage.owner()).pending_request is None


@virtual
async def test_a_repeated_takeover_and_another_payload_of_a_known_one_supersede_nothing() -> None:
    async with running(hold_stops=True) as (stage, sandbox):
        await stage.send(a_prompt("r0", "long ago", mode="takeover", conversation="c0"))
        await sandbox.claims(2)
        await stage.send(a_prompt("r2", mode="takeover"))
        await stage.state_is("stopping")
        await stage.send(a_prompt("r2", mode="takeover"), again="/again")
        await stage.send(a_prompt("r1", "something else", mode="takeover"))
        await stage.send(a_prompt("r3", "an ordinary one"))
        await sandbox.end_stopped(sandbox.claimed[0])
        await sandbox.claims(3)
        await stage.settled(4)
    assert sandbox.claimed[-1] == derived("r2")[1]
    assert sandbox.interjected == ["an ordinary one"]
    conflict = a_prompt("r1", "something else", mode="takeover")
    assert f"r1/{conflict.digest[:8]}/response.failed" in await ids_told(stage)


@virtual
async def test_a_takeover_of_an_exiting_execution_waits_for_its_end_and_stops_nothing() -> None:
    async with running() as (stage, sandbox):
        await sandbox.end_response(sandbox.claimed[0])
        await stage.state_is("exiting")
        await stage.send(a_prompt("r2", mode="takeover"))
        await asyncio.sleep(30)
        assert await stage.waiting() == 1
        await sandbox.end(sandbox.claimed[0])
        await sandbox.claims(2)
    assert sandbox.asked == []


@virtual
async def test_a_frame_behind_the_fence_moves_nothing_of_the_new_response() -> None:
    async with running() as (stage, sandbox):
        await stage.send(a_prompt("r2", mode="takeover"))
        await sandbox.claims(2)
        await stage.state_is("running")
        old, new = sandbox.claimed
        before = await stage.owner()
        late = [
            Event(ordinal=90, at=1, type="response.ended", body={"outcome": "completed"}),
            Event(ordinal=91, at=1, type="execution.ended", body={"outcome": "completed", "proof": None}),
        ]
        frame = Frame(first=90, last=91, pos=Position(record=90, index=0), events=late)
        await stage.bus.publish(EventAddress("acme", "w1", "c1", old).subject, encode(frame))
        await asyncio.sleep(120)
        assert await stage.owner() == before
        assert before.target is not None and before.target.execution == new
        await stage.send(a_prompt("r3", "are you there"))
        await stage.settled(3)
    assert sandbox.interjected == ["are you there"]


# --- failures ---


@pytest.mark.parametrize("case", ["capability", "registration", "boot"])
def test_without_somebody_who_can_stop_it_exactly_nothing_is_touched_and_the_next_attempt_may(case: str) -> None:
    codes = {
        "capability": Code.CAPABILITY_MISSING,
        "registration": Code.RUNTIME_UNAVAILABLE,
        "boot": Code.TARGET_UNKNOWN,
    }

    @virtual
    async def run() -> None:
        async with running() as (stage, sandbox):
            match case:
                case "capability":
                    await sandbox.register(capabilities=(CAN_SNAPSHOT,))
                case "registration":
                    await sandbox.unregister()
                case _:
                    await sandbox.register(boot="b2")
            before = await stage.owner()
            await stage.send(a_prompt("r2", mode="takeover"))
            await stage.settled(2)
            state, why = await failure(stage)
            assert (state, why.code, why.retryable) == ("retryable", codes[case], True)
            assert "send again" in why.detail
            assert await stage.owner() == before
            assert [one for one in sandbox.asked if one[0] == "stop"] == []
            await sandbox.register()
            await stage.send(a_prompt("r2", mode="takeover", attempt=2))
            await sandbox.claims(2)
            assert sandbox.claimed[1] == derived("r2", 2)[1]

    run()


@pytest.mark.parametrize("code", [Code.TARGET_STALE, Code.TARGET_UNKNOWN, Code.CAPABILITY_MISSING])
def test_a_refused_stop_leaves_the_owner_as_it_was_and_another_attempt_has_its_own_stop(code: Code) -> None:
    @virtual
    async def run() -> None:
        async with running(refuse_stop=problem(code, "not this one")) as (stage, sandbox):
            await stage.send(a_prompt("r2", mode="takeover"))
            await stage.settled(2)
            state, why = await failure(stage)
            assert (state, why.code, why.retryable) == ("retryable", code, True)
            record = await stage.owner()
            assert (record.state, record.stop_control, record.pending_request) == ("running", None, None)
            assert record.target is not None and record.target.execution == derived("r1")[1]
            await stage.send(a_prompt("r3", "go on then"))
            await stage.settled(3)
            assert sandbox.interjected == ["go on then"]
            sandbox.refuse_stop = None
            await stage.send(a_prompt("r2", mode="takeover", attempt=2))
            await sandbox.claims(2)
            assert sandbox.stopped == [derived("r1")[1]]
            assert ("stop", ids.control_id("acme", "r2", "stop", 2)) in sandbox.asked

    run()


@virtual
async def test_a_stop_that_is_refused_for_now_is_tried_until_it_is_taken() -> None:
    async with running(refuse_stop=problem(Code.RUNTIME_UNAVAILABLE, "being recovered")) as (stage, sandbox):
        await stage.send(a_prompt("r2", mode="takeover"))
        await asyncio.sleep(10)
        assert (await stage.owner()).state == "stopping"
        sandbox.refuse_stop = None
        await sandbox.claims(2)
    assert {control for verb, control in sandbox.asked if verb == "stop"} == {STOP}


@virtual
async def test_a_stop_that_never_arrived_fails_unconfirmed_and_the_execution_goes_on() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(MemoryBus(server)):
        async with sandbox.running():
            await stage.send(a_prompt("r1"))
            await sandbox.claims(1)
            await stage.state_is("running")
        await stage.send(a_prompt("r2", mode="takeover"))  # the collector is away, its registration not yet expired
        await stage.settled(2)
        state, why = await failure(stage)
        assert (state, why.code, why.retryable) == ("retryable", Code.STOP_UNCONFIRMED, True)
        record = await stage.owner()
        assert (record.state, record.pending_request, record.stop_control) == ("stopping", None, STOP)
        await stage.send(a_prompt("r3", "still there?"))
        await asyncio.sleep(60)
        assert await stage.waiting() == 1, "as long as nobody knows of the stop, nothing else is done"
        async with sandbox.running():
            await stage.settled(3)
            assert (await stage.owner()).state == "running"
            assert (sandbox.interjected, sandbox.stopped) == (["still there?"], [])
            await stage.send(a_prompt("r2", mode="takeover", attempt=2))
            await sandbox.claims(2)
            assert sandbox.most_active == 1


@virtual
async def test_a_stop_that_was_taken_without_a_proof_fails_unconfirmed_and_takes_effect_later() -> None:
    async with running(hold_stops=True) as (stage, sandbox):
        await stage.send(a_prompt("r2", mode="takeover"))
        await stage.settled(2)
        state, why = await failure(stage)
        assert (state, why.code) == ("retryable", Code.STOP_UNCONFIRMED)
        await stage.send(a_prompt("r3", "after it"))
        await asyncio.sleep(100)
        assert await stage.waiting() == 1
        await sandbox.end_stopped(sandbox.claimed[0])
        await sandbox.claims(2)
        await stage.settled(3)
        assert sandbox.claimed == [derived("r1")[1], derived("r3")[1]]
        assert sandbox.interjected == []
        assert "r1/response.superseded" in await ids_told(stage)


@virtual
async def test_a_takeover_after_one_that_was_not_confirmed_stops_under_its_own_id() -> None:
    async with running(hold_stops=True) as (stage, sandbox):
        await stage.send(a_prompt("r2", mode="takeover"))
        await stage.settled(2)
        await stage.send(a_prompt("r3", mode="takeover"))

        async def asked() -> bool:
            return ("stop", ids.control_id("acme", "r3", "stop", 1)) in sandbox.asked

        await until(asked, "the second stop")
        record = await stage.owner()
        assert record.pending_request == "r3"
        await sandbox.end_stopped(sandbox.claimed[0])
        await sandbox.claims(2)
    assert sandbox.claimed == [derived("r1")[1], derived("r3")[1]]


@virtual
async def test_lost_replies_and_a_proof_that_comes_first_end_a_takeover_as_well() -> None:
    async with running() as (stage, sandbox):
        sandbox.lose_replies = 3
        await stage.send(a_prompt("r2", mode="takeover"))
        await sandbox.claims(2)
        await stage.settled(2)
    assert [control for verb, control in sandbox.asked if verb == "stop"] == [STOP]


# --- frozen routers ---


@virtual
async def test_a_router_that_sleeps_through_the_failure_of_its_takeover_stops_nothing_when_it_wakes() -> None:
    """Frozen right before it writes `stopping`: the failure that another told did not move the owner record."""
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with sandbox.running():
        async with routing(MemoryBus(server)):
            await stage.send(a_prompt("r1"))
            await sandbox.claims(1)
            await stage.state_is("running")
            await stage.settled()
        faulty = FaultyBus(MemoryBus(server), freeze_at=2)
        async with routing(faulty):  # type: ignore[arg-type]
            await stage.send(a_prompt("r2", mode="takeover"))
            await asyncio.wait_for(faulty.frozen.wait(), 20)
            await sandbox.register(capabilities=())
            async with routing(MemoryBus(server)):
                await stage.settled(2)
                await sandbox.register()
                faulty.thawed.set()
                await asyncio.sleep(60)
                record = await stage.owner()
                assert (record.state, record.stop_control) == ("running", None)
                assert sandbox.stopped == []
                assert [one for one in sandbox.asked if one[0] == "stop"] == []


@virtual
async def test_a_stop_that_a_frozen_router_sends_after_its_takeover_has_failed_is_void() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with sandbox.running():
        async with routing(MemoryBus(server)):
            await stage.send(a_prompt("r1"))
            await sandbox.claims(1)
            await stage.state_is("running")
            await stage.settled()
        faulty = FaultyBus(MemoryBus(server), freeze_at=3)  # 1 open, 2 stopping, 3 the stop
        async with routing(faulty):  # type: ignore[arg-type]
            await stage.send(a_prompt("r2", mode="takeover"))
            await asyncio.wait_for(faulty.frozen.wait(), 20)
            sandbox.refuse_stop = problem(Code.TARGET_STALE, "not this one")
            async with routing(MemoryBus(server)):
                await stage.settled(2)
                assert (await failure(stage))[1].code is Code.TARGET_STALE
                sandbox.refuse_stop = None
                faulty.thawed.set()
                await asyncio.sleep(60)
                assert sandbox.stopped == []
                assert (await stage.owner()).state == "running"
    assert faulty.writes[2] == "tether.control.acme.w1.stop"


@virtual
async def test_prompts_of_many_clients_around_takeovers_settle_in_the_order_of_the_stream() -> None:
    """Two routers, one of them slow: whatever they do to each other, each prompt has one outcome, by its place."""
    async with running() as (stage, sandbox):
        second = MemoryBus(stage.bus.server)  # type: ignore[attr-defined]
        async with routing(second):
            names = ["a1", "t1", "a2", "t2", "a3"]
            for name in names:
                await stage.send(a_prompt(name, name, mode="takeover" if name[0] == "t" else "auto"))
            await stage.settled(len(names) + 1)
            await stage.state_is("running")
    assert sandbox.claimed in (
        [derived("r1")[1], derived("t1")[1], derived("t2")[1]],
        [derived("r1")[1], derived("t2")[1]],
    )
    assert sandbox.most_active == 1
    outcomes = {name: await stage.request(name) for name in names}

    def into(name: str) -> str | None:
        record = outcomes[name]
        assert record is not None and record.done is not None
        return record.done.response

    assert into("a1") == derived("r1")[0]
    assert into("a3") == derived("t2")[0]
    assert into("a2") == (derived("t1")[0] if len(sandbox.claimed) == 3 else derived("r1")[0])


# --- discovery ---


def a_target(**changes: Any) -> ExecutionTarget:
    target = ExecutionTarget(
        tenant="acme",
        workspace="w1",
        conversation="c1",
        response="rsp1",
        response_generation=1,
        execution="exe1",
        execution_generation=1,
        sandbox=ids.sandbox_id("acme", "w1"),
        boot="b1",
        process_generation=1,
    )
    return target.model_copy(update=changes)


def listed(**changes: Any) -> list[dict[str, Any]]:
    summary = ExecutionSummary(target=a_target(**changes), state="running")
    return [summary.model_dump(mode="json", exclude_none=True)]


@virtual
async def test_a_target_whose_process_is_not_known_is_found_by_its_identity_and_the_providers_facts() -> None:
    bus = MemoryBus(MemoryServer())
    await world(bus)
    sandbox = Sandbox(bus)
    unknown = a_target(boot="", process_generation=0)
    await sandbox.register(executions=listed(native_session="n1"))
    found = await resolve(bus, unknown)
    assert isinstance(found, Found)
    assert (found.target.boot, found.target.process_generation, found.target.native_session) == ("b1", 1, "n1")
    await sandbox.register(executions=listed(), capabilities=())
    assert _code(await resolve(bus, unknown)) is Code.CAPABILITY_MISSING
    await sandbox.register(executions=listed(), facts={"pid": 8})
    assert _code(await resolve(bus, unknown)) is Code.TARGET_STALE, "the provider knows another process"
    await sandbox.register(executions=listed(execution_generation=2))
    assert _code(await resolve(bus, unknown)) is Code.TARGET_STALE
    await sandbox.register(executions=listed(execution="exe2"))
    assert _code(await resolve(bus, unknown)) is Code.TARGET_UNKNOWN


@virtual
async def test_several_sandboxes_and_too_many_are_failures_that_may_be_tried_again() -> None:
    bus = MemoryBus(MemoryServer())
    await world(bus)
    sandbox = Sandbox(bus)
    unknown = a_target(boot="", process_generation=0)
    await sandbox.register(executions=listed())
    await sandbox.register(sandbox="other", boot="b2", executions=listed(boot="b2"))
    several = await resolve(bus, unknown)
    assert isinstance(several, Problem)
    assert (several.code, several.retryable) == (Code.TARGET_UNKNOWN, True)
    for number in range(4):
        await sandbox.register(sandbox=f"more{number}", boot=f"m{number}")
    assert "more than 4" in str(await resolve(bus, unknown))


@virtual
async def test_a_collector_whose_list_was_cut_is_asked_and_its_silence_is_bounded() -> None:
    bus = MemoryBus(MemoryServer())
    await world(bus)
    sandbox = Sandbox(bus)
    await sandbox.register(executions_omitted=3)
    unknown = a_target(boot="", process_generation=0)
    began_s = asyncio.get_running_loop().time()
    assert _code(await resolve(bus, unknown)) is Code.TARGET_UNKNOWN

    async def silent(_: object) -> None:
        return None

    async with bus.serve(subjects.control_all("acme", "w1"), silent, name="silent"):
        assert _code(await resolve(bus, unknown)) is Code.TARGET_UNKNOWN
    assert asyncio.get_running_loop().time() - began_s <= 6.0

    async def tells(message: Any) -> bytes:
        request = decode_request(message.data)
        assert (request.verb, request.payload) == ("discover", {"conversation": "c1"})
        result = {"boot": "b1", "executions": listed(), "omitted": 0}
        return ControlReply(control=request.control, verb="discover", status="settled", result=result).encode()

    async with bus.serve(subjects.control_all("acme", "w1"), tells, name="collector"):
        assert isinstance(await resolve(bus, unknown), Found)


def _code(found: Found | Problem) -> Code:
    assert isinstance(found, Problem)
    assert found.retryable
    return found.code


@virtual
async def test_an_open_request_of_before_marks_were_written_is_read_as_not_sent() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    prompt = a_prompt("r2")
    ack = await stage.send(prompt)
    record = RequestRecord(
        digest=prompt.digest, workspace="w1", conversation="c1", attempt=1, prompt_sequence=ack.sequence, state="open"
    )
    await Bucket(outside, subjects.REQUESTS).create(subjects.request_key("acme", "r2"), record.value(), op="old")
    stored = await outside.at(subjects.PROMPTS_STREAM, ack.sequence)
    assert stored is not None
    verdict = await admitter(MemoryBus(server)).admit(
        prompt, sequence=ack.sequence, stored_at_ns=stored.stored_at_ns, actor="a"
    )
    assert verdict.state.failure is None
    assert [event.id for event in await stage.told()] == ["r2/prompt.admitted", "r2/response.created"]
