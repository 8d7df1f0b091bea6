"""D1, D3, D7, D10–D13: drain, suspend and resume through the whole set, with the scripted agent, over a provider."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from support_local_set import Http, eventually
from support_over import Over, a_set, providers, said
from tether import ids

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=providers())
async def up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Over]:
    async with a_set(request.param, tmp_path_factory.mktemp("drain")) as found:
        yield found


async def sandbox(http: Http, workspace: str) -> dict[str, Any]:
    answer = await http.client.get(f"/v1/sandboxes/{workspace}")
    found: dict[str, Any] = answer.json()
    return found


async def reaches(http: Http, workspace: str, state: str) -> None:
    async def there() -> bool:
        return (await sandbox(http, workspace)).get("state") == state

    await eventually(there, f"the sandbox {state}")


async def drained(http: Http, workspace: str, drain: str, verb: str = "drain", **body: object) -> dict[str, Any]:
    """The final report of an operation that is begun here."""
    answer = await http.client.post(f"/v1/sandboxes/{workspace}/{verb}", json={"drain_id": drain, **body})
    assert answer.status_code == 202, answer.text
    found: dict[str, Any] = {}

    async def final() -> bool:
        found.update((await http.client.get(f"/v1/sandboxes/{workspace}/drains/{drain}")).json())
        return bool(found["state"] != "running")

    await eventually(final, f"the end of {drain}")
    await reaches(http, workspace, "suspended" if found["state"] == "done" else "active")
    return found


async def execution_of(http: Http, conversation: str, index: int) -> dict[str, Any]:
    found: dict[str, Any] = (await http.conversation(conversation))["executions"][index]
    return found


async def test_a_turn_that_a_drain_cuts_is_told_and_the_next_prompt_sees_the_earlier_turns(up: Over) -> None:
    async with up.http() as http:
        await http.prompt("talk", "talk_r1", "remember-the-heron", workspace="wt")
        await http.ended("talk", 1)
        await http.prompt("talk", "talk_r2", "busy-now\n!tool build 60000", workspace="wt")
        await said(http, "talk", "busy-now")
        lives = up.collector("wt")
        told = await drained(http, "wt", "d1", grace_s=2)
        [execution] = [one for one in told["executions"] if one["cut"]]
        assert (told["state"], execution["outcome"]) == ("done", "graceful")
        assert execution["interrupted"] == ["build"]
        assert not lives()
        second = await execution_of(http, "talk", 1)
        assert (second["state"], second["outcome"]) == ("ended", "drained")
        # Reads wake nothing.
        await http.conversation("talk")
        assert (await sandbox(http, "wt"))["state"] == "suspended"
        await http.prompt("talk", "talk_r3", "!recall", workspace="wt")
        await said(http, "talk", "remember-the-heron")
        await http.ended("talk", 3)
        assert (await sandbox(http, "wt"))["state"] == "active"
        assert not lives()


async def test_a_cut_turn_goes_on_once_where_its_prompt_said_so(up: Over) -> None:
    async with up.http() as http:
        await http.prompt("goon", "goon_r1", "first-step\n!tool build 60000", workspace="wg", continuation="continue")
        await said(http, "goon", "first-step")
        told = await drained(http, "wg", "d1", grace_s=2)
        answers = await asyncio.gather(*(http.client.post("/v1/sandboxes/wg/resume", json={}) for _ in range(3)))
        assert sum(answer.json()["woken"] for answer in answers) == 1
        await http.ended("goon", 2)
        found = await http.conversation("goon")
        request = ids.continuation_id(told["checkpoint"]["checkpoint"], "goon")
        assert [one["request"] for one in found["responses"]] == ["goon_r1", request]
        assert [one["outcome"] for one in found["responses"]] == ["drained", "completed"]


async def test_messages_that_a_cut_turn_had_not_read_are_read_by_the_next_one_once(up: Over) -> None:
    async with up.http() as http:
        await http.prompt("unread", "unread_r1", "in-work\n!tool build 60000", workspace="wu")
        await said(http, "unread", "in-work")
        joined = await http.prompt("unread", "unread_r2", "remember-the-plover", workspace="wu")
        assert joined["status"] == "interjected"
        told = await drained(http, "wu", "d1", grace_s=1)
        [execution] = told["executions"]
        assert [one["request"] for one in execution["unheard"]] == ["unread_r2"]
        await http.prompt("unread", "unread_r3", "!recall", workspace="wu")
        await said(http, "unread", "remember-the-plover")
        await http.ended("unread", 2)
        await http.prompt("unread", "unread_r4", "only-this", workspace="wu")
        await said(http, "unread", "only-this")
        found = await http.conversation("unread")
        assert [one["outcome"] for one in found["responses"]][:2] == ["drained", "completed"]
        assert len([text for text in await http.texts("unread") if "plover" in text]) == 1


async def test_a_cut_turn_goes_on_after_sigterm_and_a_drain_behind_it(up: Over) -> None:
    async with up.http() as http:
        await http.prompt("both", "both_r1", "one-step\n!ask build", workspace="wz", continuation="continue")
        await said(http, "both", "one-step")

        async def asked() -> bool:
            return any(one.get("state") == "pending" for one in (await http.conversation("both"))["interactions"])

        await eventually(asked, "the question, which is not waited for")
        await asyncio.to_thread(up.terminate, "wz")
        told = await drained(http, "wz", "d1", grace_s=2)
        [execution] = told["executions"]
        assert (execution["cut"], execution["continuation"]) == (True, "continue")
        await http.client.post("/v1/sandboxes/wz/resume", json={})
        await http.ended("both", 2)
        found = await http.conversation("both")
        assert [one["outcome"] for one in found["responses"]] == ["drained", "completed"]


async def test_a_volume_that_is_gone_comes_back_from_the_blobs(up: Over) -> None:
    async with up.http() as http:
        await http.prompt("cold", "cold_r1", "remember-the-otter", workspace="wc")
        await http.ended("cold", 1)
        told = await drained(http, "wc", "d1", store="both", include="workspace")
        assert told["state"] == "done"
        await asyncio.to_thread(up.lose_volume, "wc")
        await http.prompt("cold", "cold_r2", "!recall", workspace="wc")
        await said(http, "cold", "remember-the-otter")


async def test_d2_an_agent_that_ignores_sigterm_is_killed_and_the_checkpoint_says_so(up: Over) -> None:
    async with up.http() as http:
        await http.prompt("deaf", "deaf_r1", "!ignore SIGTERM\nhere-i-stay\n!tool build 60000", workspace="wd")
        await said(http, "deaf", "here-i-stay")
        told = await drained(http, "wd", "d1", grace_s=2)
        [execution] = told["executions"]
        assert (told["state"], execution["outcome"], told["checkpoint"]["clean"]) == ("done", "forced", False)


async def test_d3_another_drain_joins_and_a_start_during_it_runs_afterwards_once(up: Over) -> None:
    async with up.http() as http:
        await http.prompt("first", "first_r1", "first-one\n!tool build 60000", workspace="wj")
        await said(http, "first", "first-one")
        post = http.client.post
        begun = (await post("/v1/sandboxes/wj/drain", json={"drain_id": "d1", "grace_s": 4})).json()
        same = (await post("/v1/sandboxes/wj/drain", json={"drain_id": "d1", "grace_s": 4})).json()
        other = (await post("/v1/sandboxes/wj/drain", json={"drain_id": "d2", "grace_s": 4})).json()
        assert (begun["joined"], same["joined"], other["joined"]) == (False, True, True)
        assert {one["drain"] for one in (begun, same, other)} == {"d1"}
        await http.prompt("second", "second_r1", "second-one", workspace="wj")
        await http.ended("second", 1)
        await http.ended("first", 1)
        assert await http.texts("second") == ["You said: second-one"]
        assert await http.outcomes("second") == ["completed"]
        assert await http.outcomes("first") == ["drained"]
        found = (await http.client.get("/v1/sandboxes/wj/drains/d1")).json()
        assert found["state"] == "done"


@pytest.mark.parametrize("volume", ["kept", "lost"])
async def test_d12_uncommitted_files_are_there_after_a_resume(up: Over, volume: str) -> None:
    workspace, conversation = f"wf-{volume}", f"files-{volume}"
    async with up.http() as http:
        await http.prompt(conversation, f"{conversation}-1", "one", workspace=workspace)
        await http.ended(conversation, 1)
        script = "mkdir -p src && printf uncommitted >src/new.py && chmod 750 src/new.py && ln -s src/new.py link"
        await asyncio.to_thread(up.shell, workspace, script)
        await drained(http, workspace, "d1", store="both", include="workspace")
        if volume == "lost":
            await asyncio.to_thread(up.lose_volume, workspace)
        await http.prompt(conversation, f"{conversation}-2", "!recall", workspace=workspace)
        await http.ended(conversation, 2)
        look = await asyncio.to_thread(up.shell, workspace, "cat link && ls -l src/new.py link")
        assert look.startswith("uncommitted") and "-rwxr-x---" in look and "link -> src/new.py" in look, look


async def test_a_volume_that_is_gone_without_blobs_is_a_typed_failure(up: Over) -> None:
    async with up.http() as http:
        await http.prompt("none", "none_r1", "remember-nothing", workspace="wn")
        await http.ended("none", 1)
        await drained(http, "wn", "d1", store="volume")
        await asyncio.to_thread(up.lose_volume, "wn")
        await http.prompt("none", "none_r2", "!recall", workspace="wn")

        async def failed() -> bool:
            responses = (await http.conversation("none")).get("responses", [])
            return any(one.get("error", {}).get("code") == "RESUME_FAILED" for one in responses)

        await eventually(failed, "a response that failed with RESUME_FAILED")


async def test_sigterm_to_a_collector_is_a_drain_and_the_next_prompt_goes_on(up: Over) -> None:
    async with up.http() as http:
        await http.prompt("term", "term_r1", "remember-the-crane", workspace="wx")
        await http.ended("term", 1)
        await asyncio.to_thread(up.terminate, "wx")
        await reaches(http, "wx", "suspended")
        assert (await sandbox(http, "wx"))["checkpoint"] is not None
        await http.prompt("term", "term_r2", "!recall", workspace="wx")
        await said(http, "term", "remember-the-crane")


async def test_a_busy_sandbox_is_not_suspended_and_an_idle_one_is_deleted_with_its_checkpoint(up: Over) -> None:
    async with up.http() as http:
        await http.prompt("busy", "busy_r1", "hold-on\n!tool build 60000", workspace="wb")
        await said(http, "busy", "hold-on")
        refused = await http.client.post("/v1/sandboxes/wb/suspend", json={"drain_id": "d1"})
        assert (refused.status_code, refused.json()["code"]) == (409, "SESSION_BUSY")
        deleted = await http.client.delete("/v1/sandboxes/wb", params={"drain_id": "d2", "grace_s": 1})
        assert deleted.status_code == 202, deleted.text

        async def gone() -> bool:
            return (await http.client.get("/v1/sandboxes/wb")).status_code == 404

        await eventually(gone, "the deletion")
        told = (await http.client.get("/v1/sandboxes/wb/drains/d2")).json()
        assert (told["state"], told["sandbox_state"]) == ("done", "deleted")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=providers())
async def idle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Over]:
    async with a_set(request.param, tmp_path_factory.mktemp("idle"), idle_s=1.0) as found:
        yield found


async def test_an_idle_sandbox_is_suspended_one_that_waits_for_a_person_is_not_and_a_prompt_wakes_it(
    idle: Over,
) -> None:
    async with idle.http() as http:
        await http.prompt("person", "person_r1", "!ask deploy", workspace="wp")
        await http.prompt("idle", "idle_r1", "remember-the-swift", workspace="wi")
        await http.ended("idle", 1)
        await reaches(http, "wi", "suspended")
        assert (await sandbox(http, "wp"))["state"] == "active"
        await http.prompt("idle", "idle_r2", "!recall", workspace="wi")
        await said(http, "idle", "remember-the-swift")
        await reaches(http, "wi", "suspended")
        assert (await sandbox(http, "wp"))["state"] == "active"
