"""Interactions: what the CLI asked a human, and who answered first.

    requested ──answer accepted──▶ answered(control) ──seen──▶ resolved{answered|denied}
        │                              └──withdrawn──▶ resolved{cancelled}
        └──withdrawn──▶ resolved{cancelled}        exit ──▶ resolved{expired}

The first accepted answer wins and stays the winner: a later one is refused by name, with the winner's control id.
No CLI keeps an interaction beyond its process.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from tether.events import INTERACTION_RESOLVED
from tether_collector.core.inputs import Draft

RESOLVED_MAX: Final = 1024  # remembered, to refuse late answers by name; older ones are `TARGET_UNKNOWN`


@dataclass(slots=True)
class Interaction:
    """`control`, `decision`: the winning answer's, once there is one."""

    interaction: str
    kind: str
    name: str
    tool: str | None
    asked_at_ms: int
    control: str | None = None
    decision: str | None = None


class Interactions:
    """Pending and recently resolved interactions."""

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        saved = saved or {"pending": [], "resolved": {}}
        self.pending: dict[str, Interaction] = {
            entry["interaction"]: Interaction(**entry) for entry in saved["pending"]
        }
        self._resolved: dict[str, str | None] = dict(saved["resolved"])

    def dump(self) -> dict[str, Any]:
        return {"pending": [asdict(entry) for entry in self.pending.values()], "resolved": self._resolved}

    def requested(self, body: dict[str, Any], at: int) -> None:
        key = body["interaction"]
        self.pending[key] = Interaction(key, body["kind"], body.get("name", ""), body.get("tool"), at)

    def settled_by(self, key: str) -> str | None:
        """The control that an answer to `key` comes too late for ("" where it was no control); None if open."""
        if entry := self.pending.get(key):
            return entry.control
        return (self._resolved[key] or "") if key in self._resolved else None

    def knows(self, key: str) -> bool:
        return key in self.pending or key in self._resolved

    def answered(self, key: str, control: str, decision: str) -> None:
        entry = self.pending[key]
        entry.control, entry.decision = control, decision

    def resolve(self, key: str, outcome: str, detail: str | None = None) -> tuple[list[Draft], Interaction | None]:
        """Close it. `answered` or `denied` without an answer of ours: the CLI went on by itself, so `cancelled`."""
        entry = self.pending.pop(key, None)
        if entry is None:
            return [], None
        if outcome in ("answered", "denied"):
            outcome = {None: "cancelled", "deny": "denied"}.get(entry.decision, outcome)
        self._resolved[key] = entry.control
        while len(self._resolved) > RESOLVED_MAX:
            del self._resolved[next(iter(self._resolved))]
        body: dict[str, Any] = {"interaction": key, "outcome": outcome}
        if entry.control is not None:
            body["control"] = entry.control
        if detail is not None:
            body["detail"] = detail
        return [Draft(INTERACTION_RESOLVED, body)], entry

    def expire_all(self) -> list[Draft]:
        drafts: list[Draft] = []
        for key in list(self.pending):
            drafts += self.resolve(key, "expired", "the process ended")[0]
        return drafts
