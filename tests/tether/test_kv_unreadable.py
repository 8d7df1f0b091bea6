"""What lies in a bucket and is no record: never decided by, never in the way of the others."""

from __future__ import annotations

import pytest

from tether import subjects, topology
from tether.client import Client
from tether.errors import Code, ProblemError, UnreadableRecordError
from tether.kv import Bucket
from tether.owner import OwnerRecord
from tether.testing import MemoryBus, MemoryServer

RUBBISH = [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"state":"unheard"}', b'{"prompt_sequence":"*"}']


@pytest.mark.parametrize("data", RUBBISH)
async def test_a_record_that_is_none_is_an_error_by_name_and_left_out_of_lists(data: bytes) -> None:
    async with MemoryBus(MemoryServer()) as bus:
        await bus.ensure(topology.base())
        bucket = Bucket(bus, subjects.OWNERS)
        await bucket.create("t.w.good", OwnerRecord(generation=3).value(), op="op-1")
        await bus.publish(f"$KV.{subjects.OWNERS}.t.w.bad", data)
        with pytest.raises(UnreadableRecordError) as told:
            await bucket.record("t.w.bad", OwnerRecord)
        assert told.value.subject == f"{subjects.OWNERS}/t.w.bad"
        found = [(entry.key, record.generation) async for entry, record in bucket.records(OwnerRecord, "t.>")]
        assert found == [("t.w.good", 3)]
        # Who owns the key replaces exactly what was read.
        await bucket.update("t.w.bad", OwnerRecord().value(), op="op-2", revision=told.value.revision)
        assert await bucket.record("t.w.bad", OwnerRecord) == OwnerRecord(op="op-2")


@pytest.mark.parametrize("bucket", [subjects.OWNERS, subjects.SANDBOXES, subjects.CONVERSATIONS])
@pytest.mark.parametrize("data", [b"[]", b'{"workspace":[],"state":7,"tenant":{}}'])
async def test_lists_over_nats_go_on_without_what_cannot_be_read(tenant: str, bucket: str, data: bytes) -> None:
    keys = {
        subjects.OWNERS: [f"{tenant}.w.bad"],
        subjects.SANDBOXES: [f"{tenant}.bad", f"{tenant}.bad.sbx"],
        subjects.CONVERSATIONS: [f"{tenant}.bad"],
    }
    async with MemoryBus(MemoryServer()) as bus, Client.nats(bus, tenant=tenant) as client:
        await bus.ensure(topology.base())
        await bus.ensure(topology.tenant(tenant))
        await Bucket(bus, subjects.CONVERSATIONS).create(f"{tenant}.good", {"v": 1, "workspace": "w"}, op="op")
        for key in keys[bucket]:
            await bus.publish(f"$KV.{bucket}.{key}", data)
        assert [view.conversation for view in (await client.conversations()).conversations] == ["good"]
        assert (await client.executions()).executions == []
        assert (await client.sandboxes()).sandboxes == []
        with pytest.raises(ProblemError) as none:
            await client.stop("exe_none")
        assert none.value.problem.code is Code.NOT_FOUND
