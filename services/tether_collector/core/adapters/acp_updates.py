"""What an ACP agent says while it works: session/update, whose kinds are mapped below or ignored by name.

Texts come as chunks and are never said whole. A segment is closed, and is history, when the agent goes on to something
else: a tool, thinking, another message, or the end of the turn.

    chunk … chunk ──another message or kind, a tool, the turn's end──▶ text.completed
                  └──turn cancelled, process gone──▶ text.completed{partial}

A tool is announced while its input still streams (`pending`), so it is told as started when the input is complete: its
status moves, permission is asked, or the agent goes on to something else. Its terminal status ends it; what is open at
the turn's end was interrupted.

`usage_update` counts tokens in the context, which is no usage; its cost is that of the whole session, and a turn's is
the growth. After a resume nothing says what the session had cost before, so the first turn has no cost then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from tether import events as ev
from tether_collector.core import lines
from tether_collector.core.adapters import base as b
from tether_collector.core.adapters import segments as seg
from tether_collector.core.adapters.acp_rules import Profile, member_of
from tether_collector.core.inputs import Draft

State = dict[str, Any]
Update = Mapping[str, Any]
Said = tuple[list[Draft], list[b.Signal]]

# Known and without a meaning for the log; the reason is for whoever reads this.
IGNORED: Final[dict[str, str]] = {
    "available_commands_update": "slash commands for a screen",
    "config_option_update": "settings for a screen",
    "current_mode_update": "the mode that we set, or that the agent changed by itself",
    "session_info_update": "the session's title; what `_meta` tells is read",
    "usage_update": "the cost is read",
    "user_message_chunk": "our own prompt again",
}
OUTPUT_CHARS_MAX: Final = 64 * 1024  # of a running tool's output; its end may repeat all of it
_OVER_MAX: Final = 512  # ended tools whose late updates are recognised
_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_STATUS: Final = {"completed": "ok", "failed": "error"}


def initial() -> State:
    """The part of the adapter's state that is kept here."""
    return {
        "segments": {},
        "segment_count": 0,
        "last_text": "",  # to explain a turn that failed in words alone
        "tools": {},  # id → {name, title, input, parent, started, output}
        "over": [],
        "plans": 0,
        "cost_usd": None,  # of the session so far, None while unknown
        "cost_before": 0.0,  # of the session when the turn began, None while unknown
        "model_failed": False,
    }


def read(profile: Profile, state: State, update: Update) -> Said | str:
    """The meaning of an update of the running session, or why it has none."""
    kind = update.get("sessionUpdate")
    if not isinstance(kind, str):
        return "an update without its kind"
    note_cost(state, update)
    signals = _meta(profile, state, update)
    if kind in IGNORED:
        return settle_tools(state, None), signals
    handler = _HANDLERS.get(kind)
    if handler is None:
        return "unknown update"
    said = handler(profile, state, update)
    return said if isinstance(said, str) else (said[0], [*signals, *said[1]])


def note_cost(state: State, update: Update) -> None:
    if update.get("sessionUpdate") != "usage_update":
        return
    cost = update.get("cost")
    amount = member_of(cost, ("amount",))
    is_number = isinstance(amount, int | float) and not isinstance(amount, bool)
    if is_number and 0 <= amount < 1e9 and member_of(cost, ("currency",)) == "USD":
        state["cost_usd"] = float(amount)


def _meta(profile: Profile, state: State, update: Update) -> list[b.Signal]:
    """What agents tell beside the protocol."""
    meta = update.get("_meta")
    if profile.failed_meta is not None:
        path, value = profile.failed_meta
        found = member_of(meta, path)
        if isinstance(found, str):
            state["model_failed"] = found == value
    if profile.waiting_meta is not None:
        path, value = profile.waiting_meta
        flags = member_of(meta, path)
        if isinstance(flags, list) and value not in flags:
            return [b.AnswerSeen(key, "answered", only_if_written=True) for key in state["asks"]]
    return []


# --- texts -----------------------------------------------------------------------------------------------------------


def _chunk(state: State, update: Update, kind: str) -> Said | str:
    content = update.get("content")
    text = member_of(content, ("text",))
    if member_of(content, ("type",)) != "text" or not isinstance(text, str):
        return "a chunk that is not text"
    drafts = settle_tools(state, None)
    if text:
        parent = _parent(update)
        group = lines.id_of(update.get("messageId")) or ""
        name = _open_segment(state, kind, parent, group, drafts)
        drafts.append(seg.delta(state["segments"][name], name, text))
    return drafts, []


