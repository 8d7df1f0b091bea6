"""What the agent service is told of the user's agents file: the same values, whatever they are."""

from __future__ import annotations

import datetime
import tomllib
from pathlib import Path
from typing import Any

import pytest

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
