"""`tether drain`, `suspend`, `resume`, `tether sandbox show` and `delete`, on a set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support_local_set import Http, eventually
from support_set import TetherSet, environment, on_terminal, running_set
from tether.api_sandboxes import SandboxView
from tether.sandbox import DrainOrder
from tether_cli.commands.sandbox import lines_of

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def up() -> Iterator[TetherSet]:
    with running_set() as started:
        yield started


def told(up: TetherSet, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = up.tether(*arguments, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout if code == 0 else done.stderr)
    return found


async def waiting(http: Http, up: TetherSet, conversation: str, workspace: str) -> str:
    """An execution that waits for an approval; its id."""
    accepted = await http.prompt(conversation, f"r-{conversation}", "!say before\n!ask remove", workspace=workspace)

    async def waits() -> bool:
        shown = up.tether("show", accepted["execution_id"], "--json")
        if shown.returncode != 0:
            assert "nothing of the execution is logged yet" in shown.stderr, shown.stderr
            return False
        return bool(json.loads(shown.stdout)["execution"]["pending_interactions"])

    await eventually(waits, "the approval")
    return str(accepted["execution_id"])


async def test_a_sandbox_in_use_is_not_suspended_but_drained_and_the_next_prompt_goes_on_in_its_session(
    up: TetherSet,
) -> None:
    async with Http(up.state) as http:
        execution = await waiting(http, up, "c1", "w1")
        busy = up.tether("suspend", "w1")
        assert busy.returncode == 1 and "SESSION_BUSY" in busy.stderr
        assert "c1" in busy.stderr and "`tether suspend w1 --force" in busy.stderr
        told_busy = json.loads(up.tether("suspend", "w1", "--json").stderr)["error"]
        assert [one["conversation"] for one in told_busy["executions"]] == ["c1"] and told_busy["exit_code"] == 1
        assert "1" in up.tether("sandbox", "list").stdout.splitlines()[1].split()[-1:]
        drained = up.tether("drain", "w1", "--grace", "5", "--reason", "new kernel", "--drain-id", "d1")
        assert drained.returncode == 0, drained.stderr
        assert "draining as d1; Ctrl-C stops the waiting, not the drain" in drained.stderr
        lines = drained.stdout.splitlines()
        assert lines[0].startswith(f"{execution}  ") and "its turn is not finished" in lines[0]
        assert lines[1].startswith("checkpoint ") and "sessions, on the volume" in lines[1]
        assert lines[-1] == "w1: suspended"
        again = told(up, "drain", "w1", "--drain-id", "d1")
        assert (again["drain"], again["state"], again["sandbox_state"]) == ("d1", "done", "suspended")
        shown = up.tether("sandbox", "show", "w1").stdout
        assert "w1  suspended" in shown and "it sleeps, and a message wakes it" in shown
        assert "last drain  d1: done (new kernel)" in shown
        assert execution in shown
        (row,) = told(up, "top", "--once")["sandboxes"]
        assert (row["state"], row["connected"], row["executions"]) == ("suspended", False, 0)
        asleep = up.tether("sandbox", "restart-collector", "w1")
        assert asleep.returncode == 2 and "it sleeps" in asleep.stderr
        assert "`tether resume w1` wakes it" in asleep.stderr
        await http.prompt("c1", "r2", "!say after", workspace="w1")
        await http.ended("c1", 2)
    executions = told(up, "show", "c1")["executions"]
    assert [one["outcome"] for one in executions] == ["drained", "completed"]
    assert executions[0]["native_session"] == executions[1]["native_session"], "it was resumed"
    assert told(up, "sandbox", "show", "w1")["state"] == "active"
    assert up.tether("sandbox", "list").stdout.splitlines()[1].split()[-1] != "1", "it has ended"


async def test_a_sandbox_is_suspended_woken_and_deleted_by_command(up: TetherSet) -> None:
    async with Http(up.state) as http:
        await http.prompt("c2", "r1", "hello", workspace="w2")
        await http.ended("c2", 1)

    async def asleep() -> bool:
        return up.tether("suspend", "w2", "--include", "workspace").returncode == 0

    await eventually(asleep, "the process of the turn to be gone")
    view = told(up, "sandbox", "show", "w2")
    assert view["state"] == "suspended" and view["checkpoint"]["include"] == "workspace"
    woken = told(up, "resume", "w2")
    assert (woken["state"], woken["woken"]) == ("active", True)
    assert woken["checkpoint"]["checkpoint"] == view["checkpoint"]["checkpoint"]
    awake = up.tether("resume", "w2")
    assert awake.returncode == 0 and "it was awake" in awake.stdout
    refused = up.tether("sandbox", "delete", "w2")
    assert refused.returncode == 2 and "say --yes" in refused.stderr
    command = up.command("sandbox", "delete", "w2")
    code, text = on_terminal(command, environment(up.home), [("delete the sandbox of w2? [y/N]", "n\n")])
    assert code == 4 and "nothing was deleted" in text
    gone = told(up, "sandbox", "delete", "w2", "--yes", "--drain-id", "x1")
    assert (gone["purpose"], gone["drain"], gone["sandbox_state"]) == ("delete", "x1", "deleted")
    missing = up.tether("sandbox", "show", "w2")
    assert missing.returncode == 2 and "`tether sandbox list` shows" in missing.stderr


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (["drain", "nothing-here"], 2, "NOT_FOUND"),
        (["resume", "nothing-here"], 2, "`tether sandbox list` shows the workspaces that have one"),
        (["drain", "no workspace"], 2, "WORKSPACE must"),
        (["drain", "w1", "--store", "tape"], 2, "--store must be one of volume, blobs, both"),
        (["suspend", "w1", "--include", "all"], 2, "--include must be one of sessions, workspace"),
        (["drain", "w1", "--grace", "-1"], 2, "grace_s: must be at least 0"),
        (["drain", "w1", "--drain-id", "no id"], 2, "--drain-id must"),
        (["run", "hello", "--resume", "again"], 2, "--resume must be one of fresh, history"),
        (["run", "hello", "--continuation", "perhaps"], 2, "--continuation must be one of wait, continue"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_remedy(up: TetherSet, command: list[str], code: int, says: str) -> None:
    done = up.tether(*command)
    assert done.returncode == code and says in done.stderr, done.stderr
    assert done.stderr.startswith("tether: ") and len(done.stderr.splitlines()) == 1 and done.stdout == ""


async def test_a_set_that_is_told_to_suspends_idle_sandboxes_by_itself() -> None:
    with running_set(options=["--idle-s", "1"]) as up:
        async with Http(up.state) as http:
            await http.prompt("c1", "r1", "hello", workspace="w1")
            await http.ended("c1", 1)

            async def asleep() -> bool:
                return bool(told(up, "sandbox", "show", "w1")["state"] == "suspended")

            await eventually(asleep, "the idle sandbox's sleep")
            await http.prompt("c1", "r2", "hello again", workspace="w1")
            await http.ended("c1", 2)
            assert await http.outcomes("c1") == ["completed", "completed"]
        wrong = up.tether("up", "--idle-s", "0")
        assert wrong.returncode == 2 and "--idle-s must be more than 0" in wrong.stderr


def test_a_sandbox_that_drains_is_told_with_its_order() -> None:
    order = DrainOrder(drain="d1", purpose="suspend", reason="idle \x1b[31m", grace_s=2.5)
    view = SandboxView(
        workspace="w1", sandbox="s1", state="draining", provider="local", connected=True, version="1", drain=order
    )
    text = "\n".join(lines_of(view, 0.0))
    assert "w1  draining" in text and "d1 (suspend, grace 2.5 s): idle" in text
    assert "\x1b" not in text and "executions  0" in text
