"""The same scenarios through a whole set over HTTP, on every provider: as processes, and as containers.

The other scenarios of drain, resume and takeover are written over a provider, too (support_over).
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support_over import BOTH, Over, a_set, providers, said
from tether.client import Answer, Interaction

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=providers(BOTH))
async def over(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Over]:
    async with a_set(request.param, tmp_path_factory.mktemp(f"over-{request.param}")) as found:
        yield found


async def allowing(interaction: Interaction) -> Answer:
    return Answer(decision="allow")


async def test_a_prompt_with_an_approval_and_the_next_one_in_the_same_session(over: Over) -> None:
    async with over.client() as client:
        first = await client.ask(
            "c1", "!say before\n!ask write\n!say after", agent="scripted", workspace="w1", on_interaction=allowing
        )
        assert (first.outcome, first.text) == ("completed", "before\n\nafter")
        second = await client.ask("c1", "!recall", agent="scripted", workspace="w1")
        assert (second.outcome, "1" in second.text) == ("completed", True)


async def test_a_collector_that_is_killed_under_an_approval_loses_neither_question_nor_answer(over: Over) -> None:
    async with over.http() as http, over.client() as client:

        async def killing(interaction: Interaction) -> Answer:
            over.kill_collector("w2")
            return Answer(decision="allow")

        text = "!say before\n!ask write\n!say after"
        answered = await client.ask("c2", text, agent="scripted", workspace="w2", on_interaction=killing)
        assert answered.outcome == "completed"
        await http.ended("c2", 1)
        assert await http.texts("c2") == ["before", "after"]


async def test_interrupt_and_stop_end_what_they_should_with_proof(over: Over) -> None:
    async with over.http() as http, over.client() as client:
        await http.prompt("c3", "c3-1", "!say busy\n!hang", workspace="w3")
        await said(http, "c3", "busy")
        execution = (await http.conversation("c3"))["executions"][-1]["execution"]
        assert (await client.interrupt(execution)).problem is None
        await http.ended("c3", 1)
        assert await http.outcomes("c3") == ["cancelled"]
        await http.prompt("c3", "c3-2", "!say again\n!hang", workspace="w3")
        await said(http, "c3", "again")
        execution = (await http.conversation("c3"))["executions"][-1]["execution"]
        assert (await client.stop(execution)).problem is None
        await http.ended("c3", 2)
        assert (await http.outcomes("c3"))[-1] == "stopped"


async def test_a_sandbox_that_dies_at_once_is_told_as_lost_and_the_next_prompt_runs(over: Over) -> None:
    async with over.http() as http, over.client() as client:
        await http.prompt("c4", "c4-1", "!say before\n!hang", workspace="w4")
        await said(http, "c4", "before")
        over.kill_everything("w4")
        await http.ended("c4", 1)
        assert await http.outcomes("c4") == ["lost"]
        again = await client.ask("c4", "!say again", agent="scripted", workspace="w4")
        assert (again.outcome, again.text) == ("completed", "again")


async def test_a_drain_in_mid_turn_keeps_the_session_and_a_prompt_wakes_the_sandbox(over: Over) -> None:
    async with over.http() as http, over.client() as client:
        await client.ask("c5", "!say remembered", agent="scripted", workspace="w5")
        await http.prompt("c5", "c5-2", "!say before\n!ask write", workspace="w5")
        await said(http, "c5", "before")
        drained = await client.drained(await client.drain("w5", grace_s=4))
        assert (drained.state, drained.problem) == ("done", None)
        assert (await client.sandbox("w5")).state == "suspended"
        woken = await client.ask("c5", "!recall", agent="scripted", workspace="w5")
        assert woken.outcome == "completed"
        assert (await client.sandbox("w5")).state == "active"
        assert (await http.texts("c5"))[:2] == ["remembered", "before"]


async def test_a_drained_sandbox_goes_on_from_the_blob_store_where_its_volume_is_lost(over: Over) -> None:
    async with over.client() as client:
        await client.ask("c7", "!say remembered", agent="scripted", workspace="w7")
        drained = await client.drained(await client.drain("w7", grace_s=4, store="both"))
        assert (drained.state, drained.problem) == ("done", None)
        over.lose_volume("w7")
        woken = await client.ask("c7", "!recall", agent="scripted", workspace="w7")
        assert (woken.outcome, "1" in woken.text) == ("completed", True), woken


async def test_a_sandbox_is_deleted_and_its_conversation_goes_on_in_a_new_one(over: Over) -> None:
    async with over.client() as client:
        await client.ask("c6", "!say one", agent="scripted", workspace="w6")
        await client.drained(await client.delete("w6"))
        assert "w6" not in [one.workspace for one in (await client.sandboxes()).sandboxes]
        answered = await client.ask("c6", "!say two", agent="scripted", workspace="w6")
        assert (answered.outcome, answered.text) == ("completed", "two")


async def test_a_checkpoint_that_cannot_be_restored_is_told_by_name_with_choices_and_one_of_them_goes_on(
    over: Over,
) -> None:
    async with over.http() as http, over.client() as client:
        await client.ask("c8", "!say remembered", agent="scripted", workspace="w8")
        drained = await client.drained(await client.drain("w8", grace_s=4, store="volume"))
        assert (drained.state, drained.problem) == ("done", None)
        over.lose_volume("w8")
        await http.prompt("c8", "c8-2", "!recall", workspace="w8")
        await http.ended("c8", 2)
        failed = (await http.conversation("c8"))["responses"][1]
        assert (failed["outcome"], failed["error"]["code"]) == ("failed", "RESUME_FAILED"), failed
        assert failed["error"]["choices"] == ["fresh", "history"]
        chosen = await client.ask("c8", "!recall", agent="scripted", workspace="w8", resume="history")
        assert (chosen.outcome, "1" in chosen.text) == ("completed", True), chosen


async def test_an_agent_that_nobody_has_is_refused_before_a_sandbox_is_made_but_for_a_message_that_joins(
    over: Over,
) -> None:
    async with over.http() as http, over.client() as client:
        text = {"content": [{"type": "text", "text": "hello"}], "agent": {"kind": "nope"}}
        path = "/v1/conversations/c9/messages"
        refused = await http.client.post(path, json={"request_id": "c9-1", "workspace": "w9", **text})
        assert (refused.status_code, refused.json()["code"]) == (422, "INVALID")
        [field] = refused.json()["fields"]
        assert field["field"] == "agent.kind" and field["remedy"].startswith("there is no agent nope; there is: ")
        assert "w9" not in [one.workspace for one in (await client.sandboxes()).sandboxes]
        await http.prompt("c9", "c9-2", "!say busy\n!tool build 60000", workspace="w9")
        await said(http, "c9", "busy")
        joined = await http.client.post(path, json={"request_id": "c9-3", "workspace": "w9", **text})
        assert (joined.status_code, joined.json()["status"]) == (202, "interjected")
        execution = (await http.conversation("c9"))["executions"][-1]["execution"]
        assert (await client.stop(execution)).problem is None
