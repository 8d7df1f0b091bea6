"""Where a key goes at a launch: a descriptor, or the environment of the CLI; never an argument, nor what is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support_execution import TARGET
from tether.control import StartCommand
from tether.prompt import AgentSpec, TextContent
from tether_collector import redacting
from tether_collector.claim import claim_body, claim_frame
from tether_collector.config import CollectorSettings
from tether_collector.core.adapters import adapter_for
from tether_collector.journal import Start
from tether_collector.keeper_link import LaunchSpec
from tether_collector.launching import launch_spec

KEYS = {
    "ANTHROPIC_API_KEY": "canary-anthropic-0f1e2d3c",
    "CLAUDE_CODE_OAUTH_TOKEN": "canary-oauth-4b5a6978",
    "OPENAI_API_KEY": "canary-openai-8796a5b4",
    "CODEX_API_KEY": "canary-codex-c3d2e1f0",
    "GEMINI_API_KEY": "canary-gemini-1a2b3c4d",
    "ANTHROPIC_CUSTOM_HEADERS": "x-key: canary-header-5e6f7081",
    "OPENAI_BASE_URL": "http://127.0.0.1:1/v1",
    "PLAIN_SETTING": "not-a-secret",
}


def start_of(kind: str) -> Start:
    command = StartCommand(
        control="ctl_1",
        target=TARGET,
        owner_revision=1,
        request_id="req_1",
        attempt=1,
        content=(TextContent(text="hello"),),
        agent=AgentSpec(kind=kind),
    )
    body = claim_body(command, TARGET, instance="ins1", adapter_version="1", key_source="a file")
    return Start("exe_1", "c1", "ctl_1", "d", command, TARGET, "exe_1-" + "0" * 32, claim_frame(body, 1), "claimed", 1)


def settings_of(kind: str, tmp_path: Path) -> CollectorSettings:
    file = tmp_path / "agent-env.json"
    file.touch(0o600)
    file.write_text(json.dumps({kind: KEYS}))
    return CollectorSettings(
        tenant="t1",
        workspace="w1",
        boot="boot1",
        workspace_dir=tmp_path / "ws",
        agents={kind: ("/opt/agent",)},
        agent_env_file=file,
    )


@pytest.mark.parametrize("kind", ["claude", "codex", "scripted", "acp:gemini", "acp:codex", "acp:claude", "acp:other"])
def test_no_key_is_in_an_argument_or_in_what_is_shown_of_a_launch(kind: str, tmp_path: Path) -> None:
    settings = settings_of(kind, tmp_path)
    spec = launch_spec(settings, start_of(kind))
    assert isinstance(spec, LaunchSpec)
    secrets = [value for name, value in KEYS.items() if name not in ("OPENAI_BASE_URL", "PLAIN_SETTING")]
    shown = f"{spec!r} {' '.join(spec.argv)}"
    assert not [value for value in secrets if value in shown]
    held = adapter_for(kind).secret_descriptors
    assert not [name for name in held if KEYS[name] in spec.env.values()], "a descriptor takes the variable's place"
    assert set(spec.secrets.values()) == {KEYS[name] for name in held}
    assert set(spec.given.values()) == set(secrets), "and all of them are redacted"
    assert "given" not in json.loads(spec.encode())

    rules = redacting.note(tmp_path / "1", settings, spec.given)
    told = rules.scan(" ".join(f"<{value}>" for value in KEYS.values()))[0]
    assert not [value for value in secrets if value in told]
    assert KEYS["PLAIN_SETTING"] in told
    kept = (tmp_path / "1" / "redaction.json").read_text()
    assert not [value for value in secrets if value[8:] in kept]
    assert redacting.load(tmp_path / "1").dump() == rules.dump()


def test_a_further_process_adds_what_it_is_given_and_changes_nothing_else(tmp_path: Path) -> None:
    settings = settings_of("scripted", tmp_path)
    first = redacting.note(tmp_path / "1", settings, {"A_KEY": "first-secret-value"})
    assert redacting.note(tmp_path / "1", settings, {"A_KEY": "first-secret-value"}).dump() == first.dump()
    changed = settings.model_copy(update={"collector_redact": {"corp": ("corp_[a-z]{4}",)}})
    second = redacting.note(tmp_path / "1", changed, {"A_KEY": "second-secret-value"})
    assert second.patterns == first.patterns
    assert second.scan("first-secret-value second-secret-value")[0] == "[redacted:A_KEY] [redacted:A_KEY]"


def test_a_damaged_file_of_rules_leaves_the_built_in_ones(tmp_path: Path) -> None:
    (tmp_path / "redaction.json").write_text('{"v": 1, "patterns": 7}')
    assert redacting.load(tmp_path).scan("AKIAIOSFODNN7EXAMPLE")[1] == 1
    assert redacting.load(tmp_path / "nowhere").scan("AKIAIOSFODNN7EXAMPLE")[1] == 1
