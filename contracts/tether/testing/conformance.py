"""What every bus must do: one suite for `tether.bus` against real servers (R1, R3) and for the memory bus.

Subclass `BusConformance` in a test module and give it a fixture `harness` (an implementation of `Harness`); needs
pytest and pytest-asyncio. Everything made on the bus carries the harness's own tenant, so one server serves all tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import pytest

from tether import subjects, topology
from tether.errors import (
    BusError,
    BusUnavailableError,
    MessageTooLargeError,
    NoReplyError,
    SlowReaderError,
    WrongLastSequenceError,
)
from tether.kv import Bucket, Conflict
from tether.ports import Bus, Job, LiveSubscription, Message, StoredMessage

T = TypeVar("T")
WITHIN_S = 10.0


class Harness(Protocol):
    """What a bus brings to the suite. `bus` is connected and has the tenant's log."""

    bus: Bus
    tenant: str
    replicas: int
    dedupe_first: bool  # a retry with the same id and compare-and-set reads `duplicate` (R3), not 10071 (R1)

    async def connect(self) -> Bus:
        """Another connection, closed by the harness."""
        ...

    async def pause(self, seconds: float) -> None:
        """Let so much time pass for the server."""
        ...

    async def interest(self, live: LiveSubscription) -> None:
        """Return when a live subscription to the tenant is known wherever a copy may come from."""
        ...


