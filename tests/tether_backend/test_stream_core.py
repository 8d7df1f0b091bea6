"""`ReaderView`, pure: whatever is read again, re-cut or resumed anywhere, each event is told once and in order."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tether import events as ev
from tether.cursor import Cursor
from tether.events import ConversationEvent, Event
from tether.frames import Frame, Position
from tether.subjects import EventAddress
from tether_backend.core.stream import SSE, WEBSOCKET, Chunk, Hole, LogMessage, ReaderView, Until

WATERMARK = 0


def message(sequence: int, first: int, last: int, execution: str = "e") -> LogMessage:
    events = [Event(ordinal=n, at=n, type="text.delta", body={"n": n}) for n in range(first, last + 1)]
    frame = Frame(first=first, last=last, pos=Position(record=0, index=0), events=events)
    return LogMessage(EventAddress("t", "w", "c", execution), sequence, sequence * 1000, frame)


def note(sequence: int, id_: str, kind: str = "recovery", **body: str) -> LogMessage:
    event = ConversationEvent(id=id_, generation=1, at=1, type=kind, body=body)
    return LogMessage(EventAddress("t", "w", "c", "_"), sequence, sequence * 1000, event, None, True)


def told(chunk: Chunk | Hole) -> list[tuple[str | None, dict[str, object]]]:
    """(id, data) of each frame."""
    assert isinstance(chunk, Chunk)
    found = []
    for block in chunk.data.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line)
        if fields:
            found.append((fields.get("id"), json.loads(fields["data"])))
    return found


def log_of(sizes: Sequence[int]) -> list[LogMessage]:
    messages, ordinal = [], 1
    for index, size in enumerate(sizes):
        messages.append(message(10 * (index + 1), ordinal, ordinal + size - 1))
        ordinal += size
    return messages


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.data())
def test_a_reader_that_resumes_after_any_event_gets_exactly_the_rest(sizes: list[int], data: st.DataObject) -> None:
    messages = log_of(sizes)
    total = sum(sizes)
    whole = [frame for one in messages for frame in told(ReaderView("t", "c", one_before(messages, one), 0).take(one))]
    stop = data.draw(st.integers(0, total - 1))
    cursor = Cursor.decode(str(whole[stop][0]), "t", "c")
    view = ReaderView("t", "c", cursor, WATERMARK)
    rest = [frame[1]["ordinal"] for one in messages if one.sequence > view.read_after for frame in told(view.take(one))]
    assert rest == list(range(stop + 2, total + 1))
    # What is read again adds nothing.
    assert all(view.take(one) == Chunk(b"") for one in messages)


def one_before(messages: list[LogMessage], one: LogMessage) -> Cursor:
    index = messages.index(one)
    return messages[index - 1].cursor(messages[index - 1].count) if index else Cursor.beginning()


def test_frames_that_overlap_are_trimmed_by_ordinal_and_a_hole_moves_nothing() -> None:
    view = ReaderView("t", "c", Cursor.beginning(), WATERMARK)
    assert [one["ordinal"] for _, one in told(view.take(message(1, 1, 3)))] == [1, 2, 3]
    assert [one["ordinal"] for _, one in told(view.take(message(2, 2, 5)))] == [4, 5]
    before = view.cursor
    assert view.take(message(3, 8, 9)) == Hole("e", 6, 7)
    assert view.cursor == before
    view.accept(Hole("e", 6, 7))
    assert [one["ordinal"] for _, one in told(view.take(message(3, 8, 9)))] == [8, 9]


def test_a_conversation_event_is_told_once_by_its_id_and_replay_ends_with_the_watermark() -> None:
    view = ReaderView("t", "c", Cursor.beginning(), 2)
    flags = [one["replay"] for n in (1, 2, 3) for _, one in told(view.take(note(n, f"n{n}")))]
    assert flags == [True, True, False]
    assert told(view.take(note(4, "n1"))) == []


def test_events_that_are_live_and_whole_are_encoded_once_for_all_readers() -> None:
    one = message(5, 1, 3)
    views = [ReaderView("t", "c", Cursor.beginning(), WATERMARK) for _ in range(3)]
    chunks = [view.take(one) for view in views]
    assert all(isinstance(chunk, Chunk) and chunk.data is one.live(SSE) for chunk in chunks)


def test_a_stream_until_a_response_ends_within_the_frame_that_ends_it() -> None:
    view = ReaderView("t", "c", Cursor.beginning(), WATERMARK, Until.parse("response:r1"))
    view.take(note(1, "q/response.created", ev.RESPONSE_CREATED, response="r1", execution="e"))
    one = message(2, 1, 4)
    assert isinstance(one.content, Frame)
    one.content.events[2] = Event(ordinal=3, at=3, type=ev.RESPONSE_ENDED, body={"outcome": "failed"})
    assert [frame["ordinal"] for _, frame in told(view.take(one))] == [1, 2, 3]
    assert view.end is not None and view.end.outcome == "failed"
    assert Cursor.decode(view.end.cursor, "t", "c").index == 3


def test_a_response_that_failed_or_was_superseded_ends_its_stream_too() -> None:
    for kind, outcome in ((ev.RESPONSE_FAILED, "failed"), (ev.RESPONSE_SUPERSEDED, "superseded")):
        view = ReaderView("t", "c", Cursor.beginning(), WATERMARK, Until.parse("response:r1"))
        view.take(note(1, "x", kind, response="other"))
        assert view.end is None
        view.take(note(2, "y", kind, response="r1"))
        assert view.end is not None and view.end.outcome == outcome


def test_both_wires_tell_the_same_and_a_websockets_frames_are_lines() -> None:
    views = [ReaderView("t", "c", Cursor.beginning(), 2, wire=wire) for wire in (SSE, WEBSOCKET)]
    messages = [note(1, "n1", text="a\nb\u2028\r"), message(2, 1, 2), message(3, 3, 4), message(4, 4, 6)]
    for one in messages:
        over_sse, over_ws = (view.take(one) for view in views)
        assert isinstance(over_ws, Chunk)
        lines = [json.loads(line) for line in over_ws.data.split(b"\n") if line]
        assert [(line["id"], line["data"]) for line in lines] == told(over_sse)
        assert {line["frame"] for line in lines} == {"message"}
    assert views[0].cursor == views[1].cursor
    assert json.loads(WEBSOCKET.heartbeat) == {"frame": "hb", "id": None, "data": {}}
