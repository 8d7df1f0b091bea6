"""How an execution ends: by the agent's own terminal line or the proof of its end, and by nothing else."""

from __future__ import annotations

import pytest

from support_execution import PROMPT_ID, Rig, launch, started
from tether import events as ev
from tether_collector.core import inputs as i
from tether_collector.core.execution import FIRST_EVENT, SETTLE
from tether_collector.core.execution_state import DELTA_CHARS_MAX
from tether_collector.core.noise import RAW_EVENTS_MAX
from tether_collector.core.verdict import AGENT_START_FAILED

OK = {"type": "result", "status": "ok", "prompt": PROMPT_ID}
TEXT = {"type": "text", "segment": "s1", "text": "done"}


def test_the_machines_first_event_follows_the_claim() -> None:
    assert started().events[0].ordinal == 2


def test_opening_lines_are_wanted_until_the_keeper_recorded_them() -> None:
    rig = Rig()
    (write,) = rig.wants(i.WriteStdin)
    assert rig.wants(i.WriteStdin) == [write]
    rig.give(i.StdinLine(rig.at, write.control, write.data))
    assert rig.wants(i.WriteStdin) == []


def test_a_finished_agent_completes_then_leaves_then_is_proven_gone() -> None:
    rig = started()
    rig.say(TEXT, OK)
    assert rig.body(ev.RESPONSE_ENDED) == {"outcome": "completed"}
    assert rig.wants(i.CloseStdin)
    assert not rig.wants(i.SendSignal)
    rig.exit(0)
    assert ev.EXECUTION_ENDED not in rig.types()
    assert rig.wants(i.KillAll), "children may outlive the agent, and there is no proof while one does"
    rig.prove()
    ended = rig.body(ev.EXECUTION_ENDED)
    assert (ended["outcome"], ended["exit"], ended["proof"]["method"]) == ("completed", 0, "pid_namespace")
    assert rig.execution.ended
    assert rig.execution.wants() == []


def test_nothing_follows_the_end() -> None:
    rig = started()
    rig.say(OK)
    rig.exit()
    rig.prove()
    assert rig.say(TEXT) == rig.control("k1", "stop") == rig.prove() == rig.exit() == []


def test_g1_exit_0_without_a_terminal_line_is_lost() -> None:
    rig = started()
    rig.say({"type": "delta", "segment": "s1", "text": "half a "})
    rig.exit(0)
    rig.prove()
    ended = rig.body(ev.RESPONSE_ENDED)
    assert (ended["outcome"], ended["error"]["code"]) == ("lost", "EXECUTION_DURABILITY_GAP")
    assert rig.body(ev.EXECUTION_ENDED)["outcome"] == "lost"
    assert rig.body(ev.TEXT_COMPLETED) == {"segment": "s1", "text": "half a ", "partial": True}


def test_g2_an_agent_that_hangs_after_its_terminal_line_is_completed_and_ended_by_the_watchdog() -> None:
    rig = started()
    rig.say(OK)
    assert rig.deadline("watchdog") == 10_000
    rig.timer("watchdog")
    assert rig.wants(i.SendSignal) == [i.SendSignal("watchdog", "SIGTERM")]
    assert rig.deadline("watchdog.kill") == 5_000
    assert not rig.wants(i.KillAll)
    rig.timer("watchdog.kill")
    assert rig.wants(i.KillAll)
    rig.exit(-9)
    rig.prove()
    assert rig.body(ev.EXECUTION_ENDED)["outcome"] == "completed"


def test_g3_a_closed_stdout_with_a_living_process_is_no_end() -> None:
    rig = started()
    assert rig.give(i.StreamClosed(rig.at, "stdout")) == []
    assert rig.execution.status().state == "running"
    assert not rig.wants(i.KillAll)
    rig.control("k1", "stop")
    assert rig.wants(i.WriteStdin), "it can still be stopped"


def test_g3_a_closed_stdout_after_the_terminal_line_is_an_ordinary_end() -> None:
    rig = started()
    rig.say(OK)
    rig.give(i.StreamClosed(rig.at, "stdout"))
    rig.exit()
    rig.prove()
    assert rig.body(ev.EXECUTION_ENDED)["outcome"] == "completed"


