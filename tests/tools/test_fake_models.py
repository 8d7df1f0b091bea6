"""The fake model server over real HTTP: its three protocols, its faults, its key, its records."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fake_models import FakeModels
from support_scripted import wait_until

DEADLINE_S = 20.0
PATHS = {"anthropic": "/v1/messages?beta=true", "responses": "/v1/responses", "chat": "/v1/chat/completions"}


@pytest.fixture
def server() -> Iterator[FakeModels]:
    with FakeModels() as running:
        yield running


def post(
    port: int, path: str, body: object, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("POST", path, data, {"content-type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def request(protocol: str, text: str, *, stream: bool = True, after: int = 0, **more: object) -> dict[str, Any]:
    """A request of this protocol with one user text and `after` rounds of tool results behind it."""
    if protocol == "anthropic":
        messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        for _ in range(after):
            messages.append({"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "x"}]})
            messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]})
        return {"model": "m", "max_tokens": 100, "stream": stream, "messages": messages, **more}
    if protocol == "responses":
        items: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "input_text", "text": text}]}]
        for _ in range(after):
            items.append({"type": "function_call", "call_id": "c", "name": "x", "arguments": "{}"})
            items.append({"type": "function_call_output", "call_id": "c", "output": "ok"})
        return {"model": "m", "stream": stream, "input": items, **more}
    chat: list[dict[str, Any]] = [{"role": "user", "content": text}]
    for _ in range(after):
        chat.append({"role": "assistant", "tool_calls": []})
        chat.append({"role": "tool", "tool_call_id": "c", "content": "ok"})
    return {"model": "m", "stream": stream, "messages": chat, **more}


def events(raw: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def ask(server: FakeModels, protocol: str, text: str, **more: Any) -> list[dict[str, Any]]:
    status, _, raw = post(server.port, PATHS[protocol], request(protocol, text, **more))
    assert status == 200, raw
    return events(raw)


def text_of(protocol: str, got: list[dict[str, Any]]) -> str:
    if protocol == "anthropic":
        deltas = [e["delta"] for e in got if e["type"] == "content_block_delta"]
        return "".join(d["text"] for d in deltas if d["type"] == "text_delta")
    if protocol == "responses":
        return "".join(e["delta"] for e in got if e["type"] == "response.output_text.delta")
    return "".join(c["delta"].get("content") or "" for e in got for c in e["choices"])


def tools_of(protocol: str, got: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    if protocol == "anthropic":
        calls: list[tuple[str, Any]] = []
        for event in got:
            if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
                deltas = [e["delta"] for e in got if e.get("index") == event["index"] and "delta" in e]
                calls.append((event["content_block"]["name"], json.loads("".join(d["partial_json"] for d in deltas))))
        return calls
    if protocol == "responses":
        items = [e["item"] for e in got if e["type"] == "response.output_item.done" and "name" in e["item"]]
        return [(i["name"], json.loads(i["arguments"]) if "arguments" in i else i["input"]) for i in items]
    entries = [t["function"] for e in got for c in e["choices"] for t in c["delta"].get("tool_calls", [])]
    return [(f["name"], json.loads(f["arguments"])) for f in entries]


@pytest.mark.parametrize("protocol", PATHS)
def test_a_text_streams_in_words_and_ends_as_the_protocol_ends(server: FakeModels, protocol: str) -> None:
    got = ask(server, protocol, "[[text:one two three]]")
    assert text_of(protocol, got) == "one two three"
    if protocol == "anthropic":
        kinds = [event["type"] for event in got]
        assert kinds[:3] == ["message_start", "ping", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert got[-2]["delta"]["stop_reason"] == "end_turn"
        assert got[-2]["usage"]["output_tokens"] == 3
    elif protocol == "responses":
        assert got[-1]["type"] == "response.completed"
        assert [event["sequence_number"] for event in got] == list(range(1, len(got) + 1))
    else:
        assert got[-2]["choices"][0]["finish_reason"] == "stop"
        assert got[-1]["usage"]["total_tokens"] == 120


@pytest.mark.parametrize("protocol", PATHS)
def test_a_request_without_a_directive_gets_a_plain_answer(server: FakeModels, protocol: str) -> None:
    assert text_of(protocol, ask(server, protocol, "hello")) == "Hello from the fake model."


@pytest.mark.parametrize("protocol", PATHS)
def test_a_tool_is_called_and_its_result_leads_to_the_next_step(server: FakeModels, protocol: str) -> None:
    (call,) = tools_of(protocol, ask(server, protocol, '[[tool:Look|{"at": "é"}]]'))
    assert call == ("Look", {"at": "é"})
    after = ask(server, protocol, '[[tool:Look|{"at": "é"}]]', after=1)
    assert tools_of(protocol, after) == []
    assert text_of(protocol, after) == "The tool is done."


@pytest.mark.parametrize("protocol", PATHS)
def test_two_commands_come_one_after_the_other_or_at_once(server: FakeModels, protocol: str) -> None:
    def commands(directive: str, after: int) -> list[str]:
        return [call[1]["command"] for call in tools_of(protocol, ask(server, protocol, directive, after=after))]

    assert [commands("[[bash2:ls||pwd]]", step) for step in range(3)] == [["ls"], ["pwd"], []]
    assert [commands("[[par:ls||pwd]]", step) for step in range(2)] == [["ls", "pwd"], []]


@pytest.mark.parametrize("protocol", PATHS)
def test_the_newest_directive_wins_and_starts_its_own_count_of_steps(server: FakeModels, protocol: str) -> None:
    body = request(protocol, "[[bash:ls]]", after=1)
    key = "input" if protocol == "responses" else "messages"
    newer = request(protocol, "[[text:newer]] and some words")[key]
    body[key] = [*body[key], *newer]
    _, _, raw = post(server.port, PATHS[protocol], body)
    assert text_of(protocol, events(raw)) == "newer"


def test_a_request_that_does_not_stream_gets_the_whole_reply(server: FakeModels) -> None:
    bodies = {
        protocol: json.loads(post(server.port, path, request(protocol, "[[bash:ls]]", stream=False))[2])
        for protocol, path in PATHS.items()
    }
    assert [block["type"] for block in bodies["anthropic"]["content"]] == ["text", "tool_use"]
    assert bodies["anthropic"]["stop_reason"] == "tool_use"
    assert [item["type"] for item in bodies["responses"]["output"]] == ["message", "function_call"]
    assert bodies["chat"]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "Bash"


@pytest.mark.parametrize(
    ("tools", "name", "tool_input"),
    [
        ([{"type": "function", "name": "exec_command"}], "exec_command", {"cmd": "ls", "yield_time_ms": 30000}),
        ([{"type": "function", "name": "shell_command"}], "shell_command", {"command": "ls"}),
        ([{"type": "function", "name": "shell"}], "shell", {"command": ["bash", "-lc", "ls"]}),
    ],
)
def test_a_command_takes_the_name_under_which_the_request_offers_it(
    server: FakeModels, tools: list[Any], name: str, tool_input: dict[str, Any]
) -> None:
    assert tools_of("responses", ask(server, "responses", "[[bash:ls]]", tools=tools)) == [(name, tool_input)]


def test_other_tools_are_renamed_for_the_protocols_that_know_them(server: FakeModels) -> None:
    offered = [{"type": "function", "function": {"name": name}} for name in ("bash", "write", "question")]
    chat = [
        tools_of("chat", ask(server, "chat", text, tools=offered)) for text in ("[[bash:l]]", "[[write:f]]", "[[ask]]")
    ]
    assert [calls[0][0] for calls in chat] == ["bash", "write", "question"]
    custom = [{"type": "custom", "name": "apply_patch"}]
    ((name, patch),) = tools_of("responses", ask(server, "responses", "[[write:f]]", tools=custom))
    assert name == "apply_patch"
    assert patch.startswith("*** Begin Patch\n*** Add File: f\n+written by")


def test_thinking_comes_before_the_text_in_a_block_of_its_own(server: FakeModels) -> None:
    got = ask(server, "anthropic", "[[think:deep thoughts]]")
    starts = [event["content_block"]["type"] for event in got if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text"]
    assert text_of("anthropic", got) == "I have thought."


@pytest.mark.parametrize("protocol", PATHS)
@pytest.mark.parametrize("status", [400, 401, 429, 500, 529])
def test_an_http_error_has_its_status_and_the_protocols_body(server: FakeModels, protocol: str, status: int) -> None:
    got, headers, raw = post(server.port, PATHS[protocol], request(protocol, f"[[http:{status}]]"))
    assert got == status
    assert json.loads(raw)["error"]["message"] == f"fake {status}"
    assert ("retry-after" in headers) == (status == 429)


def test_a_flaky_model_recovers_after_the_failures_that_were_asked_for(server: FakeModels) -> None:
    body = request("anthropic", "[[flaky:2]]")
    assert [post(server.port, PATHS["anthropic"], body)[0] for _ in range(3)] == [529, 529, 200]


@pytest.mark.parametrize("protocol", PATHS)
def test_a_dropped_stream_breaks_off_after_its_tokens(server: FakeModels, protocol: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
    connection.request("POST", PATHS[protocol], json.dumps(request(protocol, "[[drop:2]]")))
    answer = connection.getresponse()
    raw = b""
    try:
        while piece := answer.read1():
            raw += piece
        broke = False
    except ConnectionResetError:
        broke = True
    finally:
        connection.close()
    assert text_of(protocol, events(raw)) == "part0 part1 "
    assert broke


def test_a_stream_that_was_dropped_once_is_whole_the_second_time(server: FakeModels) -> None:
    with pytest.raises(ConnectionResetError):
        ask(server, "anthropic", "[[droponce:1]]")
    assert text_of("anthropic", ask(server, "anthropic", "[[droponce:1]]")) == "Recovered after a drop."


def test_an_error_event_ends_a_stream_in_the_middle(server: FakeModels) -> None:
    got = ask(server, "anthropic", "[[sseerror:1]]")
    assert got[-1]["error"]["type"] == "overloaded_error"
    assert ask(server, "responses", "[[sseerror:1]]")[-1]["type"] == "response.failed"
    assert "error" in events(post(server.port, PATHS["chat"], request("chat", "[[sseerror:1]]"))[2])[-1]


def test_a_client_that_goes_away_from_a_hanging_request_is_noticed(server: FakeModels) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
    connection.request("POST", PATHS["anthropic"], json.dumps(request("anthropic", "[[hang]]")))
    wait_until(lambda: bool(server.requests), "the request is there")
    connection.close()
    wait_until(lambda: server.requests[-1].get("event") == "client_disconnected", "it is noticed")


def test_the_server_ends_at_once_whatever_its_connections_wait_for() -> None:
    server = FakeModels()
    waiting = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
    idle = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
    with server:
        waiting.request("POST", PATHS["anthropic"], json.dumps(request("anthropic", "[[hang]]")))
        idle.request("GET", "/v1/models")
        assert json.loads(idle.getresponse().read())["data"][0]["id"] == "fake-model"
        wait_until(lambda: len(server.requests) == 2, "both are there")
    waiting.close()
    idle.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"x-api-key": "wrong"}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"x-api-key": "right"}, 200),
        ({"authorization": "Bearer right"}, 200),
    ],
)
def test_a_required_key_is_asked_for_and_never_recorded(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    log = tmp_path / "log"
    with FakeModels(require_key="right", log=log, log_bodies=True) as server:
        got, _, raw = post(server.port, PATHS["anthropic"], request("anthropic", "hello"), headers)
    assert got == status
    assert server.requests[0]["key"] == ("absent" if not headers else "accepted" if status == 200 else "refused")
    assert "right" not in log.read_text()
    assert "wrong" not in log.read_text()
    if status == 401:
        assert json.loads(raw)["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"nonsense", 400),
        (b"\xff\xfe", 400),
        (b"[]", 400),
        (b"[" * 100_000, 400),
        ({"model": "m", "messages": [{"role": "user", "content": "x"}]}, 400),
        ({"model": "m", "max_tokens": 1}, 400),
        ({"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}, 400),
        ({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "[[nosuch]]"}]}, 400),
        ({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "[[bash]]"}]}, 400),
        ({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "[[slow:-1]]"}]}, 400),
        ({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "[[tool:x|[1]]]"}]}, 400),
        ({"model": "m", "max_tokens": 1, "messages": ["x", 1, {"role": "user", "content": 5}]}, 200),
    ],
)
def test_a_bad_request_is_refused_with_a_message(server: FakeModels, body: object, status: int) -> None:
    got, _, raw = post(server.port, PATHS["anthropic"], body)
    assert got == status
    if status != 200:
        assert json.loads(raw)["error"]["message"]


def test_a_body_that_is_too_long_or_packed_in_an_unknown_way_is_refused(server: FakeModels) -> None:
    too_long = {"content-length": str(65 << 20)}
    assert post(server.port, PATHS["anthropic"], b"{}", too_long)[0] == 413
    assert post(server.port, PATHS["anthropic"], b"{}", {"content-encoding": "zstd"})[0] == 415


def test_a_packed_body_is_unpacked(server: FakeModels) -> None:
    data = gzip.compress(json.dumps(request("anthropic", "[[text:packed]]")).encode())
    _, _, raw = post(server.port, PATHS["anthropic"], data, {"content-encoding": "gzip"})
    assert text_of("anthropic", events(raw)) == "packed"


def test_counting_tokens_and_unknown_paths_have_their_answers(server: FakeModels) -> None:
    assert json.loads(post(server.port, "/v1/messages/count_tokens", {})[2]) == {"input_tokens": 100}
    assert post(server.port, "/v1/other", {})[0] == 404


def test_the_command_writes_its_port_file_when_it_listens_and_ends_by_sigterm(tmp_path: Path) -> None:
    port_file, log = tmp_path / "port", tmp_path / "log"
    command = [sys.executable, "-m", "fake_models", "--port-file", str(port_file), "--log", str(log)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={"PATH": os.environ["PATH"]})
    try:
        wait_until(port_file.exists, "the port file")
        port = int(port_file.read_text())
        assert post(port, PATHS["anthropic"], request("anthropic", "[[text:hi]]"))[0] == 200
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
        assert int(output) == port
    finally:
        process.kill()
        process.wait(DEADLINE_S)
    (entry,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert (entry["directive"], entry["argument"], entry["newest"]) == ("text", "hi", "[[text:hi]]")


def test_a_port_that_is_taken_is_a_one_line_error(server: FakeModels) -> None:
    command = [sys.executable, "-m", "fake_models", "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("fake_models: ")
    assert done.stderr.count("\n") == 1
