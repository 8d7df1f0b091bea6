"""A real CLI in a sandbox that is drained, suspended and woken: what is common to Claude Code, Codex and ACP agents."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import support_codex
from support_claude import DEADLINE_S, Rig, Talk, becomes, processes_of
from support_claude import cli_of as claude_of
from tether.api_sandboxes import DrainView
from tether.checkpoint import RESTORED, DrainedExecution
from tether.processes import ProcessId

SLEEPER = "import time; time.sleep(60)"
UNCOMMITTED = "notes.txt"


def in_workspace(rig: Rig, name: str) -> Rig:
    """The same set, a sandbox of its own: a drain is of a whole sandbox."""
    return replace(rig, workspace_name=name)


async def with_uncommitted_work(rig: Rig) -> None:
    """The workspace as a repository with one commit and one file that is in none."""

    def make() -> None:
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
        (rig.workspace / "kept.txt").write_text("committed\n")
        for words in (["init", "-q"], ["add", "kept.txt"], ["commit", "-q", "-m", "one"]):
            subprocess.run([*git, *words], cwd=rig.workspace, check=True, capture_output=True)
        (rig.workspace / UNCOMMITTED).write_text("not in any commit\n")

    await asyncio.to_thread(make)


def uncommitted(rig: Rig) -> list[str]:
    """What the workspace's repository does not have."""
    told = subprocess.run(
        ["git", "status", "--porcelain"], cwd=rig.workspace, check=True, capture_output=True, text=True
    )
    return sorted(line[3:] for line in told.stdout.splitlines())


async def tool_is_running(execution: str, argument: str = SLEEPER) -> None:
    def runs() -> bool:
        return any(argv[-1:] == [argument] for argv in processes_of(execution).values())

    await becomes(runs, "the start of the tool")


def cli_of(rig: Rig, execution: str) -> ProcessId:
    """The CLI's own process."""
    return claude_of(execution) if rig.agent == "claude" else support_codex.cli_of(execution)


async def suspended(rig: Rig, drain: str, **order: Any) -> DrainView:
    """Drained to its end: nothing of it runs, the record says `suspended`."""
    begun = await rig.client.drain(rig.workspace_name, drain_id=drain, **order)
    report = await rig.client.drained(begun)
    assert (report.state, report.problem) == ("done", None), report
    found = report.sandbox_state
    async with asyncio.timeout(DEADLINE_S):
        while found != "suspended":
            await asyncio.sleep(0.05)
            found = (await rig.client.sandbox(rig.workspace_name)).state
    return report


def of_talk(report: DrainView, talk: Talk) -> DrainedExecution:
    """What became of the conversation's newest execution."""
    [found] = [one for one in report.executions if one.target.conversation == talk.conversation]
    return found


async def lose_the_volume(rig: Rig) -> None:
    """As on another machine: nothing of the workspace is there."""
    await asyncio.to_thread(shutil.rmtree, rig.workspace)


def restored(rig: Rig) -> str:
    """The checkpoint that the volume was filled from."""
    found: str = json.loads((rig.workspace / RESTORED).read_bytes())["checkpoint"]
    return found


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
