"""P4, C8: takeovers through the whole set, with the scripted agent; its writers are counted from outside meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support_local_set import Http, eventually
from support_over import Over, a_set, providers, said
from support_set import TetherSet
from support_writers import living
from tether import ids

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

DEAF = "!ignore SIGTERM\n!ignore SIGINT\n!ignore SIGHUP\n!fork2 60\nbusy\n!stay\n!tool build 60000"
STUBBORN = "busy\n!stay\n!tool build 60000"  # a signal ends it, an interrupt does not


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=providers())
async def up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Over]:
    async with a_set(request.param, tmp_path_factory.mktemp("takeover")) as found:
        yield found


async def responses(http: Http, conversation: str) -> dict[str, dict[str, Any]]:
    """By request."""
    return {one["request"]: one for one in (await http.conversation(conversation)).get("responses", [])}


async def outcome_of(http: Http, conversation: str, request: str, outcome: str) -> dict[str, Any]:
    async def reached() -> bool:
        found = (await responses(http, conversation)).get(request)
        return found is not None and found.get("outcome") == outcome

    await eventually(reached, f"{request} {outcome}")
    return (await responses(http, conversation))[request]


async def executions(http: Http, conversation: str) -> list[str]:
    return [one["execution"] for one in (await http.conversation(conversation))["executions"]]


async def test_a_takeover_of_a_tool_that_ignores_signals_and_forks_away_waits_for_the_end_of_everything(
    up: Over,
) -> None:
    async with up.http() as http, up.writers() as writers:
        await http.prompt("deaf", "d1", DEAF)
        await said(http, "deaf", "busy")
        old = (await responses(http, "deaf"))["d1"]["execution"]
        assert len(living()[old]) >= 2, "the agent, and what it forked away"
        answer = await http.prompt("deaf", "d2", "!sleep 1\n!say instead", mode="takeover")
        assert answer["status"] in ("admitted", "pending")
        second = await outcome_of(http, "deaf", "d2", "completed")
        first = await outcome_of(http, "deaf", "d1", "superseded")
        assert first["superseded_by"] == second["response"]
        await http.ended("deaf", 2)
        [ended, _] = (await http.conversation("deaf"))["executions"]
        assert (ended["outcome"], ended["proof"]["method"] in ("pid_namespace", "subreaper_sweep")) == ("stopped", True)
        assert old not in living()
        names = await executions(http, "deaf")
        assert await http.texts("deaf") == ["busy", "instead"]
    assert set(names) <= writers.seen
    assert writers.overlaps(names) == []


async def test_a_pending_approval_is_closed_by_a_takeover_and_its_answer_comes_too_late(up: Over) -> None:
    async with up.http() as http, up.writers() as writers:
        await http.prompt("asking", "a1", "!ask write")

        async def asked() -> bool:
            return bool((await http.conversation("asking")).get("interactions"))

        await eventually(asked, "the approval")
        [pending] = (await http.conversation("asking"))["interactions"]
        await http.prompt("asking", "a2", "instead", mode="takeover")
        await outcome_of(http, "asking", "a2", "completed")
        await outcome_of(http, "asking", "a1", "superseded")
        await http.ended("asking", 2)
        [closed] = (await http.conversation("asking"))["interactions"]
        assert closed["state"] in ("expired", "cancelled"), closed
        late = await http.client.post(
            f"/v1/conversations/asking/interactions/{pending['interaction']}", json={"decision": "allow"}
        )
        assert late.status_code in (404, 409, 410), late.text
        assert late.json()["code"] in ("INTERACTION_SETTLED", "TARGET_STALE", "SESSION_STREAM_NOT_ACTIVE")
        names = await executions(http, "asking")
    assert writers.overlaps(names) == []


async def test_two_takeovers_at_once_end_with_the_later_one_and_the_other_says_that_it_was_superseded(
    up: Over,
) -> None:
    async with up.http() as http, up.writers() as writers:
        await http.prompt("both", "b1", "first\n!hang")
        await said(http, "both", "first")

        async def take(request: str) -> Any:
            body = {
                "request_id": request,
                "content": [{"type": "text", "text": f"here is {request}\n!wait_file go"}],
                "agent": {"kind": "scripted"},
                "mode": "takeover",
            }
            return await http.client.post("/v1/conversations/both/messages", json=body)

        answers = await asyncio.gather(take("b2"), take("b3"))

        async def one_runs() -> bool:
            texts = await http.texts("both")
            found = await responses(http, "both")
            failed = (await http.conversation("both")).get("failures", [])
            lost = [one["request"] for one in failed if one["code"] == "REQUEST_SUPERSEDED"]
            lost += [name for name, one in found.items() if one.get("outcome") == "superseded" and name != "b1"]
            return len(lost) == 1 and any(f"here is {name}" in texts for name in {"b2", "b3"} - set(lost))

        await eventually(one_runs, "one takeover runs, the other was superseded")
        for answer in answers:
            assert answer.status_code in (202, 409), answer.text
            if answer.status_code == 409:
                assert answer.json()["code"] == "REQUEST_SUPERSEDED"
        assert (await responses(http, "both"))["b1"]["outcome"] == "superseded"
        names = await executions(http, "both")
        await http.prompt("both", "b4", "done", mode="takeover")
        await outcome_of(http, "both", "b4", "completed")
    assert writers.overlaps(names) == []


async def test_a_collector_killed_in_the_middle_of_a_stop_goes_on_with_it(up: Over) -> None:
    async with up.http() as http, up.writers() as writers:
        await http.prompt("killed", "k1", STUBBORN, workspace="own-killed")
        await said(http, "killed", "busy")
        old = (await responses(http, "killed"))["k1"]["execution"]
        waiting = asyncio.create_task(http.prompt("killed", "k2", "instead", mode="takeover", workspace="own-killed"))

        stop = ids.control_id(up.state.tenant, "k2", "stop", 1)

        async def taken() -> bool:
            receipt = await http.client.get(f"/v1/controls/{stop}")
            return receipt.status_code == 200 and receipt.json()["status"] in ("accepted", "delivered")

        await eventually(taken, "the stop is taken")
        assert old in living()
        await asyncio.to_thread(up.kill_collector, "own-killed")
        await waiting
        await outcome_of(http, "killed", "k2", "completed")
        await outcome_of(http, "killed", "k1", "superseded")
        names = await executions(http, "killed")
    assert writers.overlaps(names) == []


async def test_the_command_takes_over_and_shows_what_it_cut_short(up: Over, tmp_path: Path) -> None:
    async with up.http() as http, up.writers() as writers:
        await http.prompt("cli", "c1", "first\n!hang")
        await said(http, "cli", "first")
        there = TetherSet(tmp_path, up.data)
        arguments = ("run", "!say instead", "--agent", "scripted", "--conversation", "cli", "--mode", "takeover")
        done = await asyncio.to_thread(there.tether, *arguments)
        assert (done.returncode, done.stdout) == (0, "instead\n"), done.stderr
        shown = await asyncio.to_thread(there.tether, "show", "cli")
        assert "superseded" in shown.stderr, shown.stderr
        refused = await asyncio.to_thread(there.tether, *arguments[:-1], "seize")
        assert refused.returncode == 2
        assert "--mode must be one of auto, interject, takeover" in refused.stderr
        await http.ended("cli", 2)
        names = await executions(http, "cli")
    assert writers.overlaps(names) == []
