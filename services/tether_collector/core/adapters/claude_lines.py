"""What Claude Code's lines mean: every type is mapped below or ignored by name, an unknown one becomes `raw`.

A message's text arrives three times: as deltas (`stream_event`), as one `assistant` line per content block, and in the
`result`. Deltas are provisional, the `assistant` line is the truth, the result's copy is ignored:

    message_start ─▶ content_block_start ─▶ deltas ─▶ assistant (block) ─▶ … ─▶ message_stop
         │ a new one while blocks are open, api_retry, or abandoned_blocks: their deltas are void (text.discarded)

A segment is `{message id}/{block index}`. 2.1.197 names no message in its events: the last message_start counts, per
parent. Subagents stream nothing; their `assistant` lines carry `parent_tool_use_id`, which becomes `parent`.

Turns end with `result`. Whether one failed is told by is_error and terminal_reason; subtype is "success" even for an
API failure. Background work that ends makes the CLI begin a turn by itself, which the signal `owed` announces.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from tether import events as ev
from tether_collector.core import lines
from tether_collector.core.adapters import base as b
from tether_collector.core.adapters import claude_result, claude_tasks
from tether_collector.core.adapters import segments as seg
from tether_collector.core.inputs import Draft, OutputLine

State = dict[str, Any]
Line = dict[str, Any]

# Known and without a meaning for the log; the reason is for whoever reads this.
IGNORED: Final[dict[str, str]] = {
    "stream_event/ping": "keeps the connection alive",
    "stream_event/content_block_stop": "the assistant line closes the block",
    "stream_event/message_delta": "usage comes with the result, the stop reason with the turn",
    "stream_event/input_json_delta": "a tool's input comes whole with its assistant line",
    "stream_event/signature_delta": "proof of a thinking block, for the model only",
    "stream_event/citations_delta": "citations come with the assistant line",
    "assistant/redacted_thinking": "encrypted",
    "user/text": "our own prompt again, or the CLI's note to the model",
    "user/replay": "our own prompt again",
    "system/status": "compacting and permission mode; a model request is mapped",
    "system/compact_boundary": "the model's context was compacted; nothing that was said changes",
    "system/microcompact_boundary": "as above",
    "system/hook_started": "the user's own hooks",
    "system/hook_progress": "the user's own hooks",
    "system/hook_response": "the user's own hooks",
    "system/task_progress": "progress of background work; its begin and end are mapped",
    "system/task_updated": "background_tasks_changed and task_notification say the same",
    "system/permission_denied": "the tool's result says so",
    "system/session_state_changed": "idle and running follow from turns",
    "system/files_persisted": "files of the remote product",
    "system/local_command_output": "output of a slash command for the CLI's own screen",
    "system/elicitation_complete": "no elicitation is offered",
    "system/post_turn_summary": "a summary for the CLI's own screen",
    "system/informational": "a hint for the CLI's own screen",
    "control_request/initialize": "never sent to us",
    "auth_status": "progress of a login",
    "keep_alive": "keeps the connection alive",
    "rate_limit_event": "the account's quota; a refused request shows as a retry or a failure",
    "tool_use_summary": "a summary for the CLI's own screen",
    "prompt_suggestion": "a hint for the CLI's own screen",
    "streamlined_text": "a copy of text that the assistant line has",
    "streamlined_tool_use_summary": "a copy of what tool lines have",
}
_NOTHING: Final = b.Reading()
_TOOL_USE: Final = ("tool_use", "server_tool_use", "mcp_tool_use")  # a tuple: what is looked up may be unhashable
_NOT_FOUND: Final = ("No conversation found with session ID", "Error: --resume requires a valid session ID")
_IN_USE: Final = re.compile(r"Session ID \S+ is already in use")
_MAIN: Final = ""  # the key of lines without a parent


def initial(prompt_id: str, key_source: str | None = None) -> State:
    """The state of one process. Keys are strings and values JSON, as it is dumped."""
    return {
        "bound": None,  # the body of session.bound, once the session is known
        "resumable": False,
        "prompts": {prompt_id: prompt_id},  # uuid → control
        "waiting": [prompt_id],  # prompts without a turn, where the CLI does not tell (2.1.197)
        "lifecycle": False,
        "messages": {},  # parent → {id, plain}
        "segments": {},
        "tools": {},  # running: id → parent or None
        "asks": {},  # interaction → {request, tool, input, questions}
        "cut": False,  # an interrupt was acknowledged in this turn
        "auth": False,
        "key_source": key_source,
        "tasks": {},  # background work: id → still open; ended but not yet notified: False
        "owed": 0,
        "turns": 0,
        "cost_usd": 0.0,
    }


def read(state: State, line: Line) -> b.Reading | str:
    """The meaning of a line, or why it has none."""
    kind = line.get("type")
    if not isinstance(kind, str):
        return "no type"
    handler = _HANDLERS.get(kind)
    if handler is not None:
        return handler(state, line)
    return _NOTHING if kind in IGNORED else "unknown type"


def read_stderr(state: State, line: OutputLine) -> b.Reading:
    drafts = (lines.raw(line, "stderr"),)
    if state["bound"] is None:
        text = line.data[:2048].decode("utf-8", "replace")
        if _IN_USE.search(text):
            return b.Reading(drafts, (b.SessionFailed("busy", lines.redact(text)),))
        if text.startswith(_NOT_FOUND):
            return b.Reading(drafts, (b.SessionFailed("not_found", lines.redact(text)),))
    return b.Reading(drafts)


def close_all(state: State) -> b.Reading:
    """The process is gone: end what it left open."""
    drafts = seg.cut(state["segments"])
    drafts += _end_tools(state, "the process ended", lambda _parent: True)
    for task, is_open in state["tasks"].items():
        if is_open:
            drafts.append(Draft(ev.BACKGROUND, {"id": task, "state": "completed", "description": "the process ended"}))
    state["tasks"] = {}
    return b.Reading(drafts)


def _end_tools(state: State, detail: str, which: Callable[[str | None], bool]) -> list[Draft]:
    ended = [tool for tool, parent in state["tools"].items() if which(parent)]
    for tool in ended:
        del state["tools"][tool]
    return [Draft(ev.TOOL_COMPLETED, {"tool": tool, "status": "interrupted", "detail": detail}) for tool in ended]


# --- stream_event ---------------------------------------------------------------------------------------------------


def _stream_event(state: State, line: Line) -> b.Reading | str:
    event = line.get("event")
    if not isinstance(event, dict):
        return "stream_event without event"
    kind = event.get("type")
    parent = lines.id_of(line.get("parent_tool_use_id"))
    if kind == "content_block_delta":
        return _block_delta(state, line, event, parent)
    if kind == "content_block_start":
        return _block_start(state, line, event, parent)
    if kind == "message_start":
        return _message_start(state, line, event, parent)
    if kind == "message_stop":
        return _message_stop(state, line, parent)
    return _NOTHING if f"stream_event/{kind}" in IGNORED else "unknown stream event"


def _segment(state: State, line: Line, event: Line, parent: str | None) -> tuple[str, str] | None:
    """(message, segment) of a block's event."""
    message = line.get("api_message_id")
    if not isinstance(message, str) or len(message) > lines.ID_CHARS or not message:
        message = _message_of(state, parent)["id"]
    index = event.get("index")
    return (message, f"{message}/{index}") if isinstance(index, int) and 0 <= index < 1_000_000 else None


