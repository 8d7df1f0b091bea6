"""A CLI that opens and never ends: what the machine keeps of it is bounded, and the log says what was given up."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support_execution import Rig
from tether import events as ev
from tether_collector.core import bounds
from tether_collector.core.execution import Execution


def test_of_tools_that_never_end_the_oldest_are_told_as_interrupted() -> None:
    rig = Rig()
    for number in range(bounds.ENTRIES_MAX + 2 * bounds.LOOK_EVERY):
        rig.say({"type": "tool.start", "id": f"t{number}", "name": "look"})
    ended = [event.body for event in rig.events if event.type == ev.TOOL_COMPLETED]
    assert ended[0] == {
        "tool": "t0",
        "status": "interrupted",
        "detail": f"given up: the agent has more than {bounds.ENTRIES_MAX} tools open",
    }
    assert len(ended) >= bounds.LOOK_EVERY and len({body["tool"] for body in ended}) == len(ended)
    rig.exit()
    told = [event.body["tool"] for event in rig.events if event.type == ev.TOOL_COMPLETED]
    assert len(told) == len(set(told)) == bounds.ENTRIES_MAX + 2 * bounds.LOOK_EVERY, "each tool ends once"


def test_a_text_that_is_given_up_is_told_as_far_as_it_came() -> None:
    rig = Rig()
    for number in range(bounds.ENTRIES_MAX + 2 * bounds.LOOK_EVERY):
        rig.say({"type": "delta", "segment": f"s{number}", "text": f"text {number}"})
    first = next(event for event in rig.events if event.type == ev.TEXT_COMPLETED)
    assert first.body == {"segment": "s0", "text": "text 0", "partial": True}


def test_of_ten_thousand_open_questions_the_latest_wait_and_the_others_are_withdrawn() -> None:
    rig = Rig()
    asked = 10_000
    for number in range(asked):
        rig.say({"type": "ask", "request": f"i{number}", "kind": "approval", "tool": "look"})
    pending = [entry.interaction for entry in rig.execution.pending()]
    assert pending == [f"i{number}" for number in range(asked - bounds.ASKS_MAX, asked)]
    withdrawn = [event.body for event in rig.events if event.type == ev.INTERACTION_RESOLVED]
    assert withdrawn[0] == {"interaction": "i0", "outcome": "cancelled"}
    assert len(withdrawn) == asked - bounds.ASKS_MAX
    late = rig.execution.check_control("answer", rig.execution.target, {"interaction": "i9000", "decision": "allow"})
    assert late is not None and late.problem.code == "INTERACTION_SETTLED"
    assert (
        rig.execution.check_control("answer", rig.execution.target, {"interaction": pending[0], "decision": "allow"})
        is None
    )


def test_an_answer_that_was_given_to_a_question_that_is_withdrawn_is_told_as_too_late() -> None:
    rig = Rig()
    rig.say({"type": "ask", "request": "i-first", "kind": "approval", "tool": "look"})
    rig.control("k1", "answer", interaction="i-first", decision="allow")
    for number in range(bounds.ASKS_MAX + 1):
        rig.say({"type": "ask", "request": f"i{number}", "kind": "approval", "tool": "look"})
    receipt = rig.execution.receipt("k1")
    assert receipt is not None and (receipt.status, receipt.reason) == ("rejected", "INTERACTION_SETTLED")


@pytest.mark.parametrize("kind", ["tool.start", "ask"])
def test_a_few_things_that_are_very_large_are_bounded_by_their_size(kind: str) -> None:
    rig = Rig()
    large = "x" * (1 << 20)
    for number in range(24):
        line: dict[str, Any] = {
            "type": kind,
            "id": f"t{number}",
            "request": f"i{number}-{large[:200]}",
            "kind": "approval",
        }
        rig.say({"type": "delta", "segment": f"s{number}", "text": large}, line)
    assert len(rig.execution.dump()) < bounds.STATE_BYTES_MAX + bounds.MEASURE_BYTES + (2 << 20)
    texts = [event for event in rig.events if event.type == ev.TEXT_COMPLETED]
    assert texts and all(event.body["text"] == large and event.body["partial"] for event in texts)


def test_a_machine_that_was_saved_in_between_gives_up_the_same() -> None:
    lines = [json.dumps({"type": "tool.start", "id": f"t{number}", "name": "look"}).encode() for number in range(800)]
    whole, parted = Rig(), Rig()
    for number, line in enumerate(lines):
        whole.say(line)
        parted.say(line)
        if number % 97 == 0:
            parted.execution = Execution.load(parted.execution.dump())
    assert parted.events == whole.events
    assert parted.execution.dump() == whole.execution.dump()
