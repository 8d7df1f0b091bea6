"""From spool records to the machine's inputs, and the two things that a keeper's folder needs after its keeper.

One record is at most one input, so the record's number identifies the input. A gap in the spool is an input too: it
takes the number of the last record that is missing (what was left of a line before it takes the first ones).

A spool may begin with the records of the process before (`hand_on`): the numbers go on, so that every position in it
grows, and one replay of the folder gives the whole execution.

`append_to_dead` writes where no keeper lives any more: the proof that its processes are gone, or a gap that the log
told of. It holds the keeper's own lock while it writes, so a keeper can never be alive beside it, and begins a
segment of its own, so a torn tail before it stays what it is.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from tether.service import write_whole
from tether_collector.core import inputs as i
from tether_collector.core.fallback import PROCESS, REFUSED
from tether_collector.keeper import records
from tether_collector.spool_reader import LatestState, Line, LineJoiner, SpoolGap, SpoolReader, SpoolRecord

READ_BYTES: Final = 256 * 1024  # of one step: what may wait between spool and log besides the offered events
REDACTION: Final = "redaction.json"
_STREAMS: Final = frozenset({"stdout", "stderr"})
_STATE_READ_BYTES: Final = records.DATA_BYTES_MAX + 65535 + records.RECORD_HEADER_BYTES


class KeeperAliveError(Exception):
    """A keeper holds its lock: nothing may be appended in its place."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one read gave: inputs with their record's number, the bytes behind them, and whether more may follow now."""

    inputs: list[tuple[i.Input, int]]
    size_bytes: int
    moved: bool


class InputReader:
    """Follows one keeper's spool. `after` is the last record that was given."""

    def __init__(self, keeper_dir: Path, after: int = 0) -> None:
        self.after = after
        self._reader = SpoolReader(keeper_dir)
        self._joiner = LineJoiner()
        self._at_ms = 0

    def close(self) -> None:
        self._reader.close()

    @property
    def resume_after(self) -> int:
        """The record after which another reader can go on: a line that is only half read begins behind it."""
        begun = self._joiner.open_since
        return self.after if begun is None else begun - 1

    def read(self, told: int | None = None) -> Step:
        """`told`: the last record that the keeper told of, where it will tell of more."""
        batch = self._reader.read(self.after, READ_BYTES, told=told)
        out: list[tuple[i.Input, int]] = []
        size_bytes = 0
        if batch.gap is not None:
            out += self._gap(batch.gap)
            self.after = batch.gap.to_record
        joiner = self._joiner
        for record in batch.records:
            self._at_ms = at_ms = record.at_us // 1000
            size_bytes += len(record.data)
            if record.kind in _STREAMS:
                if joiner.is_line(record):
                    stream = cast(i.Stream, record.kind)
                    out.append((i.OutputLine(at_ms, stream, record.data, len(record.data)), record.number))
                    continue
                line = joiner.feed(record)
                if line is not None:
                    out.append((_output(line), record.number))
            else:
                found = to_input(record)
                if found is not None:
                    out.append((found, record.number))
        if batch.records:
            self.after = batch.records[-1].number
        return Step(out, size_bytes, bool(batch.records) or batch.gap is not None)

    def _gap(self, gap: SpoolGap) -> list[tuple[i.Input, int]]:
        lines = self._joiner.feed_gap(gap, self._at_ms * 1000)
        numbers = range(gap.from_record, gap.to_record)
        out: list[tuple[i.Input, int]] = [(_output(line), number) for line, number in zip(lines, numbers, strict=False)]
        detail = f"spool records {gap.from_record} to {gap.to_record}"
        out.append((i.Note(self._at_ms, "gap", {"reason": gap.reason, "detail": detail}), gap.to_record))
        return out


