"""Real, pinned ACP agents through the whole product: prompt in, durable stream out, no real model.

One set and one workspace for all of them; the models are played by `fake_models`. An agent that is not installed is
skipped (`python -m tether_agents install all`). They start slowly and are large, so each test goes through a lot.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from fake_models import FakeModels
from support_acp import SLEEPER, AcpTalk, Agent, agents, agents_file, found
from support_claude import KEY, Rig, becomes, collector_of, holding, processes_of
from tether import Client
from tether import events as ev
from tether.processes import is_running, send_signal
from tether_agents.locate import FoundAgent, load_pins
from tether_cli.set import ServiceSet, SetOptions

pytestmark = [pytest.mark.real_cli, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

KINDS = [kind for kind in load_pins() if kind.startswith("acp:")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Rig, dict[str, Agent]]]:
    installed = {kind: agent for kind in KINDS if isinstance(agent := found(kind), FoundAgent)}
    if not installed:
        pytest.skip("no ACP agent is installed: python -m tether_agents install all")
    root = tmp_path_factory.mktemp("acp")
    (root / "home").mkdir()
    with pytest.MonkeyPatch.context() as patch, FakeModels(require_key=KEY, log_bodies=True) as models:
        patch.setenv("HOME", str(root / "home"))
        for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "OPENAI_API_KEY", "CLAUDE_CONFIG_DIR", "CODEX_HOME"):
            patch.delenv(name, raising=False)
        known = agents(models)
        file = agents_file(root, known, installed)
        options = SetOptions(data=root / "data", log="quiet", agents_file=file)
        async with ServiceSet(options) as up, Client.http(up.state.http_url, up.state.token) as client:
            yield (
                Rig(up.state, client, models, root, root / "keys.env", ""),
                {kind: known[kind] for kind in installed},
            )


@pytest.fixture(params=KINDS)
def agent(request: pytest.FixtureRequest, rig: tuple[Rig, dict[str, Agent]]) -> Agent:
    kind = str(request.param)
    if kind not in rig[1]:
        pytest.skip(str(found(kind)))
    return rig[1][kind]


async def test_a_text_streams_and_the_next_prompt_goes_on_in_the_same_native_session(
    rig: tuple[Rig, dict[str, Agent]], agent: Agent
) -> None:
    async with AcpTalk(rig[0], agent, "text") as talk:
        await talk.prompt("[[slow:20,20]]")
        assert (await talk.ended())["outcome"] == "completed"
        text = " ".join(f"tok{number}" for number in range(20)) + " "
        assert talk.texts()[-1] == text
        deltas = [body for body in talk.bodies(ev.TEXT_DELTA) if body["text"].startswith("tok")]
        assert len(deltas) > 1, "not all at once"
        [usage] = talk.bodies(ev.USAGE)
        assert (usage["input_tokens"], usage["turn"]) == (100, talk.bodies(ev.TURN_COMPLETED)[0]["turn"])
        await talk.prompt("[[text:and again]]")
        assert (await talk.ended())["outcome"] == "completed"
        assert talk.texts()[-1] == "and again"
        assert [body["outcome"] for body in talk.bodies(ev.RESPONSE_ENDED)] == ["completed", "completed"]
        sessions = {body["native_session"] for body in talk.bodies(ev.SESSION_BOUND)}
        assert len(sessions) == 1
        assert talk.bodies(ev.EXECUTION_STARTED)[1]["resumed_from"] in sessions
        seen = json.dumps(rig[0].model_requests("[[text:and again]]")[-1]["body"])
        assert "[[slow:20,20]]" in seen, "the model sees what was asked before"
        assert "tok19" in seen, "and what it said"
        state = await rig[0].client.state(talk.execution())
        assert state.cli_version == load_pins()[agent.kind].version


async def test_one_command_is_allowed_and_runs_once_and_the_next_is_denied_and_does_not(
    rig: tuple[Rig, dict[str, Agent]], agent: Agent
) -> None:
    workspace = rig[0].workspace
    name = agent.kind.replace(":", "-")
    async with AcpTalk(rig[0], agent, "permission") as talk:
        await talk.prompt(f"[[{agent.bash}:echo made >> {name}.txt; cat {name}.txt]]")
        asked = await talk.until(ev.INTERACTION_REQUESTED, kind="approval", name=agent.tool)
        assert asked.body["input"]["command"] == f"echo made >> {name}.txt; cat {name}.txt"
        assert {option["kind"] for option in asked.body["options"]} >= {"allow_once", "reject_once"}
        assert not (workspace / f"{name}.txt").exists()
        await talk.answer(asked, decision="allow")
        assert (await talk.ended())["outcome"] == "completed"
        assert (workspace / f"{name}.txt").read_text() == "made\n"
        [done] = talk.bodies(ev.TOOL_COMPLETED)
        assert (done["status"], str(done["output"]).strip()) == ("ok", "made")
        assert talk.texts()[-1] == "The command is done."
        await talk.prompt(f"[[{agent.bash}:touch {name}.denied]]")
        await talk.answer(await talk.until(ev.INTERACTION_REQUESTED), decision="deny")
        ended = await talk.ended()
        assert ended["outcome"] == ("cancelled" if agent.deny_ends_turn else "completed")
        assert not (workspace / f"{name}.denied").exists()
        assert talk.bodies(ev.TOOL_COMPLETED)[-1]["status"] == "error"
        assert [body["outcome"] for body in talk.bodies(ev.INTERACTION_RESOLVED)] == ["answered", "denied"]


def sleeps(execution: str) -> bool:
    return any(argv[-1:] == [SLEEPER] for argv in processes_of(execution).values())


async def test_an_interrupt_and_a_stop_of_a_running_command_leave_nothing_behind(
    rig: tuple[Rig, dict[str, Agent]], agent: Agent
) -> None:
    async with AcpTalk(rig[0], agent, "ends") as talk:
        execution = await talk.sleeping()
        await becomes(lambda: sleeps(execution), "the start of the tool")
        assert (await rig[0].client.interrupt(execution)).problem is None
        ended = await talk.ended()
        assert ended["outcome"] == "cancelled"
        assert processes_of(execution) == {}
        receipts = [body["status"] for body in talk.bodies(ev.CONTROL_RECEIPT) if body["verb"] == "interrupt"]
        assert receipts[-1] == "settled"
        assert talk.bodies(ev.TOOL_COMPLETED)[-1]["status"] == "interrupted"
        execution = await talk.sleeping()
        await becomes(lambda: sleeps(execution), "the start of the tool")
        await rig[0].client.stop(execution)
        ended = await talk.ended()
        assert processes_of(execution) == {}
        assert ended["outcome"] == "stopped"
        assert ended["proof"]["method"] in ("pid_namespace", "subreaper_sweep")


async def test_a_failing_model_fails_the_response(rig: tuple[Rig, dict[str, Agent]], agent: Agent) -> None:
    async with AcpTalk(rig[0], agent, "http400") as talk:
        await talk.prompt("[[http:400]]")
        ended = await talk.until(ev.RESPONSE_ENDED)
        assert (ended.body["outcome"], ended.body["error"]["code"]) == ("failed", "model_error")
        assert ended.body["error"]["detail"]
        assert (await talk.ended())["outcome"] == "failed"


async def test_an_answer_reaches_the_same_process_after_the_collector_was_killed(
    rig: tuple[Rig, dict[str, Agent]], agent: Agent
) -> None:
    name = agent.kind.replace(":", "-")
    async with AcpTalk(rig[0], agent, "restart") as talk:
        await talk.prompt(f"[[{agent.bash}:echo ran >> {name}.ran]]")
        asked = await talk.until(ev.INTERACTION_REQUESTED)
        processes = set(processes_of(talk.execution()))
        collector = collector_of(rig[0].data)
        assert send_signal(collector, signal.SIGKILL)

        def back() -> bool:
            now = collector_of(rig[0].data)
            return now != collector and is_running(now)

        await becomes(back, "the collector's return")
        await talk.answer(asked, decision="allow")
        await talk.until(ev.TOOL_COMPLETED, status="ok")
        assert processes & set(processes_of(talk.execution())), "the agent is the same"
        assert (await talk.ended())["outcome"] == "completed"
        assert (rig[0].workspace / f"{name}.ran").read_text() == "ran\n"
        assert len(talk.events(ev.EXECUTION_STARTED)) == 1
        assert len(talk.bodies(ev.USAGE)) == 1


async def test_a_question_of_claude_gets_its_answer_and_an_interjection_its_turn(
    rig: tuple[Rig, dict[str, Agent]],
) -> None:
    if "acp:claude" not in rig[1]:
        pytest.skip(str(found("acp:claude")))
    async with AcpTalk(rig[0], rig[1]["acp:claude"], "question") as talk:
        await talk.prompt("[[ask]]")
        asked = await talk.until(ev.INTERACTION_REQUESTED, kind="question")
        [question] = asked.body["questions"]
        assert question["question"] == "Which colour?"
        assert [option["label"] for option in question["options"]] == ["Red", "Blue"]
        second = await rig[0].client.say("question-acp-claude", "[[text:and this, too]]")
        assert second.status == "interjected"
        await talk.answer(asked, decision="allow", answers={question["id"]: ["Blue"]})
        assert (await talk.ended())["outcome"] == "completed"
        assert talk.texts()[-1] == "and this, too"
        assert len(talk.bodies(ev.TURN_COMPLETED)) == 2, "each prompt has its end"
        assert "Blue" in str(talk.bodies(ev.TOOL_COMPLETED)[0]["output"])
        assert len(talk.events(ev.EXECUTION_STARTED)) == 1


async def test_no_key_is_in_the_workspace_or_on_the_bus(rig: tuple[Rig, dict[str, Agent]]) -> None:
    """After all the others: sessions, configuration and caches of every agent are in the workspace by now."""
    workspace = rig[0].workspace
    assert {path.name for path in (workspace / ".tether" / "agents").iterdir()} >= {
        kind.replace(":", "-") for kind in rig[1]
    }
    assert await asyncio.to_thread(holding, workspace, [KEY]) == []
    stored = await rig[0].stored()
    assert [name for name, messages in stored.items() if any(KEY.encode() in message for message in messages)] == []
    home = rig[0].root / "home"
    assert [path for path in await asyncio.to_thread(lambda: list(home.iterdir()))] == [], "the user's home is theirs"
