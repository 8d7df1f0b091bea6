"""What the adapter itself has to write: replies to the CLI's lines that belong to no control.

Bounded; kept until the keeper recorded the write: a collector that was restarted in between asks again under the same
id, and the keeper, which knows the id, writes nothing twice. Bytes are kept as text, so that a dump is JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tether_collector.core.adapters.base import Reply
from tether_collector.core.inputs import WriteStdin

WAITING_MAX: Final = 1024  # a CLI that asks on and reads nothing is answered no more

Waiting = list[dict[str, Any]]  # control, data, work


def add(waiting: Waiting, reply: Reply) -> None:
    if len(waiting) >= WAITING_MAX:
        return
    waiting.append({"control": reply.control, "data": reply.data.decode(), "work": reply.work})


def begun(waiting: Waiting, control: str) -> bool:
    """The keeper recorded the write of this one. False where it is none of the replies."""
    for index, entry in enumerate(waiting):
        if entry["control"] == control:
            del waiting[index]
            return True
    return False


def wants(waiting: Waiting, *, stopping: bool) -> Iterator[WriteStdin]:
    """In order; while stopping without what would make the CLI begin something."""
    for entry in waiting:
        if not (stopping and entry["work"]):
            yield WriteStdin(entry["control"], entry["data"].encode())
