"""Sandboxes in containers for tests: an engine or the reason why there is none, the image of this very source, a bus on
a network of its own, and the services around it in this process.

The image is built offline, once for each state of the source (its tag is the digest of what goes in).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import tarfile
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import docker  # type: ignore[import-untyped]
import pytest

from support_nats import server_binary, wait_until
from tether import topology
from tether.bus import NatsBus, connect
from tether.client import Answer, Client, ExecutionItem, Item
from tether.events import Event
from tether.ids import new_id
from tether_agent.agents import AgentConfig, AgentsFile, Environment
from tether_agent.config import AgentSettings
from tether_agent.providers.docker import DockerProvider
from tether_agent.service import working
from tether_images.build import sandbox_image
from tether_images.engine import unavailable
from tether_router.config import RouterSettings
from tether_router.service import route

DEADLINE_S: Final = 40.0
WORKSPACE: Final = "w1"
NATS_IMAGE: Final = "tether-test-nats:static"
SCRIPTED: Final = ("python3", "-I", "-S", "/opt/tether/agents/scripted_agent")
SECRET: Final = "sk-do-not-show-7f3a"
_CLIENTS, _MONITOR = "4222/tcp", "8222/tcp"
_ROOT: Final = Path(__file__).resolve().parents[1]


def engine() -> Any:
    """A client of the engine; skips the test with the reason where none runs."""
    reason = unavailable()  # asked first: the SDK leaves a socket open where nobody answers
    if reason is not None:
        pytest.skip(f"no container engine runs here: {reason}")
    return docker.from_env(timeout=60)


@dataclass(frozen=True, slots=True)
class Place:
    """What sandboxes of a test module share. `url` of the bus from here, `inside_url` from a sandbox."""

    client: Any
    image: str
    network: str
    url: str
    inside_url: str
    agents_dir: Path


def scripted_agents(root: Path) -> Path:
    """A folder of agents' CLIs as a sandbox sees it, readable for its user."""
    agents = root / "agents"
    shutil.copytree(_ROOT / "tools" / "scripted_agent", agents / "scripted_agent")
    for path in (agents, *agents.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return agents


@contextlib.contextmanager
def place(root: Path) -> Iterator[Place]:
    """A bus in a container on a network of its own, published on loopback."""
    client = engine()
    image = os.environ.get("TETHER_TEST_SANDBOX_IMAGE") or sandbox_image()
    agents = scripted_agents(root)
    name = f"tether-test-{uuid.uuid4().hex[:8]}"
    network = client.networks.create(name)
    try:
        with _nats(client, name) as port:
            yield Place(client, image, name, f"nats://127.0.0.1:{port}", f"nats://{name}-nats:4222", agents)
    finally:
        network.remove()


@contextlib.contextmanager
def _nats(client: Any, network: str) -> Iterator[int]:
    client.api.import_image_from_data(_nats_root(), repository="tether-test-nats", tag="static")
    container = client.containers.run(
        NATS_IMAGE,
        ["/nats-server", "-js", "-sd", "/data", "-p", "4222", "-m", "8222"],
        name=f"{network}-nats",
        network=network,
        user="65532:65532",
        tmpfs={"/data": "size=4g,mode=1777"},
        ports={_CLIENTS: ("127.0.0.1", None)},
        detach=True,
    )
    try:
        found: list[int] = []

        def published() -> bool:
            container.reload()
            ports = container.attrs["NetworkSettings"]["Ports"].get(_CLIENTS)
            found[:] = [] if not ports else [int(ports[0]["HostPort"])]
            return bool(found) and b"Server is ready" in container.logs()

        wait_until(published, "the bus's start")
        yield found[0]
    finally:
        container.remove(force=True)


def _nats_root() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for folder in ("tmp", "data"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            archive.addfile(entry)
        archive.add(server_binary(), arcname="nats-server")
    return buffer.getvalue()


class Docker:
    """One agent service's sandboxes in a test: settings, providers, a look at its containers."""

    def __init__(self, shared: Place, root: Path) -> None:
        self.place = shared
        self.prefix = f"t{uuid.uuid4().hex[:10]}"
        values: dict[str, Any] = {
            "nats_url": shared.url,
            "agent_provider": "docker",
            "agent_state_dir": root / "state",
            "agent_workspaces_dir": root / "workspaces",
            "docker_image": shared.image,
            "docker_prefix": self.prefix,
            "docker_network": shared.network,
            "docker_nats_url": shared.inside_url,
            "docker_agents_dir": shared.agents_dir,
            "docker_memory_bytes": 512 << 20,
            "docker_cpus": 1.5,
            "docker_pids": 200,
        }
        self.values = values

    def settings(self, **changes: Any) -> AgentSettings:
        return AgentSettings.model_validate({**self.values, **changes})

    def provider(self, bus: NatsBus | None, **changes: Any) -> DockerProvider:
        agents = AgentsFile(agents={"scripted": AgentConfig(command=SCRIPTED)})
        environment = Environment({"scripted": {"SCRIPTED_API_KEY": SECRET}}, {"scripted": "the test"}, {})
        return DockerProvider(self.settings(**changes), agents, environment, bus)

    def name(self, tenant: str, workspace: str = WORKSPACE) -> str:
        return f"{self.prefix}.{tenant}.{workspace}"

    def container(self, tenant: str, workspace: str = WORKSPACE) -> Any:
        return self.place.client.containers.get(self.name(tenant, workspace))

    def run(self, tenant: str, *command: str) -> str:
        """A command in the sandbox's container; what it prints."""
        code, output = self.container(tenant).exec_run(list(command))
        assert code == 0, output
        text: str = output.decode()
        return text

    def containers(self) -> list[Any]:
        found: list[Any] = self.place.client.containers.list(
            all=True, filters={"label": f"dev.tether.prefix={self.prefix}"}
        )
        return found

    def clear(self) -> None:
        """Nothing of this test stays."""
        for container in self.containers():
            container.remove(force=True)
        for volume in self.place.client.volumes.list(filters={"label": f"dev.tether.prefix={self.prefix}"}):
            volume.remove(force=True)


@asynccontextmanager
async def connected(shared: Place, tenant: str) -> AsyncIterator[NatsBus]:
    async with await connect(shared.url, name="test") as bus:
        await bus.ensure(topology.base())
        await bus.ensure(topology.tenant(tenant, max_bytes=64 << 20))
        yield bus


class Talk:
    """One conversation, over NATS."""

    def __init__(self, client: Client, name: str = "c1") -> None:
        self.client = client
        self.name = name
        self.items: list[Item] = []
        self._reader: AsyncGenerator[Item, None] | None = None

    async def prompt(self, text: str, **more: Any) -> None:
        await self.client.prompt(self.name, text, agent="scripted", workspace=WORKSPACE, **more)
        await self.follow()

    async def follow(self) -> None:
        """From the beginning, where nothing is read yet."""
        if self._reader is None:
            self._reader = self.client.follow(self.name)

    async def until(self, kind: str, **body: Any) -> Event:
        """The next event with this type and these fields in its body. Fails with what there was instead."""
        assert self._reader is not None, "prompt first"
        seen: list[str] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE_S):
                async for item in self._reader:
                    self.items.append(item)
                    if not isinstance(item, ExecutionItem):
                        continue
                    seen.append(f"{item.type} {item.event.body}"[:300])
                    if item.type == kind and all(item.event.body.get(name) == value for name, value in body.items()):
                        return item.event
        raise AssertionError(f"no {kind} {body} within {DEADLINE_S:g} s; there was:\n" + "\n".join(seen))

    async def allow(self, asked: Event) -> None:
        """Until it is known what became of the answer: the same control id has one effect."""
        control, interaction = new_id("ctl"), asked.body["interaction"]
        async with asyncio.timeout(DEADLINE_S):
            while True:
                told = await self.client.answer(self.name, interaction, Answer(decision="allow"), control_id=control)
                if told.problem is None and told.status != "unknown":
                    return
                assert told.problem is None or told.problem.retryable, told

    def bodies(self, kind: str) -> list[dict[str, Any]]:
        return [item.event.body for item in self.items if isinstance(item, ExecutionItem) and item.type == kind]

    @property
    def reader(self) -> AsyncGenerator[Item, None]:
        assert self._reader is not None
        return self._reader


@asynccontextmanager
async def services(
    sandboxes: Docker, bus: NatsBus, tenant: str, **changes: Any
) -> AsyncIterator[tuple[DockerProvider, Talk]]:
    """Router and agent service in this process, sandboxes in containers. Leaving it ends no sandbox."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        routing = group.create_task(route(bus, RouterSettings(tenants=tenant), stop), name="router")
        async with agent_service(sandboxes, bus, **changes) as provider, Client.nats(bus, tenant=tenant) as client:
            talk = Talk(client)
            try:
                yield provider, talk
            finally:
                if talk._reader is not None:
                    await talk.reader.aclose()
        stop.set()
        await asyncio.wait([routing], timeout=DEADLINE_S)


@asynccontextmanager
async def agent_service(sandboxes: Docker, bus: NatsBus, **changes: Any) -> AsyncIterator[DockerProvider]:
    provider = sandboxes.provider(bus, **changes)
    async with provider.running(), working(bus, provider, sandboxes.settings(**changes)):
        yield provider
