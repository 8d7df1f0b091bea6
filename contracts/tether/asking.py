"""Ask a collector for a control, and say honestly what is known of it.

A reply that does not come, or that nobody can read, is `unknown`: the control may have been taken, `receipt` tells
later, nothing is sent again. Where the server says that nobody listens, it was taken by nobody: the collector is being
started or restarted, so the same bytes are offered again for as long as a reply would have been waited for (not those
of a mere question: who asks has other sources).

An execution may go on with another process (its session was lost, and the history stood in). Who asks knows that from
the owner's record, which the router writes after it; the collector's refusal names the target as it is. The user named
the execution: the same control is asked once more of the process that it has now.
"""

from __future__ import annotations

import asyncio
from typing import Final

from pydantic import ValidationError

from tether import subjects, tracing
from tether.control import ControlReply, ControlRequest
from tether.errors import Code, NoReplyError
from tether.ids import ExecutionTarget
from tether.limits import CONTROL_REPLY_S
from tether.ports import Bus

_OFFER_AGAIN_S: Final = 0.1
_QUESTIONS: Final = ("snapshot", "discover", "receipt", "forget")  # where nobody listens it is said at once


async def ask_collector(bus: Bus, tenant: str, workspace: str, request: ControlRequest) -> ControlReply:
    """The collector's reply within CONTROL_REPLY_S, else status `unknown`. Raises BusUnavailableError and the like."""
    execution = None if request.target is None else request.target.execution
    with tracing.scope(f"control {request.verb}", kind="client", control=request.control, execution=execution) as span:
        reply = await _ask(bus, tenant, workspace, request)
        if (now := _gone_on(request, reply)) is not None:
            reply = await _ask(bus, tenant, workspace, request.model_copy(update={"target": now}))
        span.set(status=reply.status)
        return reply


async def _ask(bus: Bus, tenant: str, workspace: str, request: ControlRequest) -> ControlReply:
    subject = subjects.control(tenant, workspace, request.verb)
    data = request.model_dump_json(exclude_none=True).encode()
    loop = asyncio.get_running_loop()
    until_s = loop.time() + CONTROL_REPLY_S
    while True:
        try:
            left_s = max(_OFFER_AGAIN_S, until_s - loop.time())
            message = await bus.request(subject, data, timeout_s=left_s, headers=tracing.outgoing())
            return ControlReply.model_validate_json(message.data)
        except NoReplyError as error:
            is_offered = error.no_responders and request.verb not in _QUESTIONS
            if is_offered and loop.time() + _OFFER_AGAIN_S < until_s:
                await asyncio.sleep(_OFFER_AGAIN_S)
                continue
        except ValidationError:
            pass
        return ControlReply(control=request.control, verb=request.verb, status="unknown")


def _gone_on(request: ControlRequest, reply: ControlReply) -> ExecutionTarget | None:
    """The target as it is, where the request's was refused for an earlier process of the same execution."""
    named, now = request.target, reply.target
    if reply.problem is None or reply.problem.code is not Code.TARGET_STALE or named is None or now is None:
        return None
    learned = {"process_generation": now.process_generation, "native_session": now.native_session}
    return now if named.differs(now) and not named.model_copy(update=learned).differs(now) else None
