"""The agents file: commands, and keys that are told by where they come from, never by value."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from tether_agent import agents
from tether_agent.agents import AgentsFileError


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_keys_come_from_the_environment_and_from_a_closed_file_and_the_file_wins(tmp_path: Path) -> None:
    keys = written(tmp_path / "keys.env", "# mine\nexport ANTHROPIC_API_KEY='sk-file'\nOTHER=a=b\n")
    file = written(
        tmp_path / "agents.toml",
        f"""
        [agents.claude]
        command = ["/opt/claude"]
        env_from = ["ANTHROPIC_API_KEY", "ABSENT"]
        key_file = "{keys}"
        env = {{ CLAUDE_CODE_MAX_RETRIES = "2" }}
        """,
    )
    found = agents.environment(agents.load(file), {"ANTHROPIC_API_KEY": "sk-env", "UNASKED": "x"})
    assert found.variables["claude"] == {
        "CLAUDE_CODE_MAX_RETRIES": "2",
        "ANTHROPIC_API_KEY": "sk-file",
        "OTHER": "a=b",
    }
    assert found.sources["claude"] == f"ANTHROPIC_API_KEY of {keys}"
    assert found.missing["claude"] == ("ABSENT",)
    assert "sk-" not in repr(found)


def test_the_environment_is_named_as_the_source_where_it_is(tmp_path: Path) -> None:
    file = written(tmp_path / "a.toml", '[agents.claude]\ncommand=["c"]\nenv_from=["ANTHROPIC_API_KEY"]\n')
    found = agents.environment(agents.load(file), {"ANTHROPIC_API_KEY": "sk-env"})
    assert found.sources == {"claude": "ANTHROPIC_API_KEY of the agent service's environment"}


def test_each_key_is_named_with_its_own_source_and_what_is_no_key_is_not(tmp_path: Path) -> None:
    keys = written(tmp_path / "keys.env", "CLAUDE_CODE_OAUTH_TOKEN=t\nANTHROPIC_BASE_URL=http://x\n")
    text = f'[agents.claude]\ncommand=["c"]\nkey_file="{keys}"\nenv_from=["ANTHROPIC_API_KEY", "ANTHROPIC_MODEL"]\n'
    file = written(tmp_path / "a.toml", f'{text}[agents.plain]\ncommand=["c"]\nenv={{ LEVEL = "1" }}\n')
    found = agents.environment(agents.load(file), {"ANTHROPIC_API_KEY": "sk-env", "ANTHROPIC_MODEL": "m"})
    assert found.sources == {
        "claude": f"ANTHROPIC_API_KEY of the agent service's environment; CLAUDE_CODE_OAUTH_TOKEN of {keys}"
    }


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    keys = written(tmp_path / "keys.env", "A=b\n", mode=0o644)
    file = written(tmp_path / "agents.toml", f'[agents.claude]\ncommand = ["c"]\nkey_file = "{keys}"\n')
    with pytest.raises(AgentsFileError, match="chmod 600"):
        agents.environment(agents.load(file), {})


def test_a_key_file_that_is_no_key_file_is_refused_without_showing_it(tmp_path: Path) -> None:
    keys = written(tmp_path / "keys.env", "A=b\nsk-secret-key\n")
    file = written(tmp_path / "agents.toml", f'[agents.claude]\ncommand = ["c"]\nkey_file = "{keys}"\n')
    with pytest.raises(AgentsFileError) as refused:
        agents.environment(agents.load(file), {})
    assert "line 2" in str(refused.value)
    assert "sk-secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[agents.claude]\ncommand = []\n", "agents.claude.command"),
        ("[agents.claude]\n", "agents.claude.command"),
        ('[agents."../x"]\ncommand = ["c"]\n', "agents"),
        ('[agents.claude]\ncommand = ["c"]\nkey = "sk"\n', "agents.claude.key"),
        ('[agents.claude]\ncommand = ["c"]\nenv_from = ["A=B"]\n', "agents.claude.env_from"),
        ("[agents.claude\n", "not TOML"),
    ],
)
def test_a_wrong_agents_file_names_the_place(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(AgentsFileError, match=named):
        agents.load(written(tmp_path / "agents.toml", text))


def test_the_file_for_the_collector_is_closed_to_others(tmp_path: Path) -> None:
    found = agents.Environment({"claude": {"K": "v"}}, {}, {})
    agents.write_environment(tmp_path / "env.json", found)
    assert stat.S_IMODE((tmp_path / "env.json").stat().st_mode) == 0o600
    assert json.loads((tmp_path / "env.json").read_text()) == {"claude": {"K": "v"}}


def test_what_an_operator_allows_and_redacts_goes_to_every_collector(tmp_path: Path) -> None:
    file = written(
        tmp_path / "agents.toml",
        """
        [agents.claude]
        command = ["/opt/claude"]
        args_allow = ["--add-dir=/srv/shared"]

        [redact]
        patterns = { corp = "corp_[a-z]{4,8}", ticket = ["tkt-[0-9]{8}"] }
        """,
    )
    told = agents.load(file).collector_settings()
    assert json.loads(told["TETHER_COLLECTOR_AGENT_ARGS_ALLOW"]) == {"claude": ["--add-dir=/srv/shared"]}
    assert json.loads(told["TETHER_COLLECTOR_REDACT"]) == {"corp": "corp_[a-z]{4,8}", "ticket": ["tkt-[0-9]{8}"]}
    assert agents.load(None).collector_settings() == {"TETHER_COLLECTOR_REDACT_BUILTIN": "true"}


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ('[redact]\npatterns = { corp = "(a|b)c" }', "redact.patterns: corp: ( at 0 is not allowed"),
        ('[agents.x]\ncommand = ["x"]\nargs_allow = ["debug"]', "agents.x.args_allow: 'debug' must be --flag"),
    ],
)
def test_a_pattern_or_an_argument_that_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path, text: str, remedy: str
) -> None:
    with pytest.raises(AgentsFileError) as error:
        agents.load(written(tmp_path / "agents.toml", text))
    assert remedy in str(error.value)
