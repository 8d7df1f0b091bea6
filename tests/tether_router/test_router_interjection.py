"""A prompt that meets a running execution."""

from __future__ import annotations

import asyncio

import pytest

from support_router import Sandbox, World, a_prompt, derived, routing, until, virtual, world
from tether import ids, subjects
from tether.control import ControlReply
from tether.errors import Code, Problem, problem
from tether.events import ReceiptStatus
from tether.limits import RECOVERY_WAIT_S
from tether.testing import MemoryBus, MemoryServer
from tether_router.core.interjection import Standing, judge

CONTROL = ids.control_id("acme", "r2", "interject", 1)


async def running_execution(stage: World, sandbox: Sandbox) -> None:
    await stage.send(a_prompt("r1"))
    await sandbox.claims(1)
    await stage.state_is("running")


@virtual
async def test_a_delivered_interjection_joins_the_running_response() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(MemoryBus(server)), sandbox.running():
        await running_execution(stage, sandbox)
        await stage.send(a_prompt("r2", "one more thing"))
        await stage.settled(2)
    assert sandbox.interjected == ["one more thing"]
    told = await stage.told()
    assert told[-1].id == "r2/prompt.admitted"
    assert (told[-1].body["into"], told[-1].body["into_execution"]) == derived("r1")
    record = await stage.request("r2")
    assert record is not None and record.done is not None
    assert (record.done.status, record.done.response, record.done.execution) == ("interjected", *derived("r1"))
    assert record.done.cursor_sequence > 0


@virtual
async def test_c8_interject_without_an_active_execution_is_refused_and_the_next_attempt_as_auto_runs() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(MemoryBus(server)), sandbox.running():
        await stage.send(a_prompt("r1", mode="interject"))
        await stage.settled()
        record = await stage.request("r1")
        assert record is not None and record.done is not None and record.done.problem is not None
        assert (record.state, record.done.problem.code) == ("retryable", Code.SESSION_STREAM_NOT_ACTIVE)
        await stage.send(a_prompt("r2"))
        await sandbox.claims(1)
        await stage.state_is("running")
        await stage.send(a_prompt("r1", mode="interject", attempt=2))
        await stage.settled(2)
    record = await stage.request("r1")
    assert record is not None and record.done is not None
    assert (record.attempt, record.done.status) == (2, "interjected")
    assert sandbox.interjected == ["hello"]


@virtual
async def test_each_attempt_that_fails_is_told_under_its_own_identity() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    async with routing(MemoryBus(server)):
        for attempt in (1, 2, 3):
            await stage.send(a_prompt("r1", mode="interject", attempt=attempt))
            await stage.settled()
        await stage.send(a_prompt("r1", mode="interject", attempt=2), again="/late")
        await stage.settled()
        await asyncio.sleep(60)
    assert [event.id for event in await stage.told()] == [
        "r1/response.failed",
        "r1/2/response.failed",
        "r1/3/response.failed",
    ]
    record = await stage.request("r1")
    assert record is not None and record.attempt == 3


@pytest.mark.parametrize(
    "refused",
    [
        problem(Code.CAPABILITY_MISSING, "this agent takes no messages in mid-turn"),
        problem(Code.INVALID, "too long for it"),
    ],
    ids=lambda refused: str(refused.code),
)
def test_an_execution_that_cannot_take_it_is_busy_and_the_user_may_choose(refused: Problem) -> None:
    @virtual
    async def run() -> None:
        server = MemoryServer()
        outside = MemoryBus(server)
        stage = await world(outside)
        sandbox = Sandbox(outside, refuse=refused)
        async with routing(MemoryBus(server)), sandbox.running():
            await running_execution(stage, sandbox)
            await stage.send(a_prompt("r2"))
            await stage.settled(2)
            record = await stage.request("r2")
            assert record is not None and record.done is not None and record.done.problem is not None
            assert (record.state, record.done.problem.code) == ("retryable", Code.SESSION_BUSY)
            last = (await stage.told())[-1]
            assert (last.id, last.body["code"], last.body["retryable"]) == ("r2/response.failed", "SESSION_BUSY", True)
            assert sandbox.claimed == [derived("r1")[1]]

    run()


