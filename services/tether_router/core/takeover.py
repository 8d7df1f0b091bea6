"""A prompt takes the conversation from the execution that has it: one stop, its proof in the log, then an admission.

    begin ──a later takeover waits──▶ failing: REQUEST_SUPERSEDED
      │
    resolving ──no sandbox, another identity, no capability──▶ failing: retryable, nothing was touched
      │
    taking_over      owner: stopping, with the stop's control id and the prompt that waits
      │
    confirming ──not the oldest any more──▶ leaving (owner as before) ─▶ Ack
      │
    stopping         the stop, to the whole target; its reply is a hint
      ├─ taken, no answer ─▶ Wait ─▶ (the next look) go_on
      ├─ not now ──────────▶ Wait, until STOP_ANSWER_S is over
      └─ refused ──────────▶ giving_up (owner as before) ─▶ failing: retryable

    go_on  the record names this attempt's stop; the log does not say the end
      ├─ nothing is claimed ──────▶ Wait: the agent service puts the end where the claim would be
      ├─ the log has its receipt ─▶ Wait, until STOP_PROOF_S is over
      └─ asking_stop (`receipt`)
           ├─ taken ──────▶ Wait, until STOP_PROOF_S is over
           ├─ not known ──▶ resolving_again ─▶ stopping
           └─ no answer ──▶ Wait; STOP_ANSWER_S over ─▶ giving_up, owner stays `stopping` ─▶ failing: STOP_UNCONFIRMED

`execution.ended` with proof moves the record to idle (`core.facts`), and the admission goes on as any other does. No
other answer ends a takeover, so there is never a second writer. Whoever continues, on this router or another, has the
same control id (of the request and its attempt), so the collector stops once.

A failed takeover leaves the old execution the owner. A stop that was refused or has never arrived did nothing, and the
collector takes none that the owner record does not name: the record goes back to what it was, and a late copy of the
stop is void. One that nobody could confirm may yet take effect: the record stays `stopping`, named after it, and
`unblock` finds out for the next prompt what became of it. The next takeover stops under its own id; a collector joins
the two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, assert_never

from tether import owner
from tether.control import ControlReply
from tether.errors import Code, Problem, problem
from tether.ids import ExecutionTarget
from tether.limits import STOP_ANSWER_S, STOP_PROOF_S, STOP_REPLY_S
from tether_router.core import steps
from tether_router.core.state import Admission, Step, control, do, subject, wait, write_owner
from tether_router.core.telling import fail

# `taken`: the collector has it, the log will tell. `later`: refused for now. `gone`: the execution has ended there, so
# the log will tell. `not_known`: the collector never had it. `refused`: it is not to be had, `problem` says why.
Standing = Literal["taken", "gone", "later", "not_known", "unknown", "refused"]
_TAKEN: Final = ("accepted", "delivered", "settled")
_PASSING: Final = frozenset({Code.DRAINING, Code.RUNTIME_UNAVAILABLE, Code.LEASE_NOT_READY})
_AGAIN: Final = "nothing was started; send again to try once more"


@dataclass(frozen=True, slots=True)
class Verdict:
    standing: Standing
    problem: Problem | None = None


def judge(reply: ControlReply | None, *, asked: bool) -> Verdict:
    """What a collector's answer to a stop, or (`asked`) to the question for its receipt, means."""
    if reply is None:
        return Verdict("unknown")
    given = reply.problem
    if asked and given is not None and given.code is Code.NOT_FOUND:
        return Verdict("not_known")
    if reply.status in _TAKEN:
        return Verdict("taken")
    if reply.status == "unknown":
        return Verdict("unknown")
    if given is None:
        return Verdict("refused", problem(Code.STOP_UNCONFIRMED, "the stop was refused without a reason"))
    if given.code is Code.SESSION_STREAM_NOT_ACTIVE:
        return Verdict("gone")
    return Verdict("later" if given.code in _PASSING else "refused", given)


# --- the decision ---


def look_for_later(state: Admission) -> Step:
    """Only a takeover supersedes, and only a takeover that was not admitted is superseded before it is."""
    return do(state, "looking", steps.ReadLater(subject(state), state.sequence, state.prompt.request_id))


def superseded(state: Admission, by: str) -> Step:
    detail = f"request {by} takes the conversation over, and was sent after this one"
    return fail(state, problem(Code.REQUEST_SUPERSEDED, detail, by=by))


def begin(state: Admission) -> Step:
    """The record names an execution in `starting`, `running`, or in a `stopping` that no prompt waits for."""
    if state.prompt.mode == "takeover" and state.phase != "looking":
        return look_for_later(state)
    return do(state, "resolving", steps.Resolve(state.target, state.claimed))


def resolved(state: Admission, event: steps.Resolved) -> Step:
    if state.phase == "resolving_again":
        return _resolved_again(state, event)
    if event.problem is not None:
        return _fail(state, event.problem)
    state = replace(state, resolved=event.target)
    record = state.record
    if record.state == "stopping" and record.stop_control is not None:
        given_up = owner.decide(record, owner.StopUnconfirmed(record.stop_control, state.at))
        record = given_up.record if isinstance(given_up, owner.Accepted) else record
    take = owner.TakeOver(state.target.execution, state.stop, state.prompt.request_id, state.at)
    match owner.decide(record, take):
        case owner.Accepted(record=changed):
            return write_owner(state, "taking_over", changed)
        case owner.Ignored():
            return go_on(state)
        case owner.Denied(reason=reason):
            return wait(state, reason)