def output(data: bytes, *, total: int | None = None, complete: bool = True) -> i.OutputLine:
    return i.OutputLine(1, "stdout", data, len(data) if total is None else total, complete)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (output(b'{"type":"text","segment":"s1","text":"\xc3"}'), "not UTF-8"),
        (output(b"not json"), "not JSON"),
        (output(b"\x00\x00"), "not JSON"),
        (output(b'{"type":"tex', complete=False), "not JSON, cut off by the end of the stream"),
        (output(b'{"type":"text"}', total=20_000_000), "longer than 15 bytes, cut"),
        (output(b'{"type":"usage","input_tokens":NaN}'), "not JSON"),
        (output(b'{"type":"usage","cost_usd":1e999}'), "not JSON"),
        (output(b"[1]"), "not a JSON object"),
        (output(b'{"a":' * 100_000), "nested more than 64 deep"),
        (output(b'{"type":"mystery"}'), "unknown type"),
        (output(b'{"type":["text"]}'), "unknown type"),
    ],
)
def test_g4_a_line_that_means_nothing_becomes_a_bounded_raw_event(line: i.OutputLine, why: str) -> None:
    rig = started()
    (event,) = rig.give(line)
    assert (event.type, event.body["why"], event.body["bytes"]) == (ev.RAW, why, line.bytes_total)
    assert len(event.body["preview"]) <= 1024
    assert "\x00" not in event.body["preview"]
    rig.say(TEXT, OK)
    assert rig.body(ev.TEXT_COMPLETED)["text"] == "done"


def test_g4_a_last_line_without_its_newline_counts_if_it_is_whole() -> None:
    rig = started()
    rig.give(output(b'{"type":"result","status":"ok"}', complete=False))
    rig.exit()
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == "completed"


