"""Makes a checkpoint: files by rule ─▶ manifest ─▶ blobs ─▶ reference. `core.draining` says when.

    1  the journal's copy, every file's digest          .tether/checkpoints/.work-{checkpoint}, gone afterwards
    2  the manifest: temp, fsync, rename, fsync         .tether/checkpoints/{checkpoint}.json
    3  where the order says so: each file, then the manifest, as blobs of kind `checkpoint`
    ── CheckpointMade: the drain's state fixes the reference (journal, fsync)
    4  the reference, by compare-and-set, under its own operation id: over the one that was there when this boot began,
       or one of its own; a later one of another boot is of who came after, and stays
    5  manifests beyond the KEPT_MAX latest are deleted

A crash before the state fixes the reference makes everything anew, under the same ids: blobs that are stored are
skipped. After it nothing is made again, so the reference always names the manifest that lies there.

Whatever goes wrong is a CheckpointError with CHECKPOINT_FAILED and the reason by name; an older reference stays as it
is. Only a bus that is away is waited for when the reference is written: the log has had to wait for it as well.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from collections.abc import Mapping
from functools import partial
from typing import Final

import structlog

from tether import subjects
from tether.checkpoint import CheckpointManifest, CheckpointReference, digest_of
from tether.errors import (
    BusError,
    BusUnavailableError,
    Code,
    PermissionDeniedError,
    Problem,
    UnreadableRecordError,
    problem,
)
from tether.kv import Bucket, Conflict, Entry
from tether.limits import CHECKPOINT_MANIFEST_BYTES_MAX, MIB
from tether_collector import checkpoint_files as files
from tether_collector import metrics
from tether_collector.checkpoint_blobs import BlobStoreError, CheckpointBlobs, Content, data_content, file_content
from tether_collector.checkpoint_files import UnfitFileError
from tether_collector.core.draining import Draining, executions_of, is_clean
from tether_collector.disk_thread import DiskThread
from tether_collector.surroundings import Surroundings, now_ms

RETRY_MIN_S, RETRY_MAX_S = 0.1, 2.0
_log: Final = structlog.get_logger("tether.collector")


class CheckpointError(Exception):
    """No checkpoint. `problem` is CHECKPOINT_FAILED with the reason."""

    def __init__(self, why: Problem) -> None:
        super().__init__(why.detail)
        self.problem = why


def failed(detail: str) -> CheckpointError:
    return CheckpointError(problem(Code.CHECKPOINT_FAILED, detail))


class Checkpoints:
    """Of one workspace."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._disk = DiskThread("checkpoint")
        self._bucket = Bucket(around.bus, subjects.CHECKPOINTS, leader=False)
        settings = around.settings
        self._key = subjects.checkpoint_key(settings.tenant, settings.workspace)

    async def make(self, state: Draining, generations: Mapping[str, int]) -> CheckpointReference:
        """Steps 1 to 3. `generations`: conversation → its last execution's. Raises CheckpointError."""
        try:
            made = await self._make(state, generations)
        except Exception:
            await self._tidy(state)
            raise
        await self._tidy(state)
        return made

    async def _tidy(self, state: Draining) -> None:
        """Not where it was cancelled: a volume that hangs must not hang the exit, and the next attempt begins so."""
        await self._disk.run(partial(files.end, self._around.settings.workspace_dir, state.checkpoint))

    async def _make(self, state: Draining, generations: Mapping[str, int]) -> CheckpointReference:
        began_s = time.monotonic()
        try:
            found = await self._disk.run(
                partial(
                    files.collect,
                    self._around.settings.workspace_dir,
                    state.checkpoint,
                    state.order.include,
                    executions_of(state),
                    now_ms(),
                )
            )
            self._around.step("checkpoint_collected")
            manifest, data = self._manifest(state, found)
            await self._disk.run(
                partial(files.write_manifest, self._around.settings.workspace_dir, state.checkpoint, data)
            )
            self._around.step("manifest_written")
            sent = await self._store(state, found, data) if state.order.store != "volume" else 0
        except (UnfitFileError, BlobStoreError) as error:
            raise failed(str(error)) from error
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise failed(f"the volume: {where}{error.strerror or error}") from error
        except sqlite3.Error as error:
            raise failed(f"the journal cannot be copied: {error}") from error
        metrics.checkpoint_bytes.observe(manifest.size_bytes)
        metrics.checkpoint_seconds.observe(time.monotonic() - began_s)
        size = round(manifest.size_bytes / MIB, 3)
        _log.info(
            "checkpoint_made",
            checkpoint=state.checkpoint,
            files=len(manifest.files),
            mib=size,
            sent_bytes=sent,
            left_out=len(manifest.left_out) + manifest.left_out_more,
        )
        return self._reference(state, manifest, data, generations)

    def _manifest(self, state: Draining, found: files.Found) -> tuple[CheckpointManifest, bytes]:
        settings, order = self._around.settings, state.order
        manifest = CheckpointManifest(
            checkpoint=state.checkpoint,
            drain=order.drain,
            tenant=settings.tenant,
            workspace=settings.workspace,
            sandbox=settings.sandbox,
            boot=settings.boot,
            created_at=now_ms(),
            reason=order.reason,
            include=order.include,
            clean=is_clean(state),
            executions=executions_of(state),
            files=tuple(found.files),
            empty_folders=tuple(found.empty_folders),
            left_out=tuple(found.left_out),
            left_out_more=found.left_out_more,
        )
        data = manifest.encode()
        if len(data) > CHECKPOINT_MANIFEST_BYTES_MAX:
            raise UnfitFileError(f"the manifest has more than {CHECKPOINT_MANIFEST_BYTES_MAX // MIB} MiB")
        return manifest, data

    async def _store(self, state: Draining, found: files.Found, manifest: bytes) -> int:
        """The bytes that were sent."""
        settings = self._around.settings
        blobs = CheckpointBlobs(
            self._around.bus,
            settings.tenant,
            settings.workspace,
            patience_s=settings.collector_checkpoint_wait_s,
            disk=self._disk,
            bytes_max=settings.collector_blobs_bytes_max,
            step=self._around.step,
        )
        contents: list[Content] = [
            file_content(
                file.digest, file.bytes, found.sources.get(file.path, settings.workspace_dir / file.path), file.path
            )
            for file in found.files
            if file.link is None
        ]
        contents.append(data_content(digest_of(manifest), manifest, "the manifest"))
        await blobs.put(contents)
        self._around.step("checkpoint_stored")
        return blobs.sent_bytes

    def _reference(
        self, state: Draining, manifest: CheckpointManifest, data: bytes, generations: Mapping[str, int]
    ) -> CheckpointReference:
        return CheckpointReference(
            op=manifest.checkpoint,
            checkpoint=manifest.checkpoint,
            drain=manifest.drain,
            tenant=manifest.tenant,
            workspace=manifest.workspace,
            sandbox=manifest.sandbox,
            boot=manifest.boot,
            manifest=digest_of(data),
            manifest_bytes=len(data),
            stored=state.order.store,
            include=manifest.include,
            clean=manifest.clean,
            files=len(manifest.files),
            size_bytes=manifest.size_bytes,
            executions=manifest.executions,
            may_use={conversation: last + 1 for conversation, last in generations.items()},
            created_at=manifest.created_at,
        )

    async def write_reference(self, reference: CheckpointReference) -> int:
        """Step 4 and 5; the reference's revision. Waits for a bus that is away. Raises CheckpointError: another holds
        the key, or it cannot be written."""
        pause_s, until_s = RETRY_MIN_S, 0.0
        loop = asyncio.get_running_loop()
        while True:
            try:
                revision = await self._write(reference)
                break
            except PermissionDeniedError as error:
                raise failed(f"the reference may not be written: {error.detail}") from error
            except BusError as error:
                # Connected, and still nobody takes it: the bucket is missing or full.
                if not (self._around.bus.connected and isinstance(error, BusUnavailableError)):
                    until_s = 0.0
                elif until_s and loop.time() > until_s:
                    raise failed(f"the reference cannot be written: {error.detail}") from error
                else:
                    until_s = until_s or loop.time() + self._around.settings.collector_checkpoint_wait_s
                _log.info("reference_delayed", error=str(error))
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            pause_s = min(pause_s * 2, RETRY_MAX_S)
        self._around.step("reference_written")
        try:
            await self._disk.run(partial(files.prune, self._around.settings.workspace_dir, reference.checkpoint))
        except OSError as error:  # the reference is written, and an old manifest harms nobody
            _log.warning("manifests_not_pruned", error=str(error))
        return revision

    async def _write(self, reference: CheckpointReference) -> int:
        """Once. Raises BusError, CheckpointError."""
        op = reference.checkpoint
        current = await self._bucket.get(self._key)
        try:
            if current is None:
                entry = await self._bucket.create(self._key, reference.value(), op=op)
            elif current.value.get("op") == op:
                return current.revision
            else:
                self._check_ours(current)
                entry = await self._bucket.update(self._key, reference.value(), op=op, revision=current.revision)
        except Conflict as conflict:
            holder = "another" if conflict.current is None else str(conflict.current.value.get("checkpoint"))
            raise failed(f"another checkpoint was made of this workspace meanwhile: {holder}") from conflict
        return entry.revision

    def _check_ours(self, current: Entry) -> None:
        """A sandbox that was frozen must not put its checkpoint over that of who came after it."""
        boot = self._around.settings.boot
        base = self._around.journal.reference_seen(boot)
        if base is None or current.revision <= base or current.value.get("boot") == boot:
            return
        named = current.value.get("checkpoint")
        raise failed(f"another sandbox has made a checkpoint of this workspace since this one began: {named}")

    async def note_base(self) -> None:
        """The task that sees once, when a boot begins, which reference it begins with."""
        journal, boot = self._around.journal, self._around.settings.boot
        while journal.reference_seen(boot) is None:
            try:
                current = await self._bucket.get(self._key)
            except UnreadableRecordError as error:
                journal.reference_seen(boot, error.revision)
            except BusError:
                await asyncio.sleep(RETRY_MAX_S)
            else:
                journal.reference_seen(boot, 0 if current is None else current.revision)

    def close(self) -> None:
        self._disk.close()