async def eventually(harness: Harness, check: Callable[[], Awaitable[T | None]], what: str) -> T:
    """The first result of `check` that is neither None nor False, within `WITHIN_S`."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + WITHIN_S
    for _ in range(10_000):
        found = await check()
        if found:
            return found
        if loop.time() > deadline_s:
            break
        await harness.pause(0.02)
    raise AssertionError(f"not within {WITHIN_S:g} s: {what}")


async def take(jobs: AsyncGenerator[Job, None]) -> Job:
    """The next job of an iterator, within the deadline."""
    async with asyncio.timeout(WITHIN_S):
        return await anext(jobs)


class BusConformance:
    """Test methods are sentences about the port; see the module."""

    # --- helpers ---

    def event(self, harness: Harness, execution: str = "e1") -> str:
        return subjects.event(harness.tenant, "w", "c", execution)

    def log(self, harness: Harness) -> str:
        return subjects.events_stream(harness.tenant)

    async def queue(self, harness: Harness, **consumer: Any) -> tuple[str, str]:
        """A small work queue: (stream, subject prefix); durable `worker`, at most 3 messages per subject."""
        name, prefix = f"QUEUE_{harness.tenant}", f"queue.{harness.tenant}"
        stream = topology.StreamSpec(
            name=name,
            subjects=(f"{prefix}.>",),
            description="A work queue",
            retention="workqueue",
            max_msgs_per_subject=3,
            discard_new=True,
            discard_new_per_subject=True,
            replicas=harness.replicas,
        )
        options = {"ack_wait_s": 1.0, **consumer}
        durable = topology.ConsumerSpec(stream=name, durable="worker", description="Works", **options)
        await harness.bus.ensure(topology.Topology(streams=(stream,), consumers=(durable,)))
        return name, prefix

    async def bucket(self, harness: Harness, *, history: int = 1) -> Bucket:
        spec = topology.bucket(
            f"bucket_{harness.tenant}", "A bucket", ttl=True, history=history, replicas=harness.replicas
        )
        await harness.bus.ensure(topology.Topology(streams=(spec,)))
        return Bucket(harness.bus, f"bucket_{harness.tenant}")

    # --- compare-and-set, deduplication ---

    async def test_compare_and_set_stores_on_the_subjects_last_sequence_and_names_the_actual_one(
        self, harness: Harness
    ) -> None:
        bus, subject = harness.bus, self.event(harness)
        first = await bus.publish(subject, b"1", expect_last=0)
        other = await bus.publish(self.event(harness, "e2"), b"x", expect_last=0)
        second = await bus.publish(subject, b"2", expect_last=first.sequence)
        assert first.sequence < other.sequence < second.sequence
        assert first.stream == self.log(harness) and not first.duplicate
        with pytest.raises(WrongLastSequenceError) as wrong:
            await bus.publish(subject, b"3", expect_last=first.sequence)
        assert wrong.value.actual == second.sequence
        with pytest.raises(WrongLastSequenceError) as wrong:
            await bus.publish(self.event(harness, "e3"), b"3", expect_last=first.sequence)
        assert wrong.value.actual == 0

    async def test_a_retry_with_id_and_compare_and_set_is_told_apart_by_replication(self, harness: Harness) -> None:
        bus, subject = harness.bus, self.event(harness)
        first = await bus.publish(subject, b"1", msg_id="id-1", expect_last=0)
        if harness.dedupe_first:
            again = await bus.publish(subject, b"1", msg_id="id-1", expect_last=0)
            assert again.duplicate and again.sequence == first.sequence
        else:
            with pytest.raises(WrongLastSequenceError) as wrong:
                await bus.publish(subject, b"1", msg_id="id-1", expect_last=0)
            assert wrong.value.actual == first.sequence
        assert [m.data for m in await bus.read(self.log(harness), 0, subject)] == [b"1"]

    async def test_an_id_is_known_over_the_whole_stream_whatever_the_subject(self, harness: Harness) -> None:
        bus = harness.bus
        first = await bus.publish(self.event(harness), b"1", msg_id="id-1")
        again = await bus.publish(self.event(harness, "e2"), b"other", msg_id="id-1")
        assert again.duplicate and again.sequence == first.sequence
        assert await bus.last(self.log(harness), self.event(harness, "e2")) is None

    async def test_after_a_purge_the_base_is_zero_and_a_known_id_stores_nothing(self, harness: Harness) -> None:
        bus, subject, log = harness.bus, self.event(harness), self.log(harness)
        await bus.publish(subject, b"1", msg_id="id-1", expect_last=0)
        assert await bus.purge(log, subject) == 1
        again = await bus.publish(subject, b"1", msg_id="id-1", expect_last=0)
        assert again.duplicate
        assert await bus.last(log, subject) is None
        stored = await bus.publish(subject, b"1", msg_id="id-1/r1", expect_last=0)
        assert not stored.duplicate
        found = await bus.last(log, subject)
        assert found is not None and found.sequence == stored.sequence

    async def test_an_id_is_forgotten_when_its_window_ends(self, harness: Harness) -> None:
        name = f"SHORT_{harness.tenant}"
        spec = topology.StreamSpec(
            name=name,
            subjects=(f"short.{harness.tenant}",),
            description="A short window",
            duplicate_window_s=1,
            replicas=harness.replicas,
        )
        await harness.bus.ensure(topology.Topology(streams=(spec,)))
        await harness.bus.publish(f"short.{harness.tenant}", b"1", msg_id="id")
        assert (await harness.bus.publish(f"short.{harness.tenant}", b"1", msg_id="id")).duplicate

        async def stored() -> bool:
            return not (await harness.bus.publish(f"short.{harness.tenant}", b"1", msg_id="id")).duplicate

        await eventually(harness, stored, "the id is forgotten")

    async def test_pipelined_publishes_each_get_their_own_answer(self, harness: Harness) -> None:
        bus = harness.bus
        acks = await asyncio.gather(
            *(bus.publish(self.event(harness, f"e{n}"), b"%d" % n, expect_last=0) for n in range(200))
        )
        stored = {m.sequence: m for m in await bus.read(self.log(harness), 0, f"tether.event.{harness.tenant}.>")}
        assert len(stored) == 200
        assert [stored[ack.sequence].data for ack in acks] == [b"%d" % n for n in range(200)]

    async def test_headers_come_back_and_hostile_ones_are_refused(self, harness: Harness) -> None:
        bus, subject = harness.bus, self.event(harness)
        await bus.publish(subject, b"1", headers={"Tether-Kind": "a: b, ü"})
        for leader in (True, False):
            found = await bus.last(self.log(harness), subject, leader=leader)
            assert found is not None and found.headers["Tether-Kind"] == "a: b, ü"
        for bad in ({"K": "a\r\nNats-Msg-Id: x"}, {"K\r\n": "v"}, {"": "v"}, {"a b": "v"}):
            with pytest.raises(BusError):
                await bus.publish(subject, b"1", headers=bad)

    async def test_what_is_too_large_is_refused_before_it_is_sent(self, harness: Harness) -> None:
        bus, subject = harness.bus, self.event(harness)
        with pytest.raises(MessageTooLargeError):
            await bus.publish(subject, b"x" * (bus.payload_bytes_max + 5000))
        with pytest.raises(MessageTooLargeError):
            await bus.publish(subject, b"x" * (1 << 20), headers={"K": "v"})
        assert bus.connected
        await bus.publish(subject, b"x" * bus.payload_bytes_max, msg_id="large", expect_last=0)

    async def test_a_streams_own_size_limit_is_too_large(self, harness: Harness) -> None:
        spec = topology.StreamSpec(
            name=f"SMALL_{harness.tenant}",
            subjects=(f"small.{harness.tenant}",),
            description="Small messages",
            max_msg_size_bytes=100,
            replicas=harness.replicas,
        )
        await harness.bus.ensure(topology.Topology(streams=(spec,)))
        with pytest.raises(MessageTooLargeError):
            await harness.bus.publish(f"small.{harness.tenant}", b"x" * 101)
        await harness.bus.publish(f"small.{harness.tenant}", b"x" * 100)

    async def test_a_missing_stream_is_unavailable_and_never_a_failure(self, harness: Harness) -> None:
        bus = harness.bus
        with pytest.raises(BusUnavailableError):
            await bus.publish(f"nowhere.{harness.tenant}", b"1")
        assert await bus.state(f"NOWHERE_{harness.tenant}") is None
        assert await bus.consumer(self.log(harness), "nobody") is None
        for call in (
            bus.last("NOWHERE", "x"),
            bus.last("NOWHERE", "x", leader=False),
            bus.at("NOWHERE", 1),
            bus.next_after("NOWHERE", 0, ">"),
            bus.read("NOWHERE", 0, ">"),
            bus.subjects("NOWHERE", ">"),
            bus.purge("NOWHERE", ">"),
        ):
            with pytest.raises(BusUnavailableError):
                await call

    # --- reading ---

    async def test_single_reads_find_the_last_the_exact_and_the_next_message(self, harness: Harness) -> None:
        bus, log = harness.bus, self.log(harness)
        one, two = self.event(harness, "e1"), self.event(harness, "e2")
        a = await bus.publish(one, b"a")
        b = await bus.publish(two, b"b")
        c = await bus.publish(one, b"c")
        last = await bus.last(log, one)
        assert last is not None and (last.sequence, last.data, last.subject) == (c.sequence, b"c", one)

        async def direct() -> StoredMessage | None:
            found = await bus.last(log, one, leader=False)
            return found if found == last else None

        await eventually(harness, direct, "a direct get gives the same message")
        exact = await bus.at(log, b.sequence)
        assert exact is not None and (exact.data, exact.subject) == (b"b", two)
        assert await bus.at(log, c.sequence + 1) is None
        assert await bus.at(log, 0) is None
        following = await bus.next_after(log, a.sequence, one)
        assert following == last
        following = await bus.next_after(log, 0, subjects.conversation_events(harness.tenant, "w", "c"))
        assert following is not None and following.sequence == a.sequence
        assert await bus.next_after(log, c.sequence, one) is None
        assert await bus.last(log, self.event(harness, "e3"), leader=True) is None
        assert await bus.last(log, self.event(harness, "e3"), leader=False) is None
        state = await bus.state(log)
        assert state is not None
        assert (state.messages, state.first_sequence, state.last_sequence) == (3, a.sequence, c.sequence)

    async def test_batches_come_in_order_filtered_and_bounded(self, harness: Harness) -> None:
        bus, log = harness.bus, self.log(harness)
        sequences = [(await bus.publish(self.event(harness, f"e{n % 3}"), b"x" * 1000)).sequence for n in range(30)]
        everything = f"tether.event.{harness.tenant}.>"

        async def all_of_them() -> bool:
            return len(await bus.read(log, 0, everything)) == 30

        await eventually(harness, all_of_them, "followers have everything")
        assert [m.sequence for m in await bus.read(log, 0, everything)] == sequences
        assert [m.sequence for m in await bus.read(log, sequences[9], everything, limit=5)] == sequences[10:15]
        assert [m.sequence for m in await bus.read(log, 0, self.event(harness, "e1"))] == sequences[1::3]
        assert await bus.read(log, sequences[-1], everything) in ((), [])
        assert list(await bus.read(log, 0, self.event(harness, "other"))) == []
        small = await bus.read(log, 0, everything, bytes_max=5000)
        assert 1 <= len(small) <= 6
        assert [m.sequence for m in small] == sequences[: len(small)]

    async def test_subjects_are_counted_by_pattern(self, harness: Harness) -> None:
        bus, log = harness.bus, self.log(harness)
        for n in range(5):
            await bus.publish(self.event(harness, f"e{n % 2}"), b"x")
        await bus.publish(subjects.event(harness.tenant, "w", "c2", "e9"), b"x")
        counts = await bus.subjects(log, subjects.conversation_events(harness.tenant, "w", "c"))
        assert dict(counts) == {self.event(harness, "e0"): 3, self.event(harness, "e1"): 2}
        assert dict(await bus.subjects(log, self.event(harness, "none"))) == {}

    async def test_a_purge_takes_one_subject_below_a_sequence(self, harness: Harness) -> None:
        bus, log, subject = harness.bus, self.log(harness), self.event(harness)
        sequences = [(await bus.publish(subject, b"%d" % n)).sequence for n in range(4)]
        await bus.publish(self.event(harness, "e2"), b"stays")
        assert await bus.purge(log, subject, up_to=sequences[2]) == 2
        left = await bus.next_after(log, 0, subject)
        assert left is not None and left.sequence == sequences[2]
        assert await bus.purge(log, subject) == 2
        assert await bus.last(log, self.event(harness, "e2")) is not None

    # --- live copies ---

    async def test_live_copies_carry_the_chain_of_their_exact_subject(self, harness: Harness) -> None:
        bus, log = harness.bus, self.log(harness)
        live = await bus.live(f"tether.live.{harness.tenant}.>")
        await bus.barrier()
        await harness.interest(live)
        one, two = self.event(harness, "e1"), self.event(harness, "e2")
        a = await bus.publish(one, b"a")
        b = await bus.publish(two, b"b")
        c = await bus.publish(one, b"c")
        await bus.purge(log, one)
        d = await bus.publish(one, b"d", headers={"K": "v"})
        got = [await live.next(WITHIN_S) for _ in range(4)]
        assert [(m.sequence, m.previous, m.data) for m in got if m] == [
            (a.sequence, 0, b"a"),
            (b.sequence, 0, b"b"),
            (c.sequence, a.sequence, b"c"),
            (d.sequence, 0, b"d"),
        ]
        copy, stored = got[3], await bus.last(log, one)
        assert copy is not None and stored is not None
        assert copy.subject == one.replace("tether.event.", "tether.live.")
        assert copy.stored_at_ns == stored.stored_at_ns > 0
        assert copy.headers["K"] == "v"
        await live.close()
        assert await live.next(0.01) is None

    async def test_a_reader_that_is_too_slow_is_told(self, harness: Harness) -> None:
        bus = harness.bus
        live = await bus.live(f"tether.live.{harness.tenant}.>", buffer_bytes_max=20_000)
        core = await bus.subscribe(f"core.{harness.tenant}", buffer_bytes_max=20_000)
        await bus.barrier()
        await harness.interest(live)
        for n in range(30):
            await bus.publish(self.event(harness), b"x" * 1000)
            await bus.send(f"core.{harness.tenant}", b"%1000d" % n)
        await bus.barrier()
        for subscription in (live, core):
            with pytest.raises(SlowReaderError):
                async for _ in subscription:
                    pass
            with pytest.raises(SlowReaderError):
                await subscription.next(0.1)
            await subscription.close()

    # --- core ---

    async def test_after_a_barrier_nothing_that_others_send_is_missed(self, harness: Harness) -> None:
        other = await harness.connect()
        for n in range(20):
            subscription = await harness.bus.subscribe(f"core.{harness.tenant}.{n}")
            await harness.bus.barrier()
            await other.send(f"core.{harness.tenant}.{n}", b"%d" % n, headers={"K": str(n)})
            message = await subscription.next(WITHIN_S)
            assert message is not None and (message.data, message.headers["K"]) == (b"%d" % n, str(n))
            await subscription.close()

    async def test_questions_are_answered_unanswered_or_unheard(self, harness: Harness) -> None:
        asker = await harness.connect()
        subject = f"ask.{harness.tenant}"
        with pytest.raises(NoReplyError) as none:
            await asker.request(subject, b"?", timeout_s=5.0)
        assert none.value.no_responders

        async def handler(message: Message) -> bytes | None:
            if message.data == b"silent":
                return None
            if message.data == b"broken":
                raise ValueError("a broken question")
            return message.data + b"!"

        async with harness.bus.serve(f"{subject}", handler, queue="q", name="asked"):
            answer = await asker.request(subject, b"hello", timeout_s=5.0)
            assert answer.data == b"hello!"
            for question in (b"silent", b"broken"):
                with pytest.raises(NoReplyError) as silence:
                    await asker.request(subject, question, timeout_s=0.2)
                assert not silence.value.no_responders
            answers = await asyncio.gather(*(asker.request(subject, b"%d" % n, timeout_s=5.0) for n in range(50)))
            assert [a.data for a in answers] == [b"%d!" % n for n in range(50)]

        async def gone() -> bool:
            try:
                await asker.request(subject, b"?", timeout_s=0.2)
            except NoReplyError as error:
                return error.no_responders
            return False

        await eventually(harness, gone, "the endpoint is gone")

    async def test_a_queue_group_shares_and_concurrency_is_bounded(self, harness: Harness) -> None:
        subject, other = f"work.{harness.tenant}", await harness.connect()
        running, most, served = 0, 0, 0
        gate = asyncio.Event()

        async def handler(message: Message) -> bytes | None:
            nonlocal running, most, served
            running, served = running + 1, served + 1
            most = max(most, running)
            await gate.wait()
            running -= 1
            return b"done"

        async with (
            harness.bus.serve(subject, handler, queue="q", name="worker", concurrency_max=2),
            other.serve(subject, handler, queue="q", name="worker", concurrency_max=2),
        ):
            asker = await harness.connect()
            asking = [asyncio.create_task(asker.request(subject, b"?", timeout_s=5.0)) for _ in range(20)]

            async def full() -> bool:
                return running >= 2

            await eventually(harness, full, "handlers run")
            gate.set()
            assert [m.data for m in await asyncio.gather(*asking)] == [b"done"] * 20
        assert served == 20
        assert most <= 4

    async def test_a_closed_bus_refuses_and_ends_its_readers(self, harness: Harness) -> None:
        other = await harness.connect()
        subscription = await other.subscribe(f"core.{harness.tenant}")
        jobs = other.jobs(self.log(harness), "nobody")
        reading = asyncio.create_task(subscription.next())
        working = asyncio.create_task(anext(jobs, None))
        await asyncio.sleep(0)
        await other.close()
        assert not other.connected
        async with asyncio.timeout(WITHIN_S):
            assert await reading is None
            assert await working is None
        with pytest.raises(BusUnavailableError):
            await other.publish(self.event(harness), b"1")
        with pytest.raises(BusUnavailableError):
            await other.subscribe("x")

    # --- work queues ---

    async def test_an_acked_job_leaves_the_queue_and_a_full_subject_refuses(self, harness: Harness) -> None:
        bus = harness.bus
        stream, prefix = await self.queue(harness)
        for n in range(3):
            await bus.publish(f"{prefix}.a", b"%d" % n)
        with pytest.raises(BusUnavailableError) as full:
            await bus.publish(f"{prefix}.a", b"3")
        assert full.value.code == 10077
        await bus.publish(f"{prefix}.b", b"b")
        jobs = bus.jobs(stream, "worker")
        got = [await take(jobs) for _ in range(4)]
        assert [(job.message.data, job.deliveries) for job in got] == [(b"0", 1), (b"1", 1), (b"2", 1), (b"b", 1)]
        assert got[0].message.subject == f"{prefix}.a"
        assert got[0].message.stored_at_ns > 0
        assert await got[0].ack(confirm=True)
        await got[1].ack()
        await got[2].term("not wanted")
        assert await got[3].ack(confirm=True)

        async def empty() -> bool:
            state = await bus.state(stream)
            return state is not None and state.messages == 0

        await eventually(harness, empty, "settled jobs are gone")
        await bus.publish(f"{prefix}.a", b"again")
        assert (await take(jobs)).message.data == b"again"
        await jobs.aclose()

    async def test_a_nak_returns_after_its_delay_while_others_go_on(self, harness: Harness) -> None:
        bus = harness.bus
        stream, prefix = await self.queue(harness, ack_wait_s=30.0)
        await bus.publish(f"{prefix}.a", b"a")
        await bus.publish(f"{prefix}.b", b"b")
        jobs = bus.jobs(stream, "worker")
        first = await take(jobs)
        assert first.message.data == b"a"
        await first.nak(0.3)
        second = await take(jobs)
        assert second.message.data == b"b"
        await second.ack(confirm=True)
        waiting = asyncio.create_task(take(jobs))
        await harness.pause(0.05)
        assert not waiting.done()

        async def returned() -> bool:
            return waiting.done()

        await eventually(harness, returned, "the job is back")
        again = await waiting
        assert (again.message.data, again.deliveries) == (b"a", 2)
        assert again.message.sequence == first.message.sequence
        await again.nak(0)
        third = await take(jobs)
        assert third.deliveries == 3
        await third.ack(confirm=True)
        await jobs.aclose()

    async def test_an_unsettled_job_comes_again_unless_it_is_in_progress(self, harness: Harness) -> None:
        bus = harness.bus
        stream, prefix = await self.queue(harness, ack_wait_s=1.0)
        await bus.publish(f"{prefix}.a", b"a")
        jobs = bus.jobs(stream, "worker")
        first = await take(jobs)
        waiting = asyncio.create_task(take(jobs))
        for _ in range(4):
            await harness.pause(0.4)
            await first.in_progress()
        assert not waiting.done()

        async def returned() -> bool:
            return waiting.done()

        await eventually(harness, returned, "the ack wait ends")
        again = await waiting
        assert again.deliveries == 2
        assert await again.ack(confirm=True)
        await jobs.aclose()

    async def test_unsettled_jobs_are_bounded_and_a_second_worker_takes_the_rest(self, harness: Harness) -> None:
        bus, other = harness.bus, await harness.connect()
        stream, prefix = await self.queue(harness, ack_wait_s=30.0)
        for n in range(6):
            await bus.publish(f"{prefix}.s{n}", b"%d" % n)
        mine, theirs = bus.jobs(stream, "worker", in_flight_max=2), other.jobs(stream, "worker", in_flight_max=10)
        first, second = await take(mine), await take(mine)
        more = asyncio.create_task(take(mine))
        rest = [await take(theirs) for _ in range(4)]
        assert sorted(job.message.data for job in [first, second, *rest]) == [b"%d" % n for n in range(6)]
        await bus.publish(f"{prefix}.new", b"new")
        taken = await take(theirs)
        assert taken.message.data == b"new"
        assert not more.done()
        await first.ack(confirm=True)
        for job in (second, taken, *rest):
            await job.ack(confirm=True)
        more.cancel()
        await asyncio.gather(more, return_exceptions=True)

    async def test_jobs_begin_when_stream_and_consumer_appear(self, harness: Harness) -> None:
        jobs = harness.bus.jobs(f"QUEUE_{harness.tenant}", "worker")
        waiting = asyncio.create_task(take(jobs))
        await harness.pause(0.05)
        stream, prefix = await self.queue(harness)
        await harness.bus.publish(f"{prefix}.a", b"a")

        async def begun() -> bool:
            return waiting.done()

        await eventually(harness, begun, "the first job")
        assert (await waiting).message.data == b"a"
        assert stream == f"QUEUE_{harness.tenant}"
        await jobs.aclose()

    async def test_a_projections_consumer_keeps_its_ack_floor_in_the_log(self, harness: Harness) -> None:
        bus, log = harness.bus, self.log(harness)
        spec = topology.projection(harness.tenant, "db1", 0)
        await bus.ensure(topology.Topology(streams=(), consumers=(spec,)))
        sequences = [(await bus.publish(self.event(harness, f"e{n}"), b"x")).sequence for n in range(3)]
        jobs = bus.jobs(log, spec.durable)
        got = [await take(jobs) for _ in range(3)]
        await got[1].ack(confirm=True)
        state = await bus.consumer(log, spec.durable)
        assert state is not None
        assert (state.ack_floor, state.delivered, state.pending, state.ack_pending) == (0, sequences[2], 0, 2)
        await got[0].ack(confirm=True)
        await got[2].ack(confirm=True)
        state = await bus.consumer(log, spec.durable)
        assert state is not None
        assert (state.ack_floor, state.ack_pending) == (sequences[2], 0)
        stream = await bus.state(log)
        assert stream is not None and stream.messages == 3
        await jobs.aclose()
        await bus.delete_consumer(log, spec.durable)
        assert await bus.consumer(log, spec.durable) is None
        await bus.delete_consumer(log, spec.durable)

    # --- buckets ---

    async def test_a_bucket_creates_updates_and_deletes_by_compare_and_set(self, harness: Harness) -> None:
        bucket = await self.bucket(harness, history=4)
        created = await bucket.create("a.b", {"n": 1}, op="op1")
        assert await bucket.create("a.b", {"n": 1}, op="op1") == replace(
            created, stored_at_ns=(await self.stored_at(bucket, "a.b"))
        )
        with pytest.raises(Conflict) as lost:
            await bucket.create("a.b", {"n": 9}, op="op9")
        assert lost.value.current is not None and lost.value.current.value["n"] == 1
        updated = await bucket.update("a.b", {"n": 2}, op="op2", revision=created.revision)
        retried = await bucket.update("a.b", {"n": 2}, op="op2", revision=created.revision)
        assert retried.revision == updated.revision
        with pytest.raises(Conflict):
            await bucket.update("a.b", {"n": 3}, op="op3", revision=created.revision)
        found = await bucket.get("a.b")
        assert found is not None and (found.value, found.revision) == ({"n": 2, "op": "op2"}, updated.revision)
        await bucket.create("a.c", {"n": 7}, op="op4")
        assert [(e.key, e.value["n"]) async for e in bucket.keys("a.*")][-2:] == [("a.b", 2), ("a.c", 7)]
        with pytest.raises(Conflict):
            await bucket.delete("a.b", revision=created.revision)
        await bucket.delete("a.b", revision=updated.revision)
        assert await bucket.get("a.b") is None
        again = await bucket.create("a.b", {"n": 1}, op="op5")
        assert again.revision > updated.revision
        assert await bucket.get("none") is None

    async def stored_at(self, bucket: Bucket, key: str) -> int:
        entry = await bucket.get(key)
        assert entry is not None
        return entry.stored_at_ns

    async def test_a_key_with_a_ttl_expires_and_a_renewal_keeps_it(self, harness: Harness) -> None:
        bucket = await self.bucket(harness)
        entry = await bucket.create("lease", {"n": 1}, op="op1", ttl_s=1)
        for n in range(4):
            await harness.pause(0.4)
            entry = await bucket.update("lease", {"n": n}, op=f"renew{n}", revision=entry.revision, ttl_s=1)
        assert await bucket.get("lease") is not None

        async def expired() -> bool:
            return await bucket.get("lease") is None

        await eventually(harness, expired, "the key expires")
        assert (await bucket.create("lease", {"n": 1}, op="op2", ttl_s=1)).revision > entry.revision

    async def test_only_one_of_many_writers_wins_a_key(self, harness: Harness) -> None:
        bucket = await self.bucket(harness)

        async def write(n: int) -> bool:
            try:
                await bucket.create("one", {"n": n}, op=f"op{n}")
            except Conflict:
                return False
            return True

        won = await asyncio.gather(*(write(n) for n in range(10)))
        assert sum(won) == 1

    # --- topology ---

    async def test_ensure_is_idempotent_even_for_two_at_once_and_diff_is_silent(self, harness: Harness) -> None:
        other = await harness.connect()
        topo = topology.tenant(f"{harness.tenant}b", replicas=harness.replicas, max_bytes=1 << 20)
        await asyncio.gather(harness.bus.ensure(topo), other.ensure(topo), harness.bus.ensure(topo))
        assert list(await other.diff(topo)) == []
        before = await other.state(topo.streams[0].name)
        await other.ensure(topo)
        after = await other.state(topo.streams[0].name)
        assert before is not None and after is not None and before.created == after.created

    async def test_diff_names_object_field_expected_and_found(self, harness: Harness) -> None:
        bus = harness.bus
        spec = topology.StreamSpec(
            name=f"DIFF_{harness.tenant}",
            subjects=(f"diff.{harness.tenant}",),
            description="As it was",
            max_age_s=3600,
            replicas=harness.replicas,
        )
        consumer = topology.ConsumerSpec(stream=spec.name, durable="c", description="A consumer")
        topo = topology.Topology(streams=(spec,), consumers=(consumer,))
        assert list(await bus.diff(topo)) == [
            f"stream {spec.name} does not exist",
            f"consumer c of stream {spec.name} does not exist",
        ]
        await bus.ensure(topo)
        assert list(await bus.diff(topo)) == []
        changed = topology.Topology(
            streams=(replace(spec, max_age_s=7200, description="As it is"),),
            consumers=(replace(consumer, ack_wait_s=7.0),),
        )
        assert list(await bus.diff(changed)) == [
            f"stream {spec.name}: description is 'As it was', expected 'As it is'",
            f"stream {spec.name}: max_age is '3600 s', expected '7200 s'",
            f"consumer c of stream {spec.name}: ack_wait is '30 s', expected '7 s'",
        ]

    async def test_ensure_goes_upward_only_and_keeps_what_it_does_not_know(self, harness: Harness) -> None:
        bus = harness.bus
        spec = topology.StreamSpec(
            name=f"UP_{harness.tenant}",
            subjects=(f"up.{harness.tenant}",),
            description="Version 1",
            metadata=(("operator", "kept"),),
            replicas=harness.replicas,
        )
        await bus.ensure(topology.Topology(streams=(spec,), version=1))
        newer = topology.Topology(
            streams=(replace(spec, description="Version 2", max_age_s=60, metadata=(("added", "yes"),)),), version=2
        )
        await bus.ensure(newer)
        assert list(await bus.diff(newer)) == []
        older = topology.Topology(streams=(spec,), version=1)
        await bus.ensure(older)
        assert list(await bus.diff(newer)) == []
        lines = "\n".join(await bus.diff(older))
        assert "operator" not in lines  # the key that version 2 does not know is still there
        assert "tether_topology is '2', expected '1'" in lines

    async def test_a_change_that_the_server_refuses_names_the_object(self, harness: Harness) -> None:
        stream, _ = await self.queue(harness)
        spec = topology.StreamSpec(
            name=stream, subjects=(f"queue.{harness.tenant}.>",), description="No queue", replicas=harness.replicas
        )
        with pytest.raises(BusError, match=f"stream {stream}"):
            await harness.bus.ensure(topology.Topology(streams=(spec,)))

    async def test_a_stream_that_is_made_anew_has_another_creation_time(self, harness: Harness) -> None:
        bus, log = harness.bus, self.log(harness)
        await bus.publish(self.event(harness), b"1", msg_id="id")
        before = await bus.state(log)
        await bus.delete_stream(log)
        await bus.delete_stream(log)
        assert await bus.state(log) is None
        await bus.ensure(topology.tenant(harness.tenant, replicas=harness.replicas, max_bytes=16 << 20))
        after = await bus.state(log)
        assert before is not None and after is not None
        assert before.created != after.created
        assert (await bus.publish(self.event(harness), b"1", msg_id="id", expect_last=0)).sequence == 1
