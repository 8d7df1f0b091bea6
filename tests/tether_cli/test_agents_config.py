"""What the agent service is told of the user's agents file: the same values, whatever they are."""

from __future__ import annotations

import datetime
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tether_agent.agents import load
from tether_cli import agents_config
from tether_cli.agents_config import AgentFinding, write


@pytest.mark.parametrize(
    "settings",
    [
        {"env": {"GREETING": "\U0001f600 grüße"}},
        {"env": {"ODD": 'a\x7f\x00\t"\\\n'}},
        {"env": {"a key": "b"}, "a key": 1},
        {"env": {"WHEN": datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC)}, "day": datetime.date(2026, 1, 2)},
        {"odd": float("inf"), "list": [{"a": [1, True]}, "b"], "table": {"a": {"b": 0.5}}},
    ],
)
def test_every_value_of_an_agents_file_is_handed_on_as_it_stands(tmp_path: Path, settings: dict[str, Any]) -> None:
    path, command = tmp_path / "agents.toml", ["/opt/\U0001f600/mine", "--acp"]
    write(path, [AgentFinding("acp:mine", tuple(command), settings=settings)])
    assert tomllib.loads(path.read_text(encoding="utf-8")) == {"agents": {"acp:mine": {**settings, "command": command}}}


def test_what_is_allowed_and_redacted_reaches_the_agent_service_as_it_was_written(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(
        '[agents.scripted]\ncommand = ["/bin/true"]\nargs_allow = ["--home="]\n'
        '[redact]\nbuiltin = false\npatterns = { corp = "corp_[a-z]{4,8}", two = ["ab[0-9]{3}", "cd[0-9]{3}"] }\n'
    )
    written = tmp_path / "agents.toml"
    found = agents_config.findings(agents_file=mine, environ={})
    agents_config.write(written, [one for one in found if one.kind == "scripted"], agents_config.redact(mine))
    loaded = load(written)
    assert loaded.agents["scripted"].args_allow == ("--home=",)
    assert loaded.redact.builtin is False
    assert loaded.redact.patterns == {"corp": "corp_[a-z]{4,8}", "two": ("ab[0-9]{3}", "cd[0-9]{3}")}
