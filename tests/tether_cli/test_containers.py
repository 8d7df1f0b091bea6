"""What `tether up` and `tether doctor` say before a sandbox fails to start in a container."""

from __future__ import annotations

import pytest

from support_docker import engine
from tether_cli import containers
from tether_cli.output import CliError

DOCKER = {"TETHER_AGENT_PROVIDER": "docker", "TETHER_DOCKER_NETWORK": "host"}


def problems(environ: dict[str, str]) -> dict[str, containers.Finding]:
    return {one.name: one for one in containers.findings(environ) if one.problem}


def test_sets_whose_sandboxes_are_processes_ask_no_engine() -> None:
    containers.check({"DOCKER_HOST": "unix:///nowhere"})
    containers.check({"TETHER_AGENT_PROVIDER": "local"})


def test_an_engine_that_does_not_answer_is_named_with_the_remedy() -> None:
    with pytest.raises(CliError, match="does not answer") as told:
        containers.check({**DOCKER, "DOCKER_HOST": "unix:///nowhere/docker.sock"})
    assert "DOCKER_HOST" in told.value.remedy


def test_a_missing_image_a_missing_network_and_an_unreachable_bus_are_each_told() -> None:
    client = engine()
    client.close()
    missing = problems({**DOCKER, "TETHER_DOCKER_IMAGE": "tether-no-such:image"})
    assert "tether-no-such:image" in missing["image"].detail and "make images" in missing["image"].remedy
    nowhere = problems({**DOCKER, "TETHER_DOCKER_NETWORK": "tether-no-such"})
    assert "docker network create tether-no-such" in nowhere["network"].remedy
    apart = {**DOCKER, "TETHER_DOCKER_NETWORK": "bridge"}
    assert "loopback" in problems(apart)["network"].detail
    assert "network" not in problems({**apart, "TETHER_DOCKER_NATS_URL": "nats://bus.internal:4222"})
    assert problems(DOCKER).keys() <= {"image"}
