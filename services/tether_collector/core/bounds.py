"""What is kept of a CLI that opens and never ends: tools, texts, questions, threads. Pure.

Adapters note whatever is open, and forget it once it has ended. A CLI that is broken, or that obeys hostile output, may
go on opening. So the oldest is given up where more than ENTRIES_MAX of a kind are open, or where all of it is larger
than STATE_BYTES_MAX, and the log says so:

    a tool        tool.completed{interrupted}, with the reason; its later lines are those of a tool that nobody knows
    a text        text.completed{partial}, of what had come
    a question    interaction.resolved{cancelled}; an answer to it comes too late

Of what makes no event of its own (messages, threads, tasks) the oldest is forgotten. What we have sent ourselves is
bounded where it is taken in, and never given up here. Size is measured after so much output, number after so many
records: both are of the inputs alone, so a replay gives up the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tether.events import TOOL_COMPLETED
from tether.limits import INTERACTIONS_OPEN_MAX, MIB
from tether_collector.core.adapters import segments
from tether_collector.core.inputs import Draft

ENTRIES_MAX: Final = 512  # of one kind: agents have a few dozen
LOOK_EVERY: Final = 64  # records
STATE_BYTES_MAX: Final = 8 * MIB
MEASURE_BYTES: Final = 8 * MIB  # of output between two measurements
ASKS_MAX: Final = min(255, INTERACTIONS_OPEN_MAX - 1)  # the next one is still within what readers keep
# Of any adapter's state: what a CLI's lines open.
_OPENED: Final = (
    *("segments", "tools", "asks", "messages", "tasks", "background", "begun", "ended", "changes", "children"),
    *("steered", "over"),
)


class GivenUp(NamedTuple):
    """`asks`: interactions that are withdrawn."""

    drafts: list[Draft]
    asks: list[str]


def give_up(state: Mapping[str, Any], entries_max: int, asks_max: int) -> GivenUp:
    """The oldest of each kind that is beyond its number, out of an adapter's state."""
    drafts: list[Draft] = []
    asks: list[str] = []
    for name in _OPENED:
        opened = state.get(name)
        most = asks_max if name == "asks" else entries_max
        if not isinstance(opened, dict | list) or len(opened) <= most:
            continue
        oldest = list(opened)[: len(opened) - most]
        if name == "segments":
            named = frozenset(oldest)
            drafts += segments.cut(state[name], lambda key, _entry, named=named: key in named)  # type: ignore[misc]
            continue
        if isinstance(opened, list):
            del opened[: len(oldest)]
            continue
        for key in oldest:
            del opened[key]
        if name == "tools":
            detail = f"given up: the agent has more than {most} tools open"
            drafts += [
                Draft(TOOL_COMPLETED, {"tool": key, "status": "interrupted", "detail": detail}) for key in oldest
            ]
        elif name == "asks":
            asks += oldest
    return GivenUp(drafts, asks)


def give_up_by_size(state: Mapping[str, Any]) -> GivenUp:
    """As much of what is open that the rest is within STATE_BYTES_MAX."""
    drafts: list[Draft] = []
    asks: list[str] = []
    most = ENTRIES_MAX
    while most and len(json.dumps(state)) > STATE_BYTES_MAX:
        most //= 4
        given_up = give_up(state, most, most)
        drafts += given_up.drafts
        asks += given_up.asks
    return GivenUp(drafts, asks)
