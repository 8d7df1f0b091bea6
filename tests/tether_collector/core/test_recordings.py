"""Every recorded line of every agent means something by name, and the events it makes are pinned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from support_recordings import DRIVERS, GOLDEN, agent_of, read_recording, recordings, replayed
from tether import events as ev

RECORDINGS = recordings()
NAMES = [f"{path.parent.name}/{path.stem}" for path in RECORDINGS]
COUNTS: Final = {"claude": 34, "codex": 21}
NOT_OURS: Final = "a response to no request of ours"
# Lines of stdout that no rule maps, by recording: responses to what the drivers of those days asked for and no adapter
# does, and to prompts after the end of a response, which are refused today.
UNKNOWN: Final[dict[str, list[str]]] = {
    "codex-0.171.0/command_approval_decline": [NOT_OURS],
    "codex-0.171.0/concurrent_a": [NOT_OURS],
    "codex-0.171.0/inject_items": [NOT_OURS],
    "codex-0.171.0/interrupt_text": [NOT_OURS],
    "codex-0.171.0/interrupt_then_clean_terminals": [NOT_OURS],
    "codex-0.171.0/parallel_approvals": [NOT_OURS],
    "codex-0.171.0/resume_unknown": [NOT_OURS, NOT_OURS, NOT_OURS],
}


def test_the_recordings_of_every_agent_are_there() -> None:
    found = [agent_of(path) for path in RECORDINGS]
    assert {agent: found.count(agent) for agent in DRIVERS} == COUNTS


@pytest.mark.parametrize("path", RECORDINGS, ids=NAMES)
def test_every_recorded_stdout_line_is_mapped_or_ignored_by_name_or_listed_here(path: Path) -> None:
    rig = replayed(path)
    unknown = [body["why"] for body in rig.bodies(ev.RAW) if body["stream"] == "stdout"]
    assert unknown == UNKNOWN.get(f"{path.parent.name}/{path.stem}", [])
    lines = [row["line"] for row in read_recording(path) if row["ch"] == "stderr"]
    assert [body["preview"] for body in rig.bodies(ev.RAW) if body["stream"] == "stderr"] == lines


@pytest.mark.parametrize("path", RECORDINGS, ids=NAMES)
def test_the_events_of_a_recording_are_the_pinned_ones(path: Path, pytestconfig: pytest.Config) -> None:
    rig = replayed(path)
    rows = [
        json.dumps({"n": event.ordinal, "record": position.record, "type": event.type, "body": event.body})
        for event, position in zip(rig.events, rig.positions, strict=True)
    ]
    pinned = GOLDEN / "expected" / path.parent.name / f"{path.stem}.ndjson"
    if pytestconfig.getoption("--update-golden"):
        pinned.parent.mkdir(parents=True, exist_ok=True)
        pinned.write_text("".join(f"{row}\n" for row in rows))
    assert pinned.read_text().splitlines() == rows


@pytest.mark.parametrize("path", RECORDINGS, ids=NAMES)
def test_a_recording_ends_with_the_fence_and_its_response_ends_once_before_it(path: Path) -> None:
    types = replayed(path).types()
    if not any('"exit"' in row["line"] for row in read_recording(path) if row["ch"] == "proc"):
        assert ev.EXECUTION_ENDED not in types
        return
    assert types[-1] == ev.EXECUTION_ENDED
    assert types.count(ev.EXECUTION_ENDED) == types.count(ev.RESPONSE_ENDED) == 1


@pytest.mark.parametrize("path", RECORDINGS, ids=NAMES)
def test_ordinals_follow_the_claim_without_holes_and_positions_name_their_record(path: Path) -> None:
    rig = replayed(path)
    assert [event.ordinal for event in rig.events] == list(range(2, len(rig.events) + 2))
    assert [(p.record, p.index) for p in rig.positions] == sorted((p.record, p.index) for p in rig.positions)


@pytest.mark.parametrize("path", RECORDINGS, ids=NAMES)
def test_deltas_of_a_segment_add_up_to_its_completed_text_or_are_discarded(path: Path) -> None:
    rig = replayed(path)
    texts: dict[str, str] = {}
    for event in rig.events:
        segment = str(event.body.get("segment"))
        if event.type == ev.TEXT_DELTA:
            assert event.body["offset"] == len(texts.get(segment, ""))
            texts[segment] = texts.get(segment, "") + event.body["text"]
        elif event.type == ev.TEXT_COMPLETED and segment in texts:
            assert texts.pop(segment) == event.body["text"]
        elif event.type == ev.TEXT_DISCARDED:
            del texts[segment]
    assert texts == {}
