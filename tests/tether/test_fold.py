"""L1: the fold law, and what the fold makes of each kind of event."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from support_events import CLAIM, logs
from tether import events as ev
from tether.conversation_fold import ConversationFold
from tether.events import ConversationEvent, Event
from tether.fold import (
    RAW_ITEMS_MAX,
    Applied,
    ExecutionFold,
    ExecutionState,
    GapItem,
    InteractionItem,
    SessionItem,
    TextItem,
    ToolItem,
)
from tether.frames import Frame, Position, check, cut, decode, encode, merge
from tether.subjects import EventAddress

ADDRESS = EventAddress("t", "w", "c", "e")


def fold(events: list[Event]) -> ExecutionState:
    builder = ExecutionFold()
    for event in events:
        assert builder.apply(event) is not Applied.HOLE
    return builder.freeze()


def frames_of(events: list[Event], sizes: list[int]) -> list[Frame]:
    """Cut a log into frames of at most these numbers of events, in turn."""
    waiting = [(event, Position(record=event.ordinal, index=0)) for event in events]
    frames = []
    turn = 0
    while waiting:
        frame, taken, _ = cut(waiting, events_max=sizes[turn % len(sizes)])
        frames.append(frame)
        waiting = waiting[taken:]
        turn += 1
    return frames


@given(logs(), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_a_snapshot_at_any_watermark_and_the_suffix_equal_the_fold_of_everything(
    events: list[Event], sizes: list[int], data: st.DataObject
) -> None:
    whole = fold(events)
    frames = frames_of(events, sizes)
    for watermark in range(len(frames) + 1):
        builder = ExecutionFold()
        for frame in frames[:watermark]:
            for event in frame.events:
                builder.apply(event)
        # Through the wire: a snapshot is JSON, and so is every frame.
        state = ExecutionState.model_validate_json(builder.freeze().model_dump_json())
        resumed = ExecutionFold(state)
        back = data.draw(st.integers(0, watermark), label="frames delivered again")
        for frame in frames[watermark - back :]:
            again = decode(ADDRESS.subject, encode(frame))
            assert isinstance(again, Frame)
            for event in again.events:
                assert resumed.apply(event) is not Applied.HOLE
        assert resumed.freeze() == whole


@given(
    logs(),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(0, 2**32),
)
def test_frames_cut_otherwise_and_delivered_again_change_nothing(
    events: list[Event], sizes: list[int], other_sizes: list[int], seed: int
) -> None:
    whole = fold(events)
    builder = ExecutionFold()
    deliveries = sorted(
        [*frames_of(events, sizes), *frames_of(events, other_sizes)], key=lambda frame: (frame.first, frame.last)
    )
    shuffled = random.Random(seed)
    for frame in deliveries:
        if shuffled.random() < 0.3:
            deliveries.append(frame)
    for frame in deliveries:
        for event in frame.events:
            assert builder.apply(event) is not Applied.HOLE
    assert builder.freeze() == whole


@given(logs(), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_merging_keeps_the_meaning_and_ordinals_have_no_holes(events: list[Event], sizes: list[int]) -> None:
    assert fold(merge(events)) == fold(events)
    for frame in frames_of(events, sizes):
        check(frame)


@given(logs(max_steps=10))
def test_a_hole_changes_nothing_and_names_itself(events: list[Event]) -> None:
    builder = ExecutionFold()
    builder.apply(events[0])
    before = builder.freeze()
    late = events[-1].model_copy(update={"ordinal": 7_000})
    assert builder.apply(late) is Applied.HOLE
    assert builder.freeze() == before


RUBBISH = st.sampled_from([None, True, -3, 0, 5, "", "ab", [1, 2], {"x": 1}])
FIELDS = ("segment", "text", "offset", "parent", "tool", "status", "blob", "chars", "interaction", "kind", "outcome")


@given(logs(), st.data())
def test_bodies_that_lie_stop_no_reader_and_change_no_state_that_was_given_out(
    events: list[Event], data: st.DataObject
) -> None:
    builder = ExecutionFold()
    given_out: list[tuple[ExecutionState, str]] = []
    for event in events:
        lies = data.draw(st.dictionaries(st.sampled_from(FIELDS), RUBBISH, max_size=2), label="lies")
        kind = data.draw(st.sampled_from([event.type, event.type, ev.TEXT_DELTA, ev.TOOL_PROGRESS]), label="type")
        lying = event.model_copy(update={"body": {**event.body, **lies}, "type": kind})
        assert builder.apply(lying) is Applied.APPLIED
        state = builder.freeze()
        given_out.append((state, state.model_dump_json()))
    for state, before in given_out:
        assert state.model_dump_json() == before
    assert list(map(builder.item, builder.keys())) == builder.freeze().items


def event(ordinal: int, kind: str, /, **body: object) -> Event:
    return Event(ordinal=ordinal, at=ordinal, type=kind, body=dict(body))


def test_a_skipped_range_is_told_once_and_makes_the_state_partial() -> None:
    builder = ExecutionFold()
    builder.skip_to(5, "retention_gap")
    builder.skip_to(5, "retention_gap")
    assert builder.apply(event(5, ev.TEXT_DELTA, segment="s", text="x", offset=0)) is Applied.APPLIED
    state = builder.freeze()
    gaps = [item for item in state.items if isinstance(item, GapItem)]
    assert [(gap.from_ordinal, gap.to_ordinal, gap.reason) for gap in gaps] == [(1, 4, "retention_gap")]
    assert state.partial


def test_a_merged_delta_that_overlaps_what_is_there_adds_only_what_is_new() -> None:
    builder = ExecutionFold()
    builder.apply(event(1, ev.TEXT_DELTA, segment="s", text="ab", offset=0))
    builder.apply(event(2, ev.TEXT_DELTA, segment="s", text="cd", offset=2))
    merged = Event(ordinal=2, last=4, at=4, type=ev.TEXT_DELTA, body={"segment": "s", "text": "cdefgh", "offset": 2})
    assert builder.apply(merged) is Applied.APPLIED
    item = builder.freeze().items[0]
    assert isinstance(item, TextItem)
    assert item.text == "abcdefgh"


def test_discarded_deltas_are_void_and_completed_text_is_history() -> None:
    state = fold(
        [
            event(1, ev.TEXT_DELTA, segment="a", text="wrong", offset=0),
            event(2, ev.TEXT_DISCARDED, segment="a"),
            event(3, ev.TEXT_DELTA, segment="b", text="rig", offset=0),
            event(4, ev.TEXT_COMPLETED, segment="b", text="right"),
        ]
    )
    assert state.text == "right"
    assert [item.state for item in state.items if isinstance(item, TextItem)] == ["discarded", "completed"]


def test_a_preview_never_replaces_the_whole_text_that_the_deltas_gave() -> None:
    blob = {"digest": "d" * 64, "bytes": 8}
    events = [
        event(1, ev.TEXT_DELTA, segment="a", text="all of it", offset=0),
        event(2, ev.TEXT_COMPLETED, segment="a", text="all", blob=blob, chars=9),
        event(3, ev.TEXT_COMPLETED, segment="b", text="pre", blob=blob, chars=900),
    ]
    first, second = fold(events).items
    assert isinstance(first, TextItem)
    assert isinstance(second, TextItem)
    assert (first.text, first.blob) == ("all of it", None)
    assert (second.text, second.blob and second.blob["digest"]) == ("pre", "d" * 64)


def test_the_end_leaves_nothing_open() -> None:
    state = fold(
        [
            event(1, ev.TOOL_STARTED, tool="t", name="Bash"),
            event(2, ev.INTERACTION_REQUESTED, interaction="i", kind="approval", name="Bash"),
            event(3, ev.TEXT_DELTA, segment="s", text="half", offset=0),
            event(4, ev.RESPONSE_ENDED, outcome="lost"),
            event(5, ev.EXECUTION_ENDED, outcome="lost", proof={"method": "keeper_gone", "at": 5}),
        ]
    )
    tool, interaction, text = state.items
    assert isinstance(tool, ToolItem)
    assert isinstance(interaction, InteractionItem)
    assert isinstance(text, TextItem)
    assert (tool.state, interaction.state, text.state) == ("unknown", "expired", "partial")
    assert (state.phase, state.outcome, state.pending()) == ("ended", "lost", [])


def test_a_session_given_the_history_is_told_where_it_begins() -> None:
    told = {"process": 2, "why": "not_found", "source": "export", "rows": 7, "partial": True, "from": "lost"}
    state = fold([event(1, ev.EXECUTION_STARTED, **CLAIM), event(2, ev.SESSION_RECOVERED, **told)])
    (item,) = state.items
    assert isinstance(item, SessionItem)
    assert (item.id, item.from_session, item.rows, item.partial, item.source) == ("2", "lost", 7, True, "export")
    assert not state.partial, "the history was cut, not this execution's events"


def test_going_on_in_another_process_changes_the_target_and_nothing_that_was_counted_or_begun() -> None:
    before = [
        event(1, ev.EXECUTION_STARTED, **CLAIM),
        event(2, ev.USAGE, turn="t1", input_tokens=5, cost_usd=0.5),
        event(3, ev.TURN_COMPLETED, turn="t1", outcome="completed"),
        event(4, ev.INTERACTION_REQUESTED, interaction="i", kind="approval"),
    ]
    again = {**CLAIM, "process": 2, "target": {"execution": "e", "process_generation": 2}}
    one, other = fold(before), fold([*before, event(5, ev.EXECUTION_STARTED, **again)])
    assert other.target == again["target"] and other.phase == "waiting" and other.started_at == 1
    assert other == one.model_copy(update={"applied": 5, "target": again["target"]})
    later = [event(6, ev.USAGE, turn="t1", input_tokens=5), event(7, ev.USAGE, turn="t2", input_tokens=2)]
    counted = fold([*before, event(5, ev.EXECUTION_STARTED, **again), *later])
    assert (counted.usage.turns, counted.usage.input_tokens, counted.usage.cost_usd) == (2, 7, 0.5)


def test_a_process_after_the_end_of_the_response_does_not_open_it_again() -> None:
    ended = [event(1, ev.EXECUTION_STARTED, **CLAIM), event(2, ev.RESPONSE_ENDED, outcome="completed")]
    assert fold([*ended, event(3, ev.EXECUTION_STARTED, **{**CLAIM, "process": 2})]).phase == "exiting"


def test_an_answer_that_is_offered_again_stays_with_what_it_answers() -> None:
    offered = {"control": "c", "decision": "deny", "text": "not today"}
    asked = event(1, ev.INTERACTION_REQUESTED, interaction="i", kind="approval", offered=offered)
    (item,) = fold([asked, event(2, ev.INTERACTION_RESOLVED, interaction="i", outcome="answered", control="d")]).items
    assert isinstance(item, InteractionItem)
    assert (item.offered, item.state, item.control) == (offered, "answered", "d")


def test_usage_of_a_turn_is_counted_once() -> None:
    state = fold([event(n, ev.USAGE, turn="t1", input_tokens=5, cost_usd=0.5) for n in (1, 2)])
    assert (state.usage.turns, state.usage.input_tokens, state.usage.cost_usd) == (1, 5, 0.5)


def test_a_body_that_lies_is_a_gap_and_stops_nobody() -> None:
    state = fold([event(1, ev.TOOL_STARTED, tool={"not": "a string"}), event(2, ev.TEXT_DELTA, segment="s")])
    assert [item.reason for item in state.items if isinstance(item, GapItem)] == ["corrupt", "corrupt"]
    assert state.applied == 2


def test_raw_lines_are_bounded_and_the_rest_is_counted() -> None:
    state = fold([event(n, ev.RAW, stream="stderr", preview="x", bytes=1, why="?") for n in range(1, 1_001)])
    assert len(state.items) == RAW_ITEMS_MAX
    assert state.raw_omitted == 1_000 - RAW_ITEMS_MAX


def test_conversation_events_count_once_by_identity() -> None:
    admitted = ConversationEvent(
        id="r1/prompt.admitted",
        generation=1,
        at=1,
        type=ev.PROMPT_ADMITTED,
        body={"request": "r1", "prompt_sequence": 3, "content": [{"type": "text", "text": "hi"}]},
    )
    created = ConversationEvent(
        id="r1/response.created",
        generation=1,
        at=2,
        type=ev.RESPONSE_CREATED,
        body={
            "request": "r1",
            "response": "rsp",
            "response_generation": 1,
            "execution": "exe",
            "execution_generation": 1,
            "agent": "scripted",
        },
    )
    failed = ConversationEvent(
        id="r1/response.failed",
        generation=1,
        at=3,
        type=ev.RESPONSE_FAILED,
        body={"request": "r1", "response": "rsp", "code": "RUNTIME_UNAVAILABLE", "retryable": True},
    )
    builder = ConversationFold()
    assert [builder.apply(e) for e in (admitted, created, admitted, failed)] == [
        Applied.APPLIED,
        Applied.APPLIED,
        Applied.DUPLICATE,
        Applied.APPLIED,
    ]
    state = builder.freeze()
    assert [message.response for message in state.messages] == ["rsp"]
    assert [(r.state, r.error and r.error["code"]) for r in state.responses] == [("failed", "RUNTIME_UNAVAILABLE")]


def test_a_conversation_event_that_lies_is_told_as_corrupt_and_stops_nobody() -> None:
    builder = ConversationFold()
    liar = ConversationEvent(id="x", generation=1, at=7, type=ev.RESPONSE_CREATED, body={"request": 3})
    assert builder.apply(liar) is Applied.APPLIED
    assert builder.freeze().recoveries == [{"corrupt": ev.RESPONSE_CREATED, "id": "x", "at": 7}]
