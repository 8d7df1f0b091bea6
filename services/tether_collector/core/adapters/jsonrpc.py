"""JSON-RPC over a CLI's pipes, one message a line: what ACP agents and Codex's app server speak.

    request       {id, method, params}      either side asks; the id is a string or a number, chosen by who asks
    response      {id, result | error}      under the asker's id
    notification  {method, params}

ACP says `"jsonrpc":"2.0"`, the app server leaves it out and refuses nothing that has it; a `Dialect` says which. Our
own ids are strings that are derived (from a control, or a step's name), so a replay writes the same bytes. The peer's
ids count anew in each process and may be equal to ours: the two are never compared. Both are kept as `key_of` gives
them, as `0` and `"0"` are different requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tether_collector.core import lines

METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INVALID_REQUEST: Final = -32600
INTERNAL_ERROR: Final = -32603

Id = str | int


@dataclass(frozen=True, slots=True)
class Request:
    """The peer asks something and waits for our response."""

    id: Id
    method: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Notification:
    method: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """The `error` of a response. `message` is redacted and cut; `data` is as it came."""

    code: int
    message: str
    data: Any = None


@dataclass(frozen=True, slots=True)
class Response:
    """The peer's answer to a request of ours. `id` is None where it could not read the request's."""

    id: Id | None
    result: Any = None
    error: Failure | None = None


Message = Request | Notification | Response


def classify(line: Mapping[str, Any]) -> Message | str:
    """What a parsed line is, or why it is no message."""
    has_id = "id" in line
    identifier = line.get("id")
    if has_id and not is_id(identifier) and identifier is not None:
        return "an id that is neither a string nor a number"
    method = line.get("method")
    if isinstance(method, str):
        params = line.get("params")
        named = params if isinstance(params, Mapping) else {}
        if has_id and identifier is not None:
            return Request(identifier, method, named)
        return Notification(method, named)
    if "method" in line:
        return "a method that is not a string"
    if "error" in line and line["error"] is not None:
        return Response(identifier, error=_failure(line["error"]))
    if has_id and "result" in line:
        return Response(identifier, result=line["result"])
    return "neither a request nor a response"


def _failure(value: Any) -> Failure:
    if not isinstance(value, Mapping):
        return Failure(INTERNAL_ERROR, lines.detail_of(value) or "an error without a message")
    code = value.get("code")
    known = code if isinstance(code, int) and not isinstance(code, bool) else INTERNAL_ERROR
    return Failure(known, lines.detail_of(value.get("message")) or "an error without a message", value.get("data"))


def is_id(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def key_of(identifier: Id) -> str:
    """An id as the key of a dict that is dumped as JSON: a number and a string are never the same key."""
    return json.dumps(identifier)


def id_of(key: str) -> Id:
    """The id that `key_of` made a key of."""
    identifier: Id = json.loads(key)
    return identifier


@dataclass(frozen=True, slots=True)
class Dialect:
    """Writes messages, each as one line. `version`: with the member "jsonrpc"."""

    version: bool = True

    def request(self, identifier: Id, method: str, params: Mapping[str, Any] | None = None) -> bytes:
        return self._line({"id": identifier, "method": method, "params": dict(params or {})})

    def notification(self, method: str, params: Mapping[str, Any] | None = None) -> bytes:
        message: dict[str, Any] = {"method": method}
        if params is not None:
            message["params"] = dict(params)
        return self._line(message)

    def result(self, identifier: Id, result: Any) -> bytes:
        return self._line({"id": identifier, "result": result})

    def error(self, identifier: Id, code: int, message: str) -> bytes:
        return self._line({"id": identifier, "error": {"code": code, "message": message}})

    def _line(self, message: dict[str, Any]) -> bytes:
        whole = {"jsonrpc": "2.0", **message} if self.version else message
        return json.dumps(whole, separators=(",", ":")).encode() + b"\n"
