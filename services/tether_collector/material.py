"""The recovery material: what a process that follows a lost session is given, kept until it was given. Bounded.

    .tether/recovery-material/{execution}-{process}.json    the rows that a backend gave
    .tether/recovery-material/{execution}-{process}.jsonl   the CLI's own file of the session, under its new name

It is on disk (temporary file, fsync, rename, fsync of the folder) before the process is noted, so that whoever prepares
the same process again after a crash takes the same, and it is removed once the process was launched with it. All of it
is within RECOVERY_MATERIAL_BYTES_MAX and RECOVERY_MATERIAL_FILES_MAX; RECOVERY_MATERIAL_CONCURRENCY prepare at once;
what does not fit fails by name, and is not tried again by itself. Files of executions that have ended are leftovers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Container
from pathlib import Path
from typing import Final

from tether.limits import (
    RECOVERY_MATERIAL_BYTES_MAX,
    RECOVERY_MATERIAL_CONCURRENCY,
    RECOVERY_MATERIAL_FILES_MAX,
)
from tether.service import write_whole
from tether_collector.inside import check_inside

FOLDER: Final = "recovery-material"
ROWS: Final = "json"
NATIVE: Final = "jsonl"
SLOT_WAIT_S: Final = 20.0  # for others to be ready


class MaterialError(Exception):
    """There is no room for the material, or the disk does not take it; the message says which."""


class Material:
    """One collector's. Methods but `slot` block on the disk."""

    def __init__(
        self,
        state_dir: Path,
        *,
        bytes_max: int = RECOVERY_MATERIAL_BYTES_MAX,
        files_max: int = RECOVERY_MATERIAL_FILES_MAX,
    ) -> None:
        self._folder = state_dir / FOLDER
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._slots = asyncio.Semaphore(RECOVERY_MATERIAL_CONCURRENCY)

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one of the slots. Raises MaterialError where none was free in time."""
        try:
            async with asyncio.timeout(SLOT_WAIT_S):
                await self._slots.acquire()
        except TimeoutError:
            raise MaterialError(f"{RECOVERY_MATERIAL_CONCURRENCY} others are being prepared") from None
        try:
            yield
        finally:
            self._slots.release()

    def path(self, execution: str, process: int, kind: str) -> Path:
        return self._folder / f"{execution}-{process}.{kind}"

    def read(self, execution: str, process: int, kind: str) -> bytes | None:
        """What an earlier attempt kept."""
        try:
            return self.path(execution, process, kind).read_bytes()
        except FileNotFoundError:
            return None

    def keep(self, execution: str, process: int, kind: str, data: bytes) -> None:
        """Raises MaterialError."""
        path = self.path(execution, process, kind)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            others = [one for one in self._folder.iterdir() if one.name != path.name]
            size_bytes = sum(one.lstat().st_size for one in others)
            if len(others) >= self._files_max:
                raise MaterialError(f"the recovery material has {len(others)} files, {self._files_max} are allowed")
            if size_bytes + len(data) > self._bytes_max:
                raise MaterialError(
                    f"the recovery material has {size_bytes} bytes of {self._bytes_max}: no room for {len(data)} more"
                )
            write_whole(path, data)
        except OSError as error:
            raise MaterialError(f"the recovery material cannot be written: {error.strerror}") from error

    def drop(self, execution: str, process: int) -> None:
        """It was used. What cannot be deleted is a leftover."""
        for kind in (ROWS, NATIVE):
            with contextlib.suppress(OSError):
                self.path(execution, process, kind).unlink(missing_ok=True)

    def clean(self, living: Container[str]) -> None:
        """Delete what is of no living execution."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if path.name.rpartition("-")[0] not in living:
                    with contextlib.suppress(OSError):
                        path.unlink()


def publish(staged: Path, place: Path, home: Path) -> None:
    """Put the staged file into its place below `home`, as a file of home's owner, once; it is there already where an
    earlier attempt did. Raises OSError, also where a link leads out of `home`."""
    if not staged.exists():
        return
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = home.stat()
    descriptor = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        check_inside(descriptor, home, place)
        if owner.st_uid != os.geteuid():
            os.chown(staged, owner.st_uid, owner.st_gid)
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        os.rename(staged, place.name, dst_dir_fd=descriptor)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
