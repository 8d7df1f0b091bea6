"""Submit a prompt over HTTP and follow the response as it comes.

    tether up --detach
    python examples/submit_and_follow.py "Tell me about streams" [--agent scripted]

The address and the token come from `TETHER_CLIENT_URL` and `TETHER_CLIENT_TOKEN_FILE`, or from the set that is up here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import aclosing

from tether import Client
from tether.client import ConversationItem, ExecutionItem, GapItem
from tether.errors import TetherError
from tether.ids import new_id
from tether.settings import ConfigurationError


def connect() -> Client:
    return Client.from_environment() if "TETHER_CLIENT_URL" in os.environ else Client.from_state()


async def main(text: str, agent: str) -> int:
    conversation = new_id("conv")
    async with connect() as client:
        # In doubt the same request is sent again under the same id: it runs once.
        submission = await client.prompt(conversation, text, agent=agent)
        print(f"{submission.status}: response {submission.response_id}")
        items = client.follow(conversation, submission.cursor, until_response=submission.response_id)
        outcome = "unknown"
        async with aclosing(items):
            async for item in items:
                match item:
                    case ExecutionItem(type="text.delta"):
                        print(item.event.body["text"], end="", flush=True)
                    case ExecutionItem(type="text.completed"):
                        print()
                    case ExecutionItem(type="tool.completed"):
                        print(f"[tool] {item.event.body['status']}")
                    case ExecutionItem(type="response.ended"):
                        outcome = str(item.event.body["outcome"])
                    case ConversationItem(type="response.failed"):
                        outcome = f"failed: {item.event.body['code']}"
                    case GapItem():
                        print(f"[gap] {item.first}..{item.last}: {item.reason}")
                    case _:
                        pass
        print(f"outcome: {outcome}")
        return 0 if outcome == "completed" else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("text")
    parser.add_argument("--agent", default="scripted")
    arguments = parser.parse_args()
    try:
        raise SystemExit(asyncio.run(main(arguments.text, arguments.agent)))
    except (ConfigurationError, TetherError) as error:  # no set is up, or it refuses: one line, exit code 1
        raise SystemExit(f"{parser.prog}: {error}") from None
