"""What an admission tells on the conversation's `_` subject, and a refusal: recorded, told, acked.

Each event has an id of its own, so it is there once, whoever tells it after whatever crash.
"""

from __future__ import annotations

from dataclasses import replace

from tether import events
from tether.errors import Code, Problem
from tether.events import Body, ConversationEvent
from tether.prompt import Done
from tether_router.core import steps
from tether_router.core.state import Admission, Phase, Step, record_of, write_request


def event_id(state: Admission, kind: str) -> str:
    """The message is told once, whatever the attempts; each attempt has a response of its own."""
    attempt = 1 if kind == events.PROMPT_ADMITTED else state.attempt
    return events.request_event_id(state.prompt.request_id, kind, attempt)


def append(state: Admission, phase: Phase, identity: str, kind: str, body: Body) -> Step:
    """Append the event. One that is there already is found by its id and not written again."""
    seen = state.seen
    assert seen is not None
    state = replace(state, phase=phase)
    event = ConversationEvent(
        id=identity,
        generation=max(seen.record.generation, seen.view.generation),
        at=state.at,
        type=kind,
        body=body.model_dump(mode="json", exclude_none=True),
    )
    return state, (steps.AppendEvent(event, seen.view.last_sequence, seen.view.seen.get(identity)),)


def tell_prompt(state: Admission) -> Step:
    prompt = state.prompt
    body = events.PromptAdmitted(
        request=prompt.request_id,
        prompt_sequence=state.sequence,
        content=[part.model_dump(mode="json") for part in prompt.content],
        into=None if state.into is None else state.into.response,
        into_execution=None if state.into is None else state.into.execution,
        author=prompt.author,
    )
    kind = events.PROMPT_ADMITTED
    return append(state, "telling_prompt", event_id(state, kind), kind, body)


def tell_admission(state: Admission) -> Step:
    """The owner record names this request: first what it has cut short, if it has, then the message."""
    cut = state.record.superseded
    if cut is None:
        return tell_prompt(state)
    kind = events.RESPONSE_SUPERSEDED
    body = events.ResponseSuperseded(request=cut.request, response=cut.response, by=state.target.response)
    identity = events.request_event_id(cut.request, kind, cut.attempt)
    return append(state, "telling_superseded", identity, kind, body)


def tell_response(state: Admission) -> Step:
    target = state.target
    body = events.ResponseCreated(
        request=state.prompt.request_id,
        response=target.response,
        response_generation=target.response_generation,
        execution=target.execution,
        execution_generation=target.execution_generation,
        agent=state.prompt.agent.kind,
    )
    kind = events.RESPONSE_CREATED
    return append(state, "telling_response", event_id(state, kind), kind, body)


def fail(state: Admission, failure: Problem) -> Step:
    """Recorded first, told then: who repeats the request gets the same answer."""
    state = replace(state, failure=failure)
    if state.recorded:
        return tell_failure(state)
    done = Done(status="failed", problem=failure)
    return write_request(state, "failing", record_of(state, "retryable" if failure.retryable else "done", done))


def failure_id(state: Admission) -> str:
    """Each attempt may fail, and a conflicting payload must not touch the original's events."""
    request, kind = state.prompt.request_id, events.RESPONSE_FAILED
    if state.failure is not None and state.failure.code is Code.REQUEST_CONFLICT:
        return f"{request}/{state.prompt.digest[:8]}/{kind}"
    return events.request_event_id(request, kind, state.attempt)


def tell_failure(state: Admission) -> Step:
    assert state.failure is not None
    body = events.ResponseFailed(
        request=state.prompt.request_id,
        code=state.failure.code.value,
        detail=state.failure.detail,
        retryable=state.failure.retryable,
    )
    return append(state, "telling_failure", failure_id(state), events.RESPONSE_FAILED, body)
