"""The real Codex in a whole set, against the fake model server: what differs from `support_claude`, whose rig it is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from fake_models import FakeModels
from support_claude import Rig, becomes, processes_of
from tether import Client
from tether.processes import ProcessId, identify
from tether_agents.locate import FoundAgent
from tether_cli.set import ServiceSet, SetOptions

KEY: Final = "sk-canary-9be07c31d2f54a6c8d11"
WRONG_KEY: Final = "sk-wrong-00aa11bb22cc33dd44ee55"
MODEL: Final = "gpt-5.5"  # one that the CLI knows: an unknown one is offered no tool for file changes
# It gives up soon. The provider is the adapter's, as the key and the address come from variables.
FEW_RETRIES: Final = tuple(
    word for name in ("request", "stream") for word in ("-c", f"model_providers.tether.{name}_max_retries=1")
)
SLEEP: Final = "python3 -c 'import time; time.sleep(60)'"


@asynccontextmanager
async def codex_set(codex: FoundAgent, root: Path) -> AsyncIterator[Rig]:
    """A set with a key in a file, of a user whose own login nobody has asked for."""
    key_file = root / "keys.env"
    key_file.write_text(f"OPENAI_API_KEY={KEY}\n")
    key_file.chmod(0o600)
    login = root / "home" / ".codex" / "auth.json"
    login.parent.mkdir(parents=True)
    login.write_text(json.dumps({"auth_mode": "apikey", "OPENAI_API_KEY": WRONG_KEY}))
    with pytest.MonkeyPatch.context() as patch, FakeModels(require_key=KEY, log_bodies=True) as models:
        patch.setenv("HOME", str(root / "home"))
        for name in ("OPENAI_API_KEY", "CODEX_API_KEY", "OPENAI_BASE_URL", "CODEX_HOME"):
            patch.delenv(name, raising=False)
        agents = root / "agents.toml"
        agents.write_text(
            f'[agents.codex]\ncommand = ["{codex.path}"]\nkey_file = "{key_file}"\n'
            'args_allow = ["-c=model_providers.tether.*"]\n'
            f'env = {{ OPENAI_BASE_URL = "{models.base_url}/v1" }}\n'
        )
        options = SetOptions(data=root / "data", log="quiet", agents_file=agents)
        async with ServiceSet(options) as up, Client.http(up.state.http_url, up.state.token) as client:
            version = codex.pinned_version
            yield Rig(up.state, client, models, root, key_file, version, "codex", MODEL, FEW_RETRIES)


def bodies_with(rig: Rig, text: str) -> list[dict[str, Any]]:
    """What the model server was asked with this text in it, anywhere."""
    return [entry["body"] for entry in rig.models.requests if "body" in entry and text in json.dumps(entry["body"])]


def cli_of(execution: str) -> ProcessId:
    """The CLI's own process: the first of those that were started as the app server."""
    found = [pid for pid, argv in processes_of(execution).items() if "app-server" in argv]
    identity = identify(min(found))
    assert identity is not None
    return identity


async def tool_runs(execution: str, argument: str = "import time; time.sleep(60)") -> None:
    """Wait until a command with this last argument runs."""

    def runs() -> bool:
        return any(argv[-1:] == [argument] for argv in processes_of(execution).values())

    await becomes(runs, "the start of the tool")
