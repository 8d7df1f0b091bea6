"""OpenAI: Responses (`POST /v1/responses`) and Chat Completions (`POST /v1/chat/completions`).

The script names tools as Claude Code does; here they get the name and the input that the request's own tool list
asks for.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Final

from fake_models.script import Reply, Sse, Text, Tool, Turn, objects, texts_of

_YIELD_MS: Final = 30_000
_USAGE: Final = {"input_tokens": 100, "output_tokens": 20, "total_tokens": 120}
_CHAT_USAGE: Final = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}


def error_body(status: int, message: str) -> dict[str, Any]:
    kind = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
    return {"error": {"message": message, "type": kind.get(status, "server_error"), "code": "fake", "param": None}}


def _new_id(prefix: str) -> str:
    return f"{prefix}_fake{uuid.uuid4().hex[:16]}"


# --- Responses --------------------------------------------------------------------------------------------------


def response_turns(body: Mapping[str, Any]) -> list[Turn]:
    """User texts and rounds of tool outputs; outputs that follow each other are one round."""
    given = body.get("input")
    if isinstance(given, str):
        return [("user", given)]
    turns: list[Turn] = []
    in_round = False
    for item in objects(given):
        kind = str(item.get("type", "message"))
        is_output = kind.endswith("_call_output")
        if is_output and not in_round:
            turns.append(("tool", ""))
        in_round = is_output
        if kind == "message" and item.get("role") == "user":
            turns.extend(("user", text) for text in texts_of(item.get("content"), ("input_text", "text")))
    return turns


def response(reply: Reply, body: Mapping[str, Any]) -> dict[str, Any]:
    """The whole reply, for a request that does not stream."""
    return _response_head(body, "completed", [_item(block, body) for block in reply.blocks]) | {"usage": _usage()}


def response_events(reply: Reply, body: Mapping[str, Any]) -> Iterator[Sse]:
    """The stream, each event numbered. It stops inside an item where the connection is to drop."""
    for number, (kind, fields, delay_s) in enumerate(_response_steps(reply, body), start=1):
        yield Sse(kind, {"type": kind, "sequence_number": number, **fields}, delay_s)


def _response_steps(reply: Reply, body: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], float]]:
    head = _response_head(body, "in_progress", [])
    yield "response.created", {"response": head}, 0.0
    items: list[dict[str, Any]] = []
    for index, block in enumerate(reply.blocks):
        item = _item(block, body)
        opened = {**item, "status": "in_progress"} | ({"content": []} if isinstance(block, Text) else {})
        yield "response.output_item.added", {"output_index": index, "item": opened}, 0.0
        if isinstance(block, Text):
            place = {"item_id": item["id"], "output_index": index, "content_index": 0}
            part = {"type": "output_text", "text": "", "annotations": []}
            yield "response.content_part.added", {**place, "part": part}, 0.0
            for token in block.tokens:
                yield "response.output_text.delta", {**place, "delta": token}, block.delay_s
            if reply.ending == "drop":
                return
            if reply.ending == "error":
                error = {"code": "server_error", "message": "fake failure"}
                yield "response.failed", {"response": {**head, "status": "failed", "error": error}}, 0.0
                return
            yield "response.output_text.done", {**place, "text": block.whole}, 0.0
        items.append(item)
        yield "response.output_item.done", {"output_index": index, "item": item}, 0.0
    done = {**head, "status": "completed", "output": items, "usage": _usage()}
    yield "response.completed", {"response": done}, 0.0


def _usage() -> dict[str, Any]:
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {**_USAGE, **details}


def _response_head(body: Mapping[str, Any], status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    head = {"id": _new_id("resp"), "object": "response", "created_at": 0, "status": status}
    return {**head, "model": body.get("model"), "output": output}


def _item(block: Text | Tool, body: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(block, Text):
        content = [{"type": "output_text", "text": block.whole, "annotations": []}]
        return {
            "type": "message",
            "id": _new_id("msg"),
            "role": "assistant",
            "status": "completed",
            "content": content,
        }
    name, tool_input = _response_tool(block, body)
    ids = {"id": _new_id("fc"), "call_id": _new_id("call"), "name": name, "status": "completed"}
    if isinstance(tool_input, str):
        return {"type": "custom_tool_call", **ids, "input": tool_input}
    return {"type": "function_call", **ids, "arguments": json.dumps(tool_input)}


def _response_tool(tool: Tool, body: Mapping[str, Any]) -> tuple[str, Any]:
    """The tool as Codex knows it: its shell tool by whichever name it offers, patches, questions."""
    offered = {str(entry.get("name") or entry.get("type")): entry for entry in objects(body.get("tools"))}
    given = dict(tool.input)
    match tool.name:
        case "BashEsc":
            escalated = {"sandbox_permissions": "require_escalated", "justification": "needs to write"}
            return "exec_command", {"cmd": given["command"], "yield_time_ms": _YIELD_MS, **escalated}
        case "Bash" if "exec_command" in offered:
            return "exec_command", {"cmd": given["command"], "yield_time_ms": _YIELD_MS}
        case "Bash" if "shell_command" in offered:
            return "shell_command", {"command": given["command"]}
        case "Bash" if "shell" in offered:
            return "shell", {"command": ["bash", "-lc", given["command"]]}
        case "Write":
            content = str(given["content"]).rstrip()
            patch = f"*** Begin Patch\n*** Add File: {given['file_path']}\n+{content}\n*** End Patch\n"
            is_custom = offered.get("apply_patch", {}).get("type") == "custom"
            return "apply_patch", patch if is_custom else {"input": patch}
        case "AskUserQuestion":
            asked = given["questions"][0]
            question = {key: asked[key] for key in ("header", "question", "options")}
            return "request_user_input", {"questions": [{"id": "colour", **question}]}
        case _:
            return tool.name, given


# --- Chat Completions -------------------------------------------------------------------------------------------


def chat_turns(body: Mapping[str, Any]) -> list[Turn]:
    """User texts and rounds of tool messages; tool messages that follow each other are one round."""
    turns: list[Turn] = []
    in_round = False
    for entry in objects(body.get("messages")):
        is_tool = entry.get("role") == "tool"
        if is_tool and not in_round:
            turns.append(("tool", ""))
        in_round = is_tool
        if entry.get("role") == "user":
            turns.extend(("user", text) for text in texts_of(entry.get("content"), ("text",)))
    return turns


def chat(reply: Reply, body: Mapping[str, Any]) -> dict[str, Any]:
    """The whole reply, for a request that does not stream."""
    calls = [_chat_call(block, body) for block in reply.blocks if isinstance(block, Tool)]
    answer: dict[str, Any] = {"role": "assistant", "content": reply.text() or None}
    if calls:
        answer["tool_calls"] = calls
    choice = {"index": 0, "message": answer, "finish_reason": "tool_calls" if calls else "stop"}
    return {**_chat_head(body, "chat.completion"), "choices": [choice], "usage": _CHAT_USAGE}


def chat_events(reply: Reply, body: Mapping[str, Any]) -> Iterator[Sse]:
    """The stream of chunks, then `[DONE]`. It just stops where the connection is to drop."""
    head = _chat_head(body, "chat.completion.chunk")

    def chunk(delta: Mapping[str, Any], finish: str | None = None, delay_s: float = 0.0) -> Sse:
        return Sse(None, {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}, delay_s)

    yield chunk({"role": "assistant", "content": ""})
    calls = 0
    for block in reply.blocks:
        if isinstance(block, Tool):
            yield chunk({"tool_calls": [{"index": calls, **_chat_call(block, body)}]})
            calls += 1
            continue
        for token in block.tokens:
            yield chunk({"content": token}, delay_s=block.delay_s)
        if reply.ending == "drop":
            return
        if reply.ending == "error":
            yield Sse(None, error_body(500, "fake failure"))
            return
    yield chunk({}, "tool_calls" if calls else "stop")
    yield Sse(None, {**head, "choices": [], "usage": _CHAT_USAGE})
    yield Sse(None, "[DONE]")


def _chat_head(body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {"id": _new_id("chatcmpl"), "object": kind, "created": 0, "model": body.get("model")}


def _chat_call(tool: Tool, body: Mapping[str, Any]) -> dict[str, Any]:
    functions = [entry.get("function") for entry in objects(body.get("tools"))]
    offered = {str(function.get("name")) for function in functions if isinstance(function, dict)}
    name, tool_input = _chat_tool(tool, offered)
    call = {"name": name, "arguments": json.dumps(tool_input)}
    return {"id": _new_id("call"), "type": "function", "function": call}


def _chat_tool(tool: Tool, offered: set[str]) -> tuple[str, dict[str, Any]]:
    """The tool as opencode or Qwen Code offers it."""
    given = dict(tool.input)
    match tool.name:
        case "Bash" if "bash" in offered:
            return "bash", {"command": given["command"], "description": "run it"}
        case "Bash" if "run_shell_command" in offered:
            run = {"command": given["command"], "description": "run it", "is_background": False}
            return "run_shell_command", run
        case "Write" if "write" in offered:
            return "write", {"filePath": given["file_path"], "content": given["content"]}
        case "Write" if "write_file" in offered:
            return "write_file", given
        case "AskUserQuestion" if "question" in offered:
            asked = given["questions"][0]
            return "question", {"questions": [{key: asked[key] for key in ("question", "header", "options")}]}
        case "AskUserQuestion" if "ask_user_question" in offered:
            return "ask_user_question", given
        case _:
            return tool.name, given
