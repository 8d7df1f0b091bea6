"""`tether sandbox`: a collector is replaced while its CLI waits for an approval."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from support_set import TetherSet, environment, on_terminal, running_set


@pytest.fixture(scope="module")
def up() -> Iterator[TetherSet]:
    with running_set() as started:
        yield started


def told(up: TetherSet, *arguments: str) -> dict[str, Any]:
    done = up.tether(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def once_recovered(up: TetherSet, executions: list[dict[str, Any]]) -> dict[str, Any]:
    """The sandbox once its collector has read its spool and says of its executions what the one before said."""
    deadline_s = time.monotonic() + 20.0
    while True:
        (sandbox,) = told(up, "sandbox", "list")["sandboxes"]
        if [one["target"] for one in sandbox["executions"]] == [one["target"] for one in executions]:
            return dict(sandbox)
        assert time.monotonic() < deadline_s, sandbox


def test_r14_a_collector_replaced_while_an_approval_waits_gives_the_answer_to_the_same_process(up: TetherSet) -> None:
    seen: list[dict[str, Any]] = []

    def elsewhere() -> str:
        (sandbox,) = told(up, "sandbox", "list")["sandboxes"]
        seen.append(sandbox)
        seen.append(told(up, "sandbox", "restart-collector", sandbox["workspace"]))
        seen.append(once_recovered(up, sandbox["executions"]))
        answered = up.tether("answer", "c1", "-", "allow")
        assert answered.returncode == 0, answered.stderr
        return ""  # nothing is typed here

    arguments = ["run", "!ask remove\n!say after", "--agent", "scripted", "--conversation", "c1"]
    code, text = on_terminal(up.command(*arguments), environment(up.home), [("allow remove", elsewhere)])
    before, replaced, after = seen
    assert replaced["boot"] == before["boot"] and replaced["instance"] != replaced["before"]
    assert code == 0 and "after" in text and text.count("allow remove") == 1
    (was,), (now,) = before["executions"], after["executions"]
    assert now["target"] == was["target"], "the same process"
    (execution,) = told(up, "show", "c1")["executions"]
    assert execution["execution"] == was["target"]["execution"] and execution["outcome"] == "completed"


def test_a_workspace_that_does_not_run_is_told_as_such(up: TetherSet) -> None:
    refused = up.tether("sandbox", "restart-collector", "nothing-here")
    assert refused.returncode != 0
    assert "no sandbox of this service runs for it; `tether sandbox list`" in refused.stderr
