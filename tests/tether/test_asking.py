"""Asking a collector: what nobody took is offered again, what somebody may have taken is unknown."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tether.asking import ask_collector
from tether.control import ControlReply, ControlRequest
from tether.errors import Code, problem
from tether.ids import ExecutionTarget
from tether.limits import CONTROL_REPLY_S
from tether.ports import Message
from tether.testing import MemoryBus, MemoryServer

pytestmark = pytest.mark.virtual_time
STOP = ControlRequest(control="ctl_1", verb="stop")


async def test_a_control_that_nobody_took_reaches_the_collector_that_comes_up_meanwhile() -> None:
    got: list[bytes] = []

    async def collector(message: Message) -> bytes:
        got.append(message.data)
        return ControlReply(control="ctl_1", verb="stop", status="delivered").encode()

    async with MemoryBus(MemoryServer()) as bus:
        asking = asyncio.create_task(ask_collector(bus, "t", "w", STOP), name="asking")
        await asyncio.sleep(3.0)
        async with bus.serve("tether.control.t.w.>", collector, name="collector"):
            assert (await asking).status == "delivered"
    assert len(got) == 1


async def test_without_a_collector_it_is_unknown_in_the_end_and_a_question_at_once() -> None:
    loop = asyncio.get_running_loop()
    async with MemoryBus(MemoryServer()) as bus:
        began_s = loop.time()
        question = ControlRequest(control="ctl_2", verb="receipt")
        assert (await ask_collector(bus, "t", "w", question)).status == "unknown"
        assert loop.time() - began_s < 1.0
        assert (await ask_collector(bus, "t", "w", STOP)).status == "unknown"
        assert CONTROL_REPLY_S - 1.0 < loop.time() - began_s < CONTROL_REPLY_S + 1.0


@pytest.mark.parametrize("answer", [None, b"rubbish"])
async def test_what_somebody_got_is_not_sent_again(answer: bytes | None) -> None:
    got: list[bytes] = []

    async def collector(message: Message) -> bytes | None:
        got.append(message.data)
        return answer

    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(MemoryBus(MemoryServer()))
        await stack.enter_async_context(bus.serve("tether.control.t.w.>", collector, name="collector"))
        assert (await ask_collector(bus, "t", "w", STOP)).status == "unknown"
    assert len(got) == 1


TARGET = ExecutionTarget(
    tenant="t",
    workspace="w",
    conversation="c",
    response="r",
    response_generation=1,
    execution="e",
    execution_generation=1,
    sandbox="s",
    boot="b",
    process_generation=1,
    native_session="lost",
)


@pytest.mark.parametrize(
    ("now", "asked"),
    [
        ({"process_generation": 2, "native_session": "new"}, 2),
        ({"native_session": "new"}, 2),
        ({"execution": "e2", "execution_generation": 2}, 1),
        ({"boot": "b2", "process_generation": 2}, 1),
        ({}, 1),
    ],
)
async def test_a_control_of_an_execution_that_went_on_with_another_process_is_asked_of_that_one(
    now: dict[str, object], asked: int
) -> None:
    got: list[ControlRequest] = []
    current = TARGET.model_copy(update=now)

    async def collector(message: Message) -> bytes:
        request = ControlRequest.model_validate_json(message.data)
        got.append(request)
        if now and request.target != current:
            why = problem(Code.TARGET_STALE, "it is not that of the execution")
            reply = ControlReply(control="ctl_1", verb="stop", status="rejected", problem=why, target=current)
        else:
            reply = ControlReply(control="ctl_1", verb="stop", status="delivered")
        return reply.encode()

    async with MemoryBus(MemoryServer()) as bus, bus.serve("tether.control.t.w.>", collector, name="collector"):
        reply = await ask_collector(bus, "t", "w", STOP.model_copy(update={"target": TARGET}))
    assert [request.control for request in got] == ["ctl_1"] * asked
    assert reply.status == ("delivered" if asked == 2 or not now else "rejected")


def test_who_asks_again_may_know_more_of_a_target_that_was_starting_and_it_is_the_same_request() -> None:
    early = ExecutionTarget(
        tenant="t",
        workspace="w",
        conversation="c",
        response="r",
        response_generation=1,
        execution="e",
        execution_generation=1,
        sandbox="s",
    )
    late = early.model_copy(update={"boot": "b", "process_generation": 2, "native_session": "n"})
    other = early.model_copy(update={"execution_generation": 2})
    first, again, another = (STOP.model_copy(update={"target": target}).digest for target in (early, late, other))
    assert first == again != another
    assert STOP.model_copy(update={"target": early, "payload": {"x": 1}}).digest != first
