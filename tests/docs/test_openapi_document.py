"""The OpenAPI document by itself: valid, complete, and its examples are of the shapes that it describes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from support_openapi import errors_of, openapi, operations
from tether.api import IDEMPOTENCY_HEADER, PROBLEM_TYPE
from tether.errors import problem
from tether_backend.http import openapi_refusals, openapi_routes
from tether_backend.http.app import build
from tether_backend.http.openapi import Refusal, undocumented

ROOT = Path(__file__).parents[2]
Json = dict[str, Any]


def flat(routes: Any) -> Iterator[Any]:
    for route in routes:
        included = getattr(route, "original_router", None)
        yield from flat(included.routes) if included is not None else [route]


def test_the_document_is_valid_openapi_3_1() -> None:
    found = [f"{error.json_path}: {error.message}" for error in OpenAPIV31SpecValidator(openapi()).iter_errors()]
    assert found == []


def test_the_exported_file_is_the_served_document() -> None:
    assert json.loads((ROOT / "docs" / "openapi.json").read_text()) == openapi(), "run `make generate`"


def test_every_route_of_the_application_is_in_the_document_with_an_entry_of_its_own() -> None:
    missing = []
    told = {f"{method} {path}" for method, path, _ in operations(openapi())}
    for route in flat(build(None).routes):
        path = getattr(route, "path_format", None) or route.path
        methods = getattr(route, "methods", None) or {"GET"}  # a WebSocket begins as a GET
        missing += [f"{method} {path}" for method in methods - {"HEAD"} if f"{method} {path}" not in told]
    assert missing == []
    assert undocumented(openapi(), openapi_routes.routes()) == []


def test_every_entry_is_of_a_route_that_exists() -> None:
    there = set()
    for route in flat(build(None).routes):
        path = getattr(route, "path_format", None) or route.path
        there |= {f"{method} {path}" for method in getattr(route, "methods", None) or {"GET"}}
    assert set(openapi_routes.routes()) - there == set()


@pytest.mark.parametrize(("method", "path", "operation"), operations(openapi()))
def test_an_operation_says_what_it_is_for_and_what_its_parameters_mean(method: str, path: str, operation: Json) -> None:
    assert operation["summary"] and operation["description"] and operation["operationId"]
    assert operation["tags"][0] in {tag["name"] for tag in openapi()["tags"]}
    for parameter in operation.get("parameters", []):
        assert parameter["description"], parameter["name"]
        assert errors_of(parameter["schema"], parameter["example"]) == [], parameter["name"]
    bodied = method == "POST"
    assert ("requestBody" in operation) == (bodied and not path.endswith(("/tickets", "/retry")))
    assert "401" in operation["responses"] or operation["security"] == []


def test_operation_ids_are_unique() -> None:
    ids = [operation["operationId"] for _, _, operation in operations(openapi())]
    assert sorted(set(ids)) == sorted(ids)


def examples_of(content: Json) -> Iterator[tuple[str, Any]]:
    for name, example in content.get("examples", {}).items():
        if "$ref" in example:
            example = openapi()["components"]["examples"][example["$ref"].rpartition("/")[2]]
        yield name, example["value"]


@pytest.mark.parametrize(("method", "path", "operation"), operations(openapi()))
def test_every_example_is_of_the_shape_that_is_described(method: str, path: str, operation: Json) -> None:
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        assert content["examples"], media
        for name, value in examples_of(content):
            assert errors_of(content["schema"], value) == [], name
    for status, answer in operation["responses"].items():
        for media, content in answer.get("content", {}).items():
            found = dict(examples_of(content))
            assert found or media in ("text/html", "*/*"), f"{status} {media} has no example"
            for name, value in found.items():
                assert errors_of(content["schema"], value) == [], f"{status} {name}"
                if media == PROBLEM_TYPE:
                    assert str(value["status"]) == status, name


def test_a_streams_examples_are_frames_of_the_shapes_that_it_names() -> None:
    content = openapi()["paths"]["/v1/conversations/{conversation}/events"]["get"]["responses"]["200"]["content"]
    stream = content["text/event-stream"]
    seen = set()
    for _, text in examples_of(stream):
        for block in text.strip().split("\n\n"):
            lines = dict(line.partition(": ")[::2] for line in block.split("\n"))
            if "data" not in lines:
                assert block.startswith((": hb", "retry: ")), block
                continue
            name = lines.get("event", "message")
            seen.add(name)
            assert errors_of(stream["x-frames"][name], json.loads(lines["data"])) == [], name
            assert ("id" in lines) == (name != "problem")
    assert seen == set(stream["x-frames"])


def test_a_websockets_examples_are_frames_of_the_shapes_that_it_names() -> None:
    told = openapi()["paths"]["/v1/conversations/{conversation}/ws"]["get"]["responses"]["101"]["content"]
    messages = told["application/json"]
    found = dict(examples_of(messages))
    for name, value in found.items():
        assert errors_of(messages["x-frames"][name], value["data"]) == [], name
    assert set(found) == set(messages["x-frames"])


def test_a_problems_title_status_and_retryability_are_those_of_its_code() -> None:
    for name, example in openapi()["components"]["examples"].items():
        value = example["value"]
        default = problem(value["code"], "")
        assert value["title"] == default.title, name
        assert value["status"] in (default.status, 413, 405, 426, 500), name


def test_what_differs_from_its_schema_is_found() -> None:
    """The checks above can fail."""
    history = {"$ref": "#/components/schemas/ConversationHistory"}
    assert errors_of(history, {"conversation": "c"}) != []
    broken = Refusal.of("x", openapi_refusals.BAD_ID.problem.code, "f: r", field="f").value | {"type": 3}
    assert errors_of({"$ref": "#/components/schemas/ProblemDocument"}, broken) != []


def test_controls_can_be_named_by_header() -> None:
    named = {
        path
        for _, path, operation in operations(openapi())
        if any(parameter["name"] == IDEMPOTENCY_HEADER for parameter in operation.get("parameters", []))
    }
    assert named == {
        "/v1/executions/{execution}/{verb}",
        "/v1/conversations/{conversation}/interactions/{interaction}",
    }