def _message_of(state: State, parent: str | None) -> dict[str, Any]:
    message: dict[str, Any] = state["messages"].setdefault(parent or _MAIN, {"id": "message", "plain": 0})
    return message


def _block_delta(state: State, line: Line, event: Line, parent: str | None) -> b.Reading | str:
    delta = event.get("delta")
    if not isinstance(delta, dict):
        return "block delta without delta"
    kind = delta.get("type")
    if kind == "text_delta":
        text, segment_kind = delta.get("text"), seg.TEXT
    elif kind == "thinking_delta":
        text, segment_kind = delta.get("thinking"), seg.REASONING
    else:
        return _NOTHING if f"stream_event/{kind}" in IGNORED else "unknown block delta"
    where = _segment(state, line, event, parent)
    if where is None or not isinstance(text, str):
        return "block delta without its fields"
    message, segment = where
    entry = state["segments"].get(segment) or seg.open_segment(
        state["segments"], segment, segment_kind, parent, message
    )
    return b.Reading((seg.delta(entry, segment, text),))


def _block_start(state: State, line: Line, event: Line, parent: str | None) -> b.Reading | str:
    block = event.get("content_block")
    where = _segment(state, line, event, parent)
    if not isinstance(block, dict) or where is None:
        return "block start without its fields"
    kind = block.get("type")
    if kind in ("text", "thinking"):
        message, segment = where
        seg.open_segment(state["segments"], segment, seg.TEXT if kind == "text" else seg.REASONING, parent, message)
    return _NOTHING


