"""G5, G7, D9 through the whole set with the scripted agent: a session is lost, and what the user sees and may do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support_local_set import Http, eventually
from support_over import Over, a_set, providers

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=providers())
async def up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Over]:
    async with a_set(request.param, tmp_path_factory.mktemp("resume")) as found:
        yield found


async def response(http: Http, conversation: str, request: str) -> dict[str, Any]:
    found = (await http.conversation(conversation))["responses"]
    return next(one for one in found if one["request"] == request)


@pytest.mark.parametrize("how", ["hard", "soft"])
async def test_d9_a_lost_session_fails_by_name_and_the_next_prompt_chooses(up: Over, how: str) -> None:
    async with up.http() as http:
        await http.prompt(how, f"{how}-1", f"the number is 4711\n!forget {how}")
        await http.ended(how, 1)
        await http.prompt(how, f"{how}-2", "!recall")
        await http.ended(how, 2)
        failed = await response(http, how, f"{how}-2")
        assert (failed["outcome"], failed["error"]["code"]) == ("failed", "RESUME_FAILED")
        assert failed["error"]["choices"] == ["fresh", "history"]
        await http.prompt(how, f"{how}-3", "!recall", resume="history")
        await http.ended(how, 3)
        assert (await response(http, how, f"{how}-3"))["outcome"] == "completed"
        assert (await http.texts(how))[-1] == "I remember 1 earlier turns: history"
        await http.prompt(how, f"{how}-4", "!recall")
        await http.ended(how, 4)
        assert (await http.texts(how))[-1].startswith("I remember 2 earlier turns: history"), "the new session goes on"


async def test_a_fresh_start_forgets_and_the_new_session_is_the_conversations(up: Over) -> None:
    async with up.http() as http:
        await http.prompt("fresh", "f1", "remember\n!forget hard")
        await http.ended("fresh", 1)
        await http.prompt("fresh", "f2", "!recall", resume="fresh")
        await http.ended("fresh", 2)
        assert (await http.texts("fresh"))[-1] == "I remember 0 earlier turns: none"
        await http.prompt("fresh", "f3", "!recall")
        await http.ended("fresh", 3)
        assert (await http.texts("fresh"))[-1].startswith("I remember 1 earlier turns:")


async def test_g5_after_a_takeover_the_history_stands_in_by_itself_and_there_is_one_writer(up: Over) -> None:
    async with up.http() as http, up.writers() as writers:
        await http.prompt("taken", "t1", "the number is 4711")
        await http.ended("taken", 1)
        await http.prompt("taken", "t2", "!forget hard\nbusy\n!stay\n!tool build 60000")

        async def busy() -> bool:
            return "busy" in await http.texts("taken")

        await eventually(busy, "the second turn")
        await http.prompt("taken", "t3", "!recall", mode="takeover")
        await http.ended("taken", 3)
        assert (await response(http, "taken", "t3"))["outcome"] == "completed"
        assert (await http.texts("taken"))[-1] == "I remember 1 earlier turns: history"
        names = [one["execution"] for one in (await http.conversation("taken"))["executions"]]
    assert writers.overlaps(names) == []


async def cut(http: Http, conversation: str, **fields: Any) -> None:
    """A first turn that a drain cuts before anything of it shows that its session can be resumed."""
    first = "!sleep 600\n!say the number is 4711"
    await http.prompt(conversation, f"{conversation}-1", first, workspace=conversation, **fields)

    async def runs() -> bool:
        executions = (await http.conversation(conversation)).get("executions", [])
        return any(one.get("native_session") for one in executions)

    await eventually(runs, "the first turn")
    drain = {"drain_id": "d1", "grace_s": 1}
    answer = await http.client.post(f"/v1/sandboxes/{conversation}/drain", json=drain)
    assert answer.status_code == 202, answer.text

    async def asleep() -> bool:
        return bool((await http.client.get(f"/v1/sandboxes/{conversation}")).json().get("state") == "suspended")

    await eventually(asleep, "the sandbox's sleep")


def recovered(found: dict[str, Any]) -> list[tuple[str, int]]:
    return [(one["state"]["why"], one["state"]["rows"]) for one in found["items"] if one["kind"] == "session"]


async def test_a_first_turn_that_a_drain_cuts_goes_on_from_the_history_which_has_its_message(up: Over) -> None:
    async with up.http() as http:
        await cut(http, "early")
        await http.prompt("early", "early-2", "!recall", workspace="early")
        await http.ended("early", 2)
        found = await http.conversation("early")
        assert [one["outcome"] for one in found["responses"]] == ["drained", "completed"]
        assert (await http.texts("early"))[-1] == "I remember 1 earlier turns: history"
        assert recovered(found) == [("cut", 1)]
        await http.prompt("early", "early-3", "!recall", workspace="early")
        await http.ended("early", 3)
        assert recovered(await http.conversation("early")) == [("cut", 1)], "the new session is the conversation's"
        assert (await http.texts("early"))[-1].startswith("I remember 2 earlier turns: history")


async def test_its_continuation_is_given_the_history_too(up: Over) -> None:
    async with up.http() as http:
        await cut(http, "onward", continuation="continue")
        answer = await http.client.post("/v1/sandboxes/onward/resume", json={})
        assert answer.status_code == 202, answer.text
        await http.ended("onward", 2)
        found = await http.conversation("onward")
        assert [one["outcome"] for one in found["responses"]] == ["drained", "completed"]
        assert recovered(found) == [("cut", 1)]


async def test_a_first_turn_that_a_takeover_cuts_is_told_to_who_took_over(up: Over) -> None:
    async with up.http() as http:
        await http.prompt("ousted", "ousted-1", "!stay\n!sleep 600")

        async def runs() -> bool:
            executions = (await http.conversation("ousted")).get("executions", [])
            return any(one.get("native_session") for one in executions)

        await eventually(runs, "the first turn")
        await http.prompt("ousted", "ousted-2", "!recall", mode="takeover")
        await http.ended("ousted", 2)
        assert (await http.texts("ousted"))[-1] == "I remember 1 earlier turns: history"
        assert recovered(await http.conversation("ousted")) == [("cut", 1)]


@pytest.mark.parametrize("provider", providers())
async def test_where_no_history_may_stand_in_a_cut_first_turn_fails_by_name_until_the_user_chooses(
    tmp_path: Path, provider: str
) -> None:
    shell = {"TETHER_ROUTER_HISTORY_FALLBACK": "never"}
    async with a_set(provider, tmp_path, shell=shell) as up, up.http() as http:
        await cut(http, "never")
        for number in (2, 3):
            await http.prompt("never", f"never-{number}", "!recall", workspace="never")
            await http.ended("never", number)
            failed = await response(http, "never", f"never-{number}")
            assert (failed["outcome"], failed["error"]["code"]) == ("failed", "RESUME_FAILED")
            assert failed["error"]["choices"] == ["fresh", "history"]
        await http.prompt("never", "never-4", "!recall", workspace="never", resume="history")
        await http.ended("never", 4)
        assert (await response(http, "never", "never-4"))["outcome"] == "completed"
