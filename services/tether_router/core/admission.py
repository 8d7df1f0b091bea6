"""The admission of one prompt, in one delivery: what is done next, given what was read and written so far.

    begin ─▶ ordering ──not the oldest──▶ Wait
               │oldest
             recalling ──done, older attempt──▶ Ack          ──other digest──▶ observing ─▶ telling_failure ─▶ Ack
               │new, or a retryable one again
             binding ──another workspace──▶ (failing)
               │                                           the order of an admission:
             opening          1  requests: open
               │◀─ open already (a crash, a wait): `resumed`
             observing ◀──────── compare-and-set lost, a later generation on `_`
               │  the record catches up with the log (following), and only then is it decided by:
               ├─ it names this request ───────────────────┐
               ├─ this execution is in the log, ended ─────┼──────────────────▶ completing
               ├─ idle ─▶ owning      2  owner: starting   │
               │                             telling_prompt     3  `prompt.admitted` on `_`
               │                             telling_response      `response.created` on `_`
               │                             commanding         4  command, with its ack
               │                             completing         5  requests: done
               │                             acking             6  Ack
               ├─ running ─▶ asking ─▶ interjecting ──delivered─▶ telling_prompt{into} ─▶ completing ─▶ Ack
               ├─ starting, exiting, stopping ─▶ Wait
               └─ refused ─▶ failing (requests: retryable | done) ─▶ telling_failure ─▶ Ack

Nothing is remembered between deliveries: each begins at the top, finds by the records and the log how far it was
taken before, by this router or another, and goes on there. Hence every id is derived from `(tenant, request,
attempt)`, compare-and-set comes first and its loser writes nothing, and an outcome is in `tether_requests` before
anyone is told. As long as a prompt is unacked it is the oldest of its conversation, so no later one overtakes it.

Unreachable (a full or missing stream, no answer from the bus) is a Wait at every step, never a failure: after the
first side effect only its continuation is right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal, assert_never

from tether import events, ids, owner, subjects
from tether.control import Authority, ControlRequest, InterjectPayload, StartCommand
from tether.errors import Code, Problem, problem
from tether.events import Body, ConversationEvent
from tether.ids import ExecutionTarget
from tether.owner import OwnerRecord
from tether.prompt import Done, Prompt, RequestRecord
from tether_router.core import steps
from tether_router.core.facts import Position, catch_up
from tether_router.core.interjection import Verdict
from tether_router.core.steps import Effect, Input, Observation

Phase = Literal[
    "begin",
    "ordering",
    "recalling",
    "binding",
    "opening",
    "observing",
    "following",
    "owning",
    "telling_prompt",
    "telling_response",
    "commanding",
    "asking",
    "interjecting",
    "failing",
    "telling_failure",
    "completing",
    "acking",
]
RACES_MAX: Final = 8  # compare-and-sets lost in one delivery before the prompt is given back


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
    resumed: bool = False  # the request was open before this delivery: what it did before must be found out
    seen: Observation | None = None
    sent: bool = False  # the interjection was sent in this delivery
    into: ExecutionTarget | None = None  # the running execution that the prompt joined
    cursor: Position | None = None
    failure: Problem | None = None
    recorded: bool = False  # the failure is in `tether_requests`, or must not be (a conflict)
    races: int = 0

    @property
    def response(self) -> str:
        return ids.response_id(self.prompt.tenant, self.prompt.request_id, self.attempt)

    @property
    def execution(self) -> str:
        return ids.execution_id(self.prompt.tenant, self.prompt.request_id, self.attempt)

    @property
    def interjection(self) -> str:
        return ids.control_id(self.prompt.tenant, self.prompt.request_id, "interject", self.attempt)


Step = tuple[Admission, tuple[Effect, ...]]


def decide(state: Admission, event: Input) -> Step:
    """The next state and what to do for it; the effect's result is the next input. Pure."""
    match event:
        case steps.Begin():
            prompt = state.prompt
            subject = subjects.prompt(prompt.tenant, prompt.workspace, prompt.conversation)
            return _do(state, "ordering", steps.ReadOldest(subject))
        case steps.OldestRead(sequence=sequence):
            return _ordered(state, sequence)
        case steps.RequestRead(record=record, revision=revision):
            return _recalled(replace(state, request_revision=revision), record)
        case steps.Bound(workspace=workspace):
            return _bound(state, workspace)
        case steps.RequestWritten(revision=revision):
            return _request_written(replace(state, request_revision=revision))
        case Observation():
            return _observed(replace(state, seen=event))
        case steps.OwnerWritten(revision=revision):
            return _owner_written(state, revision)
        case steps.OwnerLost() | steps.Overtaken():
            if state.races >= RACES_MAX:
                return state, (steps.Wait("others keep writing this conversation's records", changed=False),)
            return _observe(replace(state, races=state.races + 1))
        case steps.EventStored(position=position):
            return _told(state, position)
        case steps.CommandStored():
            return _complete(state)
        case steps.ControlAnswered(verdict=verdict):
            return _answered(state, verdict)
        case steps.Unreachable(reason=reason):
            return state, (steps.Wait(reason, changed=False),)
        case _:
            assert_never(event)