@virtual
async def test_an_interjection_that_meets_the_end_waits_and_becomes_a_prompt_of_its_own() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    sandbox = Sandbox(outside, refuse=problem(Code.SESSION_STREAM_NOT_ACTIVE, "ended", ended=True))
    async with routing(MemoryBus(server)), sandbox.running():
        await running_execution(stage, sandbox)
        await stage.send(a_prompt("r2"))
        await asyncio.sleep(3)
        assert await stage.waiting() == 1
        await sandbox.finish(sandbox.claimed[0])
        await sandbox.claims(2)
        await stage.settled(2)
    assert sandbox.claimed == [derived("r1")[1], derived("r2")[1]]
    assert {control for verb, control in sandbox.asked} == {CONTROL}
    assert sandbox.interjected == []


@virtual
async def test_a_lost_answer_is_asked_for_by_its_receipt_and_nothing_is_sent_twice() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(MemoryBus(server)), sandbox.running():
        await running_execution(stage, sandbox)
        sandbox.lose_replies = 3  # the interjection's, and two questions'
        await stage.send(a_prompt("r2"))
        await stage.settled(2)
    assert sandbox.interjected == ["hello"]
    verbs = [verb for verb, _ in sandbox.asked]
    assert verbs[0] == "interject" and set(verbs[1:]) == {"receipt"}
    assert {control for _, control in sandbox.asked} == {CONTROL}
    record = await stage.request("r2")
    assert record is not None and record.done is not None and record.done.status == "interjected"


@virtual
async def test_a_collector_that_is_away_makes_the_prompt_wait_until_it_is_back() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(MemoryBus(server)):
        async with sandbox.running():
            await running_execution(stage, sandbox)
        await stage.send(a_prompt("r2"))
        await asyncio.sleep(120)
        assert await stage.waiting() == 1
        async with sandbox.running():
            await stage.settled(2)
    assert sandbox.interjected == ["hello"]
    assert sandbox.asked[0] == ("receipt", CONTROL), "after a silence the receipt is asked for first"


@pytest.mark.parametrize(("status", "outcome"), [("settled", "interjected"), ("rejected", "admitted")])
def test_after_the_end_the_log_says_what_became_of_an_interjection(status: ReceiptStatus, outcome: str) -> None:
    @virtual
    async def run() -> None:
        server = MemoryServer()
        outside = MemoryBus(server)
        stage = await world(outside)
        sandbox = Sandbox(outside)
        async with routing(MemoryBus(server)):
            async with sandbox.running():
                await running_execution(stage, sandbox)
            await stage.send(a_prompt("r2"))
            await asyncio.sleep(1)  # asked, without an answer
            body = {"control": CONTROL, "verb": "interject", "status": status}
            await sandbox.tell(sandbox.claimed[0], "control.receipt", body)
            await sandbox.finish(sandbox.claimed[0])
            async with sandbox.running():
                await stage.settled(2)
        record = await stage.request("r2")
        assert record is not None and record.done is not None and record.done.status == outcome
        into = [event.body.get("into") for event in await stage.told() if event.id == "r2/prompt.admitted"]
        assert into == [derived("r1")[0] if outcome == "interjected" else None]

    run()


@virtual
async def test_an_interjection_that_nobody_can_tell_of_is_a_retryable_failure_never_a_second_sending() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(MemoryBus(server)), sandbox.running():
        await running_execution(stage, sandbox)
        sandbox.unknown = True
        await stage.send(a_prompt("r2"))
        await asyncio.sleep(30)
        assert await stage.waiting() == 1
        body = {"control": CONTROL, "verb": "interject", "status": "unknown"}
        await sandbox.tell(sandbox.claimed[0], "control.receipt", body)
        await sandbox.finish(sandbox.claimed[0])
        await stage.settled(2)
    record = await stage.request("r2")
    assert record is not None and record.done is not None and record.done.problem is not None
    assert (record.state, record.done.problem.code) == ("retryable", Code.RUNTIME_UNAVAILABLE)
    assert [control for verb, control in sandbox.asked if verb == "interject"] == [CONTROL]


