"""Real ACP agents in a whole set, against the fake model server."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest

from fake_models import FakeModels
from support_claude import KEY, Rig, Talk, becomes, processes_of
from tether import Client
from tether_agents.locate import FoundAgent, Problem, find_agent, load_pins
from tether_cli.set import ServiceSet, SetOptions

SLEEPER: Final = "import time; time.sleep(60)"


@dataclass(frozen=True, slots=True)
class Agent:
    """What the tests have to know of one. `tool`: the name of its command tool. `bash`: the fake model's directive for
    a command that wants permission. `deny_ends_turn`: a denied tool ends its turn."""

    kind: str
    env: dict[str, str]
    tool: str
    bash: str = "bash"
    deny_ends_turn: bool = False


def found(kind: str) -> FoundAgent | Problem:
    folder = os.environ.get("TETHER_AGENTS_DIR")
    return find_agent(kind, Path(folder) if folder else None)


def agents(models: FakeModels) -> dict[str, Agent]:
    """How each is told where the fake model server is; the key comes from the key file alone."""
    openai = f"{models.base_url}/v1"
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "fake",
        "options": {"baseURL": openai, "apiKey": "{env:FAKE_API_KEY}"},
        "models": {"fake-model": {"name": "fake", "limit": {"context": 100_000, "output": 10_000}}},
    }
    opencode = {"model": "fake/fake-model", "small_model": "fake/fake-model", "provider": {"fake": provider}}
    server = {"name": "fake", "base_url": openai, "wire_api": "responses", "env_key": "FAKE_API_KEY"}
    retries = {"request_max_retries": 1, "stream_max_retries": 1}
    codex = {"model": "gpt-5.5", "model_provider": "fake", "model_providers": {"fake": {**server, **retries}}}
    claude = {"ANTHROPIC_BASE_URL": models.base_url, "CLAUDE_CODE_MAX_RETRIES": "1"}
    return {
        "acp:claude": Agent("acp:claude", claude, "Bash"),
        "acp:codex": Agent(
            "acp:codex", {"CODEX_CONFIG": json.dumps(codex)}, "execute", bash="bashesc", deny_ends_turn=True
        ),
        "acp:opencode": Agent("acp:opencode", {"OPENCODE_CONFIG_CONTENT": json.dumps(opencode)}, "bash"),
    }


def agents_file(root: Path, known: dict[str, Agent], installed: dict[str, FoundAgent]) -> Path:
    """An agents file for those that are installed, and the one key file of them all."""
    key_file = root / "keys.env"
    key_file.write_text(f"ANTHROPIC_API_KEY={KEY}\nFAKE_API_KEY={KEY}\n")
    key_file.chmod(0o600)
    parts = []
    for kind, agent in installed.items():
        env = ", ".join(f"{name} = {json.dumps(value)}" for name, value in known[kind].env.items())
        parts.append(f'[agents."{kind}"]\ncommand = {json.dumps(list(agent.command))}\n')
        parts.append(f"key_file = {json.dumps(str(key_file))}\nenv = {{ {env} }}\n")
    path = root / "agents.toml"
    path.write_text("".join(parts))
    return path


@dataclass(frozen=True, slots=True)
class Stage:
    """A set in which one agent answers."""

    rig: Rig
    agent: Agent

    @property
    def name(self) -> str:
        """The agent's, as that of a file."""
        return self.agent.kind.replace(":", "-")

    def talk(self, about: str) -> Talk:
        return self.rig.talk(f"{about}-{self.name}")


@asynccontextmanager
async def acp_set(root: Path) -> AsyncIterator[dict[str, Stage]]:
    """The agents that are installed, by kind, in one set with one key file; skips where there is none."""
    kinds = [kind for kind in load_pins() if kind.startswith("acp:")]
    installed = {kind: agent for kind in kinds if isinstance(agent := found(kind), FoundAgent)}
    if not installed:
        pytest.skip("no ACP agent is installed: python -m tether_agents install all")
    (root / "home").mkdir()
    with pytest.MonkeyPatch.context() as patch, FakeModels(require_key=KEY, log_bodies=True) as models:
        patch.setenv("HOME", str(root / "home"))
        for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "OPENAI_API_KEY", "CLAUDE_CONFIG_DIR", "CODEX_HOME"):
            patch.delenv(name, raising=False)
        known = agents(models)
        file = agents_file(root, known, installed)
        options = SetOptions(data=root / "data", log="quiet", agents_file=file)
        async with ServiceSet(options) as up, Client.http(up.state.http_url, up.state.token) as client:
            rig = Rig(up.state, client, models, root, root / "keys.env", "")
            yield {kind: Stage(replace(rig, agent=kind), known[kind]) for kind in installed}


def sleeps(execution: str) -> bool:
    return any(argv[-1:] == [SLEEPER] for argv in processes_of(execution).values())


async def sleeping(stage: Stage, talk: Talk) -> str:
    """Start a tool that sleeps for a minute; returns the execution once it does."""
    await talk.prompt(f"[[{stage.agent.bash}:python3 -c '{SLEEPER}']]")
    await talk.allowed()
    execution = talk.execution()
    await becomes(lambda: sleeps(execution), "the start of the tool")
    return execution
