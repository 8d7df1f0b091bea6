"""Submitting over NATS in doubt: one stored prompt whatever is lost; the router's record says what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tether import subjects, topology
from tether.client import Client
from tether.errors import Code, ProblemError, problem
from tether.ids import default_workspace
from tether.kv import Bucket
from tether.prompt import Done, Prompt, RequestRecord, TextContent, decode_prompt
from tether.submission import Admitted, Publish, Refuse, Wait, decide
from tether.testing import FaultKind, MemoryBus, MemoryServer

pytestmark = pytest.mark.virtual_time


@pytest.fixture
async def bus(tenant: str) -> AsyncIterator[MemoryBus]:
    async with MemoryBus(MemoryServer()) as made:
        await made.ensure(topology.base())
        await made.ensure(topology.tenant(tenant))
        yield made


async def stored(bus: MemoryBus, tenant: str, conversation: str = "c") -> list[Prompt]:
    subject = subjects.prompt(tenant, default_workspace(conversation), conversation)
    return [decode_prompt(message.data) for message in await bus.read(subjects.PROMPTS_STREAM, 0, subject)]


async def record(bus: MemoryBus, prompt: Prompt, state: str, done: Done | None, attempt: int = 1) -> None:
    """What a router writes."""
    value = RequestRecord(
        digest=prompt.digest,
        workspace=prompt.workspace,
        conversation=prompt.conversation,
        attempt=attempt,
        prompt_sequence=1,
        state=state,
        done=done,
    )
    bucket = Bucket(bus, subjects.REQUESTS)
    key = subjects.request_key(prompt.tenant, prompt.request_id)
    known = await bucket.get(key)
    if known is None:
        await bucket.create(key, value.value(), op=f"op-{state}-{attempt}")
    else:
        await bucket.update(key, value.value(), op=f"op-{state}-{attempt}", revision=known.revision)


@pytest.mark.parametrize(
    "kind", [FaultKind.LOSE_MESSAGE, FaultKind.LOSE_ACK, FaultKind.UNAVAILABLE, FaultKind.DISCONNECT]
)
async def test_a_publish_in_doubt_is_repeated_and_stored_once(bus: MemoryBus, tenant: str, kind: FaultKind) -> None:
    bus.faults.add("publish", kind, times=3, delay_s=0.1)
    async with Client.nats(bus, tenant=tenant) as client:
        submission = await client.prompt("c", "hello", agent="scripted", request_id="req_1")
    assert submission.status == "pending"  # no router is here
    assert [prompt.request_id for prompt in await stored(bus, tenant)] == ["req_1"]
    assert len(bus.faults.fired) == 3


async def test_the_routers_record_is_the_answer_again_and_again(bus: MemoryBus, tenant: str) -> None:
    async with Client.nats(bus, tenant=tenant) as client:
        await client.prompt("c", "hello", agent="scripted", request_id="req_1")
        (prompt,) = await stored(bus, tenant)
        done = Done(status="admitted", response="rsp_1", execution="exe_1", cursor_sequence=7, cursor_stored_at_ns=9)
        await record(bus, prompt, "done", done)
        first = await client.prompt("c", "hello", agent="scripted", request_id="req_1")
        again = await client.prompt("c", "hello", agent="scripted", request_id="req_1")
        with pytest.raises(ProblemError) as told:
            await client.prompt("c", "other", agent="scripted", request_id="req_1")
    assert first == again
    assert (first.status, first.response_id, first.execution) == ("admitted", "rsp_1", "exe_1")
    assert told.value.problem.code is Code.REQUEST_CONFLICT
    assert len(await stored(bus, tenant)) == 1


async def test_a_retryable_outcome_is_tried_again_as_the_next_attempt(bus: MemoryBus, tenant: str) -> None:
    async with Client.nats(bus, tenant=tenant) as client:
        await client.prompt("c", "hello", agent="scripted", request_id="req_1")
        (prompt,) = await stored(bus, tenant)
        busy = Done(status="failed", problem=problem(Code.SESSION_BUSY, "busy"))
        await record(bus, prompt, "retryable", busy)
        again = asyncio.create_task(client.prompt("c", "hello", agent="scripted", request_id="req_1"))
        async with asyncio.timeout(30):
            while True:
                if len(await stored(bus, tenant)) == 2:
                    break
                await asyncio.sleep(0.01)
        await record(bus, prompt, "retryable", busy, attempt=2)
        with pytest.raises(ProblemError) as told:
            await again
    assert told.value.problem.code is Code.SESSION_BUSY
    assert [one.attempt for one in await stored(bus, tenant)] == [1, 2]


async def test_a_full_queue_is_a_quota_that_is_told(bus: MemoryBus, tenant: str) -> None:
    async with Client.nats(bus, tenant=tenant) as client:
        for number in range(64):
            prompt = Prompt(
                tenant=tenant,
                workspace=default_workspace("c"),
                conversation="c",
                request_id=f"req_{number}",
                content=(TextContent(text="x"),),
            )
            subject = subjects.prompt(tenant, prompt.workspace, "c")
            await bus.publish(subject, prompt.encode(), msg_id=prompt.message_id)
        with pytest.raises(ProblemError) as told:
            await client.prompt("c", "one more")
    assert told.value.problem.code is Code.QUOTA_EXCEEDED


async def test_without_a_bus_patience_ends_with_unavailable(bus: MemoryBus, tenant: str) -> None:
    bus.disconnect()
    async with Client.nats(bus, tenant=tenant) as client:
        with pytest.raises(ProblemError) as told:
            await client.prompt("c", "hello", patience_s=20)
    assert told.value.problem.code is Code.RUNTIME_UNAVAILABLE


async def test_another_workspace_than_the_conversations_own_is_refused(bus: MemoryBus, tenant: str) -> None:
    bucket = Bucket(bus, subjects.CONVERSATIONS)
    await bucket.create(subjects.conversation_key(tenant, "c"), {"workspace": "mine"}, op="op")
    async with Client.nats(bus, tenant=tenant) as client:
        with pytest.raises(ProblemError) as told:
            await client.prompt("c", "hello", workspace="other")
    assert told.value.problem.fields[0].field == "workspace"


async def test_a_prompt_that_is_too_large_names_the_content(bus: MemoryBus, tenant: str) -> None:
    async with Client.nats(bus, tenant=tenant) as client:
        with pytest.raises(ProblemError) as told:
            await client.prompt("c", "x" * (600 * 1024))
    assert told.value.problem.code is Code.INVALID
    assert told.value.problem.fields[0].field == "content"


def test_the_decision_table() -> None:
    prompt = Prompt(tenant="t", workspace="w", conversation="c", request_id="q", content=(TextContent(text="x"),))

    def known(state: str, attempt: int = 1, done: Done | None = None, digest: str = prompt.digest) -> RequestRecord:
        return RequestRecord(
            digest=digest,
            workspace="w",
            conversation="c",
            attempt=attempt,
            prompt_sequence=1,
            state=state,
            done=done,
        )

    admitted = Done(status="admitted", response="r")
    assert decide(None, prompt) == Publish(1)
    assert decide(None, prompt, published=1) == Wait(1)
    assert isinstance(decide(known("open", digest="other"), prompt), Refuse)
    assert decide(known("open"), prompt) == Wait(1)
    assert decide(known("done", done=admitted), prompt) == Admitted(admitted, 1)
    assert decide(known("retryable"), prompt) == Publish(2)
    assert decide(known("retryable"), prompt, published=2) == Wait(2)
    assert isinstance(decide(known("retryable", attempt=2), prompt, published=2), Refuse)
