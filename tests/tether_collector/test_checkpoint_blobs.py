"""Files in the blob store: in pieces, resumable, and whole only if their digest says so."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tether import subjects, topology
from tether.bus import NatsBus
from tether.checkpoint import digest_of
from tether.limits import BLOB_CHUNK_BYTES
from tether_collector.checkpoint_blobs import (
    BlobStoreError,
    CheckpointBlobs,
    Content,
    MissingBlobError,
    data_content,
    file_content,
)
from tether_collector.disk_thread import DiskThread

SIZE = 3 * BLOB_CHUNK_BYTES + 77


@pytest.fixture
async def disk() -> AsyncIterator[DiskThread]:
    thread = DiskThread("test")
    yield thread
    thread.close()


@pytest.fixture
async def store(bus: NatsBus, tenant: str, disk: DiskThread) -> CheckpointBlobs:
    await bus.ensure(topology.tenant(tenant, max_bytes=64 << 20))
    return CheckpointBlobs(bus, tenant, "w1", patience_s=1.0, disk=disk)


def a_file(folder: Path, data: bytes, name: str = "a") -> Content:
    path = folder / name
    path.write_bytes(data)
    return file_content(digest_of(data), len(data), path, name)


@pytest.mark.parametrize("size", [0, 1, BLOB_CHUNK_BYTES, SIZE])
async def test_what_was_stored_comes_back_as_it_was(store: CheckpointBlobs, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    await store.put([a_file(tmp_path, data)])
    await store.get(digest_of(data), size, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data


async def test_what_is_stored_is_not_sent_again_and_parts_that_are_there_are_skipped(
    bus: NatsBus, store: CheckpointBlobs, tenant: str, disk: DiskThread, tmp_path: Path
) -> None:
    data = os.urandom(SIZE)
    content = a_file(tmp_path, data)
    crashed = CheckpointBlobs(bus, tenant, "w1", patience_s=1.0, disk=disk)
    for number in (0, 2):  # of an upload that was killed
        await crashed._publish(content, str(number), content.read(number * BLOB_CHUNK_BYTES, BLOB_CHUNK_BYTES))
    await store.put([content])
    assert store.sent_bytes < SIZE - 2 * BLOB_CHUNK_BYTES + 1024, "the other parts and the manifest"
    before = store.sent_bytes
    await store.put([content, content])
    assert store.sent_bytes == before
    await store.get(content.digest, SIZE, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data


async def test_a_part_that_holds_something_else_is_never_taken_for_its_own(
    bus: NatsBus, store: CheckpointBlobs, tenant: str, tmp_path: Path
) -> None:
    content = a_file(tmp_path, b"content")
    await bus.publish(subjects.blob(tenant, "w1", "checkpoint", content.digest, 0), b"another")
    with pytest.raises(BlobStoreError, match="another content"):
        await store.put([content])


async def test_a_file_that_changed_since_it_was_digested_fails_by_name(store: CheckpointBlobs, tmp_path: Path) -> None:
    content = a_file(tmp_path, b"before")
    (tmp_path / "a").write_bytes(b"after!")
    with pytest.raises(BlobStoreError, match="a was changed"):
        await store.put([content])


async def test_a_damaged_a_missing_and_a_longer_blob_are_refused(
    bus: NatsBus, store: CheckpointBlobs, tenant: str, tmp_path: Path
) -> None:
    data = os.urandom(SIZE)
    digest = digest_of(data)
    with pytest.raises(MissingBlobError, match="not whole"):
        await store.get(digest, SIZE, tmp_path / "missing")
    subject = subjects.blob(tenant, "w1", "checkpoint", digest, 0)
    await bus.publish(subject, b"x" * BLOB_CHUNK_BYTES)
    with pytest.raises(MissingBlobError, match=r"its part [123] is missing"):
        await store.get(digest, SIZE, tmp_path / "torn")
    one = digest_of(b"one")
    await bus.publish(subjects.blob(tenant, "w1", "checkpoint", one, 0), b"two")
    with pytest.raises(MissingBlobError, match="damaged"):
        await store.get(one, 3, tmp_path / "damaged")
    with pytest.raises(MissingBlobError, match="longer"):
        await store.get(one, 2, tmp_path / "longer")


async def test_a_store_that_gives_up_what_it_took_is_noticed(
    bus: NatsBus, tenant: str, disk: DiskThread, tmp_path: Path
) -> None:
    await bus.ensure(topology.tenant(tenant, max_bytes=1 << 20))
    store = CheckpointBlobs(bus, tenant, "w1", patience_s=1.0, disk=disk)
    with pytest.raises(BlobStoreError, match="its quota is too small"):
        await store.put([a_file(tmp_path, os.urandom(1 << 20))])


async def test_what_is_larger_than_the_quota_is_refused_before_it_drives_out_what_others_have(
    bus: NatsBus, tenant: str, disk: DiskThread, tmp_path: Path
) -> None:
    await bus.ensure(topology.tenant(tenant, max_bytes=1 << 20))
    other = a_file(tmp_path, b"of another workspace")
    await CheckpointBlobs(bus, tenant, "w2", patience_s=1.0, disk=disk).put([other])
    store = CheckpointBlobs(bus, tenant, "w1", patience_s=1.0, disk=disk)
    with pytest.raises(BlobStoreError, match=r"2097152 bytes are more than the blob store's quota of 1048576"):
        await store.put([a_file(tmp_path, os.urandom(2 << 20))])
    assert store.sent_bytes == 0
    await CheckpointBlobs(bus, tenant, "w2", patience_s=1.0, disk=disk).get(
        other.digest, other.size_bytes, tmp_path / "back"
    )


async def test_a_store_that_is_not_there_fails_after_its_patience(
    bus: NatsBus, disk: DiskThread, tmp_path: Path
) -> None:
    store = CheckpointBlobs(bus, "nobody", "w1", patience_s=0.2, disk=disk)
    with pytest.raises(BlobStoreError, match="does not take"):
        await store.put([data_content(digest_of(b"x"), b"x", "x")])
