"""`/openapi.json`: the routes as FastAPI knows them, and beside each what it answers, refuses and looks like.

    routes of the app ──FastAPI──▶ paths, parameters ┐
    openapi_routes.ROUTES ── texts, bodies, answers ─┼──▶ document(app)
    pydantic models ── JSON Schema ── components ────┘

FastAPI cannot know what `errors` and `edge` turn into problem documents, nor bodies that are read as bounded JSON, so
each route's entry says it; a route without an entry keeps what FastAPI says of it (a test names it). Problem responses
list the codes that the route can give, as an enum: real answers are checked against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from tether.api import PROBLEM_TYPE
from tether.errors import Code, FieldProblem, Problem, problem

JSON_TYPE: Final = "application/json"
REF_TEMPLATE: Final = "#/components/schemas/{model}"
_METHODS: Final = ("get", "post", "put", "patch", "delete")
_PHRASES: Final = {
    401: "No valid token",
    403: "Not from this host or origin",
    404: "There is no such thing",
    405: "This path does not take the method",
    409: "The state does not allow it",
    410: "A part is gone",
    413: "The body is too large",
    422: "The input is not valid; `fields` names what and the remedy",
    426: "Only for a WebSocket's handshake",
    429: "Too much waits already; `Retry-After` says when to come back",
    500: "The request failed here, and is logged",
    501: "The peer cannot do this",
    504: "No proof in time of what was asked for",
    503: "For now something that is needed does not answer; `Retry-After` says when to come back",
}

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Adds to a parameter that FastAPI knows; with `place`, describes one that the route reads by itself."""

    description: str
    example: Any = None
    place: str | None = None
    schema: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Body:
    model: type[BaseModel]
    examples: Mapping[str, Any]
    required: bool = True
    description: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """One status that is no problem. `frames`: SSE or WebSocket frames by name, with the model of their data (None:
    an empty object). `asks`: what a WebSocket's client may ask, by `op`, with the model of its body. `others`: the same
    as text of another type, with an example."""

    description: str
    model: type[BaseModel] | None = None
    examples: Mapping[str, Any] = field(default_factory=dict)
    media: str = JSON_TYPE
    headers: Mapping[str, str] = field(default_factory=dict)
    frames: Mapping[str, type[BaseModel] | None] = field(default_factory=dict)
    asks: Mapping[str, type[BaseModel]] = field(default_factory=dict)
    schema: Mapping[str, Any] | None = None
    others: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refusal:
    """One problem that the route can give; `name` is unique in the document."""

    name: str
    problem: Problem

    @staticmethod
    def of(name: str, code: Code, detail: str, *, field: str = "", status: int = 0, **context: Any) -> Refusal:
        """`field` with the remedy that `detail` gives after the colon; `status` where it is not the code's own."""
        retry_after_s = context.pop("retry_after_s", None)
        fields = (FieldProblem(field=field, remedy=detail.partition(": ")[2]),) if field else ()
        what = problem(code, detail, fields=fields, retry_after_s=retry_after_s, **context)
        return Refusal(name, what.model_copy(update={"status": status}) if status else what)

    @property
    def value(self) -> Json:
        """As `errors.ProblemResponse` writes it."""
        return {"type": self.problem.type, **self.problem.model_dump(mode="json", exclude_none=True)}


@dataclass(frozen=True, slots=True)
class Route:
    tag: str
    operation_id: str
    summary: str
    description: str
    answers: Mapping[int, Answer]
    refusals: Sequence[Refusal] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    body: Body | None = None
    is_open: bool = False  # needs no token
    is_websocket: bool = False


def install(app: FastAPI, routes: Callable[[], Mapping[str, Route]], about: Mapping[str, Any]) -> None:
    """Make `/openapi.json` this document, built when it is first asked for. `about`: info, tags, servers."""

    def openapi() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = document(app, routes(), about)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def document(app: FastAPI, routes: Mapping[str, Route], about: Mapping[str, Any]) -> Json:
    known = get_openapi(title=app.title, version=app.version, routes=app.routes)
    models = _Models(routes.values())
    examples: Json = {}
    paths: dict[str, Json] = {path: dict(item) for path, item in known["paths"].items()}
    for name, route in routes.items():
        method, _, path = name.partition(" ")
        item = paths.setdefault(path, {})
        item[method.lower()] = _operation(item.get(method.lower(), {}), route, models, examples)
    schemas = {**known.get("components", {}).get("schemas", {}), **models.schemas}
    return {
        "openapi": known["openapi"],
        "info": {"title": app.title, "version": app.version, **about["info"]},
        "servers": list(about["servers"]),
        "tags": list(about["tags"]),
        "security": [{"token": []}],
        "paths": {path: paths[path] for path in sorted(paths)},
        "components": {
            "securitySchemes": {"token": about["security"]},
            "schemas": dict(sorted(_reachable(paths, schemas).items())),
            "examples": dict(sorted(examples.items())),
        },
    }


def undocumented(document: Mapping[str, Any], routes: Mapping[str, Route]) -> list[str]:
    """Operations of the document that have no entry."""
    return [
        f"{method.upper()} {path}"
        for path, item in document["paths"].items()
        for method in _METHODS
        if method in item and f"{method.upper()} {path}" not in routes
    ]


