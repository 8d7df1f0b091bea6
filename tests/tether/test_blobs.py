"""Blobs are read back whole, or not at all."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tether import subjects, topology
from tether.blobs import MANIFEST, Manifest, chunk, chunk_count, encode_manifest, read_blob, snapshot_of
from tether.events import BlobRef
from tether.fold import ExecutionState, TextItem
from tether.ids import ExecutionTarget
from tether.limits import BLOB_CHUNK_BYTES
from tether.snapshot import Snapshot, Watermark, take
from tether.testing import MemoryBus, MemoryServer
from tether_collector.blobs import BlobStore, blob_of_text

TENANT, WORKSPACE = "acme", "w1"
MAX = 1 << 30


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    found = MemoryBus(MemoryServer())
    await found.ensure(topology.tenant(TENANT, max_bytes=256 << 20))
    yield found


async def part(bus: MemoryBus, digest: str, name: str, data: bytes) -> None:
    await bus.publish(subjects.blob(TENANT, WORKSPACE, "artifact", digest, name), data, expect_last=0)


async def stored(
    bus: MemoryBus, data: bytes, *, spoil: Callable[[int, bytes], bytes | None] = lambda _, data: data
) -> BlobRef:
    """Written part by part; `spoil` changes a chunk or leaves it out."""
    digest = hashlib.sha256(data).hexdigest()
    count = chunk_count(len(data))
    for number in range(count):
        piece = spoil(number, chunk(data, number))
        if piece is not None:
            await part(bus, digest, str(number), piece)
    await part(
        bus, digest, MANIFEST, encode_manifest(Manifest(digest=digest, bytes=len(data), chunks=count, media="text"))
    )
    return BlobRef(digest=digest, bytes=len(data))


@pytest.mark.parametrize("size_bytes", [0, 1, BLOB_CHUNK_BYTES, BLOB_CHUNK_BYTES + 1, 12 * BLOB_CHUNK_BYTES - 7])
async def test_what_a_collector_wrote_is_read_back(bus: MemoryBus, size_bytes: int) -> None:
    blob, reference = blob_of_text("x" * size_bytes, "text")
    await BlobStore(bus, TENANT, WORKSPACE).put(blob)
    ref = BlobRef.model_validate(reference)
    assert await read_blob(bus, TENANT, WORKSPACE, ref, bytes_max=MAX) == b"x" * size_bytes
    assert await read_blob(bus, TENANT, "other", ref, bytes_max=MAX) is None


async def test_a_blob_that_is_larger_than_the_reader_takes_is_not_read(bus: MemoryBus) -> None:
    reference = await stored(bus, b"x" * 1000)
    assert await read_blob(bus, TENANT, WORKSPACE, reference, bytes_max=999) is None
    lie = BlobRef(digest=reference.digest, bytes=10)
    assert await read_blob(bus, TENANT, WORKSPACE, lie, bytes_max=999) is None


async def test_a_blob_with_a_chunk_missing_or_damaged_is_not_given_out(bus: MemoryBus) -> None:
    data = bytes(range(256)) * 1200
    missing = await stored(bus, data, spoil=lambda number, piece: None if number == 1 else piece)
    assert await read_blob(bus, TENANT, WORKSPACE, missing, bytes_max=MAX) is None
    damaged = await stored(bus, data[1:], spoil=lambda _, piece: piece[::-1])
    assert await read_blob(bus, TENANT, WORKSPACE, damaged, bytes_max=MAX) is None


async def test_a_blob_without_its_manifest_is_not_there_yet(bus: MemoryBus) -> None:
    data = b"abc"
    digest = hashlib.sha256(data).hexdigest()
    await part(bus, digest, "0", data)
    assert await read_blob(bus, TENANT, WORKSPACE, BlobRef(digest=digest, bytes=3), bytes_max=MAX) is None


async def test_a_follower_that_lags_is_asked_again(bus: MemoryBus) -> None:
    server = MemoryServer(replicated=True)
    bus = MemoryBus(server)
    await bus.ensure(topology.tenant(TENANT, max_bytes=64 << 20))
    reference = await stored(bus, b"x" * (2 * BLOB_CHUNK_BYTES))
    server.hold_followers(subjects.blobs_stream(TENANT), 1)
    reading = asyncio.create_task(read_blob(bus, TENANT, WORKSPACE, reference, bytes_max=MAX), name="read")
    await asyncio.sleep(0)
    server.hold_followers(subjects.blobs_stream(TENANT), None)
    assert await reading == b"x" * (2 * BLOB_CHUNK_BYTES)


def snapshot() -> Snapshot:
    target = ExecutionTarget(
        tenant=TENANT,
        workspace=WORKSPACE,
        conversation="c1",
        response="r1",
        response_generation=1,
        execution="e1",
        execution_generation=1,
        sandbox="sbx",
    )
    state = ExecutionState(applied=3, items=[TextItem(id="s1", state="completed", text="long " * 100_000)])
    return take(target, state, Watermark(ordinal=3, sequence=9, tag=1), captured_at=77)


async def test_a_snapshot_is_taken_from_the_reply_or_from_the_blob_that_it_names(bus: MemoryBus) -> None:
    taken = snapshot()
    whole: dict[str, Any] = {"snapshot": taken.model_dump(mode="json", exclude_none=True)}
    assert await snapshot_of(bus, TENANT, WORKSPACE, whole) == taken
    blob, reference = blob_of_text(taken.model_dump_json(exclude_none=True), "json")
    assert await snapshot_of(bus, TENANT, WORKSPACE, {"blob": reference}) is None
    await BlobStore(bus, TENANT, WORKSPACE).put(blob)
    assert await snapshot_of(bus, TENANT, WORKSPACE, {"blob": reference}) == taken
    for nonsense in (None, {}, {"blob": 3}, {"blob": {"digest": "a.b", "bytes": 1}}, {"snapshot": {"v": 2}}):
        assert await snapshot_of(bus, TENANT, WORKSPACE, nonsense) is None
