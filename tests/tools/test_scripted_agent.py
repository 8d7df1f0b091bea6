"""The scripted agent as a process: each directive, what comes from outside, its truth and its ledger."""

from __future__ import annotations

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import scripted_agent
from support_scripted import Scripted, run_script, scripted, wait_until
from tether_oracle import load_truth


def records(agent: Scripted, ev: str | None = None) -> list[dict[str, Any]]:
    (process,) = load_truth(agent.truth).processes
    return [dict(record) for record in process.records if ev is None or record["ev"] == ev]


def ledger(agent: Scripted) -> list[tuple[str, str]]:
    return [(line.id, line.name) for line in load_truth(agent.truth).ledger]


# --- text -------------------------------------------------------------------------------------------------------


def test_a_prompt_without_a_directive_gets_an_echo_with_deltas_and_one_tool_without_a_side_effect(
    tmp_path: Path,
) -> None:
    code, agent = run_script(tmp_path, "hello there")
    assert code == 0
    assert agent.types() == [
        *("session", "turn.started", "model", "tool.start", "tool.end"),
        *("delta", "delta", "delta", "delta", "text", "model", "usage", "result"),
    ]
    assert agent.texts() == ["You said: hello there"]
    assert agent.seen[-1]["status"] == "ok"
    assert ledger(agent) == []


def test_said_text_comes_as_one_delta_a_word_and_then_whole(tmp_path: Path) -> None:
    _, agent = run_script(tmp_path, "!say one  two\nplain words")
    deltas = [(m["segment"], m["text"]) for m in agent.seen if m["type"] == "delta"]
    assert deltas == [("s1", "one "), ("s1", " "), ("s1", "two"), ("s2", "plain "), ("s2", "words")]
    assert agent.texts() == ["one  two", "plain words"]


def test_deltas_are_numbered_and_their_text_is_their_sum(tmp_path: Path) -> None:
    _, agent = run_script(tmp_path, "!deltas 3\n!deltas 2 1")
    assert [m["text"] for m in agent.seen if m["type"] == "delta"] == [f"e{n:06d} " for n in range(1, 6)]
    assert agent.texts() == ["e000001 e000002 e000003 ", "e000004 e000005 "]


def test_lines_are_separate_completed_texts_that_are_all_different(tmp_path: Path) -> None:
    _, agent = run_script(tmp_path, "!lines 3 1\n!lines 2")
    assert agent.texts() == [f"l{n:06d}" for n in range(1, 6)]
    assert len({m["segment"] for m in agent.seen if m["type"] == "text"}) == 5


def test_a_flood_is_cut_into_segments_of_a_thousand(tmp_path: Path) -> None:
    _, agent = run_script(tmp_path, "!flood 2500")
    assert [len(text.split()) for text in agent.texts()] == [1000, 1000, 500]
    assert agent.types().count("delta") == 2500


def test_a_loop_runs_its_body_and_knows_its_pass(tmp_path: Path) -> None:
    _, agent = run_script(tmp_path, "!repeat 2\nouter {i}\n!repeat 2\ninner {i}\n!end\n!end\nafter {i}")
    expected = ["outer 1", "inner 1", "inner 2", "outer 2", "inner 1", "inner 2", "after {i}"]
    assert agent.texts() == expected


def test_reasoning_and_usage_are_printed_as_told(tmp_path: Path) -> None:
    _, agent = run_script(tmp_path, "!reasoning let me see\n!usage 10 20 0.5")
    assert agent.until_seen("reasoning")["text"] == "let me see"
    usage = {"input_tokens": 10, "output_tokens": 20, "cost_usd": 0.5}
    assert {key: agent.until_seen("usage")[key] for key in usage} == usage
    assert agent.seen[-1]["usage"] == usage


def test_an_environment_variable_is_told_by_digest_and_never_by_value(tmp_path: Path) -> None:
    with scripted(tmp_path, environment={"SOME_KEY": "very-secret"}) as agent:
        agent.prompt("!env SOME_KEY\n!env OTHER_KEY")
        agent.finish()
    digest = sha256(b"very-secret").hexdigest()[:12]
    assert agent.texts() == [f"SOME_KEY is set, sha256 {digest}", "OTHER_KEY is not set"]
    assert "very-secret" not in json.dumps(agent.seen) + json.dumps(records(agent))


