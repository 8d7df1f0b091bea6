"""The OpenAPI document against what is really sent: schemas of its components, answers by operation and status."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import httpx2
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tether_backend.http.app import build

Json = dict[str, Any]
_METHODS = ("get", "post", "put", "patch", "delete")
_URI = "urn:openapi"


@functools.cache
def openapi() -> Json:
    """As the backend serves it."""
    found: Json = json.loads(json.dumps(build(None).openapi()))
    return found


def errors_of(schema: Json, value: Any, document: Json | None = None) -> list[str]:
    """What of `value` is not as `schema` says; references are the document's."""
    whole = Resource.from_contents(document or openapi(), default_specification=DRAFT202012)
    registry: Registry[Any] = Registry().with_resource(_URI, whole)
    absolute = json.loads(json.dumps(schema).replace('"#/', f'"{_URI}#/'))
    validator = Draft202012Validator(absolute, registry=registry)
    return [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(value)]


def operations(document: Json) -> list[tuple[str, str, Json]]:
    """(method, path, operation)."""
    return [
        (method.upper(), path, item[method])
        for path, item in document["paths"].items()
        for method in _METHODS
        if method in item
    ]


def operation_of(method: str, path: str) -> tuple[str, Json] | None:
    """(template, operation) of a request's path, of several the one with the fewest parameters; None: there is none."""
    found = []
    for name, template, operation in operations(openapi()):
        pattern = re.sub(r"\\\{interaction\\\}$", ".+", re.escape(template))
        for parameter in operation.get("parameters", ()):
            if parameter["in"] == "path" and (words := parameter["schema"].get("enum")):
                pattern = pattern.replace(rf"\{{{parameter['name']}\}}", f"(?:{'|'.join(words)})")
        pattern = re.sub(r"\\\{[a-z_]+\\\}", "[^/]+", pattern)
        if name == method and re.fullmatch(pattern, path):
            found.append((template.count("{"), template, operation))
    if not found:
        return None
    _, template, operation = min(found, key=lambda one: one[0])
    return template, operation


def check_answer(answer: httpx2.Response) -> str:
    """Fails where the document does not say this answer. Returns `METHOD template status [CODE]`."""
    request = answer.request
    known = operation_of(request.method, request.url.path)
    if known is None:
        assert answer.status_code in (401, 403, 404, 405, 413, 422), f"{request.method} {request.url.path} is not told"
        return f"{request.method} ? {answer.status_code}"
    template, operation = known
    where = f"{request.method} {template} {answer.status_code}"
    told = operation["responses"].get(str(answer.status_code))
    assert told is not None, f"{where}: not in the document: {answer.text[:300]}"
    if "content" not in told:
        assert not answer.content, f"{where}: has a body"
        return where
    media = answer.headers["content-type"].partition(";")[0]
    assert media in told["content"] or "*/*" in told["content"], f"{where}: {media} is not in the document"
    if media.endswith("json"):
        value = answer.json()
        found = errors_of(told["content"][media]["schema"], value)
        assert not found, f"{where}: {found}\n{value}"
        if media == "application/problem+json":
            return f"{where} {value['code']}"
    return where


async def documented(answer: httpx2.Response) -> None:
    """A client's response hook: whatever a test asks, the document must say the answer."""
    await answer.aread()
    check_answer(answer)
