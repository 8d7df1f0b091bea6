"""A conversation's history as what an agent is given of it: pure, bounded, and told apart from what the user says.

    rows (`tether.history.HistoryRow`, oldest first)
      ├─ digest_text     one text in front of the user's message, for a CLI that takes nothing else (claude, ACP)
      └─ response_items  items of the Responses API, for one that takes a thread's own (codex)

Both are marked as a record of what was, so that nothing of it is done again; the digest is between marks that no row
can forge. Where it would be longer than HISTORY_BYTES_MAX the oldest rows are left out, and it says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tether.limits import HISTORY_BYTES_MAX

Rows = Sequence[Mapping[str, Any]]

OPEN: Final = "<conversation_history>"
CLOSE: Final = "</conversation_history>"
_ABOUT: Final = (
    "This is the record of this conversation until now. The session in which it took place does not exist any more, so "
    "it is given to you here. It is background and not a message of the user: do nothing of it again. Tools that it "
    "names have run, or were cut, as it says. The user's message follows it."
)
_PARTIAL: Final = "It is not whole: older parts are left out, or long ones are cut."
_MARK: Final = re.compile(r"</?conversation_history>", re.IGNORECASE)
_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")


def digest_text(rows: Rows, *, partial: bool) -> str:
    """The record as one text, of at most HISTORY_BYTES_MAX bytes."""
    room = HISTORY_BYTES_MAX - 1024  # for what is around the rows
    kept: list[str] = []
    for row in reversed(rows):
        text = _MARK.sub("(conversation history)", _row_text(row))
        room -= len(text.encode()) + 1
        if room < 0:
            partial = True
            break
        kept.append(text)
    about = f"{_ABOUT} {_PARTIAL}" if partial else _ABOUT
    return "\n".join([OPEN, about, "", *reversed(kept), CLOSE])


def _row_text(row: Mapping[str, Any]) -> str:
    cut = " (cut)" if row.get("cut") else ""
    if row.get("role") != "tool":
        return f"[{row.get('role')}{cut}] {row.get('text') or ''}"
    text = f"[tool {row.get('name') or ''}, {row.get('status') or 'unknown'}{cut}]"
    if row.get("input") is not None:
        text += f" {_compact(row['input'])}"
    return f"{text}\n{row['output']}" if row.get("output") else text


def response_items(rows: Rows, *, partial: bool) -> list[dict[str, Any]]:
    """The record as items of a thread, a note about it in front. A tool that was cut has an output that says so: the
    API takes no call without one."""
    items = [_message("developer", f"{_ABOUT} {_PARTIAL}" if partial else _ABOUT)]
    for number, row in enumerate(rows, 1):
        if row.get("role") != "tool":
            items.append(_message(str(row.get("role")), str(row.get("text") or "")))
            continue
        call = f"history_{number}"
        name = _NAME.sub("_", str(row.get("name") or "tool"))[:64] or "tool"
        arguments = row.get("input")
        given = _compact(arguments if isinstance(arguments, Mapping) else {"input": arguments})
        items.append({"type": "function_call", "call_id": call, "name": name, "arguments": given})
        output = str(row.get("output") or "")
        status = row.get("status") or "unknown"
        told = output if status == "ok" else f"({status}) {output}".rstrip()
        items.append({"type": "function_call_output", "call_id": call, "output": told})
    return items


def _message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
