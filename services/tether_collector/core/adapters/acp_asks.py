"""What an ACP agent asks of its client, and how an answer is written.

    session/request_permission  → an approval; the answer names one of the options that were offered
    elicitation/create (form)   → a question for each property of the form
    anything else               → a JSON-RPC error at once: we offer no files and no terminals

A request's id counts anew in each process, so an interaction's key has the execution's prompt id in front: an answer
that comes too late never meets a question of the next process.

An answer cannot change a tool's input, and a refusal carries no reason: the protocol has no place for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tether import events as ev
from tether.errors import InvalidError
from tether_collector.core import lines
from tether_collector.core.adapters import acp_updates as updates
from tether_collector.core.adapters import base as b
from tether_collector.core.adapters import jsonrpc as rpc
from tether_collector.core.adapters.acp_rules import Profile, member_of
from tether_collector.core.adapters.questions import chosen
from tether_collector.core.inputs import Draft

State = dict[str, Any]

DIALECT: Final = rpc.Dialect()
CANCELLED: Final = {"outcome": {"outcome": "cancelled"}}
PICK: Final = "option"  # key of `answers` under which an approval's answer may name an offered option
_OPTIONS_MAX: Final = 64
_QUESTIONS_MAX: Final = 64
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


def read(profile: Profile, state: State, request: rpc.Request) -> b.Reading:
    """A request of the agent: asked of a human, or refused by name."""
    asked = request.method in ("session/request_permission", "elicitation/create")
    if asked and state["cancels"]:  # it was asked while the interrupt was on its way
        result = CANCELLED if request.method == "session/request_permission" else {"action": "cancel"}
        return b.Reading((), (reply(state, DIALECT.result(request.id, result)),))
    if request.method == "session/request_permission":
        drafts = _permission(profile, state, request)
    elif request.method == "elicitation/create":
        drafts = _elicitation(profile, state, request)
    else:
        return refuse(state, request, rpc.METHOD_NOT_FOUND, f"{request.method[:64]} is not offered by this client")
    if isinstance(drafts, str):
        return refuse(state, request, rpc.INVALID_PARAMS, drafts)
    return b.Reading(drafts)


def refuse(state: State, request: rpc.Request, code: int, why: str) -> b.Reading:
    return b.Reading((), (reply(state, DIALECT.error(request.id, code, why)),))


def reply(state: State, data: bytes, *, work: bool = False) -> b.Reply:
    """Bytes of our own, under the next id."""
    state["replies"] += 1
    return b.Reply(f"reply:{state['replies']}", data, work)


def _key(state: State, request: rpc.Request) -> str:
    number = str(request.id) if isinstance(request.id, int) else f"s{request.id}"
    front = str(state["start"]["prompt"]).replace("-", "")[:16]
    return lines.token_of(f"{front}-{number}") or front


# --- asking ----------------------------------------------------------------------------------------------------------


def _permission(profile: Profile, state: State, request: rpc.Request) -> list[Draft] | str:
    call = request.params.get("toolCall")
    tool = lines.id_of(member_of(call, ("toolCallId",)))
    options = _options(request.params.get("options"))
    if not isinstance(call, Mapping) or tool is None or not options:
        return "a permission request needs toolCall.toolCallId and options"
    key = _key(state, request)
    drafts = updates.settle_tools(state, tool) + updates.complete(state)
    ask: dict[str, Any] = {"request": rpc.key_of(request.id), "tool": tool, "options": options, "withdrawn": False}
    body: dict[str, Any] = {"interaction": key, "kind": "approval", "tool": tool}
    if tool not in state["over"]:
        entry = updates.note_tool(state, tool, call)
        body["name"] = entry["name"] or entry["title"]
        drafts += updates.start_tool(state, tool)
    title = lines.text_of(call.get("title"))
    body["input"] = call.get("rawInput", {"title": title})
    if title is not None:
        body["description"] = title
    asked = _asked(call) if profile.answers_beside_outcome else []
    if asked:
        body.update(kind="question", questions=asked)
        ask["questions"] = [{**question, "by": place} for place, question in enumerate(asked)]
    else:
        body["options"] = options
    state["asks"][key] = ask
    drafts.append(Draft(ev.INTERACTION_REQUESTED, body))
    return drafts


def _options(value: Any) -> list[dict[str, str]]:
    options = []
    for entry in (value if isinstance(value, list) else [])[:_OPTIONS_MAX]:
        option, kind = member_of(entry, ("optionId",)), member_of(entry, ("kind",))
        if isinstance(option, str) and isinstance(kind, str):
            label = lines.text_of(entry.get("name"), lines.NAME_CHARS) or option
            options.append({"id": option, "label": label, "kind": kind})
    return options


def _asked(call: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Questions in the input of a tool that asks them."""
    given = member_of(call.get("rawInput"), ("questions",))
    questions = []
    for place, entry in enumerate((given if isinstance(given, list) else [])[:_QUESTIONS_MAX]):
        text = lines.text_of(member_of(entry, ("question",)))
        if text is not None:
            options = entry.get("options")
            question = {
                "id": str(place),
                "question": text,
                "options": [dict(option) for option in options if isinstance(option, Mapping)]
                if isinstance(options, list)
                else [],
                "multiple": entry.get("multiSelect") is True,
            }
            if header := lines.text_of(entry.get("header"), lines.NAME_CHARS):
                question["header"] = header
            questions.append(question)
    return questions


