"""What a sandbox's container is made of, without an engine."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tether.settings import ConfigurationError
from tether_agent.agents import AgentConfig, AgentsFile, Environment
from tether_agent.config import AgentSettings
from tether_agent.core.container import Container
from tether_agent.providers import choose, docker_file, docker_spec

SECRETS = ("sk-agent", "bus-secret", "-----CREDS-----")


def settings(root: Path, **more: Any) -> AgentSettings:
    values = {"agent_provider": "docker", "agent_state_dir": root, "agent_workspaces_dir": root, **more}
    return AgentSettings.model_validate(values)


def file(**more: Any) -> docker_file.DockerFile:
    made = docker_file.following(None, "t1", "w1", "", "tether.t1.w1", restore="cp_1", now_s=7)
    return docker_file.DockerFile(**{**{name: getattr(made, name) for name in made.__dataclass_fields__}, **more})


AGENTS = AgentsFile(agents={"claude": AgentConfig(command=("/opt/tether/agents/claude",))})
ENVIRONMENT = Environment({"claude": {"ANTHROPIC_API_KEY": "sk-agent"}}, {"claude": "a file"}, {})


def told(root: Path, one: docker_file.DockerFile, **more: Any) -> tuple[dict[str, str], dict[str, str]]:
    files = docker_spec.files(
        settings(root, **more), AGENTS, one, ENVIRONMENT, docker_spec.facts(one, "i", ENVIRONMENT)
    )
    return json.loads(files["environment.json"]), files


def test_secrets_are_in_files_of_their_own_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "creds").write_text("-----CREDS-----")
    (tmp_path / "password").write_text("bus-secret\n")
    values, files = told(tmp_path, file(), nats_user="u", nats_password_file=tmp_path / "password")
    assert files["bus-password"] == "bus-secret"
    assert values["TETHER_NATS_PASSWORD_FILE"] == "/run/tether/bus-password"
    assert json.loads(files["agent-env.json"]) == {"claude": {"ANTHROPIC_API_KEY": "sk-agent"}}
    by_creds, more = told(tmp_path, file(), nats_creds_file=tmp_path / "creds")
    assert (by_creds["TETHER_NATS_CREDS_FILE"], more["bus.creds"]) == ("/run/tether/bus.creds", "-----CREDS-----")
    seen = json.dumps([values, by_creds, docker_spec.container(settings(tmp_path), file())])
    assert not any(secret in seen for secret in SECRETS)


def test_a_collectors_own_user_on_the_bus_wins_over_the_services(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("own-secret")
    values, files = told(
        tmp_path,
        file(),
        nats_user="service",
        nats_password="service-secret",
        agent_collector_user="collector",
        agent_collector_password_file=tmp_path / "own",
    )
    assert (values["TETHER_NATS_USER"], files["bus-password"]) == ("collector", "own-secret")


def test_a_recovery_knows_no_agent_and_has_no_key_of_one(tmp_path: Path) -> None:
    values, files = told(tmp_path, file(recovery=True, before="the engine says so"))
    assert (values["TETHER_AGENTS"], files["agent-env.json"]) == ("{}", "{}")
    assert json.loads(values["TETHER_FACTS"])["before"] == "the engine says so"


def test_a_checkpoint_to_go_on_from_and_the_bus_as_sandboxes_reach_it_are_told(tmp_path: Path) -> None:
    values, _ = told(tmp_path, file(), docker_nats_url="nats://nats:4222")
    assert (values["TETHER_COLLECTOR_RESTORE"], values["TETHER_NATS_URL"]) == ("cp_1", "nats://nats:4222")


def test_docker_stop_gives_a_drain_its_grace_and_time_for_the_checkpoint(tmp_path: Path) -> None:
    made = docker_spec.container(settings(tmp_path, agent_drain_grace_s=100), file())
    assert made["stop_timeout"] == 100 + docker_spec.STOP_BEYOND_GRACE_S


def test_labels_bring_back_what_was_written_down(tmp_path: Path) -> None:
    one = file(recovery=True)
    labels = tuple(docker_spec.labels("tether", one).items())
    found = docker_spec.of_container(Container(id="x", name="n", status="running", labels=labels))
    kept = ("tenant", "workspace", "sandbox", "boot", "directory", "volume", "created_s", "recovery")
    assert [getattr(found, name) for name in kept] == [getattr(one, name) for name in kept]


def test_names_of_different_workspaces_never_meet() -> None:
    assert docker_spec.container_name("p", "a-b", "c") != docker_spec.container_name("p", "a", "b-c")


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    docker_file.write(tmp_path, file())
    assert [one.tenant for one in docker_file.read_all(tmp_path)] == ["t1"]
    (tmp_path / "containers" / "t1.w1" / "sandbox.json").write_text('{"v": 1, "no": "field"}')
    assert list(docker_file.read_all(tmp_path)) == []


def test_the_boot_of_a_container_is_never_used_again(tmp_path: Path) -> None:
    first = file(status="running", used=True, proof="p")
    second = docker_file.following(first, "t1", "w1", "", "v", restore=None, now_s=9)
    assert (second.boot != first.boot, second.used, second.before) == (True, True, "")
    untold = docker_file.following(
        file(status="unfinished", used=True, proof="p"), "t1", "w1", "", "v", restore=None, now_s=9
    )
    assert untold.before == "p"
    broken = replace(untold, status="unfinished", proof="of the recovery")
    again = docker_file.following(broken, "t1", "w1", "", "v", restore=None, now_s=9)
    assert again.before == "p", "what is told is of the container that ran it"


def test_without_the_sdk_the_service_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("docker", "docker_engine"):
        monkeypatch.delitem(sys.modules, f"tether_agent.providers.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(ConfigurationError, match=r"tether\[docker\]"):
        choose.provider(settings(tmp_path), AGENTS, ENVIRONMENT, None)