def _output(line: Line) -> i.OutputLine:
    return i.OutputLine(line.at_us // 1000, line.stream, line.data, line.full_bytes, line.eol)


def to_input(record: SpoolRecord) -> i.Input | None:
    """The input of a record that is no output; None for those that are none (the keeper's own notes, states)."""
    at, meta = record.at_us // 1000, record.meta
    match record.kind:
        case "stdin":
            return i.StdinLine(at, str(meta.get("control_id", "")), record.data)
        case "stdin_done":
            result = cast(Literal["written", "partial", "closed"], str(meta.get("result", "closed")))
            return i.StdinDone(at, str(meta.get("control_id", "")), result)
        case "timer":
            return i.Timer(at, str(meta.get("name", "")))
        case "adapter":
            return i.Note(at, "adapter", dict(meta))
        case "note":
            return _note(at, meta, record.data)
        case "eof":
            stream = str(meta.get("stream", ""))
            if stream in ("stdout", "stderr", "stdin"):
                return i.StreamClosed(at, cast(Literal["stdout", "stderr", "stdin"], stream))
            return None
        case "exit":
            return _exit(at, meta)
        case "proof":
            detail = meta.get("detail")
            return i.Proved(at, str(meta.get("method", "")), detail if isinstance(detail, str) else None)
        case _:
            return None


def _note(at: int, meta: Mapping[str, object], data: bytes) -> i.Note | None:
    kind = meta.get("kind")
    if not isinstance(kind, str):
        return None
    try:
        body = json.loads(data) if data else {}
    except ValueError:
        return None
    return i.Note(at, kind, body) if isinstance(body, dict) else None


def _exit(at: int, meta: Mapping[str, object]) -> i.Input:
    failure = meta.get("exec_error")
    if isinstance(failure, dict):
        detail = f"{failure.get('stage')}: {failure.get('message')}"
        return i.Note(at, "spawn_failed", {"detail": detail, "errno": failure.get("errno")})
    rc, number = meta.get("rc"), meta.get("signal")
    if isinstance(rc, int):
        return i.Exited(at, rc)
    return i.Exited(at, -number if isinstance(number, int) else -9)


def states(keeper_dir: Path) -> Iterator[LatestState]:
    """Every readable state that begins a segment, newest first."""
    folder = keeper_dir / "spool"
    try:
        names = sorted((path.name for path in folder.iterdir() if path.suffix == records.SEGMENT_SUFFIX), reverse=True)
    except FileNotFoundError:
        return
    for name in names:
        try:
            with (folder / name).open("rb") as file:
                head = records.parse_segment_header(file.read(records.SEGMENT_HEADER_BYTES))
                raw = b"" if head is None else file.read(_STATE_READ_BYTES)
        except FileNotFoundError:
            continue
        if head is None:
            continue
        end, kind, number, _at_us, meta, data = records.parse(raw, 0, head[0])
        if end > 0 and kind == records.STATE and number == head[1]:
            yield LatestState(data, int(json.loads(meta)["state_record"]), number)


def begins_whole(keeper_dir: Path) -> bool:
    """The first record is still there, or nothing was recorded yet: a replay can start from nothing."""
    folder = keeper_dir / "spool"
    return (folder / records.segment_name(1)).exists() or not any(folder.glob(f"*{records.SEGMENT_SUFFIX}"))


def holds(keeper_dir: Path, record: int) -> bool:
    """Whether this record is still there: not deleted, and not in a tail that a power loss took."""
    reader = SpoolReader(keeper_dir)
    try:
        batch = reader.read(record - 1, 1)
        return bool(batch.records) and batch.gap is None
    finally:
        reader.close()


def append_to_dead(
    keeper_dir: Path, nonce: str, kind: int, meta: Mapping[str, Any], data: bytes = b"", *, unless: str = ""
) -> bool:
    """Append one record to the spool of a keeper that is gone, safely on the medium; False where a record of the
    kind named `unless` is there already, since the process of this folder was noted (of notes, one that nothing was
    spawned). Raises KeeperAliveError."""
    folder = keeper_dir / "spool"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _held(keeper_dir):
        last, kinds, _ = _scan(keeper_dir)
        if unless and unless in kinds:
            return False
        salt = records.salt_of(nonce)
        number = last + 1
        at_us = time.time_ns() // 1000
        record = records.encode(salt, kind, number, at_us, json.dumps(dict(meta)).encode(), data)
        # A segment of this name can only hold a header or a torn record: what is whole was counted.
        write_whole(folder / records.segment_name(number), records.segment_header(salt, number) + record)
        return True


@contextmanager
def _held(keeper_dir: Path) -> Iterator[None]:
    """The keeper's own lock. Raises KeeperAliveError."""
    lock = os.open(keeper_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KeeperAliveError(str(keeper_dir)) from None
        yield
    finally:
        os.close(lock)


def hand_on(keeper_dir: Path, next_dir: Path) -> None:
    """Begin the next process's folder with the spool of the one before, whose keeper is gone: the same files, so
    nothing is copied. Whatever an earlier attempt left is made anew: nothing was launched there, as that is journaled
    after this. Raises KeeperAliveError, OSError."""
    building = next_dir.with_name(f"{next_dir.name}.new")
    with _held(keeper_dir):
        for left in (building, next_dir):
            if left.exists():
                shutil.rmtree(left)
        (building / "spool").mkdir(mode=0o700, parents=True)
        for path in sorted((keeper_dir / "spool").glob(f"*{records.SEGMENT_SUFFIX}")):
            os.link(path, building / "spool" / path.name)
        with suppress(FileNotFoundError):  # what is told of it stays redacted by the same rules
            os.link(keeper_dir / REDACTION, building / REDACTION)
        for folder in (building / "spool", building):
            _sync(folder)
        building.rename(next_dir)
        _sync(next_dir.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def noted_process(keeper_dir: Path) -> tuple[int, str, dict[str, Any]]:
    """(last record, kind, body) of a spool that nobody writes: the newest note of how its process is launched, or that
    it is not; kind "" where there is none."""
    last, _, noted = _scan(keeper_dir)
    return (last, "", {}) if noted is None else (last, *noted)


def _scan(keeper_dir: Path) -> tuple[int, set[str], tuple[str, dict[str, Any]] | None]:
    """(last record, kinds seen since the newest note of a process, that note) of a spool that nobody writes."""
    reader = SpoolReader(keeper_dir)
    last, kinds, noted = 0, set[str](), None
    try:
        while True:
            batch = reader.read(last, records.DATA_BYTES_MAX)
            if batch.gap is not None:
                last = batch.gap.to_record
            if batch.records:
                last = batch.records[-1].number
                for record in batch.records:
                    if record.kind == "note" and record.meta.get("kind") in (PROCESS, REFUSED):
                        noted, kinds = (str(record.meta["kind"]), json.loads(record.data)), set()
                    elif record.kind != "note" or record.meta.get("kind") == "spawn_failed":
                        kinds.add(record.kind)
            elif batch.gap is None:
                return last, kinds, noted
    finally:
        reader.close()
