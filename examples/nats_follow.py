"""Follow a conversation over NATS with a durable reader: the server keeps the position, no HTTP and no database.

    tether up --detach
    python examples/nats_follow.py CONVERSATION --durable billing [--prompt "!say hello"]

Run it, stop it, run it again: it goes on where it was. An item is acked once the next one is asked for, so an item that
was being worked on when the program died comes again: do its work so that doing it twice is harmless, by its identity
(execution and ordinal), or keep the cursor with the result of the work and pass it as `cursor`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import aclosing

from tether import Client
from tether.client import CaughtUp, ConversationItem, ExecutionItem
from tether.errors import TetherError
from tether.settings import ConfigurationError


def connect() -> Client:
    return Client.from_environment() if "TETHER_CLIENT_URL" in os.environ else Client.from_state(over="nats")


async def main(conversation: str, durable: str, prompt: str | None) -> int:
    async with connect() as client:
        if prompt is not None:
            submission = await client.prompt(conversation, prompt, agent="scripted")
            print(f"{submission.status}: execution {submission.execution}")
        items = client.follow(conversation, durable=durable)
        ended = prompt is None
        caught_up = False
        async with aclosing(items):
            async for item in items:
                match item:
                    case ExecutionItem():
                        print(f"{item.execution} {item.ordinal} {item.type}")
                        ended = ended or item.type == "execution.ended"
                    case ConversationItem():
                        print(f"{item.event.id} {item.type}")
                    case CaughtUp():
                        caught_up = True
                    case _:
                        print(item)
                if caught_up and ended:
                    break
    print("caught up")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("conversation")
    parser.add_argument("--durable", default="example")
    parser.add_argument("--prompt")
    arguments = parser.parse_args()
    try:
        raise SystemExit(asyncio.run(main(arguments.conversation, arguments.durable, arguments.prompt)))
    except (ConfigurationError, TetherError) as error:  # no set is up, or it refuses: one line, exit code 1
        raise SystemExit(f"{parser.prog}: {error}") from None
