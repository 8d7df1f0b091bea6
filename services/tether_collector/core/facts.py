"""What the execution machine knows besides its parts: plain facts, dumped as they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(slots=True)
class Facts:
    """`terminal`: how the last turn ended, None while one runs. `final`: the session was refused, nothing can follow.
    `outcome`, `error`: of `response.ended`, once it was made. `settled`: a turn that was owed is waited for no more.
    `discarded`: the agent is in another session than it was told to resume; what it does there is not the answer."""

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
    cli_version: str | None = None
    discarded: bool = False
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
    tools: dict[str, str] = field(default_factory=dict)  # that run, id → name
    interrupted: list[str] = field(default_factory=list)  # names of those that a drain cut
    unheard: list[str] = field(default_factory=list)  # interjections that were not taken up before the process ended
    proof: dict[str, Any] | None = None  # of the end, while a drain holds it back
    released: dict[str, Any] | None = None  # what a drain says of the checkpoint
    unmeasured_bytes: int = 0  # of output since the state's size was looked at: see `bounds.py`


@dataclass(frozen=True, slots=True)
class Departure:
    """How the process left, once nothing of it is left. `drained`: a drain cut its response. `killed`: it had to be.
    `unheard`: controls of interjections that its agent was given and had not taken up."""

    outcome: str
    drained: bool
    killed: bool
    interrupted: tuple[str, ...]
    unheard: tuple[str, ...] = ()


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
    cli_version: str | None = None


def status_of(facts: Facts, *, alive: bool, again: bool, pending: int, unanswered: bool) -> Status:
    """`again`: one process is gone, or about to be, and the next one is being prepared."""
    state: Literal["starting", "running", "waiting", "exiting", "ended"] = "running"
    if facts.ended:
        state = "ended"
    elif again:
        state = "starting"
    elif facts.outcome is not None or not alive:
        state = "exiting"
    elif unanswered:
        state = "waiting"
    elif not facts.first_line_seen:
        state = "starting"
    return Status(
        state,
        facts.native_session,
        facts.resumable,
        pending,
        facts.outcome,
        facts.ordinal + 1,
        facts.last_record,
        facts.cli_version,
    )
