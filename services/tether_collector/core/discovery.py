"""Which executions a collector lists, in what order, and how the list is cut. Pure.

Every execution that lives is a candidate; of those that have ended the latest of each native session. What waits for a
human comes first, then what runs, then what has ended, the latest first. A page holds at most so many and so many
bytes; how many were left out is said, and `after` continues behind the last one. An execution that changes its place
between two pages may be met twice or not at all: who needs certainty asks for it by its target.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tether.errors import InvalidError
from tether.limits import DISCOVERY_BYTES_MAX, DISCOVERY_ENTRIES_MAX, DISCOVERY_RESERVED_BYTES
from tether.sandbox import ExecutionSummary

PAGE_BYTES: Final = DISCOVERY_BYTES_MAX - DISCOVERY_RESERVED_BYTES
_RANK: Final = {"waiting": 0, "running": 1, "starting": 2, "exiting": 3, "ended": 4}
_MARK: Final = re.compile(r"([0-4])\.(\d{1,18})\.([A-Za-z0-9_-]{1,64})")
_Key = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class Page:
    """`omitted`: how many candidates come after it, or are too large for any page. `next`: what continues it, None at
    the end."""

    entries: tuple[ExecutionSummary, ...]
    omitted: int
    next: str | None


def candidates(summaries: Sequence[ExecutionSummary]) -> list[ExecutionSummary]:
    """See the module. An ended execution whose native session nobody knows stands for itself."""
    latest: dict[tuple[str, str], ExecutionSummary] = {}
    found = []
    for one in summaries:
        target = one.target
        if one.state != "ended":
            found.append(one)
            continue
        session = (target.conversation, target.native_session or f"/{target.execution}")
        known = latest.get(session)
        if known is None or (known.started_at, known.target.execution) < (one.started_at, target.execution):
            latest[session] = one
    return [*found, *latest.values()]


def page(summaries: Sequence[ExecutionSummary], after: object = None) -> Page:
    """The first page, or the one that continues another's `next`. Raises InvalidError."""
    ordered = sorted(summaries, key=_key)
    if after is not None:
        behind = _parse(after)
        ordered = [entry for entry in ordered if _key(entry) > behind]
    room = PAGE_BYTES
    kept: list[ExecutionSummary] = []
    seen = 0
    for entry in ordered:
        size = len(entry.model_dump_json(exclude_none=True).encode()) + 1
        if size <= PAGE_BYTES:  # else no page would ever get beyond it
            if size > room or len(kept) == DISCOVERY_ENTRIES_MAX:
                break
            room -= size
            kept.append(entry)
        seen += 1
    more = None if seen == len(ordered) else _mark(ordered[seen - 1])
    return Page(tuple(kept), len(ordered) - len(kept), more)


def bounded(summaries: Sequence[ExecutionSummary]) -> tuple[tuple[ExecutionSummary, ...], int]:
    """Those that fit, in the order of their importance, and how many do not."""
    first = page(summaries)
    return first.entries, first.omitted


def _key(entry: ExecutionSummary) -> _Key:
    return _RANK[entry.state], -entry.started_at, entry.target.execution


def _mark(entry: ExecutionSummary) -> str:
    rank, started_at, execution = _key(entry)
    return f"{rank}.{-started_at}.{execution}"


def _parse(after: object) -> _Key:
    match = _MARK.fullmatch(after) if isinstance(after, str) else None
    if match is None:
        raise InvalidError("payload.after", "must be the `next` of an earlier page")
    return int(match[1]), -int(match[2]), match[3]
