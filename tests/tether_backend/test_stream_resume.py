"""Readers that come and go, logs that change under them: nothing lost, nothing twice, or told."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support_backend import Backend, Log, Reader, Sse, ended, event, eventually, running_backend, text_delta
from support_nats import running_server
from tether import events as ev
from tether import limits, subjects, topology
from tether.bus import NatsBus, connect
from tether.testing import FaultKind, Faults, MemoryBus, MemoryServer

EVENTS = 5000
DISCONNECTS = 100


@pytest.fixture
async def backend(bus: NatsBus, tenant: str, tmp_path: Path) -> AsyncIterator[Backend]:
    async with running_backend(bus, [tenant], tmp_path) as running:
        yield running


async def _write_events(log: Log, total: int, chance: random.Random) -> None:
    """`total` events in frames of random size; an event's end never comes."""
    ordinal = 2
    await log.frame("e1", [log.started("e1")])
    while ordinal <= total:
        size = min(chance.randint(1, 12), total - ordinal + 1)
        await log.frame("e1", [text_delta(n, "x", offset=n - 2) for n in range(ordinal, ordinal + size)])
        ordinal += size
        if chance.random() < 0.2:
            await asyncio.sleep(0.001)


async def test_a_reader_that_disconnects_100_times_during_5000_events_sees_each_once_in_order(
    backend: Backend, bus: NatsBus, tenant: str
) -> None:
    seed = 20240
    chance = random.Random(seed)
    log = Log(bus, tenant)
    writer = asyncio.create_task(_write_events(log, EVENTS, random.Random(seed + 1)), name="writer")
    reader = backend.reader("c1", tenant)
    got: list[int] = []
    disconnects = 0
    while len(got) < EVENTS:
        await reader.open()
        assert reader.status == 200, (seed, reader.body)
        # So many frames (not all are events) before the next disconnect; after the last one, all the rest.
        frames = chance.randint(0, 80) if disconnects < DISCONNECTS else 2 * EVENTS
        while frames and len(got) < EVENTS:
            frames -= 1
            one = await reader.next()
            assert one is not None
            if one.name == "message":
                got.append(one.data["ordinal"])
        if disconnects < DISCONNECTS:
            await reader.close()
            disconnects += 1
    await writer
    await reader.close()
    assert disconnects == DISCONNECTS, f"seed {seed}: only {disconnects} disconnects"
    assert got == list(range(1, EVENTS + 1)), f"seed {seed}"


async def test_a_reader_that_reconnects_before_its_first_event_loses_nothing(
    backend: Backend, bus: NatsBus, tenant: str
) -> None:
    log = Log(bus, tenant)
    reader = await backend.reader("c1", tenant).open()
    first = await reader.next()
    assert first is not None and first.name == "open"
    await reader.close()
    await log.frame("e1", [log.started("e1"), text_delta(2, "a")])  # while nobody listens
    await reader.open()
    assert [one.key for one in await reader.events(2)] == [("e1", 1), ("e1", 2)]
    await reader.close()


async def test_a_cursor_within_a_frame_goes_on_with_the_next_event_of_that_frame(
    backend: Backend, bus: NatsBus, tenant: str
) -> None:
    log = Log(bus, tenant)
    await log.frame("e1", [log.started("e1"), *(text_delta(n, "x", offset=n - 2) for n in range(2, 9))])
    whole = backend.reader("c1", tenant)
    await whole.open()
    ids = [one.id for one in await whole.events(8)]
    await whole.close()
    for index, cursor in enumerate(ids[:-1]):
        reader = await backend.reader("c1", tenant).open(cursor)
        assert [one.data["ordinal"] for one in await reader.events(7 - index)] == list(range(index + 2, 9))
        await reader.close()


