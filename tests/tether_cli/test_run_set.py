"""`tether run` and its companions against the whole set: on a terminal, without one, with --json."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from support_local_set import processes_of
from support_set import Keys, TetherSet, environment, on_terminal, running_set
from tether.processes import send_signal
from tether_cli.commands.run import hint_of

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def up() -> Iterator[TetherSet]:
    with running_set() as started:
        yield started


def scripted(up: TetherSet, text: str, *options: str, **named: Any) -> Any:
    return up.tether("run", text, "--agent", "scripted", *options, **named)


def on_tty(up: TetherSet, arguments: list[str], steps: list[tuple[str, Keys]]) -> tuple[int, str]:
    return on_terminal(up.command(*arguments), environment(up.home), steps)


def ids_of(text: str) -> tuple[str, str]:
    found = re.search(r"conversation (\S+)  execution (\S+)", text)
    assert found is not None, text
    return found[1], found[2]


def test_the_words_go_to_stdout_and_everything_else_to_stderr(up: TetherSet) -> None:
    done = scripted(up, "!say hello there\n!tool look\n!say bye")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hello there\nbye\n"
    assert re.search(r"→ look: .*  ok\n", done.stderr)
    assert re.search(r"── completed, \$0\.\d+, \d+ tokens in, \d+ out, \d+\.\d s", done.stderr)
    assert "tether logs exe_" in done.stderr


def test_without_a_terminal_an_approval_is_denied_and_told_on_stderr(up: TetherSet) -> None:
    done = scripted(up, "!ask remove\n!say after")
    assert done.returncode == 0
    assert "denied remove" in done.stderr and "--approve all" in done.stderr
    assert "failed" in done.stderr
    assert "after" in done.stdout


def test_approve_all_allows_without_a_terminal(up: TetherSet) -> None:
    done = scripted(up, "!ask remove\n!say after", "--approve", "all")
    assert done.returncode == 0
    assert "denied" not in done.stderr
    assert re.search(r"→ remove: .*  ok", done.stderr)


def test_the_prompt_may_come_from_stdin(up: TetherSet) -> None:
    done = scripted(up, "-", stdin="!say from stdin")
    assert (done.returncode, done.stdout) == (0, "from stdin\n")


def test_json_prints_one_item_per_line_and_the_result_last(up: TetherSet) -> None:
    done = scripted(up, "!say x", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.stderr == ""
    assert lines[0]["kind"] == "submission"
    ordinals = [line["ordinal"] for line in lines if line.get("execution") and line["kind"] == "event"]
    assert ordinals == sorted(set(ordinals)) and ordinals[0] == 1
    result = lines[-1]
    assert (result["kind"], result["outcome"], result["text"], result["exit_code"]) == ("result", "completed", "x", 0)


def test_a_failed_response_says_why_and_exits_with_1(up: TetherSet) -> None:
    done = scripted(up, "!fail overloaded")
    assert done.returncode == 1
    assert "[response] failed" in done.stderr and "── failed" in done.stderr


def test_a_retry_of_the_model_is_shown_as_such(up: TetherSet) -> None:
    done = scripted(up, "!retry 2\n!say after")
    assert done.returncode == 0
    assert done.stderr.count("[model] the request is made again") == 2
    assert "after" in done.stdout


def test_an_approval_is_answered_in_place_on_a_terminal(up: TetherSet) -> None:
    code, text = on_tty(up, ["run", "!ask remove\n!say after", "--agent", "scripted"], [("allow remove", "y\n")])
    assert code == 0
    assert re.search(r"→ remove: .*  ok", text) and "after" in text


def test_a_reason_typed_at_an_approval_denies_with_it(up: TetherSet) -> None:
    arguments = ["run", "!ask remove\n!say after", "--agent", "scripted"]
    code, text = on_tty(up, arguments, [("allow remove", "not on my disk\n")])
    assert code == 0
    assert "failed (not on my disk)" in text


def test_what_was_typed_before_the_question_is_no_answer_to_it(up: TetherSet) -> None:
    arguments = ["run", "!say begun\n!sleep 1\n!ask remove\n!say after", "--agent", "scripted"]
    code, text = on_tty(up, arguments, [("begun", "y\n"), ("allow remove", "not yet\n")])
    assert code == 0
    assert "failed (not yet)" in text


def test_a_question_is_answered_by_number_on_a_terminal(up: TetherSet) -> None:
    arguments = ["run", "!question Colour? | red | blue", "--agent", "scripted"]
    code, text = on_tty(up, arguments, [("a number", "2\n")])
    assert code == 0
    assert '"blue"' in text


def test_the_first_ctrl_c_interrupts_the_turn(up: TetherSet) -> None:
    code, text = on_tty(up, ["run", "!say begun\n!hang", "--agent", "scripted"], [("begun", "\x03")])
    assert code == 130
    assert "interrupting the turn" in text and "── cancelled" in text


def test_the_second_ctrl_c_detaches_and_the_printed_line_comes_back(up: TetherSet) -> None:
    steps: list[tuple[str, Keys]] = [("begun", "\x03"), ("Ctrl-C again", "\x03")]
    code, text = on_tty(up, ["run", "!say begun\n!stay", "--agent", "scripted"], steps)
    assert code == 130
    line = next(line.strip() for line in text.splitlines() if line.strip().startswith("tether attach"))
    _, *arguments = shlex.split(line)
    conversation = arguments[1]
    stopped = up.tether("stop", conversation)
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped" in stopped.stdout
    back = on_terminal([*up.command()[:3], *arguments], environment(up.home), [])
    assert back[0] == 1  # stopped is no success
    assert "[response] stopped" in back[1]


def test_an_execution_that_has_ended_is_told_as_such_by_stop(up: TetherSet) -> None:
    _, execution = ids_of(scripted(up, "!say done").stderr)
    told = up.tether("stop", execution)
    assert told.returncode == 1
    assert f"{execution} has ended (completed)" in told.stderr


def test_a_prompt_into_a_running_execution_is_told_as_said_into_it(up: TetherSet) -> None:
    told: list[str] = []

    def elsewhere() -> str:
        command = up.command("run", "!say more", "--agent", "scripted", "--conversation", "joined")
        with subprocess.Popen(
            command,
            env=environment(up.home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as joining:
            assert joining.stderr is not None
            told.extend([joining.stderr.readline(), joining.stderr.readline()])
            answer = shlex.split(told[1].partition("answer: ")[2].removesuffix("allow|deny\n"))
            assert up.tether(*answer[1:4], "allow").returncode == 0
            joining.communicate(timeout=60)
        assert joining.returncode == 0
        return ""

    arguments = ["run", "!ask remove\n!say after", "--agent", "scripted", "--conversation", "joined"]
    code, text = on_tty(up, arguments, [("allow remove", elsewhere)])
    assert re.fullmatch(r"an execution runs there \(exe_\w+\): this was said into it\n", told[0])
    assert code == 0
    assert "after" in text


def test_a_conversation_is_shown_listed_attached_and_logged_afterwards(up: TetherSet) -> None:
    done = scripted(up, "!say remember me\n!tool look")
    conversation, execution = ids_of(done.stderr)
    listed = json.loads(up.tether("ps", "--all", "--json").stdout)
    assert execution in [view["execution"] for view in listed["executions"]]
    assert conversation in up.tether("ps", "--conversations").stdout
    shown = up.tether("show", conversation)
    assert "remember me" in shown.stdout and "look" in shown.stderr
    assert "remember me" in up.tether("show", execution).stdout
    attached = up.tether("attach", conversation)
    assert (attached.returncode, attached.stdout) == (0, "remember me\n")
    for _ in range(2):  # a durable reader got it the first time; nothing is left for the second
        durable = up.tether("attach", conversation, "--durable", "test")
        assert durable.returncode == 0
    assert durable.stdout == ""
    logged = [json.loads(line) for line in up.tether("logs", execution, "--json").stdout.splitlines()]
    assert [logged[0]["type"], logged[-1]["type"]] == ["execution.started", "execution.ended"]


def test_attach_waits_for_a_response_whose_sandbox_is_not_there_yet(up: TetherSet) -> None:
    agent = up.state.children["agent"]
    send_signal(agent, signal.SIGSTOP)
    try:
        content = [{"type": "text", "text": "!say at last"}]
        body = {"request_id": "early1", "content": content, "agent": {"kind": "scripted"}}
        headers = {"Authorization": f"Bearer {up.state.token}"}
        sent = httpx2.post(f"{up.state.http_url}/v1/conversations/early/messages", json=body, headers=headers)
        assert sent.json()["status"] == "admitted", sent.text
        attached = subprocess.Popen(
            up.command("attach", "early"),
            env=environment(up.home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with pytest.raises(subprocess.TimeoutExpired):
            attached.wait(timeout=3)
    finally:
        send_signal(agent, signal.SIGCONT)
    stdout, stderr = attached.communicate(timeout=60)
    assert (attached.returncode, stdout) == (0, "at last\n"), stderr


def test_a_second_prompt_goes_on_in_the_conversation_and_in_its_session(up: TetherSet) -> None:
    first = scripted(up, "!say one", "--conversation", "two-turns")
    second = scripted(up, "!recall", "--conversation", "two-turns")
    assert first.returncode == second.returncode == 0, second.stderr
    assert "1" in second.stdout


def test_a_directory_of_the_user_is_the_workspace(up: TetherSet, tmp_path: Path) -> None:
    directory = tmp_path.resolve() / "mine"
    directory.mkdir()
    done = scripted(up, "!touch made-by-the-agent", "--workspace", str(directory))
    assert done.returncode == 0, done.stderr
    assert (directory / "made-by-the-agent").exists()
    again = scripted(up, "!touch made-again", "--workspace", str(directory))
    assert again.returncode == 0 and (directory / "made-again").exists()


def test_a_waiting_approval_is_answered_from_another_terminal(up: TetherSet) -> None:
    answered: list[Any] = []

    def elsewhere() -> str:
        answered.append(up.tether("answer", "elsewhere", "-", "allow"))
        return ""  # nothing is typed here

    arguments = ["run", "!ask remove\n!say after", "--agent", "scripted", "--conversation", "elsewhere"]
    code, text = on_tty(up, arguments, [("allow remove", elsewhere)])
    assert answered[0].returncode == 0, answered[0].stderr
    assert code == 0
    assert "answered elsewhere" in text and "after" in text


def test_answer_without_a_decision_asks_on_its_terminal_and_needs_one_elsewhere(up: TetherSet) -> None:
    answered: list[Any] = []

    def elsewhere() -> str:
        for arguments in ([], ["same"], ["--option", "ever"]):
            answered.append(up.tether("answer", "asked-there", "-", *arguments))
        answered.append(on_tty(up, ["answer", "asked-there", "-"], [("allow remove", "not on my disk\n")]))
        return ""  # nothing is typed here

    arguments = ["run", "!ask remove\n!say after", "--agent", "scripted", "--conversation", "asked-there"]
    code, text = on_tty(up, arguments, [("allow remove", elsewhere)])
    without, same, option, (there, shown) = answered
    assert without.returncode == 2 and "nothing to answer: give allow, deny or --choose" in without.stderr
    assert same.returncode == 2 and "was not answered before; give allow, deny or --choose" in same.stderr
    assert option.returncode == 2 and "has no such option; it has none" in option.stderr
    assert there == 0 and "[y/N, or a reason why not]" in shown and "deny: " in shown
    assert code == 0 and "failed (not on my disk)" in text


def test_a_refused_key_is_told_with_the_variable_of_the_agent_that_needs_it() -> None:
    told = {agent: hint_of("model_auth", agent) or "" for agent in ("claude", "codex", "acp:gemini", "acp:mine")}
    assert told["claude"].startswith("set ANTHROPIC_API_KEY in the shell") and "tether agents login" in told["claude"]
    assert told["codex"].startswith("set CODEX_API_KEY in the shell") and "login" not in told["codex"]
    assert told["acp:gemini"].startswith("set GEMINI_API_KEY in the shell")
    assert 'key_file of [agents."acp:mine"] in the agents file' in told["acp:mine"]
    assert all(hint.endswith("keys are read when it starts") for hint in told.values())


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["run", " "], 2, "the prompt is empty"),
        (["run", "x", "--approve", "maybe"], 2, "--approve must be one of"),
        (["run", "x", "--agent", "Not An Agent"], 2, "no agent's name"),
        (["run", "x", "--conversation", "a b"], 2, "--conversation must be"),
        (["run", "x", "--workspace", "/nonexistent-directory"], 2, "is not a directory"),
        (["show", "nothing-here"], 2, "neither a conversation nor an execution"),
        (["attach", "nothing-here"], 2, "there is no conversation"),
        (["attach", "../x"], 2, "must be 1 to 64"),
        (["logs", "exe_none"], 2, "exe_none is no execution"),
        (["stop", "nothing-here"], 2, "neither an execution nor a conversation"),
        (["say", "nothing-here", "x"], 1, "SESSION_STREAM_NOT_ACTIVE"),
        (["answer", "nothing-here", "x"], 2, "give allow, deny or --choose"),
        (["answer", "nothing-here", "x", "perhaps"], 2, "must be allow, deny or same"),
        (["answer", "nothing-here", "x", "same", "--text", "y"], 2, "give nothing else with it"),
        (["answer", "nothing-here", "x", "--option", "y", "--choose", "z"], 2, "give one of them"),
        (["webhooks", "--state", "foo"], 2, "--state must be one of pending, delivered, dead"),
    ],
)
def test_an_error_is_one_line_with_a_remedy_and_its_exit_code(
    up: TetherSet, arguments: list[str], code: int, told: str
) -> None:
    done = up.tether(*arguments)
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_with_json_an_error_is_an_object_on_stderr(up: TetherSet) -> None:
    done = up.tether("show", "nothing-here", "--json")
    assert done.stdout == ""
    assert json.loads(done.stderr)["error"] == {
        "message": "nothing-here is neither a conversation nor an execution",
        "remedy": "`tether ps --all` lists executions and their conversations",
        "code": "NOT_FOUND",
        "exit_code": 2,
    }


@pytest.mark.parametrize("command", [["ps"], ["show", "x"], ["attach", "x"], ["stop", "x"], ["logs", "x"]])
def test_without_a_set_a_command_says_how_to_start_one(command: list[str], tmp_path: Path) -> None:
    nowhere = TetherSet(tmp_path, tmp_path / "none")
    done = nowhere.tether(*command)
    assert done.returncode == 3
    assert "tether up" in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_without_a_set_run_starts_one_says_so_and_leaves_nothing_behind(tmp_path: Path) -> None:
    nowhere = TetherSet(tmp_path, tmp_path / "none")
    done = nowhere.tether("run", "!say alone", "--agent", "scripted")
    assert (done.returncode, done.stdout) == (0, "alone\n"), done.stderr
    assert "no set is up: one was started for this command" in done.stderr
    assert not (tmp_path / "none").exists()


def test_what_a_killed_run_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    nowhere = TetherSet(tmp_path, tmp_path / "none")
    env = environment(tmp_path, {"TMPDIR": str(temporary)})

    def run(prompt: str) -> subprocess.Popen[str]:
        command = nowhere.command("run", prompt, "--agent", "scripted")
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    with run("!say begun\n!hang") as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "begun\n"
        killed.kill()
    [left] = temporary.iterdir()
    other = temporary / "tether-other"
    other.mkdir()
    with run("!say next") as following:
        assert following.communicate(timeout=120)[0] == "next\n"
    assert not left.exists()
    assert [*temporary.iterdir()] == [other]
    assert processes_of(left) == []
