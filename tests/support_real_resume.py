"""Real CLIs whose own session files go away: what is common to Claude Code and Codex."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support_claude import WORKSPACE, Rig, Talk
from tether.prompt import AgentSpec
from tether.walking import entries_below

PAUSE_S = 0.005


def sessions(rig: Rig) -> Path:
    """Where the CLI keeps its files."""
    return rig.workspace / ".tether" / "agents" / rig.agent


def session_files(rig: Rig, session: str) -> list[Path]:
    """Whatever the CLI moves, makes and deletes meanwhile (Codex: its marketplace)."""
    named = (Path(entry.path) for entry in entries_below(sessions(rig)) if session in entry.name)
    return [path for path in named if path.suffix == ".jsonl"]


def session_folders(rig: Rig, session: str) -> list[Path]:
    return [Path(entry.path) for entry in entries_below(sessions(rig)) if entry.name == session and entry.is_dir()]


@asynccontextmanager
async def kept_gone(rig: Rig, session: str) -> AsyncIterator[None]:
    """The session has no file while the block runs: a CLI that is told to go writes its own anew."""

    async def remove() -> None:
        while True:
            for path in session_files(rig, session):
                path.unlink(missing_ok=True)
            for folder in session_folders(rig, session):
                shutil.rmtree(folder, ignore_errors=True)
            await asyncio.sleep(PAUSE_S)

    task = asyncio.create_task(remove(), name="kept-gone")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def ask(rig: Rig, talk: Talk, text: str, **fields: Any) -> None:
    """A prompt with further fields (`mode`, `resume`)."""
    agent = AgentSpec(kind=rig.agent, model=rig.model, args=rig.args)
    await rig.client.prompt(talk.conversation, text, agent=agent, workspace=WORKSPACE, **fields)


def asked_with(rig: Rig, text: str) -> list[str]:
    """Bodies of the model requests whose newest user text holds this, as JSON."""
    return [json.dumps(entry["body"]) for entry in rig.model_requests(text) if "body" in entry]
