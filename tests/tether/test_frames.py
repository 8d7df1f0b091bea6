"""Frames: limits, versions, ordinals."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support_events import logs
from tether import events as ev
from tether.errors import InvalidError
from tether.events import BODIES, Event, body_of
from tether.frames import Frame, Position, cut, decode, encode, message_id
from tether.limits import FRAME_BYTES_MAX, FRAME_EVENTS_MAX
from tether.subjects import EventAddress

ADDRESS = EventAddress("t", "w", "c", "e")


def waiting(events: list[Event]) -> list[tuple[Event, Position]]:
    return [(event, Position(record=event.ordinal, index=0)) for event in events]


def texts(count: int, size: int) -> list[Event]:
    return [
        Event(ordinal=n, at=1, type=ev.TEXT_COMPLETED, body={"segment": str(n), "text": "x" * size})
        for n in range(1, count + 1)
    ]


def test_no_frame_exceeds_its_bytes_or_its_events() -> None:
    frame, taken = cut(waiting(texts(1_000, 10)))
    assert taken == FRAME_EVENTS_MAX
    frame, taken = cut(waiting(texts(20, 60_000)))
    assert len(encode(frame)) <= FRAME_BYTES_MAX
    assert taken == 4
    assert (frame.first, frame.last, frame.pos.record) == (1, 4, 4)


def test_one_event_goes_alone_even_over_the_limit() -> None:
    _, taken = cut(waiting(texts(2, FRAME_BYTES_MAX)))
    assert taken == 1


@given(logs())
def test_what_is_encoded_is_decoded_the_same(events: list[Event]) -> None:
    frame, taken = cut(waiting(events))
    again = decode(ADDRESS.subject, encode(frame))
    assert again == frame
    assert frame.last == events[taken - 1].ordinal


@given(logs())
def test_every_generated_body_is_of_its_type(events: list[Event]) -> None:
    for event in events:
        assert (body_of(event) is None) == (event.type not in BODIES)


GOOD = {"v": 1, "first": 1, "last": 1, "pos": {"record": 1, "index": 0},
        "events": [{"ordinal": 1, "at": 1, "type": "raw", "body": {}}]}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"v": 2}, "v"),
        ({"first": 0}, "first"),
        ({"first": "x"}, "first"),
        ({"last": 2}, "last"),
        ({"pos": None}, "pos"),
        ({"events": [{"ordinal": 2, "at": 1, "type": "raw", "body": {}}]}, "events.ordinal"),
        ({"events": [{"ordinal": 1, "at": 1, "type": "raw", "body": 7}]}, "events.0.body"),
        ({"events": 7}, "events"),
    ],
)
def test_a_frame_that_lies_is_refused_with_the_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidError) as caught:
        decode(ADDRESS.subject, json.dumps({**GOOD, **change}).encode())
    assert caught.value.field == field


def test_an_unknown_version_names_the_one_that_is_known() -> None:
    with pytest.raises(InvalidError, match="this reader knows version 1"):
        decode(ADDRESS.subject, json.dumps({**GOOD, "v": 9}).encode())


@given(st.binary(max_size=200))
def test_rubbish_on_the_log_is_an_invalid_error_and_nothing_else(data: bytes) -> None:
    for subject in (ADDRESS.subject, "tether.event.t.w.c._"):
        with pytest.raises(InvalidError):
            decode(subject, data)


def test_an_unknown_field_is_kept_out_of_the_way() -> None:
    frame = decode(ADDRESS.subject, json.dumps({**GOOD, "later": 1}).encode())
    assert isinstance(frame, Frame)


def test_message_ids_name_content_and_retry() -> None:
    frame, _ = cut(waiting(texts(2, 3)))
    data = encode(frame)
    first = message_id(ADDRESS, frame, data)
    assert first.startswith("c/e/1-2/")
    assert message_id(ADDRESS, frame, data, retry=2) == first + "/r2"
    assert message_id(ADDRESS, frame, data + b" ") != first
