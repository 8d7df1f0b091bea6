"""Conformance of the log: compare-and-set, deduplication, limits, reads, live copies."""

from __future__ import annotations

import asyncio

import pytest

from tether import subjects, topology
from tether.errors import (
    BusError,
    BusUnavailableError,
    MessageTooLargeError,
    SlowReaderError,
    WrongLastSequenceError,
)
from tether.ports import StoredMessage
from tether.testing.conformance_base import WITHIN_S, ConformanceBase, Harness, eventually
from tether.testing.memory_stream import size_of


class LogConformance(ConformanceBase):
    """Test methods are sentences about the port."""

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

    async def test_a_subject_that_would_break_the_protocol_is_refused(self, harness: Harness) -> None:
        bus = harness.bus
        for bad in ("", "a b", "a\r\nPUB x 1", "a\tb", "a\0"):
            with pytest.raises(BusError):
                await bus.publish(bad, b"1")
            with pytest.raises(BusError):
                await bus.send(bad, b"1")
            with pytest.raises(BusError):
                await bus.request(bad, b"1", timeout_s=1.0)
            with pytest.raises(BusError):
                await bus.subscribe(bad)
        assert bus.connected
        await bus.barrier()

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

    async def test_an_erased_message_is_gone_and_its_neighbours_keep_their_places(self, harness: Harness) -> None:
        bus, log, subject = harness.bus, self.log(harness), self.event(harness)
        sequences = [(await bus.publish(subject, b"%d" % n)).sequence for n in range(3)]
        assert await bus.erase(log, sequences[1])
        assert await bus.at(log, sequences[1]) is None
        left = [message.sequence for message in await bus.read(log, sequences[0] - 1, subject)]
        assert left == [sequences[0], sequences[2]]
        assert not await bus.erase(log, sequences[1]), "what is not there is no failure"
        assert not await bus.erase(log, sequences[2] + 1_000_000)
        assert (await bus.publish(subject, b"3", expect_last=sequences[2])).sequence > sequences[2]

    async def test_size_limits_count_bytes_alike_and_drop_the_oldest(self, harness: Harness) -> None:
        name, subject = f"SIZE_{harness.tenant}", f"size.{harness.tenant}"
        spec = topology.StreamSpec(
            name=name, subjects=(subject,), description="Small", max_bytes=10_000, replicas=harness.replicas
        )
        await harness.bus.ensure(topology.Topology(streams=(spec,)))
        await harness.bus.publish(subject, b"x" * 100)
        state = await harness.bus.state(name)
        assert state is not None and state.bytes == size_of(subject, b"x" * 100, {})
        await harness.bus.publish(subject, b"x" * 100, headers={"Key": "value"})
        state = await harness.bus.state(name)
        assert state is not None
        assert state.bytes == size_of(subject, b"x" * 100, {}) + size_of(subject, b"x" * 100, {"Key": "value"})
        last = [await harness.bus.publish(subject, b"x" * 1000) for _ in range(20)][-1].sequence
        state = await harness.bus.state(name)
        assert state is not None
        kept = 10_000 // size_of(subject, b"x" * 1000, {})
        assert (state.messages, state.first_sequence, state.last_sequence) == (kept, last - kept + 1, last)

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

    async def test_live_copies_that_a_reader_does_not_keep_never_wait_for_it(self, harness: Harness) -> None:
        bus = harness.bus
        live = await bus.live(
            f"tether.live.{harness.tenant}.>", buffer_bytes_max=20_000, keep=lambda data: data.startswith(b"k")
        )
        await bus.barrier()
        await harness.interest(live)
        for n in range(30):  # more than its buffer takes
            await bus.publish(self.event(harness), b"x" * 1000)
            await bus.publish(self.event(harness), b"k%d" % n)
        got = [await live.next(WITHIN_S) for _ in range(30)]
        assert [copy.data for copy in got if copy] == [b"k%d" % n for n in range(30)]
        await live.close()

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
