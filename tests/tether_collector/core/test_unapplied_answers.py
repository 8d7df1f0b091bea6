"""An answer that was given and not seen to be applied is offered where the same is asked again, and given by nobody."""

from __future__ import annotations

from typing import Any

from support_execution import SESSION, Rig, launch, started
from tether import events as ev
from tether_collector.core import inputs as i

ASK: dict[str, Any] = {
    "type": "ask",
    "request": "r1",
    "kind": "approval",
    "tool": "write",
    "tool_id": "t1",
    "input": {"path": "a", "n": 1},
}


def cut_off(**answer: Any) -> list[dict[str, Any]]:
    """What a process leaves that was killed right after its answer was written."""
    rig = started()
    rig.say(ASK)
    rig.control("ctl_1", "answer", interaction="r1", **answer)
    rig.written("ctl_1")
    rig.exit(-9)
    rig.prove()
    assert rig.body(ev.INTERACTION_RESOLVED)["outcome"] == "expired"
    assert rig.receipts("ctl_1")[-1] == "unknown"
    return rig.execution.unapplied()


def resumed(offers: list[dict[str, Any]]) -> Rig:
    rig = Rig(start=launch(resume=True))
    rig.note("offers", offers=offers)
    rig.write_all()
    rig.say({"type": "session", "session_id": SESSION, "resumed": True}, {"type": "turn.started", "prompt": "p"})
    return rig


def test_the_same_question_carries_the_answer_and_waits_for_a_human_all_the_same() -> None:
    rig = resumed(cut_off(decision="allow", text="go on"))
    rig.say({**ASK, "request": "r2", "tool_id": "t2", "input": {"n": 1, "path": "a"}})
    body = rig.body(ev.INTERACTION_REQUESTED)
    assert body["offered"] == {"control": "ctl_1", "decision": "allow", "text": "go on"}
    assert [entry.interaction for entry in rig.execution.pending()] == ["r2"]
    assert rig.wants(i.WriteStdin) == [], "nobody answers by itself"


def test_it_is_offered_once() -> None:
    rig = resumed(cut_off(decision="deny"))
    rig.say({**ASK, "request": "r2"}, {**ASK, "request": "r3"})
    assert ["offered" in body for body in rig.bodies(ev.INTERACTION_REQUESTED)] == [True, False]


def test_another_input_or_tool_is_another_question() -> None:
    rig = resumed(cut_off(decision="allow"))
    rig.say({**ASK, "request": "r2", "input": {"path": "b", "n": 1}}, {**ASK, "request": "r3", "tool": "delete"})
    assert not any("offered" in body for body in rig.bodies(ev.INTERACTION_REQUESTED))


def test_an_answer_that_was_seen_and_a_question_without_one_leave_nothing() -> None:
    rig = started()
    rig.say(ASK, {**ASK, "request": "r9"})
    rig.control("ctl_1", "answer", interaction="r1", decision="allow")
    rig.written("ctl_1")
    rig.say({"type": "ask.resolved", "request": "r1", "decision": "allow"})
    rig.exit(-9)
    rig.prove()
    assert rig.execution.unapplied() == []


def test_offers_that_are_none_are_passed_over() -> None:
    rig = resumed([{"asked": 1}, {"answer": {}}, "x", None])  # type: ignore[list-item]
    rig.say(ASK)
    assert "offered" not in rig.body(ev.INTERACTION_REQUESTED)
