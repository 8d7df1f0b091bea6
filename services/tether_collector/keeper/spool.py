"""The append-only spool, written by the keeper alone.

What is promised: a record that `last` counts has been handed to the kernel in full. A crash of keeper or collector
loses nothing of it (the page cache keeps it); a power loss may lose a tail, which the reader sees as the end of the
spool. Therefore output is never fsynced, while records that must not be taken back (stdin before the CLI can see
it, exit, proof, a segment's state) are, by `flush(sync=True)`.

A write that fails (disk full) is undone by truncation and kept in memory: `blocked` says so, the keeper stops
reading the CLI, and the next flush tries the same bytes again. Numbers are given when a record is appended, so
what waits here keeps its order.

Segments: `rotate` begins a new one with the collector's state; beyond the size limit a new one begins without.
Only segments up to the released record, before one that begins with state, are ever deleted.
"""

# pathlib costs more than a MiB.
# ruff: noqa: PTH108
from __future__ import annotations

import os
import time

from . import records

NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC


class Segment:
    """One file of the spool."""

    __slots__ = ("first", "has_state", "last", "size_bytes")

    def __init__(self, first: int, has_state: bool) -> None:
        self.first = first
        self.last = first - 1
        self.size_bytes = records.SEGMENT_HEADER_BYTES
        self.has_state = has_state


class SpoolWriter:
    """Segments, numbers and quota. Errors of the disk are values: `flush` answers False."""

    def __init__(self, folder: str, nonce: str, segment_bytes_max: int, quota_bytes: int, after: int = 0) -> None:
        self.last = after  # last record that is in a file; those up to `after` are others', and are never touched
        self.blocked = False
        self._folder = folder
        self._salt = records.salt_of(nonce)
        self._segment_bytes_max = segment_bytes_max
        self._quota_bytes = quota_bytes
        self._released = 0
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._pending_count = 0
        self._segments: list[Segment] = []
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._fd = -1
        self._open_segment(has_state=False)

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait for a disk that takes them."""
        return self._pending_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments on disk."""
        return sum(segment.size_bytes for segment in self._segments)

    @property
    def over_quota(self) -> bool:
        """True where the quota is used up and nothing more may be deleted."""
        if self.total_bytes < self._quota_bytes:
            return False
        self._reclaim(self._quota_bytes - 1)
        return self.total_bytes >= self._quota_bytes

    def append(self, kind: int, data: bytes = b"", meta: bytes = b"", at_us: int = 0) -> int:
        """Number of the new record; it reaches the file with the next flush."""
        number = self.last + self._pending_count + 1
        record = records.encode(self._salt, kind, number, at_us or now_us(), meta, data)
        self._pending.append(record)
        self._pending_bytes += len(record)
        self._pending_count += 1
        return number

    def flush(self, sync: bool = False) -> bool:
        """Write what waits; with `sync` also to the medium. False: nothing was written, or it is not yet safe."""
        try:
            if self._pending:
                if self._segments[-1].size_bytes >= self._segment_bytes_max:
                    self._open_segment(has_state=False)
                self._write_pending()
            if sync:
                os.fdatasync(self._fd)
        except OSError:
            self.blocked = True
            return False
        self.blocked = False
        return True

    def discard_last(self) -> None:
        """Take back the newest record where it is not in the file yet."""
        if self._pending:
            self._pending_bytes -= len(self._pending.pop())
            self._pending_count -= 1

    def rotate(self, state: bytes, meta: bytes) -> int | None:
        """Begin a segment with this state; its record number, or None where the disk refuses. Flush before."""
        if self._pending:
            return None
        try:
            self._open_segment(has_state=True)
        except OSError:
            self.blocked = True
            return None
        number = self.append(records.STATE, state, meta)
        if self.flush(sync=True):
            return number
        # Nothing may take the state's place as the segment's first record: it stays pending, or it is dropped
        # together with the claim that this segment begins with state.
        if self._pending_count == 1:
            self.discard_last()
            self._segments[-1].has_state = False
        return None

    def release(self, through_record: int, keep_bytes: int) -> list[int]:
        """Allow deletion up to a record; first records of the segments deleted to come down to `keep_bytes`."""
        self._released = max(self._released, min(through_record, self.last))
        return self._reclaim(keep_bytes)

    def _reclaim(self, keep_bytes: int) -> list[int]:
        deleted = []
        total = self.total_bytes
        while total > keep_bytes and len(self._segments) > 1:
            oldest = self._segments[0]
            if oldest.last > self._released or not any(s.has_state for s in self._segments[1:]):
                break
            try:
                os.unlink(f"{self._folder}/{records.segment_name(oldest.first)}")
            except FileNotFoundError:
                pass
            except OSError:
                break
            total -= oldest.size_bytes
            deleted.append(oldest.first)
            del self._segments[0]
        return deleted

    def _write_pending(self) -> None:
        data = self._pending[0] if len(self._pending) == 1 else b"".join(self._pending)
        segment = self._segments[-1]
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:] if written else data)
        except OSError:
            if written:
                os.ftruncate(self._fd, segment.size_bytes)
            raise
        segment.size_bytes += len(data)
        self.last += self._pending_count
        segment.last = self.last
        self._pending, self._pending_bytes, self._pending_count = [], 0, 0

    def _open_segment(self, has_state: bool) -> None:
        first = self.last + 1
        if self._segments and self._segments[-1].first == first:
            # Nothing was written to the current one yet: it becomes the segment with state.
            self._segments[-1].has_state = has_state
            return
        path = f"{self._folder}/{records.segment_name(first)}"
        fd = os.open(path, NEW_FILE_FLAGS, 0o600)
        try:
            header = records.segment_header(self._salt, first)
            if os.write(fd, header) != len(header):
                raise OSError(28, "short write of a segment header")
            os.fsync(self._folder_fd)
        except OSError:
            os.close(fd)
            os.unlink(path)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._segments.append(Segment(first, has_state))


def now_us() -> int:
    """Wall clock in unix microseconds: the arrival time of a record."""
    return time.time_ns() // 1000
