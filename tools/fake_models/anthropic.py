"""Anthropic Messages: `POST /v1/messages`, streaming or not, and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Final

from fake_models.script import Reply, Sse, Text, Tool, Turn, objects, texts_of

INPUT_TOKENS: Final = 100
TOOL_TOKENS: Final = 20
_JSON_PIECE_CHARS: Final = 24
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def turns_of(body: Mapping[str, Any]) -> list[Turn]:
    """User texts and rounds of tool results; several results in one message are one round."""
    turns: list[Turn] = []
    for message in objects(body.get("messages")):
        if message.get("role") != "user":
            continue
        content = message.get("content")
        if any(block.get("type") == "tool_result" for block in objects(content)):
            turns.append(("tool", ""))
        turns.extend(("user", text) for text in texts_of(content, ("text",)))
    return turns


def problem_of(body: Mapping[str, Any]) -> str | None:
    """What the real service would refuse the request for."""
    if not isinstance(body.get("model"), str):
        return "model: Field required"
    if not isinstance(body.get("max_tokens"), int):
        return "max_tokens: Field required"
    if not objects(body.get("messages")):
        return "messages: at least one message is required"
    return None


def error_body(status: int, message: str) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": _new_id("req")}


def _new_id(prefix: str) -> str:
    return f"{prefix}_fake{uuid.uuid4().hex[:20]}"


def _usage(output_tokens: int) -> dict[str, int]:
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": INPUT_TOKENS, **cache, "output_tokens": output_tokens}


def _tokens(reply: Reply) -> int:
    return sum(len(block.tokens) if isinstance(block, Text) else TOOL_TOKENS for block in reply.blocks)


def message(reply: Reply, body: Mapping[str, Any]) -> dict[str, Any]:
    """The whole reply, for a request that does not stream."""
    content: list[dict[str, Any]] = []
    for block in reply.blocks:
        match block:
            case Text(is_thinking=True):
                content.append({"type": "thinking", "thinking": block.whole, "signature": "fake"})
            case Text():
                content.append({"type": "text", "text": block.whole})
            case Tool():
                content.append(_tool_use(block, block.input))
    return {
        **_head(body),
        "content": content,
        "stop_reason": "tool_use" if reply.calls_tools else "end_turn",
        "usage": _usage(_tokens(reply)),
    }


def _head(body: Mapping[str, Any]) -> dict[str, Any]:
    model = str(body.get("model", "fake-model"))
    head = {"id": _new_id("msg"), "type": "message", "role": "assistant", "model": model}
    return {**head, "content": [], "stop_reason": None, "stop_sequence": None}


def _tool_use(tool: Tool, tool_input: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": _new_id("toolu"), "name": tool.name, "input": dict(tool_input)}


def events(reply: Reply, body: Mapping[str, Any]) -> Iterator[Sse]:
    """The stream. It stops inside a block where the connection is to drop."""
    yield _event("message_start", message={**_head(body), "usage": _usage(1)})
    yield _event("ping")
    for index, block in enumerate(reply.blocks):
        yield from _block(index, block)
        if reply.ending == "drop":
            return
        if reply.ending == "error":
            yield Sse("error", error_body(529, "Overloaded"))
            return
        yield _event("content_block_stop", index=index)
    delta = {"stop_reason": "tool_use" if reply.calls_tools else "end_turn", "stop_sequence": None}
    yield _event("message_delta", delta=delta, usage={"output_tokens": _tokens(reply)})
    yield _event("message_stop")


def _event(kind: str, delay_s: float = 0.0, **fields: object) -> Sse:
    return Sse(kind, {"type": kind, **fields}, delay_s)


def _delta(index: int, delta: Mapping[str, Any], delay_s: float = 0.0) -> Sse:
    return _event("content_block_delta", delay_s, index=index, delta=delta)


def _block(index: int, block: Text | Tool) -> Iterator[Sse]:
    if isinstance(block, Tool):
        yield _event("content_block_start", index=index, content_block=_tool_use(block, {}))
        text = json.dumps(dict(block.input))
        for start in range(0, len(text), _JSON_PIECE_CHARS):
            piece = text[start : start + _JSON_PIECE_CHARS]
            yield _delta(index, {"type": "input_json_delta", "partial_json": piece})
    elif block.is_thinking:
        start_block = {"type": "thinking", "thinking": "", "signature": ""}
        yield _event("content_block_start", index=index, content_block=start_block)
        for token in block.tokens:
            yield _delta(index, {"type": "thinking_delta", "thinking": token}, block.delay_s)
        yield _delta(index, {"type": "signature_delta", "signature": "fake"})
    else:
        yield _event("content_block_start", index=index, content_block={"type": "text", "text": ""})
        for token in block.tokens:
            yield _delta(index, {"type": "text_delta", "text": token}, block.delay_s)
