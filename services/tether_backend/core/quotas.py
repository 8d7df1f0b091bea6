"""The arithmetic of an allowance: so many prompts a minute, all at once or spread. Pure.

Generic cell rate algorithm: one number, the time at which the bucket is whole again. A prompt moves it on by a minute's
share; where it would lie more than a minute ahead, the prompt is refused. The number is kept on the bus, so neither a
restart of a backend nor a second one gives anything twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MINUTE_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class Taken:
    """`whole_at_ms`: the number to be stored. `used`: of the allowance, this prompt included."""

    whole_at_ms: int
    used: int


@dataclass(frozen=True, slots=True)
class Refused:
    """`retry_after_ms`: until one more is allowed; `whole_at_ms`: until all of it is there again."""

    retry_after_ms: int
    whole_at_ms: int


def take(whole_at_ms: int, now_ms: int, per_minute: int) -> Taken | Refused:
    """One prompt. A stored time that lies further ahead than an allowance can (a clock that was put back, a limit that
    was raised) counts as an allowance that is just used up."""
    whole_at_ms = min(max(whole_at_ms, now_ms), now_ms + MINUTE_MS)
    # Rounded up: a minute's shares are never more than the limit.
    share_ms = -(-MINUTE_MS // per_minute)
    after_ms = whole_at_ms + share_ms
    if after_ms - now_ms > max(MINUTE_MS, share_ms):
        return Refused(after_ms - now_ms - max(MINUTE_MS, share_ms), whole_at_ms)
    return Taken(after_ms, used_of(after_ms, now_ms, per_minute))


def used_of(whole_at_ms: int, now_ms: int, per_minute: int) -> int:
    """Of an allowance, now."""
    ahead_ms = min(max(0, whole_at_ms - now_ms), MINUTE_MS)
    return min(per_minute, -(-ahead_ms * per_minute // MINUTE_MS))


def give_back(whole_at_ms: int, now_ms: int, per_minute: int) -> int:
    """What is stored where the prompt was not taken after all."""
    return max(now_ms, whole_at_ms - -(-MINUTE_MS // per_minute))
