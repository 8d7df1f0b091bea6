"""Operations on a sandbox's life in a test: asked over the bus, its record read, a collector of few lines told how to
behave (`support_collector`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support_agent import until
from tether import ids, subjects
from tether.bus import NatsBus
from tether.checkpoint import CheckpointReference
from tether.kv import Bucket
from tether.prompt import Prompt, decode_prompt
from tether.sandbox import Registration, SandboxRecord
from tether_agent.config import AgentSettings

ANSWER_S = 30.0


async def ask(bus: NatsBus, verb: str, *, timeout_s: float = ANSWER_S, **fields: object) -> dict[str, Any]:
    answer = await bus.request(subjects.agent(verb), json.dumps(fields).encode(), timeout_s=timeout_s)
    found: dict[str, Any] = json.loads(answer.data)
    return found


@dataclass(frozen=True)
class Sandbox:
    """The sandbox over `w1` of a tenant."""

    bus: NatsBus
    settings: AgentSettings
    tenant: str
    workspace: str = "w1"

    @property
    def directory(self) -> Path:
        path = self.settings.agent_workspaces_dir / self.tenant / self.workspace
        path.mkdir(parents=True, exist_ok=True)
        return path

    def behave(self, **behaviour: object) -> None:
        """What the collector does from now on."""
        temporary = self.directory / "fake.tmp"
        temporary.write_text(json.dumps(behaviour))
        temporary.replace(self.directory / "fake.json")

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Of `starts.jsonl`, `drains.jsonl`, `restores.jsonl`."""
        path = self.directory / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def ask(self, verb: str, *, timeout_s: float = ANSWER_S, **fields: object) -> dict[str, Any]:
        where = {"tenant": self.tenant, "workspace": self.workspace}
        return await ask(self.bus, verb, timeout_s=timeout_s, **where, **fields)

    async def record(self) -> SandboxRecord | None:
        key = subjects.sandbox_key(self.tenant, self.workspace)
        return await Bucket(self.bus, subjects.SANDBOXES).record(key, SandboxRecord)

    async def revision(self) -> int:
        entry = await Bucket(self.bus, subjects.SANDBOXES).get(subjects.sandbox_key(self.tenant, self.workspace))
        return 0 if entry is None else entry.revision

    async def registration(self) -> Registration | None:
        sandbox = ids.sandbox_id(self.tenant, self.workspace)
        key = subjects.registration_key(self.tenant, self.workspace, sandbox)
        return await Bucket(self.bus, subjects.SANDBOXES).record(key, Registration)

    async def reference(self) -> CheckpointReference | None:
        key = subjects.checkpoint_key(self.tenant, self.workspace)
        return await Bucket(self.bus, subjects.CHECKPOINTS).record(key, CheckpointReference)

    async def state(self) -> str | None:
        found = await self.record()
        return None if found is None else found.state

    async def reaches(self, state: str | None, timeout_s: float = 20.0) -> None:
        async def there() -> bool:
            return await self.state() == state

        await until(there, f"the state {state}", timeout_s)

    async def report(self, drain: str) -> dict[str, Any]:
        """The final report of a drain."""
        found: dict[str, Any] = {}

        async def final() -> bool:
            found.update(await self.ask("drain-status", drain_id=drain))
            return "report" in found and found["report"]["state"] != "running"

        await until(final, f"the end of {drain}")
        return found

    async def prompts(self, conversation: str = "c1") -> list[Prompt]:
        """What waits for a router."""
        subject = subjects.prompt(self.tenant, self.workspace, conversation)
        stored = await self.bus.read(subjects.PROMPTS_STREAM, 0, subject)
        return [decode_prompt(message.data) for message in stored]