@virtual
async def test_a_damaged_reply_of_a_collector_reads_as_unknown() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(MemoryBus(server)):
        async with sandbox.running():
            await running_execution(stage, sandbox)

        async def nonsense(_: object) -> bytes:
            return b'{"status": "delivered"'

        async with outside.serve(subjects.control_all("acme", "w1"), nonsense, name="liar"):
            await stage.send(a_prompt("r2"))
            await asyncio.sleep(60)
            assert await stage.waiting() == 1

        async def settled() -> bool:
            return await stage.waiting() == 0

        async with sandbox.running():
            await until(settled, "the prompt settles with an honest collector", timeout_s=60)
    assert sandbox.interjected == ["hello"]


@pytest.mark.parametrize(
    ("status", "given", "asked", "forced", "standing"),
    [
        ("accepted", None, False, False, "pending"),
        ("delivered", None, True, False, "delivered"),
        ("settled", None, False, False, "delivered"),
        ("unknown", None, True, False, "unknown"),
        ("unknown", problem(Code.NOT_FOUND, ""), True, False, "not_known"),
        ("rejected", problem(Code.NOT_FOUND, ""), True, False, "not_known"),
        ("unknown", problem(Code.NOT_FOUND, ""), False, False, "unknown"),
        ("rejected", problem(Code.NOT_FOUND, ""), False, False, "refused"),
        ("rejected", problem(Code.DRAINING, ""), False, False, "later"),
        ("rejected", problem(Code.RUNTIME_UNAVAILABLE, "recovering"), False, True, "later"),
        ("rejected", problem(Code.LEASE_NOT_READY, ""), False, False, "later"),
        ("rejected", problem(Code.TARGET_STALE, ""), False, False, "later"),
        ("rejected", problem(Code.SESSION_STREAM_NOT_ACTIVE, "", ended=True), False, True, "later"),
        ("rejected", problem(Code.RUNTIME_UNAVAILABLE, "", recovering=True), False, False, "recovering"),
        ("rejected", problem(Code.SESSION_STREAM_NOT_ACTIVE, "", ended=False), False, False, "inactive"),
        ("rejected", problem(Code.SESSION_STREAM_NOT_ACTIVE, "", ended="yes"), False, True, "refused"),
        ("rejected", problem(Code.CAPABILITY_MISSING, ""), False, False, "refused"),
        ("rejected", problem(Code.CAPABILITY_MISSING, ""), True, False, "refused"),
        ("rejected", None, False, False, "refused"),
    ],
)
def test_every_answer_of_a_collector_has_one_meaning(
    status: ReceiptStatus, given: Problem | None, asked: bool, forced: bool, standing: Standing
) -> None:
    reply = ControlReply(control="c", verb="interject", status=status, problem=given)
    verdict = judge(reply, asked=asked, forced=forced)
    assert verdict.standing == standing
    assert (verdict.problem is not None) == (standing == "refused")


def test_no_answer_that_can_be_read_is_unknown() -> None:
    assert judge(None, asked=False, forced=False).standing == judge(None, asked=True, forced=True).standing == "unknown"


def lost(tail: str) -> dict[str, object]:
    return {"outcome": "lost", "tail": tail, "proof": {"method": "provider", "at": 1}}


@pytest.mark.parametrize("tail", ["complete", "unknown"])
def test_a_message_into_an_execution_that_was_lost_runs_again_only_if_the_log_proves_that_it_never_arrived(
    tail: str,
) -> None:
    @virtual
    async def run() -> None:
        server = MemoryServer()
        outside = MemoryBus(server)
        stage = await world(outside)
        sandbox = Sandbox(outside)
        async with routing(MemoryBus(server)):
            async with sandbox.running():
                await running_execution(stage, sandbox)
                sandbox.lose_replies = 1
                await stage.send(a_prompt("r2"))

                async def arrived() -> bool:
                    return bool(sandbox.interjected) or tail == "complete"

                sandbox.deaf = 1 if tail == "complete" else 0
                await until(arrived, "the interjection arrives")
                await asyncio.sleep(0.5)
                record = await stage.request("r2")
                assert record is not None and record.interjected_into == derived("r1")[1], "marked before it was sent"
            # The sandbox is gone, its volume too; whoever proves it ends the execution.
            await sandbox.tell(sandbox.claimed[0], "execution.ended", lost(tail))
            await stage.state_is("idle" if tail == "unknown" else "starting")
            async with Sandbox(outside).running() as second:
                await stage.settled(2)
                await asyncio.sleep(60)
                record = await stage.request("r2")
                assert record is not None and record.done is not None
                if tail == "complete":
                    assert (record.done.status, second.claimed) == ("admitted", [derived("r2")[1]])
                    return
                assert record.done.problem is not None
                assert (record.state, record.done.problem.code) == ("retryable", Code.EXECUTION_DURABILITY_GAP)
                assert second.claimed == []
                await stage.send(a_prompt("r2", attempt=2))  # the user has looked, and wants it
                await second.claims(1)
                assert second.claimed == [derived("r2", 2)[1]]

    run()


