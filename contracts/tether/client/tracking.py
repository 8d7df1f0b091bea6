"""Which response answers a request, and when it has ended: items in, facts out. Pure.

(request) ── response.created │ prompt.admitted{into} ──▶ (response, execution) ── response.ended │ execution.ended
    └── response.failed ──▶ failed                              └── response.superseded │ response.failed ──▶ ended
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tether import events as ev
from tether.client.items import ConversationItem, ExecutionItem, GapItem, Item, SnapshotItem
from tether.events import Event
from tether.fold import Applied, ExecutionFold, ExecutionState
from tether.merge import merge


@dataclass(slots=True)
class ResponseTracker:
    """Follows one request (or one response) through a conversation's items. `outcome` is set once it has ended."""

    request: str | None = None
    response: str | None = None
    execution: str | None = None
    outcome: str | None = None
    error: dict[str, Any] | None = None
    failed: bool = False  # before or instead of an execution
    cursor: str = ""
    seen: bool = False  # something of the execution came
    partial: bool = False
    fold: ExecutionFold = field(default_factory=ExecutionFold)

    @property
    def ended(self) -> bool:
        return self.outcome is not None

    def begin_from(self, state: ExecutionState) -> None:
        """What was before the cursor: the reader joins an execution that runs, or that has ended meanwhile."""
        self.fold = ExecutionFold(state)
        outcome = state.response_outcome or state.outcome
        if outcome is not None and self.outcome is None:
            self.outcome, self.error = outcome, state.error

    def take(self, item: Item) -> None:
        self.cursor = item.cursor or self.cursor
        match item:
            case ConversationItem():
                self._conversation(item)
            case ExecutionItem(execution=execution) if execution == self.execution:
                self.seen = True
                self._event(item.event)
            case SnapshotItem():
                self._snapshot(item)
            case GapItem(execution=execution) if execution in (None, self.execution):
                self.partial = True
            case _:
                pass

    def _conversation(self, item: ConversationItem) -> None:
        body = item.event.body
        match item.type:
            case ev.RESPONSE_CREATED if self._mine(body):
                self.response, self.execution = body["response"], body["execution"]
            case ev.PROMPT_ADMITTED if body.get("into") is not None and body.get("request") == self.request:
                self.response = body["into"]
                self.execution = self.execution or body.get("into_execution")
            case ev.RESPONSE_FAILED if self._mine(body):
                self.failed = True
                self.outcome = "failed"
                self.error = {key: body[key] for key in ("code", "detail", "retryable", "choices") if key in body}
            case ev.RESPONSE_SUPERSEDED if self._mine(body):
                self.outcome = "superseded"
            case _:
                pass

    def _mine(self, body: dict[str, Any]) -> bool:
        if self.response is not None:
            return bool(body.get("response") == self.response)
        return self.request is not None and body.get("request") == self.request

    def _event(self, event: Event) -> None:
        if self.fold.apply(event) is Applied.HOLE:
            # What is before it was not given to this reader; a gap that the log knows of was told as such.
            self.partial = True
            self.fold.skip_to(event.ordinal, "position_changed")
            self.fold.apply(event)
        if event.type in (ev.RESPONSE_ENDED, ev.EXECUTION_ENDED) and self.outcome is None:
            self.outcome = str(event.body.get("outcome"))
            self.error = event.body.get("error")

    def _snapshot(self, item: SnapshotItem) -> None:
        if item.history is not None and self.execution is None:
            for view in item.history.responses:
                if view.response == self.response or (self.response is None and view.request == self.request):
                    self.response, self.execution = view.response, view.execution
        state = None if self.execution is None else item.executions.get(self.execution)
        if state is None or state.applied < self.fold.applied:
            return
        self.seen = True
        state = merge(self.fold.freeze(), state).state  # what was shown stays
        self.begin_from(state)
        self.partial = self.partial or state.partial
