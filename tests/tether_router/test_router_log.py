"""The `_` subject's writers, and the facts of executions."""

from __future__ import annotations

import asyncio

import pytest

from support_router import a_prompt, admitter, after, derived, virtual, world
from tether import subjects
from tether.errors import UndecidedError
from tether.events import ConversationEvent
from tether.frames import encode_event
from tether.kv import Bucket
from tether.owner import Ended, OwnerRecord
from tether.ports import StoredMessage
from tether.subjects import EventAddress
from tether.testing import FaultKind, MemoryBus, MemoryServer
from tether_router.admitter import Verdict
from tether_router.core.facts import EndFact, ExecutionFacts, absorb
from tether_router.core.steps import Ack
from tether_router.log import ENDED_CACHED_MAX, FactsCache, Log

ADDRESS = EventAddress("acme", "w1", "c1", "_")


def an_event(identity: str, generation: int = 1) -> ConversationEvent:
    return ConversationEvent(id=identity, generation=generation, at=1, type="recovery", body={})


@virtual
async def test_two_hundred_writers_of_one_conversation_store_each_event_once() -> None:
    server = MemoryServer()
    stage = await world(MemoryBus(server))
    logs = [Log(MemoryBus(server)) for _ in range(20)]
    places = await asyncio.gather(
        *(log.append(ADDRESS, an_event(f"e{number % 50}"), 0) for number in range(200) for log in [logs[number % 20]])
    )
    told = [event.id for event in await stage.told()]
    assert sorted(told) == sorted(f"e{number}" for number in range(50))
    assert len({place.sequence for place in places if place is not None}) == 50


@virtual
async def test_an_event_is_found_by_its_id_long_after_the_server_has_forgotten_its_message_id() -> None:
    server = MemoryServer()
    stage = await world(MemoryBus(server))
    log = Log(MemoryBus(server))
    first = await log.append(ADDRESS, an_event("e1"), 0)
    await log.append(ADDRESS, an_event("e2"), 1)
    await asyncio.sleep(300)
    assert await log.append(ADDRESS, an_event("e1"), 0) == first
    assert [event.id for event in await stage.told()] == ["e1", "e2"]


@pytest.mark.parametrize("kind", [FaultKind.LOSE_ACK, FaultKind.LOSE_MESSAGE])
def test_an_answer_that_was_lost_is_found_out(kind: FaultKind) -> None:
    @virtual
    async def run() -> None:
        server = MemoryServer()
        bus = MemoryBus(server)
        stage = await world(bus)
        log = Log(bus)
        await log.append(ADDRESS, an_event("before"), 0)
        bus.faults.add("publish", kind, subject=ADDRESS.subject, times=3)
        place = await log.append(ADDRESS, an_event("e1"), 1)
        assert place is not None and place.sequence == 2
        assert [event.id for event in await stage.told()] == ["before", "e1"]
        bus.faults.add("publish", kind, subject=ADDRESS.subject, times=100)
        if kind is FaultKind.LOSE_MESSAGE:
            with pytest.raises(UndecidedError):
                await log.append(ADDRESS, an_event("e2"), 2)

    run()


@virtual
async def test_duplicate_for_a_message_that_was_purged_is_no_proof_and_it_is_stored_again() -> None:
    server = MemoryServer(replicated=True)
    bus = MemoryBus(server)
    stage = await world(bus)
    log = Log(bus)
    first = await log.append(ADDRESS, an_event("e1"), 0)
    assert first is not None
    await bus.purge(subjects.events_stream("acme"), ADDRESS.subject)
    again = await log.append(ADDRESS, an_event("e1"), 0)
    assert again is not None and again.sequence > first.sequence
    assert [event.id for event in await stage.told()] == ["e1"]


@virtual
async def test_a_later_generation_on_the_subject_stops_an_older_writer_before_it_writes() -> None:
    server = MemoryServer()
    stage = await world(MemoryBus(server))
    log = Log(MemoryBus(server))
    await log.append(ADDRESS, an_event("newer", generation=5), 0)
    assert await log.append(ADDRESS, an_event("older", generation=4), 0) is None
    assert [event.id for event in await stage.told()] == ["newer"]


