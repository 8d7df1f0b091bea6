"""The deletion of one conversation: which step is taken next, by what its record says and what the last one came to.

    marking      the owner record refuses prompts and forgets what it names; with `force`, what runs is stopped first
       │         ── it runs, and no `force` ─▶ failed SESSION_BUSY: nothing was changed
    prompts      waiting prompts, and the commands of what has ended
       │
    sandbox      journal, spools, final snapshots, recovery material and the agents' own session files
       │         ── out of reach (asleep, gone, away) ─▶ gone on without; `volume` comes back to it
    checkpoints  the workspace's references and their blobs: each covers the whole sandbox, this conversation included.
       │         ── the volume is out of reach, and others have nothing but these ─▶ left to `volume`
    blobs        what the conversation's events refer to, and no other conversation's. Before the log, which names them
       │
    log          `conversation.deleted` is appended, then all before it is erased: whoever reads on learns why
       │
    records      quarantine, notifications
       │
    projections  each database has applied `conversation.deleted`; one that is away applies it when it is back
       │
    volume       only where `sandbox` was out of reach: until it is done. Then `checkpoints` … `projections` once more,
       │         for what was made meanwhile
     done ──at `free_at`──▶ freed: what came late is erased, the owner record goes, the id may be used again

No step may be followed by one that brings back what it deleted: prompts are refused before anything is erased, so
nothing starts; what runs has ended (its end in the log is the proof) before the mark is read as idle; the collector
forgets before the log is erased, so it puts no tail back, and a message that comes late after all was stored before
`free_at`, which readers refuse.

The record moves by compare-and-set after each step. Every step finds done what was done, so a router that is killed in
one, or two that carry the same deletion, erase the same again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, assert_never

from tether.deletion import FREE_AFTER_S, SESSIONS_MAX, DeletionRecord, Step
from tether.errors import Code, Problem, problem

CLOCKS_APART_S: Final = 60.0
PENDING_VOLUME: Final = "workspace volume"
NO_AGENT: Final = "no agent service answers"
PENDING_CHARS_MAX: Final = 200
PENDING_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Marked:
    """The owner record is idle, refuses prompts, and names no session any more. `sessions`: those that it named."""

    sessions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Busy:
    """An execution is active. `stopping`: it is being stopped, for `force`."""

    execution: str
    stopping: bool


@dataclass(frozen=True, slots=True)
class Erased:
    """What the step erased, by kind. `sequence`: of `conversation.deleted`, of the step `log`."""

    counts: Mapping[str, int] = field(default_factory=dict)
    sessions: tuple[str, ...] = ()
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class VolumeClean:
    """Nothing of the conversation is left on the workspace's volume."""

    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VolumeAway:
    """It could not be looked at; `why` says what has to happen."""

    why: str


@dataclass(frozen=True, slots=True)
class Behind:
    """These databases have not applied the deletion yet. `waited`: for as long as is waited for them."""

    databases: tuple[str, ...]
    waited: bool


@dataclass(frozen=True, slots=True)
class Reached:
    """Every database has."""


@dataclass(frozen=True, slots=True)
class Later:
    """The step has to wait for something that ends by itself."""

    why: str


Result = Later | Marked | Busy | Erased | VolumeClean | VolumeAway | Behind | Reached


def decide(record: DeletionRecord, result: Result, at: int) -> DeletionRecord:
    """What the record of a running deletion becomes; the same record where the step is to be tried again. Pure."""
    match result:
        case Marked(sessions=sessions):
            return _on(record, at, "prompts", sessions=_joined(record.sessions, sessions))
        case Busy(execution=execution, stopping=False):
            detail = f"execution {execution} is active; wait for its end, or delete with force"
            return _failed(record, at, problem(Code.SESSION_BUSY, detail, retryable=True, execution=execution))
        case Busy(execution=execution):
            return _pending(record, at, (f"the end of execution {execution}",))
        case Erased():
            return _erased(record, result, at)
        case Later(why=why):
            return _pending(record, at, (why[:PENDING_CHARS_MAX],))
        case VolumeClean(counts=counts):
            # Until now a sandbox could make what later steps may have erased before: a checkpoint, a snapshot's blob.
            erased = _sum(record.erased, counts)
            return _on(record, at, "checkpoints", erased=erased, volume_clean=True, pending_on=())
        case VolumeAway(why=why):
            away: tuple[str, ...] = (f"{PENDING_VOLUME}: {why}"[:PENDING_CHARS_MAX],)
            if record.step == "volume":
                return _pending(record, at, away)
            return _on(record, at, "checkpoints", pending_on=away)
        case Behind(databases=databases, waited=waited):
            pending = tuple(f"database {name}" for name in databases)[:PENDING_MAX]
            if not waited:
                return _pending(record, at, pending)
            return _end(record, at, pending)
        case Reached():
            return _end(record, at, ())
        case _:
            assert_never(result)


def free(record: DeletionRecord, at: int) -> DeletionRecord:
    """The id may be used again. Pure."""
    return record.model_copy(update={"state": "freed", "sessions": (), "updated_at": at})


def nobodys_until(record: DeletionRecord) -> int:
    """Until when messages of the conversation are nobody's, once its id is free: a little earlier than that, as the
    clock that stores what comes next may be behind ours. What came in between is erased, and was in no row. Pure."""
    return record.free_at - int(CLOCKS_APART_S * 1000)


def is_due(record: DeletionRecord, at: int) -> bool:
    """There is something to do for it now."""
    return record.state == "running" or (record.state == "done" and record.free_at <= at)


_NEXT: Final[dict[Step, Step]] = {
    "prompts": "sandbox",
    "checkpoints": "blobs",
    "blobs": "log",
    "log": "records",
    "records": "projections",
}


def _erased(record: DeletionRecord, result: Erased, at: int) -> DeletionRecord:
    return _on(
        record,
        at,
        _NEXT[record.step],
        erased=_sum(record.erased, result.counts),
        sessions=_joined(record.sessions, result.sessions),
        log_sequence=result.sequence or record.log_sequence,
        pending_on=() if record.volume_clean else record.pending_on,
    )


def _end(record: DeletionRecord, at: int, pending: tuple[str, ...]) -> DeletionRecord:
    if not record.volume_clean:
        kept = tuple(one for one in record.pending_on if one.startswith(PENDING_VOLUME))
        return _on(record, at, "volume", pending_on=(*kept, *pending)[:PENDING_MAX])
    return record.model_copy(
        update={
            "state": "done",
            "pending_on": pending,
            "updated_at": at,
            "ended_at": at,
            "free_at": at + int(FREE_AFTER_S * 1000),
        }
    )


def _failed(record: DeletionRecord, at: int, why: Problem) -> DeletionRecord:
    return record.model_copy(update={"state": "failed", "problem": why, "updated_at": at, "ended_at": at})


def _pending(record: DeletionRecord, at: int, pending: tuple[str, ...]) -> DeletionRecord:
    if record.pending_on == pending:
        return record
    return record.model_copy(update={"pending_on": pending, "updated_at": at})


def _on(record: DeletionRecord, at: int, step: Step, **changes: object) -> DeletionRecord:
    pending = {} if "pending_on" in changes or record.step not in ("marking", "volume") else {"pending_on": ()}
    return record.model_copy(update={"step": step, "updated_at": at, **pending, **changes})


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def _joined(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*one, *other)))[:SESSIONS_MAX]
