"""The agent service as a process that may be killed: run by path, with an agent service's environment; its sandboxes
run the collector of few lines (`support_collector`). `Service` starts it again whenever it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import support_collector
from tether.service import run
from tether.settings import load_or_exit
from tether_agent.config import AgentSettings
from tether_agent.service import serve

COMMAND = (sys.executable, "-P", str(Path(__file__).resolve()))
TESTS = str(Path(__file__).resolve().parent)


@dataclass
class Service:
    """`exits`: how each of its processes ended, -signal where it was killed."""

    environment: Mapping[str, str]
    folder: Path
    exits: list[int] = field(default_factory=list)

    def arm(self, failpoint: str) -> None:
        (self.folder / failpoint).touch()

    def is_armed(self, failpoint: str) -> bool:
        return (self.folder / failpoint).exists()

    async def keep(self) -> None:
        while True:
            process = await asyncio.create_subprocess_exec(*COMMAND, env=self.environment)
            try:
                self.exits.append(await process.wait())
            except asyncio.CancelledError:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                await process.wait()
                raise


@contextlib.asynccontextmanager
async def agent_process(settings: AgentSettings, folder: Path) -> AsyncIterator[Service]:
    """`folder`, which exists, holds its armed failpoints. Leaving it ends the service, and no collector."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TETHER_")}
    values = {
        "TETHER_NATS_URL": settings.nats_url,
        "TETHER_AGENT_STATE_DIR": str(settings.agent_state_dir),
        "TETHER_AGENT_WORKSPACES_DIR": str(settings.agent_workspaces_dir),
        "TETHER_TEST_FAILPOINTS_DIR": str(folder),
        "PYTHONPATH": TESTS,
    }
    if settings.agent_idle_s is not None:
        values["TETHER_AGENT_IDLE_S"] = json.dumps(settings.agent_idle_s)
    service = Service({**kept, **values}, folder)
    keeping = asyncio.create_task(service.keep(), name="agent-process")
    try:
        yield service
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping


def main() -> int:
    settings = load_or_exit(AgentSettings)

    async def serving(stop: asyncio.Event) -> None:
        await serve(settings, stop, command=support_collector.COMMAND)

    return run(serving, settings, service="agent")


if __name__ == "__main__":
    sys.exit(main())
