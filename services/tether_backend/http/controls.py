"""Controls over HTTP: find the whole target, ask its collector once, tell the receipt as it stands.

The target comes from the owner record, never from a row: a row may be late. No reply in time reads `unknown` (202):
nothing is sent again by itself, `GET /v1/controls/{id}` tells later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse

from tether.api import ControlAnswer
from tether.control import ControlReply, ControlRequest, Verb
from tether.errors import Code, ProblemError, problem
from tether.ids import ExecutionTarget
from tether_backend.runtime import Deps


@dataclass(frozen=True, slots=True)
class Settled:
    """The execution has ended, and its log has the receipt of this control."""

    execution: str
    receipt: dict[str, Any]


async def find_target(deps: Deps, tenant: str, execution: str, control: str) -> ExecutionTarget | Settled:
    """Raises ProblemError: NOT_FOUND, TARGET_STALE (with the current target)."""
    place = await deps.history.place(tenant, execution)
    if place is not None:
        owner = await deps.runtime.owner(tenant, place.workspace, place.conversation)
    else:
        owner = await deps.runtime.owner_of_execution(tenant, execution)
        if owner is None:
            raise ProblemError(problem(Code.NOT_FOUND, "execution: there is none of this id"))
    target = None if owner is None else owner.target
    if target is not None and target.execution == execution:
        return target
    known = await deps.history.receipt(tenant, control, execution)
    if known is not None:
        return Settled(execution, known[1])
    current = None if target is None else target.model_dump(mode="json", exclude_none=True)
    raise ProblemError(
        problem(Code.TARGET_STALE, "the execution does not own its conversation any more", current=current)
    )


async def send(
    deps: Deps, target: ExecutionTarget | Settled, verb: Verb, control: str, payload: dict[str, Any]
) -> JSONResponse:
    if isinstance(target, Settled):
        return answer_of(settled(target, verb, control), target.execution)
    request = ControlRequest(control=control, verb=verb, target=target, payload=payload)
    reply = await deps.runtime.control(target.tenant, target.workspace, request)
    return answer_of(reply, target.execution)


def settled(found: Settled, verb: str, control: str) -> ControlReply:
    receipt = found.receipt
    return ControlReply(control=control, verb=receipt.get("verb", verb), status=receipt["status"])


def answer_of(reply: ControlReply, execution: str) -> JSONResponse:
    """200 with the receipt, 202 where it is unknown, a problem where the collector refused."""
    if reply.status == "rejected" and reply.problem is not None:
        context = {**reply.problem.context, "control_id": reply.control, "execution": execution}
        if reply.target is not None:
            context["current"] = reply.target.model_dump(mode="json", exclude_none=True)
        raise ProblemError(reply.problem.model_copy(update={"context": context}))
    body = ControlAnswer(
        control_id=reply.control,
        execution=execution,
        verb=reply.verb,
        status=reply.status,
        problem=reply.problem,
        target=reply.target,
    )
    return JSONResponse(
        body.model_dump(mode="json", exclude_none=True), status_code=202 if reply.status == "unknown" else 200
    )
