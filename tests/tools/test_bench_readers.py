"""`tether_bench.reader_process` and what its readers' samples become."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tether_bench import readers
from tether_bench.reader_process import Connection, deltas, judge
from tether_bench.readers import Outcome, payload, raise_descriptors
from tether_bench.stats import percentile_of_counts
from tether_bench.tap import BenchError


def test_percentiles_of_counted_samples_are_those_of_the_samples() -> None:
    assert percentile_of_counts({1: 98, 5: 1, 9: 1}, 0.5) == 1.0
    assert percentile_of_counts({1: 98, 5: 1, 9: 1}, 0.99) == 5.0
    assert percentile_of_counts({7: 3}, 1.0) == 7.0
    with pytest.raises(ValueError, match="no samples"):
        percentile_of_counts({}, 0.5)


@pytest.mark.parametrize("size", [1, 13, 10_000])
def test_each_delta_is_timed_by_the_piece_that_made_its_line_whole_and_completed_texts_are_none(size: int) -> None:
    completed = b'data: {"type":"text.completed","body":{"text":"e000001 e000002 "}}\n\n'
    data = payload("e000001") + payload("e000002") + completed
    pieces = [(float(at), data[at : at + size]) for at in range(0, len(data), size)]
    found = list(deltas(pieces))
    assert [token for token, _ in found] == ["e000001", "e000002"]
    end_of_first = data.index(b"\n\n") - 1
    assert found[0][1] == end_of_first // size * size


def test_what_a_reader_did_not_get_is_lost_and_what_it_got_twice_is_doubled() -> None:
    near, far = socket.socketpair()
    with near, far:
        one = Connection(near, b"")
        one.pieces = [(1.25, payload("e000001")), (2.0, payload("e000002")), (2.5, payload("e000002"))]
        found = judge([one], {"e000001": 1.0, "e000002": 2.0, "e000003": 3.0})
    assert found["delays"] == {2500: 1, 0: 1}
    assert (found["lost"], found["doubled"]) == (1, 1)
    assert one.pieces == []


def test_a_round_without_an_event_has_no_percentile() -> None:
    with pytest.raises(BenchError, match="no event came"):
        Outcome({}, cut=0, lost=5, doubled=0, megabytes=0.0).ms(0.99)


def test_open_files_that_the_hard_limit_does_not_allow_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (256, 1024))
    with pytest.raises(BenchError, match=r"4096 open files, the hard limit is 1024.*ulimit"):
        raise_descriptors()


def test_open_files_are_raised_only_where_they_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, limits: asked.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (1024, 8192))
    raise_descriptors()
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (8192, 8192))
    raise_descriptors()
    assert asked == [(readers.DESCRIPTORS_MIN, 8192)]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-P", "-m", "tether_bench.reader_process"]
    running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def _ask(process: subprocess.Popen[bytes], **command: object) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(command).encode() + b"\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def test_a_reader_process_tells_what_all_its_readers_got_and_who_was_cut(process: subprocess.Popen[bytes]) -> None:
    count = 12
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while len(accepted) < count:
                connection, _ = listener.accept()
                connection.sendall(b"ready\n")
                accepted.append(connection)

        accepting = threading.Thread(target=accept)
        accepting.start()
        where = {"host": "127.0.0.1", "port": listener.getsockname()[1]}
        assert _ask(process, do="open", hello="hello\n", ready="ready", count=count, **where) == {"open": count}
        accepting.join()
        printed = {"e000001": time.time(), "e000002": time.time()}
        accepted[0].sendall(payload("e000001"))
        accepted[0].close()  # cut before the second
        for connection in accepted[1:]:
            connection.sendall(payload("e000001") + payload("e000002"))
        there = _ask(process, do="collect", until="e000002 ", timeout_s=10)
        assert there == {"there": count - 1, "cut": 1}
        told = _ask(process, do="judge", printed=printed)
        assert (told["lost"], told["doubled"]) == (1, 0)
        assert sum(told["delays"].values()) == 2 * count - 1
        assert _ask(process, do="close") == {"closed": count}
        for connection in accepted[1:]:
            connection.close()


def test_readers_that_are_refused_are_told_with_what_the_server_said(process: subprocess.Popen[bytes]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            connection, _ = listener.accept()
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 401 Unauthorized\r\n\r\n")
            connection.close()

        refusing = threading.Thread(target=refuse)
        refusing.start()
        where = {"host": "127.0.0.1", "port": listener.getsockname()[1]}
        answer = _ask(process, do="open", hello="hello\n", ready="event: live", count=1, **where)
        refusing.join()
    assert "401 Unauthorized" in answer["problem"]