def _do(state: Admission, phase: Phase, effect: Effect) -> Step:
    return replace(state, phase=phase), (effect,)


def _op(state: Admission, name: str) -> str:
    """Of one write of one delivery: another router's equal write is another's."""
    return f"{state.actor}/{name}/{state.races}"


def _request_key(state: Admission) -> str:
    return subjects.request_key(state.prompt.tenant, state.prompt.request_id)


def _owner_key(state: Admission) -> str:
    return subjects.owner_key(state.prompt.tenant, state.prompt.workspace, state.prompt.conversation)


# --- 1: order, memory, workspace ---


def _ordered(state: Admission, oldest: int | None) -> Step:
    if oldest is None or oldest > state.sequence:
        return _do(state, "acking", steps.Ack("gone"))  # settled by another while this delivery was on its way
    if oldest < state.sequence:
        return state, (steps.Wait("an older prompt of the conversation comes first", behind=True),)
    return _do(state, "recalling", steps.ReadRequest(_request_key(state)))


def _recalled(state: Admission, record: RequestRecord | None) -> Step:
    prompt = state.prompt
    if record is None:
        return _bind(replace(state, attempt=prompt.attempt, resumed=False))
    if record.digest != prompt.digest:
        detail = f"request {prompt.request_id} was made with another payload"
        return _observe(replace(state, failure=problem(Code.REQUEST_CONFLICT, detail), recorded=True))
    state = replace(state, attempt=record.attempt)
    if record.state == "open":
        if prompt.attempt < record.attempt:
            return _do(state, "acking", steps.Ack("older_attempt"))
        # An open request is continued as the attempt that it was opened as, wherever it was left.
        return _observe(replace(state, resumed=True))
    if record.state == "retryable" and prompt.attempt > record.attempt:
        return _bind(replace(state, attempt=prompt.attempt, resumed=False))
    failed = record.done is not None and record.done.status == "failed"
    if failed and record.done is not None and record.prompt_sequence == state.sequence:
        # Recorded by a delivery of this very message, which may not have told it.
        return _observe(replace(state, failure=record.done.problem, recorded=True))
    return _do(state, "acking", steps.Ack("known"))


def _bind(state: Admission) -> Step:
    key = subjects.conversation_key(state.prompt.tenant, state.prompt.conversation)
    return _do(state, "binding", steps.Bind(key, state.prompt.workspace))


def _bound(state: Admission, workspace: str) -> Step:
    if workspace != state.prompt.workspace:
        detail = f"conversation {state.prompt.conversation} lives in another workspace"
        return _observe(replace(state, failure=problem(Code.INVALID, detail), recorded=False))
    return _write_request(state, "opening", _record(state, "open", None))


def _record(state: Admission, status: Literal["open", "done", "retryable"], done: Done | None) -> RequestRecord:
    prompt = state.prompt
    return RequestRecord(
        digest=prompt.digest,
        workspace=prompt.workspace,
        conversation=prompt.conversation,
        attempt=state.attempt,
        prompt_sequence=state.sequence,
        state=status,
        done=done,
        updated_at=state.at,
    )