def confirm(state: Admission) -> Step:
    """The prompt is still there: a router that slept before its write has perhaps failed it long ago elsewhere."""
    return do(state, "confirming", steps.ReadOldest(subject(state)))


def confirmed(state: Admission, oldest: int | None) -> Step:
    if oldest == state.sequence:
        if not state.claimed:
            return wait(state, "the start that is taken over is not settled yet")
        return _send(state, state.resolved or state.target)
    decision = owner.decide(state.record, owner.StopRefused(state.stop, state.at))
    assert isinstance(decision, owner.Accepted)
    return write_owner(state, "leaving", decision.record)


# --- the stop ---


def is_mine(state: Admission) -> bool:
    """The record is `stopping` for this attempt."""
    record = state.record
    waits = record.pending_request == state.prompt.request_id
    return record.state == "stopping" and waits and record.stop_control == state.stop


def go_on(state: Admission) -> Step:
    """A look at a takeover under way, by the router that began it or another."""
    if not state.claimed:
        return wait(state, "the start that is taken over is not settled yet")
    assert state.facts is not None
    if state.facts.receipts.get(state.stop) in _TAKEN:
        return _await_proof(state)
    return do(state, "asking_stop", steps.AskReceipt(control(state, state.stop, "receipt")))


def _send(state: Admission, target: ExecutionTarget) -> Step:
    return do(state, "stopping", steps.SendControl(control(state, state.stop, "stop", target=target), STOP_REPLY_S))


def _resolved_again(state: Admission, event: steps.Resolved) -> Step:
    if event.problem is None:
        return _send(state, event.target)
    if event.problem.code is Code.RUNTIME_UNAVAILABLE:
        return _later(state, event.problem)
    return _give_up(state, event.problem, refused=True)


def answered(state: Admission, reply: ControlReply | None) -> Step:
    verdict = judge(reply, asked=state.phase == "asking_stop")
    match verdict.standing:
        case "taken" | "gone":
            return _await_proof(state)
        case "later":
            return _later(state, verdict.problem)
        case "not_known":
            return do(state, "resolving_again", steps.Resolve(state.target, claimed=True))
        case "unknown":
            if _is_over(state, STOP_ANSWER_S):
                return _give_up(state, problem(Code.STOP_UNCONFIRMED, "nobody answers for the stop"), refused=False)
            return wait(state, "it is not known whether the stop has arrived")
        case "refused":
            assert verdict.problem is not None
            return _give_up(state, verdict.problem, refused=True)
        case _:
            assert_never(verdict.standing)


def _later(state: Admission, why: Problem | None) -> Step:
    if why is not None and _is_over(state, STOP_ANSWER_S):
        return _give_up(state, why, refused=True)
    return wait(state, "the stop is not taken yet")


def _await_proof(state: Admission) -> Step:
    if _is_over(state, STOP_PROOF_S):
        detail = f"the stop was taken, and for {STOP_PROOF_S:g} s no proof of the end has come"
        return _give_up(state, problem(Code.STOP_UNCONFIRMED, detail), refused=False)
    return wait(state, "the execution is being stopped")


def _is_over(state: Admission, bound_s: float) -> bool:
    """Counted from the decision, or from the start that it met."""
    since = max(state.record.stopping_since, state.facts.started_at if state.facts is not None else 0)
    return state.at - since >= bound_s * 1000


# --- failures: the owner record first, so that a request that may be tried again finds it free ---


def _give_up(state: Admission, why: Problem, *, refused: bool) -> Step:
    stop = state.stop
    event = owner.StopRefused(stop, state.at) if refused else owner.StopUnconfirmed(stop, state.at)
    decision = owner.decide(state.record, event)
    if not isinstance(decision, owner.Accepted):
        return _fail(state, why)
    return write_owner(replace(state, failure=why), "giving_up", decision.record)


def gave_up(state: Admission) -> Step:
    assert state.failure is not None
    return _fail(state, state.failure)


def _fail(state: Admission, why: Problem) -> Step:
    detail = f"the takeover failed: {why.detail}; {_AGAIN}"
    return fail(state, why.model_copy(update={"detail": detail, "retryable": True}))


# --- a stop whose prompt waits no more ---


def unblock(state: Admission) -> Step:
    """Another prompt meets a `stopping` that was not confirmed: only if the stop never arrived does the execution go
    on; else its end is waited for."""
    control_id = state.record.stop_control
    if control_id is None or not state.claimed:
        return _as_before(state, control_id or "")
    assert state.facts is not None
    if state.facts.receipts.get(control_id) in _TAKEN:
        return wait(state, "the conversation is stopping")
    return do(state, "asking_stop", steps.AskReceipt(control(state, control_id, "receipt")))


def unblocked(state: Admission, reply: ControlReply | None) -> Step:
    if judge(reply, asked=True).standing == "not_known":
        return _as_before(state, state.record.stop_control or "")
    return wait(state, "the conversation is stopping")


def _as_before(state: Admission, control_id: str) -> Step:
    decision = owner.decide(state.record, owner.StopRefused(control_id, state.at))
    if isinstance(decision, owner.Accepted):
        return write_owner(state, "following", decision.record)
    return wait(state, "the conversation is stopping")
