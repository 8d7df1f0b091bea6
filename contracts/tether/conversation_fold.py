"""The fold of the conversation-level events: messages, their responses, receipts, recoveries."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError

from tether import events as ev
from tether.events import ConversationEvent
from tether.fold import Applied, State


class MessageState(State):
    """A user's message. `response`: the one that answers it; `into` is set where it joined a running one."""

    request: str
    content: list[dict[str, Any]]
    at: int
    prompt_sequence: int = 0
    into: str | None = None
    response: str | None = None
    author: str | None = None


class ResponseState(State):
    """An answer on its way. `state`: created | failed | superseded, then whatever its execution says."""

    response: str
    request: str
    execution: str | None = None
    agent: str | None = None
    at: int
    state: Literal["created", "failed", "superseded"] = "created"
    superseded_by: str | None = None
    error: dict[str, Any] | None = None


class ConversationState(State):
    """The conversation-level events, folded. Lists are in order of the log."""

    messages: list[MessageState] = Field(default_factory=list)
    responses: list[ResponseState] = Field(default_factory=list)
    receipts: dict[str, dict[str, Any]] = Field(default_factory=dict)
    recoveries: list[dict[str, Any]] = Field(default_factory=list)


class ConversationFold:
    """Builder of a `ConversationState`: events of `_`, each identified by `id`, in order of sequence."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._messages: dict[str, MessageState] = {}
        self._responses: dict[str, ResponseState] = {}
        self._receipts: dict[str, dict[str, Any]] = {}
        self._recoveries: list[dict[str, Any]] = []

    def apply(self, event: ConversationEvent) -> Applied:
        """Apply an event; one with a known id changes nothing. Never answers Hole: `_` forms no chain. A body that lies
        stops nobody: it is listed among the recoveries as `corrupt`."""
        if event.id in self._seen:
            return Applied.DUPLICATE
        self._seen.add(event.id)
        try:
            self._take(event)
        except ValidationError:
            self._recoveries.append({"corrupt": event.type, "id": event.id, "at": event.at})
        return Applied.APPLIED

    def _take(self, event: ConversationEvent) -> None:
        match event.type:
            case ev.PROMPT_ADMITTED:
                admitted = ev.PromptAdmitted.model_validate(event.body)
                self._messages[admitted.request] = MessageState(at=event.at, **admitted.model_dump())
            case ev.RESPONSE_CREATED:
                created = ev.ResponseCreated.model_validate(event.body)
                self._responses[created.response] = ResponseState(
                    response=created.response,
                    request=created.request,
                    execution=created.execution,
                    agent=created.agent,
                    at=event.at,
                )
                if created.request in self._messages:
                    self._messages[created.request].response = created.response
            case ev.RESPONSE_FAILED:
                self._failed(ev.ResponseFailed.model_validate(event.body), event.at)
            case ev.RESPONSE_SUPERSEDED:
                superseded = ev.ResponseSuperseded.model_validate(event.body)
                if (response := self._responses.get(superseded.response)) is not None:
                    response.state, response.superseded_by = "superseded", superseded.by
            case ev.CONTROL_RECEIPT:
                self._receipts[str(event.body.get("control"))] = dict(event.body)
            case ev.RECOVERY:
                self._recoveries.append({**event.body, "at": event.at})

    def _failed(self, body: ev.ResponseFailed, at: int) -> None:
        error = {"code": body.code, "detail": body.detail, "retryable": body.retryable}
        response = body.response or f"{body.request}/failed"
        known = self._responses.get(response)
        if known is None:
            self._responses[response] = ResponseState(
                response=response, request=body.request, at=at, state="failed", error=error
            )
        else:
            known.state, known.error = "failed", error

    def freeze(self) -> ConversationState:
        return ConversationState(
            messages=[message.model_copy() for message in self._messages.values()],
            responses=[response.model_copy() for response in self._responses.values()],
            receipts=dict(self._receipts),
            recoveries=list(self._recoveries),
        )
