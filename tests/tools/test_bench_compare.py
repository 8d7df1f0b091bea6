"""`tether_bench.compare`: its writers, its readers' steps, its table. Nothing of it is installed or fetched here."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tether_bench.compare import table
from tether_bench.compare.__main__ import main
from tether_bench.compare.contender import SseSteps, Step
from tether_bench.compare.install import InstallError, Pin, install, pins
from tether_bench.compare.others import OTHERS, _offset_of, _whole_answer
from tether_bench.compare.rounds import Results, _position
from tether_bench.compare.writing import Appender, event, perform, read_truth, redis_command
from tether_bench.tap import BenchError, Recording


def _plan(folder: Path, *counts: int) -> dict[str, object]:
    segments = []
    for number, count in enumerate(counts):
        go = folder / f"go-{number}"
        go.touch()
        segments.append({"go": str(go), "count": count, "interval_ms": 0})
    return {"truth": str(folder / "truth"), "segments": segments}


def test_tokens_are_numbered_through_all_segments_and_noted_before_they_are_written(tmp_path: Path) -> None:
    written: list[list[str]] = []
    plan = _plan(tmp_path, 3, 1)

    def write(tokens: Sequence[str]) -> None:
        assert set(tokens) <= set(read_truth(tmp_path / "truth"))
        written.append(list(tokens))

    perform(plan, write, 2)
    assert written == [["e000001", "e000002"], ["e000003"], ["e000004"]]
    assert list(read_truth(tmp_path / "truth")) == ["e000001", "e000002", "e000003", "e000004"]


def test_an_append_that_got_no_answer_is_sent_again_over_a_new_connection() -> None:
    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            first, _ = listener.accept()
            got.append(first.recv(4096))
            first.close()  # taken, never answered
            second, _ = listener.accept()
            got.append(second.recv(4096))
            second.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
            second.close()

        serving = threading.Thread(target=serve)
        serving.start()
        plan = {"kind": "http", "host": "127.0.0.1", "port": listener.getsockname()[1], "name": "/v1/stream/x"}
        with contextlib.closing(Appender(plan)) as appender:
            appender.append(["e000001"])
        serving.join()
    assert got[0] == got[1]
    assert got[0].startswith(b"POST /v1/stream/x HTTP/1.1\r\n")
    assert got[0].endswith(event("e000001").encode())


def test_a_redis_answer_is_whole_once_it_has_every_entry() -> None:
    entries = b"".join(b"*2\r\n$3\r\n%d-0\r\n*2\r\n$1\r\ne\r\n$2\r\nhi\r\n" % number for number in range(1, 4))
    data = b"*1\r\n*2\r\n$1\r\nx\r\n*3\r\n" + entries
    near, far = socket.socketpair()
    with near, far:
        for piece in (data[:20], data[20:60], data[60:]):
            far.sendall(piece)
        assert _whole_answer(near) == data
        far.sendall(b"*-1\r\n")
        assert _whole_answer(near) == b"*-1\r\n"
    assert redis_command(b"XADD", b"k") == b"*2\r\n$4\r\nXADD\r\n$1\r\nk\r\n"


def test_positions_and_tokens_of_a_durable_stream_are_read_from_its_events() -> None:
    body = (
        f"event: data\ndata:[{event('e000001')},{event('e000002')}]\n\n"
        'event: control\ndata:{"streamNextOffset":"0_90","upToDate":true}\n\n'
    ).encode()
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    recording = Recording("r", [(1.0, head + b"%x\r\n%s\r\n" % (len(body), body))])
    reader = SseSteps(_offset_of)
    assert [(step.position, step.tokens) for step in reader.steps(recording)] == [
        (None, ("e000001", "e000002")),
        ("0_90", ()),
    ]
    assert list(reader.steps(recording)) == []


def test_a_reader_that_comes_back_stands_behind_a_whole_step_and_events_that_never_came_move_nothing() -> None:
    tokens = [f"e{number:06d}" for number in range(1, 7)]
    steps = [
        Step(1.0, "a", ("e000001", "e000002")),
        Step(2.0, None, ("e000004",)),  # the third never came
        Step(3.0, "b", ()),
        Step(4.0, "c", ("e000005", "e000006")),
    ]
    assert _position(steps, tokens, 0) == (None, 0)
    assert _position(steps, tokens, 1) == ("a", 2)
    assert _position(steps, tokens, 3) == ("b", 4)
    with pytest.raises(BenchError, match="no position after 5"):
        _position(steps[:3], tokens, 5)


def test_the_agent_speaks_acp_and_ends_with_its_turn(tmp_path: Path) -> None:
    prompt = [{"type": "text", "text": json.dumps(_plan(tmp_path, 2))}]
    requests = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": 1}},
        {"jsonrpc": "2.0", "id": 2, "method": "session/new", "params": {"cwd": "/", "mcpServers": []}},
        {"jsonrpc": "2.0", "id": 3, "method": "session/prompt", "params": {"sessionId": "bench", "prompt": prompt}},
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tether_bench.compare.acp_agent"],
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [message.get("id") for message in told] == [1, 2, None, None, 3]
    texts = [message["params"]["update"]["content"]["text"] for message in told if "method" in message]
    assert texts == ["e000001 ", "e000002 "]


def test_the_table_has_a_contender_a_column_and_says_what_a_value_hides() -> None:
    results = {"tether": Results({"events_per_s": [3.0, 1.0, 2.0], "kill server: lost": [0.0]}), "pipe": Results()}
    results["tether"].notes["kill server: lost"] = "its writer ended"
    lines = table.table(results, {"tether": "0.1.0"}).splitlines()
    assert lines[0].split() == ["tether", "0.1.0", "pipe"]
    assert lines[2].split() == ["events_per_s", "2.00", "—"]
    assert lines[3].split() == ["kill", "server:", "lost", "0*", "—"]
    assert lines[4] == "* tether, kill server: lost: its writer ended"
    told = table.document(results, {"tether": "0.1.0"}, ["redis-streams: not installed"], {"cpus": 2})
    assert told["contenders"]["tether"]["metrics"]["events_per_s"] == {"value": 2.0, "rounds": [3.0, 1.0, 2.0]}
    assert told["missing"] == ["redis-streams: not installed"]


def test_every_contender_is_pinned_to_one_exact_version() -> None:
    found = pins()
    assert set(found) == {pin for pin, _ in OTHERS.values()}
    for pin in found.values():
        assert all(re.search(r"(@|==)\d+\.\d+\.\d+(\.\d+)?$", package) for package in pin.packages)


def test_an_install_without_its_installer_says_what_to_install_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    pin = Pin("thing", "npm", ("thing@1.0.0",), "1.0.0", "node_modules/thing/index.js")
    with pytest.raises(InstallError, match="npm was not found; install Node"):
        install(pin)
    assert list((tmp_path / "tether" / "compare" / "thing").iterdir()) == []


def test_an_unknown_contender_is_refused_with_the_names_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--only", "kafka"])
    assert "sandbox-agent" in capsys.readouterr().err
