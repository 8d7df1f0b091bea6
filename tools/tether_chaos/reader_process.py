"""A reader in a process of its own, by the SDK over NATS.

    python -m tether_chaos.reader_process OUT CONVERSATION [NAME]

Each item is one line of the file OUT, written before the next is asked for; started again it goes on from the last
whole line's cursor, as an application does that keeps the cursor with its data. NAME: a durable reader's. The address
comes by `TETHER_CLIENT_…` (see `tether.client.environment`). It never ends by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tether import Client
from tether.client.items import CaughtUp, ConversationItem, ExecutionItem, Item
from tether.events import Event
from tether_chaos.readers import Got


def lines(out: Path) -> list[dict[str, Any]]:
    """What was written whole."""
    try:
        data = out.read_bytes()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def got_of(out: Path, name: str) -> Got:
    """What the process was given, as a reader's."""
    got = Got(name, "nats")
    for line in lines(out):
        if "execution" in line:
            got.take_event(line["execution"], Event.model_validate(line["event"]))
        elif "conversation" in line:
            got.conversation.append(line["conversation"])
        elif line["other"] != CaughtUp.__name__:
            got.trouble.append(line["other"])
    return got


def _line(item: Item) -> dict[str, Any]:
    match item:
        case ExecutionItem():
            event = item.event.model_dump(mode="json", exclude_none=True)
            return {"cursor": item.cursor, "execution": item.execution, "event": event}
        case ConversationItem():
            return {"cursor": item.cursor, "conversation": item.event.id}
        case _:
            return {"cursor": item.cursor, "other": type(item).__name__}


async def read(out: Path, conversation: str, durable: str | None) -> None:
    known = lines(out)
    whole = b"".join(json.dumps(line).encode() + b"\n" for line in known)
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.ftruncate(descriptor, len(whole))  # a line that was cut off was never written
    os.lseek(descriptor, 0, os.SEEK_END)
    async with Client.from_environment() as client:
        async for item in client.follow(conversation, cursor=known[-1]["cursor"] if known else None, durable=durable):
            os.write(descriptor, json.dumps(_line(item)).encode() + b"\n")


def main() -> int:
    out, conversation, *name = sys.argv[1:]
    asyncio.run(read(Path(out), conversation, name[0] if name else None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
