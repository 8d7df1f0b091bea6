"""Reading a keeper's spool, also while it is being written, and after anything happened to it.

The reader trusts a record only by its checksum and its number. Where it stops it says which of three things it is:

    at the end     nothing more yet; `torn` says that bytes of an unfinished (or damaged last) record lie there
    corrupt        records are missing, and a later good record proves which ones
    spool_evicted  the segments that held them were released and deleted

Damage at the very end cannot be told from a write in progress, so it is `torn` until a good record follows it. A
damaged record is never skipped in silence and never ends the reading.

Tailing is cheap: the position in the open segment is kept and one `pread` gets what is new. The race with the writer
is at a segment's end: between a read that found nothing and the look for a later segment, the writer may finish the
old one and begin the new. A later segment means that the old one is complete, so the reader looks for it first and
then reads the old one once more; only then is the end an end and damage damage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tether_collector.keeper import records

READ_BYTES_MIN = 64 * 1024
READ_BYTES_MAX = 1024 * 1024  # of one system call
LINE_BYTES_MAX = 16 * 1024 * 1024  # longest line that is put together; a longer one is cut and says so
FIRST_RECORD_BYTES_MAX = records.DATA_BYTES_MAX + 65535 + records.RECORD_HEADER_BYTES

_NO_META: Mapping[str, object] = {}
_KNOWN_META: dict[bytes, Mapping[str, object]] = {
    records.META_NONE: _NO_META,
    records.META_CONTINUES: {"cont": True},
    records.META_NO_EOL: {"eol": False},
}


class SpoolRecord(NamedTuple):
    """One input of the execution, as the keeper recorded it. `at_us` is the arrival in unix microseconds."""

    number: int
    at_us: int
    kind: str
    meta: Mapping[str, object]
    data: bytes


@dataclass(frozen=True, slots=True)
class SpoolGap:
    """Records that are missing for good, both ends included."""

    from_record: int
    to_record: int
    reason: Literal["corrupt", "spool_evicted"]


@dataclass(frozen=True, slots=True)
class SpoolBatch:
    """Records in order. A gap comes before the records of its batch."""

    records: tuple[SpoolRecord, ...]
    gap: SpoolGap | None
    at_end: bool
    torn: bool


@dataclass(frozen=True, slots=True)
class LatestState:
    """The newest state that begins a segment; it covers every record up to `state_record`."""

    state: bytes
    state_record: int
    first_record: int  # the state's own record: the segment's first; reading goes on after it


@dataclass(frozen=True, slots=True)
class _End:
    torn: bool


class _Segment:
    """The open segment and the position in it."""

    __slots__ = ("fd", "first", "offset", "salt", "searched")

    def __init__(self, fd: int, first: int, salt: int) -> None:
        self.fd = fd
        self.first = first
        self.salt = salt
        self.offset = records.SEGMENT_HEADER_BYTES
        self.searched = (-1, -1)  # offset and size of damage in which no later record was found


class SpoolReader:
    """Follows the spool of one keeper. Not shared between threads; `close` when done."""

    def __init__(self, keeper_dir: Path) -> None:
        self._folder = keeper_dir / "spool"
        self._segment: _Segment | None = None
        self._next = 1  # the record at the position
        self._held_gap: SpoolGap | None = None  # found behind records that had to be given first
        self._salt: int | None = None

    def close(self) -> None:
        """Idempotent; reading again opens again."""
        if self._segment is not None:
            os.close(self._segment.fd)
            self._segment = None

    def read(self, after_record: int, max_bytes: int = READ_BYTES_MIN, *, told: int | None = None) -> SpoolBatch:
        """The records after `after_record`, at least one if there is one, about `max_bytes` at most.

        `told`: the last record that there is, from whoever writes and will tell of the next: once it was read, nothing
        looks for more, neither in the segment nor for later ones."""
        gap, self._held_gap = self._held_gap, None
        wanted = after_record + 1
        if not (gap.from_record <= wanted <= gap.to_record + 1 if gap else wanted == self._next):
            self.close()
            self._next = wanted
            gap = None
        elif gap is not None:
            gap = _clip(gap, wanted)
        out: list[SpoolRecord] = []
        size = 0
        while size < max_bytes or not out:
            if told is not None and self._next > told:
                return SpoolBatch(tuple(out), gap, True, False)
            item = self._advance(max_bytes - size)
            if isinstance(item, _End):
                return SpoolBatch(tuple(out), gap, True, item.torn)
            if isinstance(item, SpoolGap):
                if out:
                    self._held_gap = item
                    break
                clipped = _clip(item, wanted)
                gap = SpoolGap(gap.from_record, item.to_record, gap.reason) if gap and clipped else clipped or gap
                continue
            # A position inside a segment is found by reading it from its start; and a damaged segment may tell of
            # numbers with which the one behind it begins anew.
            floor = out[-1].number + 1 if out else wanted
            kept = [r for r in item if r.number >= floor] if item and item[0].number < floor else item
            out += kept
            size += sum([len(record.data) for record in kept]) + len(kept) * records.RECORD_HEADER_BYTES
        return SpoolBatch(tuple(out), gap, False, False)

    def latest_state(self) -> LatestState | None:
        """The newest readable state, or None where no segment begins with one."""
        for first in reversed(self._firsts()):
            opened = self._open(first)
            if opened is None:
                continue
            try:
                raw = os.pread(opened.fd, FIRST_RECORD_BYTES_MAX, opened.offset)
            finally:
                os.close(opened.fd)
            end, kind, number, _at_us, meta, data = records.parse(raw, 0, opened.salt)
            if end > 0 and kind == records.STATE and number == first:
                state_record = _meta(meta).get("state_record")
                if isinstance(state_record, int):
                    return LatestState(data, state_record, first)
        return None

    def _advance(self, budget_bytes: int) -> list[SpoolRecord] | SpoolGap | _End:
        """Move on: records from the position (none where only the segment changed), the gap at it, or the end."""
        if self._segment is None:
            gap = self._open_for_next()
            if gap is not None:
                return gap
        segment = self._segment
        if segment is None:
            return _End(torn=False)
        found = self._parse_some(segment, budget_bytes)
        if found:
            return found
        later = [first for first in self._firsts() if first > segment.first]
        found = self._parse_some(segment, budget_bytes)
        if found:
            return found
        size = os.fstat(segment.fd).st_size
        expected = self._next
        if size > segment.offset and self._search(segment, size):
            return SpoolGap(expected, self._next - 1, "corrupt") if self._next > expected else []
        if not later:
            if self._is_replaced(segment):
                self.close()  # the next look opens what stands there now
                return []
            return _End(torn=size > segment.offset)
        opened = self._open(later[0])
        if opened is None:
            return _End(torn=True)
        self.close()
        self._segment, self._next = opened, later[0]
        return SpoolGap(expected, self._next - 1, "corrupt") if self._next > expected else []

    def _is_replaced(self, segment: _Segment) -> bool:
        """Another file has this one's name: after the keeper's death a segment that held no whole record is written
        anew, with what had to be recorded in its place (`spool_inputs.append_to_dead`)."""
        try:
            there = (self._folder / records.segment_name(segment.first)).stat()
        except FileNotFoundError:
            return False
        return there.st_ino != os.fstat(segment.fd).st_ino

    def _open_for_next(self) -> SpoolGap | None:
        """Open the segment that holds the next record; a gap where it was deleted."""
        firsts = self._firsts()
        before = [first for first in firsts if first <= self._next]
        wanted = self._next
        for first in before[-1:] or firsts[:1]:
            self._segment = self._open(first)
            if self._segment is not None:
                self._next = first
                if first > wanted:
                    return SpoolGap(wanted, first - 1, "spool_evicted")
        return None

    def _parse_some(self, segment: _Segment, budget_bytes: int) -> list[SpoolRecord]:
        """Whole records in sequence from the position; a record larger than one read is read on its own."""
        want = max(READ_BYTES_MIN, min(budget_bytes, READ_BYTES_MAX))
        buffer = os.pread(segment.fd, want, segment.offset)
        out: list[SpoolRecord] = []
        at = 0
        parse, salt, names, known = records.parse, segment.salt, records.KIND_NAMES, _KNOWN_META
        while at < len(buffer):
            end, kind, number, at_us, meta, data = parse(buffer, at, salt)
            if end == records.INCOMPLETE and not out and number > len(buffer):
                buffer = os.pread(segment.fd, number, segment.offset)
                if len(buffer) == number:
                    continue
            if end < 0 or number != self._next:
                break
            shared = known.get(meta)
            out.append(SpoolRecord(number, at_us, names[kind], _meta(meta) if shared is None else shared, data))
            self._next += 1
            at = end
        segment.offset += at
        return out

    def _search(self, segment: _Segment, size: int) -> bool:
        """Find the next good record behind unreadable bytes and stand before it."""
        if segment.searched == (segment.offset, size):
            return False
        rest = os.pread(segment.fd, size - segment.offset, segment.offset)
        # From the position itself: what was half written when it was read may be whole by now, and is no damage then.
        at = rest.find(records.RECORD_MAGIC)
        while at >= 0:
            end, _kind, number, _at_us, _meta_bytes, _data = records.parse(rest, at, segment.salt)
            if end > 0 and number >= self._next:
                segment.offset += at
                self._next = number
                return True
            at = rest.find(records.RECORD_MAGIC, at + 1)
        segment.searched = (segment.offset, size)
        return False

    def _open(self, first: int) -> _Segment | None:
        try:
            fd = os.open(self._folder / records.segment_name(first), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        head = records.parse_segment_header(os.pread(fd, records.SEGMENT_HEADER_BYTES, 0))
        if head is not None:
            self._salt = head[0]
        elif self._salt is None:
            self._salt = self._salt_elsewhere(first)
        if self._salt is None or os.fstat(fd).st_size < records.SEGMENT_HEADER_BYTES:
            os.close(fd)
            return None
        return _Segment(fd, first, self._salt)

    def _salt_elsewhere(self, damaged: int) -> int | None:
        """The salt where a segment's header is damaged: other segments have it, and so has the spawn record."""
        for first in self._firsts():
            if first != damaged:
                try:
                    with (self._folder / records.segment_name(first)).open("rb") as file:
                        head = records.parse_segment_header(file.read(records.SEGMENT_HEADER_BYTES))
                except FileNotFoundError:
                    continue
                if head is not None:
                    return head[0]
        try:
            nonce = json.loads((self._folder.parent / "spawn.json").read_bytes())["nonce"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return records.salt_of(nonce) if isinstance(nonce, str) else None

    def _firsts(self) -> list[int]:
        try:
            names = [path.name for path in self._folder.iterdir()]
        except FileNotFoundError:
            return []
        suffix = records.SEGMENT_SUFFIX
        return sorted(int(name[:12]) for name in names if name[12:] == suffix and name[:12].isdecimal())


def _clip(gap: SpoolGap, wanted: int) -> SpoolGap | None:
    """The part of a gap that the caller has not passed yet."""
    if gap.to_record < wanted:
        return None
    return gap if gap.from_record >= wanted else SpoolGap(wanted, gap.to_record, gap.reason)


def _meta(raw: bytes) -> Mapping[str, object]:
    """The keeper wrote it and the checksum held, so anything but an object is damage that the CRC missed."""
    try:
        value = json.loads(raw)
    except ValueError:
        return {"unreadable": True}
    return value if isinstance(value, dict) else {"unreadable": True}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the CLI, put together."""

    stream: Literal["stdout", "stderr"]
    first_record: int
    last_record: int
    at_us: int  # arrival of its last part
    data: bytes
    eol: bool  # False: the stream ended without a newline
    truncated: bool  # longer than the limit: `data` is its beginning
    full_bytes: int  # length of the whole line
    broken: bool  # a part is or may be missing because of a gap


class _Parts:
    __slots__ = ("broken", "first_record", "kept_bytes", "parts", "total_bytes")

    def __init__(self, first_record: int, broken: bool) -> None:
        self.first_record = first_record
        self.parts: list[bytes] = []
        self.kept_bytes = 0
        self.total_bytes = 0
        self.broken = broken


class LineJoiner:
    """Puts the chunks of long lines together, each stream for itself: pure.

    A rotation never falls inside a line, so a joiner that starts after a state record starts clean.
    """

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._line_bytes_max = line_bytes_max
        self._open: dict[str, _Parts] = {}
        self._after_gap: set[str] = set()

    def is_line(self, record: SpoolRecord) -> bool:
        """Whether this record is a whole line, and nothing that came before has to do with it: `feed` may be spared."""
        return record.meta is _NO_META and not self._open and not self._after_gap

    @property
    def open_since(self) -> int | None:
        """The first record of a line whose rest is still to come, of whichever stream; None where there is none."""
        return min((parts.first_record for parts in self._open.values()), default=None)

    def feed(self, record: SpoolRecord) -> Line | None:
        """The line that this record completes; None for other kinds and for chunks whose rest follows."""
        if record.kind not in ("stdout", "stderr"):
            return None
        parts = self._open.get(record.kind)
        if parts is None:
            # The first line after a gap may have lost its beginning.
            parts = self._open[record.kind] = _Parts(record.number, record.kind in self._after_gap)
            self._after_gap.discard(record.kind)
        room = self._line_bytes_max - parts.kept_bytes
        kept = record.data if len(record.data) <= room else record.data[:room]
        if kept:
            parts.parts.append(kept)
            parts.kept_bytes += len(kept)
        parts.total_bytes += len(record.data)
        if record.meta.get("cont") is True:
            return None
        del self._open[record.kind]
        return self._line(record.kind, parts, record.number, record.at_us, record.meta.get("eol") is not False)

    def feed_gap(self, gap: SpoolGap, at_us: int) -> list[Line]:
        """Records are missing: what was being put together comes out broken; first lines after it are suspect."""
        lines = []
        for kind, parts in sorted(self._open.items()):
            parts.broken = True
            lines.append(self._line(kind, parts, gap.from_record - 1, at_us, False))
        self._open.clear()
        self._after_gap = {"stdout", "stderr"}
        return lines

    def _line(self, kind: str, parts: _Parts, last_record: int, at_us: int, eol: bool) -> Line:
        return Line(
            stream="stdout" if kind == "stdout" else "stderr",
            first_record=parts.first_record,
            last_record=last_record,
            at_us=at_us,
            data=parts.parts[0] if len(parts.parts) == 1 else b"".join(parts.parts),
            eol=eol,
            truncated=parts.total_bytes > parts.kept_bytes,
            full_bytes=parts.total_bytes,
            broken=parts.broken,
        )
