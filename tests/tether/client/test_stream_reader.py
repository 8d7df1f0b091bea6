"""The HTTP stream's frames as items: identity, replay, snapshots, gaps, and what a reconnect changes."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from tether.client.items import CaughtUp, ExecutionItem, GapItem, Item, PositionChanged, SnapshotItem
from tether.client.stream_state import StreamReader
from tether.errors import Code, problem
from tether.fold import TextItem


def event(ordinal: int, *, replay: bool = False, last: int | None = None) -> str:
    value = {"execution": "e1", "ordinal": ordinal, "at": 1, "type": "text.delta", "body": {}, "replay": replay}
    return json.dumps(value if last is None else {**value, "last": last})


def ordinals(items: list[Item]) -> list[int]:
    return [item.ordinal for item in items if isinstance(item, ExecutionItem)]


def test_events_that_come_again_after_a_reconnect_are_dropped_by_identity() -> None:
    reader = StreamReader("c", None)
    reader.opened("k0")
    given = reader.event(event(1), "k1") + reader.event(event(2, last=4), "k2")
    reader.opened("k1")
    given += reader.event(event(2, last=4, replay=True), "k2") + reader.event(event(5, replay=True), "k3")
    assert ordinals(given) == [1, 2, 5]
    assert reader.cursor == "k3"


def test_conversation_events_are_given_once_by_their_id() -> None:
    reader = StreamReader("c", None)
    note = json.dumps({"id": "q/x", "generation": 1, "at": 1, "type": "recovery", "body": {}})
    assert len(reader.event(note, "k1") + reader.event(note, "k1")) == 1


def test_what_a_reconnect_calls_replay_is_new_to_a_caller_that_had_caught_up() -> None:
    reader = StreamReader("c", None)
    (first,) = reader.event(event(1, replay=True), "k1")
    assert first.replay
    assert [type(item) for item in reader.live("k1")] == [CaughtUp]
    (second,) = reader.event(event(2, replay=True), "k2")
    assert not second.replay
    assert reader.live("k2") == []


def test_a_changed_position_starts_over_with_the_snapshot_that_follows() -> None:
    reader = StreamReader("c", "old")
    reader.event(event(7), "k7")
    changed = problem(Code.CURSOR_POSITION_CHANGED, "made anew").model_dump_json()
    assert [type(item) for item in reader.problem(changed, None)] == [PositionChanged]
    (told,) = reader.snapshot(json.dumps({"history": HISTORY}), "k2")
    assert isinstance(told, SnapshotItem)
    state = told.executions["e1"]
    assert (state.applied, state.text, state.response_outcome) == (2, "hello", "completed")
    assert isinstance(state.items[0], TextItem)
    assert state.usage.input_tokens == 3
    # The snapshot holds ordinals 1 and 2; 3 is new.
    assert ordinals(reader.event(event(2), "k3") + reader.event(event(3), "k4")) == [3]
    assert reader.cursor == "k4"


def test_a_retention_gap_names_what_is_missing() -> None:
    reader = StreamReader("c", None)
    gap = problem(Code.RETENTION_GAP, "gone", execution="e1", first=1, last=6).model_dump_json()
    (told,) = reader.problem(gap, None)
    assert isinstance(told, GapItem)
    assert (told.execution, told.first, told.last, told.reason) == ("e1", 1, 6, "retention_gap")


@pytest.mark.parametrize("data", ["[]", "{}", '{"at": "x"}', "null", '{"execution": "e", "ordinal": 0, "at": 1}'])
def test_a_frame_that_is_none_is_an_error_not_an_event(data: str) -> None:
    with pytest.raises(ValidationError):
        StreamReader("c", None).event(data, "k")


HISTORY = {
    "conversation": "c",
    "workspace": "w",
    "cursor": "k2",
    "messages": [],
    "responses": [
        {
            "response": "r",
            "request": "q",
            "place": 1,
            "generation": 1,
            "execution": "e1",
            "agent": "scripted",
            "at": 1,
            "outcome": "completed",
        }
    ],
    "failures": [],
    "executions": [
        {
            "execution": "e1",
            "conversation": "c",
            "workspace": "w",
            "response": "r",
            "state": "exiting",
            "applied": 2,
            "items": 1,
        }
    ],
    "items": [
        {
            "execution": "e1",
            "item": "s1",
            "position": 0,
            "kind": "text",
            "state": {"kind": "text", "id": "s1", "state": "completed", "text": "hello"},
        }
    ],
    "interactions": [],
    "gaps": [],
    "usage": [{"execution": "e1", "turn": "t1", "input_tokens": 3, "output_tokens": 4}],
}
