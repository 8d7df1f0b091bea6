"""Whether a router may stop an execution: only while the owner record says so, under this very control id. And whether
it may have a conversation deleted: only while the record names the deletion.

A router writes `stopping` with the stop's control id, and only then sends the stop. Where that takeover has failed
meanwhile, the record names the stop no more, and a copy of it that a frozen router sends late is void: the execution
goes on for those who were told that it does.

A bucket that was made anew counts revisions from one. An older router's stop, whose token is then the higher one, is no
danger: the record does not name it. The newer one's is refused (retryable) until its revision has passed the highest
that was seen: from here a record of a new bucket cannot be told from an old one of a replica that lags, and one writer
too few is better than two.

The record is read by direct get, from a replica that may lag: one older than the sender's revision is read again.
"""

from __future__ import annotations

import asyncio
from typing import Final

from pydantic import ValidationError

from tether import subjects
from tether.control import ControlRequest
from tether.deletion import ForgetPayload
from tether.errors import Code, ProblemError, problem
from tether.ids import ExecutionTarget
from tether.kv import Bucket
from tether.owner import OwnerRecord
from tether.ports import Bus
from tether.prompt import invalid

LAG_PAUSES_S: Final = (0.02, 0.05, 0.1, 0.2)


async def check_takeover(bus: Bus, request: ControlRequest, target: ExecutionTarget) -> None:
    """Raises ProblemError (LEASE_NOT_READY) where the record does not name the stop, BusError where it cannot be
    read."""
    record = await _owner(bus, request, subjects.owner_key(target.tenant, target.workspace, target.conversation))
    named = record.target is not None and record.target.execution == target.execution
    if not named or record.state != "stopping" or record.stop_control != request.control:
        detail = f"authority: the owner record ({record.state}) does not name this stop of the execution"
        raise ProblemError(problem(Code.LEASE_NOT_READY, detail))


def forget_payload(request: ControlRequest) -> ForgetPayload:
    """Raises InvalidError."""
    try:
        return ForgetPayload.model_validate(request.payload)
    except ValidationError as error:
        raise invalid(error, "payload") from None


async def check_deletion(
    bus: Bus, request: ControlRequest, payload: ForgetPayload, tenant: str, workspace: str
) -> None:
    """Raises ProblemError where the record does not name the deletion, or the conversation is not idle; BusError where
    it cannot be read."""
    record = await _owner(bus, request, subjects.owner_key(tenant, workspace, payload.conversation))
    if record.deletion != payload.deletion or record.state != "idle":
        detail = f"authority: the owner record ({record.state}) does not name this deletion"
        raise ProblemError(problem(Code.LEASE_NOT_READY, detail))


async def _owner(bus: Bus, request: ControlRequest, key: str) -> OwnerRecord:
    """The record, of the sender's revision or later. Raises BusError."""
    bucket = Bucket(bus, subjects.OWNERS, leader=False)
    entry = await bucket.get(key)
    for pause_s in LAG_PAUSES_S:
        if entry is not None and entry.revision >= request.authority.token:
            break
        await asyncio.sleep(pause_s)
        entry = await bucket.get(key)
    return OwnerRecord() if entry is None else bucket.parse(entry, OwnerRecord)
