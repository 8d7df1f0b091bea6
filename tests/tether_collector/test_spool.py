"""The spool's writer and reader against each other: every damage is told, nothing is misread."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tether_collector.keeper import records
from tether_collector.keeper.jsonlite import dumps, loads
from tether_collector.keeper.lines import LineSplitter
from tether_collector.keeper.spool import SpoolWriter
from tether_collector.spool_inputs import append_to_dead
from tether_collector.spool_reader import LatestState, LineJoiner, SpoolGap, SpoolReader, SpoolRecord

NONCE = "nonce-of-this-spool"
BIG = 2**40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spool").mkdir()
    return tmp_path


@pytest.fixture
def reader(folder: Path) -> Iterator[SpoolReader]:
    spool = SpoolReader(folder)
    yield spool
    spool.close()


def writer(folder: Path, segment_bytes_max: int = BIG, quota_bytes: int = BIG, nonce: str = NONCE) -> SpoolWriter:
    return SpoolWriter(str(folder / "spool"), nonce, segment_bytes_max, quota_bytes)


def put(spool: SpoolWriter, *lines: bytes) -> None:
    for line in lines:
        spool.append(records.STDOUT, line, at_us=7)
        assert spool.flush()


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "spool").iterdir())


def numbers(found: tuple[SpoolRecord, ...]) -> list[int]:
    return [record.number for record in found]


def test_every_kind_comes_back_as_it_was_written(folder: Path, reader: SpoolReader) -> None:
    spool = writer(folder)
    for kind in records.KIND_NAMES:
        spool.append(kind, bytes([kind, 0, 10]), dumps({"k": kind, "text": 'ü"\n'}), at_us=1000 + kind)
    assert spool.flush(sync=True)
    batch = reader.read(0)
    assert batch.at_end and not batch.torn and batch.gap is None
    assert batch.records == tuple(
        SpoolRecord(kind, 1000 + kind, name, {"k": kind, "text": 'ü"\n'}, bytes([kind, 0, 10]))
        for kind, name in records.KIND_NAMES.items()
    )


def test_a_spool_cut_at_any_byte_gives_its_whole_records_and_says_torn(folder: Path) -> None:
    spool = writer(folder)
    ends = [records.SEGMENT_HEADER_BYTES]
    for line in (b"one", b"", b"three " * 5, b"\xf5TR\x01"):
        put(spool, line)
        ends.append(segments(folder)[0].stat().st_size)
    whole = segments(folder)[0].read_bytes()
    for cut in range(len(whole) + 1):
        segments(folder)[0].write_bytes(whole[:cut])
        spool_reader = SpoolReader(folder)
        batch = spool_reader.read(0)
        complete = sum(1 for end in ends[1:] if end <= cut)
        assert numbers(batch.records) == list(range(1, complete + 1)), cut
        assert batch.gap is None and batch.at_end
        assert batch.torn == (cut >= ends[0] and cut not in ends), cut
        spool_reader.close()


def test_a_reader_that_was_told_the_last_record_looks_for_no_more_until_it_is_told_again(
    folder: Path, reader: SpoolReader
) -> None:
    spool = writer(folder)
    put(spool, b"one", b"two")
    assert numbers(reader.read(0, told=2).records) == [1, 2]
    put(spool, b"three")
    assert reader.read(2, told=2).records == ()
    assert numbers(reader.read(2, told=3).records) == [3]
    put(spool, b"four")
    assert numbers(reader.read(3).records) == [4]


def test_what_is_damaged_is_told_as_a_gap_also_to_a_reader_that_was_told_the_last_record(folder: Path) -> None:
    spool = writer(folder)
    put(spool, b"one", b"the damaged one", b"three")
    path = segments(folder)[0]
    path.write_bytes(path.read_bytes().replace(b"damaged", b"DAMAGED"))
    spool_reader = SpoolReader(folder)
    first = spool_reader.read(0, told=3)
    again = spool_reader.read(1, told=3)
    assert numbers(first.records) == [1]
    assert again.gap == SpoolGap(2, 2, "corrupt") and numbers(again.records) == [3]
    spool_reader.close()


def test_a_reader_follows_a_record_that_grows_byte_by_byte(folder: Path, reader: SpoolReader) -> None:
    spool = writer(folder)
    put(spool, b"first", b"second line")
    path = segments(folder)[0]
    whole = path.read_bytes()
    path.write_bytes(b"")
    seen: list[int] = []
    for cut in range(len(whole) + 1):
        with path.open("r+b") as file:
            file.write(whole[:cut])
        batch = reader.read(seen[-1] if seen else 0)
        assert batch.gap is None
        seen += numbers(batch.records)
    assert seen == [1, 2]


def test_any_damaged_byte_in_the_middle_is_a_gap_of_that_record_and_reading_goes_on(folder: Path) -> None:
    spool = writer(folder)
    put(spool, b"one", b"two")
    start = segments(folder)[0].stat().st_size
    put(spool, b"the damaged one")
    end = segments(folder)[0].stat().st_size
    put(spool, b"four", b"five")
    path = segments(folder)[0]
    whole = path.read_bytes()
    for at in range(start, end):
        for value in {whole[at] ^ 0x01, whole[at] ^ 0x80, 0x00, 0xFF} - {whole[at]}:
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            spool_reader = SpoolReader(folder)
            before = spool_reader.read(0)
            assert (numbers(before.records), before.gap) == ([1, 2], None), (at, value)
            after = spool_reader.read(2)
            assert after.gap == SpoolGap(3, 3, "corrupt"), (at, value)
            assert [r.data for r in after.records] == [b"four", b"five"]
            assert after.at_end or spool_reader.read(5).at_end
            # A reader that starts behind the damage needs to know nothing of it.
            assert numbers(spool_reader.read(3).records) == [4, 5]
            spool_reader.close()


def test_damage_at_the_end_becomes_a_gap_only_when_a_good_record_follows(folder: Path, reader: SpoolReader) -> None:
    spool = writer(folder)
    put(spool, b"one", b"two")
    path = segments(folder)[0]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 0xFF
    path.write_bytes(raw)
    assert numbers(reader.read(0).records) == [1]
    last = reader.read(1)
    assert (last.records, last.gap, last.at_end, last.torn) == ((), None, True, True)
    put(spool, b"three")
    after = reader.read(1)
    assert (after.gap, numbers(after.records)) == (SpoolGap(2, 2, "corrupt"), [3])


@pytest.mark.parametrize("torn", [b"", b"\xf5TR\x01 torn"], ids=["header", "torn"])
def test_a_reader_that_has_a_segment_open_sees_what_is_recorded_in_the_place_of_a_dead_keeper(
    folder: Path, reader: SpoolReader, torn: bytes
) -> None:
    writer(folder)  # and nothing whole is ever written to it
    [segment] = segments(folder)
    with segment.open("ab") as file:
        file.write(torn)
    assert reader.read(0).records == ()
    assert append_to_dead(folder, NONCE, records.PROOF, {"method": "keeper_gone"})
    assert [record.kind for record in reader.read(0).records] == ["proof"]


def test_a_spool_file_printed_by_the_cli_is_never_taken_for_records(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "spool").mkdir(parents=True)
    foreign = writer(other, nonce="nonce-of-another-one")
    put(foreign, *[b"foreign"] * 20)
    spool = writer(folder)
    put(spool, b"one", b"two")
    own, theirs = segments(folder)[0].read_bytes(), segments(other)[0].read_bytes()
    start = len(own)
    put(spool, own + theirs, b"four")
    path = segments(folder)[0]
    raw = bytearray(path.read_bytes())
    raw[start + 5] ^= 0xFF  # the checksum of the record that holds the copies
    path.write_bytes(raw)
    spool_reader = SpoolReader(folder)
    assert numbers(spool_reader.read(0).records) == [1, 2]
    after = spool_reader.read(2)
    assert (after.gap, [r.data for r in after.records]) == (SpoolGap(3, 3, "corrupt"), [b"four"])
    spool_reader.close()


def test_segments_follow_each_other_and_any_record_can_be_the_start(folder: Path) -> None:
    spool = writer(folder, segment_bytes_max=200)
    put(spool, *[b"line %d" % n for n in range(1, 41)])
    assert len(segments(folder)) > 5
    for after in range(41):
        spool_reader = SpoolReader(folder)
        found: list[int] = []
        while True:
            batch = spool_reader.read(found[-1] if found else after, 1)
            assert batch.gap is None
            found += numbers(batch.records)
            if batch.at_end:
                break
        assert found == list(range(after + 1, 41))
        spool_reader.close()


def test_the_budget_bounds_a_batch_and_at_least_one_record_comes(folder: Path, reader: SpoolReader) -> None:
    spool = writer(folder)
    put(spool, *[b"x" * 300_000] * 5)
    batch = reader.read(0, 1)
    assert numbers(batch.records) == [1] and not batch.at_end


def test_a_damaged_segment_header_loses_nothing(folder: Path) -> None:
    spool = writer(folder, segment_bytes_max=200)
    put(spool, *[b"line"] * 20)
    for path in segments(folder)[:2]:
        raw = bytearray(path.read_bytes())
        raw[9] ^= 0xFF
        path.write_bytes(raw)
    spool_reader = SpoolReader(folder)
    found: list[int] = []
    while new := numbers(spool_reader.read(len(found)).records):
        found += new
    assert found == list(range(1, 21))
    spool_reader.close()


def test_the_end_of_a_segment_that_is_cut_off_is_a_gap_up_to_the_next_segment(folder: Path) -> None:
    spool = writer(folder, segment_bytes_max=200)
    put(spool, *[b"line"] * 20)
    first, second = segments(folder)[:2]
    first.write_bytes(first.read_bytes()[:-1])
    boundary = int(second.name[:12])
    spool_reader = SpoolReader(folder)
    assert numbers(spool_reader.read(0).records) == list(range(1, boundary - 1))
    after = spool_reader.read(boundary - 2)
    assert after.gap == SpoolGap(boundary - 1, boundary - 1, "corrupt")
    assert after.records[0].number == boundary
    spool_reader.close()


def test_a_state_begins_a_segment_and_the_latest_is_found(folder: Path, reader: SpoolReader) -> None:
    spool = writer(folder)
    assert reader.latest_state() is None
    put(spool, b"one", b"two")
    assert spool.rotate(b"state A", dumps({"state_record": 2})) == 3
    put(spool, b"four")
    assert reader.latest_state() == LatestState(b"state A", 2, 3)
    assert spool.rotate(b"state B" * 100_000, dumps({"state_record": 4})) == 5
    assert reader.latest_state() == LatestState(b"state B" * 100_000, 4, 5)
    raw = bytearray(segments(folder)[-1].read_bytes())
    raw[-1] ^= 0xFF
    segments(folder)[-1].write_bytes(raw)
    assert reader.latest_state() == LatestState(b"state A", 2, 3)


def test_only_released_segments_before_one_with_state_are_deleted(folder: Path) -> None:
    spool = writer(folder, segment_bytes_max=200)
    put(spool, *[b"line"] * 30)
    count = len(segments(folder))
    assert spool.release(10, 0) == [], "no segment begins with state yet"
    spool.rotate(b"state", dumps({"state_record": 30}))
    assert spool.release(10, 0) == [1, 6]
    assert len(segments(folder)) == count + 1 - 2
    assert spool.release(10**9, 0)[-1] == int(segments(folder)[0].name[:12]) - 5
    assert [path.name[:12] for path in segments(folder)] == ["000000000031"]


def test_records_whose_segments_are_gone_are_an_evicted_gap(folder: Path, reader: SpoolReader) -> None:
    spool = writer(folder, segment_bytes_max=200)
    put(spool, *[b"line"] * 10)
    spool.rotate(b"state", dumps({"state_record": 10}))
    put(spool, b"after")
    spool.release(10, 0)
    batch = reader.read(3)
    assert batch.gap == SpoolGap(4, 10, "spool_evicted")
    assert numbers(batch.records) == [11, 12]


def test_the_quota_takes_the_oldest_released_and_then_says_that_it_is_used_up(folder: Path) -> None:
    spool = writer(folder, segment_bytes_max=1000, quota_bytes=5000)
    while not spool.over_quota:
        put(spool, b"x" * 100)
    last = spool.last
    spool.rotate(b"state", dumps({"state_record": last}))
    assert spool.over_quota
    spool.release(last // 2, BIG)
    assert not spool.over_quota
    assert spool.total_bytes < 5000
    assert int(segments(folder)[0].name[:12]) > 1
    assert int(segments(folder)[0].name[:12]) <= last // 2


def test_a_disk_that_is_full_loses_nothing_and_leaves_no_torn_middle(
    folder: Path, reader: SpoolReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = writer(folder)
    put(spool, b"before")
    real_write = os.write
    room = [10]

    def short_write(fd: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(28, "No space left on device")
        took = real_write(fd, data[: room[0]])
        room[0] -= took
        return took

    monkeypatch.setattr(os, "write", short_write)
    spool.append(records.STDOUT, b"during")
    assert not spool.flush()
    assert (spool.blocked, spool.last) == (True, 1)
    assert numbers(reader.read(0).records) == [1]
    spool.append(records.STDOUT, b"more")
    assert not spool.flush()
    monkeypatch.setattr(os, "write", real_write)
    assert spool.flush()
    assert (spool.blocked, spool.last, spool.pending_bytes) == (False, 3, 0)
    batch = reader.read(1)
    assert [r.data for r in batch.records] == [b"during", b"more"] and not batch.torn


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(st.lists(st.binary(max_size=60).map(lambda b: b.replace(b"z", b"\n")), max_size=12), st.integers(1, 20))
def test_splitting_and_joining_give_the_lines_back_however_the_bytes_are_cut(cuts: list[bytes], chunk: int) -> None:
    splitter, joiner = LineSplitter(chunk), LineJoiner()
    pieces = [piece for cut in cuts for piece in splitter.feed(cut)] + splitter.finish()
    metas = {b"": {}, records.META_CONTINUES: {"cont": True}, records.META_NO_EOL: {"eol": False}}
    lines = [
        line
        for n, (meta, data) in enumerate(pieces, 1)
        if (line := joiner.feed(SpoolRecord(n, 0, "stdout", metas[meta], data)))
    ]
    whole = b"".join(cuts)
    assert b"".join(line.data + (b"\n" if line.eol else b"") for line in lines) == whole
    assert len(lines) == len(whole.split(b"\n")) - (1 if whole.endswith(b"\n") or not whole else 0)
    assert all(len(data) <= chunk for _, data in pieces)
    assert not splitter.mid_line


def test_a_line_beyond_the_limit_is_cut_and_says_its_full_length() -> None:
    joiner = LineJoiner(line_bytes_max=10)
    assert joiner.feed(SpoolRecord(1, 0, "stdout", {"cont": True}, b"12345678")) is None
    assert joiner.feed(SpoolRecord(2, 0, "stderr", {}, b"between")) is not None
    line = joiner.feed(SpoolRecord(3, 9, "stdout", {}, b"abcdef"))
    assert line is not None
    assert (line.data, line.truncated, line.full_bytes) == (b"12345678ab", True, 14)
    assert (line.first_record, line.last_record, line.at_us) == (1, 3, 9)


def test_a_gap_breaks_the_line_that_was_open_and_makes_the_next_one_suspect() -> None:
    joiner = LineJoiner()
    joiner.feed(SpoolRecord(1, 0, "stdout", {"cont": True}, b"begin"))
    lost = joiner.feed_gap(SpoolGap(2, 3, "corrupt"), 5)
    assert [(line.data, line.broken) for line in lost] == [(b"begin", True)]
    tail = joiner.feed(SpoolRecord(4, 0, "stdout", {}, b"tail"))
    whole = joiner.feed(SpoolRecord(5, 0, "stdout", {}, b"whole"))
    assert tail is not None and tail.broken
    assert whole is not None and not whole.broken


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_the_small_json_agrees_with_itself_and_the_large_one(value: dict[str, object]) -> None:
    assert json.loads(dumps(value)) == value
    assert loads(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[1]", b"nul", b'{"a":1} x', b"{'a':1}", b'{"a":\xff}', b'{"a":NaN}', b"[" * 5000]
)
def test_what_is_no_json_object_is_one_kind_of_error(text: bytes) -> None:
    with pytest.raises(ValueError, match="JSON"):
        loads(text)
