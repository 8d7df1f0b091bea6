"""Ask a collector for a control, and say honestly what is known of it.

A reply that does not come, or that nobody can read, is `unknown`: the control may have been taken, `receipt` tells
later, nothing is sent again. Where the server says that nobody listens, it was taken by nobody: the collector is being
started or restarted, so the same bytes are offered again for as long as a reply would have been waited for (not those
of a mere question: who asks has other sources).
"""

from __future__ import annotations

import asyncio
from typing import Final

from pydantic import ValidationError

from tether import subjects, tracing
from tether.control import ControlReply, ControlRequest
from tether.errors import NoReplyError
from tether.limits import CONTROL_REPLY_S
from tether.ports import Bus

_OFFER_AGAIN_S: Final = 0.1
_QUESTIONS: Final = ("snapshot", "discover", "receipt")


async def ask_collector(bus: Bus, tenant: str, workspace: str, request: ControlRequest) -> ControlReply:
    """The collector's reply within CONTROL_REPLY_S, else status `unknown`. Raises BusUnavailableError and the like."""
    execution = None if request.target is None else request.target.execution
    with tracing.scope(f"control {request.verb}", kind="client", control=request.control, execution=execution) as span:
        reply = await _ask(bus, tenant, workspace, request)
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
