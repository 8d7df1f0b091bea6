"""Spool segments after anything happened to them, from the bytes on the disk to the events; the keeper's own JSON.

Laws: reading comes to an end; records and gaps together cover every number once and in order; a record is one whose
bytes are on the disk under a right checksum; whatever a whole record says, the machine goes on.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tether_collector.core import inputs as i
from tether_collector.keeper import jsonlite, records
from tether_collector.spool_inputs import InputReader
from tether_collector.spool_reader import SpoolReader
from tether_fuzz.target import Features, Target, law
from tether_fuzz.targets import machine as m

NONCE: Final = "nonce-of-this-spool"
SALT: Final = records.salt_of(NONCE)
_READS_MAX: Final = 4000
_SHM: Final = Path("/dev/shm")


@contextmanager
def written(data: bytes) -> Iterator[Path]:
    """A keeper's folder whose spool has these bytes; each segment header begins another segment."""
    with tempfile.TemporaryDirectory(prefix="tether-fuzz-", dir=_SHM if _SHM.is_dir() else None) as name:
        folder = Path(name)
        (folder / "spool").mkdir()
        (folder / "spawn.json").write_text(json.dumps({"nonce": NONCE}))
        for number, part in enumerate(_segments(data), 1):
            head = records.parse_segment_header(part)
            first = head[1] if head is not None and 0 < head[1] < 10**12 else number
            (folder / "spool" / records.segment_name(first)).write_bytes(part)
        yield folder


def _segments(data: bytes) -> list[bytes]:
    parts = data.split(records.SEGMENT_MAGIC)
    return [parts[0]] * bool(parts[0]) + [records.SEGMENT_MAGIC + part for part in parts[1:]][:8]


def run_reader(data: bytes) -> Features:
    features: set[Hashable] = set()
    with written(data) as folder:
        reader = SpoolReader(folder)
        try:
            after = 0
            for _ in range(_READS_MAX):
                batch = reader.read(after, 512)
                if batch.gap is not None:
                    law(batch.gap.from_record == after + 1, "a gap begins where reading goes on")
                    law(batch.gap.to_record >= batch.gap.from_record, "a gap has a record")
                    after = batch.gap.to_record
                    features.add(batch.gap.reason)
                for record in batch.records:
                    law(record.number == after + 1, "records come in order, without holes")
                    law(record.data in data, "a record's bytes are on the disk")
                    after = record.number
                    features.add(record.kind)
                features.add((batch.at_end, batch.torn))
                if batch.at_end and not batch.records and batch.gap is None:
                    break
            else:
                law(False, "reading comes to an end")
            state = reader.latest_state()
            features.add(state is not None)
        finally:
            reader.close()
    return features


def run_inputs(data: bytes) -> Features:
    """The same bytes, through the joiner of lines into the machine."""
    driven = m.Driven(m.start("scripted"))
    with written(data) as folder:
        reader = InputReader(folder)
        try:
            before = 0
            for number in range(_READS_MAX):
                step = reader.read()
                for input_, record in step.inputs:
                    law(record > before, "an input has a record of its own")
                    before = record
                    if isinstance(input_, i.Note) and input_.kind in _JUDGED:
                        continue  # written only after they were judged, or by the collector itself
                    driven.apply(input_, record, reload=number % 3 == 0)
                if not step.moved:
                    break
            else:
                law(False, "reading comes to an end")
        finally:
            reader.close()
    driven.finish()
    return driven.features


_JUDGED: Final = ("control", "process", "process_refused", "released")


def run_jsonlite(data: bytes) -> Features:
    """The keeper's parser and the library's agree on every object."""
    try:
        value = jsonlite.loads(data)
    except ValueError:
        return ["refused"]
    law(json.loads(data) == value, "both parsers read the same")
    try:
        text = jsonlite.dumps(value)
    except ValueError:
        return ["not finite"]
    law(jsonlite.loads(text) == value, "what is written can be read")
    return ["accepted"]


def _segment(first: int, *items: tuple[int, bytes, bytes]) -> bytes:
    encoded = [
        records.encode(SALT, kind, first + at, 1_000_000 + at, meta, data)
        for at, (kind, meta, data) in enumerate(items)
    ]
    return records.segment_header(SALT, first) + b"".join(encoded)


def _meta(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


_SAID: Final = tuple(
    (records.STDOUT, records.META_NONE, json.dumps(line).encode())
    for line in (
        {"type": "session", "session_id": "s1", "version": "1"},
        {"type": "turn.started", "prompt": m.PROMPT_ID},
        {"type": "delta", "segment": "a", "text": "hel"},
        {"type": "text", "segment": "a", "text": "hello"},
        {"type": "ask", "request": "i1", "kind": "approval", "tool": "look", "input": {}},
        {"type": "result", "status": "completed"},
    )
)
_NOTES: Final = (
    (records.ADAPTER, _meta(name="scripted", version="1"), b""),
    (records.NOTE, _meta(kind="gap"), _meta(reason="corrupt")),
    (records.NOTE, _meta(kind="offers"), _meta(offers=[{"asked": "x", "answer": {"decision": "allow"}}])),
    (records.NOTE, _meta(kind="spawn_failed"), _meta(detail="none", errno=2)),
    (records.STDIN, _meta(control_id="opening:prompt"), b"{}\n"),
    (records.STDIN_DONE, _meta(control_id="opening:prompt", result="written"), b""),
    (records.TIMER, _meta(name="first_event"), b""),
)
_LEAVING: Final = (
    (records.STDOUT, records.META_CONTINUES, b'{"type":'),
    (records.STDOUT, records.META_NO_EOL, b'"usage"}'),
    (records.STDERR, records.META_NONE, b"it complains"),
    (records.EOF, _meta(stream="stdout"), b""),
    (records.EXIT, _meta(rc=0), b""),
    (records.PROOF, _meta(method="pid_namespace", detail="d"), b""),
)


def _spool_seeds() -> Iterable[bytes]:
    yield _segment(1, *_NOTES[:1], *_NOTES[4:], *_SAID, *_LEAVING)
    for note in _NOTES:
        yield _segment(1, *_SAID[:2], note, *_SAID[2:], *_LEAVING)
    second = _segment(5, (records.STATE, _meta(state_record=4), b"{}"), *_SAID[2:], *_LEAVING)
    yield _segment(1, *_SAID[:4]) + second
    yield _segment(1, *_SAID[:2]) + second


TARGETS: Final = (
    Target(
        "spool",
        "collector",
        "spool",
        run_reader,
        _spool_seeds,
        traced=("tether_collector.spool_reader", "tether_collector.keeper.records"),
    ),
    Target("spool-machine", "collector", "spool", run_inputs, _spool_seeds, traced=("tether_collector.",)),
    Target(
        "keeper-json",
        "collector",
        "json",
        run_jsonlite,
        lambda: [b'{"id":1,"op":"stdin","data":"aGk=","n":1.5}'],
        traced=("tether_collector.keeper.jsonlite",),
    ),
)