def _message_start(state: State, line: Line, event: Line, parent: str | None) -> b.Reading | str:
    """A new attempt of the model: what the last one left open is void."""
    message = event.get("message")
    message_id = lines.id_of(message.get("id")) if isinstance(message, dict) else None
    message_id = message_id or lines.id_of(line.get("api_message_id"))
    if message_id is None:
        return "message_start without id"
    drafts = seg.discard(state["segments"], lambda _key, entry: bool(entry["parent"] == parent))
    state["messages"][parent or _MAIN] = {"id": message_id, "plain": 0}
    return b.Reading(drafts)


def _message_stop(state: State, line: Line, parent: str | None) -> b.Reading:
    abandoned = line.get("abandoned_blocks")
    if isinstance(abandoned, dict):
        message, first = abandoned.get("api_message_id"), lines.count_of(abandoned.get("from_block_index"))
        return b.Reading(
            seg.discard(
                state["segments"],
                lambda key, entry: bool(entry["group"] == message) and int(key.rpartition("/")[2]) >= first,
            )
        )
    if parent is not None:
        return _NOTHING
    return b.Reading((Draft(ev.MODEL_REQUEST, {"state": "completed"}),))


# --- assistant and user ----------------------------------------------------------------------------------------------


def _content(line: Line) -> tuple[Line, list[Any]] | None:
    message = line.get("message")
    if not isinstance(message, dict):
        return None
    content = message.get("content")
    if isinstance(content, str):
        return message, [{"type": "text", "text": content}]
    return (message, content) if isinstance(content, list) else None


def _assistant(state: State, line: Line) -> b.Reading | str:
    found = _content(line)
    if found is None:
        return "assistant without content"
    message, content = found
    if line.get("is_api_error_message") is True:
        return _api_error(state, line, content)
    parent = lines.id_of(line.get("parent_tool_use_id"))
    message_id = lines.id_of(message.get("id")) or _message_of(state, parent)["id"]
    drafts = seg.discard(
        state["segments"], lambda _key, entry: bool(entry["parent"] == parent and entry["group"] != message_id)
    )
    if _message_of(state, parent)["id"] != message_id:
        state["messages"][parent or _MAIN] = {"id": message_id, "plain": 0}
    partial = line.get("aborted") is True
    for block in content:
        draft = _block(state, block, message_id, parent, partial=partial) if isinstance(block, dict) else "no block"
        if isinstance(draft, str):
            return draft
        if draft is not None:
            drafts.append(draft)
    return b.Reading(_proven(state, drafts))


def _block(state: State, block: Line, message: str, parent: str | None, *, partial: bool) -> Draft | str | None:
    kind = block.get("type")
    if kind in ("text", "thinking"):
        segment_kind = seg.TEXT if kind == "text" else seg.REASONING
        text = block.get(kind)
        if not isinstance(text, str):
            return f"{kind} block without text"
        segment = _take_segment(state, message, segment_kind, parent)
        return seg.completed(segment, segment_kind, text, parent, partial=partial)
    if kind in _TOOL_USE:
        tool = lines.id_of(block.get("id"))
        if tool is None:
            return "tool_use without id"
        state["tools"][tool] = parent
        name = lines.text_of(block.get("name"), lines.NAME_CHARS) or ""
        body = {"tool": tool, "name": name, "input": block.get("input")}
        return Draft(ev.TOOL_STARTED, body if parent is None else {**body, "parent": parent})
    if isinstance(kind, str) and kind.endswith("_tool_result"):
        return _tool_result(state, block, None)
    return None if f"assistant/{kind}" in IGNORED else "unknown assistant block"


