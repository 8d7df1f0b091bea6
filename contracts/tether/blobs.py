"""Blobs: large bodies beside the log, `tether.blob.{tenant}.{workspace}.{kind}.{digest}.{part}`.

Content is cut into chunks of BLOB_CHUNK_BYTES, parts `0`, `1`, …, then the manifest, part `manifest`. The manifest is
stored last, so one that can be read means that the blob is whole. Each part is stored once (compare-and-set on an empty
subject); a writer that came back after a crash finds what is there, so the parts lie in the stream in order.

A reader takes the parts in order of the stream until the manifest. A follower may lag behind the writer: where the
parts end early the leader is asked whether more is stored. What was read is only given out if its sha-256 is the
digest.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tether import subjects
from tether.errors import InvalidError, PermissionDeniedError
from tether.events import BlobRef
from tether.limits import BLOB_CHUNK_BYTES, SNAPSHOT_MEMORY_BYTES_MAX
from tether.ports import Bus
from tether.snapshot import Snapshot

MANIFEST: Final = "manifest"
_LAG_TRIES: Final = 50  # reads of a follower that lags, 20 ms apart
_LAG_WAIT_S: Final = 0.02


class Manifest(BaseModel):
    """`media`: text or json, in UTF-8."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1] = 1
    digest: str
    bytes: int = Field(ge=0)
    chunks: int = Field(ge=1)
    chunk_bytes: int = BLOB_CHUNK_BYTES
    media: str


def encode_manifest(manifest: Manifest) -> bytes:
    return manifest.model_dump_json().encode()


def chunk_count(size_bytes: int) -> int:
    """At least one: an empty blob has an empty chunk."""
    return max(1, -(-size_bytes // BLOB_CHUNK_BYTES))


def chunk(data: bytes, number: int) -> bytes:
    return data[number * BLOB_CHUNK_BYTES : (number + 1) * BLOB_CHUNK_BYTES]


async def read_blob(
    bus: Bus, tenant: str, workspace: str, reference: BlobRef, *, bytes_max: int, confined: bool = False
) -> bytes | None:
    """The whole content, verified; None where it is larger than `bytes_max`, not (wholly) stored, or damaged.
    `confined`: part by part, in the form that a sandbox may use. Raises BusError."""
    if reference.bytes > bytes_max:
        return None
    stream = subjects.blobs_stream(tenant)
    try:
        prefix = subjects.blob(tenant, workspace, reference.kind, reference.digest, MANIFEST).removesuffix(MANIFEST)
    except InvalidError:
        return None
    if confined:
        return await _by_parts(bus, stream, prefix, reference)
    chunks: dict[str, bytes] = {}
    after = size_bytes = tries = 0
    while True:
        batch = await bus.read(stream, after, prefix + "*")
        for message in batch:
            after = message.sequence
            part = message.subject.removeprefix(prefix)
            if part == MANIFEST:
                return _whole(reference, chunks, message.data)
            size_bytes += len(message.data)
            if size_bytes > reference.bytes:
                return None
            chunks[part] = message.data
        if batch:
            continue
        tries += 1
        if tries > _LAG_TRIES or await bus.next_after(stream, after, prefix + "*") is None:
            return None
        await asyncio.sleep(_LAG_WAIT_S)


async def _by_parts(bus: Bus, stream: str, prefix: str, reference: BlobRef) -> bytes | None:
    """A follower that lags may answer; a part that stays away for the time of a lag is not there."""

    async def part(name: str) -> bytes | None:
        for _ in range(_LAG_TRIES):
            if (message := await bus.last(stream, prefix + name, leader=False)) is not None:
                return message.data
            await asyncio.sleep(_LAG_WAIT_S)
        return None

    raw = await part(MANIFEST)
    if raw is None:
        return None
    chunks: dict[str, bytes] = {}
    size_bytes = 0
    for number in range(chunk_count(reference.bytes)):
        data = await part(str(number))
        if data is None or (size_bytes := size_bytes + len(data)) > reference.bytes:
            return None
        chunks[str(number)] = data
    return _whole(reference, chunks, raw)


def _whole(reference: BlobRef, chunks: Mapping[str, bytes], raw: bytes) -> bytes | None:
    try:
        manifest = Manifest.model_validate_json(raw)
        data = b"".join(chunks[str(number)] for number in range(manifest.chunks))
    except (ValidationError, KeyError):
        return None
    if len(data) != reference.bytes or hashlib.sha256(data).hexdigest() != reference.digest:
        return None
    return data


async def snapshot_of(bus: Bus, tenant: str, workspace: str, result: Mapping[str, Any] | None) -> Snapshot | None:
    """The snapshot that a collector's reply carries, or names as a blob; None where none can be read, also
    where these credentials may not. Raises BusError."""
    if result is None:
        return None
    try:
        if "blob" not in result:
            return Snapshot.model_validate(result.get("snapshot", result))
        reference = BlobRef.model_validate(result["blob"])
        data = await read_blob(bus, tenant, workspace, reference, bytes_max=SNAPSHOT_MEMORY_BYTES_MAX)
        return None if data is None else Snapshot.model_validate_json(data)
    except (ValidationError, PermissionDeniedError):
        return None