@virtual
async def test_a_lagging_follower_hides_nothing() -> None:
    server = MemoryServer(replicated=True)
    bus = MemoryBus(server)
    await world(bus)
    log = Log(bus)
    base = 0
    for number in range(5):
        place = await log.append(ADDRESS, an_event(f"e{number}"), base)
        assert place is not None
        base = place.sequence
    server.hold_followers(subjects.events_stream("acme"), 2)
    view = await log.conversation(ADDRESS, 0)
    assert set(view.seen) == {f"e{number}" for number in range(5)}


@virtual
async def test_an_owner_record_that_lost_its_tail_is_repaired_before_anything_is_admitted() -> None:
    server = MemoryServer()
    bus = MemoryBus(server)
    stage = await world(bus)

    async def admit(request: str) -> Verdict:
        await bus.purge(subjects.PROMPTS_STREAM, subjects.prompt("acme", "w1", "c1"))
        prompt = a_prompt(request)
        ack = await stage.send(prompt)
        stored = await bus.at(subjects.PROMPTS_STREAM, ack.sequence)
        assert stored is not None
        return await admitter(bus).admit(
            prompt, sequence=ack.sequence, stored_at_ns=stored.stored_at_ns, actor=f"for-{request}"
        )

    assert isinstance((await admit("r1")).end, Ack)
    owners = Bucket(bus, subjects.OWNERS)
    entry = await owners.get("acme.w1.c1")
    assert entry is not None
    idle = after(Ended(derived("r1")[1], "completed", True, 1), record=await stage.owner())
    kept = await owners.update("acme.w1.c1", idle.value(), op="test", revision=entry.revision)
    assert isinstance((await admit("r2")).end, Ack)
    server.roll_back(f"KV_{subjects.OWNERS}", kept.revision)  # r2's execution is in the log, not in the bucket
    assert (await stage.owner()).state == "idle"
    assert not isinstance((await admit("r3")).end, Ack), "r2 owns the conversation: r3 waits"
    record = await stage.owner()
    assert (record.state, record.generation, record.request) == ("starting", 2, "r2")
    assert record.target is not None and record.target.execution == derived("r2")[1]


@virtual
async def test_a_request_whose_memory_is_gone_is_answered_from_the_log_and_not_run_again() -> None:
    """P1 beyond every memory: 24 h of requests, 16 tombstones."""
    server = MemoryServer()
    bus = MemoryBus(server)
    stage = await world(bus)
    prompt = a_prompt()
    for turn in range(2):
        ack = await stage.send(prompt, again=f"/{turn}")
        stored = await bus.at(subjects.PROMPTS_STREAM, ack.sequence)
        assert stored is not None
        verdict = await admitter(bus).admit(
            prompt, sequence=ack.sequence, stored_at_ns=stored.stored_at_ns, actor=f"a{turn}"
        )
        assert isinstance(verdict.end, Ack)
        if turn == 0:
            target = (await stage.owner()).target
            assert target is not None
            subject = subjects.event("acme", "w1", "c1", target.execution)
            ended = b'{"v":1,"first":1,"last":1,"pos":{"record":1,"index":0},"events":[{"ordinal":1,"at":1,'
            ended += b'"type":"execution.ended","body":{"outcome":"completed","proof":{"method":"cgroup","at":1}}}]}'
            await bus.publish(subject, ended)
            await bus.purge(subjects.PROMPTS_STREAM, stored.subject)
            await bus.purge(f"KV_{subjects.REQUESTS}", f"$KV.{subjects.REQUESTS}.acme.r1")
            owners = Bucket(bus, subjects.OWNERS)
            entry = await owners.get("acme.w1.c1")
            assert entry is not None
            later = OwnerRecord(generation=40, log_base=1000, tombstones=())  # many prompts have passed
            await owners.update("acme.w1.c1", later.value(), op="test", revision=entry.revision)
            await asyncio.sleep(300)  # the server has forgotten every message id
    commands = await bus.state(subjects.COMMANDS_STREAM)
    assert commands is not None and commands.messages == 1
    record = await stage.request()
    assert record is not None and record.done is not None and record.done.status == "admitted"
    assert [event.id for event in await stage.told()] == ["r1/prompt.admitted", "r1/response.created"]


