"""Dockerfile, requirements and compose file agree with the services; images do where an engine runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support_docker import engine
from tether.settings import ServiceSettings, load
from tether_agent import agents
from tether_agent.config import AgentSettings
from tether_backend.config import BackendSettings, load_tokens
from tether_images import build, wheels
from tether_images.engine import ImageError
from tether_router.config import RouterSettings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SETTINGS: dict[str, type[ServiceSettings]] = {
    "router": RouterSettings,
    "backend": BackendSettings,
    "agent": AgentSettings,
}


def blocks(path: Path) -> dict[str, str]:
    """Requirement → its hashes."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if not line.startswith((" ", "#")):
            pin = line.split(";")[0].strip(" \\")
            found[pin] = ""
        elif found:
            found[pin] += line
    return found


@pytest.mark.parametrize("service", build.SERVICES)
def test_what_goes_into_an_image_is_what_is_locked(service: str) -> None:
    locked = blocks(ROOT / "requirements.lock")
    for pin, hashes in blocks(wheels.requirements_of(service)).items():
        assert set(re.findall(r"sha256:\w+", hashes)) == set(re.findall(r"sha256:\w+", locked[pin])), pin
        assert "sha256:" in hashes


def test_an_image_of_no_service_is_refused_by_name() -> None:
    with pytest.raises(ImageError, match="one of agent backend collector operator router"):
        wheels.requirements_of("nothing")


def test_nothing_but_sources_and_requirements_reaches_the_engine() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    for source in " ".join(copied).split():
        plain = source.rstrip("*").replace("/tether_${SERVICE}", "")
        assert any(plain.startswith(prefix) for prefix in allowed), source


# --- compose ---


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compose") / "secrets"
    done = subprocess.run(
        [str(DEPLOY / "secrets.sh"), str(folder)], capture_output=True, text=True, timeout=20, check=True
    )
    assert "the token for HTTP" in done.stdout
    return folder


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def environment(service: str, secrets: Path) -> dict[str, str]:
    """As compose hands it on, secrets where they were made here."""
    given = compose()["services"][service]["environment"]
    files = {name: secrets / Path(one["file"]).name for name, one in compose()["secrets"].items()}
    found = {}
    for name, value in given.items():
        plain = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))
        secret = plain.removeprefix("/run/secrets/")
        found[name] = str(files[secret]) if secret in files else plain
    return found


@pytest.mark.parametrize("service", sorted(SETTINGS))
def test_each_service_of_the_compose_file_takes_its_settings(service: str, secrets: Path) -> None:
    settings = load(SETTINGS[service], environment(service, secrets))
    password = settings.password()
    assert password is not None and len(password) == 48
    assert f'password: "{password}"' in (secrets / "nats.conf").read_text()


def test_the_compose_files_secrets_are_files_that_the_services_can_use(secrets: Path) -> None:
    backend = load(BackendSettings, environment("backend", secrets))
    assert len(load_tokens(backend.http_tokens_file, backend.tenant_names).entries) == 1
    agent = load(AgentSettings, environment("agent", secrets))
    assert agents.load(agent.agents_file).agents == {}
    before = {path.name: path.read_bytes() for path in secrets.iterdir()}
    subprocess.run([str(DEPLOY / "secrets.sh"), str(secrets)], capture_output=True, timeout=20, check=True)
    assert {path.name: path.read_bytes() for path in secrets.iterdir()} == before, "made once, never anew"
    assert all(path.stat().st_mode & 0o077 == 0 for path in secrets.iterdir())


def test_every_service_of_the_compose_file_is_confined_and_only_the_agent_service_reaches_the_engine() -> None:
    services = compose()["services"]
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", [])), name
        mounted = any("docker.sock" in str(volume) for volume in service.get("volumes", []))
        assert mounted == (name == "agent"), name
        assert set(service.get("secrets", [])) <= set(compose()["secrets"]), name
    assert services["agent"]["environment"]["TETHER_DOCKER_NETWORK"] == compose()["networks"]["bus"]["name"]


# --- an image, built and run ---


@pytest.mark.timeout(180)
def test_the_agent_services_image_is_small_not_root_and_runs_on_a_read_only_root() -> None:
    client = engine()
    [image] = build.build(["agent"], base_image=None, tag="test", offline=True, prefix="tether-test")
    assert image.size_bytes < 200 << 20
    facts = client.api.inspect_image(image.name)["Config"]
    assert facts["User"] == "65532:65532"
    assert not any("secret" in value.lower() for value in facts["Env"])
    confined = {"read_only": True, "cap_drop": ["ALL"], "network_mode": "none", "tmpfs": {"/tmp": ""}}
    state = "/var/lib/tether"
    variables = {"TETHER_AGENT_PROVIDER": "docker", "TETHER_AGENT_STATE_DIR": state, "TETHER_NATS_ULR": "x"}
    container = client.containers.run(image.name, environment=variables, detach=True, **confined)
    try:
        assert container.wait(timeout=60)["StatusCode"] == 78
        told = container.logs().decode()
        assert "did you mean TETHER_NATS_URL?" in told and "TETHER_AGENT_WORKSPACES_DIR" in told
    finally:
        container.remove(force=True)
    code = "import docker, tether_agent.providers.docker, os; print(os.getuid())"
    told = client.containers.run(image.name, ["-c", code], entrypoint=["python3"], remove=True, **confined)
    assert json.loads(told) == 65532 != os.getuid()
