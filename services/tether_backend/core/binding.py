"""Whether a projection may go on where it was, or must begin anew. Pure; its shell is `tether_backend.projector`.

    everything proven                           → fast: the consumer continues at its ack floor
    no number in the bucket                     → FIRST             a new database, or the bucket was lost
    the bucket's number is ahead                → DATABASE_OLDER    an older copy of the database was put back
    no consumer                                 → CONSUMER_GONE     deleted, or it went with its stream
    another message at the place, or none yet   → POSITION_CHANGED  the log was made anew or put back
    nothing at the place any more               → EVICTED           what came since may be gone as well

A number alone proves nothing of the log, nor a place of the database: a position is no identity, so the bucket keeps
the tag of the message that was applied last, and whoever starts finds that very message or begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pydantic import BaseModel, ConfigDict

from tether.cursor import Cursor, Standing


class Noted(BaseModel):
    """`tether_projections/{database}.{tenant}.{shard}`. `sequence`, `tag`: the youngest message that was applied."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    number: int = 0
    sequence: int = 0
    tag: int = 0

    @property
    def place(self) -> Cursor:
        return Cursor(self.sequence, tag=self.tag)


class Doubt(Enum):
    """Why nothing is proven."""

    FIRST = "first"
    DATABASE_OLDER = "database_older"
    CONSUMER_GONE = "consumer_gone"
    POSITION_CHANGED = "position_changed"
    EVICTED = "evicted"


@dataclass(frozen=True, slots=True)
class Evidence:
    """`database`: its batch number; `told`: the bucket's, None where it has none; `place`: what the log says of it."""

    database: int
    told: int | None
    consumer: bool
    place: Standing


def doubt_of(evidence: Evidence) -> Doubt | None:
    """None where the fast path is proven."""
    if evidence.told is None:
        return Doubt.FIRST
    if evidence.told > evidence.database:
        return Doubt.DATABASE_OLDER
    if not evidence.consumer:
        return Doubt.CONSUMER_GONE
    if evidence.place is Standing.CHANGED:
        return Doubt.POSITION_CHANGED
    return Doubt.EVICTED if evidence.place is Standing.EVICTED else None
