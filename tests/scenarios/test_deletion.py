"""A conversation is deleted through the whole set: no file, message or answer has its marker, and others stay whole.

The marker is looked for in every file below the set's data directory: JetStream's blocks, databases and their
write-ahead logs, volumes, logs. The user's own files in a workspace are the user's: one is planted, and must stay.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
import pytest_asyncio

from support_local_set import Http, collector_in, eventually
from support_over import Over, a_set
from tether.client import ConversationItem, ExecutionItem
from tether.errors import Code, ProblemError
from tether.export_format import ConversationExport, ExportedMessage, ExportedResponse
from tether.fold import TextItem
from tether.processes import ProcessId, is_running, send_signal
from tether_cli import state
from tether_cli.state import Paths

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]
SEED: Final = 20260
LONG: Final = 150_000  # characters of an answer: far beyond what an event holds
OVER_S: Final = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Over]:
    async with a_set("local", tmp_path_factory.mktemp("deletion")) as found:
        yield found


def found_in(up: Over, marker: str, *, but: Path | None = None) -> list[str]:
    """Every file below the data directory that has it."""
    found = []
    for path in sorted(up.data.rglob("*")):
        try:
            if path.is_file() and not path.is_symlink() and path != but and marker.encode() in path.read_bytes():
                found.append(str(path.relative_to(up.data)))
        except OSError:
            continue
    return found


async def planted(http: Http, name: str, workspace: str, marker: str) -> None:
    """A conversation with the marker in its prompts, a long answer, a tool's input, an approval and its answer."""
    padding = "x" * LONG
    await http.prompt(name, f"{name}_r1", f"{marker} {padding}", workspace=workspace)
    await http.ended(name, 1)
    script = f"!reasoning {marker}\n!tool dig 1 {LONG}\n!ask {marker}\n!say {marker} it is"
    await http.prompt(name, f"{name}_r2", script, workspace=workspace)
    asked: list[dict[str, Any]] = []

    async def waits() -> bool:
        asked[:] = [one for one in (await http.conversation(name)).get("interactions", []) if one["state"] == "pending"]
        return bool(asked)

    await eventually(waits, "an approval that waits")
    answer = {"decision": "deny", "text": f"no {marker}"}
    told = await http.client.post(f"/v1/conversations/{name}/interactions/{asked[0]['interaction']}", json=answer)
    assert told.status_code == 200, told.text
    await http.ended(name, 2)


async def over(http: Http, name: str) -> dict[str, Any]:
    """The deletion's final view."""
    found: dict[str, Any] = {}

    async def final() -> bool:
        answer = await http.client.get(f"/v1/conversations/{name}/deletion")
        found.update(answer.json())
        return answer.status_code == 200 and found["state"] != "running"

    await eventually(final, f"the end of the deletion of {name}", OVER_S)
    return found


async def nowhere(up: Over, marker: str, *, but: Path | None = None) -> None:
    async def gone() -> bool:
        return not await asyncio.to_thread(found_in, up, marker, but=but)

    try:
        await eventually(gone, "a marker that is in no file")
    except TimeoutError:
        raise AssertionError(f"the marker is in {found_in(up, marker, but=but)}") from None


async def test_a_deleted_conversation_is_in_no_file_and_no_answer_and_its_neighbour_goes_on(up: Over) -> None:
    marker = "quetzal-7c1f-marker"
    async with up.http() as http:
        await http.prompt("calm", "calm_r1", "remember-the-heron", workspace="w1")
        await planted(http, "doomed", "w1", marker)
        await http.ended("calm", 1)
        own = up.data / "workspaces" / up.state.tenant / "w1" / "notes.txt"
        own.write_text(f"the user's own: {marker}")
        before = found_in(up, marker, but=own)
        assert {part for part in ("nats", "backend", "workspaces") if any(part in one for one in before)} == {
            "nats",
            "backend",
            "workspaces",
        }, before
        execution = (await http.conversation("doomed"))["executions"][0]["execution"]

        answer = await http.client.delete("/v1/conversations/doomed")
        assert answer.status_code == 202, answer.text
        view = await over(http, "doomed")
        assert (view["state"], view["pending_on"]) == ("done", [])
        assert view["erased"]["blobs"] >= 2 and view["erased"]["executions"] == 2
        await nowhere(up, marker, but=own)
        assert marker in own.read_text()

        for path in ("", "/events", "/export"):
            refused = await http.client.get(f"/v1/conversations/doomed{path}")
            assert refused.status_code == 410, refused.text
            assert refused.json()["code"] == "CONVERSATION_DELETED"
        assert (await http.client.get(f"/v1/executions/{execution}")).status_code == 404
        names = [one["conversation"] for one in (await http.client.get("/v1/conversations")).json()["conversations"]]
        assert "doomed" not in names and "calm" in names
        body = {"request_id": "late", "content": [{"type": "text", "text": "hello"}], "agent": {"kind": "scripted"}}
        assert (await http.client.post("/v1/conversations/doomed/messages", json=body)).status_code == 410

        await http.prompt("calm", "calm_r2", "!recall", workspace="w1")
        await http.ended("calm", 2)
        assert any("1" in text for text in await http.texts("calm")), "its session knows the earlier turn"


