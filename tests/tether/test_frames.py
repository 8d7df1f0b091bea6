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
from tether.frames import Frame, Position, cut, decode, encode, merge, message_id
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
    frame, taken, _ = cut(waiting(texts(1_000, 10)))
    assert taken == FRAME_EVENTS_MAX
    frame, taken, _ = cut(waiting(texts(20, 60_000)))
    assert len(encode(frame)) <= FRAME_BYTES_MAX
    assert taken == 4
    assert (frame.first, frame.last, frame.pos.record) == (1, 4, 4)


def test_one_event_goes_alone_even_over_the_limit() -> None:
    _, taken, _ = cut(waiting(texts(2, FRAME_BYTES_MAX)))
    assert taken == 1


@given(logs())
def test_what_is_encoded_is_decoded_the_same(events: list[Event]) -> None:
    frame, taken, _ = cut(waiting(events))
    again = decode(ADDRESS.subject, encode(frame))
    assert again == frame
    assert frame.last == events[taken - 1].ordinal


@given(logs(), st.integers(1, 9), st.integers(1, 4_000))
def test_a_cut_frames_bytes_are_its_encoding_within_its_bound_and_the_events_stay_as_they_were(
    events: list[Event], events_max: int, bytes_max: int
) -> None:
    before = [event.model_copy(deep=True) for event in events]
    rest = waiting(events)
    while rest:
        frame, taken, data = cut(rest, events_max=events_max, bytes_max=bytes_max)
        assert data == encode(frame)
        assert 1 <= taken <= events_max
        assert taken == 1 or len(data) <= bytes_max
        assert merge([event for event, _ in rest[:taken]]) == frame.events
        rest = rest[taken:]
    assert events == before


def test_the_bound_of_a_frame_is_in_bytes_also_where_characters_take_several() -> None:
    events = [
        Event(ordinal=n, at=1, type=kind, body={"segment": "s", "text": "語" * 1_000, "offset": n * 1_000})
        for n, kind in enumerate([ev.TEXT_DELTA] * 300 + [ev.TEXT_COMPLETED] * 200, 1)
    ]
    frame, taken, data = cut(waiting(events))
    assert len(data) <= FRAME_BYTES_MAX and taken == frame.last > 80


def test_an_event_made_without_validation_is_the_validated_one() -> None:
    body = {"segment": "s", "text": "x", "offset": 0}
    made = Event.made(3, 1, ev.TEXT_DELTA, body, 5)
    assert made == Event(ordinal=3, last=5, at=1, type=ev.TEXT_DELTA, body=body)
    assert made.model_dump_json() == Event(ordinal=3, last=5, at=1, type=ev.TEXT_DELTA, body=body).model_dump_json()
    assert made.model_copy(update={"ordinal": 4}).ordinal == 4 and made.end == 5


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
        ({"events": [], "first": 2}, "events"),
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
    frame, _, _ = cut(waiting(texts(2, 3)))
    data = encode(frame)
    first = message_id(ADDRESS, frame, data)
    assert first.startswith("c/e/1-2/")
    assert message_id(ADDRESS, frame, data, retry=2) == first + "/r2"
    assert message_id(ADDRESS, frame, data + b" ") != first