def _elicitation(profile: Profile, state: State, request: rpc.Request) -> list[Draft] | str:
    params = request.params
    properties = member_of(params.get("requestedSchema"), ("properties",))
    if params.get("mode") != "form" or not isinstance(properties, Mapping) or not properties:
        return "only an elicitation with a form of at least one property is offered"
    message = lines.text_of(params.get("message")) or ""
    required = member_of(params.get("requestedSchema"), ("required",))
    required = required if isinstance(required, list) else []
    companions = _companions(profile, properties)
    fields = [
        _field(name, schema, companions.get(name), message, name in required)
        for name, schema in list(properties.items())[:_QUESTIONS_MAX]
        if isinstance(schema, Mapping) and name not in companions.values()
    ]
    if len(fields) == 1:
        fields[0].update({"question": message} if message else {}, optional=False)
    key = _key(state, request)
    tool = lines.id_of(params.get("toolCallId"))
    drafts = updates.settle_tools(state, tool) + updates.complete(state)
    body: dict[str, Any] = {"interaction": key, "kind": "question", "description": message}
    if tool is not None and tool in state["tools"]:
        body["tool"], body["name"] = tool, state["tools"][tool]["name"]
        drafts += updates.start_tool(state, tool)
    shown = ("id", "question", "header", "options", "multiple")
    body["questions"] = [{name: field[name] for name in shown if name in field} for field in fields]
    state["asks"][key] = {
        "request": rpc.key_of(request.id),
        "tool": tool,
        "options": None,
        "questions": fields,
        "withdrawn": False,
    }
    drafts.append(Draft(ev.INTERACTION_REQUESTED, body))
    return drafts


def _companions(profile: Profile, properties: Mapping[str, Any]) -> dict[str, str]:
    """Choice → the property for free text that belongs to it."""
    suffix = profile.free_text_suffix
    return {name: f"{name}{suffix}" for name in properties if suffix and f"{name}{suffix}" in properties}


def _field(
    name: str, schema: Mapping[str, Any], companion: str | None, message: str, is_required: bool
) -> dict[str, Any]:
    multiple = schema.get("type") == "array"
    choices = schema.get("items") if multiple else schema
    options = []
    named = member_of(choices, ("oneOf",)) or member_of(choices, ("anyOf",))
    for entry in named if isinstance(named, list) else []:
        value = member_of(entry, ("const",))
        if isinstance(value, str):
            option = {"label": value}
            if description := lines.text_of(entry.get("description")):
                option["description"] = description
            options.append(option)
    listed = member_of(choices, ("enum",))
    options += [{"label": each} for each in (listed if isinstance(listed, list) else []) if isinstance(each, str)]
    question = lines.text_of(schema.get("description")) or lines.text_of(schema.get("title")) or message or name
    field: dict[str, Any] = {
        "id": name,
        "question": question,
        "options": options[:_OPTIONS_MAX],
        "multiple": multiple,
        "type": schema.get("type") if isinstance(schema.get("type"), str) else "string",
        "companion": companion,
        "optional": not is_required,
    }
    if header := lines.text_of(schema.get("title"), lines.NAME_CHARS):
        field["header"] = header
    return field


# --- answering -------------------------------------------------------------------------------------------------------