async def test_a_sandbox_that_sleeps_is_cleaned_where_it_lies_with_its_checkpoint_in_the_blobs(up: Over) -> None:
    marker = "quetzal-51ee-marker"
    async with up.http() as http:
        await http.prompt("stays", "stays_r1", "remember-the-crane", workspace="w2")
        await http.prompt("sleeps", "sleeps_r1", f"!say {marker}", workspace="w2")
        await http.ended("sleeps", 1)
        await http.ended("stays", 1)
        drained = await http.client.post("/v1/sandboxes/w2/drain", json={"drain_id": "drn_w2", "store": "both"})
        assert drained.status_code == 202, drained.text

        async def suspended() -> bool:
            return bool((await http.client.get("/v1/sandboxes/w2")).json()["state"] == "suspended")

        await eventually(suspended, "a suspended sandbox")
        assert found_in(up, marker)
        assert (await http.client.delete("/v1/conversations/sleeps")).status_code == 202
        view = await over(http, "sleeps")
        assert (view["state"], view["pending_on"]) == ("done", [])
        assert view["erased"]["checkpoint_blobs"] > 0
        await nowhere(up, marker)
        assert (await http.client.get("/v1/sandboxes/w2")).json()["state"] == "suspended", "nothing was woken"
        await http.prompt("stays", "stays_r2", "!recall", workspace="w2")
        await http.ended("stays", 2)
        assert any("1" in text for text in await http.texts("stays"))


async def test_force_stops_what_runs_and_its_reader_is_told_why_the_stream_ends(up: Over) -> None:
    marker = "quetzal-0b92-marker"
    async with up.http() as http:
        await http.prompt("busy", "busy_r1", f"!say {marker}\n!hang", workspace="w3")

        async def said() -> bool:
            return any(marker in text for text in await http.texts("busy"))

        await eventually(said, "what it says")
        refused = await http.client.delete("/v1/conversations/busy")
        assert (refused.status_code, refused.json()["code"]) == (409, "SESSION_BUSY")
        async with up.client() as client:
            seen: list[str] = []

            async def read() -> Code | None:
                try:
                    async for item in client.follow("busy"):
                        if isinstance(item, ConversationItem | ExecutionItem):
                            seen.append(item.event.type)
                except ProblemError as error:
                    return error.problem.code
                return None

            reader = asyncio.create_task(read(), name="reader")

            async def reads() -> bool:
                return bool(seen)

            await eventually(reads, "a reader that reads")
            begun = await client.delete_conversation("busy", force=True)
            view = await client.deleted(begun, timeout_s=OVER_S)
            assert view.state == "done", view
            assert await asyncio.wait_for(reader, 30) is Code.CONVERSATION_DELETED
        assert "execution.ended" in seen, "it was stopped with proof, before anything was erased"
        await nowhere(up, marker)


async def test_an_export_has_everything_and_is_read_back_by_its_schema(up: Over) -> None:
    marker = "quetzal-e4a0-marker"
    async with up.http() as http:
        await planted(http, "kept", "w4", marker)
        answer = await http.client.get("/v1/conversations/kept/export", params={"format": "json"})
        assert answer.status_code == 200
        export = ConversationExport.model_validate_json(answer.content)
        told = await http.client.get("/v1/conversations/kept/export", params={"format": "markdown"})
    kinds = [entry.kind for entry in export.entries if entry.kind != "note"]
    assert kinds == ["message", "response", "message", "response"]
    messages = [entry for entry in export.entries if isinstance(entry, ExportedMessage)]
    assert messages[0].content[0]["text"].startswith(marker) and len(messages[0].content[0]["text"]) > LONG
    runs = [entry.execution for entry in export.entries if isinstance(entry, ExportedResponse)]
    first, second = runs
    assert first is not None and second is not None
    assert any(isinstance(one.item, TextItem) and len(one.item.text) > LONG for one in first.items)
    (whole,) = [one for one in second.items if one.content is not None]
    assert len(whole.content or "") >= LONG and not whole.content_missing, "what was too large for an event"
    assert {"tool", "interaction", "reasoning", "text"} <= {one.item.kind for one in second.items}
    assert second.usage and second.outcome == "completed"
    assert any(receipt["status"] == "settled" for receipt in second.receipts.values())
    text = told.text
    assert text.startswith("# Conversation `kept`") and text.rstrip().endswith("*End of the export.*")
    assert len(text) > 3 * LONG, "the long message, its answer and the tool's output are whole"
    assert f"Approval `{marker}`: denied" in text


async def test_a_deletion_ends_whatever_is_killed_while_it_runs(up: Over) -> None:
    chosen, names = random.Random(SEED), [f"killed{number}" for number in range(4)]
    async with up.http() as http:
        for name in names:
            await http.prompt(name, f"{name}_r1", f"!say quetzal-{name}-marker\n!lines 60", workspace=f"w-{name}")
        for name in names:
            await http.ended(name, 1)
        for name in names:
            assert (await http.client.delete(f"/v1/conversations/{name}")).status_code == 202
        await asyncio.sleep(chosen.uniform(0, 0.3))  # somewhere in their steps: whichever, they end
        send_signal(collector_in(up.data, f"w-{names[-1]}"), signal.SIGKILL)
        await asyncio.gather(*(killed(up, service) for service in ("router", "agent", "backend")))
        for name in names:
            view = await asyncio.wait_for(_patient(http, name), OVER_S)
            assert (view["state"], view["pending_on"]) == ("done", []), (name, view)
            await nowhere(up, f"quetzal-{name}-marker")


async def killed(up: Over, name: str) -> None:
    """Until another one is there."""

    def now() -> ProcessId:
        found = state.read(Paths(up.data))
        assert found is not None
        return found.children[name]

    before = now()
    send_signal(before, signal.SIGKILL)

    async def again() -> bool:
        return bool(now() != before and is_running(now()))

    await eventually(again, f"another {name}")


async def _patient(http: Http, conversation: str) -> dict[str, Any]:
    """As `over`, through a backend that is away for a while."""
    while True:
        try:
            return await over(http, conversation)
        except httpx2.TransportError:
            await asyncio.sleep(0.2)
