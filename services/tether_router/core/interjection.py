"""What a collector's answer to an interjection, or to the question for its receipt, means for the prompt.

An interjection has one control id, derived from the request and its attempt, so whoever sends it again sends the
same thing. No answer is no outcome: the receipt is asked for before anything else is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from tether.control import ControlReply
from tether.errors import Code, Problem, problem

# `pending`: the collector has it, the CLI not yet. `later`: not now, and what the log says next decides (the response
# has ended, the sandbox drains or recovers, the record lags). `not_known`: the collector never had it. `unknown`: it
# may or may not have reached the CLI.
Standing = Literal["delivered", "pending", "later", "not_known", "unknown", "refused"]

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


def judge(reply: ControlReply, *, asked: bool, forced: bool) -> Verdict:
    """`asked`: the reply is to `receipt`. `forced`: the prompt's mode is `interject`, so the sender is told that
    nothing is active, where `auto` waits for the end and is then a prompt of its own."""
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
    if given is None:
        return Verdict("refused", problem(Code.SESSION_BUSY, detail, retryable=True))
    if given.code in _PASSING:
        return Verdict("later")
    if given.code is Code.SESSION_STREAM_NOT_ACTIVE:
        # Ending, stopped or without stdin: there is an end to wait for, and no takeover that would hasten it.
        return Verdict("refused", given) if forced and given.context.get("ended") is not True else Verdict("later")
    detail += f" ({given.code}: {given.detail})"
    return Verdict("refused", problem(Code.SESSION_BUSY, detail, retryable=True))
