"""Where the agent's session is gone: `tether run` and `tether attach` offer the choices and take `--resume`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support_set import TetherSet, environment, on_terminal, running_set

pytestmark = pytest.mark.timeout(240)
ASKS = "a number, or nothing to leave it: "


@pytest.fixture(scope="module")
def up() -> Iterator[TetherSet]:
    with running_set() as started:
        yield started


def lose(up: TetherSet, conversation: str) -> None:
    """A conversation with one response, whose session's file is removed afterwards."""
    first = up.tether("run", "!say the first", "--agent", "scripted", "--conversation", conversation)
    assert first.returncode == 0, first.stderr
    workspace = json.loads(up.tether("show", conversation, "--json").stdout)["workspace"]
    folder = Path(up.data) / "workspaces" / "default" / workspace / ".tether" / "agents" / "scripted" / "sessions"
    (file,) = folder.glob("*.json")
    file.unlink()


def executions(up: TetherSet, conversation: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(up.tether("show", conversation, "--json").stdout)["executions"]
    return found


def messages(up: TetherSet, conversation: str) -> list[str]:
    found = json.loads(up.tether("show", conversation, "--json").stdout)["messages"]
    return [one["content"][0]["text"] for one in found]


def test_on_a_terminal_the_same_prompt_is_sent_again_with_what_was_chosen(up: TetherSet) -> None:
    lose(up, "c1")
    command = up.command("run", "!say the second", "--agent", "scripted", "--conversation", "c1")
    code, text = on_terminal(command, environment(up.home), [(ASKS, "2\n")])
    assert code == 0, text
    assert "RESUME_FAILED" in text and "1  fresh: a new session" in text and "2  history: a new session" in text
    assert "[session] it is given the conversation's history (" in text
    assert messages(up, "c1") == ["!say the first", "!say the second", "!say the second"]
    assert [one["outcome"] for one in executions(up, "c1")] == ["completed", "failed", "completed"]


def test_who_chooses_nothing_leaves_it_and_attach_offers_it_later(up: TetherSet) -> None:
    lose(up, "c2")
    command = up.command("run", "!say the second", "--agent", "scripted", "--conversation", "c2")
    code, text = on_terminal(command, environment(up.home), [(ASKS, "maybe\n"), ("none of these: 1, 2", "\n")])
    assert code == 1 and len(messages(up, "c2")) == 2, text
    assert "maybe is none of these: 1, 2, fresh, history" in text and "--conversation c2 --resume fresh" in text
    quiet = up.tether("attach", "c2")
    assert quiet.returncode == 1
    assert "--conversation c2 --resume fresh" in quiet.stderr and "(or `history`)" in quiet.stderr
    code, text = on_terminal(up.command("attach", "c2"), environment(up.home), [(ASKS, "fresh\n")])
    assert code == 0 and messages(up, "c2") == ["!say the first", "!say the second", "!say the second"], text
    assert executions(up, "c2")[-1]["outcome"] == "completed" and "[session]" not in text
    over = up.tether("attach", "c2")
    assert over.returncode == 0 and "--resume" not in over.stderr, "it has been chosen"


def test_with_json_the_choices_stand_in_the_result_and_the_option_takes_one(up: TetherSet) -> None:
    lose(up, "c3")
    arguments = ["!say the second", "--agent", "scripted", "--conversation", "c3"]
    failed = up.tether("run", *arguments, "--json")
    result = json.loads(failed.stdout.splitlines()[-1])
    assert failed.returncode == 1 and result["error"]["code"] == "RESUME_FAILED"
    assert result["resume_choices"] == ["fresh", "history"]
    fresh = up.tether("run", *arguments, "--resume", "fresh", "--json")
    result = json.loads(fresh.stdout.splitlines()[-1])
    assert fresh.returncode == 0 and result["text"] == "the second" and result["resume_choices"] == []
