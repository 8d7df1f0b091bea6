"""What the execution machine knows besides its parts: plain facts, dumped as they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(slots=True)
class Facts:
    """`terminal`: how the last turn ended, None while one runs. `final`: the session was refused, nothing can follow.
    `outcome`, `error`: of `response.ended`, once it was made. `settled`: a turn that was owed is waited for no more."""

    ordinal: int = 1  # the last one given; 1 is the claim
    last_record: int = 0
    adapter_version: str = ""
    opening_begun: list[str] = field(default_factory=list)
    opening_done: list[str] = field(default_factory=list)
    opened_at_ms: int = 0
    replies: list[dict[str, Any]] = field(default_factory=list)  # of the adapter, not yet written: see `replies.py`
    first_line_seen: bool = False
    silence_told: bool = False
    stdin_closed: bool = False
    native_session: str | None = None
    resumable: bool = False
    turn: bool = False  # one runs: it was seen to begin, and its terminal line was not
    terminal: dict[str, Any] | None = None  # outcome, code, detail
    waiting_since_ms: int = 0  # the terminal line, or the last interjection after it
    final: bool = False
    background: int = 0
    owed: int = 0
    settled: bool = False
    outcome: str | None = None
    error: dict[str, Any] | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Status:
    """For the registration: `waiting` = a human is asked and has not answered."""

    state: Literal["starting", "running", "waiting", "exiting", "ended"]
    native_session: str | None
    resumable: bool
    pending: int
    outcome: str | None
    next_ordinal: int
    last_record: int