def _write_request(state: Admission, phase: Phase, record: RequestRecord) -> Step:
    effect = steps.WriteRequest(_request_key(state), record, state.request_revision, _op(state, phase))
    return _do(state, phase, effect)


def _request_written(state: Admission) -> Step:
    if state.phase == "opening":
        return _observe(state)
    if state.phase == "failing":
        return _tell_failure(replace(state, recorded=True))
    return _do(state, "acking", steps.Ack("interjected" if state.into is not None else "admitted"))


# --- where the conversation stands ---


def _observe(state: Admission) -> Step:
    return _do(state, "observing", steps.Observe(_owner_key(state), state.execution))


def _observed(state: Admission) -> Step:
    seen = state.seen
    assert seen is not None
    if state.failure is not None:
        return _fail(state, state.failure)
    changed = catch_up(repair(seen.record, seen, state), seen.facts)
    if changed != seen.record:
        return _write_owner(state, "following", changed)
    return _place(state)


def repair(record: OwnerRecord, seen: Observation, state: Admission) -> OwnerRecord:
    """The record where `_` carries a later generation than it: the bucket lost its tail, the log did not."""
    if seen.view.generation <= record.generation:
        return record
    created, prompt, target, attempt = seen.view.created, state.prompt, None, 1
    if created is not None and created.execution_generation > record.generation:
        target = ids.ExecutionTarget(
            tenant=prompt.tenant,
            workspace=prompt.workspace,
            conversation=prompt.conversation,
            response=created.response,
            response_generation=created.response_generation,
            execution=created.execution,
            execution_generation=created.execution_generation,
            sandbox=ids.sandbox_id(prompt.tenant, prompt.workspace),
        )
        attempt = state.attempt if created.execution == state.execution else 1
    decision = owner.decide(
        record,
        owner.Repair(seen.view.generation, target, created.request if created else None, attempt, state.at),
    )
    return decision.record if isinstance(decision, owner.Accepted) else record


def _write_owner(state: Admission, phase: Phase, record: OwnerRecord) -> Step:
    seen = state.seen
    assert seen is not None
    effect = steps.WriteOwner(_owner_key(state), record, seen.revision, _op(state, f"{phase}/{seen.revision}"))
    return replace(state, phase=phase, seen=replace(seen, record=record)), (effect,)


def _owner_written(state: Admission, revision: int) -> Step:
    seen = state.seen
    assert seen is not None
    state = replace(state, seen=replace(seen, revision=revision))
    if state.phase == "following":
        # Read again: a repair names an execution whose log was not read, an end names the one before.
        return _observe(state)
    return _tell_prompt(state)


def _place(state: Admission) -> Step:
    seen = state.seen
    assert seen is not None
    record, prompt = seen.record, state.prompt
    if record.state != "idle" and record.target is not None and record.target.execution == state.execution:
        return _tell_prompt(state)
    if record.buried(state.execution) or (seen.own is not None and not seen.own.empty):
        return _over(state)
    settled = _interjected_before(state)
    if settled is not None:
        return settled
    match record.state:
        case "idle":
            return _enter(state)
        case "running":
            if prompt.mode == "takeover":
                return _fail(state, _no_takeover())
            return _interject(state)
        case "starting":
            if prompt.mode == "takeover":
                return _fail(state, _no_takeover())
            return state, (steps.Wait("the conversation is starting"),)
        case "exiting" | "stopping":
            return state, (steps.Wait(f"the conversation is {record.state}"),)
        case _:
            assert_never(record.state)


def _over(state: Admission) -> Step:
    """This attempt's execution has been and is in the log: nothing is started, the request keeps its answer."""
    seen = state.seen
    assert seen is not None
    cursor = seen.view.seen.get(_event_id(state, events.RESPONSE_CREATED))
    return _complete(replace(state, cursor=cursor))