def test_text_that_speaks_of_an_end_is_no_end() -> None:
    data = (
        b'{"v":1,"first":1,"last":1,"pos":{"record":1,"index":0},"events":[{"ordinal":1,"at":1,'
        b'"type":"text.completed","body":{"segment":"s","text":"\\"execution.ended\\" response.ended"}}]}'
    )
    message = StoredMessage("tether.event.acme.w1.c1.e1", 7, 1, data)
    assert absorb(ExecutionFacts("e1"), message) == ExecutionFacts("e1", scanned_to=7)


@virtual
async def test_only_what_is_new_in_an_execution_is_read_again_and_a_log_put_back_is_read_anew() -> None:
    server = MemoryServer()
    bus = MemoryBus(server)
    await world(bus)
    log = Log(bus)
    address = EventAddress("acme", "w1", "c1", "e1")
    frame = b'{"v":1,"first":%d,"last":%d,"pos":{"record":1,"index":0},"events":[{"ordinal":%d,"at":1,%s}]}'
    bound = b'"type":"session.bound","body":{"native_session":"n1","resumable":true}'
    for number in range(1, 4):
        await bus.publish(address.subject, frame % (number, number, number, bound))
    assert (await log.execution(address)).resumable_session == "n1"
    bus.faults.add("read", FaultKind.UNAVAILABLE, times=1)
    assert (await log.execution(address)).scanned_to == 3, "nothing new, nothing read"
    bus.faults.clear()
    server.roll_back(subjects.events_stream("acme"), 1)
    assert (await log.execution(address)).scanned_to == 1
    await bus.publish(ADDRESS.subject, encode_event(an_event("e")))


@virtual
async def test_what_a_router_remembers_of_ended_executions_is_bounded_and_pushes_out_none_that_lives() -> None:
    server = MemoryServer()
    bus = MemoryBus(server)
    await world(bus)
    log = Log(bus)
    frame = b'{"v":1,"first":1,"last":1,"pos":{"record":1,"index":0},"events":[{"ordinal":1,"at":1,%s}]}'
    bound = b'"type":"session.bound","body":{"native_session":"n1","resumable":true}'
    ended = b'"type":"execution.ended","body":{"outcome":"completed","proof":{"method":"cgroup","at":1}}'
    living = EventAddress("acme", "w1", "c1", "lives")
    await bus.publish(living.subject, frame % bound)
    assert (await log.execution(living)).ended is None
    for number in range(ENDED_CACHED_MAX + 50):
        address = EventAddress("acme", "w1", "c1", f"e{number}")
        await bus.publish(address.subject, frame % ended)
        assert (await log.execution(address)).ended is not None
    assert len(log.cache) == ENDED_CACHED_MAX + 1
    bus.faults.add("read", FaultKind.UNAVAILABLE, times=1)
    assert (await log.execution(living)).resumable_session == "n1", "it is not read again"
    assert (await log.execution(address)).ended is not None, "nor is the last that ended"
    bus.faults.clear()
    assert (await log.execution(EventAddress("acme", "w1", "c1", "e0"))).ended is not None, "this one is, from the log"
    assert len(log.cache) == ENDED_CACHED_MAX + 1


def test_facts_of_one_execution_are_kept_once_whoever_reads_it_at_the_same_time() -> None:
    cache = FactsCache()
    running, over = ExecutionFacts("e1", scanned_to=1), ExecutionFacts("e1", 2, ended=EndFact("completed", True, 1))
    cache.put("s", running)
    cache.put("s", over)
    assert (len(cache), cache.take("s"), len(cache)) == (1, over, 0)
