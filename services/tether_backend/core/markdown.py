"""A conversation's export for people: Markdown, piece by piece. Pure.

What an agent or a user wrote is theirs: their Markdown stays Markdown. What tools were given and gave back is fenced,
with a fence that is longer than any in it, so that nothing of it ends the fence. Names and ids of theirs are put into
code spans, where no character of them means anything.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any, Final, assert_never

from tether.export_format import ConversationExport, ExportedExecution, ExportedItem, ExportedMessage, ExportedResponse
from tether.export_format import ExportedNote as Note
from tether.fold_state import GapItem, InteractionItem, RawItem, SessionItem, TextItem, ToolItem

END: Final = "*End of the export.*\n"
_TICKS: Final = re.compile(r"`+")
_STATES: Final = {"error": "failed", "interrupted": "interrupted", "unknown": "outcome unknown", "running": "running"}


def time_of(at_ms: int | None) -> str:
    """In UTC, to the second."""
    if not at_ms:
        return "at an unknown time"
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def code(text: object) -> str:
    """A code span of any text, on one line."""
    line = " ".join(str(text).split())
    ticks = "`" * (max((len(found) for found in _TICKS.findall(line)), default=0) + 1)
    space = " " if line.startswith("`") or line.endswith("`") or not line else ""
    return f"{ticks}{space}{line}{space}{ticks}"


def fenced(text: str, language: str = "") -> str:
    """A fenced block of any text."""
    fence = "`" * max(3, max((len(found) for found in _TICKS.findall(text)), default=0) + 1)
    return f"{fence}{language}\n{text}{'' if text.endswith(chr(10)) else chr(10)}{fence}\n"


def head(export: ConversationExport) -> str:
    return (
        f"# Conversation {code(export.conversation)}\n\n"
        f"Workspace {code(export.workspace)}, exported {time_of(export.exported_at)}.\n"
    )


def message(entry: ExportedMessage) -> str:
    who = "User" if not entry.author else f"User {code(entry.author)}"
    joined = "" if entry.into is None else f", into response {code(entry.into)}"
    texts = [str(part["text"]) if "text" in part else fenced(_json(part), "json") for part in entry.content]
    return f"\n## {who}\n\n*{time_of(entry.at)}{joined}*\n\n" + "\n\n".join(texts).rstrip("\n") + "\n"


def response(entry: ExportedResponse) -> str:
    """Its head; the items of its execution follow, then `response_end`."""
    run = entry.execution
    agent = "Agent" if run is None or run.agent is None else f"Agent {code(run.agent)}"
    facts = [time_of(entry.at)]
    if run is not None and run.model:
        facts.append(f"model {code(run.model)}")
    told = f"\n## {agent}\n\n*{', '.join(facts)}*\n"
    if entry.state == "superseded":
        told += "\n> Superseded by another message.\n"
    if entry.error is not None:
        told += f"\n> Failed: {code(entry.error.get('code', ''))} {_line(entry.error.get('detail', ''))}\n"
    return told


def response_end(run: ExportedExecution) -> str:
    facts = []
    if run.outcome not in (None, "completed"):
        facts.append(f"Ended: {run.outcome}.")
    if run.error is not None:
        facts.append(f"Failed: {code(run.error.get('code', ''))} {_line(run.error.get('detail', ''))}.")
    if run.partial:
        facts.append("Something of this response is missing.")
    read = sum(one.input_tokens + one.cache_read_tokens + one.cache_write_tokens for one in run.usage)
    written = sum(one.output_tokens for one in run.usage)
    costs = [one.cost_usd for one in run.usage if one.cost_usd is not None]
    if read or written:
        cost = f", {sum(costs):.4f} USD" if costs else ""
        facts.append(f"{read} tokens read, {written} written{cost}.")
    return f"\n*{' '.join(facts)}*\n" if facts else ""


def item(entry: ExportedItem) -> str:
    found = entry.item
    match found:
        case TextItem():
            return _text(found, entry)
        case ToolItem():
            return _tool(found, entry)
        case InteractionItem():
            return _interaction(found, entry)
        case SessionItem():
            lost = "" if found.from_session is None else f" in place of {code(found.from_session)}"
            return f"\n> A new session of the agent{lost}, with {found.rows} messages of the conversation.\n"
        case RawItem():
            return f"\nOutput on {code(found.stream)} that was not understood ({_line(found.why)}):\n\n" + fenced(
                entry.content or found.preview
            )
        case GapItem():
            where = "" if found.from_ordinal is None else f", events {found.from_ordinal} to {found.to_ordinal or '…'}"
            why = "" if not found.detail else f": {_line(found.detail)}"
            return f"\n> Something is missing here ({found.reason.replace('_', ' ')}{where}){why}\n"
        case _:
            assert_never(found)


def note(entry: Note) -> str:
    told = ", ".join(f"{name} {_line(_plain(value))}" for name, value in entry.body.items() if value is not None)
    return f"\n> {time_of(entry.at)}: {entry.type.replace('.', ' ')}{f' ({told})' if told else ''}\n"


def _text(found: TextItem, entry: ExportedItem) -> str:
    if found.state == "discarded":
        return ""
    text = (entry.content or found.text).rstrip("\n")
    if not text:
        return ""
    cut = "\n\n> Cut off here.\n" if found.state in ("partial", "streaming") else "\n"
    if found.kind == "reasoning":
        quoted = "\n".join(f"> {line}".rstrip() for line in text.splitlines())
        return f"\n> *Reasoning*\n>\n{quoted}{cut}{_missing(entry)}"
    return f"\n{text}{cut}{_missing(entry)}"


def _tool(found: ToolItem, entry: ExportedItem) -> str:
    state = _STATES.get(found.state, "")
    told = f"\n### Tool {code(found.name or found.id)}{f': {state}' if state else ''}\n"
    if found.input not in (None, "", {}):
        told += "\n" + _block(found.input)
    output = entry.content if entry.content is not None else found.output
    if output not in (None, ""):
        told += "\nOutput:\n\n" + _block(output)
    elif found.progress:
        told += "\nOutput so far:\n\n" + fenced(found.progress)
    if found.detail:
        told += f"\n> {_line(found.detail)}\n"
    return told + _missing(entry)


def _interaction(found: InteractionItem, entry: ExportedItem) -> str:
    asked = "Approval" if found.asks == "approval" else "Question"
    told = f"\n### {asked} {code(found.name or found.id)}: {found.state}\n"
    if found.description:
        told += f"\n{_line(found.description)}\n"
    for question in found.questions:
        told += f"\n- {_line(question.get('question', question.get('text', '')))}\n"
    if found.input not in (None, "", {}):
        told += "\n" + _block(entry.content if entry.content is not None else found.input)
    return told + _missing(entry)


def _missing(entry: ExportedItem) -> str:
    return "\n> The rest of it is not stored any more.\n" if entry.content_missing else ""


def _block(value: Any) -> str:
    return fenced(value) if isinstance(value, str) else fenced(_json(value), "json")


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _line(text: object) -> str:
    """On one line, so that it ends no quote."""
    return " ".join(str(text).split())
