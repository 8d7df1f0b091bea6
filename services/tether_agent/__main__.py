"""`python -m tether_agent`: the agent service. `python -m tether_agent stop-sandboxes`: end what an agent service of
this state directory left running, then exit."""

from __future__ import annotations

import asyncio
import sys

import structlog

from tether.service import run
from tether.settings import load_or_exit
from tether_agent.config import AgentSettings, quotas
from tether_agent.service import serve, stop_sandboxes


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["stop-sandboxes"]):
        print("usage: python -m tether_agent [stop-sandboxes]", file=sys.stderr)
        return 64
    settings = load_or_exit(AgentSettings, quotas)

    async def serving(stop: asyncio.Event) -> None:
        await serve(settings, stop)

    async def stopping(_: asyncio.Event) -> None:
        ended = await stop_sandboxes(settings)
        structlog.get_logger("tether_agent").info("sandboxes_stopped", count=ended)

    return run(stopping if arguments else serving, settings, service="agent")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
