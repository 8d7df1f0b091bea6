"""The edge: who may come in, and what hostile input is answered with."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support_backend import Backend, Log, running_backend, token_of, write_tokens
from tether.settings import ConfigurationError, load
from tether.testing import MemoryBus, MemoryServer
from tether_backend.config import BackendSettings, load_tokens
from tether_backend.http.app import build

TENANT = "acme"


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Backend]:
    tmp_path = tmp_path_factory.mktemp("edge")
    bus = MemoryBus(MemoryServer())
    async with running_backend(bus, [TENANT], tmp_path) as running:
        log = Log(bus, TENANT)
        await log.prompt("q1", "r1", "e1")
        await log.frame("e1", [log.started("e1")])
        await running.projected("c1", "e1", 1)
        yield running


GETS = (
    "/v1/conversations",
    "/v1/conversations/c1",
    "/v1/conversations/c1/events",
    "/v1/conversations/c1/ws",
    "/v1/executions",
    "/v1/executions/e1",
    "/v1/executions/e1/items",
    "/v1/executions/e1/snapshot",
    "/v1/controls/k1?execution=e1",
    "/v1/sandboxes",
    "/metrics",
    "/openapi.json",
)
POSTS = (
    "/v1/conversations/c1/messages",
    "/v1/conversations/c1/interactions/i1",
    "/v1/executions/e1/interrupt",
    "/v1/executions/e1/stop",
)


# How pydantic speaks of its types and values; callers get our words.
PYDANTIC = re.compile(r"Value error|[Ii]nput should|[Ss]tring should|[Ff]ield required|Extra inputs|valid (tuple|dict)")


def assert_problem(answer: Any, status: int, code: str, field: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    value = answer.json()
    assert value["code"] == code and value["status"] == status and "retryable" in value
    assert value["type"] == f"urn:tether:problem:{code.lower()}" and value["title"] and value["detail"]
    if field is not None:
        assert field in [one["field"] for one in value["fields"]], value
    for one in value.get("fields", ()):
        assert not PYDANTIC.search(one["remedy"]), one


@pytest.mark.parametrize("path", [*GETS, *POSTS, "/nowhere"])
async def test_every_path_needs_a_valid_token(backend: Backend, path: str) -> None:
    method = "POST" if path in POSTS else "GET"
    for header in ("", "Bearer", "Bearer wrong", "Basic abc", f"Bearer {token_of(TENANT)}x", "Bearer " + "a" * 9000):
        answer = await backend.client.request(method, path, headers={"Authorization": header})
        assert_problem(answer, 401, "UNAUTHENTICATED")
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_probes_need_no_token_and_say_what_is_missing(backend: Backend) -> None:
    for path in ("/healthz", "/readyz"):
        answer = await backend.client.get(path, headers={"Authorization": "", "Host": "10.0.0.7"})
        assert answer.status_code == 200 and answer.json()["status"] == "ok"


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"Host": "evil.example"}, "host"),
        ({"Host": "127.0.0.1.evil.example:80"}, "host"),
        ({"Host": "[::1"}, "host"),
        ({"Origin": "https://evil.example"}, "origin"),
        ({"Origin": "null"}, "origin"),
        ({"Origin": "http://127.0.0.1:1"}, "origin"),
    ],
)
async def test_foreign_hosts_and_origins_are_refused(backend: Backend, headers: dict[str, str], field: str) -> None:
    assert_problem(await backend.client.get("/v1/conversations", headers=headers), 403, "FORBIDDEN", field)


async def test_the_own_origin_is_let_in(backend: Backend) -> None:
    answer = await backend.client.get("/v1/conversations", headers={"Origin": backend.url})
    assert answer.status_code == 200


async def test_unknown_paths_and_methods_are_problems(backend: Backend) -> None:
    for path in ("/v1", "/v2/conversations", "/v1/conversations/c1/", "/v1/conversations/c1/nothing", "/docs"):
        assert_problem(await backend.client.get(path), 404, "NOT_FOUND")
    for path in POSTS:
        assert (await backend.client.get(path)).status_code in (404, 405)
    for path in GETS:
        answer = await backend.client.put(path)
        assert_problem(answer, 405, "INVALID", "method")


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"{", "body"),
        (b"[]", "body"),
        (b'"text"', "body"),
        (b"null", "body"),
        (b"\xff\xfe{}", "body"),
        (b'{"a": NaN}', "body"),
        (b'{"a": -Infinity}', "body"),
        (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", "body"),
        (b'{"a":' + b"[" * 100_000, "body"),
        (b'{"unknown_field": 1}', "unknown_field"),
    ],
)
async def test_damaged_bodies_are_refused_by_field(backend: Backend, path: str, data: bytes, field: str) -> None:
    answer = await backend.client.post(path, content=data)
    assert_problem(answer, 422, "INVALID")
    named = [one["field"] for one in answer.json()["fields"]]
    # Where a required field is missing as well, that one may be named first.
    assert named and (field in named or (field == "unknown_field" and named[0] in ("request_id", "decision")))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request_id": None}, "request_id"),
        ({"request_id": 7}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "../../etc"}, "request_id"),
        ({"request_id": "a.b"}, "request_id"),
        ({"request_id": "a" * 65}, "request_id"),
        ({"request_id": "q\u0000"}, "request_id"),
        ({"content": []}, "content"),
        ({"content": "text"}, "content"),
        ({"content": [{"type": "image", "url": "x"}]}, "content.0.type"),
        ({"content": [{"type": "text", "text": ""}]}, "content.0.text"),
        ({"content": [{"type": "text", "text": "x", "extra": 1}]}, "content.0.extra"),
        ({"content": [{"type": "text", "text": "x"}] * 65}, "content"),
        ({"agent": {"kind": "Claude Code"}}, "agent.kind"),
        ({"agent": {"kind": "claude", "args": "--rm"}}, "agent.args"),
        ({"agent": {"kind": "claude", "permission_mode": "yolo"}}, "agent.permission_mode"),
        ({"workspace": "a/b"}, "workspace"),
        ({"workspace": ">"}, "workspace"),
        ({"mode": "now"}, "mode"),
        ({"v": 99}, "v"),
        ({"tenant": "other"}, "tenant"),
    ],
)
async def test_hostile_fields_of_a_message_are_refused_by_name(
    backend: Backend, change: dict[str, Any], field: str
) -> None:
    body = {"request_id": "q9", "content": [{"type": "text", "text": "hi"}], **change}
    answer = await backend.client.post("/v1/conversations/c1/messages", json=body)
    assert_problem(answer, 422, "INVALID", field)


async def test_every_field_that_is_refused_is_told_with_its_remedy(backend: Backend) -> None:
    body = {"content": "hi", "agent": {"kind": "Claude Code", "args": [7]}, "workspace": "a/b", "mode": "now", "v": 1}
    answer = await backend.client.post("/v1/conversations/c1/messages", json=body)
    assert_problem(answer, 422, "INVALID")
    assert {one["field"]: one["remedy"] for one in answer.json()["fields"]} == {
        "request_id": "is required",
        "content": "must be a list",
        "agent.kind": "must be 1 to 64 of the characters a-z 0-9 : . _ -, with a letter or digit first",
        "agent.args.0": "must be text",
        "workspace": "must be 1 to 64 of the characters A-Z a-z 0-9 _ -",
        "mode": "must be one of auto, interject or takeover",
        "v": "is not known; leave it out",
    }
    for one in answer.json()["fields"]:
        assert f"{one['field']}: {one['remedy']}" in answer.json()["detail"]
    queried = await backend.client.get("/v1/executions?limit=0&conversation=..")
    assert {one["field"]: one["remedy"] for one in queried.json()["fields"]} == {
        "query.limit": "must be at least 1",
        "query.conversation": "must be 1 to 64 of the characters A-Z a-z 0-9 _ -",
    }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"decision": "maybe"}, "decision"),
        ({"decision": None}, "decision"),
        ({"text": 7}, "text"),
        ({"text": "x" * 70_000}, "text"),
        ({"input": []}, "input"),
        ({"answers": {"q": "not a list"}}, "answers.q"),
        ({"execution": "../e1"}, "execution"),
        ({"control_id": "a b"}, "control_id"),
    ],
)
async def test_hostile_fields_of_an_answer_are_refused_by_name(
    backend: Backend, change: dict[str, Any], field: str
) -> None:
    answer = await backend.client.post("/v1/conversations/c1/interactions/i1", json={"decision": "allow", **change})
    assert_problem(answer, 422, "INVALID", field)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/conversations/a.b", "path.conversation"),
        ("/v1/conversations/%3E", "path.conversation"),
        ("/v1/conversations/*/events", "path.conversation"),
        ("/v1/conversations/" + "a" * 65, "path.conversation"),
        ("/v1/conversations/c1%00/events", "path.conversation"),
        ("/v1/conversations/%FF%FE/events", "path.conversation"),
        ("/v1/executions/a b", "path.execution"),
        ("/v1/executions/*/snapshot", "path.execution"),
        ("/v1/executions/a.b/items", "path.execution"),
        ("/v1/controls/>?execution=e1", "path.control"),
        ("/v1/controls/k1?execution=a.b", "query.execution"),
        ("/v1/conversations?limit=0", "query.limit"),
        ("/v1/conversations?limit=1e9", "query.limit"),
        ("/v1/conversations?limit=NaN", "query.limit"),
        ("/v1/conversations?page=!!!", "query.page"),
        ("/v1/conversations?page=" + "W1tbW1tb" * 20, "query.page"),
        ("/v1/conversations/c1?before=-1", "query.before"),
        ("/v1/conversations/c1?before=99999999999999999999999", "query.before"),
        ("/v1/executions?state=sleeping", "query.state"),
        ("/v1/executions?conversation=..", "query.conversation"),
        ("/v1/executions/e1/items?after=99999999999", "query.after"),
        ("/v1/conversations/c1/events?cursor=abc", "cursor"),
        ("/v1/conversations/c1/events?cursor=" + "A" * 5000, "cursor"),
        ("/v1/conversations/c1/events?cursor=%00", "cursor"),
        ("/v1/conversations/c1/events?until=forever", "until"),
        ("/v1/conversations/c1/events?until=response:a.b", "until"),
        ("/v1/conversations/c1/events?until=response:", "until"),
    ],
)
async def test_hostile_paths_and_queries_are_refused_by_name(backend: Backend, path: str, field: str) -> None:
    assert_problem(await backend.client.get(path), 422, "INVALID", field)


async def test_path_tricks_reach_no_other_route(backend: Backend) -> None:
    for path in ("/v1/conversations/..%2f..%2fmetrics", "/v1/executions/..%5c", "/v1/conversations/c1%2Fevents"):
        assert_problem(await backend.client.get(path), 422, "INVALID", "path")
    for path in ("/v1/executions/../../metrics", "/v1/conversations/c1/../c1"):
        reader, writer = await asyncio.open_connection("127.0.0.1", backend.port)  # a client would normalise it
        head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token_of(TENANT)}\r\n\r\n"
        writer.write(head.encode())
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert b" 404 " in answer.splitlines()[0] and b"application/problem+json" in answer
        writer.transport.abort()


@pytest.mark.parametrize("data", [b"BREW / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n"])
async def test_what_is_no_http_gets_a_problem_too(backend: Backend, data: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", backend.port)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 10)
    assert b" 400 " in answer.splitlines()[0] and b'"code":"INVALID"' in answer and b'"field":"request"' in answer
    writer.close()


async def test_control_ids_of_header_and_body_must_agree_and_be_tokens(backend: Backend) -> None:
    for path in POSTS[2:]:
        answer = await backend.client.post(path, headers={"Idempotency-Key": "a b"})
        assert_problem(answer, 422, "INVALID", "header.Idempotency-Key")
        answer = await backend.client.post(path, headers={"Idempotency-Key": "k1"}, json={"control_id": "k2"})
        assert_problem(answer, 422, "INVALID", "control_id")


async def test_a_body_beyond_the_limit_is_refused_while_it_is_still_being_sent(backend: Backend) -> None:
    announced = await backend.client.post(POSTS[0], content=b"x" * (10 << 20))
    assert_problem(announced, 413, "INVALID", "body")

    # Chunked, without a length: refused after a little more than the limit, not after 10 MiB.
    reader, writer = await asyncio.open_connection("127.0.0.1", backend.port)
    head = f"POST {POSTS[0]} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token_of(TENANT)}\r\n"
    writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    for _ in range(20):  # 1.25 MiB and no end
        writer.write(chunk)
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    assert b" 413 " in answer.splitlines()[0] and b"application/problem+json" in answer
    writer.transport.abort()


async def test_the_openapi_document_names_the_bodies_and_every_path(backend: Backend) -> None:
    document = (await backend.client.get("/openapi.json")).json()
    assert document == json.loads(json.dumps(build(None).openapi())) | {"info": document["info"]}
    assert "/v1/conversations/{conversation}/events" in document["paths"]
    posted = document["paths"]["/v1/conversations/{conversation}/messages"]["post"]
    assert posted["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/MessageRequest")
    assert "request_id" in document["components"]["schemas"]["MessageRequest"]["properties"]


async def test_metrics_name_routes_and_not_paths(backend: Backend) -> None:
    await backend.client.get("/v1/conversations/c1")
    await backend.client.request("PROPFIND", "/v1/conversations")
    text = (await backend.client.get("/metrics")).text
    assert 'route="/v1/conversations/{conversation}"' in text and 'method="other"' in text


async def test_another_bind_without_tokens_is_refused_and_so_are_bad_token_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not loopback"):
        load(BackendSettings, {"TETHER_HTTP_HOST": "0.0.0.0"})
    path = write_tokens(tmp_path / "tokens.json", [TENANT])
    assert load(BackendSettings, {"TETHER_HTTP_HOST": "0.0.0.0", "TETHER_HTTP_TOKENS_FILE": str(path)})
    assert load_tokens(path, (TENANT,)).find(token_of(TENANT)) is not None
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        load_tokens(path, (TENANT,))
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="not in TETHER_TENANTS"):
        load_tokens(path, ("other",))
    for text in (
        "",
        "{}",
        "[]",
        '[{"tenant": "acme", "name": "x"}]',
        '[{"token": "short", "tenant": "acme", "name": "x"}]',
    ):
        path.write_text(text)
        with pytest.raises(ConfigurationError) as caught:
            load_tokens(path, (TENANT,))
        assert "short" not in str(caught.value).replace("at least", "")
    with pytest.raises(ConfigurationError, match="TETHER_HTTP_TOKENS_FILE"):
        load_tokens(None, (TENANT,))
