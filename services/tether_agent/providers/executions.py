"""Stopping what runs in a sandbox before the sandbox itself is ended, so that each end is told in the log with proof.

Each execution that the registration names as living gets one exact `stop`; then the log is watched for its
`execution.ended`. A reply is a hint, the log is the proof. What has not ended in time is left to the sweep of keepers;
its end is told by the next collector.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog
from pydantic import ValidationError

from tether import events, frames, ids, subjects
from tether.control import Authority, ControlRequest
from tether.errors import BusError, InvalidError
from tether.frames import Frame
from tether.ids import ExecutionTarget
from tether.kv import Bucket
from tether.limits import STOP_INTERRUPT_S, STOP_TERM_S
from tether.ports import Bus
from tether.sandbox import Registration
from tether_agent.providers.sandbox_file import SandboxFile

END_WAIT_S: Final = STOP_INTERRUPT_S + STOP_TERM_S + 5.0  # the whole escalation of a stop, and its story
_ASK_S: Final = 2.0
_POLL_S: Final = 0.1
_log = structlog.get_logger("tether_agent")


async def stop_all(bus: Bus, file: SandboxFile) -> bool:
    """Stop every execution that lives in this sandbox. True where each end is in the log (or nothing ran)."""
    try:
        targets = await _living(bus, file)
        async with asyncio.timeout(END_WAIT_S):
            for target in targets:
                await _ask(bus, target)
            for target in targets:
                while not await _ended(bus, target):  # noqa: ASYNC110 - another process's word, in the log
                    await asyncio.sleep(_POLL_S)
    except TimeoutError:
        _log.warning("executions_not_ended", tenant=file.tenant, workspace=file.workspace)
        return False
    except BusError as error:
        _log.warning("executions_not_stopped", tenant=file.tenant, workspace=file.workspace, reason=str(error))
        return False
    return True


async def _living(bus: Bus, file: SandboxFile) -> list[ExecutionTarget]:
    entry = await Bucket(bus, subjects.SANDBOXES).get(
        subjects.registration_key(file.tenant, file.workspace, file.sandbox)
    )
    if entry is None:
        return []
    try:
        registration = Registration.model_validate(entry.value)
    except ValidationError:
        return []  # of a newer version: its collector knows what to do at its own end
    if registration.boot != file.boot:
        return []
    return [summary.target for summary in registration.executions if summary.state != "ended"]


async def _ask(bus: Bus, target: ExecutionTarget) -> None:
    request = ControlRequest(
        control=ids.new_id("ctl"),
        verb="stop",
        target=target,
        authority=Authority(kind="sandbox", holder="agent-service"),
    )
    subject = subjects.control(target.tenant, target.workspace, "stop")
    try:
        await bus.request(subject, request.model_dump_json(exclude_none=True).encode(), timeout_s=_ASK_S)
    except BusError as error:
        _log.info("stop_unanswered", execution=target.execution, reason=str(error))


async def _ended(bus: Bus, target: ExecutionTarget) -> bool:
    subject = subjects.event(target.tenant, target.workspace, target.conversation, target.execution)
    last = await bus.last(subjects.events_stream(target.tenant), subject)
    if last is None:
        return False
    try:
        frame = frames.decode(subject, last.data)
    except InvalidError:
        return False
    return isinstance(frame, Frame) and frame.events[-1].type == events.EXECUTION_ENDED
