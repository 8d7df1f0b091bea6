"""Interactions: what the CLI asked a human, and who answered first.

    requested ──answer accepted──▶ answered(control) ──seen──▶ resolved{answered|denied}
        │                              └──withdrawn──▶ resolved{cancelled}
        └──withdrawn──▶ resolved{cancelled}        exit ──▶ resolved{expired}

The first accepted answer wins and stays the winner: a later one is refused by name, with the winner's control id.
No CLI keeps an interaction beyond its process. An answer that was given, and of which it is not known that it reached
its tool, is *unapplied* when the process ends. It is never given again by itself: if the resumed session asks the same
(the same tool with the same input, the same questions), the answer is offered with that, once, and the log says so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from tether.events import INTERACTION_RESOLVED
from tether_collector.core.inputs import Draft

UNAPPLIED_MAX: Final = 16  # answers that are kept for a resumed session, the newest
RESOLVED_MAX: Final = 1024  # remembered, to refuse late answers by name; older ones are `TARGET_UNKNOWN`


@dataclass(slots=True)
class Interaction:
    """`control`, `decision`, `answer`: the winning answer's, once there is one; `answer` is its payload without the
    interaction. `asked`: what tells the same question again."""

    interaction: str
    kind: str
    name: str
    tool: str | None
    asked_at_ms: int
    control: str | None = None
    decision: str | None = None
    asked: str = ""
    answer: dict[str, Any] | None = None


def asked_of(body: Mapping[str, Any]) -> str:
    """Digest of what is asked: equal for the same tool with the same input, and for the same questions."""
    parts = [body.get("kind"), body.get("name", ""), body.get("input"), body.get("questions")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Interactions:
    """Pending and recently resolved interactions."""

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        saved = saved or {"pending": [], "resolved": {}}
        self.pending: dict[str, Interaction] = {
            entry["interaction"]: Interaction(**entry) for entry in saved["pending"]
        }
        self._resolved: dict[str, str | None] = dict(saved["resolved"])
        self.unapplied: list[dict[str, Any]] = list(saved.get("unapplied", ()))
        self._offers: dict[str, dict[str, Any]] = dict(saved.get("offers", {}))

    def dump(self) -> dict[str, Any]:
        return {
            "pending": [asdict(entry) for entry in self.pending.values()],
            "resolved": self._resolved,
            "unapplied": self.unapplied,
            "offers": self._offers,
        }

    def offer(self, unapplied: Sequence[Any]) -> None:
        """What an earlier process of the session left unapplied."""
        for one in unapplied[-UNAPPLIED_MAX:]:
            asked, answer = (one.get("asked"), one.get("answer")) if isinstance(one, Mapping) else (None, None)
            if isinstance(asked, str) and isinstance(answer, Mapping):
                self._offers[asked] = {"control": one.get("control"), **answer}

    def requested(self, body: dict[str, Any], at: int) -> dict[str, Any] | None:
        """Open it. The answer that was given before, where the same is asked again."""
        key, asked = body["interaction"], asked_of(body)
        self.pending[key] = Interaction(key, body["kind"], body.get("name", ""), body.get("tool"), at, asked=asked)
        return self._offers.pop(asked, None)

    def settled_by(self, key: str) -> str | None:
        """The control that an answer to `key` comes too late for ("" where it was no control); None if open."""
        if entry := self.pending.get(key):
            return entry.control
        return (self._resolved[key] or "") if key in self._resolved else None

    def knows(self, key: str) -> bool:
        return key in self.pending or key in self._resolved

    def answered(self, key: str, control: str, answer: Mapping[str, Any]) -> None:
        """`answer`: the payload; its decision is the winning one."""
        entry = self.pending[key]
        entry.control, entry.decision = control, answer["decision"]
        entry.answer = {name: value for name, value in answer.items() if name != "interaction" and value}

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
        for key, entry in list(self.pending.items()):
            if entry.answer is not None:
                left = {"asked": entry.asked, "answer": entry.answer, "control": entry.control}
                self.unapplied = [*self.unapplied, left][-UNAPPLIED_MAX:]
            drafts += self.resolve(key, "expired", "the process ended")[0]
        return drafts
