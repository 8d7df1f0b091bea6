"""Claude Code's terminal line of a turn: how it ended, and what it cost.

`usage` in the line is the turn's, but zero for an interrupted one; `total_cost_usd` and `modelUsage` are cumulative for
the session (2.1.332, carried over a resume) or for the process (2.1.197). `model_usage_since_last_result` (2.1.332) is
exact in all these cases and is what counts; without it: the turn's usage and the growth of the total.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tether import events as ev
from tether_collector.core import lines
from tether_collector.core.adapters import base as b
from tether_collector.core.inputs import Draft

MODEL_AUTH: Final = "model_auth"
MODEL_ERROR: Final = "model_error"
AGENT_ERROR: Final = "agent_error"
_NOT_FOUND: Final = re.compile(r"No conversation found with session ID|--resume requires a valid session")
_COUNTS: Final = (
    ("input_tokens", "inputTokens", "input_tokens"),
    ("output_tokens", "outputTokens", "output_tokens"),
    ("cache_read_tokens", "cacheReadInputTokens", "cache_read_input_tokens"),
    ("cache_write_tokens", "cacheCreationInputTokens", "cache_creation_input_tokens"),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`session_failed`: the CLI refused to resume; there was no turn."""

    ended: b.TurnEnded
    drafts: Sequence[Draft] = ()
    session_failed: str | None = None


def is_auth(error: Any, status: int) -> bool:
    """The model server refused the credentials."""
    return status in (401, 403) or error == "authentication_failed"


def refusal(state: dict[str, Any]) -> str:
    """What a refused key's owner has to know: which one it was. A state of an earlier release has no source."""
    return b.refused_key(state.get("key_source"))


def read(state: dict[str, Any], line: dict[str, Any]) -> Verdict | str:
    is_error = line.get("is_error")
    if not isinstance(is_error, bool):
        return "result without is_error"
    errors = line.get("errors")
    texts = [error for error in (errors if isinstance(errors, list) else []) if isinstance(error, str)]
    if is_error and not lines.count_of(line.get("num_turns")) and any(_NOT_FOUND.search(text) for text in texts):
        detail = lines.detail_of(texts[0]) or ""
        return Verdict(b.TurnEnded("failed", detail=detail), session_failed=detail)
    reason = lines.text_of(line.get("terminal_reason"), lines.NAME_CHARS)
    ended = _ended(state, line, reason, texts) if is_error else b.TurnEnded("completed")
    state["turns"] += 1
    turn = lines.id_of(line.get("uuid")) or f"turn-{state['turns']}"
    body: dict[str, Any] = {"turn": turn, "outcome": ended.outcome}
    if (told := ended.code or reason) is not None:
        body["reason"] = told
    if ended.detail is not None:
        body["detail"] = ended.detail
    if duration_ms := lines.count_of(line.get("duration_ms")):
        body["duration_ms"] = duration_ms
    return Verdict(ended, (Draft(ev.USAGE, _usage(state, line, turn)), Draft(ev.TURN_COMPLETED, body)))


def _ended(state: dict[str, Any], line: dict[str, Any], reason: str | None, errors: list[str]) -> b.TurnEnded:
    """Of a turn with is_error."""
    if reason is not None and reason.startswith("aborted"):
        return b.TurnEnded("interrupted")
    status = lines.count_of(line.get("api_error_status"))
    detail = lines.detail_of(line.get("result")) or lines.detail_of("; ".join(errors)) or None
    if state["auth"] or is_auth(line.get("error"), status):
        return b.TurnEnded("failed", MODEL_AUTH, f"{refusal(state)}{f': {detail}' if detail else ''}")
    if reason == "api_error" or status:
        return b.TurnEnded("failed", MODEL_ERROR, detail)
    return b.TurnEnded("failed", AGENT_ERROR, detail or lines.text_of(line.get("subtype")))


def _cost(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e9 else None


def _usage(state: dict[str, Any], line: dict[str, Any], turn: str) -> dict[str, Any]:
    body: dict[str, Any] = {"turn": turn}
    total = _cost(line.get("total_cost_usd"))
    since = line.get("model_usage_since_last_result")
    if isinstance(since, dict):
        models = {name: usage for name, usage in since.items() if isinstance(usage, dict)}
        for field, key, _ in _COUNTS:
            body[field] = sum(lines.count_of(usage.get(key)) for usage in models.values())
        costs = [cost for usage in models.values() if (cost := _cost(usage.get("costUSD"))) is not None]
        body["cost_usd"] = round(sum(costs), 9)
        if len(models) == 1:
            body["model"] = lines.text_of(next(iter(models)), lines.NAME_CHARS)
    else:
        usage = line.get("usage")
        for field, _, key in _COUNTS:
            body[field] = lines.count_of(usage.get(key)) if isinstance(usage, dict) else 0
        if total is not None:
            body["cost_usd"] = round(max(0.0, total - state["cost_usd"]), 9)
        model = state["bound"].get("model") if state["bound"] else None
        if model is not None:
            body["model"] = model
    if total is not None:
        state["cost_usd"] = total
    return body
