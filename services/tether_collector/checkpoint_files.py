"""The files of a checkpoint on the volume: found by rule, digested, and the manifest that names them.

Everything here may block; it is run on a thread of its own (`DiskThread`). Nothing is followed: links are read as
links, files are opened without following, and what is neither file, link nor folder is left out by name. A file that
changes while it is read is read again, and the checkpoint fails by its name if that does not end.

A user may work beside it: what vanishes in between is no part of the checkpoint, and a folder that was begun is named
as left out. Only a workspace that is away fails.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tether.checkpoint import FOLDER, KEPT_MAX, LEFT_OUT_MAX, CheckpointFile, DrainedExecution, Include, LeftOut
from tether.limits import MIB
from tether.service import write_whole
from tether_collector.core.checkpoint_rules import JOURNAL, Kind, LeaveOut, Take, bad_path, judge, too_deep, too_much
from tether_collector.inside import check_inside
from tether_collector.journal import copy_journal

READ_BYTES: Final = 1 * MIB
READS_MAX: Final = 3  # of a file that changes meanwhile
EMPTY_DIGEST: Final = hashlib.sha256(b"").hexdigest()
VANISHED: Final = "vanished"  # why a folder is left out that was begun
_WORK: Final = ".work-"


class UnfitFileError(Exception):
    """A file that a checkpoint cannot have, or one too many. The message names it."""


@dataclass(slots=True)
class Found:
    """What a checkpoint consists of. `sources`: where a file is read from that does not lie at its path. `work`: the
    work folder."""

    work: Path
    files: list[CheckpointFile] = field(default_factory=list)
    empty_folders: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    left_out_more: int = 0
    sources: dict[str, Path] = field(default_factory=dict)
    size_bytes: int = 0

    def leave_out(self, path: str, why: str) -> None:
        if len(self.left_out) < LEFT_OUT_MAX:
            self.left_out.append(LeftOut(path=path, why=why))
        else:
            self.left_out_more += 1

    def add(self, file: CheckpointFile) -> None:
        """Raises UnfitFileError beyond a limit."""
        self.check_room(file.path, file.bytes)
        self.files.append(file)
        self.size_bytes += file.bytes

    def check_room(self, path: str, size_bytes: int) -> None:
        """Also before a file is read: a sparse one may have no end worth waiting for. Raises UnfitFileError."""
        if (why := too_much(len(self.files) + 1, self.size_bytes + size_bytes)) is not None:
            raise UnfitFileError(f"{why}; {path} is one too many")


def work_folder(workspace: Path, checkpoint: str) -> Path:
    """Where the copy of the journal lies while the checkpoint is made."""
    return workspace / FOLDER / f"{_WORK}{checkpoint}"


def manifest_path(workspace: Path, checkpoint: str) -> Path:
    return workspace / FOLDER / f"{checkpoint}.json"


def begin(workspace: Path, checkpoint: str) -> Path:
    """The work folder, empty; those of earlier attempts are gone. Raises OSError."""
    folder = workspace / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for leftover in folder.glob(f"{_WORK}*"):
        shutil.rmtree(leftover)
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)
    work = work_folder(workspace, checkpoint)
    work.mkdir(mode=0o700)
    return work


def end(workspace: Path, checkpoint: str) -> None:
    """The work folder is not needed any more."""
    shutil.rmtree(work_folder(workspace, checkpoint), ignore_errors=True)


def collect(workspace: Path, checkpoint: str, include: Include, ended: tuple[DrainedExecution, ...], at: int) -> Found:
    """Every file by rule, with its digest. Raises UnfitFileError, OSError, sqlite3.Error."""
    work = begin(workspace, checkpoint)
    found = Found(work)
    copy = work / "journal.sqlite3"
    copy_journal(workspace / JOURNAL, copy, ended, at)
    os.chmod(copy, 0o600)  # noqa: PTH101
    found.sources[JOURNAL] = copy
    size, digest = _digest(copy, workspace)
    found.add(CheckpointFile(path=JOURNAL, bytes=size, digest=digest, kind="state"))
    _walk(workspace, "", include, found)
    found.files.sort(key=lambda file: file.path)
    return found


def _walk(workspace: Path, folder: str, include: Include, found: Found) -> bool | None:
    """Everything below; whether there was something of the checkpoint in it, None where it is gone."""
    some = False
    try:
        entries = _entries(workspace / folder, workspace)
    except (FileNotFoundError, NotADirectoryError):
        if not folder:
            raise
        found.leave_out(_printable(folder), VANISHED)
        return None
    for entry in entries:
        path = f"{folder}/{entry.name}" if folder else entry.name
        is_folder = stat.S_ISDIR(entry.facts.st_mode)
        verdict = judge(path, include, folder=is_folder)
        if isinstance(verdict, LeaveOut):
            if verdict.said:
                found.leave_out(_printable(path), verdict.why)
            continue
        if (why := bad_path(path) or too_deep(path)) is not None:
            raise UnfitFileError(f"{_printable(path)} cannot be kept: {why}")
        if is_folder:
            below = _walk(workspace, path, include, found)
            if below is False and verdict.kind != "state":
                found.empty_folders.append(path)
            some = some or below is not None
        else:
            some = _take(workspace, path, entry, verdict, found) or some
    return some


@dataclass(frozen=True, slots=True)
class _Entry:
    """What lies in a folder, itself and not what it leads to."""

    name: str
    facts: os.stat_result


def _entries(folder: Path, workspace: Path) -> list[_Entry]:
    """By name. No descriptor is held while what lies in the folder is walked, and a link that took its place is not
    followed. Raises FileNotFoundError, NotADirectoryError where it is gone, OSError."""
    found = []
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        check_inside(descriptor, workspace, folder)
        with os.scandir(descriptor) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    found.append(_Entry(entry.name, entry.stat(follow_symlinks=False)))
    finally:
        os.close(descriptor)
    return sorted(found, key=lambda entry: entry.name)


def _take(workspace: Path, path: str, entry: _Entry, verdict: Take, found: Found) -> bool:
    if path == JOURNAL:
        return True
    facts = entry.facts
    try:
        if stat.S_ISLNK(facts.st_mode):
            found.add(_link(path, os.readlink(workspace / path), verdict.kind))  # noqa: PTH115
        elif stat.S_ISREG(facts.st_mode):
            found.check_room(path, facts.st_size)
            source = workspace / path
            if verdict.kind == "state":
                source = found.sources[path] = _hold(source, found.work / f"state-{len(found.files)}")
            size, digest = _digest(source, workspace)
            mode = stat.S_IMODE(facts.st_mode) & 0o777
            found.add(CheckpointFile(path=path, bytes=size, digest=digest, mode=mode, kind=verdict.kind))
        else:
            found.leave_out(path, "special_file")
    except (FileNotFoundError, NotADirectoryError):
        return False  # it was deleted meanwhile: it is no file of the checkpoint
    return True


def _hold(source: Path, to: Path) -> Path:
    """The collector's own files are replaced whole, also while a checkpoint is made: what is there now stays readable
    under another name."""
    try:
        os.link(source, to, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise
        shutil.copyfile(source, to, follow_symlinks=False)
    return to


def _link(path: str, target: str, kind: Kind) -> CheckpointFile:
    if (why := bad_path(target)) is not None:
        raise UnfitFileError(f"{path} cannot be kept: where the link leads, {why.removeprefix('its ')}")
    return CheckpointFile(path=path, bytes=0, digest=EMPTY_DIGEST, mode=0o777, kind=kind, link=target)


def _digest(path: Path, workspace: Path) -> tuple[int, str]:
    """Size and sha-256 of what the file held at one time. Raises UnfitFileError, OSError."""
    for _ in range(READS_MAX):
        with open_file(path, workspace) as descriptor:
            before = os.fstat(descriptor)
            digest, size = hashlib.sha256(), 0
            while size <= before.st_size and (data := os.read(descriptor, READ_BYTES)):
                digest.update(data)
                size += len(data)
            after = os.fstat(descriptor)
        if size == before.st_size == after.st_size and before.st_mtime_ns == after.st_mtime_ns:
            return size, digest.hexdigest()
    raise UnfitFileError(f"{path} is being written while the checkpoint is made")


@contextlib.contextmanager
def open_file(path: Path, root: Path | None = None) -> Iterator[int]:
    """For reading, a regular file and no link; below `root`, by whichever links. Raises OSError naming it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if root is not None:
            check_inside(descriptor, root, path)
        yield descriptor
    finally:
        os.close(descriptor)


def read_part(path: Path, offset: int, size_bytes: int) -> bytes:
    """A piece of a file; shorter where it ends. Raises OSError."""
    with open_file(path) as descriptor:
        pieces, left = [], size_bytes
        while left and (data := os.pread(descriptor, left, offset)):
            pieces.append(data)
            offset, left = offset + len(data), left - len(data)
        return b"".join(pieces)


def write_manifest(workspace: Path, checkpoint: str, data: bytes) -> None:
    """Temp, fsync, rename, fsync of the folder. Raises OSError."""
    write_whole(manifest_path(workspace, checkpoint), data)


def prune(workspace: Path, keep: str) -> int:
    """Delete all manifests but the KEPT_MAX latest, and never `keep`; how many went."""
    folder = workspace / FOLDER
    found = sorted(folder.glob("ckp_*.json"), key=lambda path: (path.stem == keep, path.stat().st_mtime_ns))
    for path in (old := found[:-KEPT_MAX]):
        path.unlink(missing_ok=True)
    return len(old)


def _printable(path: str) -> str:
    return path.encode("utf-8", "replace").decode()[:4096]
