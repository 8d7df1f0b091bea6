"""The folder of a keeper that is gone: what is appended is read, the state that the log has overtaken is chosen."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tether import ids
from tether.events import Event
from tether.frames import Position
from tether_collector.core.adapters import adapter_for
from tether_collector.core.adapters.base import Launch
from tether_collector.core.inputs import Exited, Note, OutputLine, Proved, StdinDone, StdinLine, StreamClosed, Timer
from tether_collector.keeper import records
from tether_collector.keeper.spool import SpoolWriter
from tether_collector.pipeline import Base, Pipeline
from tether_collector.spool_inputs import InputReader, KeeperAliveError, append_to_dead, begins_whole, states
from tether_collector.sweep import sweep

NONCE = "nonce-0123456789abcdef"
TARGET = ids.ExecutionTarget(
    tenant="t",
    workspace="w",
    conversation="c",
    response="rsp_1",
    response_generation=1,
    execution="exe_1",
    execution_generation=1,
    sandbox="sbx_1",
    boot="boot_1",
    process_generation=1,
)
LAUNCH = Launch(execution="exe_1", prompt_id="p", content=[{"type": "text", "text": "hi"}], cwd="/", session="s")
CLAIM = Event(ordinal=1, at=1, type="execution.started", body={"agent": "scripted", "boot": "b", "instance": "i",
    "process": 1, "target": {}, "request": "r", "adapter_version": "1"})  # fmt: skip


def spool(folder: Path) -> SpoolWriter:
    (folder / "spool").mkdir(parents=True, exist_ok=True)
    return SpoolWriter(str(folder / "spool"), NONCE, 1 << 20, 1 << 24)


def text_line(number: int) -> bytes:
    return json.dumps({"type": "text", "segment": f"s{number}", "text": f"line {number}"}).encode()


def rebuilt(folder: Path, ordinal: int = 1) -> Pipeline:
    base = Base(ordinal, Position(record=0, index=0), 9, 9)
    return Pipeline.rebuild(folder, LAUNCH, adapter_for("scripted"), CLAIM, TARGET, base)


def everything(pipeline: Pipeline) -> list[Event]:
    found: list[Event] = []
    while (progress := pipeline.step()).moved:
        found += [event for event, _ in progress.events]
    return found


def test_every_kind_of_record_is_its_input(tmp_path: Path) -> None:
    writer = spool(tmp_path)
    at = 5_000_000
    writer.append(records.STDIN, b"{}\n", b'{"control_id": "c1"}', at)
    writer.append(records.STDIN_DONE, b"", b'{"control_id": "c1", "result": "written"}', at)
    writer.append(records.STDOUT, b"half", records.META_CONTINUES, at)
    writer.append(records.STDERR, b"oops", b"", at)
    writer.append(records.STDOUT, b" line", records.META_NO_EOL, at)
    writer.append(records.TIMER, b"", b'{"name": "watchdog"}', at)
    writer.append(records.NOTE, b'{"control": "c2"}', b'{"kind": "control"}', at)
    writer.append(records.NOTE, b"", b'{"note": "backpressure", "on": true}', at)
    writer.append(records.NOTE, b"damaged", b'{"kind": "control"}', at)
    writer.append(records.EOF, b"", b'{"stream": "stdin"}', at)
    writer.append(records.EXIT, b"", b'{"rc": null, "signal": 9}', at)
    writer.append(records.PROOF, b"", b'{"method": "pid_namespace", "empty": true}', at)
    writer.flush()
    reader = InputReader(tmp_path)
    assert reader.read().inputs == [
        (StdinLine(5000, "c1", b"{}\n"), 1),
        (StdinDone(5000, "c1", "written"), 2),
        (OutputLine(5000, "stderr", b"oops", 4), 4),
        (OutputLine(5000, "stdout", b"half line", 9, complete=False), 5),
        (Timer(5000, "watchdog"), 6),
        (Note(5000, "control", {"control": "c2"}), 7),
        (StreamClosed(5000, "stdin"), 10),
        (Exited(5000, -9), 11),
        (Proved(5000, "pid_namespace"), 12),
    ]
    reader.close()


def test_an_exec_that_failed_is_no_exit(tmp_path: Path) -> None:
    writer = spool(tmp_path)
    failure = {"rc": None, "signal": None, "exec_error": {"stage": "exec", "errno": 2, "message": "No such file"}}
    writer.append(records.EXIT, b"", json.dumps(failure).encode(), 1000)
    writer.flush()
    reader = InputReader(tmp_path)
    assert reader.read().inputs == [(Note(1, "spawn_failed", {"detail": "exec: No such file", "errno": 2}), 1)]
    reader.close()


def test_missing_records_are_an_input_with_the_number_of_the_last(tmp_path: Path) -> None:
    writer = spool(tmp_path)
    for number in range(6):
        writer.append(records.STDOUT, text_line(number), b"", 1_000_000)
    writer.flush()
    segment = tmp_path / "spool" / "000000000001.seg"
    data = bytearray(segment.read_bytes())
    at = data.index(b"line 2")
    data[at : at + 4] = b"XXXX"
    segment.write_bytes(data)
    reader = InputReader(tmp_path)
    found = [*reader.read().inputs, *reader.read().inputs]
    assert [record for _, record in found] == [1, 2, 3, 4, 5, 6]
    note = found[2][0]
    assert isinstance(note, Note) and note.body == {"reason": "corrupt", "detail": "spool records 3 to 3"}
    reader.close()


@pytest.mark.parametrize("partial_looks", range(12))
def test_a_record_that_becomes_whole_between_two_looks_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partial_looks: int
) -> None:
    writer = spool(tmp_path)
    for number in range(3):
        writer.append(records.STDOUT, text_line(number), b"", 1_000_000)
    writer.flush()
    data = (tmp_path / "spool" / "000000000001.seg").read_bytes()
    half = data.index(b"line 1")
    looks = 0

    def pread(fd: int, count: int, offset: int) -> bytes:
        """The writer is in the middle of the second record for some looks, then done with all."""
        nonlocal looks
        looks += 1
        end = half if looks <= partial_looks else len(data)
        return data[offset : min(end, offset + count)]

    monkeypatch.setattr("tether_collector.spool_reader.os.pread", pread)
    reader = InputReader(tmp_path)
    found = [pair for _ in range(4) for pair in reader.read().inputs]
    assert [(type(input_).__name__, record) for input_, record in found] == [
        ("OutputLine", 1),
        ("OutputLine", 2),
        ("OutputLine", 3),
    ]
    reader.close()


def test_what_is_appended_to_a_dead_spool_follows_what_was_there(tmp_path: Path) -> None:
    writer = spool(tmp_path)
    writer.append(records.STDOUT, b"one", b"", 1_000_000)
    writer.append(records.STDOUT, b"torn", b"", 1_000_000)
    writer.flush()
    segment = tmp_path / "spool" / "000000000001.seg"
    os.truncate(segment, segment.stat().st_size - 2)
    proof = {"method": "keeper_gone", "empty": True}
    assert append_to_dead(tmp_path, NONCE, records.PROOF, proof, unless="proof")
    assert not append_to_dead(tmp_path, NONCE, records.PROOF, proof, unless="proof")
    reader = InputReader(tmp_path)
    found = [*reader.read().inputs, *reader.read().inputs]
    assert [type(input_).__name__ for input_, _ in found] == ["OutputLine", "Proved"]
    assert [record for _, record in found] == [1, 2]
    reader.close()


def test_a_torn_append_is_replaced(tmp_path: Path) -> None:
    assert append_to_dead(tmp_path, NONCE, records.NOTE, {"kind": "spawn_failed"}, b'{"detail": "x"}')
    (torn := tmp_path / "spool" / "000000000002.seg").write_bytes(
        records.segment_header(records.salt_of(NONCE), 2) + b"\xf5T"
    )
    assert append_to_dead(tmp_path, NONCE, records.PROOF, {"method": "never_spawned"}, unless="proof")
    assert torn.stat().st_size > 40
    reader = InputReader(tmp_path)
    assert [record for step in (reader.read(), reader.read()) for _, record in step.inputs] == [1, 2]
    reader.close()


def test_nothing_is_appended_beside_a_living_keeper(tmp_path: Path) -> None:
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with pytest.raises(KeeperAliveError):
            append_to_dead(tmp_path, NONCE, records.PROOF, {"method": "keeper_gone"})
    finally:
        os.close(lock)


def test_a_replay_from_a_saved_state_gives_what_a_replay_from_the_beginning_gives(tmp_path: Path) -> None:
    writer = spool(tmp_path)
    for number in range(10):
        writer.append(records.STDOUT, text_line(number), b"", 1_000_000)
    writer.flush()
    first = rebuilt(tmp_path)
    early = everything(first)
    first.told(early, early[-1].end, 20, 3)
    state = first.save(10)
    assert state is not None and writer.rotate(state, b'{"state_record": 10}') == 11
    for number in range(10, 20):
        writer.append(records.STDOUT, text_line(number), b"", 1_000_000)
    writer.flush()
    whole = [*early, *everything(first)]
    for ordinal in range(1, whole[-1].end):
        again = rebuilt(tmp_path, ordinal)
        found = everything(again)
        assert found == [event for event in whole if event.ordinal > ordinal]
        assert again.caught_up and again.fold.applied == ordinal
        again.close()
    (tmp_path / "spool" / "000000000001.seg").unlink()
    assert not begins_whole(tmp_path) and [state.state_record for state in states(tmp_path)] == [10]
    later = rebuilt(tmp_path, early[-1].end)
    assert everything(later) == whole[len(early) :] and later.lead(1) is None
    assert not later.fold.freeze().partial
    later.close()
    first.close()


def test_a_log_that_lost_more_than_the_spool_has_gets_one_event_for_what_is_missing(tmp_path: Path) -> None:
    writer = spool(tmp_path)
    for number in range(10):
        writer.append(records.STDOUT, text_line(number), b"", 1_000_000)
    writer.flush()
    first = rebuilt(tmp_path)
    early = everything(first)
    state = first.save(10)
    first.close()
    assert state is not None and writer.rotate(state, b'{"state_record": 10}')
    writer.append(records.STDOUT, text_line(10), b"", 1_000_000)
    writer.flush()
    (tmp_path / "spool" / "000000000001.seg").unlink()
    pipeline = rebuilt(tmp_path, 3)
    lead = pipeline.lead(1)
    assert lead is not None
    assert (lead[0].ordinal, lead[0].end, lead[0].body["reason"]) == (4, early[-1].end, "durability_gap")
    assert everything(pipeline)[0].ordinal == early[-1].end + 1
    pipeline.close()


def test_after_a_lost_tail_the_ordinals_go_on_behind_the_logs(tmp_path: Path) -> None:
    writer = spool(tmp_path)
    for number in range(3):
        writer.append(records.STDOUT, text_line(number), b"", 1_000_000)
    writer.flush()
    pipeline = rebuilt(tmp_path, 40)
    assert everything(pipeline) == [] and pipeline.behind_log
    append_to_dead(tmp_path, NONCE, records.NOTE, {"kind": "gap"}, json.dumps(pipeline.gap_body()).encode())
    append_to_dead(tmp_path, NONCE, records.PROOF, {"method": "keeper_gone"})
    told = everything(pipeline)
    assert told[0].type == "gap" and told[0].body["to"] == 40
    assert [event.ordinal for event in told] == list(range(41, 41 + len(told)))
    assert told[-1].type == "execution.ended"
    again = rebuilt(tmp_path, 42)
    assert everything(again) == told[2:]
    assert again.fold.freeze().partial
    pipeline.close()
    again.close()


def sleeper(nonce: str) -> subprocess.Popen[bytes]:
    code = "import time; time.sleep(60)"
    environ = {**os.environ, "TETHER_PROCESS_NONCE": nonce}
    return subprocess.Popen([sys.executable, "-c", code], env=environ, start_new_session=True)


def test_a_sweep_kills_what_carries_the_marker_and_nothing_else() -> None:
    marked, other = sleeper("exe_swept-1"), sleeper("exe_other-1")
    try:
        assert asyncio.run(sweep("exe_swept-"))
        assert marked.wait(5) == -9 and other.poll() is None
    finally:
        for process in (marked, other):
            process.kill()
            process.wait()
