"""The admission of one prompt, in one delivery: what is done next, given what was read and written so far.

    begin ─▶ ordering ──not the oldest──▶ Wait
               │oldest
             recalling ──done, older attempt──▶ Ack          ──other digest──▶ observing ─▶ telling_failure ─▶ Ack
               │new, or a retryable one again
             binding ──another workspace──▶ (failing)
               │                                           the order of an admission:
             opening          1  requests: open
               │◀─ open already (a crash, a wait)
             observing
               │  the record catches up with the log (following), and only then is it decided by:
               ├─ it names this request ───────────────────┐
               ├─ this execution is in the log, ended ─────┼──────────────────▶ completing
               ├─ idle ─▶ reading_origin ─▶ owning   2  owner: starting, with what it begins from
               │                             telling_superseded    what a takeover has cut short
               │                             telling_prompt     3  `prompt.admitted` on `_`
               │                             telling_response      `response.created` on `_`
               │                             commanding         4  command, with its ack
               │                             completing         5  requests: done
               │                             acking             6  Ack
               ├─ running ─▶ interjection ──delivered─▶ telling_prompt{into} ─▶ completing ─▶ Ack
               ├─ takeover wanted, or under way ─▶ takeover: owner `stopping`, a stop, its proof ─▶ idle, as above
               ├─ starting, exiting, stopping ─▶ Wait
               └─ refused ─▶ failing (requests: retryable | done) ─▶ telling_failure ─▶ Ack

How a prompt joins a running execution is in `core.interjection`, how it takes over in `core.takeover`. By mode:

    auto       interjection; where the execution takes none any more, and no end of it is logged, a takeover
    interject  interjection, or a refusal
    takeover   a takeover, in `starting` too
    In `exiting`, and in a `stopping` that is another's, every prompt waits.

What an execution begins from is fixed by the compare-and-set of step 2 and nowhere else: the generation, the native
session (none where the prompt's `resume` chose to do without it), the checkpoint reference, whether the history may
stand in for a session that does not exist, and up to where. What a drain or a takeover cut before its session could be
resumed is gone on with from the history, or fails where that may not stand in; never in a session that knows nothing.
So of two that would resume one wins, and a command that is
made again after a crash is the same.

Nothing is remembered between deliveries: each begins at the top, finds by the records and the log how far it was
taken before, by this router or another, and goes on there. Hence every id is derived from `(tenant, request,
attempt)`, compare-and-set comes first and its loser writes nothing but begins anew, and an outcome is in
`tether_requests` before anyone is told. As long as a prompt is unacked it is the oldest of its conversation, so no
later one overtakes it.

Unreachable (a full or missing stream, no answer from the bus) is a Wait at every step, never a failure: after the
first side effect only its continuation is right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, assert_never

from tether import events, ids, owner, subjects
from tether.control import StartCommand
from tether.errors import Code, problem
from tether.owner import OwnerRecord
from tether.prompt import Done, RequestRecord
from tether_router.core import interjection, steps, takeover
from tether_router.core.facts import Position, catch_up
from tether_router.core.state import (
    Admission,
    Step,
    do,
    observe,
    order,
    record_of,
    request_key,
    wait,
    write_owner,
    write_request,
)
from tether_router.core.steps import Input, Observation
from tether_router.core.telling import event_id, fail, tell_admission, tell_failure, tell_prompt, tell_response

RACES_MAX: Final = 8  # compare-and-sets lost in one delivery before the prompt is given back


def decide(state: Admission, event: Input) -> Step:
    """The next state and what to do for it; the effect's result is the next input. Pure."""
    match event:
        case steps.Begin():
            return order(state)
        case steps.OldestRead(sequence=sequence):
            return takeover.confirmed(state, sequence) if state.phase == "confirming" else _ordered(state, sequence)
        case steps.RequestRead(record=record, revision=revision):
            return _recalled(replace(state, request_revision=revision), record)
        case steps.Bound(workspace=workspace):
            return _bound(state, workspace)
        case steps.RequestWritten(revision=revision):
            return _request_written(replace(state, request_revision=revision))
        case Observation():
            return _observed(replace(state, seen=event))
        case steps.LaterRead(by=by):
            return _looked(state, by)
        case steps.PlaceTaken(full=full):
            return _read_origin(state) if full is None else wait(state, full, place=True)
        case steps.OriginRead():
            return _own(state, event)
        case steps.Resolved():
            return takeover.resolved(state, event)
        case steps.OwnerWritten(revision=revision):
            return _owner_written(state, revision)
        case steps.OwnerLost() | steps.Overtaken():
            return _begin_anew(state)
        case steps.EventStored(position=position):
            return _told(state, position)
        case steps.CommandStored():
            return _complete(state)
        case steps.ControlAnswered(reply=reply):
            if state.phase in ("asking", "interjecting"):
                return interjection.answered(state, reply)
            return takeover.answered(state, reply) if takeover.is_mine(state) else takeover.unblocked(state, reply)
        case steps.Unreachable(reason=reason):
            return wait(state, reason, changed=False)
        case _:
            assert_never(event)


