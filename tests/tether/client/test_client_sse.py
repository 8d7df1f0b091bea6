"""The event stream parser: chunks cut anywhere, line ends of each kind, and what is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.client.sse import ServerEvent, SseParser, StreamDamagedError

STREAM = (
    "\ufeffid: c1\nevent: open\ndata: {}\n\n"
    ": hb\n\n"
    "retry: 250\nid:c2\r\ndata: first ☃\r\ndata:second\r\n\r\n"
    "event: x\rdata\r\r"
    "unknown: 1\ndata:  two spaces\n\n"
    "id: bad\0id\ndata: kept id\n\n"
    "event: dropped\n\n"
    "data: cut off"
).encode()
EXPECTED = [
    ServerEvent("open", "{}", "c1", True),
    ServerEvent("message", "first ☃\nsecond", "c2", True),
    ServerEvent("x", "", "c2", False),
    ServerEvent("message", " two spaces", "c2", False),
    ServerEvent("message", "kept id", "c2", False),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_events_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    parser = SseParser()
    places = [0, *sorted(cuts), len(STREAM)]
    got = [event for start, end in itertools.pairwise(places) for event in parser.feed(STREAM[start:end])]
    assert got == EXPECTED
    assert parser.last_id == "c2"
    assert parser.retry_ms == 250
    assert parser.comments == 1


def test_an_empty_id_resets_the_last_one() -> None:
    parser = SseParser()
    assert [event.id for event in parser.feed(b"id: a\ndata: 1\n\nid\ndata: 2\n\n")] == ["a", ""]


def test_an_event_that_is_cut_off_is_none() -> None:
    assert SseParser().feed(b"id: a\ndata: 1\n") == []


@pytest.mark.parametrize("data", [b"data: \xff\xfe\n\n", b"data: \xc3(\n\n"])
def test_bytes_that_are_not_utf8_end_the_stream(data: bytes) -> None:
    with pytest.raises(StreamDamagedError, match="UTF-8"):
        SseParser().feed(data)


@pytest.mark.parametrize("chunk", [b"data: xxxxxxxxxxxxxxxx\n", b"xxxxxxxxxxxxxxxxxxxxxx"])
def test_an_event_beyond_the_limit_ends_the_stream(chunk: bytes) -> None:
    parser = SseParser(event_bytes_max=100)
    with pytest.raises(StreamDamagedError, match="more than 100"):
        for _ in range(10):
            parser.feed(chunk)


def test_heartbeats_never_add_up_to_an_event_that_is_too_large() -> None:
    parser = SseParser(event_bytes_max=100)
    for _ in range(1000):
        assert parser.feed(b": hb\n\n") == []
    assert [event.data for event in parser.feed(b"data: 1\n\n")] == ["1"]
