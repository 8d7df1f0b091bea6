"""Configuration: all problems at once, no value of a key in any message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tether.ids import sandbox_id
from tether.settings import ConfigurationError, load
from tether_collector.config import AgentEnvironmentError, CollectorSettings, agent_environment

GOOD = {
    "TETHER_TENANT": "t",
    "TETHER_WORKSPACE": "w",
    "TETHER_BOOT": "boot_1",
    "TETHER_WORKSPACE_DIR": "/srv/w",
    "TETHER_AGENTS": '{"scripted": ["python3", "-m", "scripted_agent"]}',
}


def test_the_sandbox_follows_from_the_workspace_where_it_is_not_named() -> None:
    settings = load(CollectorSettings, GOOD)
    assert settings.sandbox == sandbox_id("t", "w")
    assert settings.agents == {"scripted": ("python3", "-m", "scripted_agent")}
    assert settings.state_dir == Path("/srv/w/.tether")
    assert load(CollectorSettings, {**GOOD, "TETHER_SANDBOX": "sbx_9"}).sandbox == "sbx_9"


def test_every_problem_is_named_at_once() -> None:
    bad = {
        **GOOD,
        "TETHER_TENANT": "a.b",
        "TETHER_WORKSPACE_DIR": "relative",
        "TETHER_AGENTS": "{not json",
        "TETHER_ISOLATION": "jail",
        "TETHER_AGENT_ENVFILE": "/x",
    }
    del bad["TETHER_BOOT"]
    with pytest.raises(ConfigurationError) as error:
        load(CollectorSettings, bad)
    text = "\n".join(error.value.problems)
    for name in ("TENANT", "WORKSPACE_DIR", "AGENTS", "ISOLATION", "BOOT"):
        assert f"TETHER_{name}" in text
    assert "did you mean TETHER_AGENT_ENV_FILE" in text


@pytest.mark.parametrize(
    "agents", ['{"claude": []}', '{"claude": "claude"}', '{"A B": ["x"]}', '{"claude": [""]}', "7"]
)
def test_agents_must_be_commands(agents: str) -> None:
    with pytest.raises(ConfigurationError):
        load(CollectorSettings, {**GOOD, "TETHER_AGENTS": agents})


def environment_file(path: Path, content: str, mode: int = 0o600) -> CollectorSettings:
    path.write_text(content)
    path.chmod(mode)
    return load(CollectorSettings, {**GOOD, "TETHER_AGENT_ENV_FILE": str(path), "TETHER_AGENT_ENV_ALLOW": "MY_VAR"})


def test_an_agent_sees_the_allowed_names_and_its_own_keys_only(tmp_path: Path) -> None:
    keys = {"claude": {"ANTHROPIC_API_KEY": "s3cret", "PATH": "/theirs"}, "scripted": {"OTHER": "x"}}
    settings = environment_file(tmp_path / "keys", json.dumps(keys))
    environ = {"PATH": "/bin", "HOME": "/root", "MY_VAR": "1", "AWS_SECRET": "no", "TETHER_NATS_PASSWORD": "no"}
    assert agent_environment(settings, "claude", environ) == {
        "PATH": "/theirs",
        "HOME": "/root",
        "MY_VAR": "1",
        "ANTHROPIC_API_KEY": "s3cret",
    }
    assert "OTHER" not in agent_environment(settings, "codex", environ)


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ('{"claude": {"KEY": "s3cret"}}', 0o640, "chmod 600"),
        ('{"claude": {"KEY": "s3cret"', 0o600, "not JSON"),
        ('{"claude": {"KEY": 7}, "x": "s3cret"}', 0o600, "must map"),
        ('["s3cret"]', 0o600, "must map"),
        ('{"claude": {"KEY": "' + "s3cret" * 100_000 + '"}}', 0o600, "more than"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_never_quoted(
    tmp_path: Path, content: str, mode: int, message: str
) -> None:
    settings = environment_file(tmp_path / "keys", content, mode)
    with pytest.raises(AgentEnvironmentError) as error:
        agent_environment(settings, "claude", {})
    assert message in str(error.value) and str(tmp_path / "keys") in str(error.value)
    assert "s3cret" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    settings = load(CollectorSettings, {**GOOD, "TETHER_AGENT_ENV_FILE": str(tmp_path / "none")})
    with pytest.raises(AgentEnvironmentError, match="cannot be read"):
        agent_environment(settings, "claude", {})


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("TETHER_COLLECTOR_CLI_UMASK", "9", "must match"),
        ("TETHER_COLLECTOR_CLI_USER", "a b", "must match"),
        ("TETHER_COLLECTOR_CLI_LIMITS", '{"files": 3}', "64"),
        ("TETHER_COLLECTOR_CLI_LIMITS", '{"cpu": 3}', ""),
        ("TETHER_COLLECTOR_REDACT", '{"corp": "corp_.*"}', "name the characters"),
        ("TETHER_COLLECTOR_REDACT", '{"corp": ["[a-z]{9}"]}', "fixed characters"),
        ("TETHER_COLLECTOR_REDACT", '["corp"]', "must be JSON"),
        ("TETHER_COLLECTOR_AGENT_ARGS_ALLOW", '{"claude": ["debug"]}', "--option"),
    ],
)
def test_confinement_and_redaction_that_cannot_be_used_are_refused_by_name(name: str, value: str, remedy: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        load(CollectorSettings, {**GOOD, name: value})
    [problem] = error.value.problems
    assert name in problem
    assert remedy in problem
