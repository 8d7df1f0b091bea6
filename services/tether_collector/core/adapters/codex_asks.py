"""What Codex asks a human: approvals, permissions, questions, forms of MCP servers. Everything else that it asks its
client for is refused by name, so that it does not wait.

    request{id, …} ─▶ interaction.requested ─▶ our response ─▶ serverRequest/resolved
                                             └─ or the turn ends: cancelled

The ids of requests count from 0 in each process, so an interaction is called by the item and the id. A denial of the
newer forms takes no text: it is steered into the turn as a message of its own, right behind the denial.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tether import events as ev
from tether.errors import InvalidError
from tether_collector.core import lines
from tether_collector.core.adapters import base as b
from tether_collector.core.adapters import questions as q
from tether_collector.core.adapters.codex_wire import DENIED, DENY, RPC, State, reply_id
from tether_collector.core.adapters.jsonrpc import INTERNAL_ERROR, METHOD_NOT_FOUND, Request
from tether_collector.core.inputs import Draft

Params = Mapping[str, Any]
COMMAND: Final = "command"  # and file changes: accept or decline
PERMISSIONS: Final = "permissions"
LEGACY: Final = "legacy"
QUESTION: Final = "question"
FORM: Final = "form"
_FORMS: Final[dict[str, str]] = {
    "item/commandExecution/requestApproval": COMMAND,
    "item/fileChange/requestApproval": COMMAND,
    "item/permissions/requestApproval": PERMISSIONS,
    "execCommandApproval": LEGACY,
    "applyPatchApproval": LEGACY,
    "item/tool/requestUserInput": QUESTION,
    "mcpServer/elicitation/request": FORM,
}
_NAMES: Final[dict[str, str]] = {
    "item/commandExecution/requestApproval": "commandExecution",
    "item/fileChange/requestApproval": "fileChange",
    "item/permissions/requestApproval": "permissions",
    "execCommandApproval": "commandExecution",
    "applyPatchApproval": "fileChange",
    "item/tool/requestUserInput": "requestUserInput",
    "mcpServer/elicitation/request": "elicitation",
}
_NO_INPUT: Final = "Codex takes no changed input; deny it with a text that says what to do instead"


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that nobody here can answer: what is written back, and why the line is shown as it is."""

    reply: b.Reply
    why: str


def asked(state: State, request: Request) -> b.Reading | Refused:
    form = _FORMS.get(request.method)
    if form is None:
        why = f"this client has no {request.method[: lines.NAME_CHARS]}"
        reply = b.Reply(reply_id(state), RPC.error(request.id, METHOD_NOT_FOUND, why))
        return Refused(reply, why)
    params = request.params
    tool = lines.id_of(params.get("itemId")) or lines.id_of(params.get("callId"))
    key = lines.token_of(f"{tool or params.get('turnId') or 'request'}_{request.id}") or "request"
    ask: dict[str, Any] = {
        "request": request.id,
        "form": form,
        "turn": lines.id_of(params.get("turnId")),
        "thread": params.get("threadId") if isinstance(params.get("threadId"), str) else state["thread"],
        "input": None,
        "questions": None,
    }
    body: dict[str, Any] = {"interaction": key, "kind": "approval", "name": _NAMES[request.method]}
    if form in (QUESTION, FORM):
        ask["questions"], ask["types"] = _questions(params) if form == QUESTION else _form(params)
    if ask["questions"]:
        body["kind"], body["questions"] = "question", ask["questions"]
    else:
        ask["input"] = body["input"] = _input(state, request.method, params, tool)
    if tool is not None:
        body["tool"] = tool
    description = lines.detail_of(params.get("reason")) or lines.detail_of(params.get("message"))
    if description is not None:
        body["description"] = description
    state["asks"][key] = ask
    return b.Reading((Draft(ev.INTERACTION_REQUESTED, body),))


def _input(state: State, method: str, params: Params, tool: str | None) -> dict[str, Any]:
    match method:
        case "item/fileChange/requestApproval":
            changes = state["changes"].get(tool)
            found = {"changes": changes, "grantRoot": params.get("grantRoot")}
        case "applyPatchApproval":
            found = {"changes": params.get("fileChanges"), "grantRoot": params.get("grantRoot")}
        case "item/permissions/requestApproval":
            found = {"permissions": params.get("permissions"), "cwd": params.get("cwd")}
        case "mcpServer/elicitation/request":
            found = {"server": params.get("serverName"), "url": params.get("url"), "meta": params.get("_meta")}
        case _:
            found = {"command": params.get("command"), "cwd": params.get("cwd")}
            found["network"] = params.get("networkApprovalContext")
    return {name: value for name, value in found.items() if value is not None}


