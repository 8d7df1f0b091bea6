"""G5, D9 with the real, pinned Claude Code and Codex: what the model is told when the CLI's own session is lost.

The models are played by `fake_models`, which keep what they were asked: so a test reads there what the CLI made of the
history. Skipped where a CLI is not installed (`make agents`).
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support_claude import Rig, becomes, claude_set, cli_of, found_cli, processes_of
from support_codex import cli_of as codex_of
from support_codex import codex_set
from support_real_resume import ask, asked_with, kept_gone
from support_writers import Writers
from tether import events as ev
from tether.processes import send_signal

pytestmark = [pytest.mark.real_cli, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

SLEEP = "python3 -c 'import time; time.sleep(60)'"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["claude", "codex"])
async def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    kind: str = request.param
    namespaces = ["unshare", "--user", "--map-root-user", "true"]
    if kind == "codex" and (await asyncio.to_thread(subprocess.run, namespaces, capture_output=True)).returncode:
        pytest.skip("no user namespaces here: the CLI runs its commands in one")
    making = claude_set if kind == "claude" else codex_set
    async with making(found_cli(kind), tmp_path_factory.mktemp(f"{kind}-resume")) as made:
        yield made


async def test_g5_a_session_that_is_gone_after_a_takeover_is_followed_by_one_with_the_history(rig: Rig) -> None:
    async with rig.talk("gone") as talk, Writers(rig.up.data) as writers:
        await talk.prompt("[[text:the number is 4711]]")
        await talk.ended()
        await talk.prompt(f"[[bash:{SLEEP}]]")
        await talk.allowed()
        old = talk.execution()
        await becomes(lambda: any("time.sleep(60)" in " ".join(one) for one in processes_of(old).values()), "the tool")
        session = talk.bodies(ev.SESSION_BOUND)[-1]["native_session"]
        async with kept_gone(rig, session):
            await ask(rig, talk, "[[text:it was said before]] what number was it?", mode="takeover")
            recovered = await talk.until(ev.SESSION_RECOVERED)
        assert (recovered.body["from"], recovered.body["why"]) == (session, "not_found")
        assert (recovered.body["source"], recovered.body["process"]) == ("export", 2)
        assert recovered.body["rows"] >= 3
        await talk.until(ev.RESPONSE_ENDED, outcome="completed")
        await talk.ended()
        new = talk.execution()
        assert talk.bodies(ev.SESSION_BOUND)[-1]["native_session"] != session
        assert talk.texts()[-1] == "it was said before"
        seen = asked_with(rig, "what number was it?")[-1]
        assert "the number is 4711" in seen, "the model was told the earlier turn"
        assert "time.sleep(60)" in seen and "interrupted" in seen, "and which tool was cut"
        assert seen.count("what number was it?") == 1
    assert writers.overlaps([old, new]) == []
    async with rig.talk("gone") as again:
        await again.prompt("[[text:and on]] go on")
        await again.until(ev.TEXT_COMPLETED, text="and on")
        await again.ended()
        assert (
            again.bodies(ev.EXECUTION_STARTED)[-1]["resumed_from"]
            == talk.bodies(ev.SESSION_BOUND)[-1]["native_session"]
        )


async def test_d9_a_session_that_is_gone_without_a_takeover_fails_and_the_user_chooses(rig: Rig) -> None:
    async with rig.talk("choose") as talk:
        await talk.prompt("[[text:the number is 4712]]")
        await talk.ended()
        session = talk.bodies(ev.SESSION_BOUND)[-1]["native_session"]
        async with kept_gone(rig, session):
            await talk.prompt("[[text:never said]] what number was it?")
            ended = await talk.until(ev.RESPONSE_ENDED)
            assert ended.body["error"]["code"] == "RESUME_FAILED"
            assert ended.body["error"]["choices"] == ["fresh", "history"]
            await talk.ended()
            await ask(rig, talk, "[[text:said once]] which number, please?", resume="history")
            recovered = await talk.until(ev.SESSION_RECOVERED)
            assert (recovered.body["why"], recovered.body["process"]) == ("chosen", 1)
        await talk.until(ev.RESPONSE_ENDED, outcome="completed")
        await talk.ended()
        seen = asked_with(rig, "which number, please?")[-1]
        assert "the number is 4712" in seen and "never said" not in talk.texts()
        assert not asked_with(rig, "[[text:never said]]"), "a prompt that failed to resume reaches no model"


async def test_a_cli_that_was_killed_in_the_middle_of_a_tool_goes_on_in_its_own_session(rig: Rig) -> None:
    async with rig.talk("killed") as talk:
        await talk.prompt("[[text:the number is 4713]]")
        await talk.ended()
        await talk.prompt(f"[[bash:{SLEEP}]]")
        await talk.allowed()
        execution = talk.execution()
        await becomes(
            lambda: any("time.sleep(60)" in " ".join(one) for one in processes_of(execution).values()), "the tool"
        )
        cli = cli_of(execution) if rig.agent == "claude" else codex_of(execution)
        assert send_signal(cli, signal.SIGKILL)
        assert (await talk.ended())["outcome"] == "lost"
        await talk.prompt("[[text:still here]] what number was it?")
        await talk.until(ev.RESPONSE_ENDED, outcome="completed")
        await talk.ended()
        sessions_bound = {body["native_session"] for body in talk.bodies(ev.SESSION_BOUND)}
        assert len(sessions_bound) == 1 and talk.bodies(ev.SESSION_RECOVERED) == []
        assert talk.bodies(ev.EXECUTION_STARTED)[-1]["resumed_from"] in sessions_bound
        seen = asked_with(rig, "what number was it?")[-1]
        assert "the number is 4713" in seen and "time.sleep(60)" in seen
        sleeps = [one for one in talk.bodies(ev.TOOL_STARTED) if "time.sleep(60)" in json.dumps(one)]
        assert len(sleeps) == 1, "no tool is run again"