def _take_segment(state: State, message: str, kind: str, parent: str | None) -> str:
    """The segment that this block completes: the first open one of its kind, or a new one if nothing was streamed."""
    segments: seg.Segments = state["segments"]
    for segment, entry in segments.items():
        if entry["group"] == message and entry["kind"] == kind and entry["parent"] == parent:
            del segments[segment]
            return segment
    known = _message_of(state, parent)
    known["plain"] += 1
    return f"{message}/a{known['plain']}"


def _proven(state: State, drafts: list[Draft]) -> list[Draft]:
    """The first completed item shows that the session can be resumed."""
    if state["bound"] is not None and not state["resumable"]:
        state["resumable"] = True
        drafts.append(Draft(ev.SESSION_BOUND, {**state["bound"], "resumable": True}))
    return drafts


def _api_error(state: State, line: Line, content: list[Any]) -> b.Reading:
    """A failed model request, which the CLI also prints as if the model had said it."""
    text = next((block.get("text") for block in content if isinstance(block, dict)), None)
    body: Line = {"state": "failed"}
    if status := lines.count_of(line.get("api_error_status")):
        body["http_status"] = status
    if (detail := lines.detail_of(text)) is not None:
        body["detail"] = detail
    if claude_result.is_auth(line.get("error"), status):
        state["auth"] = True
    drafts = seg.discard(state["segments"], lambda _key, entry: entry["parent"] is None)
    return b.Reading([*drafts, Draft(ev.MODEL_REQUEST, body)])


def _user(state: State, line: Line) -> b.Reading | str:
    if line.get("isReplay") is True:
        control = state["prompts"].get(line["uuid"]) if isinstance(line.get("uuid"), str) else None
        return _NOTHING if control is None else b.Reading((), (b.PromptSeen(control),))
    found = _content(line)
    if found is None:
        return "user without content"
    drafts: list[Draft] = []
    signals: list[b.Signal] = []
    for block in found[1]:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            draft = _tool_result(state, block, line.get("tool_use_result"))
            if isinstance(draft, str):
                return draft
            drafts.append(draft)
            signals += _asked_about(state, draft.body["tool"])
        elif f"user/{kind}" not in IGNORED and kind not in ("image", "document"):
            return "unknown user block"
    return b.Reading(drafts, signals)


def _tool_result(state: State, block: Line, result: Any) -> Draft | str:
    tool = lines.id_of(block.get("tool_use_id"))
    if tool is None:
        return "tool_result without tool_use_id"
    state["tools"].pop(tool, None)
    state["messages"].pop(tool, None)
    status = "error" if block.get("is_error") is True else "ok"
    if (status == "error" and state["cut"]) or (isinstance(result, dict) and result.get("interrupted") is True):
        status = "interrupted"
    return Draft(ev.TOOL_COMPLETED, {"tool": tool, "status": status, "output": _output(block.get("content"))})


def _output(content: Any) -> Any:
    """Text where the blocks are text, else the blocks."""
    if isinstance(content, list) and content:
        texts = [block["text"] for block in content if _is_text(block)]
        if len(texts) == len(content):
            return "\n".join(texts)
    return content


def _is_text(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)


def _asked_about(state: State, tool: str) -> list[b.Signal]:
    """The tool went on, so what was asked about it is settled (a withdrawal has a line of its own); who answered what,
    the execution knows."""
    settled = [key for key, ask in state["asks"].items() if ask["tool"] == tool]
    for key in settled:
        del state["asks"][key]
    return [b.AnswerSeen(key, "answered") for key in settled]


