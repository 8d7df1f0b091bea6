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

from support_acp import Stage, acp_set, found, sleeping
from support_claude import KEY, becomes, collector_of, holding, processes_of
from tether import events as ev
from tether.processes import is_running, send_signal
from tether_agents.locate import load_pins

pytestmark = [pytest.mark.real_cli, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

KINDS = [kind for kind in load_pins() if kind.startswith("acp:")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stages(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Stage]]:
    """The agents that are installed, in one set with one workspace and one key file."""
    async with acp_set(tmp_path_factory.mktemp("acp")) as made:
        yield made


@pytest.fixture(params=KINDS)
def stage(request: pytest.FixtureRequest, stages: dict[str, Stage]) -> Stage:
    return _of(stages, str(request.param))


def _of(stages: dict[str, Stage], kind: str) -> Stage:
    if kind not in stages:
        pytest.skip(str(found(kind)))
    return stages[kind]


async def test_a_text_streams_and_the_next_prompt_goes_on_in_the_same_native_session_where_a_command_is_denied(
    stage: Stage,
) -> None:
    rig, agent = stage.rig, stage.agent
    async with stage.talk("text") as talk:
        await talk.prompt("[[slow:20,20]]")
        assert (await talk.ended())["outcome"] == "completed"
        text = " ".join(f"tok{number}" for number in range(20)) + " "
        assert talk.texts()[-1] == text
        deltas = [body for body in talk.bodies(ev.TEXT_DELTA) if body["text"].startswith("tok")]
        assert len(deltas) > 1, "not all at once"
        [usage] = talk.bodies(ev.USAGE)
        assert (usage["input_tokens"], usage["turn"]) == (100, talk.bodies(ev.TURN_COMPLETED)[0]["turn"])
        denied = f"touch {stage.name}.denied"
        await talk.prompt(f"[[{agent.bash}:{denied}]]")
        asked = await talk.until(ev.INTERACTION_REQUESTED, kind="approval", name=agent.tool)
        assert asked.body["input"]["command"] == denied
        assert {option["kind"] for option in asked.body["options"]} >= {"allow_once", "reject_once"}
        await talk.answer(asked, decision="deny")
        assert (await talk.ended())["outcome"] == ("cancelled" if agent.deny_ends_turn else "completed")
        assert not (rig.workspace / f"{stage.name}.denied").exists()
        assert talk.bodies(ev.TOOL_COMPLETED)[-1]["status"] == "error"
        assert [body["outcome"] for body in talk.bodies(ev.INTERACTION_RESOLVED)] == ["denied"]
        sessions = {body["native_session"] for body in talk.bodies(ev.SESSION_BOUND)}
        assert len(sessions) == 1
        assert talk.bodies(ev.EXECUTION_STARTED)[1]["resumed_from"] in sessions
        seen = json.dumps([request["body"] for request in rig.model_requests(denied)])
        assert "[[slow:20,20]]" in seen, "the model sees what was asked before"
        assert "tok19" in seen, "and what it said"
        state = await rig.client.state(talk.execution())
        assert state.cli_version == load_pins()[agent.kind].version


async def test_an_interrupt_and_a_stop_of_a_running_command_leave_nothing_behind(stage: Stage) -> None:
    async with stage.talk("ends") as talk:
        execution = await sleeping(stage, talk)
        assert (await stage.rig.client.interrupt(execution)).problem is None
        ended = await talk.ended()
        assert ended["outcome"] == "cancelled"
        assert processes_of(execution) == {}
        receipts = [body["status"] for body in talk.bodies(ev.CONTROL_RECEIPT) if body["verb"] == "interrupt"]
        assert receipts[-1] == "settled"
        assert talk.bodies(ev.TOOL_COMPLETED)[-1]["status"] == "interrupted"
        execution = await sleeping(stage, talk)
        await stage.rig.client.stop(execution)
        ended = await talk.ended()
        assert processes_of(execution) == {}
        assert ended["outcome"] == "stopped"
        assert ended["proof"]["method"] in ("pid_namespace", "subreaper_sweep")


async def test_a_failing_model_fails_the_response(stage: Stage) -> None:
    async with stage.talk("http400") as talk:
        await talk.prompt("[[http:400]]")
        ended = await talk.until(ev.RESPONSE_ENDED)
        assert (ended.body["outcome"], ended.body["error"]["code"]) == ("failed", "model_error")
        assert ended.body["error"]["detail"]
        assert (await talk.ended())["outcome"] == "failed"


async def test_a_command_is_allowed_in_the_same_process_after_the_collector_was_killed_and_runs_once(
    stage: Stage,
) -> None:
    rig = stage.rig
    async with stage.talk("restart") as talk:
        await talk.prompt(f"[[{stage.agent.bash}:echo ran >> {stage.name}.ran; cat {stage.name}.ran]]")
        asked = await talk.until(ev.INTERACTION_REQUESTED)
        processes = set(processes_of(talk.execution()))
        collector = collector_of(rig.data)
        assert send_signal(collector, signal.SIGKILL)

        def back() -> bool:
            now = collector_of(rig.data)
            return now != collector and is_running(now)

        await becomes(back, "the collector's return")
        assert not (rig.workspace / f"{stage.name}.ran").exists()
        assert processes & set(processes_of(talk.execution())), "the agent is the same"
        await talk.answer(asked, decision="allow")
        done = await talk.until(ev.TOOL_COMPLETED)
        assert (done.body["status"], str(done.body["output"]).strip()) == ("ok", "ran")
        assert (await talk.ended())["outcome"] == "completed"
        assert len(talk.bodies(ev.EXECUTION_STARTED)) == 1, "and no other took its place"
        assert (rig.workspace / f"{stage.name}.ran").read_text() == "ran\n"
        assert talk.texts()[-1] == "The command is done."
        assert [body["outcome"] for body in talk.bodies(ev.INTERACTION_RESOLVED)] == ["answered"]
        assert len(talk.events(ev.EXECUTION_STARTED)) == 1
        assert len(talk.bodies(ev.USAGE)) == 1


async def test_a_question_of_claude_gets_its_answer_and_an_interjection_its_turn(stages: dict[str, Stage]) -> None:
    stage = _of(stages, "acp:claude")
    async with stage.talk("question") as talk:
        await talk.prompt("[[ask]]")
        asked = await talk.until(ev.INTERACTION_REQUESTED, kind="question")
        [question] = asked.body["questions"]
        assert question["question"] == "Which colour?"
        assert [option["label"] for option in question["options"]] == ["Red", "Blue"]
        second = await stage.rig.client.say(talk.conversation, "[[text:and this, too]]")
        assert second.status == "interjected"
        await talk.answer(asked, decision="allow", answers={question["id"]: ["Blue"]})
        assert (await talk.ended())["outcome"] == "completed"
        assert talk.texts()[-1] == "and this, too"
        assert len(talk.bodies(ev.TURN_COMPLETED)) == 2, "each prompt has its end"
        assert "Blue" in str(talk.bodies(ev.TOOL_COMPLETED)[0]["output"])
        assert len(talk.events(ev.EXECUTION_STARTED)) == 1


async def test_no_key_is_in_the_workspace_or_on_the_bus(stages: dict[str, Stage]) -> None:
    """After all the others: sessions, configuration and caches of every agent are in the workspace by now."""
    rig = next(iter(stages.values())).rig
    homes = await asyncio.to_thread(lambda: {path.name for path in (rig.workspace / ".tether" / "agents").iterdir()})
    assert homes >= {stage.name for stage in stages.values()}
    assert await asyncio.to_thread(holding, rig.workspace, [KEY]) == []
    stored = await rig.stored()
    assert [name for name, messages in stored.items() if any(KEY.encode() in message for message in messages)] == []
    home = await asyncio.to_thread(lambda: {path.name for path in (rig.root / "home").iterdir()})
    assert home <= {".npm"}, "the user's home is theirs, but for what npm keeps of opencode's plugins"