async def test_an_event_published_at_any_step_of_attaching_is_told_once(tmp_path: Path, tenant: str) -> None:
    """L4: the event is published inside each call that the attach makes of the bus, before and after its effect."""

    class Boundaries(MemoryBus):
        """Publishes one more frame at the `forced`-th boundary of a bus call made by the reader."""

        log: Log
        forced = -1
        seen = 0
        busy = False
        ordinal = 1

        async def _boundary(self) -> None:
            if self.forced < 0 or self.busy:
                return
            self.seen += 1
            if self.seen == self.forced:
                self.busy = True
                Boundaries.ordinal += 1
                await self.log.frame("e1", [text_delta(Boundaries.ordinal, "x", offset=Boundaries.ordinal - 2)])
                self.busy = False

        async def state(self, stream: str):  # type: ignore[no-untyped-def]
            await self._boundary()
            found = await super().state(stream)
            await self._boundary()
            return found

        async def read(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            await self._boundary()
            found = await super().read(*args, **kwargs)
            await self._boundary()
            return found

        async def next_after(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            await self._boundary()
            found = await super().next_after(*args, **kwargs)
            await self._boundary()
            return found

    bus = Boundaries(MemoryServer())
    async with running_backend(bus, [tenant], tmp_path, project=False) as backend:
        bus.log = Log(bus, tenant)
        await bus.log.frame("e1", [bus.log.started("e1")])
        forced = 0
        for boundary in range(1, 30):
            bus.seen, bus.forced = 0, boundary
            reader = await backend.reader("c1", tenant).open()
            got = [one.data["ordinal"] for one in await reader.events(Boundaries.ordinal)]
            bus.forced = -1
            reached = bus.seen >= boundary
            await bus.log.frame("e1", [text_delta(Boundaries.ordinal + 1, "x", offset=Boundaries.ordinal - 1)])
            Boundaries.ordinal += 1
            while got[-1] < Boundaries.ordinal:
                got += [one.data["ordinal"] for one in await reader.events(1)]
            await reader.close()
            assert got == list(range(1, Boundaries.ordinal + 1)), f"boundary {boundary}"
            if not reached:
                break
            forced += 1
        assert forced >= 4


async def test_a_lost_live_copy_is_told_within_the_silence_probe(
    tmp_path: Path, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L8: nothing follows the lost copy."""
    monkeypatch.setattr(limits, "SILENCE_PROBE_S", 0.2)
    faults = Faults()
    bus = MemoryBus(MemoryServer(), faults=faults)
    async with running_backend(bus, [tenant], tmp_path, project=False) as backend:
        log = Log(bus, tenant)
        await log.frame("e1", [log.started("e1")])
        reader = await backend.reader("c1", tenant).open()
        await reader.events(1)
        faults.add("publish", FaultKind.LOSE_LIVE)
        await log.frame("e1", [text_delta(2, "last words")])
        assert [one.key for one in await reader.events(1)] == [("e1", 2)]
        assert any(one.fault.kind is FaultKind.LOSE_LIVE for one in faults.fired)
        await reader.close()


async def test_a_lost_live_copy_of_another_subject_is_told_in_its_place(tmp_path: Path, tenant: str) -> None:
    """The chain of one subject would not show it: the order of the tenant's log does."""
    faults = Faults()
    bus = MemoryBus(MemoryServer(), faults=faults)
    async with running_backend(bus, [tenant], tmp_path, project=False) as backend:
        log = Log(bus, tenant)
        await log.frame("e1", [log.started("e1")])
        reader = await backend.reader("c1", tenant).open()
        await reader.events(1)
        faults.add("publish", FaultKind.LOSE_LIVE)
        await log.note(ev.PROMPT_ADMITTED, "q9/prompt.admitted", {"request": "q9"})
        await log.frame("e1", [text_delta(2, "a")])
        assert [one.key for one in await reader.events(2)] == ["q9/prompt.admitted", ("e1", 2)]
        await reader.close()


async def test_a_stream_made_anew_gives_an_old_cursor_a_problem_and_a_snapshot_and_goes_on(
    backend: Backend, bus: NatsBus, tenant: str
) -> None:
    """L5: a new connection with an old cursor, and a reader that was connected all the while."""
    log = Log(bus, tenant)
    await log.frame("e1", [log.started("e1"), text_delta(2, "old")])
    await backend.projected("c1", "e1", 2)
    staying = await backend.reader("c1", tenant).open()
    old = (await staying.events(2))[-1].id
    await bus.delete_stream(subjects.events_stream(tenant))
    await bus.ensure(topology.tenant(tenant, max_bytes=64 << 20))
    anew = Log(bus, tenant)
    await anew.frame("e2", [anew.started("e2"), text_delta(2, "new"), text_delta(3, "er", offset=3)])

    await _told_of_change(staying)
    coming = await backend.reader("c1", tenant).open(old)
    assert coming.status == 200
    await _told_of_change(coming)
    await staying.close()
    await coming.close()


async def _told_of_change(reader: Reader) -> None:
    frames: list[Sse] = []
    while not {("e2", 1), ("e2", 2), ("e2", 3)} <= _known(frames):
        one = await reader.next()
        assert one is not None
        frames.append(one)
    names = [one.name for one in frames if one.name in ("problem", "snapshot")]
    assert names[:2] == ["problem", "snapshot"], names
    assert next(one for one in frames if one.name == "problem").data["code"] == "CURSOR_POSITION_CHANGED"
    snapshot = next(one for one in frames if one.name == "snapshot").data["history"]
    assert "old" in [item["state"].get("text") for item in snapshot["items"]]  # shown text stays
    told = [one.key for one in frames if one.name == "message"]
    assert len(told) == len(set(told))


def _known(frames: list[Sse]) -> set[tuple[str, int] | str]:
    """What the reader has: from the snapshot's applied ordinals, and from events."""
    known: set[tuple[str, int] | str] = set()
    for one in frames:
        if one.name == "message":
            known.add(one.key)
        elif one.name == "snapshot":
            for run in one.data["history"]["executions"]:
                known |= {(run["execution"], ordinal) for ordinal in range(1, run["applied"] + 1)}
    return known


async def test_a_cursor_before_the_retained_range_gets_a_snapshot_and_no_gap_where_nothing_is_missing(
    backend: Backend, bus: NatsBus, tenant: str
) -> None:
    """L6: the projection has what the log no longer has."""
    log = Log(bus, tenant)
    await log.frame("e1", [log.started("e1"), text_delta(2, "kept in rows")])
    reader = await backend.reader("c1", tenant).open()
    old = (await reader.events(1))[0].id
    await reader.close()
    await log.frame("e1", [text_delta(3, "!", offset=12), *ended(4)])
    await log.frame("e2", [log.started("e2")])
    await backend.projected("c1", "e2", 1)
    await bus.purge(subjects.events_stream(tenant), log.subject("e1"))
    await reader.open(old)
    frames = [await reader.next() for _ in range(3)]
    names = [one.name for one in frames if one is not None]
    assert names == ["open", "snapshot", "live"]
    snapshot = frames[1]
    assert snapshot is not None
    history = snapshot.data["history"]
    assert {one["execution"]: one["applied"] for one in history["executions"]} == {"e1": 5, "e2": 1}
    assert history["gaps"] == []
    await log.frame("e2", [text_delta(2, "on")])
    assert [one.key for one in await reader.events(1)] == [("e2", 2)]
    await reader.close()


async def test_a_start_that_nobody_has_any_more_is_told_once_and_the_rest_follows(tmp_path: Path, tenant: str) -> None:
    """L6, L12: the first frames were evicted before anything read them."""
    bus = MemoryBus(MemoryServer())
    async with running_backend(bus, [tenant], tmp_path, project=False) as backend:
        log = Log(bus, tenant)
        first = await log.frame("e1", [log.started("e1"), text_delta(2, "gone")])
        await log.frame("e1", [text_delta(3, "here", offset=4)])
        await bus.purge(subjects.events_stream(tenant), log.subject("e1"), up_to=first + 1)
        project = asyncio.create_task(backend.deps.projectors[tenant].run(), name="projector")
        try:
            history = await backend.projected("c1", "e1", 3)
            assert [(one["reason"], one["first"], one["last"]) for one in history["gaps"]] == [("retention_gap", 1, 2)]
            reader = await backend.reader("c1", tenant).open()
            names: list[str] = []
            while names[-1:] != ["live"]:
                one = await reader.next()
                assert one is not None
                names.append(one.name)
            assert names.count("problem") == 1 and names.count("snapshot") == 1
            await log.frame("e1", [text_delta(4, "more", offset=8)])
            assert [one.key for one in await reader.events(1)] == [("e1", 4)]
            await reader.close()
        finally:
            project.cancel()
            await asyncio.gather(project, return_exceptions=True)


async def test_a_cursor_of_another_tenant_or_conversation_is_refused_with_zero_bytes_of_events(
    bus: NatsBus, tenant: str, tmp_path: Path
) -> None:
    """L10."""
    other = f"{tenant}b"
    async with running_backend(bus, [tenant, other], tmp_path) as backend:
        log = Log(bus, tenant)
        await log.frame("e1", [log.started("e1"), text_delta(2, "secret of a")])
        reader = await backend.reader("c1", tenant).open()
        cursor = (await reader.events(2))[-1].id
        await reader.close()
        for who, conversation in ((other, "c1"), (tenant, "c2")):
            refused = await backend.reader(conversation, who).open(cursor)
            assert refused.status == 422
            assert b'"field":"cursor"' in refused.body and b"secret" not in refused.body
            await refused.close()
        # Without a cursor, tenant B sees a conversation of the same name of its own: empty.
        mine = await backend.reader("c1", other).open()
        frames = [await mine.next(), await mine.next()]
        assert [one.name for one in frames if one] == ["open", "live"]
        await mine.close()


async def test_a_stalled_reader_is_cut_with_its_cursor_intact_and_does_not_slow_another(
    backend: Backend, bus: NatsBus, tenant: str
) -> None:
    """L7."""
    log = Log(bus, tenant)
    await log.frame("e1", [log.started("e1")])
    stalled = await backend.reader("c1", tenant).open(small=True)
    await stalled.events(1)
    while (one := await stalled.next()) is not None and one.name != "live":
        pass
    quick = await backend.reader("c1", tenant).open()
    await quick.events(1)
    text = "x" * 8000
    total = 1500  # 12 MB: more than sockets and buffer hold
    ordinal = 2
    got = 1
    while ordinal <= total:
        size = min(20, total - ordinal + 1)
        frame = [
            event(n, ev.TEXT_DELTA, {"segment": "s", "text": text, "offset": (n - 2) * len(text)})
            for n in range(ordinal, ordinal + size)
        ]
        await log.frame("e1", frame)
        ordinal += size
        got += len(await quick.events(size))  # the other reader has each frame before the next is written
    assert got == total
    cut = backend.deps.metrics.cut

    async def was_cut() -> bool:
        return bool(cut._value.get() == 1)

    await eventually(was_cut, "the stalled reader was cut")
    seen = [1]
    try:
        while True:
            seen += [one.data["ordinal"] for one in await stalled.events(1)]
    except ConnectionError:
        pass
    assert len(seen) < total
    await stalled.open()
    seen += [one.data["ordinal"] for one in await stalled.events(total - len(seen))]
    assert seen == list(range(1, total + 1))
    await stalled.close()
    await quick.close()


async def test_readers_wait_with_their_stream_open_while_the_bus_is_away_and_lose_nothing(
    tmp_path: Path, tenant: str
) -> None:
    server = MemoryServer()
    bus, other = MemoryBus(server), MemoryBus(server)
    async with running_backend(bus, [tenant], tmp_path, project=False) as backend:
        log = Log(other, tenant)
        await log.frame("e1", [log.started("e1")])
        reader = await backend.reader("c1", tenant).open()
        await reader.events(1)
        bus.disconnect(for_s=0.3)
        refused = await backend.reader("c1", tenant).open()
        assert refused.status == 503 and b"RUNTIME_UNAVAILABLE" in refused.body
        await refused.close()
        await log.frame("e1", [text_delta(2, "while away")])
        assert [one.key for one in await reader.events(1)] == [("e1", 2)]
        await log.frame("e1", [text_delta(3, "after", offset=10)])
        assert [one.key for one in await reader.events(1)] == [("e1", 3)]
        await reader.close()


async def test_until_idle_ends_once_nothing_owns_the_conversation(backend: Backend, bus: NatsBus, tenant: str) -> None:
    log = Log(bus, tenant)
    await log.prompt("q1", "r1", "e1")
    await log.own("e1")
    reader = await backend.reader("c1", tenant).open(until="idle")
    await log.frame("e1", [log.started("e1"), text_delta(2, "a"), *ended(3)])
    assert [one.key for one in await reader.events(6)][-1] == ("e1", 4)
    await log.own(None)
    frames = []
    while (one := await reader.next()) is not None:
        frames.append(one.name)
    assert frames[-1] == "end"
    await reader.open(until="idle")
    assert reader.status == 204
    await reader.close()


async def _reconnected(bus: NatsBus, epoch: int) -> None:
    async def back() -> bool:
        return bus.epoch >= epoch and bus.connected and await bus.state(subjects.PROMPTS_STREAM) is not None

    await eventually(back, "the bus came back")


async def test_an_older_copy_of_the_log_put_back_gives_an_old_cursor_a_problem_though_sequences_are_used_again(
    tmp_path: Path, tenant: str
) -> None:
    """L5: same creation time, the same sequences, other messages."""
    with running_server() as server:
        async with await connect(server.url, name="before") as bus, running_backend(bus, [tenant], tmp_path) as backend:
            log = Log(bus, tenant)
            kept = await log.frame("e1", [log.started("e1"), text_delta(2, "kept")])
            await backend.projected("c1", "e1", 2)
            server.kill()
            shutil.copytree(server.root / "store", tmp_path / "older")
            server.start()

            await _reconnected(bus, 2)
            lost = await log.frame("e1", [text_delta(3, "lost", offset=4)])
            staying = backend.reader("c1")
            await staying.open()
            old = (await staying.events(3))[-1].id
            first = backend.reader("c1")
            await first.open()
            good = (await first.events(2))[-1].id

            server.kill()
            shutil.rmtree(server.root / "store")
            shutil.copytree(tmp_path / "older", server.root / "store")
            server.start()
            await _reconnected(bus, 3)
            anew = Log(bus, tenant)
            assert await anew.frame("e2", [anew.started("e2"), text_delta(2, "other")]) == lost == kept + 1

            # At the same sequence there is another message now: it is not taken for the reader's own.
            for reader in (staying, backend.reader("c1")):
                if reader is not staying:
                    await reader.open(old)
                names: list[str] = []
                told: list[Sse] = []
                while not {("e2", 1), ("e2", 2)} <= _known(told):
                    one = await reader.next()
                    assert one is not None
                    names.append(one.name)
                    told.append(one)
                assert "problem" in names and "snapshot" in names, names
            # A cursor before the change is still good.
            resumed = await backend.reader("c1").open(good)
            assert [one.key for one in await resumed.events(2)] == [("e2", 1), ("e2", 2)]
