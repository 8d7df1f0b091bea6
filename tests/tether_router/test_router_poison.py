"""Messages on `PROMPTS` that are no prompts: told where they can be, terminated, and never a crash."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support_router import Sandbox, a_prompt, routing, until, virtual, world
from tether import subjects
from tether.ports import StoredMessage
from tether.testing import MemoryBus, MemoryServer
from tether_router.core.intake import Intake, Poison, inspect

GOOD = a_prompt().encode()


def changed(**fields: object) -> bytes:
    return json.dumps({**json.loads(GOOD), **fields}).encode()


HOSTILE = {
    "no-json": b"\xff\xfe\x00",
    "empty": b"",
    "array": b"[]",
    "deep": b'{"content":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "nan": GOOD.replace(b'"v":1', b'"v":NaN'),
    "version": changed(v=2),
    "unknown-field": changed(surprise=1),
    "path": changed(request_id="../../etc"),
    "long-token": changed(request_id="x" * 65),
    "control-character": changed(request_id="a\nb"),
    "no-content": changed(content=[]),
    "wrong-type": changed(content="hello"),
    "lone-surrogate": GOOD.replace(b"hello", b"\\ud800"),
    "attempt": changed(attempt=0),
    "mode": changed(mode="force"),
    "other-conversation": changed(conversation="c2"),
    "other-tenant": changed(tenant="evil"),
    "other-workspace": changed(workspace="w2"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_message_that_is_no_prompt_is_told_by_its_sequence_and_terminated(name: str) -> None:
    @virtual
    async def run() -> None:
        server = MemoryServer()
        outside = MemoryBus(server)
        stage = await world(outside)
        sandbox = Sandbox(outside)
        async with routing(MemoryBus(server)), sandbox.running():
            ack = await outside.publish(subjects.prompt("acme", "w1", "c1"), HOSTILE[name])
            await stage.send(a_prompt("good"))
            await stage.settled()
            await sandbox.claims(1)
        told = await stage.told()
        assert told[0].id == f"prompt-{ack.sequence}/response.failed"
        assert (told[0].body["code"], told[0].body["retryable"]) == ("INVALID", False)
        assert told[0].body["detail"]
        assert [event.id for event in told[1:]] == ["good/prompt.admitted", "good/response.created"]

    run()


@virtual
async def test_a_subject_that_names_no_conversation_is_terminated_without_an_event() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    async with routing(MemoryBus(server)):
        await outside.publish("tether.prompt.acme", GOOD)
        await outside.publish("tether.prompt.acme.w1.c1.more", GOOD)
        await outside.publish("tether.prompt.acme.w!1.c1", GOOD)

        async def gone() -> bool:
            return await stage.waiting() == 0

        await until(gone, "all of them are terminated")
    state = await outside.state(subjects.events_stream("acme"))
    assert state is not None and state.messages == 0


@virtual
async def test_poison_of_a_tenant_without_a_log_is_terminated_all_the_same() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    async with routing(MemoryBus(server)):
        await outside.publish(subjects.prompt("unknown", "w1", "c1"), b"?")

        async def gone() -> bool:
            return await stage.waiting() == 0

        await until(gone, "it is terminated")


@virtual
async def test_records_that_are_none_are_not_overwritten_and_stop_nobody_else() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    owner_subject = f"$KV.{subjects.OWNERS}.acme.w1.c1"
    request_subject = f"$KV.{subjects.REQUESTS}.acme.r2"
    await outside.publish(owner_subject, b'{"v": 7}')
    await outside.publish(request_subject, b"\xff not json")
    await outside.publish(f"$KV.{subjects.CONVERSATIONS}.acme.c3", b'{"workspace": 3}')
    async with routing(MemoryBus(server)), sandbox.running():
        await stage.send(a_prompt("r1", conversation="c1"))
        await stage.send(a_prompt("r2", conversation="c2"))
        await stage.send(a_prompt("r3", conversation="c3"))
        await stage.send(a_prompt("good", conversation="c4"))
        await sandbox.claims(1)

        async def the_others_wait() -> bool:
            return await stage.waiting() == 3

        await until(the_others_wait, "the good one is settled")
    last = await outside.last(f"KV_{subjects.OWNERS}", owner_subject)
    assert last is not None and last.data == b'{"v": 7}'


@virtual
async def test_damage_in_a_log_is_passed_over() -> None:
    server = MemoryServer()
    outside = MemoryBus(server)
    stage = await world(outside)
    sandbox = Sandbox(outside)
    await outside.publish(subjects.event("acme", "w1", "c1", "_"), b"\xff")
    await outside.publish(subjects.event("acme", "w1", "c1", "_"), b'{"v":1,"id":"r1/prompt.admitted"}')
    async with routing(MemoryBus(server)), sandbox.running():
        await stage.send(a_prompt())
        await sandbox.claims(1)
        await stage.state_is("running")
        address, ordinal, _ = sandbox._frames[sandbox.claimed[0]]
        ack = await outside.publish(address.subject, b'{"v":1,"first":2,"events":["execution.ended"]}')
        sandbox._frames[sandbox.claimed[0]] = (address, ordinal, ack.sequence)
        await sandbox.finish(sandbox.claimed[0])
        await stage.state_is("idle")
        await stage.settled()


@given(st.binary(max_size=400), st.text(max_size=80))
def test_intake_never_raises(data: bytes, subject: str) -> None:
    for name in (subject, "tether.prompt.acme.w1.c1"):
        taken = inspect(StoredMessage(name, 1, 1, data), payload_bytes_max=1 << 20)
        assert isinstance(taken, Intake | Poison)


def test_a_prompt_that_the_bus_could_not_carry_on_is_refused_before_any_effect() -> None:
    message = StoredMessage("tether.prompt.acme.w1.c1", 1, 1, a_prompt(text="x" * 60_000).encode())
    taken = inspect(message, payload_bytes_max=64 << 10)
    assert isinstance(taken, Poison) and "the bus takes" in taken.problem.detail
    assert isinstance(inspect(message, payload_bytes_max=1 << 20), Intake)
