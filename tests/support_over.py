"""A whole set over a provider: sandboxes as processes, or as containers. The scenarios are the same code over each.

What differs is who is killed, and how: that is said here once. Over `docker` the bus on loopback is reached by the
machine's own network.

Scenario modules take the providers of `TETHER_TEST_PROVIDERS` (names, comma between them); without it only `local`,
but for those that always run over both (`make docker-scenarios` runs the others over `docker`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from support_docker import SCRIPTED, engine, scripted_agents
from support_local_set import Http, collector_in, eventually, processes_of
from support_writers import Writers
from tether.client import Client
from tether.processes import is_running, send_signal
from tether_agent.providers import leftovers
from tether_cli.set import ServiceSet, SetOptions
from tether_cli.state import SetState
from tether_images.build import sandbox_image

BOTH: Final = ("local", "docker")
VARIABLE: Final = "TETHER_TEST_PROVIDERS"


def providers(default: Sequence[str] = ("local",)) -> list[str]:
    """Those that this run is about."""
    named = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    unknown = set(named) - set(BOTH)
    assert not unknown, f"{VARIABLE}: no such provider: {unknown}"
    return named or list(default)


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

    def http(self) -> Http:
        return Http(self.state)

    def writers(self) -> Writers:
        """Of this set alone: ids are derived from requests, and sets of other tests may have the same."""
        return Writers(str(self.data) if self.provider == "local" else "=/workspace/")

    def _container(self, workspace: str) -> Any:
        return self.engine.containers.get(f"{self.prefix}.{self.state.tenant}.{workspace}")

    def collector(self, workspace: str) -> Callable[[], bool]:
        """Whether what the sandbox's collector runs in now still lives."""
        if self.provider == "local":
            collector = collector_in(self.data, workspace)
            return lambda: is_running(collector)
        container = self._container(workspace).id
        return lambda: any(one.id == container for one in self.engine.containers.list())

    def kill_collector(self, workspace: str) -> None:
        if self.provider == "local":
            assert send_signal(collector_in(self.data, workspace), signal.SIGKILL)
            return
        kill = "kill -9 $(cut -d' ' -f1 /proc/1/task/1/children)"
        assert self._container(workspace).exec_run(["sh", "-c", kill])[0] == 0

    def terminate(self, workspace: str) -> None:
        """As the machine does when it goes down: SIGTERM, and nobody asked."""
        if self.provider == "local":
            assert send_signal(collector_in(self.data, workspace), signal.SIGTERM)
        else:
            self._container(workspace).kill("SIGTERM")

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

    def shell(self, workspace: str, script: str) -> str:
        """A user's command in the workspace of a sandbox that runs; what it prints."""
        if self.provider == "docker":
            code, output = self._container(workspace).exec_run(["sh", "-c", f"cd /workspace && {script}"])
            assert code == 0, output
            text: str = output.decode()
            return text
        folder = self.data / "workspaces" / self.state.tenant / workspace
        return subprocess.run(["sh", "-c", script], cwd=folder, check=True, capture_output=True, text=True).stdout


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
        "TETHER_DOCKER_IMAGE": os.environ.get("TETHER_TEST_SANDBOX_IMAGE") or sandbox_image(),
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
        found.close()
    assert left == [], "a set that has ended leaves no container"


@asynccontextmanager
async def a_set(
    provider: str, root: Path, *, shell: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[Over]:
    """A set over this provider; skips the test with the reason where it cannot run. `shell`: variables of who starts
    it. Nothing of it is left."""
    with pytest.MonkeyPatch.context() as patch, environment(provider, root, patch) as (agents, found, prefix):
        for name, value in (shell or {}).items():
            patch.setenv(name, value)
        data = root / "data"
        chosen = SetOptions(data=data, log="quiet", agents_file=agents, back_off_max_s=0.2, **options)
        async with ServiceSet(chosen) as running:
            yield Over(provider, running.state, data, found, prefix)
    assert processes_of(data) == []


async def said(http: Http, conversation: str, text: str) -> None:
    """Until a text of the conversation has this in it."""

    async def there() -> bool:
        return any(text in found for found in await http.texts(conversation))

    await eventually(there, f"the text {text!r}")