def test_text_that_utf8_cannot_carry_is_printed_as_escapes(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.send_raw(b'{"type":"prompt","id":"p1","text":"!say \\ud800 \xe2\x82\xac"}\n')
        assert agent.finish() == 0
    assert agent.texts() == ["\ud800 €"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("!nonsense", "line 1: unknown directive !nonsense"),
        ("ok\n!deltas", "line 2: !deltas takes 1 to 2 arguments, got 0"),
        ("!deltas -1", "is not a whole number"),
        ("!deltas 99999999999", "is not a whole number"),
        ("!sleep nan", "is not a number from 0"),
        ("!tool ../x", "is not a name"),
        ("!garbage what", "is not one of invalid_json"),
        ("!crash SIGNOPE", "is not a signal's name"),
        ("!exit 256", "is not an exit code"),
        ("!repeat 2\nx", "line 1: !repeat without !end"),
        ("!end", "line 1: !end without !repeat"),
        ("!question  ;; x", "question 1 is empty"),
        ("!repeat 1\n" * 9 + "!end\n" * 9, "loops are nested deeper than 8"),
        ("!say x\n" * 10_001, "a script has at most 10000 lines"),
    ],
)
def test_a_script_with_a_mistake_is_refused_whole_by_an_error_that_names_the_line(
    tmp_path: Path, script: str, reason: str
) -> None:
    code, agent = run_script(tmp_path, script)
    assert code == 1
    result = agent.seen[-1]
    assert (result["type"], result["status"], result["code"]) == ("result", "error", "script_error")
    assert reason in result["message"]
    assert agent.texts() == []


# --- tools, asks, questions -----------------------------------------------------------------------------------------


def test_a_tool_has_one_side_effect_in_the_ledger_and_its_start_and_end_in_the_truth(tmp_path: Path) -> None:
    _, agent = run_script(tmp_path, "!say x\n!tool write 5 100")
    assert [t for t in agent.types() if t.startswith("tool")] == ["tool.start", "tool.progress", "tool.end"]
    output = agent.until_seen("tool.end")["output"]
    assert len(output) == 100
    assert ledger(agent) == [("p1/2", "write")]
    assert [(r["phase"], r.get("status")) for r in records(agent, "effect")] == [("start", None), ("end", "ok")]


def test_tools_in_a_loop_have_side_effects_of_different_ids(tmp_path: Path) -> None:
    _, agent = run_script(tmp_path, "!repeat 3\n!tool write\n!end")
    assert [entry for entry, _ in ledger(agent)] == ["p1/1", "p1/2", "p1/3"]


def test_the_same_prompt_run_twice_leaves_the_same_ids_twice(tmp_path: Path) -> None:
    run_script(tmp_path, "!tool write")
    _, agent = run_script(tmp_path, "!tool write")
    assert [entry for entry, _ in ledger(agent)] == ["p1/1", "p1/1"]