def _tool_progress(state: State, line: Line) -> b.Reading | str:
    """Seconds elapsed, which say nothing; but an allowed tool that is at work shows that the answer arrived."""
    tool = lines.id_of(line.get("tool_use_id"))
    return b.Reading((), _asked_about(state, tool)) if tool is not None else "tool_progress without id"


# --- controls ------------------------------------------------------------------------------------------------------


def _control_request(state: State, line: Line) -> b.Reading | str:
    request = line.get("request")
    request_id = line.get("request_id")
    interaction = lines.token_of(request_id)
    if not isinstance(request, dict) or interaction is None:
        return "control_request without its fields"
    if request.get("subtype") != "can_use_tool":
        return _NOTHING if f"control_request/{request.get('subtype')}" in IGNORED else "unknown control_request"
    tool_input = request.get("input")
    tool_input = tool_input if isinstance(tool_input, dict) else {}
    name = lines.text_of(request.get("tool_name"), lines.NAME_CHARS) or ""
    tool = lines.id_of(request.get("tool_use_id"))
    questions = _questions(tool_input) if name == "AskUserQuestion" else None
    state["asks"][interaction] = {"request": request_id, "tool": tool, "input": tool_input, "questions": questions}
    body: Line = {"interaction": interaction, "kind": "approval" if questions is None else "question", "name": name}
    if questions is None:
        body["input"] = tool_input
    else:
        body["questions"] = questions
    if tool is not None:
        body["tool"] = tool
    description = lines.detail_of(request.get("description")) or lines.detail_of(request.get("decision_reason"))
    if description is not None:
        body["description"] = description
    return b.Reading((Draft(ev.INTERACTION_REQUESTED, body),))


def _questions(tool_input: Line) -> list[Line]:
    entries = tool_input.get("questions")
    questions: list[Line] = []
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict):
            options = entry.get("options")
            question: Line = {
                "id": f"q{len(questions) + 1}",
                "question": entry["question"] if isinstance(entry.get("question"), str) else "",
                "options": [option for option in options if isinstance(option, dict)]
                if isinstance(options, list)
                else [],
                "multiple": entry.get("multiSelect") is True,
            }
            if header := lines.text_of(entry.get("header"), lines.NAME_CHARS):
                question["header"] = header
            questions.append(question)
    return questions


def _control_cancel(state: State, line: Line) -> b.Reading | str:
    interaction = lines.token_of(line.get("request_id"))
    if interaction is None:
        return "control_cancel_request without id"
    state["asks"].pop(interaction, None)
    return b.Reading((), (b.AnswerSeen(interaction, "cancelled"),))


def _control_response(state: State, line: Line) -> b.Reading | str:
    """The acknowledgement of an interrupt, the only request that is sent."""
    response = line.get("response")
    control = lines.id_of(response.get("request_id")) if isinstance(response, dict) else None
    if control is None:
        return "control_response without id"
    state["cut"] = True
    return b.Reading((), (b.InterruptSeen(control),))


def _command_lifecycle(state: State, line: Line) -> b.Reading | str:
    prompt_uuid, step = line.get("command_uuid"), line.get("state")
    if not isinstance(prompt_uuid, str) or step not in ("queued", "started", "completed", "cancelled"):
        return "command_lifecycle without its fields"
    state["lifecycle"] = True
    control = state["prompts"].get(prompt_uuid)
    if control is None:
        return _NOTHING
    if step == "queued":
        return b.Reading((), (b.PromptSeen(control),))
    if control in state["waiting"]:
        state["waiting"].remove(control)
    if step == "started":
        return b.Reading((), (b.PromptSeen(control), b.TurnBegan(control)))
    del state["prompts"][prompt_uuid]
    return b.Reading((), (b.PromptTaken(control),))


# --- system ----------------------------------------------------------------------------------------------------------


def _system(state: State, line: Line) -> b.Reading | str:
    kind = line.get("subtype")
    handler = _SYSTEM.get(kind) if isinstance(kind, str) else None
    if handler is not None:
        return handler(state, line)
    return _NOTHING if f"system/{kind}" in IGNORED else "unknown system line"