def _begin_anew(state: Admission) -> Step:
    """Another wrote: what this delivery knows is old, perhaps even that its prompt is still there."""
    if state.races >= RACES_MAX:
        return wait(state, "others keep writing this conversation's records", changed=False)
    again = Admission(state.prompt, state.sequence, state.stored_at_ns, state.actor, state.at)
    again = replace(again, history_fallback=state.history_fallback, limited=state.limited)
    return order(replace(again, races=state.races + 1))


# --- 1: order, memory, workspace ---


def _ordered(state: Admission, oldest: int | None) -> Step:
    if oldest is None or oldest > state.sequence:
        return do(state, "acking", steps.Ack("gone"))  # settled by another while this delivery was on its way
    if oldest < state.sequence:
        return wait(state, "an older prompt of the conversation comes first", behind=True)
    return do(state, "recalling", steps.ReadRequest(request_key(state)))


def _recalled(state: Admission, record: RequestRecord | None) -> Step:
    prompt = state.prompt
    if record is None:
        return _bind(state)
    if record.digest != prompt.digest:
        detail = f"request {prompt.request_id} was made with another payload"
        return observe(replace(state, failure=problem(Code.REQUEST_CONFLICT, detail), recorded=True))
    opened_at = record.opened_at or record.updated_at
    marked_at = 0 if record.interjected_into is None else record.updated_at
    state = replace(
        state, attempt=record.attempt, mark=record.interjected_into, marked_at=marked_at, opened_at=opened_at
    )
    if record.state == "open":
        if prompt.attempt < record.attempt:
            return do(state, "acking", steps.Ack("older_attempt"))
        # An open request is continued as the attempt that it was opened as, wherever it was left.
        return observe(state)
    if record.state == "retryable" and prompt.attempt > record.attempt:
        return _bind(state)
    failed = record.done is not None and record.done.status == "failed"
    if failed and record.done is not None and record.prompt_sequence == state.sequence:
        # Recorded by a delivery of this very message, which may not have told it.
        return observe(replace(state, failure=record.done.problem, recorded=True))
    return do(state, "acking", steps.Ack("known"))


def _bind(state: Admission) -> Step:
    """A new attempt: nothing was done for it yet."""
    key = subjects.conversation_key(state.prompt.tenant, state.prompt.conversation)
    state = replace(state, attempt=state.prompt.attempt, mark=None, opened_at=state.at)
    return do(state, "binding", steps.Bind(key, state.prompt.workspace))


def _bound(state: Admission, workspace: str) -> Step:
    if workspace != state.prompt.workspace:
        detail = f"conversation {state.prompt.conversation} lives in another workspace"
        return observe(replace(state, failure=problem(Code.INVALID, detail), recorded=False))
    return write_request(state, "opening", record_of(state, "open", None))


def _request_written(state: Admission) -> Step:
    match state.phase:
        case "opening":
            return observe(state)
        case "marking":
            return interjection.send(state)
        case "failing":
            return tell_failure(replace(state, recorded=True))
        case _:
            return do(state, "acking", steps.Ack("interjected" if state.into is not None else "admitted"))


# --- where the conversation stands ---


def _observed(state: Admission) -> Step:
    seen = state.seen
    assert seen is not None
    if state.failure is not None:
        return fail(state, state.failure)
    changed = catch_up(repair(seen.record, seen, state), seen.facts)
    if changed != seen.record:
        return write_owner(state, "following", changed)
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


def _owner_written(state: Admission, revision: int) -> Step:
    seen = state.seen
    assert seen is not None
    state = replace(state, seen=replace(seen, revision=revision))
    match state.phase:
        case "following":
            # Read again: a repair names an execution whose log was not read, an end names the one before.
            return observe(state)
        case "taking_over":
            return takeover.confirm(state)
        case "giving_up":
            return takeover.gave_up(state)
        case "leaving":
            return do(state, "acking", steps.Ack("gone"))
        case _:
            return tell_admission(state)


def _place(state: Admission) -> Step:
    seen = state.seen
    assert seen is not None
    record, takes_over = seen.record, state.prompt.mode == "takeover"
    if record.state != "idle" and record.target is not None and record.target.execution == state.execution:
        return tell_admission(state)
    if record.buried(state.execution) or (seen.own is not None and not seen.own.empty):
        return _over(state)
    settled = interjection.settled_before(state)
    if settled is not None:
        return settled
    if record.deletion is not None:
        detail = f"conversation {state.prompt.conversation} was deleted; use another id"
        return fail(state, problem(Code.CONVERSATION_DELETED, detail, deletion=record.deletion))
    match record.state:
        case "idle":
            return takeover.look_for_later(state) if takes_over else _enter(state)
        case "running":
            return takeover.begin(state) if takes_over else interjection.join(state)
        case "starting":
            return takeover.begin(state) if takes_over else wait(state, "the conversation is starting")
        case "exiting":
            return wait(state, "the conversation is exiting")
        case "stopping":
            if takeover.is_mine(state):
                return takeover.go_on(state)
            return takeover.begin(state) if takes_over else takeover.unblock(state)
        case _:
            assert_never(record.state)


