"""The real, pinned Codex through the whole product: prompt in, durable stream out, no real model.

One set, one workspace, many conversations; the models are played by `fake_models`, whose directives (`[[bash:…]]`)
make the CLI do what a test needs. Skipped where the CLI is not installed (`make agents`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from fake_models import FakeModels
from support_claude import Rig, Talk, becomes, collector_of, found_cli, holding, processes_of
from support_codex import KEY, SLEEP, WRONG_KEY, bodies_with, cli_of, codex_set, tool_runs
from tether import events as ev
from tether.client.types import Answer
from tether.errors import Code, ProblemError
from tether.processes import is_running, send_signal
from tether_agent.providers import procfs
from tether_agents.locate import FoundAgent

pytestmark = [pytest.mark.real_cli, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def codex() -> FoundAgent:
    if subprocess.run(["unshare", "--user", "--map-root-user", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here: the CLI runs its commands in one")
    return found_cli("codex")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(codex: FoundAgent, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    root = tmp_path_factory.mktemp("codex")
    async with codex_set(codex, root) as found:
        yield found
    left = await asyncio.to_thread(holding, root / "data", [KEY])
    assert left == [], "with the set the copies of its keys are gone"


async def test_a_text_streams_in_deltas_and_its_usage_is_recorded_once(rig: Rig) -> None:
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
        [usage] = talk.bodies(ev.USAGE)
        assert (usage["input_tokens"], usage["output_tokens"], usage["model"]) == (100, 20, rig.model)
        assert usage.get("cost_usd") is None, "the CLI tells no cost"
        assert len(rig.model_requests("[[slow:30,20]]")) == 1
        assert [body["resumable"] for body in talk.bodies(ev.SESSION_BOUND)] == [False, True]
        state = await rig.client.state(talk.execution())
        assert (state.text, state.usage.turns, state.cli_version) == (text, 1, rig.cli_version)


async def test_an_allowed_command_runs_once_in_the_workspace(rig: Rig) -> None:
    async with rig.talk("allow") as talk:
        await talk.prompt("[[bash:echo made >> made.txt; cat made.txt]]")
        asked = await talk.until(ev.INTERACTION_REQUESTED, kind="approval", name="commandExecution")
        assert "echo made >> made.txt; cat made.txt" in asked.body["input"]["command"]
        assert not (rig.workspace / "made.txt").exists()
        await talk.answer(asked, decision="allow")
        await talk.ended()
        assert (rig.workspace / "made.txt").read_text() == "made\n"
        [done] = talk.bodies(ev.TOOL_COMPLETED)
        assert (done["status"], done["output"]) == ("ok", "made\n")
        assert [body["outcome"] for body in talk.bodies(ev.INTERACTION_RESOLVED)] == ["answered"]
        assert talk.texts()[-1] == "The command is done."
        [usage] = talk.bodies(ev.USAGE)
        assert (usage["input_tokens"], usage["output_tokens"]) == (200, 40), "of both requests of the turn"


async def test_a_denied_command_does_not_run_and_the_model_is_told_why(rig: Rig) -> None:
    async with rig.talk("deny") as talk:
        await talk.prompt("[[bash:touch denied.txt]]")
        asked = await talk.until(ev.INTERACTION_REQUESTED)
        changed = Answer(decision="allow", input={**asked.body["input"], "command": "touch other.txt"})
        with pytest.raises(ProblemError) as refused:
            await rig.client.answer("deny", asked.body["interaction"], changed)
        problem = refused.value.problem
        assert problem.code == Code.INVALID
        assert problem.detail.startswith("payload.input: ")
        await talk.answer(asked, decision="deny", text="not in this house")
        assert (await talk.ended())["outcome"] == "completed"
        assert not (rig.workspace / "denied.txt").exists()
        [done] = talk.bodies(ev.TOOL_COMPLETED)
        assert (done["status"], done["detail"]) == ("error", "declined")
        assert [body["outcome"] for body in talk.bodies(ev.INTERACTION_RESOLVED)] == ["denied"]
        assert bodies_with(rig, "not in this house")


async def test_a_file_change_is_asked_about_with_its_change_unless_edits_are_accepted(rig: Rig) -> None:
    async with rig.talk("write") as talk:
        await talk.prompt("[[write:new.txt]]")
        asked = await talk.until(ev.INTERACTION_REQUESTED, kind="approval", name="fileChange")
        [change] = asked.body["input"]["changes"]
        assert (change["path"], change["diff"]) == (str(rig.workspace / "new.txt"), "written by the fake model\n")
        assert not (rig.workspace / "new.txt").exists()
        await talk.answer(asked, decision="allow")
        await talk.ended()
        assert (rig.workspace / "new.txt").read_text() == "written by the fake model\n"
        assert [body["status"] for body in talk.bodies(ev.TOOL_COMPLETED)] == ["ok"]
    async with rig.talk("edit") as talk:
        await talk.prompt("[[write:edit.txt]]", permission_mode="acceptEdits")
        await talk.ended()
        assert talk.bodies(ev.INTERACTION_REQUESTED) == []
        assert (rig.workspace / "edit.txt").exists()


async def test_in_plan_mode_commands_read_and_write_nothing_and_nobody_is_asked(rig: Rig) -> None:
    async with rig.talk("plan") as talk:
        await talk.prompt("[[bash:touch planned.txt; echo $?]]", permission_mode="plan")
        assert (await talk.ended())["outcome"] == "completed"
        assert talk.bodies(ev.INTERACTION_REQUESTED) == []
        [done] = talk.bodies(ev.TOOL_COMPLETED)
        assert sorted(line[-21:] for line in done["output"].splitlines()) == ["1", "Read-only file system"]
        assert not (rig.workspace / "planned.txt").exists()


async def test_questions_get_their_answers_each_by_its_id(rig: Rig) -> None:
    options = [{"label": "Red", "description": "warm"}, {"label": "Blue", "description": "cold"}]
    questions = [
        {"id": "colour", "header": "Colour", "question": "Which colour?", "options": options},
        {"id": "shade", "header": "Shade", "question": "Which shade?", "options": options},
    ]
    async with rig.talk("question") as talk:
        await talk.prompt(f"[[tool:request_user_input|{json.dumps({'questions': questions})}]]")
        asked = await talk.until(ev.INTERACTION_REQUESTED, kind="question")
        assert [(q["id"], q["question"]) for q in asked.body["questions"]] == [
            ("colour", "Which colour?"),
            ("shade", "Which shade?"),
        ]
        assert [option["label"] for option in asked.body["questions"][0]["options"]][:2] == ["Red", "Blue"]
        await talk.answer(asked, decision="allow", answers={"colour": ["Blue"], "shade": ["as dark as may be"]})
        assert (await talk.ended())["outcome"] == "completed"
        assert talk.texts() == ["The tool is done."]
        [body] = [body for body in bodies_with(rig, "as dark as may be") if "Blue" in json.dumps(body)]
        assert body["input"][-1]["type"] == "function_call_output"


async def test_an_interjection_is_steered_into_the_running_turn(rig: Rig) -> None:
    async with rig.talk("interject") as talk:
        first = await talk.prompt("[[slow:40,50]]")
        await talk.until(ev.TEXT_DELTA)
        second = await rig.client.say("interject", "[[text:and this, too]]")
        assert (second.status, second.response_id) == ("interjected", first.response_id)
        assert (await talk.ended())["outcome"] == "completed"
        cut, answer = talk.bodies(ev.TEXT_COMPLETED)
        assert cut["partial"]
        assert cut["text"].startswith("tok0 ")
        assert answer["text"] == "and this, too"
        assert len(talk.events(ev.EXECUTION_STARTED)) == len(talk.bodies(ev.TURN_COMPLETED)) == 1
        assert len(talk.bodies(ev.USAGE)) == len(talk.bodies(ev.RESPONSE_ENDED)) == 1
        receipts = [body["status"] for body in talk.bodies(ev.CONTROL_RECEIPT) if body["verb"] == "interject"]
        assert receipts == ["accepted", "delivered", "settled"]


async def sleeping(talk: Talk) -> str:
    """Start a command that sleeps for a minute; returns the execution once it does."""
    await talk.prompt(f"[[bash:{SLEEP}]]")
    await talk.allowed()
    await tool_runs(talk.execution())
    return talk.execution()


async def test_an_interrupt_ends_the_turn_and_the_command_that_codex_would_leave_running(rig: Rig) -> None:
    async with rig.talk("interrupt") as talk:
        execution = await sleeping(talk)
        receipt = await rig.client.interrupt(execution)
        assert receipt.problem is None
        await talk.until(ev.RESPONSE_ENDED, outcome="cancelled")
        assert (await talk.ended())["outcome"] == "cancelled"
        assert processes_of(execution) == {}
        assert [body["status"] for body in talk.bodies(ev.TOOL_COMPLETED)] == ["interrupted"]
        assert [body["outcome"] for body in talk.bodies(ev.TURN_COMPLETED)] == ["interrupted"]
        receipts = [body["status"] for body in talk.bodies(ev.CONTROL_RECEIPT) if body["verb"] == "interrupt"]
        assert receipts[-1] == "settled"


async def test_a_stop_of_a_running_command_is_exact_and_proven(rig: Rig) -> None:
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
        told = [body["state"] for body in talk.bodies(ev.MODEL_REQUEST)]
        assert told == ["retrying", "failed"]
        assert talk.texts() == []
        assert talk.bodies(ev.GAP) == talk.bodies(ev.USAGE) == []


async def test_a_dropped_stream_voids_what_was_said_before_the_retry(rig: Rig) -> None:
    async with rig.talk("drop") as talk:
        await talk.prompt("[[droponce:3]]")
        assert (await talk.ended())["outcome"] == "completed"
        [void] = talk.bodies(ev.TEXT_DISCARDED)
        assert void["segment"] in {body["segment"] for body in talk.bodies(ev.TEXT_DELTA)}
        assert talk.texts() == ["Recovered after a drop."]


async def test_a_refused_key_is_told_with_where_it_came_from(rig: Rig) -> None:
    async with rig.talk("http401") as talk:
        await talk.prompt("[[http:401]]")
        source = f"OPENAI_API_KEY of {rig.key_file}"
        told = await talk.until(ev.MODEL_REQUEST, state="retrying", http_status=401)
        assert source in told.body["detail"]
        ended = await talk.until(ev.RESPONSE_ENDED)
        assert ended.body["error"]["code"] == "model_auth"
        assert source in ended.body["error"]["detail"]


async def test_the_next_prompt_goes_on_in_the_same_thread(rig: Rig) -> None:
    async with rig.talk("resume") as talk:
        await talk.prompt("[[text:the number is 4711]]")
        await talk.ended()
        await talk.prompt("[[text:what number was it?]]")
        await talk.ended()
        first, second = talk.bodies(ev.EXECUTION_STARTED)
        [thread] = {body["native_session"] for body in talk.bodies(ev.SESSION_BOUND)}
        assert (first.get("resumed_from"), second["resumed_from"]) == (None, thread)
        seen = json.dumps(rig.model_requests("what number was it?")[-1]["body"]["input"])
        assert "[[text:the number is 4711]]" in seen, "the model sees what was asked before"
        assert '"text": "the number is 4711"' in seen, "and what it said"
        assert [body["input_tokens"] for body in talk.bodies(ev.USAGE)] == [100, 100], "each turn's own"
        assert list((rig.workspace / ".tether" / "agents" / "codex" / "sessions").rglob(f"*{thread}.jsonl"))


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
        assert (await talk.ended())["outcome"] == "completed"
        assert (rig.workspace / "ran.txt").read_text() == "ran\n"
        assert len(talk.events(ev.EXECUTION_STARTED)) == 1
        ordinals = [event.ordinal for kind in ev.BODIES for event in talk.events(kind)]
        assert len(ordinals) == len(set(ordinals))
        assert len(talk.bodies(ev.USAGE)) == 1


async def test_no_key_is_anywhere_but_in_the_file_of_the_provider(rig: Rig) -> None:
    command = "env; tr '\\0' '\\n' < /proc/$PPID/environ"
    async with rig.talk("canary") as talk:
        await talk.prompt(f"[[bash:{command}]]", permission_mode="bypassPermissions")
        await talk.until(ev.TOOL_COMPLETED)
        arguments = [procfs.argv_of(pid) for pid in procfs.pids()]
        await talk.ended()
        stored = await rig.stored()
        [done] = talk.bodies(ev.TOOL_COMPLETED)
        both = done["output"].count(f"OPENAI_BASE_URL={rig.models.base_url}/v1")
        assert both == 2, "the command has shown its environment and that of the CLI"
        assert "TETHER_OPENAI_KEY_FD=" in done["output"]
        shown = json.dumps([str(item) for item in talk.items])
    needles = [KEY, KEY[-20:], WRONG_KEY]
    assert not [argv for argv in arguments if any(needle in " ".join(argv) for needle in needles)]
    found = {name for name, messages in stored.items() for m in messages if any(n.encode() in m for n in needles)}
    assert found == set()
    assert not any(needle in shown for needle in needles)
    provided = "agent/sandboxes/default.ws1/agent-env.json"
    assert await asyncio.to_thread(holding, rig.data, needles) == [provided]
    asked = [entry for entry in rig.models.requests if "directive" in entry]
    assert {entry["key"] for entry in asked} == {"accepted"}


def run_from_the_shell(root: Path, models: FakeModels, codex: FoundAgent, key: str) -> tuple[str, int]:
    """`tether run` as a user types it, with a key in the shell: what it printed, and the exit code."""
    environment = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG")} | {
        "HOME": str(root),
        "TMPDIR": str(root / "tmp"),
        "OPENAI_API_KEY": key,
        "OPENAI_BASE_URL": f"{models.base_url}/v1",
        "PYTHONUNBUFFERED": "1",
    }
    arguments = ["run", "[[text:hello from the shell]]", "--agent", "codex", "--workspace", str(root / "project")]
    arguments += ["--agents-dir", str(codex.path.parent)]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tether_cli", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout, done.returncode


@pytest.mark.parametrize(("key", "code"), [(KEY, 0), (WRONG_KEY, 1)], ids=["good", "wrong"])
async def test_tether_run_takes_the_key_of_the_shell_and_names_it_where_it_is_refused(
    codex: FoundAgent, tmp_path: Path, key: str, code: int
) -> None:
    for name in ("project", "tmp"):
        (tmp_path / name).mkdir()
    with FakeModels(require_key=KEY) as models:
        shown, returned = await asyncio.to_thread(run_from_the_shell, tmp_path, models, codex, key)
    assert returned == code, shown
    if key == KEY:
        assert "hello from the shell" in shown
    else:
        assert "OPENAI_API_KEY of the agent service's environment" in shown
    assert key not in shown
    assert await asyncio.to_thread(holding, tmp_path, [key, key[-20:]]) == []