@virtual
async def test_a_message_that_was_never_sent_needs_no_receipt_after_a_crash() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(MemoryBus(server)), sandbox.running():
        await running_execution(stage, sandbox)
        await stage.send(a_prompt("r2", "on its way"))
        await stage.settled(2)
    assert [verb for verb, _ in sandbox.asked] == ["interject"]
    record = await stage.request("r2")
    assert record is not None and record.interjected_into == derived("r1")[1]


@virtual
async def test_a_recovered_execution_is_not_stopped_for_having_been_recovered() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    async with routing(MemoryBus(server)), sandbox.running():
        await running_execution(stage, sandbox)
        sandbox.refuse = problem(Code.RUNTIME_UNAVAILABLE, "being recovered", recovering=True)
        await stage.send(a_prompt("r2", "still there?"))
        await asyncio.sleep(10)
        sandbox.refuse = None
        await stage.settled(2)
    assert sandbox.interjected == ["still there?"]
    assert sandbox.stopped == []


@virtual
async def test_a_prompt_that_waited_long_for_the_start_does_not_end_what_has_just_started() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    refuse = problem(Code.RUNTIME_UNAVAILABLE, "being recovered", recovering=True)
    sandbox = Sandbox(outside, hold_claims=True, refuse=refuse)
    async with routing(MemoryBus(server)), sandbox.running():
        await stage.send(a_prompt("r1"))
        await stage.state_is("starting")
        await stage.send(a_prompt("r2", "still there?"))
        await asyncio.sleep(3 * RECOVERY_WAIT_S)
        sandbox.hold_claims = False
        await stage.state_is("running")
        await asyncio.sleep(5)  # the collector has read none of the execution yet, and says so
        assert sandbox.stopped == []
        sandbox.refuse = None
        await stage.settled(2)
    assert sandbox.interjected == ["still there?"]
    assert sandbox.stopped == []


@virtual
async def test_an_execution_that_stays_uncorrected_is_taken_over_by_auto() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    sandbox = Sandbox(outside, refuse=problem(Code.RUNTIME_UNAVAILABLE, "being recovered", recovering=True))
    async with routing(MemoryBus(server)), sandbox.running():
        await running_execution(stage, sandbox)
        await stage.send(a_prompt("r2"))
        await asyncio.sleep(15)
        assert sandbox.stopped == []
        await sandbox.claims(2)
    assert sandbox.stopped == [derived("r1")[1]]
    assert sandbox.claimed == [derived("r1")[1], derived("r2")[1]]


@virtual
async def test_c8_auto_takes_over_from_an_execution_that_takes_no_message_any_more() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    refuse = problem(Code.SESSION_STREAM_NOT_ACTIVE, "the agent's stdin is closed", ended=False)
    sandbox = Sandbox(outside, refuse=refuse)
    async with routing(MemoryBus(server)), sandbox.running():
        await running_execution(stage, sandbox)
        await stage.send(a_prompt("r2", mode="interject"))
        await stage.settled(2)
        record = await stage.request("r2")
        assert record is not None and record.done is not None and record.done.problem is not None
        assert (record.state, record.done.problem.code) == ("retryable", Code.SESSION_STREAM_NOT_ACTIVE)
        await stage.send(a_prompt("r3"))
        await sandbox.claims(2)
        await stage.settled(3)
    assert sandbox.stopped == [derived("r1")[1]]
    assert sandbox.claimed == [derived("r1")[1], derived("r3")[1]]
    assert sandbox.most_active == 1
