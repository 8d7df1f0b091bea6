"""Where one delivery of a prompt stands, and the writes that every part of an admission makes of it.

`Admission` is the state; `core.admission` is the machine, and `core.interjection`, `core.takeover` and `core.telling`
are its parts. A part takes a state and returns the next one with what to do for it (`Step`); the effect's result is
the machine's next input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from tether import ids, subjects
from tether.control import Authority, ControlRequest
from tether.errors import Problem
from tether.ids import ExecutionTarget
from tether.owner import OwnerRecord
from tether.prompt import Done, Prompt, RequestRecord
from tether_router.core import steps
from tether_router.core.facts import ExecutionFacts, Position
from tether_router.core.steps import Effect, Observation

Phase = Literal[
    "begin",
    "ordering",
    "recalling",
    "binding",
    "opening",
    "observing",
    "following",
    "looking",
    "placing",
    "reading_origin",
    "owning",
    "telling_superseded",
    "telling_prompt",
    "telling_response",
    "commanding",
    "marking",
    "asking",
    "interjecting",
    "resolving",
    "taking_over",
    "confirming",
    "asking_stop",
    "resolving_again",
    "stopping",
    "giving_up",
    "leaving",
    "failing",
    "telling_failure",
    "completing",
    "acking",
]

# When an execution whose native session does not exist may go on from the conversation's history.
HistoryFallback = Literal["takeover", "always", "never"]


@dataclass(frozen=True, slots=True)
class Admission:
    """Where a delivery stands. `actor` is this delivery's own (it makes operation ids); `at` its time, unix ms."""

    prompt: Prompt
    sequence: int
    stored_at_ns: int
    actor: str
    at: int
    phase: Phase = "begin"
    attempt: int = 1
    request_revision: int = 0
    opened_at: int = 0  # when this attempt was opened, unix ms
    mark: str | None = None  # the execution into which the prompt was sent, or is about to be
    marked_at: int = 0  # when an earlier delivery wrote the mark, unix ms
    seen: Observation | None = None
    resolved: ExecutionTarget | None = None  # to whom the stop goes
    sent: bool = False  # the interjection was sent in this delivery
    into: ExecutionTarget | None = None  # the running execution that the prompt joined
    cursor: Position | None = None
    failure: Problem | None = None
    recorded: bool = False  # the failure is in `tether_requests`, or must not be (a conflict)
    races: int = 0
    history_fallback: HistoryFallback = "takeover"
    limited: bool = False  # running executions are: one that begins needs a place

    @property
    def response(self) -> str:
        return ids.response_id(self.prompt.tenant, self.prompt.request_id, self.attempt)

    @property
    def execution(self) -> str:
        return ids.execution_id(self.prompt.tenant, self.prompt.request_id, self.attempt)

    @property
    def interjection(self) -> str:
        return ids.control_id(self.prompt.tenant, self.prompt.request_id, "interject", self.attempt)

    @property
    def stop(self) -> str:
        """The control id of the stop that this attempt's takeover sends."""
        return ids.control_id(self.prompt.tenant, self.prompt.request_id, "stop", self.attempt)

    @property
    def record(self) -> OwnerRecord:
        """The owner record as this delivery last saw or wrote it."""
        assert self.seen is not None
        return self.seen.record

    @property
    def facts(self) -> ExecutionFacts | None:
        """Of the execution that owns the conversation."""
        assert self.seen is not None
        return self.seen.facts

    @property
    def target(self) -> ExecutionTarget:
        """The execution that owns the conversation, which there is."""
        target = self.record.target
        assert target is not None
        return target

    @property
    def claimed(self) -> bool:
        """The log has something of the owning execution: a process of it is or was there."""
        return self.facts is not None and not self.facts.empty


Step = tuple[Admission, tuple[Effect, ...]]


def do(state: Admission, phase: Phase, effect: Effect) -> Step:
    return replace(state, phase=phase), (effect,)


def wait(state: Admission, reason: str, *, changed: bool = True, behind: bool = False, place: bool = False) -> Step:
    return state, (steps.Wait(reason, changed=changed, behind=behind, place=place),)


def op(state: Admission, name: str) -> str:
    """Of one write of one delivery: another router's equal write is another's."""
    return f"{state.actor}/{name}/{state.races}"


def subject(state: Admission) -> str:
    return subjects.prompt(state.prompt.tenant, state.prompt.workspace, state.prompt.conversation)


def owner_key(state: Admission) -> str:
    return subjects.owner_key(state.prompt.tenant, state.prompt.workspace, state.prompt.conversation)


def request_key(state: Admission) -> str:
    return subjects.request_key(state.prompt.tenant, state.prompt.request_id)


def order(state: Admission) -> Step:
    """The top of a delivery: only the oldest prompt of a conversation goes on."""
    return do(state, "ordering", steps.ReadOldest(subject(state)))


def observe(state: Admission) -> Step:
    return do(state, "observing", steps.Observe(owner_key(state), state.execution, state.mark))


def record_of(state: Admission, status: Literal["open", "done", "retryable"], done: Done | None) -> RequestRecord:
    prompt = state.prompt
    return RequestRecord(
        digest=prompt.digest,
        workspace=prompt.workspace,
        conversation=prompt.conversation,
        attempt=state.attempt,
        prompt_sequence=state.sequence,
        state=status,
        done=done,
        interjected_into=state.mark,
        opened_at=state.opened_at,
        updated_at=state.at,
    )


def write_request(state: Admission, phase: Phase, record: RequestRecord) -> Step:
    return do(state, phase, steps.WriteRequest(request_key(state), record, state.request_revision, op(state, phase)))


def write_owner(state: Admission, phase: Phase, record: OwnerRecord) -> Step:
    seen = state.seen
    assert seen is not None
    effect = steps.WriteOwner(owner_key(state), record, seen.revision, op(state, f"{phase}/{seen.revision}"))
    return replace(state, phase=phase, seen=replace(seen, record=record)), (effect,)


def control(
    state: Admission,
    identity: str,
    verb: Literal["interject", "stop", "receipt"],
    payload: dict[str, Any] | None = None,
    *,
    target: ExecutionTarget | None = None,
) -> ControlRequest:
    """A control of the router's, authorised by the owner record as this delivery saw it."""
    seen = state.seen
    assert seen is not None
    return ControlRequest(
        control=identity,
        verb=verb,
        target=target,
        authority=Authority(kind="owner", holder="router", token=seen.revision),
        payload=payload or {},
    )