class _Models:
    """The components of every model that a route names. Bodies are as they are read, answers as they are written."""

    def __init__(self, routes: Iterable[Route]) -> None:
        wanted: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {(Problem, "serialization"): None}
        for route in routes:
            if route.body is not None:
                wanted[route.body.model, "validation"] = None
            for answer in route.answers.values():
                for model in (answer.model, *answer.frames.values()):
                    if model is not None:
                        wanted[model, "serialization"] = None
                for asked in answer.asks.values():
                    wanted[asked, "validation"] = None
        self._refs, found = models_json_schema(list(wanted), ref_template=REF_TEMPLATE)
        self.schemas: Json = dict(found.get("$defs", {}))
        self.schemas["ProblemDocument"] = {
            "description": "An answer of type application/problem+json: RFC 9457 with Tether's members.",
            "allOf": [
                {"$ref": REF_TEMPLATE.format(model="Problem")},
                {
                    "type": "object",
                    "required": ["type"],
                    "properties": {"type": {"type": "string", "pattern": "^urn:tether:problem:[a-z_]+$"}},
                },
            ],
        }

    def ref(self, model: type[BaseModel], mode: JsonSchemaMode) -> Json:
        return dict(self._refs[model, mode])


def _operation(known: Json, route: Route, models: _Models, examples: Json) -> Json:
    made: Json = {
        "tags": [route.tag],
        "operationId": route.operation_id,
        "summary": route.summary,
        "description": route.description,
    }
    parameters = [_parameter(each, route.parameters.get(each["name"])) for each in known.get("parameters", ())]
    have = {each["name"] for each in parameters}
    parameters += [_own_parameter(name, each) for name, each in route.parameters.items() if name not in have]
    if parameters:
        made["parameters"] = parameters
    if route.body is not None:
        made["requestBody"] = _request_body(route.body, models)
    made["responses"] = {
        **{str(status): _answer(answer, models) for status, answer in route.answers.items()},
        **_refusals(route.refusals, examples),
    }
    if route.is_open:
        made["security"] = []
    if route.is_websocket:
        made["x-websocket"] = True
    return made


def _parameter(known: Json, told: Parameter | None) -> Json:
    """A query parameter that may be left out is never null."""
    schema = dict(known.get("schema", {}))
    choices = [one for one in schema.pop("anyOf", ()) if one.get("type") != "null"]
    if len(choices) == 1:
        schema |= choices[0]
    elif choices:
        schema["anyOf"] = choices
    made = {**known, "schema": schema}
    return made if told is None else {**made, **_told(told)}


def _own_parameter(name: str, told: Parameter) -> Json:
    assert told.place is not None, f"{name}: FastAPI does not know it, so its place must be said"
    return {
        "name": name,
        "in": told.place,
        "required": told.place == "path",
        "schema": {"type": "string", **told.schema},
        **_told(told),
    }


def _told(told: Parameter) -> Json:
    return {"description": told.description, **({} if told.example is None else {"example": told.example})}


def _request_body(body: Body, models: _Models) -> Json:
    content = {
        "schema": models.ref(body.model, "validation"),
        "examples": {name: {"value": value} for name, value in body.examples.items()},
    }
    made: Json = {"required": body.required, "content": {JSON_TYPE: content}}
    return {**made, "description": body.description} if body.description else made


def _answer(answer: Answer, models: _Models) -> Json:
    made: Json = {"description": answer.description}
    if answer.headers:
        made["headers"] = {
            name: {"description": text, "schema": {"type": "string"}} for name, text in answer.headers.items()
        }
    content: Json = {}
    if answer.model is not None:
        content["schema"] = models.ref(answer.model, "serialization")
    elif answer.schema is not None:
        content["schema"] = dict(answer.schema)
    if answer.examples:
        content["examples"] = {name: {"value": value} for name, value in answer.examples.items()}
    if answer.frames:
        content["x-frames"] = {
            name: {"type": "object"} if model is None else models.ref(model, "serialization")
            for name, model in answer.frames.items()
        }
    if answer.asks:
        content["x-asks"] = {op: models.ref(model, "validation") for op, model in answer.asks.items()}
    if content:
        made["content"] = {answer.media: content}
    for media, example in answer.others.items():
        told = {"schema": {"type": "string"}, "examples": {"text": {"value": example}}}
        made.setdefault("content", {})[media] = told
    return made


def _refusals(refusals: Sequence[Refusal], examples: Json) -> Json:
    by_status: dict[int, list[Refusal]] = {}
    for refusal in refusals:
        by_status.setdefault(refusal.problem.status, []).append(refusal)
        examples[refusal.name] = {"summary": refusal.problem.detail, "value": refusal.value}
    made: Json = {}
    for status, group in sorted(by_status.items()):
        codes = sorted({refusal.problem.code.value for refusal in group})
        content: Json = {
            "schema": {
                "allOf": [
                    {"$ref": REF_TEMPLATE.format(model="ProblemDocument")},
                    {"properties": {"code": {"enum": codes}, "status": {"const": status}}},
                ]
            },
            "examples": {refusal.name: {"$ref": f"#/components/examples/{refusal.name}"} for refusal in group},
        }
        made[str(status)] = {
            "description": f"{_PHRASES[status]} ({', '.join(codes)})",
            "content": {PROBLEM_TYPE: content},
        }
        if any(refusal.problem.retry_after_s is not None for refusal in group):
            schema = {"type": "integer", "minimum": 1}
            made[str(status)]["headers"] = {"Retry-After": {"description": "seconds", "schema": schema}}
    return made


def _reachable(paths: Json, schemas: Json) -> Json:
    """The schemas that the paths refer to, directly or through others."""
    found: Json = {}
    waiting: list[Any] = [paths]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list | tuple):
            waiting.extend(value)
        elif isinstance(value, dict):
            name = str(value.get("$ref", "")).removeprefix("#/components/schemas/")
            if name in schemas and name not in found:
                found[name] = schemas[name]
                waiting.append(schemas[name])
            waiting.extend(value.values())
    return found
