"""States from views and views from states: history rows as the fold would have them, and a log as a history."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tether.api import (
    ConversationHistory,
    ExecutionView,
    FailureView,
    GapView,
    InteractionView,
    ItemView,
    MessageView,
    RecoveryView,
    ResponseView,
    UsageView,
)
from tether.conversation_fold import ConversationState
from tether.fold import (
    ExecutionState,
    GapItem,
    InteractionItem,
    Item,
    UsageTotal,
)
from tether.ids import ExecutionTarget
from tether.owner import OwnerRecord

_ITEM: TypeAdapter[Item] = TypeAdapter(Item)


def states_of(history: ConversationHistory) -> dict[str, ExecutionState]:
    """The folded state of each execution of a page. Items that did not fit the page are missing: then `partial`."""
    states: dict[str, ExecutionState] = {}
    requests = {response.response: response.request for response in history.responses}
    for view in history.executions:
        items = sorted((row for row in history.items if row.execution == view.execution), key=lambda row: row.position)
        folded = [item for item in (_item(row) for row in items) if item is not None]
        usage = [row for row in history.usage if row.execution == view.execution]
        states[view.execution] = ExecutionState(
            applied=view.applied,
            phase=view.state if view.state in ("starting", "running", "waiting", "exiting", "ended") else "running",
            outcome=view.outcome if view.state == "ended" else None,
            response_outcome=_outcome(history, view),
            error=view.error,
            agent=view.agent,
            request=requests.get(view.response or ""),
            native_session=view.native_session,
            model=view.model,
            started_at=view.started_at,
            ended_at=view.ended_at,
            proof=view.proof,
            exit=view.exit,
            items=folded,
            usage=total(usage),
            usage_by_turn={row.turn: row.model_dump(exclude={"execution"}, exclude_none=True) for row in usage},
            turns_completed=len(usage),
            partial=view.partial or len(folded) < view.items,
        )
    return states


def _item(row: ItemView) -> Item | None:
    try:
        return _ITEM.validate_python({"kind": row.kind, "id": row.item, **row.state})
    except ValidationError:
        return None  # a kind that this client does not know


def _outcome(history: ConversationHistory, view: ExecutionView) -> str | None:
    for response in history.responses:
        if response.execution == view.execution:
            return response.outcome
    return None


def total(usage: list[UsageView]) -> UsageTotal:
    costs = [row.cost_usd for row in usage if row.cost_usd is not None]
    return UsageTotal(
        turns=len(usage),
        input_tokens=sum(row.input_tokens for row in usage),
        output_tokens=sum(row.output_tokens for row in usage),
        cache_read_tokens=sum(row.cache_read_tokens for row in usage),
        cache_write_tokens=sum(row.cache_write_tokens for row in usage),
        cost_usd=sum(costs) if costs else None,
    )


def execution_view(
    state: ExecutionState, conversation: str, workspace: str, execution: str, target: ExecutionTarget | None
) -> ExecutionView:
    """`target`: of the owner record, where this execution owns its conversation."""
    own = state.target or {}
    return ExecutionView(
        execution=execution,
        conversation=conversation,
        workspace=workspace,
        response=target.response if target is not None else own.get("response"),
        generation=int(target.execution_generation if target else own.get("execution_generation", 0)),
        state=state.phase,
        applied=state.applied,
        agent=state.agent,
        native_session=state.native_session,
        model=state.model,
        started_at=state.started_at,
        ended_at=state.ended_at,
        outcome=_literal(state.outcome),
        proof=state.proof,
        exit=state.exit,
        error=state.error,
        items=len(state.items),
        pending_interactions=len(state.pending()),
        partial=state.partial,
        target=target,
    )


def _literal(outcome: str | None) -> Any:
    return outcome


def active_view(owner: OwnerRecord) -> ExecutionView | None:
    """The execution that owns a conversation, as its owner record says."""
    target = owner.target
    if target is None:
        return None
    state = {"stopping": "running", "idle": "ended"}.get(owner.state, owner.state)
    return ExecutionView(
        execution=target.execution,
        conversation=target.conversation,
        workspace=target.workspace,
        response=target.response,
        generation=target.execution_generation,
        state=state,
        agent=owner.agent.get("kind"),
        native_session=target.native_session,
        target=target,
    )


def history_of(
    conversation: str,
    workspace: str,
    cursor: str,
    told: ConversationState,
    executions: dict[str, ExecutionState],
    owner: OwnerRecord | None,
) -> ConversationHistory:
    """A whole log as one page. `place` is the order in the log."""
    places = {message.request: place for place, message in enumerate(told.messages, start=1)}
    history = ConversationHistory(
        conversation=conversation,
        workspace=workspace,
        cursor=cursor,
        messages=[
            MessageView(
                request=message.request,
                place=places[message.request],
                at=message.at,
                content=message.content,
                into=message.into,
                response=message.response,
                author=message.author,
            )
            for message in told.messages
        ],
        responses=[],
        failures=[],
        executions=[],
        items=[],
        interactions=[],
        gaps=[],
        usage=[],
        recoveries=[
            RecoveryView(place=place, **{name: value for name, value in body.items() if name != "corrupt"})
            for place, body in enumerate(told.recoveries, start=len(places) + 1)
        ],
    )
    for response in told.responses:
        place = places.get(response.request, 0)
        if response.execution is None:
            error = response.error or {}
            history.failures.append(
                FailureView(
                    request=response.request,
                    place=place,
                    at=response.at,
                    code=str(error.get("code", "INVALID")),
                    detail=str(error.get("detail", "")),
                    retryable=bool(error.get("retryable", False)),
                )
            )
            continue
        state = executions.get(response.execution)
        outcome = "superseded" if response.state == "superseded" else "failed" if response.state == "failed" else None
        history.responses.append(
            ResponseView(
                response=response.response,
                request=response.request,
                place=place,
                generation=int((state.target or {}).get("response_generation", 0)) if state is not None else 0,
                execution=response.execution,
                agent=response.agent or "",
                at=response.at,
                outcome=_literal(outcome or (state.response_outcome if state is not None else None)),
                error=response.error or (state.error if state is not None else None),
                ended_at=None if state is None else state.response_ended_at,
                superseded_by=response.superseded_by,
            )
        )
    for execution, state in executions.items():
        owned = owner is not None and owner.target is not None and owner.target.execution == execution
        target = owner.target if owner is not None and owned else None
        _add_execution(history, execution, state, target)
    return history


def _add_execution(
    history: ConversationHistory, execution: str, state: ExecutionState, target: ExecutionTarget | None
) -> None:
    history.executions.append(execution_view(state, history.conversation, history.workspace, execution, target))
    for position, item in enumerate(state.items):
        row = item.model_dump(mode="json", exclude_none=True)
        history.items.append(ItemView(execution=execution, item=item.id, position=position, kind=item.kind, state=row))
        if isinstance(item, InteractionItem):
            history.interactions.append(interaction_view(execution, item))
        elif isinstance(item, GapItem):
            history.gaps.append(
                GapView(
                    execution=execution,
                    first=item.from_ordinal,
                    last=item.to_ordinal,
                    reason=item.reason,
                    detail=item.detail,
                )
            )
    for value in state.usage_by_turn.values():
        history.usage.append(UsageView(execution=execution, **value))


def interaction_view(execution: str, item: InteractionItem) -> InteractionView:
    return InteractionView(
        execution=execution,
        interaction=item.id,
        asks=item.asks,
        state=item.state,
        name=item.name,
        tool=item.tool,
        input=item.input,
        description=item.description,
        questions=item.questions,
        options=item.options,
        offered=item.offered,
        control=item.control,
    )


def answer_control(tenant: str, execution: str, payload: dict[str, Any]) -> str:
    """The control id of an answer that was given none: the same answer is the same control, whoever repeats it."""

    text = json.dumps([tenant, execution, payload], sort_keys=True, separators=(",", ":"))
    return f"ctl_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
