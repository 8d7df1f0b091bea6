"""A real backend is asked everything that the document names, and what it answers is what the document says.

Every other test of the backend checks its answers likewise (`support_backend` hooks `support_openapi.documented` into
its client); here it is made sure that every answer that is no failure of something else was really seen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from support_backend import Backend, Log, ended, event, running_backend, text_delta
from support_openapi import check_answer, errors_of, openapi, operations
from support_sandboxes import HandAgent, report_of, write_record, write_reference
from tether import events as ev
from tether import subjects
from tether.control import ControlReply, decode_request
from tether.errors import Code, problem
from tether.ports import Message
from tether.testing import MemoryBus, MemoryServer

TENANT = "acme"
ASKED: dict[str, Any] = {"interaction": "i1", "kind": "approval", "name": "look", "tool": "t1"}

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Collector:
    """Answers controls: `delivered`, or with the problem that the test wants."""

    def __init__(self) -> None:
        self.refuse: Code | None = None

    async def handle(self, message: Message) -> bytes:
        request = decode_request(message.data)
        reply = ControlReply(control=request.control, verb=request.verb, status="delivered")
        if self.refuse is not None and request.verb != "receipt":
            update = {"status": "rejected", "problem": problem(self.refuse, "refused for the test")}
            reply = reply.model_copy(update=update)
        return reply.encode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Backend, Collector]]:
    bus = MemoryBus(MemoryServer())
    async with running_backend(bus, [TENANT], tmp_path_factory.mktemp("live")) as running:
        log = Log(bus, TENANT)
        await log.prompt("q1", "r1", "e1")
        asks = event(3, ev.INTERACTION_REQUESTED, ASKED)
        await log.frame("e1", [log.started("e1"), text_delta(2, "hello"), asks])
        await log.own("e1")
        old = Log(bus, TENANT, conversation="c2")
        await old.prompt("q2", "r2", "e2")
        await old.frame("e2", [old.started("e2"), *ended(2)])
        await running.projected("c1", "e1", 3)
        await running.projected("c2", "e2", 3)
        collector = Collector()
        subject = subjects.control_all(TENANT, log.workspace)
        await write_record(bus, TENANT, "w1", "suspended", drained=report_of(TENANT, "w1", "d1"))
        await write_reference(bus, TENANT, "w1")
        agent = HandAgent(bus, [report_of(TENANT, "w1", "d1")])
        async with bus.serve(subject, collector.handle, name="collector"), agent.serving():
            yield running, collector


REQUESTS: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/healthz", None),
    ("GET", "/readyz", None),
    ("GET", "/metrics", None),
    ("GET", "/openapi.json", None),
    ("GET", "/", None),
    ("GET", "/static/app.js", None),
    ("GET", "/static/none.js", None),
    ("GET", "/v1/conversations", None),
    ("GET", "/v1/conversations?limit=1", None),
    ("GET", "/v1/conversations?limit=9999", None),
    ("GET", "/v1/conversations?page=!", None),
    ("GET", "/v1/conversations/c1", None),
    ("GET", "/v1/conversations/none", None),
    ("GET", "/v1/conversations/no%20token", None),
    ("GET", "/v1/conversations/c1/events?until=soon", None),
    ("GET", "/v1/conversations/c1/events?cursor=none", None),
    ("GET", "/v1/conversations/c1/ws", None),
    ("POST", "/v1/conversations/c1/tickets", None),
    ("POST", "/v1/conversations/no%20token/tickets", None),
    ("POST", "/v1/conversations/c9/messages", {"content": []}),
    ("GET", "/v1/executions", None),
    ("GET", "/v1/executions?state=active&conversation=c1", None),
    ("GET", "/v1/executions/e1", None),
    ("GET", "/v1/executions/none", None),
    ("GET", "/v1/executions/e1/items?limit=1", None),
    ("GET", "/v1/executions/none/items", None),
    ("GET", "/v1/executions/e2/snapshot", None),
    ("GET", "/v1/executions/none/snapshot", None),
    ("POST", "/v1/conversations/c1/interactions/i1", {"decision": "allow"}),
    ("POST", "/v1/conversations/c1/interactions/i1", {"decision": "perhaps"}),
    ("POST", "/v1/conversations/c2/interactions/i9", {"decision": "allow"}),
    ("POST", "/v1/executions/e1/interrupt", None),
    ("POST", "/v1/executions/e1/stop", {"control_id": "k1"}),
    ("POST", "/v1/executions/none/stop", {}),
    ("POST", "/v1/executions/e2/stop", {}),
    ("GET", "/v1/controls/k1?execution=e1", None),
    ("GET", "/v1/controls/none", None),
    ("GET", "/v1/sandboxes", None),
    ("GET", "/v1/sandboxes/w1", None),
    ("GET", "/v1/sandboxes/none", None),
    ("GET", "/v1/sandboxes/no%20token", None),
    ("POST", "/v1/sandboxes/w1/drain", {"drain_id": "d1", "grace_s": 1}),
    ("POST", "/v1/sandboxes/w1/drain", {"grace_s": -1}),
    ("GET", "/v1/sandboxes/w1/drains/d1", None),
    ("GET", "/v1/sandboxes/w1/drains/none", None),
    ("GET", "/v1/sandboxes/w1/drains/no%20token", None),
    ("POST", "/v1/sandboxes/w1/suspend", {"force": True}),
    ("POST", "/v1/sandboxes/w1/resume", None),
    ("POST", "/v1/sandboxes/w1/resume", {"now": True}),
    ("DELETE", "/v1/sandboxes/w1", None),
    ("DELETE", "/v1/sandboxes/w1?grace_s=never", None),
    ("GET", "/v1/webhooks", None),
    ("GET", "/v1/webhooks/deliveries", None),
    ("GET", "/v1/webhooks/deliveries?state=lost", None),
    ("POST", "/v1/webhooks/deliveries/chat/none/retry", None),
)


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
async def test_an_answer_is_what_the_document_says(
    backend: tuple[Backend, Collector], method: str, path: str, body: Any
) -> None:
    running, _ = backend
    answer = await running.client.request(method, path, json=body)
    said = check_answer(answer)
    assert "?" not in said.split()[1]
    for headers in ({"Host": "elsewhere.example"}, {"Origin": "http://elsewhere.example"}, {"Authorization": ""}):
        check_answer(await running.client.request(method, path, json=body, headers=headers))


@pytest.mark.parametrize(
    "code", ["TARGET_UNKNOWN", "TARGET_STALE", "SESSION_STREAM_NOT_ACTIVE", "REQUEST_CONFLICT", "RUNTIME_UNAVAILABLE"]
)
async def test_a_collectors_refusals_are_those_of_the_document(backend: tuple[Backend, Collector], code: str) -> None:
    running, collector = backend
    collector.refuse = Code(code)
    try:
        for verb in ("interrupt", "stop"):
            answer = await running.client.post(f"/v1/executions/e1/{verb}", json={})
            assert check_answer(answer).endswith(f" {code}")
        answer = await running.client.post("/v1/conversations/c1/interactions/i1", json={"decision": "deny"})
        assert check_answer(answer).endswith(f" {code}")
    finally:
        collector.refuse = None


async def test_a_body_that_is_too_large_is_refused_as_told(backend: tuple[Backend, Collector]) -> None:
    running, _ = backend
    data = b"x" * (2 << 20)
    for path in ("/v1/conversations/c1/messages", "/v1/executions/e1/stop"):
        answer = await running.client.post(path, content=data)
        assert " 413 INVALID" in check_answer(answer)


async def test_every_frame_of_a_stream_is_of_the_shape_that_the_document_names(
    backend: tuple[Backend, Collector],
) -> None:
    running, _ = backend
    stream = openapi()["paths"]["/v1/conversations/{conversation}/events"]["get"]["responses"]["200"]["content"]
    frames = stream["text/event-stream"]["x-frames"]
    seen = []
    reader = running.reader("c2")
    await reader.open(until="response:r2")
    while (frame := await reader.next()) is not None:
        assert errors_of(frames[frame.name], frame.data) == [], frame
        seen.append(frame.name)
    assert set(seen) == {"open", "message", "end"} and seen[-1] == "end"
    again = await reader.open(until="response:r2")
    assert again.status == 204


async def test_unchanged_files_of_the_page_are_not_sent_again(backend: tuple[Backend, Collector]) -> None:
    running, _ = backend
    first = await running.client.get("/")
    again = await running.client.get("/", headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304 and check_answer(again).endswith("304")


async def test_what_the_document_does_not_say_is_found() -> None:
    """`check_answer` can fail: another status, another media type, another code, another shape."""
    told = {"content-type": "application/json"}
    wrong = problem(Code.NOT_FOUND, "of another route").model_dump(mode="json") | {
        "type": "urn:tether:problem:not_found"
    }
    for path, status, headers, body in (
        ("readyz", 418, told, {}),
        ("readyz", 200, {"content-type": "text/html"}, {}),
        ("readyz", 200, told, {"status": "fine"}),
        ("metrics", 401, {"content-type": "application/problem+json"}, {**wrong, "status": 401}),
    ):
        answer = httpx2.Response(status, headers=headers, json=body, request=httpx2.Request("GET", f"http://a/{path}"))
        with pytest.raises(AssertionError):
            check_answer(answer)


async def test_every_success_of_the_document_is_asked_for_here_or_in_a_test_of_its_own() -> None:
    """Of a WebSocket (101) and of an admitted message (202) there are tests with a router or a socket."""
    asked = {(method, path.partition("?")[0]) for method, path, _ in REQUESTS}
    assert len(asked) > 20
    elsewhere = {"sendMessage", "deleteConversation", "listQuarantine", "getQuarantined"}
    for method, path, operation in operations(openapi()):
        prefix = path.partition("{")[0]
        known = any(each == method and one.startswith(prefix) for each, one in asked)
        assert known or operation["operationId"] in elsewhere, f"{method} {path}"
