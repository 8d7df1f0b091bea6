"""`tether agents`: what is found, whose key it is, and a login that is copied with consent only."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

TOKEN = "sk-ant-oat01-do-not-show"
FAR_MS = 4102444800000


class Home:
    """A user's home with a login of Claude Code in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.login = root / ".claude" / ".credentials.json"
        self.key_file = root / ".config" / "tether" / "claude.env"

    def log_in(self, value: object = None) -> None:
        self.login.parent.mkdir(exist_ok=True)
        whole = {"claudeAiOauth": {"accessToken": TOKEN, "refreshToken": f"{TOKEN}-refresh", "expiresAt": FAR_MS}}
        self.login.write_text(json.dumps(whole) if value is None else str(value))

    def tether(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tether_cli", *arguments],
            env={"PATH": str(self.root), "HOME": str(self.root), **env},  # no CLI is there
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "Traceback" not in done.stderr
        assert TOKEN not in done.stdout + done.stderr
        return done

    def agents(self, **env: str) -> dict[str, Any]:
        listed = json.loads(self.tether("agents", "list", "--json", **env).stdout)
        return {agent["kind"]: agent for agent in listed["agents"]}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_a_login_is_copied_with_consent_only_and_then_named_as_the_keys_source(home: Home) -> None:
    home.log_in()
    assert home.agents()["claude"]["key_source"] == "", "it is never read unasked"
    refused = home.tether("agents", "login")
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert not home.key_file.exists()
    done = home.tether("agents", "login", "claude", "--yes")
    assert done.returncode == 0, done.stderr
    assert datetime.fromtimestamp(FAR_MS / 1000, UTC).isoformat() in done.stdout, "it says when it expires"
    assert stat.S_IMODE(home.key_file.stat().st_mode) == 0o600
    assert f"CLAUDE_CODE_OAUTH_TOKEN={TOKEN}\n" in home.key_file.read_text()
    assert "refresh" not in home.key_file.read_text(), "what renews the login is not copied"
    assert home.agents()["claude"]["key_source"] == str(home.key_file)
    assert home.agents(ANTHROPIC_API_KEY="sk-shell")["claude"]["key_source"] == "$ANTHROPIC_API_KEY"


def test_a_login_may_lie_elsewhere(home: Home, tmp_path: Path) -> None:
    home.log_in()
    elsewhere = tmp_path / "elsewhere"
    home.login.parent.rename(elsewhere)
    missing = home.tether("agents", "login", "--yes")
    assert missing.returncode == 1
    assert f"there is no login in {home.login}" in missing.stderr
    assert home.tether("agents", "login", "--yes", "--from", str(elsewhere)).returncode == 0
    assert TOKEN in home.key_file.read_text()


def test_a_copied_login_can_be_deleted(home: Home) -> None:
    home.log_in()
    home.tether("agents", "login", "--yes")
    assert home.tether("agents", "logout").returncode == 0
    assert not home.key_file.exists()
    assert home.login.exists()
    assert home.tether("agents", "logout").returncode == 1


def test_an_expired_login_is_refused(home: Home) -> None:
    home.log_in(json.dumps({"claudeAiOauth": {"accessToken": TOKEN, "expiresAt": 1_000_000}}))
    done = home.tether("agents", "login", "--yes")
    assert done.returncode == 1
    assert "expired at 1970" in done.stderr
    assert not home.key_file.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"claudeAiOauth": {"accessToken": 7}}',
        '{"claudeAiOauth": []}',
        '{"claudeAiOauth": {"accessToken": "a\\nANTHROPIC_BASE_URL=http://elsewhere"}}',
        "[" * 100_000,
    ],
)
def test_a_login_that_is_not_understood_is_not_shown(home: Home, text: str) -> None:
    home.log_in(text)
    done = home.tether("agents", "login", "--yes")
    assert done.returncode == 1
    assert "no login that is understood" in done.stderr
    assert not home.key_file.exists()


def test_another_agents_login_is_refused_by_name(home: Home) -> None:
    done = home.tether("agents", "login", "scripted", "--yes")
    assert done.returncode == 2
    assert "scripted" in done.stderr


def test_the_list_names_what_is_found_and_what_is_not(home: Home) -> None:
    found = home.agents()
    assert found["scripted"]["command"]
    assert found["claude"]["command"] == []
    assert found["claude"]["pinned_version"] in found["claude"]["problem"]
    shown = home.tether("agents", "list")
    assert shown.returncode == 0
    assert "no key" in shown.stdout


def test_a_setting_that_no_agent_has_is_refused_by_name(home: Home, tmp_path: Path) -> None:
    file = tmp_path / "agents.toml"
    file.write_text('[agents."acp:mine"]\ncomand = ["/opt/mine"]\n')
    for command in (("up", "--detach"), ("doctor",), ("agents", "list")):
        refused = home.tether(*command, "--agents-file", str(file))
        told = refused.stderr + refused.stdout
        assert f'{file}: [agents."acp:mine"] has comand' in told, command
        assert "it may have command, env_from, key_file, env" in told, command


def test_the_doctor_names_a_command_that_is_not_there_and_a_key_file_that_will_be_refused(
    home: Home, tmp_path: Path
) -> None:
    file, keys = tmp_path / "agents.toml", tmp_path / "keys.env"

    def told(text: str) -> tuple[str, str]:
        file.write_text(f"[agents.claude]\n{text}\n")
        checks = json.loads(home.tether("doctor", "--json", "--agents-file", str(file)).stdout)["checks"]
        [check] = [check for check in checks if check["name"] == "agent claude"]
        assert check["verdict"] == "warning"
        return check["detail"], check["remedy"]

    detail, remedy = told('command = ["/nowhere/claude"]')
    assert "/nowhere/claude" in detail and "is not there" in detail and "agents file" in remedy
    own = f'command = ["{sys.executable}"]\nkey_file = "{keys}"'
    assert told(own)[0] == f"its key_file {keys} cannot be used: No such file or directory"
    keys.write_text("ANTHROPIC_API_KEY=x\n")
    keys.chmod(0o644)
    assert told(own) == (f"its key_file {keys} may be read by others", f"chmod 600 {keys}")


def test_codex_gets_its_variables_from_the_shell_and_only_keys_are_named_as_such(home: Home) -> None:
    assert home.agents()["codex"]["key_source"] == ""
    found = home.agents(
        OPENAI_API_KEY="sk-shell", OPENAI_BASE_URL="http://127.0.0.1:1/v1", ANTHROPIC_API_KEY="sk-other"
    )
    assert found["codex"]["key_source"] == "$OPENAI_API_KEY"
    assert found["claude"]["key_source"] == "$ANTHROPIC_API_KEY"
    config = home.root / ".config" / "tether" / "agents.toml"
    config.parent.mkdir(parents=True)
    config.write_text(f'[agents.codex]\ncommand = ["{sys.executable}"]\n')
    told = home.tether("doctor", OPENAI_API_KEY="sk-shell").stdout
    assert f"{sys.executable} (agents file); key from $OPENAI_API_KEY" in told
    assert f"{sys.executable} (agents file); no key" in home.tether("doctor").stdout
