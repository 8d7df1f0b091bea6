"""The same scenarios through a whole set over HTTP, on every provider: as processes, and as containers.

What differs is only who is killed, and how. Over `docker` the bus on loopback is reached by the machine's own network.
"""

from __future__ import annotations

import json
import shutil
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support_docker import SCRIPTED, engine, scripted_agents
from support_local_set import Http, collector_in, eventually
from tether.client import Answer, Client, Interaction
from tether.processes import send_signal
from tether_agent.providers import leftovers
from tether_cli.set import ServiceSet, SetOptions
from tether_cli.state import SetState
from tether_images.build import sandbox_image

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


@dataclass(frozen=True)
class Over:
    """A set over one provider. `engine` and `prefix` of the containers, where there are any."""

    provider: str
    state: SetState
    data: Path
    engine: Any = None
    prefix: str = ""

    def client(self) -> Client:
        return Client.http(self.state.http_url, self.state.token)

    def _container(self, workspace: str) -> Any:
        return self.engine.containers.get(f"{self.prefix}.{self.state.tenant}.{workspace}")

    def kill_collector(self, workspace: str) -> None:
        if self.provider == "local":
            assert send_signal(collector_in(self.data, workspace), signal.SIGKILL)
            return
        kill = "kill -9 $(cut -d' ' -f1 /proc/1/task/1/children)"
        assert self._container(workspace).exec_run(["sh", "-c", kill])[0] == 0

    def kill_everything(self, workspace: str) -> None:
        """At once, as when the machine's power goes for this sandbox alone."""
        if self.provider == "docker":
            self._container(workspace).kill()
            return
        folder = self.data / "workspaces" / self.state.tenant / workspace / ".tether"
        keepers = leftovers.keepers(folder)
        assert keepers
        for identity in (*(keeper for keeper, _ in keepers), collector_in(self.data, workspace)):
            send_signal(identity, signal.SIGKILL)

    def lose_volume(self, workspace: str) -> None:
        """Of a sandbox that does not run: what a move to another machine looks like."""
        if self.provider == "docker":
            self.engine.volumes.get(f"{self.prefix}.{self.state.tenant}.{workspace}").remove()
        else:
            shutil.rmtree(self.data / "workspaces" / self.state.tenant / workspace)


@contextmanager
def environment(provider: str, root: Path, patch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Any, str]]:
    """The shell that starts the set; its agents file, the engine and the prefix of what is in it."""
    agents, prefix = root / "agents.toml", f"t{uuid.uuid4().hex[:10]}"
    if provider == "local":
        agents.write_text("")
        yield agents, None, prefix
        return
    found = engine()
    agents.write_text(f"[agents.scripted]\ncommand = {json.dumps(SCRIPTED)}\n")
    values = {
        "TETHER_AGENT_PROVIDER": "docker",
        "TETHER_DOCKER_IMAGE": sandbox_image(),
        "TETHER_DOCKER_PREFIX": prefix,
        "TETHER_DOCKER_NETWORK": "host",
        "TETHER_DOCKER_AGENTS_DIR": str(scripted_agents(root)),
        "TETHER_DOCKER_MEMORY_BYTES": str(512 << 20),
    }
    for name, value in values.items():
        patch.setenv(name, value)
    try:
        yield agents, found, prefix
    finally:
        ours = {"label": f"dev.tether.prefix={prefix}"}
        left = found.containers.list(all=True, filters=ours)
        for container in left:
            container.remove(force=True)
        for volume in found.volumes.list(filters=ours):
            volume.remove(force=True)
    assert left == [], "a set that has ended leaves no container"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["local", "docker"])
async def over(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Over]:
    root = tmp_path_factory.mktemp(f"over-{request.param}")
    with pytest.MonkeyPatch.context() as patch, environment(request.param, root, patch) as (agents, found, prefix):
        options = SetOptions(data=root / "data", log="quiet", agents_file=agents, back_off_max_s=0.2)
        async with ServiceSet(options) as running:
            yield Over(request.param, running.state, root / "data", found, prefix)


async def said(http: Http, conversation: str, text: str) -> None:
    async def there() -> bool:
        return text in await http.texts(conversation)

    await eventually(there, f"the text {text!r}")


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
    async with Http(over.state) as http, over.client() as client:

        async def killing(interaction: Interaction) -> Answer:
            over.kill_collector("w2")
            return Answer(decision="allow")

        text = "!say before\n!ask write\n!say after"
        answered = await client.ask("c2", text, agent="scripted", workspace="w2", on_interaction=killing)
        assert answered.outcome == "completed"
        await http.ended("c2", 1)
        assert await http.texts("c2") == ["before", "after"]


async def test_interrupt_and_stop_end_what_they_should_with_proof(over: Over) -> None:
    async with Http(over.state) as http, over.client() as client:
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
    async with Http(over.state) as http, over.client() as client:
        await http.prompt("c4", "c4-1", "!say before\n!hang", workspace="w4")
        await said(http, "c4", "before")
        over.kill_everything("w4")
        await http.ended("c4", 1)
        assert await http.outcomes("c4") == ["lost"]
        again = await client.ask("c4", "!say again", agent="scripted", workspace="w4")
        assert (again.outcome, again.text) == ("completed", "again")


async def test_a_drain_in_mid_turn_keeps_the_session_and_a_prompt_wakes_the_sandbox(over: Over) -> None:
    async with Http(over.state) as http, over.client() as client:
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
