"""A prompt joins a running execution: what is sent, and what a collector's answers and the log mean for the prompt.

    join ─▶ marking      requests: the execution into which it goes     (the mark, written before anything is sent)
              │◀─ marked already (a crash, a wait): asking
              ▼
            interjecting ──delivered──────────▶ joined: `prompt.admitted{into}`
              │          ──pending, later─────▶ Wait
              │          ──inactive───────────▶ a takeover (`core.takeover`)
              │          ──refused────────────▶ failed: SESSION_BUSY, SESSION_STREAM_NOT_ACTIVE
              └─unknown─▶ asking (`receipt`) ──not known──▶ interjecting

An interjection has one control id, derived from the request and its attempt, so whoever sends it again sends the
same thing. No answer is no outcome: the receipt is asked for before anything else is done.

From the mark on the text may have reached the agent, whatever the router knows. When the marked execution has ended,
its log decides (`settled_before`): a receipt says how it went; none in a log that is whole means that nothing arrived,
and the prompt is one of its own; none in a log whose tail is not known means that nobody can tell, and the user is
told so. Run again, it might be run twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, assert_never

from tether.control import ControlReply, InterjectPayload
from tether.errors import Code, Problem, problem
from tether.limits import RECOVERY_WAIT_S
from tether_router.core import steps, takeover
from tether_router.core.state import Admission, Step, control, do, record_of, wait, write_request
from tether_router.core.telling import fail, tell_prompt

# `pending`: the collector has it, the CLI not yet. `later`: not now, and what the log says next decides (the response
# has ended, the sandbox drains, the record lags). `recovering`: the collector does not know the execution's state yet.
# `inactive`: it takes no message any more, and no end is in sight. `not_known`: the collector never had it. `unknown`:
# it may or may not have reached the CLI.
Standing = Literal["delivered", "pending", "later", "recovering", "inactive", "not_known", "unknown", "refused"]

# Refusals that pass: nothing was done, and the execution's own log will tell how it goes on.
_PASSING: Final = frozenset(
    {Code.DRAINING, Code.RUNTIME_UNAVAILABLE, Code.LEASE_NOT_READY, Code.TARGET_STALE, Code.TARGET_UNKNOWN}
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`problem` where the standing is refused: what the sender is told."""

    standing: Standing
    problem: Problem | None = None


UNANSWERED = Verdict("unknown")


def judge(reply: ControlReply | None, *, asked: bool, forced: bool) -> Verdict:
    """`asked`: the reply is to `receipt`. `forced`: the prompt's mode is `interject`, so the sender is told that
    nothing is active, where `auto` takes over or waits for the end."""
    if reply is None:
        return UNANSWERED
    code = None if reply.problem is None else reply.problem.code
    if asked and code is Code.NOT_FOUND:
        return Verdict("not_known")  # whatever status the answer to the question has
    match reply.status:
        case "delivered" | "settled":
            return Verdict("delivered")
        case "accepted":
            return Verdict("pending")
        case "unknown":
            return Verdict("unknown")
        case "rejected":
            return _rejected(reply.problem, forced=forced)


def _rejected(given: Problem | None, *, forced: bool) -> Verdict:
    detail = "the execution that is active cannot take a message now"
    advice = "wait for its end, or send with mode takeover under a new request id"
    if given is None:
        return Verdict("refused", problem(Code.SESSION_BUSY, f"{detail}; {advice}", retryable=True))
    if given.code in _PASSING:
        return Verdict("recovering" if given.context.get("recovering") is True else "later")
    if given.code is Code.SESSION_STREAM_NOT_ACTIVE:
        if given.context.get("ended") is True:
            return Verdict("later")  # its response has ended: the end is near, and no takeover would hasten it
        return Verdict("refused", given) if forced else Verdict("inactive")
    detail += f" ({given.code}: {given.detail}); {advice}"
    return Verdict("refused", problem(Code.SESSION_BUSY, detail, retryable=True))


# --- steps ---


def settled_before(state: Admission) -> Step | None:
    """What an interjection that was sent came to, as far as the log of its execution tells; None: nothing, or it is
    still to be found out from the collector."""
    seen = state.seen
    if state.mark is None or seen is None or seen.marked is None:
        return None
    facts, owns = seen.marked, seen.record.target is not None and seen.record.target.execution == state.mark
    status = facts.receipts.get(state.interjection)
    if status in ("delivered", "settled") and facts.target is not None:
        return tell_prompt(replace(state, into=facts.target))
    if owns and facts.ended is None:
        return None
    if status == "unknown":
        detail = "the execution ended before it was known whether the message had reached it; look, then send again"
        return fail(state, problem(Code.RUNTIME_UNAVAILABLE, detail, retryable=True))
    if status is None and (facts.ended is None or not facts.ended.whole):
        detail = (
            "the end of the execution that got the message is not in the log, so it is not known whether the message "
            "had reached it; look at what was done, then send again"
        )
        return fail(state, problem(Code.EXECUTION_DURABILITY_GAP, detail, retryable=True))
    return None


def join(state: Admission) -> Step:
    if state.mark == state.target.execution:
        return do(state, "asking", steps.AskReceipt(control(state, state.interjection, "receipt")))
    state = replace(state, mark=state.target.execution, marked_at=0)
    return write_request(state, "marking", record_of(state, "open", None))


def send(state: Admission) -> Step:
    payload = InterjectPayload(request=state.prompt.request_id, content=state.prompt.content)
    request = control(
        state, state.interjection, "interject", payload.model_dump(mode="json"), target=state.record.target
    )
    return do(replace(state, sent=True), "interjecting", steps.SendControl(request))


def answered(state: Admission, reply: ControlReply | None) -> Step:
    forced = state.prompt.mode == "interject"
    verdict = judge(reply, asked=state.phase == "asking", forced=forced)
    match verdict.standing:
        case "delivered":
            return tell_prompt(replace(state, into=state.target))
        case "pending":
            return wait(state, "the interjection is on its way")
        case "later":
            return wait(state, "the execution takes no message now")
        case "recovering":
            # From the mark on: before, the prompt waited for something else, for as long as that took.
            since = state.marked_at or state.at
            if not forced and state.at - since >= RECOVERY_WAIT_S * 1000:
                return takeover.begin(state)
            return wait(state, "the execution is being recovered")
        case "inactive":
            return takeover.begin(state)
        case "not_known":
            if state.sent:
                return wait(state, "the interjection has not arrived")
            return send(state)
        case "unknown":
            if state.phase == "interjecting":
                return do(state, "asking", steps.AskReceipt(control(state, state.interjection, "receipt")))
            return wait(state, "it is not known whether the interjection has arrived")
        case "refused":
            assert verdict.problem is not None
            return fail(state, verdict.problem)
        case _:
            assert_never(verdict.standing)
