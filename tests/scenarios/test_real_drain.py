"""D1, D3, D6–D8 with the real, pinned Claude Code and Codex: drained, the volume lost, woken by a prompt.

The models are played by `fake_models`, which keep what they were asked: what the CLI knows after a resume is read
there. Each test has a sandbox of its own. A CLI that is killed in the middle of a tool without a drain is in
`test_real_resume`. Skipped where a CLI is not installed (`make agents`).
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support_claude import KEY, Rig, claude_set, found_cli, holding, processes_of
from support_codex import codex_set
from support_real_drain import (
    SLEEPER,
    UNCOMMITTED,
    cli_of,
    in_workspace,
    lines_of,
    lose_the_volume,
    of_talk,
    restored,
    suspended,
    tool_is_running,
    uncommitted,
    with_uncommitted_work,
)
from support_real_resume import asked_with
from tether import events as ev
from tether import ids
from tether.errors import Code, ProblemError
from tether.processes import send_signal

pytestmark = [pytest.mark.real_cli, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

SLEEP = f"python3 -c '{SLEEPER}'"
CUT_SHORT = "[tether] Your last turn was cut off"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["claude", "codex"])
async def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    kind: str = request.param
    namespaces = ["unshare", "--user", "--map-root-user", "true"]
    if kind == "codex" and (await asyncio.to_thread(subprocess.run, namespaces, capture_output=True)).returncode:
        pytest.skip("no user namespaces here: the CLI runs its commands in one")
    making = claude_set if kind == "claude" else codex_set
    async with making(found_cli(kind), tmp_path_factory.mktemp(f"{kind}-drain")) as made:
        yield made


@pytest.mark.parametrize("store", ["blobs", "both"])
async def test_a_turn_that_is_drained_in_a_tool_is_remembered_on_an_empty_volume(rig: Rig, store: str) -> None:
    rig = in_workspace(rig, f"cold-{store}")
    question = f"what number was it in {store}?"
    async with rig.talk(f"cold-{store}") as talk:
        await talk.prompt("[[text:the number is 4711]]")
        await talk.ended()
        await with_uncommitted_work(rig)
        command = f"echo ran >> ran.txt; {SLEEP}"
        await talk.prompt(f"[[bash:{command}]]")
        await talk.allowed()
        old = talk.execution()
        await tool_is_running(old)
        report = await suspended(rig, "d1", grace_s=4, store=store, include="workspace")
        left = of_talk(report, talk)
        assert (left.cut, left.resumable, len(left.interrupted)) == (True, True, 1)
        assert left.outcome in ("graceful", "forced")
        assert processes_of(old) == {}
        assert report.checkpoint is not None
        ended = await talk.ended()
        assert (ended["outcome"], ended["checkpoint"]) == ("drained", report.checkpoint.checkpoint)
        assert [body["status"] for body in talk.bodies(ev.TOOL_COMPLETED)] == ["interrupted"], talk.bodies(
            ev.TOOL_COMPLETED
        )
        await lose_the_volume(rig)

        await talk.prompt(f"[[text:still here]] {question}")
        await talk.until(ev.RESPONSE_ENDED, outcome="completed")
        await talk.ended()
        assert restored(rig) == report.checkpoint.checkpoint
        assert talk.texts()[-1] == "still here"
        sessions = {body["native_session"] for body in talk.bodies(ev.SESSION_BOUND)}
        assert sessions == {left.native_session} and talk.bodies(ev.SESSION_RECOVERED) == []
        assert talk.bodies(ev.EXECUTION_STARTED)[-1]["resumed_from"] == left.native_session
        [seen] = asked_with(rig, question)
        assert "the number is 4711" in seen, "what was said before"
        assert "time.sleep(60)" in seen, "and the turn that was cut"
        assert seen.count(question) == 1
        assert lines_of(rig.workspace / "ran.txt") == ["ran"], "the tool is not run again"
        assert len(talk.bodies(ev.TOOL_STARTED)) == 1
        assert (rig.workspace / UNCOMMITTED).read_text() == "not in any commit\n"
        assert uncommitted(rig) == [UNCOMMITTED, "ran.txt"]
    assert await asyncio.to_thread(holding, rig.workspace, [KEY]) == []


async def test_a_turn_that_is_drained_while_the_model_speaks_is_remembered_on_an_empty_volume(rig: Rig) -> None:
    rig, question = in_workspace(rig, "speaking"), "what number was it before speaking?"
    async with rig.talk("speaking") as talk:
        await talk.prompt("[[text:the number is 4712]]")
        await talk.ended()
        await talk.prompt("[[slow:600,100]]")
        await talk.until(ev.TEXT_DELTA)
        report = await suspended(rig, "d1", grace_s=4, store="both")
        left = of_talk(report, talk)
        assert (left.cut, left.interrupted) == (True, ())
        assert (await talk.ended())["outcome"] == "drained"
        await lose_the_volume(rig)
        await talk.prompt(f"[[text:still here]] {question}")
        await talk.until(ev.RESPONSE_ENDED, outcome="completed")
        await talk.ended()
        assert talk.texts()[-1] == "still here"
        assert {body["native_session"] for body in talk.bodies(ev.SESSION_BOUND)} == {left.native_session}
        [seen] = asked_with(rig, question)
        assert "the number is 4712" in seen and "[[slow:600,100]]" in seen
        assert len(rig.model_requests("[[slow:600,100]]")) == 1, "the turn is not begun again"


async def test_a_drain_does_not_wait_for_a_person_and_the_next_prompt_goes_on(rig: Rig) -> None:
    rig, question = in_workspace(rig, "person"), "what number was it before person?"
    async with rig.talk("person") as talk:
        await talk.prompt("[[text:the number is 4713]]")
        await talk.ended()
        await talk.prompt("[[bash:touch never-allowed]]")
        asked = await talk.until(ev.INTERACTION_REQUESTED)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        report = await suspended(rig, "d1", grace_s=120)
        assert loop.time() - began_s < 40, "not its share of the grace"
        left = of_talk(report, talk)
        assert (left.cut, left.outcome) == (True, "graceful")
        resolved = await talk.until(ev.INTERACTION_RESOLVED)
        assert (resolved.body["interaction"], resolved.body["outcome"]) == (asked.body["interaction"], "expired")
        await talk.ended()
        with pytest.raises(ProblemError) as late:
            await talk.answer(asked, decision="allow")
        assert late.value.problem.code is Code.INTERACTION_SETTLED
        await talk.prompt(f"[[text:still here]] {question}")
        await talk.until(ev.RESPONSE_ENDED, outcome="completed")
        await talk.ended()
        assert {body["native_session"] for body in talk.bodies(ev.SESSION_BOUND)} == {left.native_session}
        assert "the number is 4713" in asked_with(rig, question)[-1]
        assert not (rig.workspace / "never-allowed").exists()


async def test_an_answer_that_was_not_applied_is_offered_where_the_resumed_session_asks_the_same(rig: Rig) -> None:
    """The CLI is stopped when the answer comes, and so never reads it."""
    rig = in_workspace(rig, "offered")
    words = "[[bash:echo ran >> ran.txt]]"
    async with rig.talk("offered") as talk:
        await talk.prompt(words)
        asked = await talk.until(ev.INTERACTION_REQUESTED)
        assert "offered" not in asked.body
        cli = cli_of(rig, talk.execution())
        assert send_signal(cli, signal.SIGSTOP)
        try:
            await talk.answer(asked, decision="allow")
            report = await suspended(rig, "d1", grace_s=4)
        finally:
            send_signal(cli, signal.SIGCONT)
        assert (of_talk(report, talk).outcome, of_talk(report, talk).cut) == ("forced", True)
        await talk.until(ev.INTERACTION_RESOLVED, outcome="expired")
        await talk.ended()
        await talk.prompt(words)
        again = await talk.until(ev.INTERACTION_REQUESTED)
        assert again.body["interaction"] != asked.body["interaction"]
        assert again.body["offered"]["decision"] == "allow"
        assert not (rig.workspace / "ran.txt").exists(), "it is offered, not given"
        await talk.answer(again, decision="allow")
        assert (await talk.ended())["outcome"] == "completed"
        assert lines_of(rig.workspace / "ran.txt") == ["ran"]


async def test_a_cut_turn_goes_on_by_one_continuation_that_names_the_tool(rig: Rig) -> None:
    rig = in_workspace(rig, "goon")
    async with rig.talk("goon") as talk:
        words = f"[[bash:echo ran >> ran.txt; {SLEEP}]]"
        await talk.prompt(words, continuation="continue")
        await talk.allowed()
        await tool_is_running(talk.execution())
        before = len(rig.model_requests(words))
        report = await suspended(rig, "d1", grace_s=4, store="both", include="workspace")
        left = of_talk(report, talk)
        await talk.ended()
        await lose_the_volume(rig)
        woken = await asyncio.gather(*(rig.client.resume(rig.workspace_name) for _ in range(3)))
        assert sum(one.woken for one in woken) == 1
        await talk.until(ev.RESPONSE_ENDED, outcome="completed")
        await talk.ended()
        assert report.checkpoint is not None
        request = ids.continuation_id(report.checkpoint.checkpoint, talk.conversation)
        assert [body["request"] for body in talk.told(ev.RESPONSE_CREATED)][1:] == [request]
        [seen] = asked_with(rig, CUT_SHORT)
        assert left.interrupted and f"Interrupted before they finished: {left.interrupted[0]}." in seen
        assert seen.count(json.dumps(words)[1:-1]) == 1, "what the user asked is in the session, once"
        assert len(rig.model_requests(words)) == before, "and is not asked again"
        assert lines_of(rig.workspace / "ran.txt") == ["ran"]
        assert {body["native_session"] for body in talk.bodies(ev.SESSION_BOUND)} == {left.native_session}
