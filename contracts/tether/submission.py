"""What to do with a submitted prompt, given what `tether_requests` says of its request id. Pure: the backend's rule
over HTTP, the client's over NATS.

no record                    → Publish(1)
another payload              → Refuse(REQUEST_CONFLICT)
open                         → Wait
done                         → Admitted | Refuse, the same as the first time
retryable, attempt a         → Publish(a + 1); of an attempt that was published here: Refuse, may be tried again
"""

from __future__ import annotations

from dataclasses import dataclass

from tether.errors import Code, Problem, problem
from tether.prompt import Done, Prompt, RequestRecord


@dataclass(frozen=True, slots=True)
class Publish:
    attempt: int


@dataclass(frozen=True, slots=True)
class Wait:
    attempt: int


@dataclass(frozen=True, slots=True)
class Admitted:
    done: Done
    attempt: int


@dataclass(frozen=True, slots=True)
class Refuse:
    problem: Problem


Decision = Publish | Wait | Admitted | Refuse


def decide(record: RequestRecord | None, prompt: Prompt, *, published: int = 0) -> Decision:
    """`published`: the attempt that this caller has published already, 0 for none."""
    if record is None:
        return Wait(published) if published else Publish(1)
    if record.digest != prompt.digest:
        return Refuse(
            problem(
                Code.REQUEST_CONFLICT,
                "request_id: was used with another payload; take a new id for a new request",
                request_id=prompt.request_id,
            )
        )
    if record.attempt < published:
        return Wait(published)
    match record.state:
        case "open":
            return Wait(record.attempt)
        case "retryable":
            if published < record.attempt:
                return Publish(record.attempt + 1)
            return Refuse(_failure(record, retryable=True))
        case "done":
            if record.done is not None and record.done.status != "failed":
                return Admitted(record.done, record.attempt)
            return Refuse(_failure(record, retryable=False))


def _failure(record: RequestRecord, *, retryable: bool) -> Problem:
    if record.done is not None and record.done.problem is not None:
        return record.done.problem
    code = Code.RUNTIME_UNAVAILABLE if retryable else Code.REQUEST_SUPERSEDED
    return problem(code, "the request came to nothing", retryable=retryable)
