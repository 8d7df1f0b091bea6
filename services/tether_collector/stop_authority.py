"""Whether a router may stop an execution: only while the owner record says so, under this very control id.

A router writes `stopping` with the stop's control id, and only then sends the stop. Where that takeover has failed
meanwhile, the record names the stop no more, and a copy of it that a frozen router sends late is void: the execution
goes on for those who were told that it does.

The record is read by direct get, from a replica that may lag: one older than the sender's revision is read again.
"""

from __future__ import annotations

import asyncio
from typing import Final

from tether import subjects
from tether.control import ControlRequest
from tether.errors import Code, ProblemError, problem
from tether.ids import ExecutionTarget
from tether.kv import Bucket
from tether.owner import OwnerRecord
from tether.ports import Bus

LAG_PAUSES_S: Final = (0.02, 0.05, 0.1, 0.2)


async def check_takeover(bus: Bus, request: ControlRequest, target: ExecutionTarget) -> None:
    """Raises ProblemError (LEASE_NOT_READY) where the record does not name the stop, BusError where it cannot be
    read."""
    bucket = Bucket(bus, subjects.OWNERS, leader=False)
    key = subjects.owner_key(target.tenant, target.workspace, target.conversation)
    entry = await bucket.get(key)
    for pause_s in LAG_PAUSES_S:
        if entry is not None and entry.revision >= request.authority.token:
            break
        await asyncio.sleep(pause_s)
        entry = await bucket.get(key)
    record = OwnerRecord() if entry is None else bucket.parse(entry, OwnerRecord)
    named = record.target is not None and record.target.execution == target.execution
    if not named or record.state != "stopping" or record.stop_control != request.control:
        detail = f"authority: the owner record ({record.state}) does not name this stop of the execution"
        raise ProblemError(problem(Code.LEASE_NOT_READY, detail))
