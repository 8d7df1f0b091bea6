"""P4 with the real, pinned Claude Code: a takeover during a running tool, and of an execution that waits for a human.

The models are played by `fake_models`. Skipped where the CLI is not installed (`make agents`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support_claude import WORKSPACE, Rig, Talk, becomes, claude_set, found_claude, processes_of
from support_writers import Writers
from tether import events as ev
from tether.client import Submission
from tether.prompt import AgentSpec
from tether_agents.locate import FoundAgent

pytestmark = [pytest.mark.real_cli, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

# A tool in a session of its own that ignores what it can: an interrupt alone leaves it.
SURVIVOR = "setsid python3 -c 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(300)'"


@pytest.fixture(scope="module")
def claude() -> FoundAgent:
    return found_claude()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(claude: FoundAgent, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with claude_set(claude, tmp_path_factory.mktemp("claude-takeover")) as made:
        yield made


async def take_over(rig: Rig, talk: Talk, text: str) -> Submission:
    agent = AgentSpec(kind=rig.agent, model=rig.model, args=rig.args)
    return await rig.client.prompt(talk.conversation, text, agent=agent, workspace=WORKSPACE, mode="takeover")


async def test_p4_a_takeover_during_a_running_tool_leaves_nothing_of_it_and_is_answered(rig: Rig) -> None:
    async with rig.talk("tool") as talk, Writers(rig.up.data) as writers:
        await talk.prompt(f"[[bash:{SURVIVOR}]]")
        await talk.allowed()
        old = talk.execution()
        await becomes(lambda: any("time.sleep(300)" in " ".join(one) for one in processes_of(old).values()), "the tool")
        submission = await take_over(rig, talk, "say something else")
        ended = await talk.ended()
        assert (ended["outcome"], bool(ended["proof"])) == ("stopped", True)
        assert processes_of(old) == {}
        await talk.until(ev.EXECUTION_STARTED)
        new = talk.execution()
        await talk.until(ev.RESPONSE_ENDED, outcome="completed")
        await talk.ended()
        [cut] = talk.told(ev.RESPONSE_SUPERSEDED)
        answer = next(one for one in talk.told(ev.RESPONSE_CREATED) if one["execution"] == new)
        assert cut["by"] == answer["response"]
        assert submission.status in ("admitted", "pending")
    assert {old, new} <= writers.seen
    assert writers.overlaps([old, new]) == []


async def test_c8_a_takeover_of_an_execution_that_waits_for_an_approval_closes_it(rig: Rig) -> None:
    async with rig.talk("waiting") as talk, Writers(rig.up.data) as writers:
        await talk.prompt("[[bash:touch never-made]]")
        asked = await talk.until(ev.INTERACTION_REQUESTED)
        old = talk.execution()
        await take_over(rig, talk, "say something else")
        resolved = await talk.until(ev.INTERACTION_RESOLVED)
        assert resolved.body["interaction"] == asked.body["interaction"]
        assert resolved.body["outcome"] in ("expired", "cancelled")
        await talk.ended()
        await talk.until(ev.RESPONSE_ENDED, outcome="completed")
        new = talk.execution()
        await talk.ended()
        assert not (rig.workspace / "never-made").exists()
        outcomes = talk.told(ev.RESPONSE_SUPERSEDED)
        assert len(outcomes) == 1
    assert writers.overlaps([old, new]) == []
