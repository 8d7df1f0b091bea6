"""Records as a router writes them before anything is logged: what readers of a log need in order to believe it."""

from __future__ import annotations

import time

from tether import subjects
from tether.kv import Bucket, Conflict
from tether.owner import OwnerRecord, Tombstone
from tether.ports import Bus
from tether.prompt import ConversationRecord, RequestRecord


async def admit_conversation(bus: Bus, tenant: str, workspace: str, conversation: str) -> None:
    record = ConversationRecord(workspace=workspace).model_dump(mode="json")
    try:
        key = subjects.conversation_key(tenant, conversation)
        await Bucket(bus, subjects.CONVERSATIONS).create(key, record, op="test")
    except Conflict:
        pass


async def admit_request(bus: Bus, tenant: str, workspace: str, conversation: str, request: str) -> None:
    await admit_conversation(bus, tenant, workspace, conversation)
    record = RequestRecord(
        digest="d", workspace=workspace, conversation=conversation, attempt=1, prompt_sequence=1, state="done"
    )
    try:
        key = subjects.request_key(tenant, request)
        await Bucket(bus, subjects.REQUESTS).create(key, record.value(), op="test")
    except Conflict:
        pass


async def admit_execution(bus: Bus, tenant: str, workspace: str, conversation: str, execution: str) -> None:
    """The owner record names it, whatever else it says: as one that has ended, unless it is the target."""
    await admit_conversation(bus, tenant, workspace, conversation)
    owners = Bucket(bus, subjects.OWNERS)
    key = subjects.owner_key(tenant, workspace, conversation)
    while True:
        entry = await owners.get(key)
        record = OwnerRecord() if entry is None else owners.parse(entry, OwnerRecord)
        if record.buried(execution) or (record.target is not None and record.target.execution == execution):
            return
        stones = (*record.tombstones, Tombstone(execution=execution, outcome="completed", at=1))
        value, op = record.model_copy(update={"tombstones": stones}).value(), f"admit{time.monotonic_ns()}"
        try:
            if entry is None:
                await owners.create(key, value, op=op)
            else:
                await owners.update(key, value, op=op, revision=entry.revision)
        except Conflict:
            continue
        return
