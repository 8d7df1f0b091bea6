"""Files of checkpoints in the blob store: up in pieces, down in pieces, whole only if the digest says so.

    up      is it there (its manifest)? ─▶ skipped. Parts, several at once, each on an empty subject; one that is there
            already is compared. The manifest comes last. Every file's parts are looked for once more when all are up:
            a store whose quota is too small gives up the first ones while the last ones come. What is larger than the
            quota is refused before: it would only drive out what others have there
    down    parts by their subjects, several at once, written at their place in a temporary file; digest; only then it
            counts

Identity is the content's digest, so what did not change since an earlier checkpoint is there already. Nothing holds a
whole file in memory. A store that takes nothing for `patience_s` is a failure, as is one that refuses.

Whether a subject has a message is asked without its payload: by a publish that can never be stored, whose refusal names
the subject's last sequence.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tether import subjects
from tether.blobs import MANIFEST, Manifest, chunk_count, encode_manifest
from tether.checkpoint import MEDIA
from tether.errors import (
    BusError,
    MessageTooLargeError,
    PermissionDeniedError,
    UndecidedError,
    WrongLastSequenceError,
)
from tether.limits import BLOB_CHUNK_BYTES
from tether.ports import Bus
from tether_collector.checkpoint_files import read_part
from tether_collector.disk_thread import DiskThread

KIND: Final = "checkpoint"
AT_ONCE: Final = 8  # parts on their way, each of BLOB_CHUNK_BYTES
RETRY_MIN_S, RETRY_MAX_S = 0.05, 1.0
LAG_WAIT_S: Final = 0.05  # between reads where the replica may not have yet what the leader has
_NEVER: Final = 2**62


class BlobStoreError(Exception):
    """The blob store does not take it, or does not have it. The message is for people."""


class MissingBlobError(BlobStoreError):
    """It is not there, or not whole."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a blob is made of: `read(offset, size)` may block and is called on the disk's thread."""

    digest: str
    size_bytes: int
    name: str
    read: Callable[[int, int], bytes]


def file_content(digest: str, size_bytes: int, path: Path, name: str) -> Content:
    return Content(digest, size_bytes, name, partial(read_part, path))


def data_content(digest: str, data: bytes, name: str) -> Content:
    return Content(digest, len(data), name, lambda offset, size: data[offset : offset + size])


