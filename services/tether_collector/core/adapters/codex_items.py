"""Codex's items: messages, reasoning, and everything that the model did, which are tools here.

A tool is called what the CLI calls the item; one of an MCP server `server.tool`. What was declined is an error that
says so. A command that runs on after its turn (the model may leave one running) ends with the process: its tool was
ended with the turn, and its later completed item is no news.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tether import events as ev
from tether_collector.core import lines
from tether_collector.core.adapters import base as b
from tether_collector.core.adapters import segments as seg
from tether_collector.core.adapters.codex_wire import State
from tether_collector.core.inputs import Draft

Item = Mapping[str, Any]
_NOTHING: Final = b.Reading()
_TEXTS: Final = ("agentMessage", "plan")
# Known and without a meaning for the log; the reason is for whoever reads this.
IGNORED: Final[dict[str, str]] = {
    "userMessage": "our own prompt again; its beginning shows that it was taken up",
    "hookPrompt": "the user's own hooks",
    "functionCallOutput": "an output that a client put in; we put in none",
    "subAgentActivity": "a hint for a screen; the subagent's own items are told",
    "enteredReviewMode": "never asked for",
    "exitedReviewMode": "never asked for",
    "contextCompaction": "the model's context was compacted; nothing that was said changes",
    "sleep": "the model waits",
}
# item type → fields of it that are the tool's input
_INPUTS: Final[dict[str, tuple[str, ...]]] = {
    "commandExecution": ("command", "cwd"),
    "fileChange": ("changes",),
    "mcpToolCall": (),
    "dynamicToolCall": (),
    "collabAgentToolCall": ("prompt", "model", "receiverThreadIds"),
    "webSearch": ("query", "action"),
    "imageView": ("path",),
    "imageGeneration": ("revisedPrompt",),
}
_FAILED: Final = ("failed", "declined")
_ENDED_MAX: Final = 512  # tools that ended with their turn and whose own end is no news


def segment_of(state: State, item: str) -> str:
    """The segment of an item's text: its id, numbered where the item of this id began anew."""
    count = state["begun"].get(item, 1)
    return item if count <= 1 else f"{item}.{count}"


def started(state: State, item: Item, identifier: str, parent: str | None) -> b.Reading | str:
    kind = item.get("type")
    if kind in _TEXTS or kind == "reasoning":
        drafts = seg.discard(state["segments"], lambda _key, entry: bool(entry["group"] == identifier))
        state["begun"][identifier] = state["begun"].get(identifier, 0) + 1
        return b.Reading(drafts)
    if isinstance(kind, str) and kind in _INPUTS:
        if identifier in state["tools"]:
            return _NOTHING  # told before
        return b.Reading((_tool_started(state, item, kind, identifier, parent),))
    return _NOTHING if isinstance(kind, str) and kind in IGNORED else "unknown item"


def _tool_started(state: State, item: Item, kind: str, tool: str, parent: str | None) -> Draft:
    state["tools"][tool] = {"chars": 0, "parent": parent}
    if kind == "fileChange":
        state["changes"][tool] = item.get("changes")
    threads = item.get("receiverThreadIds") if kind == "collabAgentToolCall" else None
    for thread in threads if isinstance(threads, list) else ():
        if (child := lines.id_of(thread)) is not None:
            state["children"][child] = tool
    body = {"tool": tool, "name": _name(item, kind), "input": _input(item, kind)}
    return Draft(ev.TOOL_STARTED, body if parent is None else {**body, "parent": parent})


def _name(item: Item, kind: str) -> str:
    told = item.get("tool")
    if kind == "mcpToolCall":
        told = f"{item.get('server')}.{told}"
    elif kind not in ("dynamicToolCall", "collabAgentToolCall"):
        told = kind
    return lines.text_of(told, lines.NAME_CHARS) or kind


def _input(item: Item, kind: str) -> Any:
    fields = _INPUTS[kind]
    return {name: item[name] for name in fields if item.get(name) is not None} if fields else item.get("arguments")


def completed(state: State, item: Item, identifier: str, parent: str | None) -> b.Reading | str:
    kind = item.get("type")
    if kind in _TEXTS:
        text = item.get("text")
        if not isinstance(text, str):
            return f"{kind} without text"
        segment = segment_of(state, identifier)
        state["segments"].pop(segment, None)
        return b.Reading((seg.completed(segment, seg.TEXT, text, parent),))
    if kind == "reasoning":
        return b.Reading(_reasoning(state, item, identifier, parent))
    if isinstance(kind, str) and kind in _INPUTS:
        return b.Reading(_tool_completed(state, item, kind, identifier, parent))
    return _NOTHING if isinstance(kind, str) and kind in IGNORED else "unknown item"


def _reasoning(state: State, item: Item, identifier: str, parent: str | None) -> list[Draft]:
    """One segment for each part of the summary and of the content."""
    drafts: list[Draft] = []
    for mark, parts in (("s", item.get("summary")), ("c", item.get("content"))):
        for index, text in enumerate(parts if isinstance(parts, list) else ()):
            segment = f"{segment_of(state, identifier)}/{mark}{index}"
            state["segments"].pop(segment, None)
            if isinstance(text, str) and text:
                drafts.append(seg.completed(segment, seg.REASONING, text, parent))
    return drafts + seg.cut(state["segments"], lambda _key, entry: bool(entry["group"] == identifier))


def _tool_completed(state: State, item: Item, kind: str, tool: str, parent: str | None) -> list[Draft]:
    drafts: list[Draft] = []
    if tool not in state["tools"]:
        if tool in state["ended"]:
            state["ended"].remove(tool)
            return []  # its turn ended before it did
        drafts.append(_tool_started(state, item, kind, tool, parent))  # some are told only when they are over
    state["tools"].pop(tool, None)
    state["changes"].pop(tool, None)
    status = item.get("status")
    body: dict[str, Any] = {"tool": tool, "status": "error" if status in _FAILED else "ok", "output": _output(item)}
    code = item.get("exitCode")
    if status == "declined":
        body["detail"] = "declined"
    elif isinstance(code, int) and code != 0:
        body.update(status="error", detail=f"exit code {code}")
    drafts.append(Draft(ev.TOOL_COMPLETED, body))
    return drafts


def _output(item: Item) -> Any:
    match item.get("type"):
        case "commandExecution":
            return item.get("aggregatedOutput")
        case "mcpToolCall":
            return item.get("error") or item.get("result")
        case "dynamicToolCall":
            return item.get("contentItems")
        case "collabAgentToolCall":
            return item.get("agentsStates")
        case "webSearch":
            return item.get("results")
        case "imageGeneration":
            return item.get("failure") or item.get("savedPath")
        case _:
            return None


def end_tools(state: State, detail: str, which: Callable[[str | None], bool] = lambda _parent: True) -> list[Draft]:
    """Those that run are over for the log, by their parent."""
    tools = [tool for tool, entry in state["tools"].items() if which(entry["parent"])]
    for tool in tools:
        del state["tools"][tool]
        state["changes"].pop(tool, None)
    state["ended"] = [*state["ended"], *tools][-_ENDED_MAX:]
    return [Draft(ev.TOOL_COMPLETED, {"tool": tool, "status": "interrupted", "detail": detail}) for tool in tools]