def _open_segment(state: State, kind: str, parent: str | None, group: str, drafts: list[Draft]) -> str:
    """The segment that a chunk belongs to; others of the same speaker are complete."""
    segments: seg.Segments = state["segments"]
    for name, entry in segments.items():
        if (entry["kind"], entry["parent"], entry["group"]) == (kind, parent, group):
            return name
    drafts += complete(state, lambda entry: bool(entry["parent"] == parent))
    state["segment_count"] += 1
    name = f"{kind}-{state['segment_count']}"
    seg.open_segment(segments, name, kind, parent, group)
    return name


def complete(
    state: State, which: Callable[[dict[str, Any]], bool] = lambda _entry: True, *, partial: bool = False
) -> list[Draft]:
    """Close open segments: what came is all of it, or as far as it came."""
    segments: seg.Segments = state["segments"]
    drafts: list[Draft] = []
    for name in [key for key, entry in segments.items() if which(entry)]:
        entry = segments.pop(name)
        text = "".join(entry["parts"])
        if entry["kind"] == seg.TEXT:
            state["last_text"] = text[: lines.DETAIL_CHARS]
        drafts.append(seg.completed(name, entry["kind"], text, entry["parent"], partial=partial))
    return _proven(state, drafts)


def last_text(state: State) -> str | None:
    """What was said last, for people."""
    open_ = ["".join(entry["parts"]) for entry in state["segments"].values() if entry["kind"] == seg.TEXT]
    return lines.detail_of(open_[-1] if open_ else state["last_text"]) or None


def _proven(state: State, drafts: list[Draft]) -> list[Draft]:
    """The first completed item of a session shows that it can be resumed."""
    if drafts and state["can_resume"] and state["bound"] is not None and not state["resumable"]:
        state["resumable"] = True
        drafts.append(Draft(ev.SESSION_BOUND, {**state["bound"], "resumable": True}))
    return drafts


def _parent(update: Update) -> str | None:
    """The tool call that a subagent speaks for."""
    return lines.id_of(member_of(update.get("_meta"), ("claudeCode", "parentToolUseId")))


# --- tools -----------------------------------------------------------------------------------------------------------


def _tool(profile: Profile, state: State, update: Update) -> Said | str:
    tool = lines.id_of(update.get("toolCallId"))
    if tool is None:
        return "a tool call without its id"
    if tool in state["over"]:
        return [], []
    drafts = settle_tools(state, tool)
    parent = _parent(update)
    drafts += complete(state, lambda entry: bool(entry["parent"] == parent))
    entry = note_tool(state, tool, update)
    status = update.get("status")
    if status in ("in_progress", *_STATUS):
        drafts += start_tool(state, tool)
    if entry["started"]:
        drafts += _progress(entry, tool, update)
    asks = [key for key, ask in state["asks"].items() if ask["tool"] == tool]
    if not (isinstance(status, str) and status in _STATUS):
        return drafts, [b.AnswerSeen(key, "answered", only_if_written=True) for key in asks]
    output = _output(entry, update)
    is_cut = status == "failed" or (profile.aborted_text is not None and profile.aborted_text in str(output))
    told = "interrupted" if state["cancels"] and is_cut else _STATUS[status]
    drafts += _end_tool(state, tool, told, output)
    for key in asks:
        del state["asks"][key]
    return drafts, [b.AnswerSeen(key, "answered") for key in asks]


def note_tool(state: State, tool: str, call: Update) -> dict[str, Any]:
    """What a tool call, an update of it or a permission request tells of a tool."""
    tools: dict[str, Any] = state["tools"]
    entry: dict[str, Any] | None = tools.get(tool)
    if entry is None:
        entry = {"name": "", "title": "", "input": None, "parent": _parent(call), "started": False, "output": ""}
        tools[tool] = entry
    name = call.get("name") or member_of(call.get("_meta"), ("claudeCode", "toolName"))
    title = lines.text_of(call.get("title"), lines.NAME_CHARS)
    if not entry["name"]:
        # A title is for people; the first one often is the tool's name. Else its kind is (`execute`, `edit`, …).
        named = [each for each in (name, title, call.get("kind")) if isinstance(each, str) and _NAME.fullmatch(each)]
        entry["name"] = named[0] if named else ""
    entry["title"] = title or entry["title"]
    given = call.get("rawInput")
    if given is not None and (given != {} or entry["input"] is None):
        entry["input"] = given
    return entry


