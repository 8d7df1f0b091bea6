"""Places for running executions, of a tenant or of the whole set: who may have one. Pure.

    free ──take──▶ held by a conversation ──its owner record is idle──▶ free

A place is a conversation's, not an execution's: a takeover and the next prompt of the same conversation keep it. It is
taken before the owner record is written, so for YOUNG_MS an idle owner record says nothing about it; after that, and at
once where the record says that the very execution has ended, the place is free.

The record on the bus is the truth, written by compare-and-set: however many routers there are, and whichever of them
dies when, no more than the limit are held. What a dead router left held is freed by whoever finds no room (`doubtful`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tether.owner import OwnerRecord
from tether.quotas import Place, RunningRecord

YOUNG_MS: Final = 30_000  # from a place to its owner record: far beyond one delivery's writes


@dataclass(frozen=True, slots=True)
class Want:
    """`key`: the conversation's owner key. Limits: 0 is none; `workspace` is the prefix of its conversations' keys."""

    key: str
    execution: str
    at_ms: int
    limit: int
    workspace: str = ""
    workspace_limit: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """It has a place. `record`: to be written; None where nothing changes."""

    record: RunningRecord | None


@dataclass(frozen=True, slots=True)
class Full:
    """`scope` whose limit `value` is used up."""

    scope: str
    value: int


def free(record: RunningRecord, ended: Mapping[str, str]) -> RunningRecord:
    """Without the places that these conversations have for these executions."""
    held = {key: place for key, place in record.held.items() if ended.get(key) != place.execution}
    return record if len(held) == len(record.held) else record.model_copy(update={"held": held})


def still(record: RunningRecord, ended: Mapping[str, str]) -> dict[str, str]:
    """What of `ended` the record has not let go yet."""
    held = record.held
    return {key: execution for key, execution in ended.items() if key in held and held[key].execution == execution}


def take(record: RunningRecord, want: Want) -> Held | Full:
    held = record.held
    mine = held.get(want.key)
    if mine is not None and mine.execution == want.execution:
        return Held(None)
    if mine is None:
        if want.limit and len(held) >= want.limit:
            return Full("", want.limit)
        own = sum(key.startswith(want.workspace) for key in held) if want.workspace_limit else 0
        if want.workspace_limit and own >= want.workspace_limit:
            return Full("workspace", want.workspace_limit)
    place = Place(execution=want.execution, at=want.at_ms)
    return Held(record.model_copy(update={"held": {**held, want.key: place}, "limit": want.limit}))


def is_free(place: Place, owner: OwnerRecord, now_ms: int) -> bool:
    """What the conversation's owner record says of a place that it holds."""
    if owner.state != "idle":
        return False
    return owner.buried(place.execution) or now_ms - place.at > YOUNG_MS
