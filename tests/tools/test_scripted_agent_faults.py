"""The scripted agent as a process: interrupts, signals, ends and misbehaviour."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support_scripted import Scripted, run_script, scripted, wait_until
from tether_oracle import load_truth


def records(agent: Scripted, ev: str | None = None) -> list[dict[str, Any]]:
    (process,) = load_truth(agent.truth).processes
    return [dict(record) for record in process.records if ev is None or record["ev"] == ev]


def ledger(agent: Scripted) -> list[tuple[str, str]]:
    return [(line.id, line.name) for line in load_truth(agent.truth).ledger]


# --- interrupt and signals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["!hang", "!sleep 1000", "!wait_file never", "!deltas 100000 1", "!flood 10000000"])
def test_an_interrupt_ends_the_turn_and_the_process_lives_on(tmp_path: Path, script: str) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt(script)
        agent.until("model", state="started")
        agent.send(type="interrupt", id="i1")
        agent.until("interrupted", id="i1")
        agent.until("result", status="interrupted")
        agent.prompt("next", "p2")
        agent.until("result", status="ok", prompt="p2")
        assert agent.finish() == 0


def test_an_interrupt_keeps_the_text_that_was_printed(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("!deltas 100000 1")
        agent.until("delta", text="e000003 ")
        agent.send(type="interrupt", id="i1")
        text = agent.until("text")
        assert text["aborted"] is True
        assert text["text"] == "".join(m["text"] for m in agent.seen if m["type"] == "delta")
        agent.until("result", status="interrupted")
        agent.finish()


def test_an_interrupt_cancels_a_pending_ask_and_ends_its_tool(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("!ask deploy")
        request = agent.until("ask")["request"]
        agent.send(type="interrupt", id="i1")
        agent.until("interrupted")
        agent.until("ask.cancelled", request=request)
        agent.until("tool.end", status="interrupted")
        agent.until("result", status="interrupted")
        agent.send(type="answer", request=request, decision="allow")
        agent.finish()
    assert ledger(agent) == []


def test_an_interrupt_of_a_running_tool_is_recorded_as_its_end(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("!tool write 1000000")
        agent.until("tool.progress")
        agent.send(type="interrupt", id="i1")
        agent.until("tool.end", status="interrupted")
        agent.finish()
    assert [(r["phase"], r.get("status")) for r in records(agent, "effect")] == [
        ("start", None),
        ("end", "interrupted"),
    ]


def test_an_interrupt_reaches_an_agent_whose_stdout_nobody_reads(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)  # one page: full after a line
    environment = {"TETHER_SCRIPTED_HOME": str(tmp_path), "TETHER_SCRIPTED_TRUTH": str(tmp_path / "truth")}
    command = [sys.executable, "-m", "scripted_agent"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=write_end, env=environment)
    os.close(write_end)
    try:
        assert process.stdin is not None
        process.stdin.write(b'{"type":"prompt","id":"p1","text":"!flood 10000000"}\n')
        process.stdin.flush()
        wait_until(lambda: any(p.printed for p in load_truth(tmp_path / "truth").processes), "the flood has begun")
        process.stdin.write(b'{"type":"interrupt","id":"i1"}\n')
        process.stdin.flush()
        wait_until(lambda: load_truth(tmp_path / "truth").processes[0].stdin[1:] != (), "the second line is got")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
        process.stdin.close()
    finally:
        process.kill()
        process.wait(20)
    os.close(read_end)


def test_sigterm_ends_the_process_without_a_result(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("!hang")
        agent.until("model")
        agent.process.send_signal(signal.SIGTERM)
        assert agent.process.wait(20) == 143
        assert agent.next() is None
    assert [record["signal"] for record in records(agent, "signal")] == ["SIGTERM"]
    assert records(agent, "exit")[0]["code"] == 143


def test_sigint_interrupts_the_turn_and_ends_the_process_with_a_result(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("!hang")
        agent.until("model")
        agent.process.send_signal(signal.SIGINT)
        agent.until("result", status="interrupted")
        assert agent.process.wait(20) == 0


def test_an_ignored_sigterm_is_recorded_and_changes_nothing(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("!ignore SIGTERM\nready\n!hang")
        agent.until("text", text="ready")
        agent.process.send_signal(signal.SIGTERM)
        wait_until(lambda: bool(records(agent, "signal")), "the signal is recorded")
        assert records(agent, "signal")[0]["ignored"] is True
        agent.send(type="interrupt", id="i1")
        agent.until("result", status="interrupted")
        assert agent.finish() == 0


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_failing_model_gives_a_result_with_its_code_and_exit_code_one(tmp_path: Path) -> None:
    code, agent = run_script(tmp_path, "!fail overloaded\nnever said")
    assert code == 1
    assert agent.until_seen("model", state="failed")["code"] == "overloaded"
    assert (agent.seen[-1]["status"], agent.seen[-1]["code"]) == ("error", "overloaded")
    assert agent.texts() == []


def test_a_retried_model_request_voids_the_segment_that_it_had_begun(tmp_path: Path) -> None:
    _, agent = run_script(tmp_path, "!retry 2\nat last")
    kinds = [t for t in agent.types() if t in ("delta", "model", "discard", "text")]
    assert kinds[:9] == ["model", "delta", "delta", "delta", "delta", "model", "discard", "model", "delta"]
    voided = agent.until_seen("discard")["segment"]
    assert voided not in [m["segment"] for m in agent.seen if m["type"] == "text"]
    assert agent.texts() == ["at last"]


def test_an_exit_in_mid_turn_has_its_code_and_no_result(tmp_path: Path) -> None:
    code, agent = run_script(tmp_path, "so far\n!exit 7\nnever said")
    assert code == 7
    assert "result" not in agent.types()
    assert agent.texts() == ["so far"]


def test_a_crash_ends_by_the_signal_and_leaves_a_complete_truth(tmp_path: Path) -> None:
    code, agent = run_script(tmp_path, "so far\n!crash SIGKILL")
    assert code == -signal.SIGKILL
    (process,) = load_truth(agent.truth).processes
    assert process.exit_code is None
    assert all(line.certain for line in process.printed)
    assert [line.message for line in process.printed] == agent.seen


def test_a_turn_can_end_with_its_result_and_the_process_stay_deaf(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("done\n!result\n!stay")
        agent.until("result", status="ok")
        agent.send(type="interrupt", id="i1")
        agent.prompt("anyone?", "p2")
        agent.close_stdin()
        wait_until(lambda: bool(records(agent, "stdin_eof")), "stdin is read to its end")
        assert len(records(agent, "stdin")) == 3
        assert agent.process.poll() is None
        agent.process.terminate()
        assert agent.process.wait(20) == 143
        assert agent.next() is None


def test_background_work_outlives_the_result_and_holds_the_process(tmp_path: Path) -> None:
    code, agent = run_script(tmp_path, "!background 0.05\nfront")
    assert code == 0
    ends = [t for t in agent.types() if t in ("background", "result")]
    assert ends == ["background", "result", "background"]
    assert [m["state"] for m in agent.seen if m["type"] == "background"] == ["started", "done"]


def test_a_touched_file_lets_another_script_go_on(tmp_path: Path) -> None:
    with scripted(tmp_path) as waiting:
        waiting.prompt("!wait_file sub/flag\nfree")
        waiting.until("model")
        (tmp_path / "other").mkdir()
        run_script(tmp_path / "other", f"!touch {tmp_path}/sub/flag")
        waiting.until("text", text="free")
        assert waiting.finish() == 0


# --- misbehaviour -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("invalid_json", lambda raw: raw.endswith(b'"text":\n')),
        ("not_object", lambda raw: json.loads(raw) == ["type", "text"]),
        ("empty", lambda raw: raw == b"\n"),
        ("nul", lambda raw: b"\x00\x00" in raw),
        ("half_utf8", lambda raw: b'\xc3\xa9\xe2\x82"' in raw),
        ("deep", lambda raw: raw.count(b"[") == 100_000),
    ],
)
def test_garbage_is_a_bad_line_between_good_ones(tmp_path: Path, kind: str, check: Any) -> None:
    code, agent = run_script(tmp_path, f"before\n!garbage {kind}\nafter")
    assert code == 0
    (bad,) = [m for m in agent.seen if m["type"] == "<bad>"]
    assert check(bad["raw"])
    assert agent.texts() == ["before", "after"]
    assert [r["garbage"] for r in records(agent, "stdout") if "garbage" in r] == [kind]


@pytest.mark.parametrize(("kind", "line_type"), [("unknown_type", "made.up"), ("nan", "usage"), ("huge=2", "huge")])
def test_garbage_that_python_reads_is_still_marked_as_garbage(tmp_path: Path, kind: str, line_type: str) -> None:
    _, agent = run_script(tmp_path, f"!garbage {kind}\nafter")
    marks = [r for r in records(agent, "stdout") if "garbage" in r]
    assert len(marks) == 1
    assert agent.until_seen(line_type)
    if kind == "huge=2":
        assert marks[0]["bytes"] > 2 << 20
    assert agent.texts() == ["after"]


def test_a_line_without_its_newline_is_a_good_line_at_the_end_of_output(tmp_path: Path) -> None:
    code, agent = run_script(tmp_path, "!garbage no_newline\n!exit 0")
    assert code == 0
    assert agent.texts() == ["no newline after x1"]
    last = records(agent, "stdout")[-1]
    assert last["newline"] is False


def test_a_newline_that_comes_late_keeps_both_lines_whole(tmp_path: Path) -> None:
    _, agent = run_script(tmp_path, "!garbage no_newline\nnext")
    assert agent.texts() == ["no newline after x1", "next"]


def test_stderr_lines_come_on_stderr(tmp_path: Path) -> None:
    _, agent = run_script(tmp_path, "!stderr 2000")
    assert agent.errors.count(b"scripted: stderr line") == 2000


def test_a_closed_stdout_ends_the_output_and_not_the_process(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("before\n!close_stdout\nunheard\n!touch reached\n!hang")
        while agent.next() is not None:
            pass
        wait_until((tmp_path / "reached").exists, "the script goes on")
        assert agent.process.poll() is None
    assert agent.texts() == ["before"]
    unprinted = [json.loads(record["line"])["type"] for record in records(agent, "unprinted")]
    assert unprinted == ["delta", "text"]


def test_a_reader_that_goes_away_does_not_end_the_process(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    environment = {"TETHER_SCRIPTED_HOME": str(tmp_path), "TETHER_SCRIPTED_TRUTH": str(tmp_path / "truth")}
    command = [sys.executable, "-m", "scripted_agent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=write_end, env=environment) as process:
        os.close(write_end)
        os.close(read_end)
        process.communicate(b'{"type":"prompt","id":"p1","text":"!tool write"}\n', timeout=20)
        assert process.returncode == 0
    truth = load_truth(tmp_path / "truth")
    assert len(truth.ledger) == 1
    assert not any(line.certain for line in truth.processes[0].printed)


@pytest.mark.parametrize("directive", ["fork2", "child"])
def test_a_stray_process_holds_the_pipe_and_shows_that_it_lives(tmp_path: Path, directive: str) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt(f"!{directive} 300\nspawned\n!exit 0")
        agent.until("text", text="spawned")
        assert agent.process.wait(20) == 0
        wait_until(lambda: any(agent.truth.glob("stray-p1-*.beat")), "a heartbeat")
        (beat,) = agent.truth.glob("stray-p1-*.beat")
        wait_until(lambda: beat.stat().st_size > 0, "the first beat")
        pid = int(json.loads(beat.read_text().splitlines()[0])["pid"])
        try:
            assert os.getsid(pid) != os.getsid(0)
            if directive == "fork2":
                os.kill(pid, signal.SIGTERM)
            size = beat.stat().st_size
            wait_until(lambda: beat.stat().st_size > size, "it lives on")
        finally:
            os.kill(pid, signal.SIGKILL)
        assert agent.next() is None


def test_a_child_dies_by_sigterm_unless_it_is_to_be_ignored(tmp_path: Path) -> None:
    for number, (prefix, survives) in enumerate((("", False), ("!ignore SIGTERM\n", True))):
        folder = tmp_path / str(number)
        folder.mkdir()
        with scripted(folder) as agent:
            agent.prompt(f"{prefix}!child 300\n!exit 0")
            assert agent.process.wait(20) == 0
            wait_until(lambda found=agent: any(b.stat().st_size for b in found.truth.glob("*.beat")), "a beat")  # type: ignore[misc]
            (beat,) = agent.truth.glob("*.beat")
            pid = int(json.loads(beat.read_text().splitlines()[0])["pid"])
            os.kill(pid, signal.SIGTERM)
            size = beat.stat().st_size
            if survives:
                wait_until(lambda path=beat, old=size: path.stat().st_size > old, "it lives on")  # type: ignore[misc]
                os.kill(pid, signal.SIGKILL)
            assert agent.next() is not None
            while agent.next() is not None:  # the pipe is closed once the child is gone
                pass
