"""Controls over HTTP: find the whole target, ask its collector once, tell the receipt as it stands.

The target comes from the owner record, never from a row: a row may be late. No reply in time reads `unknown` (202):
nothing is sent again by itself, `GET /v1/controls/{id}` tells later.

A receipt moves forward only, and the rows may be behind the log: where they have none that is final, the log after the
projection's cursor is asked too. The cursor is taken first, so whatever is not in the rows is behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from fastapi.responses import JSONResponse

from tether import events as ev
from tether import subjects
from tether.api import ControlAnswer
from tether.control import ControlReply, ControlRequest, Verb
from tether.errors import Code, InvalidError, ProblemError, problem
from tether.frames import Frame
from tether.ids import ExecutionTarget
from tether.limits import EXECUTION_TOKEN_CONVERSATION
from tether_backend.core.stream import decode_stored
from tether_backend.runtime import Deps
from tether_backend.store.history import Place

# How far a receipt is: of two the further one is the newer.
_RANK: Final = {"unknown": 0, "accepted": 1, "delivered": 2, "settled": 3, "rejected": 3}
_FINAL: Final = 3


@dataclass(frozen=True, slots=True)
class Settled:
    """What rows or log say of a control."""

    execution: str
    receipt: dict[str, Any]

    @property
    def rank(self) -> int:
        return _RANK.get(self.receipt["status"], 0)


def no_execution() -> ProblemError:
    return ProblemError(problem(Code.NOT_FOUND, "execution: there is none of this id"))


async def find_target(
    deps: Deps, tenant: str, execution: str, control: str, *, within: str | None = None
) -> ExecutionTarget | Settled:
    """`within`: the conversation that is asked about; an execution of another one is not found.

    Raises ProblemError: NOT_FOUND, TARGET_STALE (with the current target)."""
    place = await _place(deps, tenant, execution)
    if place is not None:
        owner = await deps.runtime.owner(tenant, place.workspace, place.conversation)
    else:
        owner = await deps.runtime.owner_of_execution(tenant, execution)
        if owner is None:
            raise no_execution()
    target = None if owner is None else owner.target
    conversation = place.conversation if place is not None else None if target is None else target.conversation
    if within is not None and conversation != within:
        raise no_execution()
    if target is not None and target.execution == execution:
        return target
    known = await receipt_of(deps, tenant, control, execution)
    if known is not None:
        return Settled(execution, known.receipt)
    current = None if target is None else target.model_dump(mode="json", exclude_none=True)
    raise ProblemError(
        problem(Code.TARGET_STALE, "the execution does not own its conversation any more", current=current)
    )


async def receipt_of(deps: Deps, tenant: str, control: str, execution: str | None) -> Settled | None:
    """The newest receipt that rows and log have. An execution that is not named must be in the rows."""
    cursor = await deps.runtime.floor(tenant)
    row = await deps.history.receipt(tenant, control, execution)
    known = None if row is None else Settled(*row)
    if known is not None and known.rank == _FINAL:
        return known
    named = execution or (None if known is None else known.execution)
    place = None if named is None else await _place(deps, tenant, named)
    if place is None:
        return known
    return await _logged(deps, tenant, place, control, cursor.sequence) or known


async def _place(deps: Deps, tenant: str, execution: str) -> Place | None:
    """Where an execution lives: from the rows, else from the log."""
    if execution == EXECUTION_TOKEN_CONVERSATION:
        return None
    place = await deps.history.place(tenant, execution)
    if place is not None:
        return place
    named = await deps.bus.subjects(subjects.events_stream(tenant), f"tether.event.{tenant}.*.*.{execution}")
    for subject in named:
        try:
            address = subjects.parse_event(subject)
        except InvalidError:
            continue  # no subject of the log's
        return Place(address.workspace, address.conversation, execution)
    return None


async def _logged(deps: Deps, tenant: str, place: Place, control: str, after: int) -> Settled | None:
    """The last receipt of the control that the log has after a sequence, of the execution or its conversation."""
    stream = subjects.events_stream(tenant)
    every = subjects.conversation_events(tenant, place.workspace, place.conversation)
    found: Settled | None = None
    while batch := await deps.bus.read(stream, after, every):
        for stored in batch:
            after = stored.sequence
            if control.encode() not in stored.data:
                continue
            message = decode_stored(stored)
            if message is None or message.content is None:
                continue
            named = message.address.execution
            if named not in (place.execution, EXECUTION_TOKEN_CONVERSATION):
                continue
            content = message.content
            for event in content.events if isinstance(content, Frame) else (content,):
                if event.type == ev.CONTROL_RECEIPT and event.body.get("control") == control:
                    found = Settled(named, dict(event.body))
    return found


async def send(
    deps: Deps, target: ExecutionTarget | Settled, verb: Verb, control: str, payload: dict[str, Any]
) -> JSONResponse:
    if isinstance(target, Settled):
        return answer_of(settled(target, verb, control), target.execution)
    request = ControlRequest(control=control, verb=verb, target=target, payload=payload)
    reply = await deps.runtime.control(target.tenant, target.workspace, request)
    return answer_of(reply, target.execution)


async def ask_receipt(deps: Deps, target: ExecutionTarget, control: str) -> ControlReply:
    """The collector's word; the log's where that is further, or where the collector has none."""
    asked = ControlRequest(control=control, verb="receipt", target=target, payload={"control": control})
    reply = await deps.runtime.control(target.tenant, target.workspace, asked)
    if _RANK[reply.status] == _FINAL and reply.problem is None:
        return reply
    known = await receipt_of(deps, target.tenant, control, target.execution)
    # A refusal is not the control's own: this collector does not have the execution (any more).
    rank = _RANK[reply.status] if reply.problem is None else 0
    if known is None or known.rank <= rank or known.receipt["status"] == reply.status:
        return reply
    return settled(known, "", control)


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
