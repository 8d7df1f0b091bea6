"""Deletions carried on: everything of the conversation goes, its neighbour stays whole, whatever dies in between."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from support_router import Crash, FaultyBus, World, a_prompt, admitter, now_ms, virtual, world
from tether import ids, subjects
from tether.blobs import Manifest, encode_manifest
from tether.control import ControlReply, StartCommand, decode_request
from tether.deletion import DeletionRecord, begin_deletion, deletion_of
from tether.errors import Code, ProblemError
from tether.events import ConversationEvent, Event
from tether.frames import Frame, Position, decode, encode, encode_event
from tether.kv import Bucket
from tether.limits import NUMBER_MAX, REQUEST_MEMORY_S
from tether.owner import OwnerRecord
from tether.ports import Bus, Message
from tether.prompt import AgentSpec, ConversationRecord
from tether.sandbox import Registration
from tether.subjects import EventAddress
from tether.testing import MemoryBus, MemoryServer
from tether_router.core.steps import Ack
from tether_router.deletion import Deletions
from tether_router.log import Log
from tether_router.records import Records

TENANT: Final = "acme"
MARKER: Final = "MARKER-of-what-is-deleted"
SHARED: Final = hashlib.sha256(b"both").hexdigest()
OWN: Final = hashlib.sha256(MARKER.encode()).hexdigest()
SNAPSHOT: Final = hashlib.sha256(b"snapshot").hexdigest()
KEY: Final = f"{TENANT}.c1"


class ErasingBus(FaultyBus):
    """Erasing and purging are writes, too."""

    async def erase(self, stream: str, sequence: int) -> bool:
        return bool(await self.write(f"erase {stream}", lambda: self._inner.erase(stream, sequence)))

    async def purge(self, stream: str, subject: str, **options: Any) -> int:
        return int(await self.write(f"purge {stream}", lambda: self._inner.purge(stream, subject, **options)))


@dataclass
class Peers:
    """A collector and an agent service, as far as they are asked to forget. `registered`: the collector is there;
    `clean`: the agent service reaches the volume."""

    bus: Bus
    registered: bool = True
    clean: bool = True
    forgotten: list[dict[str, Any]] = field(default_factory=list)
    agent_asked: list[dict[str, Any]] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.register()
        control = subjects.control(TENANT, "w1", "forget")
        async with (
            self.bus.serve(control, self._collector, name="collector"),
            self.bus.serve(subjects.agent("forget"), self._agent, name="agent"),
        ):
            yield

    async def register(self) -> None:
        sandbox = ids.sandbox_id(TENANT, "w1")
        key = subjects.registration_key(TENANT, "w1", sandbox)
        bucket = Bucket(self.bus, subjects.SANDBOXES)
        entry = await bucket.get(key)
        if self.registered and entry is None:
            said = Registration(tenant=TENANT, workspace="w1", sandbox=sandbox, boot="b1", instance="i1")
            await bucket.create(key, said.value(), op="op")
        elif not self.registered and entry is not None:
            await bucket.delete(key, revision=entry.revision)

    async def _collector(self, message: Message) -> bytes:
        request = decode_request(message.data)
        self.forgotten.append(request.payload)
        result = {"clean": True, "executions": 1, "files": 3}
        return ControlReply(control=request.control, verb="forget", status="settled", result=result).encode()

    async def _agent(self, message: Message) -> bytes:
        self.agent_asked.append(json.loads(message.data))
        said = {"clean": self.clean, "pending_on": "" if self.clean else "it sleeps"}
        return json.dumps({"v": 1, "executions": 0, "files": 0, **said}).encode()


async def planted(bus: Bus, **owner: Any) -> World:
    """Two conversations in one workspace: `c1`, whose marker is everywhere, and `c2`."""
    there = await world(bus)
    for name in ("c1", "c2"):
        text = MARKER if name == "c1" else "neighbour"
        await Bucket(bus, subjects.CONVERSATIONS).create(
            subjects.conversation_key(TENANT, name), {"v": 1, "workspace": "w1"}, op="op"
        )
        record = OwnerRecord(generation=1, agent={"kind": "claude"}, native_session=f"session-{name}")
        record = record.model_copy(update=owner if name == "c1" else {})
        await Bucket(bus, subjects.OWNERS).create(subjects.owner_key(TENANT, "w1", name), record.value(), op="op")
        address = EventAddress(TENANT, "w1", name, f"exe_{name}")
        body: dict[str, Any] = {"segment": "s1", "text": text, "blob": {"digest": SHARED, "bytes": 4}}
        events = [Event(ordinal=1, at=1, type="text.completed", body=body)]
        if name == "c1":
            own = {"tool": "t1", "output": "", "blob": {"digest": OWN, "bytes": len(MARKER)}}
            events.append(Event(ordinal=2, at=1, type="tool.completed", body=own))
            bound = {"native_session": "session-of-the-log", "resumable": True}
            events.append(Event(ordinal=3, at=1, type="session.bound", body=bound))
        frame = Frame(first=1, last=len(events), pos=Position(record=1, index=0), events=events)
        await bus.publish(address.subject, encode(frame))
        said = {"request": f"r-{name}", "prompt_sequence": 1, "content": [{"type": "text", "text": text}]}
        event = ConversationEvent(id=f"r-{name}/prompt.admitted", generation=1, at=1, type="prompt.admitted", body=said)
        await bus.publish(subjects.event(TENANT, "w1", name, "_"), encode_event(event))
        await there.send(a_prompt(f"waits-{name}", text, conversation=name))
        await bus.publish(subjects.command(TENANT, "w1"), a_command(name, text))
        refused = subjects.quarantine(address)
        await bus.publish(refused, text.encode())
        await Bucket(bus, subjects.NOTIFICATIONS).create(
            f"{TENANT}.hook.note-{name}", {"v": 1, "conversation": name, "body": text}, op="op"
        )
    for digest, data in ((SHARED, b"both"), (OWN, MARKER.encode()), (SNAPSHOT, a_snapshot())):
        await store(bus, "artifact", digest, data)
    await store(bus, "checkpoint", "0" * 64, MARKER.encode())
    await Bucket(bus, subjects.CHECKPOINTS).create(subjects.checkpoint_key(TENANT, "w1"), {"text": MARKER}, op="op")
    return there


def a_snapshot() -> bytes:
    target = {"tenant": TENANT, "workspace": "w1", "conversation": "c1", "execution": "exe_c1"}
    return json.dumps({"v": 1, "target": target, "text": MARKER}, separators=(",", ":")).encode()


def a_command(conversation: str, text: str) -> bytes:
    prompt = a_prompt("r", text, conversation=conversation)
    return StartCommand(
        control="ctl_1",
        target=ids.ExecutionTarget(
            tenant=TENANT,
            workspace="w1",
            conversation=conversation,
            response="rsp_1",
            response_generation=1,
            execution=f"exe_{conversation}",
            execution_generation=1,
            sandbox="sbx_1",
        ),
        owner_revision=1,
        request_id="r",
        attempt=1,
        content=prompt.content,
        agent=AgentSpec(kind="scripted"),
    ).encode()


async def store(bus: Bus, kind: str, digest: str, data: bytes) -> None:
    manifest = Manifest(digest=digest, bytes=len(data), chunks=1, media="text")
    await bus.publish(subjects.blob(TENANT, "w1", kind, digest, 0), data)
    await bus.publish(subjects.blob(TENANT, "w1", kind, digest, "manifest"), encode_manifest(manifest))


async def everything(bus: MemoryBus) -> dict[str, bytes]:
    """Every stored message, by stream and sequence, with its subject."""
    return {
        f"{name}/{message.sequence} {message.subject}": message.data
        for name in bus.server.streams
        for message in await bus.read(name, 0, ">", limit=10_000)
    }


async def order(bus: Bus, **fields: Any) -> DeletionRecord:
    asked = {"deletion": "del_1", "force": False, "by": "tester", "now_ms": now_ms(), **fields}
    return await begin_deletion(bus, TENANT, "c1", **asked)


def deletions(bus: Bus) -> Deletions:
    return Deletions(bus, Log(bus), Records(bus), now_ms)


async def carried(bus: Bus, *, until: tuple[str, ...] = ("done", "failed"), rounds_max: int = 40) -> DeletionRecord:
    """Advance until it is over. Deadlines are those of virtual time."""
    work = deletions(bus)
    record = None
    for _ in range(rounds_max):
        record = await work.advance(KEY)
        assert record is not None
        if record.state in until:
            return record
        await asyncio.sleep(1)
    raise AssertionError(f"it does not end: {record}")


async def assert_gone(bus: MemoryBus) -> None:
    stored = await everything(bus)
    assert [name for name, data in stored.items() if MARKER.encode() in data] == []
    of_it = [name for name in stored if name.startswith(f"EVENTS_{TENANT}/") and ".c1." in name]
    assert len(of_it) == 1, "nothing but `conversation.deleted` is left in the log"


async def assert_neighbour_whole(bus: MemoryBus) -> None:
    stored = await everything(bus)
    kept = [name for name, data in stored.items() if b"neighbour" in data]
    streams = sorted({name.partition("/")[0] for name in kept})
    assert streams == [
        "COMMANDS",
        f"EVENTS_{TENANT}",
        "KV_tether_notifications",
        "PROMPTS",
        f"QUARANTINE_{TENANT}",
    ]
    assert len([name for name in kept if name.startswith("EVENTS_")]) == 2
    blobs = [name for name in stored if name.startswith("BLOBS_")]
    assert all(SHARED in name for name in blobs) and len(blobs) == 2, "what both refer to stays"
    owner = await Bucket(bus, subjects.OWNERS).record(subjects.owner_key(TENANT, "w1", "c2"), OwnerRecord)
    assert owner is not None and owner.native_session == "session-c2"


@virtual
async def test_everything_of_the_conversation_goes_and_the_neighbour_stays_whole() -> None:
    bus = MemoryBus(MemoryServer())
    await planted(bus)
    peers = Peers(bus)
    async with peers.running():
        await order(bus)
        record = await carried(bus)
    assert record.state == "done"
    await assert_gone(bus)
    await assert_neighbour_whole(bus)
    erased = {"prompts": 1, "commands": 1, "checkpoints": 1, "checkpoint_blobs": 2, "blobs": 4, "events": 2}
    assert erased.items() <= record.erased.items()
    assert peers.forgotten[0]["conversation"] == "c1"
    assert set(peers.forgotten[0]["sessions"]) == {"session-c1", "session-of-the-log"}


@virtual
async def test_the_log_ends_with_the_deletion_and_its_readers_learn_until_when() -> None:
    bus = MemoryBus(MemoryServer())
    there = await planted(bus)
    async with Peers(bus).running():
        await order(bus)
        record = await carried(bus)
    (told,) = await there.told()
    assert (told.type, told.body) == ("conversation.deleted", {"deletion": "del_1", "until": NUMBER_MAX})
    last = await bus.last(subjects.events_stream(TENANT), subjects.event(TENANT, "w1", "c1", "_"))
    assert last is not None and last.sequence == record.log_sequence


WRITES_MIN: Final = 25  # every erase, every note of the record, every question is one


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_router_that_dies_at_any_write_is_followed_by_one_that_ends_the_deletion(after: bool) -> None:
    number, died = 0, [True]
    while any(died[-3:]):  # one that is refused by compare-and-set has no `after`
        number += 1
        died.append(_dies_at(number, after))
    assert number > WRITES_MIN


def _dies_at(number: int, after: bool) -> bool:
    """Whether it died at the write of that number."""
    died = False

    @virtual
    async def attempt() -> None:
        nonlocal died
        bus = MemoryBus(MemoryServer())
        await planted(bus)
        async with Peers(bus).running():
            await order(bus)
            faulty = ErasingBus(bus, crash_at=number, after=after)
            try:
                await carried(faulty)  # type: ignore[arg-type]
            except Crash:
                died = True
            record = await carried(bus)
        assert record.state == "done"
        await assert_gone(bus)
        await assert_neighbour_whole(bus)

    attempt()
    return died


@virtual
async def test_two_routers_that_carry_the_same_deletion_erase_it_once() -> None:
    bus = MemoryBus(MemoryServer())
    await planted(bus)
    async with Peers(bus).running():
        await order(bus)
        first, second = await asyncio.gather(carried(bus), carried(bus))
    assert first.state == second.state == "done"
    await assert_gone(bus)
    await assert_neighbour_whole(bus)


@virtual
async def test_a_prompt_of_a_deleted_conversation_is_refused_by_name() -> None:
    bus = MemoryBus(MemoryServer())
    there = await planted(bus)
    async with Peers(bus).running():
        await order(bus)
        await carried(bus)
    prompt = a_prompt("late", MARKER)
    ack = await there.send(prompt)
    verdict = await admitter(bus).admit(prompt, sequence=ack.sequence, stored_at_ns=1, actor="a1")
    assert verdict.end == Ack("failed")
    request = await there.request("late")
    assert request is not None and request.done is not None and request.done.problem is not None
    assert request.done.problem.code is Code.CONVERSATION_DELETED


@virtual
async def test_what_runs_is_refused_at_once_and_nothing_is_ordered() -> None:
    bus = MemoryBus(MemoryServer())
    await planted(bus, **active())
    with pytest.raises(ProblemError) as refused:
        await order(bus)
    assert refused.value.problem.code is Code.SESSION_BUSY
    assert refused.value.problem.context["execution"] == "exe_c1"
    assert await deletion_of(bus, TENANT, "c1") is None


@virtual
async def test_what_begins_between_the_order_and_the_mark_fails_the_deletion_and_loses_nothing() -> None:
    bus = MemoryBus(MemoryServer())
    there = await planted(bus)
    await order(bus)
    key = subjects.owner_key(TENANT, "w1", "c1")
    entry = await Bucket(bus, subjects.OWNERS).get(key)
    assert entry is not None
    running = OwnerRecord(**active())
    await Bucket(bus, subjects.OWNERS).update(key, running.value(), op="op2", revision=entry.revision)
    record = await carried(bus)
    assert record.state == "failed"
    assert record.problem is not None and record.problem.code is Code.SESSION_BUSY
    assert not record.bars, "it may be ordered again, and read meanwhile"
    assert [event.type for event in await there.told()] == ["prompt.admitted"]
    assert (await order(bus, deletion="del_2", force=True)).deletion == "del_2"


@virtual
async def test_a_volume_out_of_reach_keeps_the_deletion_running_until_it_is_clean() -> None:
    bus = MemoryBus(MemoryServer())
    await planted(bus)
    peers = Peers(bus, registered=False, clean=False)
    async with peers.running():
        await order(bus)
        work = deletions(bus)
        for _ in range(12):
            record = await work.advance(KEY)
        assert record is not None
        assert (record.state, record.step) == ("running", "volume")
        assert record.pending_on == ("workspace volume: it sleeps",)
        await assert_gone(bus)
        peers.registered = True
        await peers.register()
        record = await carried(bus)
    assert record.state == "done"
    assert len(peers.forgotten) == 1
    await assert_neighbour_whole(bus)


@virtual
async def test_the_only_copy_that_others_have_is_kept_until_their_volume_is_there() -> None:
    bus = MemoryBus(MemoryServer())
    await planted(bus)
    key = subjects.checkpoint_key(TENANT, "w1")
    entry = await Bucket(bus, subjects.CHECKPOINTS).get(key)
    assert entry is not None
    reference = {
        "v": 1, "checkpoint": "ckp_1", "drain": "drn_1", "tenant": TENANT, "workspace": "w1", "sandbox": "sbx_1",
        "boot": "b1", "manifest": "0" * 64, "manifest_bytes": 1, "stored": "blobs", "include": "workspace",
        "clean": True,
    }  # fmt: skip
    await Bucket(bus, subjects.CHECKPOINTS).update(key, reference, op="op2", revision=entry.revision)
    peers = Peers(bus, registered=False, clean=False)
    async with peers.running():
        await order(bus)
        work = deletions(bus)
        for _ in range(12):
            await work.advance(KEY)
        assert await Bucket(bus, subjects.CHECKPOINTS).get(key) is not None
        peers.clean = True
        record = await carried(bus)
    assert record.state == "done"
    assert await Bucket(bus, subjects.CHECKPOINTS).get(key) is None
    await assert_gone(bus)


@virtual
async def test_without_an_agent_service_the_deletion_waits_and_says_so() -> None:
    bus = MemoryBus(MemoryServer())
    await planted(bus)
    await order(bus)
    work = deletions(bus)
    for _ in range(12):
        record = await work.advance(KEY)
    assert record is not None
    assert record.pending_on == ("workspace volume: no agent service answers",)


@virtual
async def test_a_database_that_is_behind_is_waited_for_and_then_named() -> None:
    bus = MemoryBus(MemoryServer())
    await planted(bus)
    await Bucket(bus, subjects.PROJECTIONS).create(f"db1.{TENANT}.0", {"number": 1, "sequence": 1}, op="op")
    async with Peers(bus).running():
        await order(bus)
        record = await carried(bus, rounds_max=80)
    assert record.pending_on == ("database db1",)


@virtual
async def test_a_day_after_its_end_the_id_is_free_and_late_messages_are_erased() -> None:
    bus = MemoryBus(MemoryServer())
    there = await planted(bus)
    late = EventAddress(TENANT, "w1", "c1", "exe_c1")
    async with Peers(bus).running():
        await order(bus)
        await carried(bus)
        frame = Frame(
            first=4,
            last=4,
            pos=Position(record=4, index=0),
            events=[Event(ordinal=4, at=1, type="text.completed", body={"segment": "s2", "text": MARKER})],
        )
        await bus.publish(late.subject, encode(frame))
        await there.send(a_prompt("late", MARKER))
        await asyncio.sleep(REQUEST_MEMORY_S + 1)
        record = await carried(bus, until=("freed",))
    assert record.state == "freed" and not record.bars
    await assert_gone(bus)
    (told,) = await there.told()
    assert told.body["until"] <= now_ms(), "what is stored from now on is news"
    assert await Bucket(bus, subjects.OWNERS).get(subjects.owner_key(TENANT, "w1", "c1")) is None
    where = await Bucket(bus, subjects.CONVERSATIONS).record(f"{TENANT}.c1", ConversationRecord)
    assert where is None


@virtual
async def test_a_repeated_order_joins_the_deletion_that_runs() -> None:
    bus = MemoryBus(MemoryServer())
    await planted(bus)
    first = await order(bus)
    again = await order(bus, deletion="del_other")
    assert again.deletion == first.deletion
    forced = await order(bus, deletion="del_other", force=True)
    assert (forced.deletion, forced.force) == (first.deletion, True)


@virtual
async def test_a_conversation_that_nobody_admitted_is_not_found() -> None:
    bus = MemoryBus(MemoryServer())
    await world(bus)
    with pytest.raises(ProblemError) as refused:
        await order(bus)
    assert refused.value.problem.code is Code.NOT_FOUND


def active() -> dict[str, Any]:
    target = ids.ExecutionTarget(
        tenant=TENANT,
        workspace="w1",
        conversation="c1",
        response="rsp_1",
        response_generation=1,
        execution="exe_c1",
        execution_generation=1,
        sandbox="sbx_1",
        boot="b1",
        process_generation=1,
    )
    return {"state": "running", "generation": 1, "target": target, "request": "r-c1"}


def test_the_markers_frame_is_what_it_is_taken_for() -> None:
    """The tests above search bytes: a marker that JSON words otherwise would be found nowhere."""
    event = Event(ordinal=1, at=1, type="text.completed", body={"segment": "s1", "text": MARKER})
    data = encode(Frame(first=1, last=1, pos=Position(record=1, index=0), events=[event]))
    assert MARKER.encode() in data
    assert isinstance(decode(EventAddress(TENANT, "w1", "c1", "exe_c1").subject, data), Frame)
