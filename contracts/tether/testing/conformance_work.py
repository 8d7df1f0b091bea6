"""Conformance of core messages, work queues, buckets and topology. See `tether.testing.conformance`."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tether import topology
from tether.errors import (
    BusError,
    BusUnavailableError,
    NoReplyError,
)
from tether.kv import Bucket, Conflict
from tether.ports import Message
from tether.testing.conformance_base import WITHIN_S, ConformanceBase, Harness, eventually, take


class WorkConformance(ConformanceBase):
    """Test methods are sentences about the port."""

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
        whole = topology.tenant(harness.tenant, replicas=harness.replicas, max_bytes=16 << 20)
        await bus.ensure(topology.Topology(streams=whole.streams[:1]))
        after = await bus.state(log)
        assert before is not None and after is not None
        assert before.created != after.created
        assert (await bus.publish(self.event(harness), b"1", msg_id="id", expect_last=0)).sequence == 1
