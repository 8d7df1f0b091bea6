"""Is the end of an execution still in the log? Looked at after each reconnect, in between, and at every start. Pure.

    the subject's last message is the end, or a later frame       ─▶ THERE
    another frame of it, of an earlier ordinal                    ─▶ PUT_BACK   its tail is gone
    no message left
        the stream ends before the end was stored, and what the
        conversation told before is still there, as is its owner  ─▶ PUT_BACK   an older copy of the store came back
        anything else                                             ─▶ DELETED    purged, or beyond its retention

A stream's sequences only grow, and a purge leaves them as they are. So a stream that ends before a sequence at which
something was stored is another one than before: an older copy of itself, or one that was deleted and made anew. The
conversation's own events tell these apart: the older copy still has those of before the execution's end. What was
deleted on purpose leaves at least one of the signs out, and what was once found deleted is never put back.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    THERE = "there"
    PUT_BACK = "put_back"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class End:
    """An end as it was stored: its frame's last ordinal and sequence; `at` in unix milliseconds."""

    execution: str
    ordinal: int
    sequence: int
    at: int


@dataclass(frozen=True, slots=True)
class Remains:
    """What is to be seen where an execution's subject is empty. `stream_end`: the stream's last sequence.
    `conversation_at`: when the conversation's last own event was stored (unix ms), None where there is none.
    `owned`: the conversation has an owner record."""

    stream_end: int
    conversation_at: int | None
    owned: bool


def judge_frame(end: End, last_ordinal: int) -> Verdict:
    """The subject's last frame reaches `last_ordinal`."""
    return Verdict.THERE if last_ordinal >= end.ordinal else Verdict.PUT_BACK


def judge_empty(end: End, remains: Remains) -> Verdict:
    rewound = remains.stream_end < end.sequence
    same_stream = remains.conversation_at is not None and remains.conversation_at <= end.at
    return Verdict.PUT_BACK if rewound and same_stream and remains.owned else Verdict.DELETED