def answer(state: State, given: b.Answer) -> bytes:
    """Raises `InvalidError` naming the field and what would do instead."""
    ask = state["asks"].get(given.interaction)
    if ask is None or ask["withdrawn"]:
        raise InvalidError("payload.interaction", "is not open")
    if given.input is not None:
        detail = "cannot be changed for this agent: deny, and say in a prompt what is to run instead"
        raise InvalidError("payload.input", detail)
    identifier = rpc.id_of(ask["request"])
    questions = ask.get("questions")
    if questions is None:
        return DIALECT.result(identifier, _chosen(ask["options"], given))
    if ask["options"] is None:
        if given.decision == "deny":
            return DIALECT.result(identifier, {"action": "decline"})
        return DIALECT.result(identifier, {"action": "accept", "content": _content(questions, given)})
    if given.decision == "deny":
        return DIALECT.result(identifier, _chosen(ask["options"], b.Answer(given.interaction, "deny")))
    texts = chosen(questions, given)
    beside = {str(question["by"]): ", ".join(texts[question["id"]]) for question in questions}
    allowed = _chosen(ask["options"], b.Answer(given.interaction, "allow"))
    return DIALECT.result(identifier, {**allowed, "answers": beside})


def withdraw(state: State) -> bytes:
    """Every open request is answered as cancelled, as the protocol asks of who cancels a turn."""
    data = b""
    for ask in state["asks"].values():
        if not ask["withdrawn"]:
            ask["withdrawn"] = True
            result = {"action": "cancel"} if ask["options"] is None else CANCELLED
            data += DIALECT.result(rpc.id_of(ask["request"]), result)
    return data


def _chosen(options: list[dict[str, str]], given: b.Answer) -> dict[str, Any]:
    """An option for this once, unless the answer names one of those that were offered."""
    wanted = "allow" if given.decision == "allow" else "reject"
    fitting = [option for option in options if option["kind"].startswith(wanted)]
    picked = given.answers.get(PICK)
    unknown = next((name for name in given.answers if name != PICK), None)
    if unknown is not None:
        raise InvalidError(f"payload.answers.{unknown[:64]}", f"an approval takes none but {PICK!r}")
    if picked is not None:
        ids = [option["id"] for option in fitting]
        if len(picked) != 1 or picked[0] not in ids:
            offered = ", ".join(ids) or "none"
            raise InvalidError(f"payload.answers.{PICK}", f"must be one of the offered options to {wanted}: {offered}")
        return _selected(picked[0])
    for kind in (f"{wanted}_once", f"{wanted}_always"):
        for option in fitting:
            if option["kind"] == kind:
                return _selected(option["id"])
    if wanted == "reject":
        return CANCELLED
    offered = ", ".join(option["id"] for option in options)
    raise InvalidError("payload.decision", f"the agent offers no option to allow this, but {offered}: deny it")


def _selected(option: str) -> dict[str, Any]:
    return {"outcome": {"outcome": "selected", "optionId": option}}


def _content(fields: Sequence[Mapping[str, Any]], given: b.Answer) -> dict[str, Any]:
    """The form, filled in."""
    content: dict[str, Any] = {}
    texts = chosen(fields, given)
    for field in fields:
        picked = texts.get(field["id"], [])
        labels = [option["label"] for option in field["options"]]
        others = [text for text in picked if labels and text not in labels]
        if others and field["companion"] is not None:
            content[field["companion"]] = ", ".join(others)
            picked = [text for text in picked if text in labels]
        elif others:
            detail = f"must be {'among' if field['multiple'] else 'one of'} {', '.join(labels)}"
            raise InvalidError(f"payload.answers.{field['id']}", detail)
        if picked:
            content[field["id"]] = picked if field["multiple"] else _typed(field, picked[0])
    return content


def _typed(field: Mapping[str, Any], text: str) -> Any:
    """A text as the form's property wants it."""
    where = f"payload.answers.{field['id']}"
    if field["type"] == "boolean":
        if text.lower() in (*_TRUE, *_FALSE):
            return text.lower() in _TRUE
        raise InvalidError(where, "must be true or false")
    if field["type"] in ("integer", "number"):
        try:
            number = int(text) if field["type"] == "integer" else float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise InvalidError(where, f"must be of type {field['type']}")
        return number
    return text
