"""One request through the whole set: its spans, its log lines, the CLI's environment."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from websockets.asyncio.client import connect

from support_local_set import Http, eventually
from support_otlp import ReceivedSpan, Receiver, receiving
from support_set import TetherSet, running_set

pytestmark = pytest.mark.timeout(240)
SERVICES = {"tether-backend", "tether-router", "tether-agent", "tether-collector"}


@dataclass(frozen=True)
class Traced:
    up: TetherSet
    receiver: Receiver


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    with receiving() as receiver:
        extra = {"TETHER_TRACES_ENDPOINT": receiver.endpoint, "TETHER_TRACES_DELAY_MS": "50"}
        with running_set(extra, ["--log-format", "json"]) as up:
            yield Traced(up, receiver)


async def ask(up: TetherSet, conversation: str, text: str, trace: str | None = None) -> dict[str, Any]:
    async with Http(up.state) as http:
        if trace is not None:
            http.client.headers["traceparent"] = f"00-{trace}-{'b' * 16}-01"
        told = await http.prompt(conversation, f"r-{conversation}", text)
        await http.ended(conversation, 1)
    return told


def one(spans: list[ReceivedSpan], service: str, name: str) -> ReceivedSpan:
    [found] = [span for span in spans if (span.service, span.name) == (f"tether-{service}", name)]
    return found


async def test_one_request_is_one_trace_from_http_to_the_cli(traced: Traced) -> None:
    trace = secrets.token_hex(16)
    told = await ask(traced.up, "c1", "!say hello", trace)
    receiver = traced.receiver
    receiver.until(lambda: {span.service for span in receiver.of_trace(trace)} == SERVICES, "spans of every service")
    last = {("tether-agent", "start command"), ("tether-collector", "control start"), ("tether-collector", "execution")}
    receiver.until(
        lambda: last <= {(span.service, span.name) for span in receiver.of_trace(trace)}, "the spans that end last"
    )
    spans = receiver.of_trace(trace)
    request = one(spans, "backend", "POST /v1/conversations/{conversation}/messages")
    assert request.parent == "b" * 16 and request.attributes["status"] == 202
    chain = [
        ("backend", "submit prompt"),
        ("backend", "publish prompt"),
        ("router", "admit prompt"),
        ("router", "publish command"),
        ("agent", "start command"),
        ("agent", "control start"),
        ("collector", "control start"),
        ("collector", "execution"),
        ("collector", "start agent"),
    ]
    above = request
    for service, name in chain:
        span = one(spans, service, name)
        assert span.parent == above.id, f"{service}: {name}"
        above = span
    assert one(spans, "agent", "ensure sandbox").parent == one(spans, "agent", "start command").id
    execution = one(spans, "collector", "execution")
    assert execution.attributes["execution"] == told["execution_id"]
    assert execution.attributes["request_id"] == "r-c1"
    assert execution.attributes["agent"] == "scripted"
    assert [name for name in execution.events if name != "session.bound"] == ["response.ended", "execution.ended"]
    assert not any(span.failed for span in spans)


async def test_the_cli_finds_its_execution_in_traceparent(traced: Traced) -> None:
    trace = secrets.token_hex(16)
    await ask(traced.up, "c2", "!env TRACEPARENT", trace)
    async with Http(traced.up.state) as http:
        [said] = await http.texts("c2")
    receiver = traced.receiver
    receiver.until(lambda: any(span.name == "start agent" for span in receiver.of_trace(trace)), "the start's span")
    starts = one(receiver.of_trace(trace), "collector", "start agent")
    receiver.until(lambda: any(span.name == "execution" for span in receiver.of_trace(trace)), "the execution's span")
    value = f"00-{trace}-{starts.parent}-01"
    assert said == f"TRACEPARENT is set, sha256 {hashlib.sha256(value.encode()).hexdigest()[:12]}"


async def test_a_request_can_be_followed_through_the_logs_of_all_services_by_its_execution(traced: Traced) -> None:
    trace = secrets.token_hex(16)
    told = await ask(traced.up, "c3", "!say hello", trace)
    found = {service: lines_of(traced.up, service, told["execution_id"]) for service in ("backend", "router", "agent")}
    found["collector"] = lines_of(traced.up, "collector", told["execution_id"])
    assert [line["event"] for line in found["backend"]] == ["prompt_submitted"]
    assert "prompt_settled" in [line["event"] for line in found["router"]]
    assert "command_settled" in [line["event"] for line in found["agent"]]
    assert {"execution_claimed", "agent_started", "execution_ended"} <= {line["event"] for line in found["collector"]}
    for service, lines in found.items():
        for line in lines:
            identity = {key: line.get(key) for key in ("service", "tenant", "conversation", "trace_id")}
            wanted = {"service": service, "tenant": "default", "conversation": "c3", "trace_id": trace}
            if line["event"] != "owner_moved":  # the follower's own doing: it reads the log, not a message
                assert identity == wanted, line
            assert "workspace" in line


async def test_the_same_request_in_another_trace_is_the_same_request(traced: Traced) -> None:
    first = await ask(traced.up, "c4", "!say hello", secrets.token_hex(16))
    second = await ask(traced.up, "c4", "!say hello", secrets.token_hex(16))
    assert (second["execution_id"], second["status"]) == (first["execution_id"], "admitted")


async def test_an_open_stream_is_told_by_the_span_of_its_opening_while_it_goes_on(traced: Traced) -> None:
    trace = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace}-{'b' * 16}-01"}
    async with (
        Http(traced.up.state) as http,
        http.client.stream("GET", "/v1/conversations/c5/events", headers=headers) as stream,
    ):
        assert stream.status_code == 200
        receiver = traced.receiver
        await asyncio.to_thread(receiver.until, lambda: bool(receiver.of_trace(trace)), "the opening's span")
    span = one(receiver.of_trace(trace), "backend", "GET /v1/conversations/{conversation}/events")
    assert span.attributes["opened"] == "sse" and span.attributes["conversation"] == "c5"


async def test_an_open_web_socket_is_told_by_the_span_of_its_opening_while_it_goes_on(traced: Traced) -> None:
    trace = secrets.token_hex(16)
    state = traced.up.state
    headers = {"traceparent": f"00-{trace}-{'b' * 16}-01", "Authorization": f"Bearer {state.token}"}
    url = state.http_url.replace("http://", "ws://") + "/v1/conversations/c6/ws"
    async with connect(url, additional_headers=headers, compression=None) as socket:
        assert await socket.recv()
        receiver = traced.receiver
        await asyncio.to_thread(receiver.until, lambda: bool(receiver.of_trace(trace)), "the opening's span")
    [span] = receiver.of_trace(trace)
    assert (span.attributes["opened"], span.attributes["conversation"]) == ("websocket", "c6")


async def test_a_control_is_a_span_of_its_own_from_http_to_the_collector(traced: Traced) -> None:
    trace = secrets.token_hex(16)
    async with Http(traced.up.state) as http:
        told = await http.prompt("c7", "r-c7", "!say begun\n!hang")

        async def begun() -> bool:
            return await http.texts("c7") == ["begun"]

        await eventually(begun, "the agent's first word")
        http.client.headers["traceparent"] = f"00-{trace}-{'b' * 16}-01"
        answer = await http.client.post(f"/v1/executions/{told['execution_id']}/stop", json={"control_id": "stop-c7"})
        assert answer.status_code in (200, 202), answer.text
        await http.ended("c7", 1)
    receiver = traced.receiver
    done = {"POST /v1/executions/{execution}/{verb}", "control stop"}
    receiver.until(lambda: done <= {span.name for span in receiver.of_trace(trace)}, "the control's spans")
    receiver.until(lambda: "tether-collector" in {span.service for span in receiver.of_trace(trace)}, "its answer")
    spans = receiver.of_trace(trace)
    asked, served = one(spans, "backend", "control stop"), one(spans, "collector", "control stop")
    assert served.parent == asked.id
    assert served.attributes["control"] == asked.attributes["control"] == "stop-c7"
    assert served.attributes["execution"] == told["execution_id"]


async def test_a_collector_that_goes_on_with_an_execution_goes_on_with_its_trace(traced: Traced) -> None:
    trace = secrets.token_hex(16)
    data = traced.up.data
    async with Http(traced.up.state) as http:
        http.client.headers["traceparent"] = f"00-{trace}-{'b' * 16}-01"
        await http.prompt("c8", "r-c8", "!say begun\n!wait_file go", workspace="w8")
        del http.client.headers["traceparent"]

        async def begun() -> bool:
            return await http.texts("c8") == ["begun"]

        await eventually(begun, "the agent's first word")
        receiver = traced.receiver
        receiver.until(
            lambda: [span.name for span in receiver.of_trace(trace)].count("control start") == 2,
            "what the collector said of the start: once killed it says no more",
        )
        pid = json.loads((data / "agent/sandboxes/default.w8/sandbox.json").read_bytes())["pid"]
        os.kill(pid, signal.SIGKILL)
        (data / "workspaces/default/w8/go").touch()
        await http.ended("c8", 1)
    receiver.until(lambda: any(span.name == "execution" for span in receiver.of_trace(trace)), "the execution's span")
    spans = receiver.of_trace(trace)
    execution = one(spans, "collector", "execution")
    assert execution.attributes["recovered"] is True
    assert execution.parent == one(spans, "collector", "control start").id
    assert "response.ended" in execution.events


def lines_of(up: TetherSet, service: str, execution: str) -> list[dict[str, Any]]:
    paths = (up.data / "agent").rglob("collector.log") if service == "collector" else [up.data / f"logs/{service}.log"]
    lines = [line for path in paths for line in path.read_text().splitlines() if execution in line]
    return [json.loads(line) for line in lines]
