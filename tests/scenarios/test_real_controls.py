"""Exactly one writer with the real, pinned Claude Code and Codex: who is asked, cut, taken over and stopped.

The models are played by `fake_models`. Skipped where a CLI is not installed (`make agents`).
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support_claude import WORKSPACE, Rig, Talk, becomes, claude_set, collector_of, found_cli, processes_of
from support_codex import codex_set
from support_writers import Writers, living
from tether import events as ev
from tether.processes import ProcessId, is_running, send_signal
from tether.prompt import AgentSpec
from tether_cli import state
from tether_cli.state import Paths

pytestmark = [pytest.mark.real_cli, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(150)]

KILLED = ("backend", "router", "agent", "collector")
# A tool in a session of its own that ignores what it can: an interrupt alone leaves it.
SURVIVOR = "setsid python3 -c 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(300)'"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["claude", "codex"])
async def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    cli, root = found_cli(request.param), tmp_path_factory.mktemp(f"{request.param}-controls")
    async with claude_set(cli, root) if request.param == "claude" else codex_set(cli, root) as made:
        yield made


async def kill(rig: Rig, name: str) -> None:
    """SIGKILL, and until its successor runs."""

    def now() -> ProcessId:
        if name == "collector":
            return collector_of(rig.data)
        up = state.read(Paths(rig.data))
        assert up is not None
        return up.children[name]

    before = now()
    assert send_signal(before, signal.SIGKILL)
    await becomes(lambda: (after := now()) != before and is_running(after), f"the successor of the {name}")


async def runs(talk: Talk) -> str:
    """Let the surviving tool run; its execution, once it does."""
    await talk.prompt(f"[[bash:{SURVIVOR}]]")
    await talk.allowed()
    execution = talk.execution()
    tools = processes_of
    await becomes(lambda: any("time.sleep(300)" in " ".join(one) for one in tools(execution).values()), "the tool")
    return execution


async def test_c1_an_approval_is_answered_once_after_every_service_was_killed_in_turn(rig: Rig) -> None:
    made = rig.workspace / "c1.txt"
    async with rig.talk("c1") as talk:
        await talk.prompt("[[bash:echo ran >> c1.txt]]")
        asked = await talk.until(ev.INTERACTION_REQUESTED)
        execution = talk.execution()
        before = set(living()[execution])
        for name in KILLED:
            await kill(rig, name)
        after = set(living()[execution])  # whatever the CLI had started for a moment may be gone
        assert after <= before and min(before, key=lambda one: one.start_ticks) in after, "the same process, no other"
        assert not made.exists()
        await talk.answer(asked, decision="allow")
        assert (await talk.ended())["outcome"] == "completed"
        assert made.read_text() == "ran\n"
        assert len(talk.events(ev.EXECUTION_STARTED)) == 1
        assert [body["outcome"] for body in talk.bodies(ev.INTERACTION_RESOLVED)] == ["answered"]
        settled = [body for body in talk.bodies(ev.CONTROL_RECEIPT) if body["status"] == "settled"]
        assert len(settled) == 1


async def test_a_surviving_tool_is_ended_by_interrupt_takeover_and_stop_and_the_conversation_goes_on(rig: Rig) -> None:
    async with rig.talk("ends") as talk, Writers(rig.up.data) as writers:
        cut = await runs(talk)
        assert (await rig.client.interrupt(cut)).problem is None
        assert (await talk.ended())["outcome"] == "cancelled"
        assert processes_of(cut) == {}
        receipts = [body["status"] for body in talk.bodies(ev.CONTROL_RECEIPT) if body["verb"] == "interrupt"]
        assert receipts == ["accepted", "delivered", "settled"]

        taken = await runs(talk)
        agent = AgentSpec(kind=rig.agent, model=rig.model, args=rig.args)
        await rig.client.prompt("ends", "[[text:instead]]", agent=agent, workspace=WORKSPACE, mode="takeover")
        ended = await talk.ended()
        assert (ended["outcome"], bool(ended["proof"])) == ("stopped", True)
        assert processes_of(taken) == {}
        await talk.until(ev.RESPONSE_ENDED, outcome="completed")
        new = talk.execution()
        await talk.ended()
        assert len(talk.told(ev.RESPONSE_SUPERSEDED)) == 1 and "instead" in talk.texts()

        stopped = await runs(talk)
        receipt = await rig.client.stop(stopped)
        ended = await talk.ended()
        assert (receipt.problem, ended["outcome"]) == (None, "stopped")
        assert ended["proof"]["method"] in ("pid_namespace", "subreaper_sweep")
        assert processes_of(stopped) == {}
        await talk.prompt("[[text:and on]]")
        assert (await talk.ended())["outcome"] == "completed"
    assert writers.overlaps([cut, taken, new, stopped]) == []
