r"""Decide approvals in code: allow what only reads, deny the rest with a reason the agent is told.

tether up --detach
python examples/approve.py $'!ask look\n!ask remove\n!say done' [--agent scripted]
"""

from __future__ import annotations

import argparse
import asyncio
import os

from tether import Client
from tether.client import Answer, Interaction
from tether.errors import TetherError
from tether.ids import new_id
from tether.settings import ConfigurationError

ALLOWED = frozenset({"look", "Read", "Glob", "Grep"})


def connect() -> Client:
    return Client.from_environment() if "TETHER_CLIENT_URL" in os.environ else Client.from_state()


async def decide(interaction: Interaction) -> Answer | None:
    if interaction.kind == "question":
        return None  # left to a human: `tether answer` or another client
    if interaction.name in ALLOWED:
        print(f"allowed {interaction.name}")
        return Answer.allow()
    print(f"denied {interaction.name}")
    return Answer.deny("only tools that read are allowed here")


async def main(text: str, agent: str) -> int:
    async with connect() as client:
        response = await client.ask(new_id("conv"), text, agent=agent, on_interaction=decide)
        for item in response.items:
            if item.kind == "tool":
                print(f"tool {item.name}: {item.state}")
        print(response.text)
        print(f"outcome: {response.outcome}")
        return 0 if response.outcome == "completed" else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("text")
    parser.add_argument("--agent", default="scripted")
    arguments = parser.parse_args()
    try:
        raise SystemExit(asyncio.run(main(arguments.text, arguments.agent)))
    except (ConfigurationError, TetherError) as error:  # no set is up, or it refuses: one line, exit code 1
        raise SystemExit(f"{parser.prog}: {error}") from None
