"""Reading who can stop an execution: registrations, the sandbox record, and a question to collectors.

    1 the registration of the target's sandbox
    2 all registrations of the workspace, the sandbox record
    3 a collector whose list was cut is asked for the conversation's executions

All of it within DISCOVERY_WAIT_S, and of at most DISCOVERY_SANDBOXES_MAX sandboxes: what is not found by then is
reported as not found, never as ended.
"""

from __future__ import annotations

import asyncio

from pydantic import ValidationError

from tether import subjects
from tether.control import ControlReply, ControlRequest
from tether.errors import Code, NoReplyError, Problem, UnreadableRecordError, problem
from tether.ids import ExecutionTarget, new_id
from tether.kv import Bucket
from tether.limits import DISCOVERY_SANDBOXES_MAX, DISCOVERY_WAIT_S
from tether.ports import Bus
from tether.sandbox import ExecutionSummary, Registration, SandboxRecord
from tether_router.core.discovery import Found, choose, look

_ANSWER_S = DISCOVERY_WAIT_S / 2


async def resolve(bus: Bus, target: ExecutionTarget) -> Found | Problem:
    """Whom a stop of `target` would go to. Raises BusError."""
    try:
        async with asyncio.timeout(DISCOVERY_WAIT_S):
            return await _resolve(bus, target)
    except TimeoutError:
        return problem(Code.TARGET_UNKNOWN, f"the execution was not found within {DISCOVERY_WAIT_S:g} s")


async def _resolve(bus: Bus, target: ExecutionTarget) -> Found | Problem:
    bucket = Bucket(bus, subjects.SANDBOXES)
    key = subjects.registration_key(target.tenant, target.workspace, target.sandbox)
    at_once = look(target, await _read(bucket, key))
    if isinstance(at_once, Found | Problem):
        return at_once
    registrations: list[Registration] = []
    async for _, one in bucket.records(Registration, subjects.sandbox_key(target.tenant, target.workspace) + ".*"):
        registrations.append(one)
        if len(registrations) > DISCOVERY_SANDBOXES_MAX:
            break
    told: list[tuple[str, ExecutionTarget]] = []
    if any(one.executions_omitted for one in registrations[:DISCOVERY_SANDBOXES_MAX]):
        told = await _ask(bus, target)
    sandbox = await bucket.get(subjects.sandbox_key(target.tenant, target.workspace))
    return choose(target, registrations, told, None if sandbox is None else bucket.parse(sandbox, SandboxRecord))


async def _read(bucket: Bucket, key: str) -> Registration | None:
    try:
        return await bucket.record(key, Registration)
    except UnreadableRecordError:
        return None  # of a version that is not known here: nothing is decided by it


async def _ask(bus: Bus, target: ExecutionTarget) -> list[tuple[str, ExecutionTarget]]:
    """The conversation's executions, as whoever serves the workspace's controls has them."""
    request = ControlRequest(control=new_id("dsc"), verb="discover", payload={"conversation": target.conversation})
    subject = subjects.control(target.tenant, target.workspace, request.verb)
    try:
        answer = await bus.request(subject, request.model_dump_json(exclude_none=True).encode(), timeout_s=_ANSWER_S)
        result = ControlReply.model_validate_json(answer.data).result or {}
        entries = [ExecutionSummary.model_validate(entry) for entry in result.get("executions", ())]
    except (NoReplyError, ValidationError):
        return []
    return [(str(result.get("boot", "")), entry.target) for entry in entries]
