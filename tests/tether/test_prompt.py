"""Prompts, controls and ids against hostile input: a typed error that names the field, nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether import ids, subjects
from tether.control import ControlRequest, decode_command, decode_request
from tether.errors import InvalidError, MessageTooLargeError
from tether.jsonsafe import loads_object
from tether.limits import PROMPT_BYTES_MAX
from tether.prompt import Prompt, TextContent, decode_prompt

GOOD: dict[str, Any] = {
    "v": 1,
    "tenant": "acme",
    "workspace": "w1",
    "conversation": "c1",
    "request_id": "r1",
    "content": [{"type": "text", "text": "hello"}],
    "agent": {"kind": "scripted"},
}


def data(**change: Any) -> bytes:
    return json.dumps({**GOOD, **change}).encode()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"v": 2}, "v"),
        ({"tenant": "../etc"}, "tenant"),
        ({"tenant": "a.b"}, "tenant"),
        ({"tenant": "a*"}, "tenant"),
        ({"workspace": ""}, "workspace"),
        ({"workspace": "x" * 65}, "workspace"),
        ({"conversation": "c\n"}, "conversation"),
        ({"conversation": 7}, "conversation"),
        ({"request_id": None}, "request_id"),
        ({"request_id": "é"}, "request_id"),
        ({"content": []}, "content"),
        ({"content": "hello"}, "content"),
        ({"content": [{"type": "image"}]}, "content.0.type"),
        ({"content": [{"type": "text", "text": ""}]}, "content.0.text"),
        ({"content": [{"type": "text", "text": "x", "extra": 1}]}, "content.0.extra"),
        ({"agent": {"kind": "Bad Kind"}}, "agent.kind"),
        ({"agent": {"kind": "claude", "permission_mode": "yolo"}}, "agent.permission_mode"),
        ({"agent": {"kind": "claude", "args": ["x"] * 65}}, "agent.args"),
        ({"mode": "whatever"}, "mode"),
        ({"attempt": 0}, "attempt"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidError) as caught:
        decode_prompt(data(**change))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("raw", "remedy"),
    [
        (b"\xff\xfe", "UTF-8"),
        (b"{", "valid JSON"),
        (b"[]", "JSON object"),
        (b'{"a": NaN}', "valid JSON"),
        (b'{"a": -Infinity}', "valid JSON"),
        (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, "nested"),
        (b"[" * 200_000, "nested"),
        (b'"' + b"x" * PROMPT_BYTES_MAX + b'"', "at most"),
    ],
)
def test_rubbish_is_refused_with_its_remedy(raw: bytes, remedy: str) -> None:
    with pytest.raises(InvalidError, match=remedy) as caught:
        decode_prompt(raw)
    assert caught.value.field == "prompt"


@given(st.binary(max_size=300))
def test_random_bytes_raise_nothing_but_invalid(raw: bytes) -> None:
    for decode in (decode_prompt, decode_request, decode_command):
        with pytest.raises(InvalidError):
            decode(raw)


def test_brackets_inside_strings_are_not_nesting() -> None:
    assert loads_object(json.dumps({"a": "[" * 500 + '"\\"'}).encode(), "x", bytes_max=10_000)


def test_the_digest_is_of_the_payload_alone() -> None:
    first = Prompt.model_validate(GOOD)
    assert first.digest == first.model_copy(update={"attempt": 2, "author": "me"}).digest
    assert first.digest != first.model_copy(update={"mode": "takeover"}).digest
    assert first.message_id != first.model_copy(update={"attempt": 2}).message_id


def test_a_prompt_beyond_the_bus_limit_is_refused_before_it_is_sent() -> None:
    prompt = Prompt.model_validate(GOOD).model_copy(update={"content": (TextContent(text="x" * PROMPT_BYTES_MAX),)})
    with pytest.raises(MessageTooLargeError):
        prompt.encode()


def test_derived_ids_are_the_same_on_every_replay_and_differ_by_attempt() -> None:
    assert ids.execution_id("t", "r", 1) == ids.execution_id("t", "r", 1)
    assert ids.execution_id("t", "r", 1) != ids.execution_id("t", "r", 2)
    assert ids.execution_id("t", "r", 1) != ids.response_id("t", "r", 1)[4:]
    assert ids.check_token(ids.default_workspace("c" * 64), "workspace")


def test_a_control_is_the_same_only_with_verb_target_and_payload() -> None:
    first = ControlRequest(control="k1", verb="interrupt")
    assert first.digest != ControlRequest(control="k1", verb="stop").digest
    assert first.digest == ControlRequest(control="k2", verb="interrupt").digest


@pytest.mark.parametrize("bad", ["a.b", "*", ">", "", "a b", "x" * 65, "é", "a/b"])
def test_no_subject_or_key_can_be_built_of_anything_but_tokens(bad: str) -> None:
    builders: list[Callable[[], str]] = [
        lambda: subjects.prompt("t", bad, "c"),
        lambda: subjects.event("t", "w", "c", bad),
        lambda: subjects.owner_key(bad, "w", "c"),
        lambda: subjects.events_stream(bad),
        lambda: subjects.control("t", bad, "stop"),
        lambda: subjects.blob("t", "w", "artifact", bad, 1),
        lambda: subjects.projection_durable(bad, 0),
    ]
    for build in builders:
        with pytest.raises(InvalidError):
            build()


def test_subjects_are_parsed_back() -> None:
    assert subjects.parse_event(subjects.event("t", "w", "c", "e")).subject == "tether.event.t.w.c.e"
    assert subjects.parse_event("tether.live.t.w.c._").conversation_level
    assert subjects.parse_prompt(subjects.prompt("t", "w", "c")) == ("t", "w", "c")
    assert subjects.parse_command(subjects.command("t", "w")) == ("t", "w")
    assert subjects.conversation_live("t", "w", "c") == "tether.live.t.w.c.*"
