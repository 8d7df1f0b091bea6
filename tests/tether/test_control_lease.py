"""A user's control meets a collector that does not have the execution yet: it is asked again, as the same control."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tether import topology
from tether.control import ControlReply, ControlRequest
from tether.control_lease import ControlLeases
from tether.errors import Code, Problem, problem
from tether.ids import ExecutionTarget
from tether.limits import CONTROL_REPLY_S
from tether.ports import Message
from tether.testing import MemoryBus, MemoryServer

TARGET = ExecutionTarget(
    tenant="t",
    workspace="w",
    conversation="c",
    response="r",
    response_generation=1,
    execution="e",
    execution_generation=1,
    sandbox="s",
)
STOP = ControlRequest(control="k1", verb="stop", target=TARGET)
Answer = Callable[[int], Problem | None]
NOT_HERE = problem(Code.TARGET_UNKNOWN, "this execution is not known here")


@asynccontextmanager
async def collector(
    answer: Callable[[int], Problem | None],
) -> AsyncIterator[tuple[ControlLeases, list[ControlRequest]]]:
    """`answer`: why the n-th control is refused, None where it is taken."""
    got: list[ControlRequest] = []

    async def handle(message: Message) -> bytes:
        got.append(ControlRequest.model_validate_json(message.data))
        why = answer(len(got))
        status = "delivered" if why is None else "rejected"
        return ControlReply(control="k1", verb="stop", status=status, problem=why).encode()

    async with MemoryBus(MemoryServer()) as bus:
        await bus.ensure(topology.base())
        async with bus.serve("tether.control.t.w.>", handle, name="collector"):
            leases = ControlLeases(bus, "test")
            yield leases, got
            await leases.close()


@pytest.mark.virtual_time
async def test_a_stop_right_after_the_prompt_waits_for_its_execution() -> None:
    async with collector(lambda n: NOT_HERE if n < 20 else None) as (leases, got):
        reply = await leases.ask(STOP)
        assert (reply.status, reply.problem) == ("delivered", None)
        assert {one.control for one in got} == {"k1"} and len({one.authority.token for one in got}) == 1


@pytest.mark.virtual_time
async def test_an_execution_that_never_comes_is_told_after_the_time_of_a_reply() -> None:
    async with collector(lambda _: NOT_HERE) as (leases, got):
        began_s = asyncio.get_running_loop().time()
        reply = await leases.ask(STOP)
        assert reply.problem == NOT_HERE and len(got) > 10
        assert CONTROL_REPLY_S - 1 < asyncio.get_running_loop().time() - began_s <= CONTROL_REPLY_S


@pytest.mark.virtual_time
async def test_what_asking_again_cannot_change_is_told_at_once() -> None:
    never = problem(Code.TARGET_UNKNOWN, "no such interaction was asked", retryable=False)
    stale = problem(Code.TARGET_STALE, "another execution of the conversation runs")
    for why in (never, stale):

        def answer(_: int, why: Problem = why) -> Problem:
            return why

        async with collector(answer) as (leases, got):
            assert (await leases.ask(STOP)).problem == why and len(got) == 1