def test_g4_a_delta_of_ten_mib_becomes_many_that_join_to_it() -> None:
    rig = started()
    text = "".join(f"{number:07d} " for number in range(10 * 1024 * 1024 // 8))
    rig.say({"type": "delta", "segment": "s1", "text": text})
    deltas = rig.bodies(ev.TEXT_DELTA)
    assert "".join(body["text"] for body in deltas) == text
    assert [body["offset"] for body in deltas] == list(range(0, len(text), DELTA_CHARS_MAX))


def test_g4_a_flood_of_stderr_is_cut_and_the_rest_counted() -> None:
    rig = started()
    for number in range(5_000):
        rig.complain(f"line {number}")
    assert len(rig.bodies(ev.RAW)) == RAW_EVENTS_MAX
    rig.say(b"garbage")
    assert rig.bodies(ev.RAW)[-1]["stream"] == "stdout", "each stream has its own share"
    rig.say(OK)
    rig.exit()
    assert rig.bodies(ev.RAW)[-1]["why"] == f"{5_000 - RAW_EVENTS_MAX} more lines of stderr were left out"


def test_a_lone_surrogate_is_mended_so_that_every_reader_can_take_the_event() -> None:
    rig = started()
    rig.say(b'{"type":"text","segment":"s1","text":"a\\ud800b \\ud83d\\ude00"}')
    assert rig.body(ev.TEXT_COMPLETED)["text"] == "a\ufffdb 😀"


def test_g9_a_terminal_line_with_background_work_is_not_the_end() -> None:
    rig = started()
    rig.say({"type": "background", "id": "b1", "state": "started"}, OK)
    assert ev.RESPONSE_ENDED not in rig.types()
    assert not rig.wants(i.CloseStdin)
    assert not rig.wants(i.Deadline)
    rig.say({"type": "background", "id": "b1", "state": "done"})
    assert rig.types()[-1] == ev.RESPONSE_ENDED


def test_a_turn_that_ended_background_work_owes_is_waited_for_with_a_bound() -> None:
    rig = Rig("claude")
    rig.write_all()
    session = {"session_id": "s", "parent_tool_use_id": None}
    rig.say(
        {"type": "system", "subtype": "init", **session},
        {"type": "system", "subtype": "task_started", "task_id": "t1", **session},
        {"type": "system", "subtype": "task_notification", "task_id": "t1", **session},
        {"type": "result", "subtype": "success", "is_error": False, **session},
    )
    assert ev.RESPONSE_ENDED not in rig.types()
    assert rig.deadline(SETTLE) == 2_000
    rig.timer(SETTLE)
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == "completed"


def test_a_deadline_of_an_earlier_turn_settles_nothing() -> None:
    rig = Rig("claude")
    rig.write_all()
    note = {"type": "system", "subtype": "task_notification", "task_id": "t1"}
    rig.say(
        {"type": "system", "subtype": "init", "session_id": "s"},
        {"type": "system", "subtype": "task_started", "task_id": "t1"},
        note,
        {"type": "result", "is_error": False},
    )
    rig.pass_ms(1_999)
    rig.give(i.Timer(rig.at, SETTLE))
    assert ev.RESPONSE_ENDED not in rig.types()


def test_a_process_that_never_came_to_be_fails_with_the_reason() -> None:
    rig = Rig()
    rig.note("spawn_failed", detail="no such file: claude", errno=2)
    assert rig.types() == [ev.RESPONSE_ENDED, ev.EXECUTION_ENDED]
    ended = rig.body(ev.EXECUTION_ENDED)
    assert (ended["outcome"], ended["error"]["code"], ended["proof"]["method"]) == (
        "failed",
        AGENT_START_FAILED,
        "never_spawned",
    )


def test_an_agent_that_fails_before_any_session_says_why_by_its_stderr() -> None:
    rig = Rig()
    rig.write_all()
    rig.complain("scripted: unknown option '--bad'")
    rig.exit(2)
    error = rig.body(ev.RESPONSE_ENDED)["error"]
    assert error["code"] == AGENT_START_FAILED
    assert "exit code 2" in error["detail"]
    assert "unknown option" in error["detail"]


def test_an_agent_killed_before_any_session_is_lost_not_failed() -> None:
    rig = Rig()
    rig.exit(-9)
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == "lost"


def test_a_proof_without_an_exit_closes_everything_that_was_open() -> None:
    rig = started()
    rig.say(
        {"type": "tool.start", "id": "t1", "name": "work", "input": {}},
        {"type": "ask", "request": "r1", "kind": "approval", "tool": "work", "tool_id": "t1", "input": {}},
    )
    rig.give(i.Proved(rig.at, "keeper_gone", "the socket's nonce is another"))
    assert rig.body(ev.TOOL_COMPLETED)["status"] == "interrupted"
    assert rig.body(ev.INTERACTION_RESOLVED)["outcome"] == "expired"
    assert rig.types()[-2:] == [ev.RESPONSE_ENDED, ev.EXECUTION_ENDED]
    assert "exit" not in rig.body(ev.EXECUTION_ENDED)


def test_an_unknown_way_of_proof_is_kept_as_its_detail() -> None:
    rig = started()
    rig.give(i.Proved(rig.at, "magic"))
    assert rig.body(ev.EXECUTION_ENDED)["proof"]["method"] == "provider"
    assert "magic" in rig.body(ev.EXECUTION_ENDED)["proof"]["detail"]


def test_a_session_that_cannot_be_resumed_fails_by_name() -> None:
    rig = Rig(start=launch(resume=True))
    rig.write_all()
    rig.say({"type": "error", "code": "session_not_found", "message": "no session with id x"})
    rig.exit(1)
    rig.prove()
    error = {"code": "RESUME_FAILED", "detail": "no session with id x", "choices": ["fresh", "history"]}
    assert rig.body(ev.RESPONSE_ENDED)["error"] == rig.body(ev.EXECUTION_ENDED)["error"] == error


def test_a_refused_credential_is_named_without_key_material() -> None:
    rig = Rig("claude")
    rig.write_all()
    secret = "api03-" + "abcdefgh" * 4
    detail = f"Invalid API key sk-ant-{secret} · Please run /login"
    rig.say(
        {"type": "system", "subtype": "init", "session_id": "s"},
        {"type": "system", "subtype": "api_retry", "attempt": 1, "max_retries": 10, "error_status": 401, "error": "x"},
        {"type": "result", "is_error": True, "terminal_reason": "api_error", "api_error_status": 401, "result": detail},
    )
    error = rig.body(ev.RESPONSE_ENDED)["error"]
    assert error["code"] == "model_auth"
    assert "Invalid API key" in error["detail"]
    assert "abcdefgh" not in str(rig.events)
    assert rig.body(ev.MODEL_REQUEST) == {
        "state": "retrying",
        "attempt": 1,
        "attempts_max": 10,
        "delay_ms": 0,
        "http_status": 401,
        "detail": "the model server refused the credentials (no key is configured)",
    }


def test_a_silent_agent_is_reported_once_and_not_killed() -> None:
    rig = Rig()
    rig.write_all()
    assert rig.deadline(FIRST_EVENT) == 30_000
    rig.timer(FIRST_EVENT)
    assert rig.body(ev.MODEL_REQUEST)["state"] == "started"
    assert rig.execution.wants() == []
    assert rig.give(i.Timer(rig.at, FIRST_EVENT)) == []


def test_a_gap_of_inputs_is_told_and_an_unknown_reason_is_called_corrupt() -> None:
    rig = started()
    rig.note("gap", reason="spool_evicted", **{"from": 3, "to": 9})
    rig.note("gap", reason="who knows", detail="record 12")
    assert rig.bodies(ev.GAP) == [
        {"reason": "spool_evicted", "from": 3, "to": 9},
        {"reason": "corrupt", "detail": "record 12"},
    ]


def test_a_record_that_was_applied_makes_no_event_again() -> None:
    rig = started()
    line = i.OutputLine(rig.at, "stdout", b'{"type":"text","segment":"s","text":"x"}', 40)
    assert rig.execution.apply(line, rig.record) == []
    assert rig.execution.last_record == rig.record


def test_status_follows_the_execution() -> None:
    rig = Rig()
    states = [rig.execution.status().state]
    rig.write_all()
    rig.say({"type": "session", "session_id": "s-1"})
    states.append(rig.execution.status().state)
    rig.say({"type": "ask", "request": "r1", "kind": "approval", "tool": "w", "input": {}})
    states.append(rig.execution.status().state)
    rig.control("k1", "answer", interaction="r1", decision="allow")
    states.append(rig.execution.status().state)
    rig.say(OK)
    states.append(rig.execution.status().state)
    rig.exit()
    rig.prove()
    states.append(rig.execution.status().state)
    assert states == ["starting", "running", "waiting", "running", "exiting", "ended"]
    assert rig.execution.status().native_session == rig.execution.target.native_session == "s-1"


@pytest.mark.parametrize(("said", "told"), [("error", "interrupted"), ("interrupted", "interrupted"), ("ok", "ok")])
def test_a_tool_that_fails_after_a_drain_told_the_agent_to_go_was_cut(said: str, told: str) -> None:
    rig = started()
    rig.say({"type": "tool.start", "id": "t1", "name": "build", "input": {}})
    rig.control("k1", "drain", kill_at=rig.at + 4000)
    rig.say({"type": "tool.end", "id": "t1", "status": said, "output": "Exit code 137"})
    rig.exit(143)
    rig.prove()
    completed = rig.body(ev.TOOL_COMPLETED)
    assert (completed["status"], completed["output"]) == (told, "Exit code 137")
    departure = rig.execution.departure()
    assert departure is not None
    assert departure.interrupted == (("build",) if told == "interrupted" else ())


def test_a_tool_that_fails_before_a_drain_has_failed() -> None:
    rig = started()
    rig.say({"type": "tool.start", "id": "t1", "name": "build", "input": {}})
    rig.say({"type": "tool.end", "id": "t1", "status": "error", "output": "Exit code 1"})
    rig.control("k1", "drain", kill_at=rig.at + 4000)
    assert rig.body(ev.TOOL_COMPLETED)["status"] == "error"
