"""The tail of an execution that was closed while its volume was away: to the artifacts, and told once on `_`.

Its subject is fenced, so nothing of it can go there any more. What the spool has beyond the log is made into events as
ever, numbered as they would have been, and stored as JSON lines in blobs; then `recovery{salvaged}` names them, and
carries the usage of those turns, which nobody has counted. A crash in between stores and tells the same again: blobs go
by their digest, the event by its identity.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, Final

import structlog

from tether import events as ev
from tether import frames, subjects
from tether.errors import BusError, InvalidError, WrongLastSequenceError
from tether.events import ConversationEvent, Event
from tether.frames import Frame, decode
from tether.ids import ExecutionTarget
from tether.limits import EXECUTION_TOKEN_CONVERSATION, MIB, RECOVERY_MATERIAL_BYTES_MAX, RECOVERY_MATERIAL_FILES_MAX
from tether.ports import Bus, StoredMessage
from tether.subjects import EventAddress
from tether_collector.blobs import BlobStore, blob_of_text
from tether_collector.pipeline import Base, Pipeline

BLOB_BYTES: Final = RECOVERY_MATERIAL_BYTES_MAX // RECOVERY_MATERIAL_FILES_MAX
USAGE_MAX: Final = 256  # turns whose usage the event carries; the blobs have all of them
AGAIN_S: Final = 0.5
assert BLOB_BYTES >= MIB
_log = structlog.get_logger("tether.collector")


def closed_without_tail(message: StoredMessage | None) -> Base | None:
    """Where the log stood when another closed the execution, if its last message says that the tail was unknown."""
    if message is None:
        return None
    try:
        frame = decode(message.subject, message.data)
    except InvalidError:
        return None
    assert isinstance(frame, Frame)
    newest = frame.events[-1]
    if newest.type != ev.EXECUTION_ENDED or newest.body.get("tail") != "unknown":
        return None
    return Base(frame.first - 1, frame.pos)


class Tail:
    """Events beyond the log, as JSON lines in pieces of at most BLOB_BYTES."""

    def __init__(self) -> None:
        self.pieces: list[list[str]] = [[]]
        self.usage: list[dict[str, Any]] = []
        self.first = self.last = 0
        self.count = self.omitted = 0
        self._bytes = 0

    def add(self, event: Event) -> None:
        line = frames.encode_part(event).decode()
        size = len(line.encode()) + 1
        if self._bytes + size > BLOB_BYTES and self.pieces[-1]:
            self.pieces.append([])
            self._bytes = 0
        self.first = self.first or event.ordinal
        self.last = event.end
        if event.type == ev.USAGE and len(self.usage) < USAGE_MAX:
            self.usage.append(event.body)
        if len(self.pieces) > RECOVERY_MATERIAL_FILES_MAX:
            self.omitted += 1
            return
        self.count += 1
        self._bytes += size
        self.pieces[-1].append(line)


async def salvage(bus: Bus, blobs: BlobStore, target: ExecutionTarget, pipeline: Pipeline, at: int) -> bool:
    """Store and tell the tail; waits for a bus that is away. `pipeline` stands at the log's end. False where there is
    none."""
    tail = Tail()
    while (progress := pipeline.step()).moved or progress.events:
        for event, _ in progress.events:
            tail.add(event)
        await asyncio.sleep(0)
    if not tail.count:
        return False
    references = []
    for piece in tail.pieces[:RECOVERY_MATERIAL_FILES_MAX]:
        blob, reference = blob_of_text("".join(f"{line}\n" for line in piece), "text")
        await blobs.put(blob)
        references.append(reference)
    found = {
        "execution": target.execution,
        "response": target.response,
        "from": tail.first,
        "to": tail.last,
        "events": tail.count,
        "omitted": tail.omitted,
        "outcome": pipeline.machine.response_outcome,
        "usage": tail.usage,
        "blobs": references,
    }
    told = ConversationEvent(
        id=f"{target.execution}/{ev.RECOVERY}",
        at=at,
        type=ev.RECOVERY,
        generation=target.execution_generation,
        body={"salvaged": found},
    )
    await _tell(bus, target, told)
    _log.warning("tail_salvaged", execution=target.execution, events=tail.count, first=tail.first, last=tail.last)
    return True


async def _tell(bus: Bus, target: ExecutionTarget, event: ConversationEvent) -> None:
    address = EventAddress(target.tenant, target.workspace, target.conversation, EXECUTION_TOKEN_CONVERSATION)
    data = frames.encode_event(event)
    while True:
        try:
            last = await bus.last(subjects.events_stream(target.tenant), address.subject, leader=False)
            if last is not None and last.data == data:
                return
            base = 0 if last is None else last.sequence
            await bus.publish(address.subject, data, msg_id=f"{target.conversation}/{event.id}", expect_last=base)
        except WrongLastSequenceError:
            continue
        except BusError:
            await asyncio.sleep(AGAIN_S * random.uniform(0.8, 1.2))
        else:
            return
