"""Goes on from a checkpoint: before the collector's first step, and before anybody hears of it. (`core.restore_rules`)

    1  reference, and what the volume has ─▶ warm, newer: nothing to do; refused: 6
    2  manifest out of the blob store, by the reference's digest; refused where it is unsafe
    3  every file into .tether-restore/files, digest by digest; links last; fsync of files and folders
    4  .tether-restore/placing.json names what is put into place; then one rename each, after the checkpoint's manifest
       and the marker `.tether/restored.json`. The journal's rename is the last: with it the volume is a live one
    5  .tether-restore and an older `.tether/restore-failed.json` are deleted

    6  refused, or failed at any step: what was put into place and .tether-restore are deleted,
       `.tether/restore-failed.json` (a `RestoreFailure`) and the log say why, the process ends with 78

A restore that was killed is begun anew: what placing.json names was put there by it, as the volume had nothing under
these names, and is deleted first. The workspace's folder is locked meanwhile, so two collectors do not restore at once.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from tether import subjects
from tether.blobs import read_blob
from tether.checkpoint import (
    FOLDER,
    RESTORE_FAILED,
    RESTORED,
    CheckpointFile,
    CheckpointManifest,
    CheckpointReference,
    Restored,
    RestoreFailure,
    decode_manifest,
)
from tether.errors import BusError, Code, InvalidError, PermissionDeniedError, UnreadableRecordError, problem
from tether.events import BlobRef
from tether.jsonsafe import loads_object
from tether.kv import Bucket
from tether.limits import CHECKPOINT_MANIFEST_BYTES_MAX
from tether.ports import Bus
from tether.service import write_whole
from tether_collector.checkpoint_blobs import BlobStoreError, CheckpointBlobs
from tether_collector.checkpoint_files import manifest_path, open_file, write_manifest
from tether_collector.config import CollectorSettings
from tether_collector.core.checkpoint_rules import JOURNAL, STATE_FOLDER, unsafe_path
from tether_collector.core.restore_rules import Refused, Volume, Wanted, Way, check_manifest, decide, targets
from tether_collector.disk_thread import DiskThread
from tether_collector.journal import knows_boot
from tether_collector.surroundings import now_ms

WORK: Final = ".tether-restore"
PLACING: Final = f"{WORK}/placing.json"
FILES: Final = f"{WORK}/files"
AT_ONCE: Final = 4  # files on their way
RETRY_S: Final = 0.2
LOCK_LOOK_S: Final = 0.1
_log: Final = structlog.get_logger("tether.collector")


@dataclass(frozen=True, slots=True)
class Means:
    """`step` is called with the name of each step that is on disk; tests crash there."""

    settings: CollectorSettings
    bus: Bus
    disk: DiskThread
    step: Callable[[str], None]


class RestoreError(Exception):
    """The sandbox must not start. `retryable` where another attempt may end otherwise."""

    def __init__(self, detail: str, *, retryable: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retryable = retryable


async def restore(settings: CollectorSettings, bus: Bus, *, step: Callable[[str], None] = lambda _name: None) -> bool:
    """Whether the volume is fit to go on; where it is not, it is said there and in the log."""
    disk = DiskThread("restore")
    workspace = settings.workspace_dir
    try:
        try:
            async with _locked(workspace):
                try:
                    await _restore(Means(settings, bus, disk, step))
                except RestoreError:
                    await disk.run(partial(_clear, workspace))
                    raise
                await disk.run(partial((workspace / RESTORE_FAILED).unlink, missing_ok=True))
        except OSError as error:
            raise _of_volume(error) from error
    except RestoreError as error:
        await disk.run(partial(say, settings, error))
        return False
    finally:
        disk.close()
    return True


def _of_volume(error: OSError) -> RestoreError:
    where = f"{error.filename}: " if error.filename else ""
    return RestoreError(f"the volume: {where}{error.strerror or error}")


@asynccontextmanager
async def _locked(workspace: Path) -> AsyncIterator[None]:
    await asyncio.to_thread(workspace.mkdir, parents=True, exist_ok=True)
    descriptor = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(LOCK_LOOK_S)
        yield
    finally:
        os.close(descriptor)


async def _restore(means: Means) -> None:
    """Raises RestoreError."""
    settings, disk = means.settings, means.disk
    assert settings.collector_restore is not None
    workspace, asked = settings.workspace_dir, settings.collector_restore
    reference, revision = await _reference(settings, means.bus)
    wanted = Wanted(asked, settings.collector_restore_revision, settings.tenant, settings.workspace, settings.sandbox)
    try:
        await disk.run(partial(_clear, workspace))
        volume = await disk.run(partial(_look, workspace, asked, settings.boot))
        way = decide(wanted, reference, revision, volume)
        if isinstance(way, Refused):
            raise RestoreError(way.detail, retryable=way.retryable)
        _log.info("resume", checkpoint=asked, way=way.value)
        if way is not Way.FILL:
            return
        assert reference is not None
        manifest, data = await _manifest(settings, means.bus, reference)
        await disk.run(partial(_begin, workspace, manifest))
        await _fetch(means, manifest)
        await disk.run(partial(_finish_files, workspace, manifest))
        means.step("restore_fetched")
        marker = Restored(
            checkpoint=asked,
            revision=revision,
            manifest=reference.manifest,
            include=reference.include,
            boot=settings.boot,
            at=now_ms(),
        )
        await disk.run(partial(_place, means, manifest, data, marker))
    except BlobStoreError as error:
        raise RestoreError(str(error)) from error
    except OSError as error:
        raise _of_volume(error) from error
    _log.info("restored", checkpoint=asked, files=len(manifest.files), size_bytes=manifest.size_bytes)


async def _reference(settings: CollectorSettings, bus: Bus) -> tuple[CheckpointReference | None, int]:
    """Waits for a bus that is away. Raises RestoreError."""
    bucket = Bucket(bus, subjects.CHECKPOINTS, leader=False)
    key = subjects.checkpoint_key(settings.tenant, settings.workspace)
    loop = asyncio.get_running_loop()
    until_s = loop.time() + settings.collector_checkpoint_wait_s
    while True:
        try:
            entry = await bucket.get(key)
            return (None, 0) if entry is None else (bucket.parse(entry, CheckpointReference), entry.revision)
        except (UnreadableRecordError, PermissionDeniedError) as error:
            raise RestoreError(f"the checkpoint's reference cannot be read: {error.detail}") from error
        except BusError as error:
            if not bus.connected:
                until_s = loop.time() + settings.collector_checkpoint_wait_s
            elif loop.time() > until_s:
                detail = f"the checkpoint's reference cannot be read: {error.detail}"
                raise RestoreError(detail, retryable=True) from error
            await asyncio.sleep(RETRY_S)


def _look(workspace: Path, checkpoint: str, boot: str) -> Volume:
    manifest = manifest_path(workspace, checkpoint)
    data = None
    with suppress(FileNotFoundError):
        facts = manifest.lstat()
        fit = stat.S_ISREG(facts.st_mode) and facts.st_size <= CHECKPOINT_MANIFEST_BYTES_MAX
        data = manifest.read_bytes() if fit else b""  # no reference names nothing; a fifo would be waited for
    journal = workspace / JOURNAL
    live = journal.exists()
    return Volume(live=live, manifest=data, begun=live and knows_boot(journal, boot))


async def _manifest(
    settings: CollectorSettings, bus: Bus, reference: CheckpointReference
) -> tuple[CheckpointManifest, bytes]:
    blob = BlobRef(digest=reference.manifest, bytes=reference.manifest_bytes, kind="checkpoint")
    try:
        limit = CHECKPOINT_MANIFEST_BYTES_MAX
        data = await read_blob(bus, settings.tenant, settings.workspace, blob, bytes_max=limit, confined=True)
    except PermissionDeniedError as error:
        raise RestoreError(f"the blob store refuses the manifest: {error.detail}") from error
    except BusError as error:
        raise RestoreError(f"the manifest cannot be read: {error.detail}", retryable=True) from error
    if data is None:
        raise RestoreError("the checkpoint's manifest is missing from the blob store, or damaged")
    try:
        manifest = decode_manifest(data, reference)
    except InvalidError as error:
        raise RestoreError(f"the checkpoint's manifest: {error.problem.detail}") from error
    if (why := check_manifest(manifest)) is not None:
        raise RestoreError(f"the checkpoint's manifest is refused: {why}")
    return manifest, data


# --- the volume ---


def _clear(workspace: Path) -> None:
    """Nothing of a restore that did not end is left. A volume that is live has ended it."""
    work = workspace / WORK
    if os.path.lexists(work) and not stat.S_ISDIR(work.lstat().st_mode):
        work.unlink()  # none of ours: a link would lead all of it out of the workspace
    if not (workspace / JOURNAL).exists():
        for target in _placed(workspace):
            _delete(workspace / target)
        (workspace / RESTORED).unlink(missing_ok=True)
    shutil.rmtree(work, ignore_errors=True)


def _placed(workspace: Path) -> list[str]:
    """What placing.json names. It lies on the volume, where others write too: what is not of the form that `_place`
    gives it names nothing, and nothing is deleted outside of the workspace."""
    path = workspace / PLACING
    try:
        with open_file(path) as descriptor:
            if os.fstat(descriptor).st_size > CHECKPOINT_MANIFEST_BYTES_MAX:
                return []
        value = loads_object(path.read_bytes(), "placing", bytes_max=CHECKPOINT_MANIFEST_BYTES_MAX)
    except (OSError, InvalidError):
        return []
    named = value.get("targets")
    found = [target for target in named if isinstance(target, str)] if isinstance(named, list) else []
    return [target for target in found if unsafe_path(target) is None and _is_target(target)]


def _is_target(path: str) -> bool:
    """One that `targets` may name: below the workspace itself, or directly in the state folder."""
    parts = path.split("/")
    return len(parts) == (2 if parts[0] == STATE_FOLDER else 1)


def _delete(path: Path) -> None:
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()


def _begin(workspace: Path, manifest: CheckpointManifest) -> None:
    """Folders for every file. Raises RestoreError where the volume has something of its own under a name."""
    state = workspace / STATE_FOLDER
    if state.is_symlink() or (state.exists() and not state.is_dir()):
        raise RestoreError(f"{state} is no folder")
    for target in targets(manifest):
        path = workspace / target
        if not os.path.lexists(path):
            continue
        try:
            path.rmdir()  # of a collector that ended before it had done anything
        except OSError:
            detail = f"the volume is not empty: it has {target} of its own, which is not replaced"
            raise RestoreError(detail) from None
    files = workspace / FILES
    files.mkdir(mode=0o700, parents=True)
    for folder in sorted({*_folders(manifest), *manifest.empty_folders}):
        mode = 0o700 if folder.split("/")[0] == STATE_FOLDER else 0o755
        (files / folder).mkdir(parents=True, exist_ok=True)
        os.chmod(files / folder, mode)  # noqa: PTH101  whatever the umask is


def _folders(manifest: CheckpointManifest) -> set[str]:
    found: set[str] = set()
    for file in manifest.files:
        parts = file.path.split("/")[:-1]
        found.update("/".join(parts[: count + 1]) for count in range(len(parts)))
    return found


async def _fetch(means: Means, manifest: CheckpointManifest) -> None:
    """Every content once; a file that has the same as another is copied from it."""
    settings, disk = means.settings, means.disk
    blobs = CheckpointBlobs(
        means.bus, settings.tenant, settings.workspace, patience_s=settings.collector_checkpoint_wait_s, disk=disk
    )
    files = settings.workspace_dir / FILES
    first: dict[str, CheckpointFile] = {}
    again: list[tuple[CheckpointFile, CheckpointFile]] = []
    for file in manifest.files:
        if file.link is not None:
            continue
        if file.digest in first:
            again.append((first[file.digest], file))
        else:
            first[file.digest] = file
    room = asyncio.Semaphore(AT_ONCE)

    async def fetch(file: CheckpointFile) -> None:
        async with room:
            await blobs.get(file.digest, file.bytes, files / file.path)
            means.step("restore_file_fetched")

    results = await asyncio.gather(*(fetch(file) for file in first.values()), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    for original, file in again:
        await disk.run(partial(_copy, files / original.path, files / file.path))


def _copy(source: Path, to: Path) -> None:
    shutil.copyfile(source, to)
    _sync(to)


def _finish_files(workspace: Path, manifest: CheckpointManifest) -> None:
    """Permissions, links, and everything on the medium."""
    files = workspace / FILES
    for file in manifest.files:
        path = files / file.path
        if file.link is not None:
            os.symlink(file.link, path)  # noqa: PTH211
        else:
            os.chmod(path, file.mode)  # noqa: PTH101
    for folder in sorted({*_folders(manifest), *manifest.empty_folders}, reverse=True):
        _sync(files / folder)
    _sync(files)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _place(means: Means, manifest: CheckpointManifest, data: bytes, marker: Restored) -> None:
    workspace = means.settings.workspace_dir
    order = targets(manifest)
    write_whole(workspace / PLACING, json.dumps({"targets": order}).encode())
    means.step("restore_placing")
    (workspace / FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
    write_manifest(workspace, manifest.checkpoint, data)
    write_whole(workspace / RESTORED, marker.model_dump_json().encode())
    for target in order:
        if target == JOURNAL:
            _sync(workspace / STATE_FOLDER)
            _sync(workspace)
        os.rename(workspace / FILES / target, workspace / target)  # noqa: PTH104
        means.step("restore_placed")
    _sync(workspace / STATE_FOLDER)
    means.step("restore_committed")
    shutil.rmtree(workspace / WORK, ignore_errors=True)


def say(settings: CollectorSettings, error: RestoreError) -> None:
    """On the volume, for the provider, and in the log: this boot does not start here."""
    checkpoint = settings.collector_restore or ""
    why = problem(Code.RESUME_FAILED, error.detail, retryable=error.retryable, checkpoint=checkpoint or None)
    failure = RestoreFailure(
        checkpoint=checkpoint,
        revision=settings.collector_restore_revision,
        boot=settings.boot,
        problem=why,
        at=now_ms(),
    )
    _log.error("restore_failed", checkpoint=checkpoint, detail=error.detail)
    path = settings.workspace_dir / RESTORE_FAILED
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, failure.model_dump_json(exclude_none=True).encode() + b"\n")
    except OSError as unsaid:
        _log.error("restore_failure_not_written", error=str(unsaid), failure=failure.model_dump(mode="json"))
