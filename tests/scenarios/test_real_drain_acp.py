"""D1, D3 with real, pinned ACP agents: drained idle, the volume lost, woken by a prompt in the session that they had.

The models are played by `fake_models`, which keep what they were asked. An agent that is not installed is skipped
(`python -m tether_agents install all`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from support_acp import Stage, acp_set, found
from support_real_drain import in_workspace, lose_the_volume, restored, suspended
from support_real_resume import asked_with
from tether import events as ev
from tether_agents.locate import load_pins

pytestmark = [pytest.mark.real_cli, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

KINDS = [kind for kind in load_pins() if kind.startswith("acp:")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stages(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Stage]]:
    async with acp_set(tmp_path_factory.mktemp("acp-drain")) as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
async def test_an_acp_agent_that_was_drained_idle_goes_on_in_its_session_on_an_empty_volume(
    stages: dict[str, Stage], kind: str
) -> None:
    if kind not in stages:
        pytest.skip(str(found(kind)))
    stage = stages[kind]
    question = f"what number was it, {stage.name}?"
    stage = replace(stage, rig=in_workspace(stage.rig, f"idle-{stage.name}"))
    async with stage.talk("idle") as talk:
        talk.deadline_s = 90.0  # opencode gets parts of itself from the npm registry before its first answer
        await talk.prompt("[[text:the number is 4714]]")
        await talk.ended()
        report = await suspended(stage.rig, "d1", store="both")
        assert report.checkpoint is not None and report.checkpoint.clean
        await lose_the_volume(stage.rig)
        await talk.prompt(f"[[text:still here]] {question}")
        await talk.until(ev.RESPONSE_ENDED, outcome="completed")
        await talk.ended()
        assert restored(stage.rig) == report.checkpoint.checkpoint
        assert talk.texts()[-1] == "still here"
        [session] = {body["native_session"] for body in talk.bodies(ev.SESSION_BOUND)}
        assert talk.bodies(ev.EXECUTION_STARTED)[-1]["resumed_from"] == session
        assert "the number is 4714" in asked_with(stage.rig, question)[-1]