def _no_takeover() -> Problem:
    detail = "this version does not take over from a running execution; stop it, or send with mode auto or interject"
    return problem(Code.CAPABILITY_MISSING, detail, retryable=True)


# --- 2: the owner ---


def _enter(state: Admission) -> Step:
    seen, prompt = state.seen, state.prompt
    assert seen is not None
    if prompt.mode == "interject":
        return _fail(state, problem(Code.SESSION_STREAM_NOT_ACTIVE, "no execution is active to interject into"))
    admit = owner.Admit(
        tenant=prompt.tenant,
        workspace=prompt.workspace,
        conversation=prompt.conversation,
        request=prompt.request_id,
        attempt=state.attempt,
        response=state.response,
        execution=state.execution,
        sandbox=ids.sandbox_id(prompt.tenant, prompt.workspace),
        prompt_sequence=state.sequence,
        prompt_stored_at_ns=state.stored_at_ns,
        # The rest of it is in the prompt, which stays stored until the command is: the record stays small.
        agent=prompt.agent.model_dump(mode="json", exclude_none=True, exclude={"args"}),
        at=state.at,
        log_base=seen.view.last_sequence,
    )
    match owner.decide(seen.record, admit):
        case owner.Accepted(record=record):
            return _write_owner(state, "owning", record)
        case owner.Ignored():
            return _tell_prompt(state)
        case owner.Denied(reason=reason):
            return state, (steps.Wait(reason),)


# --- 3: the conversation's log ---


def _event_id(state: Admission, kind: str) -> str:
    """The message is told once, whatever the attempts; each attempt has a response of its own."""
    attempt = 1 if kind == events.PROMPT_ADMITTED else state.attempt
    return events.request_event_id(state.prompt.request_id, kind, attempt)


def _append(state: Admission, phase: Phase, identity: str, kind: str, body: Body) -> Step:
    """Append the event, or go on at once where it is there already."""
    seen = state.seen
    assert seen is not None
    stored = seen.view.seen.get(identity)
    state = replace(state, phase=phase)
    if stored is not None:
        return _told(state, stored)
    event = ConversationEvent(
        id=identity,
        generation=max(seen.record.generation, seen.view.generation),
        at=state.at,
        type=kind,
        body=body.model_dump(mode="json", exclude_none=True),
    )
    return state, (steps.AppendEvent(event, seen.view.last_sequence),)


def _tell_prompt(state: Admission) -> Step:
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
    return _append(state, "telling_prompt", _event_id(state, kind), kind, body)


def _tell_response(state: Admission) -> Step:
    seen = state.seen
    assert seen is not None and seen.record.target is not None
    target = seen.record.target
    body = events.ResponseCreated(
        request=state.prompt.request_id,
        response=target.response,
        response_generation=target.response_generation,
        execution=target.execution,
        execution_generation=target.execution_generation,
        agent=state.prompt.agent.kind,
    )
    kind = events.RESPONSE_CREATED
    return _append(state, "telling_response", _event_id(state, kind), kind, body)


def _told(state: Admission, position: Position) -> Step:
    seen = state.seen
    assert seen is not None
    view = replace(seen.view, last_sequence=max(seen.view.last_sequence, position.sequence))
    state = replace(state, seen=replace(seen, view=view), cursor=position)
    if state.phase == "telling_failure":
        return _do(state, "acking", steps.Ack("failed"))
    if state.phase == "telling_response":
        return _command(state)
    return _complete(state) if state.into is not None else _tell_response(state)


# --- 4, 5: the command, the answer ---


def _command(state: Admission) -> Step:
    seen, prompt = state.seen, state.prompt
    assert seen is not None and seen.record.target is not None
    if seen.record.state != "starting":
        return _complete(state)  # its claim is in the log: the command has arrived
    command = StartCommand(
        control=ids.control_id(prompt.tenant, prompt.request_id, "start", state.attempt),
        target=seen.record.target,
        owner_revision=seen.revision,
        request_id=prompt.request_id,
        attempt=state.attempt,
        content=prompt.content,
        agent=prompt.agent,
        resume_session=seen.record.target.native_session,
    )
    return _do(state, "commanding", steps.PublishCommand(command))


