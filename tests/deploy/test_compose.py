"""deploy/compose.yaml, run: the first answer over HTTP, and a sandbox of its own. Skipped where no engine or no compose
command is there.

The images are built offline from this very source. In place of the published NATS image stands one with this
environment's server; what it is told and how it is confined is the file's.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from support_docker import SCRIPTED, engine, scripted_agents
from support_nats import server_binary
from tether.client import Client
from tether_images import base, build

pytestmark = [pytest.mark.compose, pytest.mark.timeout(400)]  # images are built

DEPLOY: Final = Path(__file__).resolve().parents[2] / "deploy"
TAG: Final = "compose"
IMAGES: Final = "tether-test"
NATS: Final = f"{IMAGES}-compose-nats:{TAG}"
UP_S: Final = 120
HEALTH: Final = "import urllib.request as r; r.urlopen('http://127.0.0.1:8222/healthz?js-enabled-only=true', timeout=2)"


def compose_command() -> list[str]:
    """Skips the test with the reason where there is none."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        if subprocess.run([*command, "version"], capture_output=True, timeout=30, check=False).returncode == 0:
            return command
    pytest.skip("no compose command is installed: neither `docker compose` nor `docker-compose`")


def nats_image(client: Any, root: Path) -> None:
    """This environment's server, on the base of the others: it has what asks for its health."""
    context = root / "nats"
    context.mkdir()
    shutil.copy(server_binary(), context / "nats-server")
    lines = (f"FROM {base.local_base()}", "COPY nats-server /usr/bin/nats-server", 'ENTRYPOINT ["nats-server"]')
    (context / "Dockerfile").write_text("\n".join(lines) + "\n")
    client.images.build(path=str(context), tag=NATS, rm=True)


@dataclass(frozen=True)
class Running:
    url: str
    token: str
    prefix: str
    client: Any

    def containers(self, tenant: str = "default") -> list[Any]:
        found: list[Any] = self.client.containers.list(filters={"label": f"dev.tether.prefix={self.prefix}"})
        return [one for one in found if one.labels["dev.tether.tenant"] == tenant]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    client, command = engine(), compose_command()
    root = tmp_path_factory.mktemp("compose")
    nats_image(client, root)
    build.build(["router", "backend", "agent", "collector"], base_image=None, tag=TAG, offline=True, prefix=IMAGES)
    for name in ("compose.yaml", "secrets.sh"):
        shutil.copy(DEPLOY / name, root)
    told = subprocess.run(["./secrets.sh", "secrets"], cwd=root, capture_output=True, text=True, timeout=20, check=True)
    token = re.findall(r"HTTP: (\w+)", told.stdout)[0]
    (root / "secrets" / "agents.toml").write_text(f"[agents.scripted]\ncommand = {json.dumps(SCRIPTED)}\n")
    health = {"services": {"nats": {"healthcheck": {"test": ["CMD", "python3", "-c", HEALTH]}}}}
    (root / "health.yaml").write_text(json.dumps(health))
    port, prefix = free_port(), f"t{uuid.uuid4().hex[:10]}"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("TETHER_", "COMPOSE_"))},
        "TETHER_IMAGES": IMAGES,
        "TETHER_TAG": TAG,
        "TETHER_NATS_IMAGE": NATS,
        "TETHER_PORT": str(port),
        "TETHER_NETWORK": prefix,
        "TETHER_PREFIX": prefix,
        "TETHER_AGENTS_DIR": str(scripted_agents(root)),
        "TETHER_SANDBOX_MEMORY_BYTES": str(512 << 20),
        "DOCKER_GID": str(Path("/var/run/docker.sock").stat().st_gid),
    }
    for path in root.parents[:3]:  # pytest's folders are this user's alone; the sandbox mounts below them
        path.chmod(path.stat().st_mode | 0o011)
    root.chmod(0o755)

    def compose(*arguments: str, check: bool = True) -> str:
        files = ("-f", "compose.yaml", "-f", "health.yaml", "-p", prefix)
        done = subprocess.run(
            [*command, *files, *arguments], cwd=root, env=environment, capture_output=True, text=True, timeout=UP_S,
            check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    try:
        compose("up", "-d")
        yield Running(f"http://127.0.0.1:{port}", token, prefix, client)
    finally:
        print(compose("logs", "--no-color", "--tail", "40", check=False)[-12_000:])
        compose("stop", "--timeout", "20", "agent", check=False)  # it would begin to tell of what is removed
        for container in client.containers.list(all=True, filters={"label": f"dev.tether.prefix={prefix}"}):
            container.remove(force=True)
        compose("down", "--volumes", "--timeout", "20", check=False)
        for volume in client.volumes.list(filters={"label": f"dev.tether.prefix={prefix}"}):
            volume.remove(force=True)
        client.close()


async def answered(up: Running, text: str) -> str:
    """Until the services are there: nobody is told in which order they come."""
    async with Client.http(up.url, up.token) as client, asyncio.timeout(UP_S):
        response = await client.ask("c1", text, agent="scripted", workspace="w1", patience_s=UP_S)
        assert response.outcome == "completed", response
        return response.text


async def test_the_set_of_the_compose_file_answers_in_a_sandbox_of_its_own_network(up: Running) -> None:
    assert await answered(up, "!say hello") == "hello"
    [sandbox] = up.containers()
    assert list(sandbox.attrs["NetworkSettings"]["Networks"]) == [up.prefix]
    assert sandbox.attrs["HostConfig"]["ReadonlyRootfs"] and sandbox.attrs["HostConfig"]["Memory"] == 512 << 20


async def test_a_drain_and_a_message_go_through_the_whole_of_it(up: Running) -> None:
    async with Client.http(up.url, up.token) as client, asyncio.timeout(UP_S):
        drained = await client.drained(await client.drain("w1", grace_s=5))
        assert (drained.state, drained.problem) == ("done", None)
    assert up.containers() == []
    assert (await answered(up, "!recall")).startswith("I remember 1 earlier turns:")


def test_its_services_run_confined_and_no_secret_is_in_what_the_engine_tells(up: Running) -> None:
    services = up.client.containers.list(filters={"label": f"com.docker.compose.project={up.prefix}"})
    assert len(services) == 4
    for service in services:
        host = service.attrs["HostConfig"]
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"], service.name
        assert up.token not in json.dumps(service.attrs), service.name