def _questions(params: Params) -> tuple[list[dict[str, Any]], dict[str, str]]:
    entries = params.get("questions")
    questions: list[dict[str, Any]] = []
    for entry in entries if isinstance(entries, list) else ():
        identifier = lines.text_of(entry.get("id"), lines.NAME_CHARS) if isinstance(entry, Mapping) else None
        if identifier is not None:
            options = entry.get("options")
            questions.append(_question(identifier, entry.get("question"), entry.get("header"), options))
    return questions, {}


def _question(identifier: str, text: Any, header: Any, options: Any, *, multiple: bool = False) -> dict[str, Any]:
    question: dict[str, Any] = {
        "id": identifier,
        "question": text if isinstance(text, str) else identifier,
        "options": [dict(o) for o in options if isinstance(o, Mapping)] if isinstance(options, list) else [],
        "multiple": multiple,
    }
    if (told := lines.text_of(header, lines.NAME_CHARS)) is not None:
        question["header"] = told
    return question


def _form(params: Params) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A question for each field of the form, and the fields' types; a form without fields is an approval."""
    schema = params.get("requestedSchema")
    fields = schema.get("properties") if isinstance(schema, Mapping) else None
    questions: list[dict[str, Any]] = []
    types: dict[str, str] = {}
    for name, field in fields.items() if isinstance(fields, Mapping) else ():
        if not isinstance(field, Mapping):
            continue
        kind = field.get("type")
        types[name] = kind if isinstance(kind, str) else "string"
        labels = field.get("enum")
        if kind == "boolean":
            labels = ["true", "false"]
        options = [{"label": label} for label in labels if isinstance(label, str)] if isinstance(labels, list) else []
        told = field.get("description") or field.get("title")
        questions.append(_question(name, told, field.get("title"), options, multiple=kind == "array"))
    return questions, types


# --- answers ---------------------------------------------------------------------------------------------------------


def answer(state: State, answer: b.Answer) -> bytes:
    """The bytes of the response. Raises `InvalidError` for an answer that the request cannot take."""
    ask = state["asks"].get(answer.interaction)
    if ask is None:
        raise InvalidError("payload.interaction", "is not open")
    _check(ask, answer)
    if answer.decision == "allow":
        return RPC.result(ask["request"], _allowed(ask, answer))
    return _denied(state, ask, answer)


def _check(ask: dict[str, Any], answer: b.Answer) -> None:
    if answer.decision == "deny":
        return
    if ask["questions"]:
        if answer.input is not None:
            raise InvalidError("payload.input", "only an approval takes a changed input")
    elif answer.answers:
        raise InvalidError("payload.answers", "an approval takes none")
    elif answer.input is not None and ask["form"] != PERMISSIONS and dict(answer.input) != ask["input"]:
        raise InvalidError("payload.input", _NO_INPUT)


def _allowed(ask: dict[str, Any], answer: b.Answer) -> dict[str, Any]:
    match ask["form"]:
        case "permissions":
            granted = (ask["input"] if answer.input is None else answer.input).get("permissions")
            if not isinstance(granted, Mapping):
                raise InvalidError("payload.input.permissions", "must be those that are granted")
            return {"permissions": dict(granted), "scope": "turn"}
        case "legacy":
            return {"decision": "approved"}
        case "question":
            chosen = q.chosen(ask["questions"], answer)
            return {"answers": {key: {"answers": labels} for key, labels in chosen.items()}}
        case "form":
            if not ask["questions"]:
                return {"action": "accept", "content": {}}
            chosen = q.chosen(ask["questions"], answer)
            return {"action": "accept", "content": {k: _typed(k, v, ask["types"][k]) for k, v in chosen.items()}}
        case _:
            return {"decision": "accept"}


def _typed(name: str, chosen: list[str], kind: str) -> Any:
    """A form's value in the type that its field has."""
    text = chosen[0]
    try:
        match kind:
            case "array":
                return chosen
            case "boolean":
                return {"true": True, "false": False}[text.lower()]
            case "integer":
                return int(text)
            case "number":
                return float(text)
            case _:
                return text
    except (KeyError, ValueError):
        raise InvalidError(f"payload.answers.{name}", f"must be a value of type {kind}") from None


def _denied(state: State, ask: dict[str, Any], answer: b.Answer) -> bytes:
    request = ask["request"]
    match ask["form"]:
        case "legacy":
            return RPC.result(request, {"decision": {"denied": {"rejection": answer.text or DENIED}}})
        case "permissions":
            denial = RPC.result(request, {"permissions": {}, "scope": "turn"})
        case "question":
            denial = RPC.error(request, INTERNAL_ERROR, answer.text or DENIED)
        case "form":
            denial = RPC.result(request, {"action": "decline"})
        case _:
            denial = RPC.result(request, {"decision": "decline"})
    if not answer.text or ask["turn"] is None:
        return denial
    params = {
        "threadId": ask["thread"],
        "expectedTurnId": ask["turn"],
        "input": [{"type": "text", "text": answer.text}],
    }
    return denial + RPC.request(f"{DENY}{answer.interaction}", "turn/steer", params)
