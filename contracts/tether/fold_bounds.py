"""What an item weighs in the fold of an execution: code points of its texts, and of the JSON that an agent put there.

The sum over a state's items follows from the state alone, so a fold that begins at a snapshot has the same bounds as
the one that made it."""

from __future__ import annotations

from typing import Any, Final

LIMIT_KEY: Final = "gap/limit-"  # items that tell of a bound
TOOL_CONTENT: Final = frozenset({"name", "input", "output", "detail", "parent", "blob"})
_NODE: Final = 8  # of a number, a name, a bracket
_ITEM: Final[dict[str, tuple[str, ...]]] = {
    "text": ("text",),
    "reasoning": ("text",),
    "tool": (*TOOL_CONTENT, "progress"),
    "interaction": ("name", "input", "tool", "description", "questions", "options", "offered"),
    "session": ("detail", "from_session"),
    "raw": ("preview", "why"),
    "gap": ("detail",),
}


def size(value: Any) -> int:
    """Code points of a JSON value, roughly: never less than its texts have. Its depth is bounded by who parsed it."""
    kind = type(value)
    if kind is str:
        return len(value)
    if value is None:
        return 0
    total = _NODE
    if kind is dict:
        for name, one in value.items():
            total += len(name) + (len(one) if type(one) is str else size(one))
    elif kind is list:
        total += len(value)
        for one in value:
            total += len(one) if type(one) is str else size(one)
    return total


def weight(item: Any) -> int:
    """Of an item of a state."""
    return sum(size(getattr(item, name)) for name in _ITEM[item.kind])
