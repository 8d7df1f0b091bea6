"""JSON-RPC lines: what each is, and how ours are written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tether_collector.core.adapters import jsonrpc as j


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": 0, "method": "ask", "params": {"a": 1}}, j.Request(0, "ask", {"a": 1})),
        ({"id": "0", "method": "ask"}, j.Request("0", "ask", {})),
        ({"method": "tell", "params": [1]}, j.Notification("tell", {})),
        ({"id": None, "method": "tell", "params": {}}, j.Notification("tell", {})),
        ({"id": 1, "result": None}, j.Response(1, None)),
        ({"id": "x", "result": {"ok": True}}, j.Response("x", {"ok": True})),
        (
            {"id": 1, "error": {"code": -1, "message": "no", "data": {"why": "so"}}},
            j.Response(1, error=j.Failure(-1, "no", {"why": "so"})),
        ),
        ({"error": "broken"}, j.Response(None, error=j.Failure(j.INTERNAL_ERROR, "broken"))),
    ],
)
def test_a_line_is_a_request_a_notification_or_a_response(line: dict[str, Any], message: j.Message) -> None:
    assert j.classify(line) == message


@pytest.mark.parametrize("line", [{}, {"id": 1}, {"id": 1.5, "method": "x"}, {"id": True, "result": 1}, {"method": 3}])
def test_anything_else_is_none_of_them_and_says_why(line: dict[str, Any]) -> None:
    assert isinstance(j.classify(line), str)


def test_a_key_in_an_error_is_not_told() -> None:
    response = j.classify({"id": 1, "error": {"code": 1, "message": "bad key sk-abcdef0123456789"}})
    assert isinstance(response, j.Response)
    assert response.error is not None
    assert "abcdef" not in response.error.message


def test_ids_that_look_alike_have_different_keys_and_come_back_as_they_were() -> None:
    assert j.key_of(0) != j.key_of("0")
    assert [j.id_of(j.key_of(identifier)) for identifier in (0, "0", "a:b")] == [0, "0", "a:b"]


@pytest.mark.parametrize("version", [True, False])
def test_ours_are_one_line_each_with_the_version_where_the_peer_wants_it(version: bool) -> None:
    rpc = j.Dialect(version=version)
    written = [
        rpc.request("r:1", "do", {"text": "two\nlines"}),
        rpc.notification("did"),
        rpc.result(7, {}),
        rpc.error("7", j.METHOD_NOT_FOUND, "no"),
    ]
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in written)
    messages = [json.loads(line) for line in written]
    assert [message.pop("jsonrpc", None) for message in messages] == ["2.0" if version else None] * 4
    assert messages == [
        {"id": "r:1", "method": "do", "params": {"text": "two\nlines"}},
        {"method": "did"},
        {"id": 7, "result": {}},
        {"id": "7", "error": {"code": -32601, "message": "no"}},
    ]