def test_an_allowed_ask_runs_its_tool_with_the_input_of_the_answer(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("!ask deploy")
        ask = agent.until("ask")
        assert (ask["kind"], ask["tool"], ask["input"]) == ("approval", "deploy", {"step": 1})
        agent.send(type="answer", request=ask["request"], decision="allow", input={"to": "staging"})
        agent.until("tool.end", status="ok", id=ask["tool_id"])
        assert agent.finish() == 0
    assert ledger(agent) == [("p1/1", "deploy")]
    assert records(agent, "effect")[0]["input"] == {"to": "staging"}


def test_a_denied_ask_ends_its_tool_with_the_text_of_the_answer_and_no_side_effect(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("!ask deploy")
        ask = agent.until("ask")
        agent.send(type="answer", request=ask["request"], decision="deny", text="not today")
        assert agent.until("ask.resolved")["decision"] == "deny"
        assert agent.until("tool.end")["output"] == "not today"
        assert agent.finish() == 0
    assert ledger(agent) == []


def test_several_asks_are_pending_at_once_and_answered_in_any_order(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("!ask first second")
        requests = [agent.until("ask")["request"], agent.until("ask")["request"]]
        agent.send(type="answer", request=requests[1], decision="allow")
        agent.send(type="answer", request=requests[0], decision="allow")
        assert agent.finish() == 0
    assert ledger(agent) == [("p1/1", "first"), ("p1/2", "second")]


def test_late_double_and_unknown_answers_change_nothing(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("!ask deploy\n!hang")
        request = agent.until("ask")["request"]
        agent.send(type="answer", request=request, decision="deny")
        agent.send(type="answer", request=request, decision="allow")
        agent.until("tool.end", status="error")
        agent.send(type="answer", request=request, decision="allow")
        agent.send(type="answer", request="r99", decision="allow")
        agent.send(type="interrupt", id="i1")
        agent.until("result")
        agent.finish()
    assert agent.types().count("ask.resolved") == 1
    assert len(records(agent, "answer_ignored")) == 3
    assert ledger(agent) == []


def test_questions_carry_options_and_their_answers_are_said(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("!question Colour? | red | blue ;; [multi] Sizes? | S | M")
        ask = agent.until("ask", kind="question")
        assert ask["questions"] == [
            {"id": "q1", "question": "Colour?", "options": ["red", "blue"], "multi": False},
            {"id": "q2", "question": "Sizes?", "options": ["S", "M"], "multi": True},
        ]
        answers = {"q1": "blue", "q2": ["S", "M"]}
        agent.send(type="answer", request=ask["request"], decision="allow", answers=answers)
        assert json.loads(agent.until("text")["text"].removeprefix("Answers: ")) == answers
        assert agent.finish() == 0


def test_a_declined_question_says_so_and_the_turn_goes_on(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("!question Colour? | red")
        agent.send(type="answer", request=agent.until("ask")["request"], decision="deny", text="busy")
        assert agent.until("text")["text"] == "No answer: busy"
        assert agent.finish() == 0


# --- stdin --------------------------------------------------------------------------------------------------------


def test_stdin_closed_during_an_ask_counts_as_denied_and_the_turn_is_finished(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("!ask deploy\nafterwards")
        agent.until("ask")
        assert agent.finish() == 0
    assert agent.until_seen("ask.resolved")["decision"] == "deny"
    assert agent.texts() == ["afterwards"]
    assert ledger(agent) == []


def test_a_prompt_in_mid_turn_is_accepted_and_becomes_the_next_turn(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("!wait_file go\nfirst", "p1")
        agent.until("model", state="started")
        agent.prompt("second", "p2")
        agent.until("prompt.accepted", id="p2", mode="queued")
        (tmp_path / "go").touch()
        agent.until("result", prompt="p1")
        agent.until("turn.started", prompt="p2")
        agent.until("result", prompt="p2")
        assert agent.finish() == 0
    assert agent.texts() == ["first", "You said: second"]
    assert agent.types().count("session") == 1


def test_a_prompt_is_steered_into_a_turn_that_allows_it(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("!steer\nlistening\n!wait_file go\nlast", "p1")
        agent.until("text", text="listening")
        agent.prompt("!say steered\n!tool write", "p2")
        agent.until("prompt.accepted", id="p2", mode="steered")
        agent.until("text", text="steered")
        agent.until("tool.end")
        (tmp_path / "go").touch()
        result = agent.until("result")
        assert (result["prompt"], result["status"]) == ("p1", "ok")
        assert agent.finish() == 0
    assert agent.types().count("turn.started") == 1
    assert ledger(agent) == [("p2/2", "write")]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"nonsense", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[1]", "not an object"),
        (b'{"type":"prompt","id":1,"text":"x"}', "id must be a string"),
        (b'{"type":"answer","request":"r","decision":"maybe"}', "decision must be allow or deny"),
        (b'{"type":"what"}', "unknown type"),
        (b'{"type":["prompt"]}', "unknown type"),
        (b'{"type":"prompt","id":NaN,"text":"x"}', "NaN is not JSON"),
        (b"[" * 100_000, "nested too deep"),
        (b"x" * (17 << 20), "longer than"),
    ],
)
def test_a_bad_stdin_line_is_told_on_stderr_recorded_and_ignored(tmp_path: Path, line: bytes, problem: str) -> None:
    with scripted(tmp_path) as agent:
        agent.send_raw(line + b"\n")
        agent.prompt("still here")
        assert agent.finish() == 0
        wait_until(lambda: problem.encode() in agent.errors, "a message on stderr")
    bad = [record for record in records(agent, "stdin") if "problem" in record]
    assert len(bad) == 1
    assert problem in bad[0]["problem"]
    assert agent.texts() == ["You said: still here"]


# --- sessions and options ---------------------------------------------------------------------------------------------


def test_a_resumed_session_says_so_and_remembers_its_turns(tmp_path: Path) -> None:
    run_script(tmp_path, "first", "--session-id", "abc")
    with scripted(tmp_path, "--resume", "abc") as agent:
        agent.prompt("!recall", "p2")
        assert agent.until("session") == {
            "type": "session",
            "session_id": "abc",
            "agent": "scripted",
            "version": scripted_agent.VERSION,
            "resumed": True,
        }
        assert agent.finish() == 0
    assert agent.texts() == ["I remember 1 earlier turns: p1"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--resume", "unknown"), "session_not_found"),
        (("--resume", "../../etc/passwd"), "invalid_session_id"),
        (("--session-id", ""), None),
        (("--session-id", "taken"), "session_exists"),
        (("--session-id", "a", "--resume", "b"), None),
        (("--what",), None),
    ],
)
def test_a_session_that_cannot_be_opened_is_refused_before_any_prompt(
    tmp_path: Path, options: tuple[str, ...], code: str | None
) -> None:
    run_script(tmp_path, "x", "--session-id", "taken")
    with scripted(tmp_path, *options) as agent:
        if code is None:
            assert agent.process.wait(20) == 2
            assert agent.next() is None
        else:
            assert agent.until("error")["code"] == code
            assert agent.process.wait(20) == 1


@pytest.mark.parametrize("how", ["hard", "soft"])
def test_a_forgotten_session_is_not_found_or_resumed_with_nothing_behind_it(tmp_path: Path, how: str) -> None:
    run_script(tmp_path, f"!forget {how}", "--session-id", "abc")
    with scripted(tmp_path, "--resume", "abc") as agent:
        if how == "hard":
            assert agent.until("error")["code"] == "session_not_found"
        else:
            agent.prompt("!recall", "p2")
            session = agent.until("session")
            assert session["resumed"] is False
            assert session["session_id"] != "abc"
            assert agent.finish() == 0
            assert agent.texts() == ["I remember 0 earlier turns: none"]


@pytest.mark.parametrize("target", ["", "__main__.py"])
def test_it_runs_by_file_path_without_anything_installed(tmp_path: Path, target: str) -> None:
    path = Path(scripted_agent.__file__).parent / target
    command = [sys.executable, "-I", "-S", str(path), "--home", str(tmp_path), "--truth", str(tmp_path / "t")]
    prompt = b'{"type":"prompt","id":"p1","text":"hello"}\n'
    done = subprocess.run(command, input=prompt, capture_output=True, check=True, timeout=20, env={})
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "ok"
    assert len(load_truth(tmp_path / "t").processes) == 1


def test_it_starts_without_the_slow_parts_of_the_standard_library() -> None:
    code = "import sys, scripted_agent.agent; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, check=True, text=True, timeout=20)
    slow = {"argparse", "asyncio", "dataclasses", "inspect", "logging", "subprocess", "threading", "typing"}
    bare = subprocess.run(
        [sys.executable, "-I", "-c", "import sys; print(*sys.modules)"],
        capture_output=True,
        check=True,
        text=True,
        timeout=20,
    )
    assert not (set(done.stdout.split()) - set(bare.stdout.split())) & slow


def test_the_truth_holds_every_printed_line_in_order_and_every_stdin_line(tmp_path: Path) -> None:
    _, agent = run_script(tmp_path, "!deltas 50\n!tool write\n!lines 10")
    (process,) = load_truth(agent.truth).processes
    assert [line.message for line in process.printed] == agent.seen
    assert [json.loads(line.line)["id"] for line in process.stdin] == ["p1"]
    assert process.exit_code == 0
    assert process.prompts() == ("p1",)