class CheckpointBlobs:
    """Of one workspace. `bytes_max`: the store's quota, -1 for none, where that was told; None: the store is asked.
    `step` is called after each part that was stored."""

    def __init__(
        self,
        bus: Bus,
        tenant: str,
        workspace: str,
        *,
        patience_s: float,
        disk: DiskThread,
        bytes_max: int | None = None,
        step: Callable[[str], None] = lambda _name: None,
    ) -> None:
        self._bus = bus
        self._tenant, self._workspace = tenant, workspace
        self._stream = subjects.blobs_stream(tenant)
        self._patience_s = patience_s
        self._disk = disk
        self._bytes_max = bytes_max
        self._step = step
        self.sent_bytes = 0

    # --- up ---

    async def put(self, contents: Iterable[Content]) -> None:
        """Everything stored and seen to be there. Raises BlobStoreError, OSError."""
        unique = list({content.digest: content for content in contents}.values())
        await self._check_quota(sum(content.size_bytes for content in unique))
        for content in unique:
            if not await self._exists(content.digest, MANIFEST):
                await self._upload(content)
        await self._verify(unique)

    async def _check_quota(self, size_bytes: int) -> None:
        """Raises BlobStoreError where that can never fit, whatever is there."""
        limit_bytes = self._bytes_max
        if limit_bytes is None:
            try:
                state = await self._bus.state(self._stream)
            except BusError:
                return  # the parts find out what is wrong with the store
            limit_bytes = -1 if state is None else state.bytes_max
        if 0 <= limit_bytes < size_bytes:
            raise BlobStoreError(
                f"its {size_bytes} bytes are more than the blob store's quota of {limit_bytes} "
                "(TETHER_EVENTS_MAX_BYTES)"
            )

    async def _upload(self, content: Content) -> None:
        digest, count = hashlib.sha256(), chunk_count(content.size_bytes)
        try:
            async with asyncio.TaskGroup() as group:
                room = asyncio.Semaphore(AT_ONCE)
                for number in range(count):
                    await room.acquire()
                    data = await self._disk.run(partial(content.read, number * BLOB_CHUNK_BYTES, BLOB_CHUNK_BYTES))
                    digest.update(data)
                    part = self._store(content, str(number), data, room)
                    group.create_task(part, name=f"blob:{content.digest}:{number}")
        except ExceptionGroup as group_error:
            known = group_error.exceptions[0]
            raise known if isinstance(known, BlobStoreError | OSError) else group_error from None
        if digest.hexdigest() != content.digest:
            raise BlobStoreError(f"{content.name} was changed while it was stored")
        manifest = Manifest(digest=content.digest, bytes=content.size_bytes, chunks=count, media=MEDIA)
        await self._store(content, MANIFEST, encode_manifest(manifest), None)

    async def _store(self, content: Content, part: str, data: bytes, room: asyncio.Semaphore | None) -> None:
        try:
            await self._publish(content, part, data)
            self._step("blob_part_stored")
        finally:
            if room is not None:
                room.release()

    async def _publish(self, content: Content, part: str, data: bytes) -> None:
        subject = self._subject(content.digest, part)

        async def attempt() -> None:
            try:
                await self._bus.publish(subject, data, expect_last=0)
            except WrongLastSequenceError:
                there = await self._bus.last(self._stream, subject, leader=False)
                if there is None:
                    raise UndecidedError("the part is not to be seen yet", subject=subject) from None
                if there.data != data:
                    raise BlobStoreError(f"another content is stored as part {part} of {content.name}") from None
            else:
                self.sent_bytes += len(data)

        await self._patiently(attempt, f"{content.name}, part {part}")

    async def _verify(self, contents: Iterable[Content]) -> None:
        room = asyncio.Semaphore(AT_ONCE)

        async def look(content: Content, part: str) -> None:
            async with room:
                if not await self._exists(content.digest, part):
                    raise BlobStoreError(
                        f"part {part} of {content.name} is gone from the blob store again: its quota is too small"
                    )

        for content in contents:
            parts = [*(str(number) for number in range(chunk_count(content.size_bytes))), MANIFEST]
            results = await asyncio.gather(*(look(content, part) for part in parts), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result

    async def _exists(self, digest: str, part: str) -> bool:
        subject = self._subject(digest, part)
        found = False

        async def attempt() -> None:
            nonlocal found
            found = await self._is_there(subject)

        await self._patiently(attempt, f"part {part} of {digest}")
        return found

    async def _patiently(self, attempt: Callable[[], Awaitable[None]], what: str) -> None:
        """Until it worked; raises BlobStoreError where it was refused, or did not work for `patience_s`."""
        loop = asyncio.get_running_loop()
        until_s, pause_s = loop.time() + self._patience_s, RETRY_MIN_S
        while True:
            try:
                await attempt()
            except (PermissionDeniedError, MessageTooLargeError) as error:
                raise BlobStoreError(f"the blob store refuses {what}: {error.detail}") from error
            except BusError as error:
                if loop.time() > until_s:
                    raise BlobStoreError(f"the blob store does not take {what}: {error.detail}") from error
                await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
                pause_s = min(pause_s * 2, RETRY_MAX_S)
            else:
                return

    # --- down ---

    async def get(self, digest: str, size_bytes: int, to: Path) -> None:
        """The content as a new file, verified and fsynced. Raises MissingBlobError, BlobStoreError, OSError."""
        descriptor = await self._disk.run(
            partial(os.open, to, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        )
        try:
            await self._parts(descriptor, digest, size_bytes)
            if await self._disk.run(partial(_digest_of, descriptor)) != (size_bytes, digest):
                raise MissingBlobError(f"blob {digest} is damaged")
            await self._disk.run(partial(os.fsync, descriptor))
        finally:
            os.close(descriptor)

    async def _parts(self, descriptor: int, digest: str, size_bytes: int) -> None:
        """Each by its own subject: a sandbox may read no other way."""
        try:
            async with asyncio.TaskGroup() as group:
                room = asyncio.Semaphore(AT_ONCE)
                for number in range(chunk_count(size_bytes)):
                    await room.acquire()
                    part = self._part(descriptor, digest, number, size_bytes, room)
                    group.create_task(part, name=f"blob:{digest}:{number}")
        except ExceptionGroup as group_error:
            known = group_error.exceptions[0]
            raise known if isinstance(known, BlobStoreError | OSError) else group_error from None

    async def _part(self, descriptor: int, digest: str, number: int, size_bytes: int, room: asyncio.Semaphore) -> None:
        try:
            data = await self._read(digest, number)
            if number * BLOB_CHUNK_BYTES + len(data) > size_bytes:
                raise MissingBlobError(f"blob {digest} is longer than {size_bytes} bytes")
            await self._disk.run(partial(_write_at, descriptor, data, number * BLOB_CHUNK_BYTES))
        finally:
            room.release()

    async def _read(self, digest: str, number: int) -> bytes:
        """Raises MissingBlobError where the leader does not have it, BlobStoreError."""
        subject = self._subject(digest, str(number))
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._patience_s
        while True:
            try:
                message = await self._bus.last(self._stream, subject, leader=False)
                lags = message is None and await self._is_there(subject)
            except PermissionDeniedError as error:
                raise BlobStoreError(f"the blob store refuses blob {digest}: {error.detail}") from error
            except BusError as error:
                if loop.time() > until_s:
                    raise BlobStoreError(f"blob {digest} cannot be read: {error.detail}") from error
                await asyncio.sleep(RETRY_MIN_S)
                continue
            if message is not None:
                return message.data
            if not lags or loop.time() > until_s:
                raise MissingBlobError(f"blob {digest} is not whole: its part {number} is missing")
            await asyncio.sleep(LAG_WAIT_S)

    async def _is_there(self, subject: str) -> bool:
        """As the leader sees it. Raises BusError."""
        try:
            await self._bus.publish(subject, b"", expect_last=_NEVER)
        except WrongLastSequenceError as error:
            return error.actual != 0
        raise UndecidedError("the server did not say whether it is there", subject=subject)

    def _subject(self, digest: str, part: str) -> str:
        return subjects.blob(self._tenant, self._workspace, KIND, digest, part)


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _digest_of(descriptor: int) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    while data := os.pread(descriptor, 1 << 20, size):
        digest.update(data)
        size += len(data)
    return size, digest.hexdigest()
