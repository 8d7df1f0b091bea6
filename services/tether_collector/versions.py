"""Which adapter version told which part of an execution: `adapters.json` beside its spool.

An entry `{version, after}` says that this version told what follows the ordinal `after`, up to the next entry's. It is
written before the first event of that version can be told, so a log never has events of a version that is not named.
Only what was told between a saved state and the log's end is read again; where all of that is the present version's
own, a replay makes the same ordinals as before, else events are matched by the spool position that the log names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tether.service import write_whole

FILE: Final = "adapters.json"
ENTRIES_MAX: Final = 64  # changes of one execution's adapter; then the oldest are put together


@dataclass(frozen=True, slots=True)
class Reading:
    """`version` told the events after the ordinal `after`."""

    version: str
    after: int


def load(folder: Path, first: str) -> list[Reading]:
    """In order; `first` is the version that the claim names."""
    try:
        found = json.loads((folder / FILE).read_bytes())
        return [Reading(str(entry["version"]), int(entry["after"])) for entry in found]
    except FileNotFoundError:
        return [Reading(first, 0)]
    except (ValueError, KeyError, TypeError):
        return [Reading("?", 0)]  # damaged: nothing is known of who told what, so nothing is taken for one's own


def begin(folder: Path, known: list[Reading], version: str, after: int) -> list[Reading]:
    """The present version goes on after this ordinal; on the medium when this returns."""
    if known[-1].version == version:
        return known
    changed = [*known, Reading(version, after)]
    if len(changed) > ENTRIES_MAX:
        changed = [Reading("?", 0), *changed[-(ENTRIES_MAX - 1) :]]
    data = [{"version": entry.version, "after": entry.after} for entry in changed]
    write_whole(folder / FILE, json.dumps(data).encode())
    return changed


def told_by_others(known: list[Reading], version: str, after: int, to: int) -> bool:
    """Whether another version told any of the ordinals `after + 1 .. to`."""
    for number, entry in enumerate(known):
        end = known[number + 1].after if number + 1 < len(known) else to
        if entry.version != version and entry.after < to and end > after:
            return True
    return False