def _complete(state: Admission) -> Step:
    position = state.cursor or Position(0, 0)
    done = Done(
        status="admitted" if state.into is None else "interjected",
        response=state.response if state.into is None else state.into.response,
        execution=state.execution if state.into is None else state.into.execution,
        cursor_sequence=position.sequence,
        cursor_stored_at_ns=position.stored_at_ns,
    )
    return _write_request(state, "completing", _record(state, "done", done))


# --- the prompt joins a running execution ---


def _interjected_before(state: Admission) -> Step | None:
    """What an earlier delivery's interjection came to, as far as the execution's own log tells."""
    seen = state.seen
    assert seen is not None
    facts = seen.facts or seen.previous
    if not state.resumed or facts is None:
        return None
    status = facts.receipts.get(state.interjection)
    if status in ("delivered", "settled") and facts.target is not None:
        return _tell_prompt(replace(state, into=facts.target))
    if status == "unknown" and facts.ended is not None:
        detail = "the execution ended before it was known whether the message had reached it"
        return _fail(state, problem(Code.RUNTIME_UNAVAILABLE, detail, retryable=True))
    return None


def _interject(state: Admission) -> Step:
    return _ask(state) if state.resumed else _send(state)


def _control(state: Admission, verb: Literal["interject", "receipt"], payload: dict[str, Any]) -> ControlRequest:
    seen = state.seen
    assert seen is not None
    return ControlRequest(
        control=state.interjection,
        verb=verb,
        target=seen.record.target if verb == "interject" else None,
        authority=Authority(kind="owner", holder="router", token=seen.revision),
        payload=payload,
    )


def _ask(state: Admission) -> Step:
    return _do(state, "asking", steps.AskReceipt(_control(state, "receipt", {})))


def _send(state: Admission) -> Step:
    payload = InterjectPayload(request=state.prompt.request_id, content=state.prompt.content)
    request = _control(state, "interject", payload.model_dump(mode="json"))
    return _do(replace(state, sent=True), "interjecting", steps.SendControl(request))


def _answered(state: Admission, verdict: Verdict) -> Step:
    seen = state.seen
    assert seen is not None and seen.record.target is not None
    match verdict.standing:
        case "delivered":
            return _tell_prompt(replace(state, into=seen.record.target))
        case "pending":
            return state, (steps.Wait("the interjection is on its way"),)
        case "later":
            return state, (steps.Wait("the execution takes no message now"),)
        case "not_known":
            if state.sent:
                return state, (steps.Wait("the interjection has not arrived"),)
            return _send(state)
        case "unknown":
            if state.phase == "interjecting":
                return _ask(state)
            return state, (steps.Wait("it is not known whether the interjection has arrived"),)
        case "refused":
            assert verdict.problem is not None
            return _fail(state, verdict.problem)
        case _:
            assert_never(verdict.standing)


# --- a refusal: recorded, told, acked ---


def _fail(state: Admission, failure: Problem) -> Step:
    state = replace(state, failure=failure)
    if state.recorded:
        return _tell_failure(state)
    done = Done(status="failed", problem=failure)
    return _write_request(state, "failing", _record(state, "retryable" if failure.retryable else "done", done))


def failure_id(state: Admission) -> str:
    """Each attempt may fail, and a conflicting payload must not touch the original's events."""
    request, kind = state.prompt.request_id, events.RESPONSE_FAILED
    if state.failure is not None and state.failure.code is Code.REQUEST_CONFLICT:
        return f"{request}/{state.prompt.digest[:8]}/{kind}"
    return events.request_event_id(request, kind, state.attempt)


def _tell_failure(state: Admission) -> Step:
    assert state.failure is not None
    body = events.ResponseFailed(
        request=state.prompt.request_id,
        code=state.failure.code.value,
        detail=state.failure.detail,
        retryable=state.failure.retryable,
    )
    return _append(state, "telling_failure", failure_id(state), events.RESPONSE_FAILED, body)