def start_tool(state: State, tool: str) -> list[Draft]:
    """Tell that it started, once."""
    entry = state["tools"][tool]
    if entry["started"]:
        return []
    entry["started"] = True
    given = entry["input"]
    body: dict[str, Any] = {
        "tool": tool,
        "name": entry["name"] or entry["title"],
        "input": {"title": entry["title"]} if given is None or given == {} else given,
    }
    if entry["parent"] is not None:
        body["parent"] = entry["parent"]
    entry["input"] = None  # told: the state need not carry it on
    return [Draft(ev.TOOL_STARTED, body)]


def settle_tools(state: State, but: str | None) -> list[Draft]:
    """The agent goes on to something else: what it had announced has its whole input."""
    drafts: list[Draft] = []
    for tool, entry in state["tools"].items():
        if tool != but and not entry["started"]:
            drafts += start_tool(state, tool)
    return drafts


def _progress(entry: dict[str, Any], tool: str, update: Update) -> list[Draft]:
    """New output of a running tool: either what is new, or everything again."""
    known: str = entry["output"]
    text = member_of(update.get("_meta"), ("terminal_output_delta", "data"))
    if not isinstance(text, str):
        whole = _texts(update) if update.get("status") == "in_progress" else None
        text = whole[len(known) :] if whole is not None and whole.startswith(known) else ""
    text = text[: OUTPUT_CHARS_MAX - len(known)]
    if not text:
        return []
    entry["output"] = known + text
    return [Draft(ev.TOOL_PROGRESS, {"tool": tool, "text": text, "offset": len(known)})]


def _texts(update: Update) -> str | None:
    content = update.get("content")
    parts = [
        text
        for item in (content if isinstance(content, list) else [])
        if isinstance(text := member_of(item, ("content", "text")), str)
    ]
    return "".join(parts) if parts else None


def _output(entry: dict[str, Any], update: Update) -> Any:
    """As the agent gave it: text before an object, the streamed output where its end repeats nothing."""
    given = update.get("rawOutput")
    if isinstance(given, str):
        return given
    text = _texts(update)
    if text is not None:
        return text
    return entry["output"] or None if given is None else given


def _end_tool(state: State, tool: str, status: str, output: Any = None, detail: str | None = None) -> list[Draft]:
    del state["tools"][tool]
    over: list[str] = state["over"]
    over.append(tool)
    del over[:-_OVER_MAX]
    body: dict[str, Any] = {"tool": tool, "status": status}
    if output is not None:
        body["output"] = output
    if detail is not None:
        body["detail"] = detail
    return _proven(state, [Draft(ev.TOOL_COMPLETED, body)])


def end_tools(state: State, detail: str) -> list[Draft]:
    """What runs no longer, though nothing said so."""
    drafts = settle_tools(state, None)
    for tool in list(state["tools"]):
        drafts += _end_tool(state, tool, "interrupted", detail=detail)
    return drafts


def _plan(_profile: Profile, state: State, update: Update) -> Said | str:
    """A list of what is to be done, told as the tool that it is with other agents."""
    entries = update.get("entries")
    if not isinstance(entries, list):
        return "a plan without entries"
    drafts = settle_tools(state, None)
    state["plans"] += 1
    tool = f"plan-{state['plans']}"
    drafts.append(Draft(ev.TOOL_STARTED, {"tool": tool, "name": "plan", "input": {"entries": entries}}))
    drafts.append(Draft(ev.TOOL_COMPLETED, {"tool": tool, "status": "ok"}))
    return drafts, []


_HANDLERS: Final[dict[str, Callable[[Profile, State, Update], Said | str]]] = {
    "agent_message_chunk": lambda _profile, state, update: _chunk(state, update, seg.TEXT),
    "agent_thought_chunk": lambda _profile, state, update: _chunk(state, update, seg.REASONING),
    "tool_call": _tool,
    "tool_call_update": _tool,
    "plan": _plan,
}
# Kinds that show that the agent works on a prompt.
WORK: Final = tuple(_HANDLERS)
