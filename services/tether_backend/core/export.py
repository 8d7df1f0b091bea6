"""A conversation's rows as material for an agent: the latest that fit, long fields cut and marked. Pure.

    turns (oldest first)   user: the prompt that began it, and those that joined it
                           assistant: completed text; tool: name, input, output, how it ended

Where within its turn a prompt that joined it came is not in the rows: they stand behind the first one.
Reasoning, and what subagents said, is left out: it was never said to the user, and its outcome is in what was. Rows are
counted and measured from the newest back, and what does not fit is left out at the old end: then it is `partial`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tether.history import HistoryRow
from tether.limits import HISTORY_BYTES_MAX, HISTORY_ROWS_MAX, KIB

TEXT_BYTES_MAX: Final = 16 * KIB  # of what was said
TOOL_BYTES_MAX: Final = 4 * KIB  # of a tool's input or output
ENVELOPE_BYTES: Final = 1 * KIB  # of the answer around its rows
MARK: Final = "\n… (cut)"
_ENDED: Final = frozenset({"ok", "error", "interrupted", "unknown"})


@dataclass(frozen=True, slots=True)
class Said:
    """A prompt. `at` in unix milliseconds."""

    at: int
    content: Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class Turn:
    """One response: the prompt that began it, those that joined it, and its execution's items in order. `missing`: of
    its items some are not in the projection."""

    prompt: Said | None
    joined: list[Said] = field(default_factory=list)
    items: Sequence[Mapping[str, Any]] = ()
    missing: bool = False


def rows_of(turns: Sequence[Turn], *, more: bool) -> tuple[list[HistoryRow], bool]:
    """(rows, partial). `more`: there are older turns than these."""
    room = HISTORY_BYTES_MAX - ENVELOPE_BYTES
    kept: list[HistoryRow] = []
    partial = more or any(turn.missing for turn in turns)
    for row in _newest_first(turns):
        room -= len(row.model_dump_json(exclude_none=True).encode()) + 1
        if room < 0 or len(kept) == HISTORY_ROWS_MAX:
            partial = True
            break
        kept.append(row)
    kept.reverse()
    return kept, partial or any(row.cut for row in kept)


def _newest_first(turns: Sequence[Turn]) -> Iterator[HistoryRow]:
    for turn in reversed(turns):
        said = [*([] if turn.prompt is None else [turn.prompt]), *turn.joined]
        yield from reversed([*map(_user, said), *_items(turn.items)])


def _user(said: Said) -> HistoryRow:
    texts = [str(part.get("text", "")) for part in said.content if part.get("type") == "text"]
    text, cut = _cut("\n".join(texts), TEXT_BYTES_MAX)
    return HistoryRow(role="user", text=text, cut=cut, at=said.at)


def _items(items: Sequence[Mapping[str, Any]]) -> Iterator[HistoryRow]:
    for item in items:
        if item.get("parent") is not None:
            continue
        if item.get("kind") == "text" and item.get("state") in ("completed", "partial"):
            text, cut = _cut(str(item.get("text") or ""), TEXT_BYTES_MAX)
            if text:
                whole = item.get("blob") is None
                yield HistoryRow(role="assistant", text=text, cut=cut or not whole)
        elif item.get("kind") == "tool" and item.get("state") in _ENDED:
            yield _tool(item)


def _tool(item: Mapping[str, Any]) -> HistoryRow:
    given, input_cut = _bounded(item.get("input"))
    output = item.get("output")
    told = output if isinstance(output, str) else "" if output is None else json.dumps(output, ensure_ascii=False)
    told, output_cut = _cut(told, TOOL_BYTES_MAX)
    return HistoryRow(
        role="tool",
        name=str(item.get("name") or ""),
        input=given,
        output=told or None,
        status=str(item.get("state")),
        cut=input_cut or output_cut or item.get("blob") is not None,
    )


def _bounded(value: Any) -> tuple[Any, bool]:
    """A tool's input as it was; where that is too long, the beginning of it as text."""
    if value is None:
        return None, False
    text = json.dumps(value, ensure_ascii=False)
    if len(text.encode()) <= TOOL_BYTES_MAX:
        return value, False
    return _cut(text, TOOL_BYTES_MAX)


def _cut(text: str, bytes_max: int) -> tuple[str, bool]:
    data = text.encode()
    if len(data) <= bytes_max:
        return text, False
    return data[:bytes_max].decode(errors="ignore") + MARK, True
