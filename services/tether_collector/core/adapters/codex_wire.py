"""What all parts of the Codex adapter say the same way: ids, input, refusals by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tether_collector.core.adapters.jsonrpc import Dialect

RPC: Final = Dialect(version=False)
INITIALIZE: Final = "opening:initialize"
THREAD: Final = "reply:thread"
HISTORY: Final = "reply:history"
TURN: Final = "reply:turn"
CLEAN: Final = "clean:"
DENY: Final = "deny:"
DENIED: Final = "The user declined."

State = dict[str, Any]


def prompt_input(content: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A prompt's text parts as `UserInput`."""
    return [{"type": "text", "text": str(part["text"])} for part in content if part.get("type") == "text"]


def reply_id(state: State, purpose: str = "reply:") -> str:
    """The id of the adapter's next own write; counted, so a replay gives the same."""
    state["replies"] += 1
    return f"{purpose}{state['replies']}"