def _init(state: State, line: Line) -> b.Reading | str:
    session = lines.id_of(line.get("session_id"))
    if session is None:
        return "init without session_id"
    bound: Line = {"native_session": session}
    for field, key in (("cli_version", "claude_code_version"), ("model", "model"), ("cwd", "cwd")):
        if (value := lines.text_of(line.get(key))) is not None:
            bound[field] = value
    drafts: list[Draft] = []
    if bound != state["bound"]:
        state["bound"] = bound
        drafts.append(Draft(ev.SESSION_BOUND, {**bound, "resumable": state["resumable"]}))
    return b.Reading(drafts, _turn_begins(state, line))


def _turn_begins(state: State, line: Line) -> list[b.Signal]:
    """Whose turn this is: named by the CLI, or the oldest prompt that waits, or begun by the CLI itself."""
    state["cut"] = False
    named = line.get("user_message_uuids")
    control: str | None = None
    if state["lifecycle"]:
        uuids = named if isinstance(named, list) else []
        ours = [state["prompts"][key] for key in uuids if isinstance(key, str) and key in state["prompts"]]
        control = ours[0] if ours else None
    elif state["waiting"]:
        control = state["waiting"].pop(0)
    signals: list[b.Signal] = [b.TurnBegan(control)]
    if control is None and state["owed"]:
        state["owed"] = 0
        signals.append(claude_tasks.background_now(state))
    return signals


def _status(state: State, line: Line) -> b.Reading:
    if line.get("status") == "requesting":
        return b.Reading((Draft(ev.MODEL_REQUEST, {"state": "started"}),))
    return _NOTHING


def _api_retry(state: State, line: Line) -> b.Reading:
    """What the failed attempt had streamed is void."""
    drafts = seg.discard(state["segments"], lambda _key, entry: entry["parent"] is None)
    body: Line = {"state": "retrying", "attempt": lines.count_of(line.get("attempt"))}
    body["attempts_max"] = lines.count_of(line.get("max_retries"))
    body["delay_ms"] = lines.count_of(line.get("retry_delay_ms"))
    if status := lines.count_of(line.get("error_status")):
        body["http_status"] = status
    if (detail := lines.detail_of(line.get("error"))) is not None:
        body["detail"] = detail
    if claude_result.is_auth(line.get("error"), status):
        body["detail"] = claude_result.refusal(state)
    return b.Reading([*drafts, Draft(ev.MODEL_REQUEST, body)])


def _result(state: State, line: Line) -> b.Reading | str:
    verdict = claude_result.read(state, line)
    if isinstance(verdict, str):
        return verdict
    if verdict.session_failed is not None:
        return b.Reading((), (b.SessionFailed("not_found", verdict.session_failed),))
    if verdict.ended.outcome == "failed":
        drafts = seg.discard(state["segments"], lambda _key, entry: entry["parent"] is None)
    else:
        drafts = seg.cut(state["segments"], lambda _key, entry: entry["parent"] is None)
    drafts += _end_tools(state, "the turn ended without the tool's result", lambda parent: parent is None)
    drafts += verdict.drafts
    if verdict.ended.outcome == "completed":
        drafts = _proven(state, drafts)
    state["cut"] = state["auth"] = False
    return b.Reading(drafts, (verdict.ended,))


_HANDLERS: Final[dict[str, Callable[[State, Line], b.Reading | str]]] = {
    "stream_event": _stream_event,
    "assistant": _assistant,
    "user": _user,
    "system": _system,
    "result": _result,
    "control_request": _control_request,
    "control_cancel_request": _control_cancel,
    "control_response": _control_response,
    "command_lifecycle": _command_lifecycle,
    "tool_progress": _tool_progress,
}
_SYSTEM: Final[dict[str, Callable[[State, Line], b.Reading | str]]] = {
    "init": _init,
    "status": _status,
    "api_retry": _api_retry,
    "task_started": claude_tasks.task_started,
    "task_notification": claude_tasks.task_notification,
    "background_tasks_changed": claude_tasks.background_tasks_changed,
}
