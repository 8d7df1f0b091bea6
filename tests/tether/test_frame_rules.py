"""Each reason to refuse a stored message, and none for what honest writers have ever written."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from support_events import CLAIM
from tether import events as ev
from tether.bindings import judge_execution, request_of
from tether.cursor import tag_of
from tether.errors import InvalidError
from tether.events import ConversationEvent, Event
from tether.fold import Applied, ExecutionFold, GapItem
from tether.frame_rules import EXECUTION_ONLY, SERVICES_ONLY, Refusal, RefusedError
from tether.frames import Frame, Position, cut, decode, encode, merge
from tether.ids import ExecutionTarget
from tether.limits import (
    CLOCK_AHEAD_MAX_S,
    EXECUTION_CHARS_MAX,
    FRAME_EVENTS_MAX,
    FRAME_STORED_BYTES_MAX,
    INTERACTIONS_OPEN_MAX,
    ITEM_CHARS_MAX,
    ITEM_ID_CHARS_MAX,
    MERGED_ORDINALS_MAX,
    NUMBER_MAX,
    RECEIPTS_MAX,
)
from tether.owner import TOMBSTONES_MAX, OwnerRecord, Tombstone
from tether.snapshot import Watermark, take
from tether.snapshots import bounded
from tether.subjects import EventAddress

WHERE = EventAddress("t", "w", "c", "e")
NOTES = EventAddress("t", "w", "c", "_")
GOLDEN = Path(__file__).parents[1] / "golden" / "expected"
NOW_MS = time.time_ns() // 1_000_000


def frame(*events: dict[str, Any], **changed: Any) -> bytes:
    last = max((one.get("last") or one["ordinal"] for one in events), default=1)
    first = events[0]["ordinal"] if events else 1
    value = {"v": 1, "first": first, "last": last, "pos": {"record": 0, "index": 0}, "events": [*events], **changed}
    return json.dumps(value).encode()


def text(ordinal: int = 1, **changed: Any) -> dict[str, Any]:
    body = {"segment": "s", "text": "x"}
    return {"ordinal": ordinal, "at": 5, "type": ev.TEXT_COMPLETED, "body": body, **changed}


def said(kind: str, ordinal: int = 1, **body: Any) -> dict[str, Any]:
    return {"ordinal": ordinal, "at": 5, "type": kind, "body": body}


def note(kind: str = ev.RECOVERY, **changed: Any) -> bytes:
    return json.dumps({"v": 1, "id": "n", "generation": 1, "at": 5, "type": kind, "body": {}, **changed}).encode()


DEEP = (
    b'{"v":1,"first":1,"last":1,"pos":{"record":0,"index":0},'
    b'"events":[{"ordinal":1,"at":1,"type":"x","body":{"x":%b}}]}'
)
ENDED = said(ev.EXECUTION_ENDED, outcome="completed")

LIES: list[tuple[str, Refusal, EventAddress, bytes]] = [
    ("nothing", Refusal.UNREADABLE, WHERE, b""),
    ("no frame", Refusal.UNREADABLE, WHERE, b'{"v":1}'),
    ("bad utf-8", Refusal.UNREADABLE, WHERE, b"\xff\xfe"),
    ("another version", Refusal.VERSION, WHERE, frame(text(), v=2)),
    ("a bracket bomb", Refusal.NESTING, WHERE, DEEP % (b"[" * 100_000)),
    ("deep nesting", Refusal.NESTING, WHERE, DEEP % (b"[" * 1000 + b"]" * 1000)),
    ("too large", Refusal.SIZE, WHERE, frame(text(body={"segment": "s", "text": "x" * FRAME_STORED_BYTES_MAX}))),
    ("no event", Refusal.COUNT, WHERE, frame()),
    ("too many events", Refusal.COUNT, WHERE, frame(*(text(n) for n in range(1, FRAME_EVENTS_MAX + 2)))),
    ("NaN", Refusal.NUMBER, WHERE, DEEP % b"[NaN]"),
    ("Infinity", Refusal.NUMBER, WHERE, DEEP % b"1e999"),
    ("a giant name", Refusal.NAME, WHERE, frame(text(body={"segment": "s" * (ITEM_ID_CHARS_MAX + 1), "text": ""}))),
    ("a NUL in a name", Refusal.NAME, WHERE, frame(said(ev.TOOL_STARTED, tool="a\0", name="x"))),
    ("a giant type", Refusal.NAME, WHERE, frame(said("x" * 65))),
    ("the far future", Refusal.TIME, WHERE, frame(text(at=NOW_MS + (CLOCK_AHEAD_MAX_S + 3600) * 1000))),
    ("no clock's time", Refusal.TIME, WHERE, frame(text(at=10**40))),
    ("before time began", Refusal.TIME, WHERE, frame(text(at=-1))),
    ("a hole within", Refusal.ORDINAL, WHERE, frame(text(1), text(3))),
    ("another last", Refusal.ORDINAL, WHERE, frame(text(1), last=9)),
    ("an ordinal twice", Refusal.ORDINAL, WHERE, frame(text(1), text(1), last=2)),
    ("an ordinal beyond numbers", Refusal.ORDINAL, WHERE, frame(text(NUMBER_MAX + 1))),
    ("a range that is no delta's", Refusal.ORDINAL, WHERE, frame(text(1, last=7))),
    ("a range backwards", Refusal.ORDINAL, WHERE, frame(text(7, last=3), last=3)),
    (
        "a range without end",
        Refusal.ORDINAL,
        WHERE,
        frame({**said(ev.TEXT_DELTA, segment="s", text="", offset=0), "last": MERGED_ORDINALS_MAX + 1}),
    ),
    *((f"{kind} of an execution", Refusal.TYPE, WHERE, frame(said(kind))) for kind in sorted(SERVICES_ONLY)),
    *((f"{kind} on _", Refusal.TYPE, NOTES, note(kind)) for kind in sorted(EXECUTION_ONLY)),
    *(
        (f"a claim of another {name}", Refusal.TARGET, WHERE, frame(said(ev.EXECUTION_STARTED, target={name: "x"})))
        for name in ("tenant", "workspace", "conversation", "execution")
    ),
    ("more behind the end", Refusal.AFTER_END, WHERE, frame(ENDED, text(2))),
    ("a note's generation", Refusal.NUMBER, NOTES, note(generation=NUMBER_MAX + 1)),
    ("a note's number", Refusal.NUMBER, NOTES, b'{"v":1,"id":"n","generation":1,"at":5,"type":"x","body":{"n":NaN}}'),
    ("a note without id", Refusal.NAME, NOTES, note(id="")),
    ("a note of the future", Refusal.TIME, NOTES, note(at=10**30)),
]


@pytest.mark.parametrize(("reason", "where", "data"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
def test_a_message_that_lies_is_refused_with_its_reason(reason: Refusal, where: EventAddress, data: bytes) -> None:
    with pytest.raises(RefusedError) as told:
        decode(where.subject, data, time.time_ns())
    assert told.value.reason is reason
    assert isinstance(told.value, InvalidError)  # so every reader that passes over what it cannot read passes over it
    assert len(str(told.value)) < 500


def test_every_reason_that_a_message_can_give_by_itself_has_a_lie_here() -> None:
    from_records = {Refusal.FOREIGN_CONVERSATION, Refusal.FOREIGN_EXECUTION, Refusal.NOT_ADMITTED, Refusal.LIMIT}
    assert {lie[1] for lie in LIES} == set(Refusal) - from_records


def test_an_unknown_type_is_kept_on_either_subject() -> None:
    assert isinstance(decode(WHERE.subject, frame(said("some.future.type", deep=[[1.5]]))), Frame)
    assert isinstance(decode(NOTES.subject, note("some.future.type")), ConversationEvent)


def test_the_frames_of_every_recorded_conversation_are_believed_and_kept_whole() -> None:
    seen = 0
    for path in sorted(GOLDEN.rglob("*.ndjson")):
        drafts = [json.loads(line) for line in path.read_text().splitlines()]
        events = numbered(
            (ev.EXECUTION_STARTED, CLAIM | {"target": {}}), *((one["type"], one["body"]) for one in drafts)
        )
        waiting = [(one, Position(number, 0)) for number, one in enumerate(events)]
        while waiting:
            made = cut(waiting)
            assert isinstance(decode(WHERE.subject, made.data, time.time_ns()), Frame), path
            waiting = waiting[made.taken :]
        gaps = [one for one in folded(events).freeze().items if isinstance(one, GapItem)]
        assert not [one for one in gaps if one.reason in ("limit", "quarantined", "corrupt")], path
        seen += len(events)
    assert seen > 300


# --- what was admitted ---


def owner(*buried: str, target: str | None = None) -> OwnerRecord:
    stones = tuple(Tombstone(execution=name, outcome="completed", at=1000 + n) for n, name in enumerate(buried))
    named = None if target is None else target_of(target)
    return OwnerRecord(state="running" if target else "idle", target=named, tombstones=stones)


def target_of(execution: str) -> ExecutionTarget:
    return ExecutionTarget(
        tenant="t",
        workspace="w",
        conversation="c",
        response="r",
        response_generation=1,
        execution=execution,
        execution_generation=1,
        sandbox="s",
    )


def test_an_execution_is_believed_while_its_owner_record_names_it() -> None:
    assert judge_execution(WHERE, owner(target="e"), 0) is None
    assert judge_execution(WHERE, owner("other", "e"), 0) is None
    assert judge_execution(WHERE, owner("other", target="another"), 0) is Refusal.NOT_ADMITTED
    assert judge_execution(WHERE, None, 0) is Refusal.NOT_ADMITTED


def test_an_execution_that_the_record_has_forgotten_is_believed_only_for_what_was_stored_in_its_time() -> None:
    full = owner(*(f"x{number}" for number in range(TOMBSTONES_MAX)))
    assert judge_execution(WHERE, full, 1000 * 1_000_000) is None
    assert judge_execution(WHERE, full, 1001 * 1_000_000) is Refusal.NOT_ADMITTED


def test_only_messages_and_responses_are_asked_for_their_request() -> None:
    made = ConversationEvent(id="n", generation=1, at=1, type=ev.PROMPT_ADMITTED, body={"request": "q"})
    assert request_of(made) == "q"
    assert request_of(made.model_copy(update={"body": {}})) == ""
    assert request_of(made.model_copy(update={"type": ev.CONTROL_RECEIPT})) is None


# --- what is kept of one execution ---


def folded(events: list[Event]) -> ExecutionFold:
    fold = ExecutionFold()
    assert all(fold.apply(event) is Applied.APPLIED for event in events)
    return fold


def numbered(*drafts: tuple[str, dict[str, Any]]) -> list[Event]:
    return [Event(ordinal=n, at=1, type=kind, body=body) for n, (kind, body) in enumerate(drafts, start=1)]


def test_ten_thousand_open_interactions_are_some_open_ones_and_one_gap() -> None:
    asked = [(ev.INTERACTION_REQUESTED, {"interaction": f"i{n}", "kind": "approval"}) for n in range(10_000)]
    state = folded(numbered((ev.EXECUTION_STARTED, CLAIM), *asked)).freeze()
    assert len(state.pending()) == INTERACTIONS_OPEN_MAX
    assert [one.reason for one in state.items if isinstance(one, GapItem)] == ["limit"]
    assert state.phase == "waiting" and state.partial and state.applied == 10_001


def test_a_text_without_end_is_cut_at_the_same_place_however_frames_are_cut() -> None:
    piece = "x" * (ITEM_CHARS_MAX // 3)
    deltas = [(ev.TEXT_DELTA, {"segment": "s", "text": piece, "offset": len(piece) * n}) for n in range(5)]
    events = numbered(*deltas)
    whole, merged = folded(events).freeze(), folded(merge(events)).freeze()
    assert len(getattr(whole.items[0], "text", "")) == ITEM_CHARS_MAX
    assert whole.items[0] == merged.items[0]
    assert [one.reason for one in whole.items[1:] if isinstance(one, GapItem)] == ["limit"]


def test_what_an_execution_keeps_is_bounded_and_a_snapshot_has_the_same_bounds() -> None:
    share = EXECUTION_CHARS_MAX // 8
    events = numbered(
        *((ev.TOOL_STARTED, {"tool": f"t{n}", "name": "Bash", "input": {"x": "y" * share}}) for n in range(10))
    )
    straight = folded(events).freeze()
    begun = ExecutionFold(folded(events[:5]).freeze())
    for event in events[5:]:
        begun.apply(event)
    assert begun.freeze() == straight
    assert sum(one.kind == "tool" for one in straight.items) == 7
    assert [one.detail for one in straight.items if isinstance(one, GapItem)] == [
        "more content than is kept of one execution"
    ]


def test_receipts_without_end_are_told_once() -> None:
    receipts = [
        (ev.CONTROL_RECEIPT, {"control": f"c{n}", "verb": "answer", "status": "settled"})
        for n in range(RECEIPTS_MAX + 50)
    ]
    state = folded(numbered(*receipts)).freeze()
    assert len(state.receipts) == RECEIPTS_MAX and len(state.items) == 1


def test_nothing_is_believed_behind_the_end() -> None:
    end = (ev.EXECUTION_ENDED, {"outcome": "failed"})
    late = [end, (ev.EXECUTION_ENDED, {"outcome": "completed"}), (ev.TEXT_COMPLETED, {"segment": "s", "text": "late"})]
    state = folded(numbered((ev.EXECUTION_STARTED, CLAIM), *late)).freeze()
    assert state.outcome == "failed" and state.text == ""
    assert [one.reason for one in state.items if isinstance(one, GapItem)] == ["quarantined"]


def test_a_collectors_snapshot_says_no_more_than_a_log_could() -> None:
    state = folded(numbered((ev.TEXT_COMPLETED, {"segment": "s", "text": "x"}))).freeze()

    def of(**changed: Any) -> bool:
        mark = Watermark(ordinal=changed.get("applied", 1), sequence=1, tag=tag_of(1))
        return bounded(take(target_of("e"), state.model_copy(update=changed), mark, captured_at=1))

    assert of()
    assert not of(applied=NUMBER_MAX + 1)
    assert not of(usage_by_turn={f"t{n}": {} for n in range(20_000)})
    assert not of(items=[state.items[0].model_copy(update={"id": "\0"})])
    assert not of(items=[state.items[0].model_copy(update={"text": "x" * (EXECUTION_CHARS_MAX + (2 << 20))})])
    whole = take(target_of("e"), state, Watermark(ordinal=7, sequence=1, tag=1), captured_at=1)
    assert not bounded(whole)


def test_a_frame_as_it_is_written_is_believed() -> None:
    made = Frame(
        first=1,
        last=2,
        pos=Position(record=0, index=0),
        events=numbered((ev.EXECUTION_STARTED, CLAIM), (ev.RESPONSE_ENDED, {"outcome": "completed"})),
    )
    assert decode(WHERE.subject, encode(made), time.time_ns()) == made
