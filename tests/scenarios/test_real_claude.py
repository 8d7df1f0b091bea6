"""The real, pinned Claude Code through the whole product: prompt in, durable stream out, no real model.

One set, one workspace, many conversations; the models are played by `fake_models`, whose directives (`[[bash:…]]`)
make the CLI do what a test needs. Skipped where the CLI is not installed (`make agents`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fake_models import FakeModels
from support_claude import (
    KEY,
    OWN_LOGIN,
    Rig,
    Talk,
    becomes,
    cli_of,
    collector_of,
    found_claude,
    holding,
    processes_of,
)
from tether import Client
from tether import events as ev
from tether.processes import is_running, send_signal
from tether_agent.providers import procfs
from tether_agents.locate import FoundAgent
from tether_cli.set import ServiceSet, SetOptions

pytestmark = [pytest.mark.real_cli, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

WRONG_KEY = "sk-wrong-00aa11bb22cc33dd44ee55"
SLEEP = "python3 -c 'import time; time.sleep(60)'"


@pytest.fixture(scope="module")
def claude() -> FoundAgent:
    return found_claude()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(claude: FoundAgent, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """A key in a file; a user whose own login nobody has asked for; a CLI that gives up soon."""
    root = tmp_path_factory.mktemp("claude")
    login = root / "home" / ".claude" / ".credentials.json"
    login.parent.mkdir(parents=True)
    login.write_text(json.dumps({"claudeAiOauth": {"accessToken": OWN_LOGIN, "expiresAt": 4102444800000}}))
    key_file = root / "keys.env"
    key_file.write_text(f"ANTHROPIC_API_KEY={KEY}\n")
    key_file.chmod(0o600)
    with pytest.MonkeyPatch.context() as patch, FakeModels(require_key=KEY, log_bodies=True) as models:
        patch.setenv("HOME", str(root / "home"))
        for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN", "CLAUDE_CONFIG_DIR"):
            patch.delenv(name, raising=False)
        agents = root / "agents.toml"
        agents.write_text(
            f'[agents.claude]\ncommand = ["{claude.path}"]\nkey_file = "{key_file}"\n'
            f'env = {{ ANTHROPIC_BASE_URL = "{models.base_url}", CLAUDE_CODE_MAX_RETRIES = "1" }}\n'
        )
        options = SetOptions(data=root / "data", log="quiet", agents_file=agents)
        async with ServiceSet(options) as up, Client.http(up.state.http_url, up.state.token) as client:
            yield Rig(up.state, client, models, root, key_file, claude.pinned_version)
    left = await asyncio.to_thread(holding, root / "data", [KEY])
    assert left == [], "with the set the copies of its keys are gone"


async def test_a_text_streams_in_deltas_and_its_cost_is_recorded_once(rig: Rig) -> None:
    text = " ".join(f"tok{number}" for number in range(30)) + " "
    async with rig.talk("text") as talk:
        await talk.prompt("[[slow:30,20]]")
        await talk.until(ev.TEXT_DELTA)
        first_s = time.monotonic()
        await talk.until(ev.RESPONSE_ENDED, outcome="completed")
        assert time.monotonic() - first_s > 0.2, "the first delta came while the model was still speaking"
        await talk.ended()
        assert talk.texts() == [text]
        deltas = talk.bodies(ev.TEXT_DELTA)
        assert len(deltas) > 1
        assert "".join(body["text"] for body in deltas) == text
        assert [body["offset"] for body in deltas] == [
            sum(len(earlier["text"]) for earlier in deltas[:place]) for place in range(len(deltas))
        ]
        [usage] = talk.bodies(ev.USAGE)
        assert (usage["input_tokens"], usage["output_tokens"]) == (100, 30)
        assert usage["cost_usd"] > 0
        assert len(rig.model_requests("[[slow:30,20]]")) == 1
        state = await rig.client.state(talk.execution())
        assert (state.text, state.usage.turns, state.usage.cost_usd) == (text, 1, usage["cost_usd"])
        assert state.cli_version == rig.cli_version


async def test_an_allowed_tool_runs_once_in_the_workspace(rig: Rig) -> None:
    async with rig.talk("allow") as talk:
        await talk.prompt("[[bash:echo made >> made.txt; cat made.txt]]")
        asked = await talk.until(ev.INTERACTION_REQUESTED, kind="approval", name="Bash")
        assert asked.body["input"]["command"] == "echo made >> made.txt; cat made.txt"
        assert not (rig.workspace / "made.txt").exists()
        await talk.answer(asked, decision="allow")
        await talk.ended()
        assert (rig.workspace / "made.txt").read_text() == "made\n"
        [done] = talk.bodies(ev.TOOL_COMPLETED)
        assert (done["status"], done["output"]) == ("ok", "made")
        assert [body["outcome"] for body in talk.bodies(ev.INTERACTION_RESOLVED)] == ["answered"]
        assert talk.texts()[-1] == "The command is done."


async def test_an_allowed_tool_may_run_with_another_input(rig: Rig) -> None:
    async with rig.talk("changed") as talk:
        await talk.prompt("[[bash:touch asked-for]]")
        asked = await talk.until(ev.INTERACTION_REQUESTED)
        await talk.answer(asked, decision="allow", input={**asked.body["input"], "command": "touch put-instead"})
        await talk.ended()
        assert (rig.workspace / "put-instead").exists()
        assert not (rig.workspace / "asked-for").exists()


async def test_a_denied_tool_does_not_run_and_the_model_is_told_why(rig: Rig) -> None:
    async with rig.talk("deny") as talk:
        await talk.prompt("[[bash:touch denied.txt]]")
        asked = await talk.until(ev.INTERACTION_REQUESTED)
        await talk.answer(asked, decision="deny", text="not in this house")
        ended = await talk.ended()
        assert ended["outcome"] == "completed"
        assert not (rig.workspace / "denied.txt").exists()
        [done] = talk.bodies(ev.TOOL_COMPLETED)
        assert done["status"] == "error"
        assert "not in this house" in done["output"]
        assert [body["outcome"] for body in talk.bodies(ev.INTERACTION_RESOLVED)] == ["denied"]
        assert "not in this house" in json.dumps(rig.model_requests("[[bash:touch denied.txt]]")[-1]["body"])


async def test_a_question_gets_its_answer(rig: Rig) -> None:
    async with rig.talk("question") as talk:
        await talk.prompt("[[ask]]")
        asked = await talk.until(ev.INTERACTION_REQUESTED, kind="question")
        [question] = asked.body["questions"]
        assert (question["question"], [option["label"] for option in question["options"]]) == (
            "Which colour?",
            ["Red", "Blue"],
        )
        await talk.answer(asked, decision="allow", answers={question["id"]: ["Blue"]})
        assert (await talk.ended())["outcome"] == "completed"
        assert talk.texts() == ["Thanks for the answer."]
        assert "Blue" in str(talk.bodies(ev.TOOL_COMPLETED)[0]["output"])


async def test_an_interjection_is_answered_after_the_running_turn_by_the_same_process(rig: Rig) -> None:
    async with rig.talk("interject") as talk:
        first = await talk.prompt("[[slow:40,50]]")
        await talk.until(ev.TEXT_DELTA)
        second = await rig.client.say("interject", "[[text:and this, too]]")
        assert (second.status, second.response_id) == ("interjected", first.response_id)
        assert (await talk.ended())["outcome"] == "completed"
        assert [text.split()[0] for text in talk.texts()] == ["tok0", "and"]
        assert len(talk.events(ev.EXECUTION_STARTED)) == 1
        assert len(talk.bodies(ev.USAGE)) == 2
        assert len(talk.bodies(ev.RESPONSE_ENDED)) == 1
        assert [body.get("into") for body in talk.told(ev.PROMPT_ADMITTED)] == [None, first.response_id]


async def sleeping(talk: Talk) -> str:
    """Start a tool that sleeps for a minute; returns the execution once it does."""
    await talk.prompt(f"[[bash:{SLEEP}]]")
    await talk.allowed()
    execution = talk.execution()

    def runs() -> bool:
        return any(argv[-1:] == ["import time; time.sleep(60)"] for argv in processes_of(execution).values())

    await becomes(runs, "the start of the tool")
    return execution


async def test_an_interrupt_ends_a_running_tool_and_its_children(rig: Rig) -> None:
    async with rig.talk("interrupt") as talk:
        execution = await sleeping(talk)
        receipt = await rig.client.interrupt(execution)
        assert receipt.problem is None
        await talk.until(ev.RESPONSE_ENDED, outcome="cancelled")
        ended = await talk.ended()
        assert ended["outcome"] == "cancelled"
        assert processes_of(execution) == {}
        assert [body["status"] for body in talk.bodies(ev.TOOL_COMPLETED)] == ["interrupted"]
        receipts = [body["status"] for body in talk.bodies(ev.CONTROL_RECEIPT) if body["verb"] == "interrupt"]
        assert receipts[-1] == "settled"


async def test_a_stop_of_a_running_tool_is_exact_and_proven(rig: Rig) -> None:
    async with rig.talk("stop") as talk:
        execution = await sleeping(talk)
        await rig.client.stop(execution)
        ended = await talk.ended()
        assert processes_of(execution) == {}
        assert ended["outcome"] == "stopped"
        assert ended["proof"]["method"] in ("pid_namespace", "subreaper_sweep")


async def test_a_failing_model_is_told_as_such_and_fails_the_response(rig: Rig) -> None:
    async with rig.talk("http500") as talk:
        await talk.prompt("[[http:500]]")
        ended = await talk.until(ev.RESPONSE_ENDED)
        assert (ended.body["outcome"], ended.body["error"]["code"]) == ("failed", "model_error")
        assert (await talk.ended())["outcome"] == "failed"
        told = [(body["state"], body.get("http_status")) for body in talk.bodies(ev.MODEL_REQUEST)]
        assert ("retrying", 500) in told
        assert told[-1] == ("failed", 500)
        assert talk.texts() == []
        assert talk.bodies(ev.GAP) == []


async def test_a_refused_key_is_told_at_once_with_where_it_came_from(rig: Rig) -> None:
    async with rig.talk("http401") as talk:
        await talk.prompt("[[http:401]]")
        told = await talk.until(ev.MODEL_REQUEST, state="retrying", http_status=401)
        assert f"ANTHROPIC_API_KEY of {rig.key_file}" in told.body["detail"]
        ended = await talk.until(ev.RESPONSE_ENDED)
        assert ended.body["error"]["code"] == "model_auth"
        assert f"ANTHROPIC_API_KEY of {rig.key_file}" in ended.body["error"]["detail"]


async def test_the_next_prompt_goes_on_in_the_same_native_session(rig: Rig) -> None:
    async with rig.talk("resume") as talk:
        await talk.prompt("[[text:the number is 4711]]")
        await talk.ended()
        await talk.prompt("[[text:what number was it?]]")
        await talk.ended()
        first, second = talk.bodies(ev.EXECUTION_STARTED)
        sessions = {body["native_session"] for body in talk.bodies(ev.SESSION_BOUND)}
        assert len(sessions) == 1
        assert second["resumed_from"] in sessions
        assert first.get("resumed_from") is None
        seen = json.dumps(rig.model_requests("what number was it?")[-1]["body"]["messages"])
        assert "[[text:the number is 4711]]" in seen, "the model sees what was asked before"
        assert '"text": "the number is 4711"' in seen, "and what it said"
        costs = [body["cost_usd"] for body in talk.bodies(ev.USAGE)]
        assert len(costs) == 2
        assert costs[1] < 2 * costs[0], "the second turn's own cost, not the session's"


async def test_an_answer_reaches_the_same_process_after_the_collector_was_killed(rig: Rig) -> None:
    async with rig.talk("restart") as talk:
        await talk.prompt("[[bash:echo ran >> ran.txt]]")
        asked = await talk.until(ev.INTERACTION_REQUESTED)
        cli = cli_of(talk.execution())
        collector = collector_of(rig.data)
        assert send_signal(collector, signal.SIGKILL)

        def back() -> bool:
            now = collector_of(rig.data)
            return now != collector and is_running(now)

        await becomes(back, "the collector's return")
        assert is_running(cli)
        await talk.answer(asked, decision="allow")
        await talk.until(ev.TOOL_COMPLETED, status="ok")
        assert cli_of(talk.execution()) == cli
        assert (await talk.ended())["outcome"] == "completed"
        assert (rig.workspace / "ran.txt").read_text() == "ran\n"
        assert len(talk.events(ev.EXECUTION_STARTED)) == 1
        ordinals = [event.ordinal for kind in ev.BODIES for event in talk.events(kind)]
        assert len(ordinals) == len(set(ordinals))
        assert len(talk.bodies(ev.USAGE)) == 1


async def test_background_work_that_outlives_its_turn_is_waited_for(rig: Rig) -> None:
    command = "python3 -c 'import time; time.sleep(2)'; echo late > late.txt"
    tool = {"command": command, "description": "later", "run_in_background": True}
    async with rig.talk("background") as talk:
        await talk.prompt(f"[[tool:Bash|{json.dumps(tool)}]]")
        await talk.allowed()
        await talk.until(ev.BACKGROUND, state="started")
        await talk.until(ev.TURN_COMPLETED, outcome="completed")
        assert talk.bodies(ev.RESPONSE_ENDED) == []
        assert not (rig.workspace / "late.txt").exists()
        await talk.until(ev.BACKGROUND, state="completed")
        assert talk.bodies(ev.RESPONSE_ENDED) == [], "work in the background is not the end"
        assert (await talk.ended())["outcome"] == "completed"
        assert (rig.workspace / "late.txt").read_text() == "late\n"
        assert len(talk.bodies(ev.RESPONSE_ENDED)) == 1
        assert len(talk.bodies(ev.TURN_COMPLETED)) == 2, "the agent tells of it in a turn of its own"


async def test_the_workspace_ignores_tethers_folder_and_the_session_files_hold_no_credentials(rig: Rig) -> None:
    async with rig.talk("files") as talk:
        await talk.prompt("[[text:hello]]")
        await talk.ended()
    assert (rig.workspace / ".tether" / ".gitignore").read_text() == "*\n"
    home = rig.workspace / ".tether" / "agents" / "claude"
    assert list((home / "projects").rglob("*.jsonl")), "the session is on the workspace's volume"
    assert [path for path in home.rglob("*") if "credential" in path.name.lower()] == []


async def test_no_key_is_anywhere_but_in_the_file_of_the_provider(rig: Rig) -> None:
    async with rig.talk("canary") as talk:
        await talk.prompt("[[bash:env; tr '\\0' '\\n' < /proc/$PPID/environ]]")
        await talk.allowed()
        arguments = [procfs.argv_of(pid) for pid in procfs.pids()]
        await talk.ended()
        stored = await rig.stored()
        [done] = talk.bodies(ev.TOOL_COMPLETED)
        assert "ANTHROPIC_BASE_URL=" in done["output"], "the tool has shown its environment"
        assert "API_KEY_FILE_DESCRIPTOR=" in done["output"], "and that of the CLI"
        shown = json.dumps([str(item) for item in talk.items])
    assert any(b"API_KEY_FILE_DESCRIPTOR=" in message for message in stored["EVENTS_default"])
    needles = [KEY, KEY[-20:], OWN_LOGIN]
    assert not [argv for argv in arguments if any(needle in " ".join(argv) for needle in needles)]
    found = {name for name, messages in stored.items() for m in messages if any(n.encode() in m for n in needles)}
    assert found == set()
    assert not any(needle in shown for needle in needles)
    provided = "agent/sandboxes/default.ws1/agent-env.json"
    assert await asyncio.to_thread(holding, rig.data, needles) == [provided]
    assert stat.S_IMODE((rig.data / provided).stat().st_mode) == 0o600
    assert {entry["key"] for entry in rig.models.requests if "directive" in entry} == {"accepted"}


def refused_run(root: Path, models: FakeModels, claude: FoundAgent) -> tuple[list[str], int]:
    """`tether run` as a user types it, with a wrong key in the shell and the CLI's own many retries: the lines until
    the refusal is told, and the exit code after a Ctrl-C."""
    environment = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG")} | {
        "HOME": str(root),
        "TMPDIR": str(root / "tmp"),
        "ANTHROPIC_API_KEY": WRONG_KEY,
        "ANTHROPIC_BASE_URL": models.base_url,
        "PYTHONUNBUFFERED": "1",
    }
    arguments = ["run", "hello", "--agent", "claude", "--workspace", str(root / "project")]
    arguments += ["--agents-dir", str(claude.path.parent)]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tether_cli", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "refused the credentials" in line:
                process.send_signal(signal.SIGINT)
                break
        lines += process.stdout.readlines()
        return lines, process.wait(60)


async def test_a_wrong_key_of_the_shell_is_named_in_the_terminal_while_the_cli_still_retries(
    claude: FoundAgent, tmp_path: Path
) -> None:
    for name in ("project", "tmp"):
        (tmp_path / name).mkdir()
    with FakeModels(require_key=KEY) as models:
        lines, code = await asyncio.to_thread(refused_run, tmp_path, models, claude)
        asked = [entry for entry in models.requests if "directive" in entry]
    shown = "".join(lines)
    assert "ANTHROPIC_API_KEY of the agent service's environment" in shown
    assert len(asked) < 8, "it was told before the CLI gave up"
    assert {entry["key"] for entry in asked} == {"refused"}
    assert code in (1, 130)
    assert WRONG_KEY not in shown
    assert await asyncio.to_thread(holding, tmp_path, [WRONG_KEY, WRONG_KEY[-20:]]) == []