def _over(state: Admission) -> Step:
    """This attempt's execution has been and is in the log: nothing is started, the request keeps its answer."""
    seen = state.seen
    assert seen is not None
    cursor = seen.view.seen.get(event_id(state, events.RESPONSE_CREATED))
    return _complete(replace(state, cursor=cursor))


def _looked(state: Admission, by: str | None) -> Step:
    if by is not None:
        return takeover.superseded(state, by)
    return _enter(state) if state.record.state == "idle" else takeover.begin(state)


# --- 2: the owner ---


def _enter(state: Admission) -> Step:
    prompt = state.prompt
    if prompt.mode == "interject":
        detail = "no execution is active to interject into; send with mode auto under a new request id to start one"
        return fail(state, problem(Code.SESSION_STREAM_NOT_ACTIVE, detail))
    if state.limited:
        return do(state, "placing", steps.TakePlace(state.execution))
    return _read_origin(state)


def _read_origin(state: Admission) -> Step:
    seen, prompt = state.seen, state.prompt
    assert seen is not None
    may_lack = seen.record.native_session is not None or seen.record.cut
    may_need_history = prompt.resume == "history" or (
        prompt.resume is None and may_lack and state.history_fallback != "never"
    )
    key = subjects.checkpoint_key(prompt.tenant, prompt.workspace)
    return do(state, "reading_origin", steps.ReadOrigin(key, prompt.tenant, may_need_history))


def _own(state: Admission, origin: steps.OriginRead) -> Step:
    seen, prompt = state.seen, state.prompt
    assert seen is not None
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
        resume=prompt.resume,
        history_fallback=state.history_fallback,
        history_cut=origin.log_end,
        checkpoint_revision=_may_use(state, origin),
    )
    match owner.decide(seen.record, admit):
        case owner.Accepted(record=record):
            return write_owner(state, "owning", record)
        case owner.Ignored():
            return tell_admission(state)
        case owner.Denied(reason=reason):
            return wait(state, reason)


def _may_use(state: Admission, origin: steps.OriginRead) -> int:
    """The revision of the reference, if it is of this workspace, tells of this conversation, and leaves it to the
    generation that this admission would be; else 0."""
    reference, prompt = origin.reference, state.prompt
    if reference is None or (reference.tenant, reference.workspace) != (prompt.tenant, prompt.workspace):
        return 0
    known = {one.target.conversation for one in reference.executions} | set(reference.may_use)
    if prompt.conversation not in known or state.record.generation + 1 < reference.may_use.get(prompt.conversation, 0):
        return 0
    return origin.revision


# --- 3: the conversation's log ---


def _told(state: Admission, position: Position) -> Step:
    seen = state.seen
    assert seen is not None
    view = replace(seen.view, last_sequence=max(seen.view.last_sequence, position.sequence))
    state = replace(state, seen=replace(seen, view=view), cursor=position)
    match state.phase:
        case "telling_superseded":
            return tell_prompt(state)
        case "telling_failure":
            return do(state, "acking", steps.Ack("failed"))
        case "telling_response":
            return _command(state)
        case _:
            return _complete(state) if state.into is not None else tell_response(state)


# --- 4, 5: the command, the answer ---


def _command(state: Admission) -> Step:
    seen = state.seen
    assert seen is not None and seen.record.target is not None
    if seen.record.state != "starting":
        return _complete(state)  # its claim is in the log: the command has arrived
    return do(state, "commanding", steps.PublishCommand(_start(state, seen.record, seen.revision)))


def _start(state: Admission, record: OwnerRecord, revision: int) -> StartCommand:
    """The command that the record, once it is `starting`, and the prompt make: the same whoever makes it, and when."""
    prompt, target = state.prompt, state.target
    resumes = target.native_session is not None
    falls_back = resumes and record.fallback
    begins_cut = prompt.resume is None and record.begins_cut
    goes_on = record.checkpoint_generation == target.execution_generation
    return StartCommand(
        control=ids.control_id(prompt.tenant, prompt.request_id, "start", state.attempt),
        target=target,
        owner_revision=revision,
        request_id=prompt.request_id,
        attempt=state.attempt,
        content=prompt.content,
        agent=prompt.agent,
        resume_session=target.native_session,
        resume="history" if begins_cut else prompt.resume,
        fallback=record.fallback if begins_cut else True if falls_back else None,
        history_cut=record.history_cut if falls_back or begins_cut or prompt.resume == "history" else None,
        checkpoint_revision=record.checkpoint_revision if goes_on else None,
        continuation=prompt.continuation,
    )


def _complete(state: Admission) -> Step:
    position = state.cursor or Position(0, 0)
    done = Done(
        status="admitted" if state.into is None else "interjected",
        response=state.response if state.into is None else state.into.response,
        execution=state.execution if state.into is None else state.into.execution,
        cursor_sequence=position.sequence,
        cursor_stored_at_ns=position.stored_at_ns,
    )
    return write_request(state, "completing", record_of(state, "done", done))
