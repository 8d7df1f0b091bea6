"""The oracle: clean runs are clean, and every kind of damage is counted as what it is."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support_scripted import run_script, scripted
from tether_oracle import (
    COMPLETED_KINDS,
    KINDS,
    Fact,
    OracleError,
    Truth,
    fact_of_event,
    judge,
    load_truth,
)

SCRIPT = "!say hello world\n!deltas 20\n!tool write 1\n!reasoning hm\n!retry 1\n!lines 5"


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    _, agent = run_script(tmp_path_factory.mktemp("run"), SCRIPT)
    return load_truth(agent.truth)


def as_events(truth: Truth) -> list[dict[str, Any]]:
    """What a faithful adapter makes of the printed lines: the log's events."""
    events: list[dict[str, Any]] = []
    outcomes = {"ok": "completed", "error": "failed", "allow": "answered", "deny": "denied"}
    for line in truth.processes[0].printed:
        message = line.message
        assert message is not None
        match message["type"]:
            case "session":
                body = ("session.bound", {"native_session": message["session_id"], "resumable": False})
            case "delta":
                body = ("text.delta", {"segment": message["segment"], "text": message["text"], "offset": 0})
            case "text":
                body = ("text.completed", {"segment": message["segment"], "text": message["text"]})
            case "discard":
                body = ("text.discarded", {"segment": message["segment"]})
            case "reasoning":
                body = ("reasoning.completed", {"segment": "g1", "text": message["text"]})
            case "tool.start":
                body = ("tool.started", {"tool": message["id"], "name": message["name"]})
            case "tool.progress":
                body = ("tool.progress", {"tool": message["id"], "text": message["text"], "offset": 0})
            case "tool.end":
                body = ("tool.completed", {"tool": message["id"], "status": message["status"]})
            case "model":
                body = ("model.request", {"state": message["state"]})
            case "usage":
                tokens = {key: message[key] for key in ("input_tokens", "output_tokens")}
                body = ("usage", {"turn": "p1", **tokens})
            case "result":
                body = ("turn.completed", {"turn": "p1", "outcome": outcomes[message["status"]]})
            case _:
                continue
        events.append({"type": body[0], "body": body[1]})
    return events


def facts(events: list[dict[str, Any]]) -> list[Fact | None]:
    return [fact_of_event(event) for event in events]


def merge_deltas(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    merged: list[dict[str, Any]] = []
    for event in events:
        last: dict[str, Any] = merged[-1] if merged else {"type": "", "body": {}}
        is_same = event["type"] == last["type"] == "text.delta"
        if is_same and event["body"]["segment"] == last["body"]["segment"]:
            text = last["body"]["text"] + event["body"]["text"]
            merged[-1] = {"type": "text.delta", "body": {**last["body"], "text": text}}
        else:
            merged.append(event)
    return merged


def test_a_reader_with_every_event_gets_a_clean_verdict(truth: Truth) -> None:
    events = as_events(truth)
    verdict = judge(truth, facts(events))
    assert verdict.is_clean
    assert verdict.printed == verdict.got == len(events)


def test_merged_deltas_count_like_single_ones(truth: Truth) -> None:
    single, merged = as_events(truth), merge_deltas(as_events(truth))
    assert len(merged) < len(single)
    verdict = judge(truth, facts(merged))
    assert verdict.is_clean
    assert verdict.got == len(single)


def test_a_reader_of_settled_things_needs_no_deltas(truth: Truth) -> None:
    settled = [event for event in as_events(truth) if event["type"] in COMPLETED_KINDS]
    assert judge(truth, facts(settled), kinds=COMPLETED_KINDS).is_clean
    assert judge(truth, facts(settled)).lost > 0


def test_ids_that_do_not_reach_the_reader_can_be_left_out_of_the_comparison(truth: Truth) -> None:
    events = as_events(truth)
    for event in events:
        for field in ("segment", "tool"):
            if field in event["body"]:
                event["body"][field] = f"other-{event['body'][field]}"
    assert not judge(truth, facts(events)).is_clean
    assert judge(truth, facts(events), match_keys=False).is_clean


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_single_damage_is_found_and_named(truth: Truth, data: st.DataObject) -> None:
    events = as_events(truth)
    index = data.draw(st.integers(0, len(events) - 1))
    how = data.draw(st.sampled_from(["drop", "double", "foreign"]))
    damaged = list(events)
    if how == "drop":
        del damaged[index]
    elif how == "double":
        damaged.insert(index, events[index])
    else:
        damaged.insert(index, {"type": "text.completed", "body": {"segment": "s1", "text": "never printed"}})
    if data.draw(st.booleans()):
        damaged = merge_deltas(damaged)
    verdict = judge(truth, facts(damaged))
    if how == "double" and events[index]["type"] == "session.bound":
        assert verdict.is_clean  # said again when the session becomes resumable
        return
    assert not verdict.is_clean
    figures = (verdict.lost, verdict.doubled, verdict.foreign)
    assert figures == {"drop": (1, 0, 0), "double": (0, 1, 0), "foreign": (0, 0, 1)}[how]
    assert verdict.printed == len(events)
    assert verdict.details


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_two_things_that_change_places_are_out_of_order(truth: Truth, data: st.DataObject) -> None:
    events = [event for event in as_events(truth) if event["type"] == "text.completed"]
    one = data.draw(st.integers(0, len(events) - 2))
    two = data.draw(st.integers(one + 1, len(events) - 1))
    events[one], events[two] = events[two], events[one]
    verdict = judge(truth, facts(events), kinds=frozenset({"text.completed"}))
    assert (verdict.lost, verdict.doubled, verdict.foreign) == (0, 0, 0)
    assert verdict.out_of_order > 0


def test_deltas_of_a_segment_that_change_places_are_out_of_order(truth: Truth) -> None:
    events = [event for event in as_events(truth) if event["type"] == "text.delta" and event["body"]["segment"] == "s2"]
    events[3], events[4] = events[4], events[3]
    others = [event for event in as_events(truth) if event["type"] == "text.delta" and event["body"]["segment"] != "s2"]
    verdict = judge(truth, facts(events + others), kinds=frozenset({"text.delta"}))
    assert (verdict.lost, verdict.doubled) == (0, 0)
    assert verdict.out_of_order == 1


def test_long_texts_are_compared_by_digest_wherever_they_are_kept(tmp_path: Path) -> None:
    _, agent = run_script(tmp_path, f"!say {'x' * 5000}")
    truth = load_truth(agent.truth)
    text = "x" * 5000
    blob = {"digest": sha256(text.encode()).hexdigest(), "bytes": 5000, "kind": "artifact"}
    kinds = frozenset({"text.completed"})
    whole = {"type": "text.completed", "body": {"segment": "s1", "text": text}}
    kept_apart = {"type": "text.completed", "body": {"segment": "s1", "text": "xxx", "blob": blob}}
    other = {"type": "text.completed", "body": {"segment": "s1", "text": text + "y"}}
    assert judge(truth, facts([whole]), kinds=kinds).is_clean
    assert judge(truth, facts([kept_apart]), kinds=kinds).is_clean
    assert judge(truth, facts([other]), kinds=kinds).lost == 1


def test_asks_are_compared_by_their_outcome_and_expiry_is_not_the_agents(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("!ask a\n!ask b\n!ask c")
        first = agent.until("ask")["request"]
        agent.send(type="answer", request=first, decision="allow")
        second = agent.until("ask")["request"]
        agent.send(type="answer", request=second, decision="deny")
        third = agent.until("ask")["request"]
        agent.send(type="interrupt", id="i1")
        agent.finish()
    events = [
        {"type": "interaction.requested", "body": {"interaction": key, "kind": "approval"}}
        for key in (first, second, third)
    ]
    outcomes = ((first, "answered"), (second, "denied"), (third, "cancelled"), ("r9", "expired"))
    for position, (key, outcome) in enumerate(outcomes):
        events.insert(
            2 * position + 1, {"type": "interaction.resolved", "body": {"interaction": key, "outcome": outcome}}
        )
    kinds = frozenset({"interaction.requested", "interaction.resolved"})
    verdict = judge(load_truth(agent.truth), facts(events), kinds=kinds)
    assert verdict.is_clean, verdict.details
    assert verdict.got == 6


def test_a_line_cut_by_a_kill_may_be_there_or_not(tmp_path: Path) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("!flood 10000000")
        agent.until("delta", text="f000200 ")
        agent.process.send_signal(signal.SIGKILL)
        agent.process.wait(20)
        while agent.next() is not None:
            pass
    truth = load_truth(agent.truth)
    printed = truth.processes[0].printed
    assert all(line.certain for line in printed[:-1])
    whole = [m for m in agent.seen if m["type"] == "delta"]
    got = [Fact("text.delta", str(m["segment"]), str(m["text"])) for m in whole]
    got += [Fact("text.completed", str(m["segment"]), str(m["text"])) for m in agent.seen if m["type"] == "text"]
    verdict = judge(truth, got, kinds=frozenset({"text.delta"}))
    assert verdict.is_clean, verdict.details
    assert verdict.printed in (len(whole), len(whole) - 1, len(whole) + 1)


def test_what_a_killed_process_left_open_may_be_closed_by_the_product_or_not(tmp_path: Path) -> None:
    _, agent = run_script(tmp_path, "!background 60\n!tool write\n!crash SIGKILL")
    with scripted(tmp_path) as cut:
        cut.prompt("!deltas 100000 1", "p2")
        cut.until("delta", text="e000003 ")
        cut.process.send_signal(signal.SIGKILL)
        cut.process.wait(20)
        while cut.next() is not None:
            pass
    text = "".join(m["text"] for m in cut.seen if m["type"] == "delta")
    closed = [Fact("background", "b1", "completed"), Fact("text.completed", "s1", text)]
    truth = load_truth(agent.truth)
    kinds = frozenset({"background", "text.completed"})
    started = Fact("background", "b1", "started")
    assert judge(truth, [started, *closed], kinds=kinds).is_clean
    assert judge(truth, [started], kinds=kinds).is_clean
    assert judge(truth, [started, *closed, closed[1]], kinds=kinds).doubled == 1
    assert judge(truth, [started, Fact("text.completed", "s1", "made up")], kinds=kinds).foreign == 1
    assert judge(
        truth, [started, Fact("tool.completed", "t1", "interrupted")], kinds=kinds | {"tool.completed"}
    ).foreign


def test_a_prompt_that_ran_twice_shows_as_side_effects_done_twice(tmp_path: Path) -> None:
    run_script(tmp_path, "!tool write\n!tool write")
    _, agent = run_script(tmp_path, "!tool write")
    truth = load_truth(agent.truth)
    assert [len(process.prompts()) for process in truth.of_prompt("p1")] == [1, 1]
    verdict = judge(truth, [], kinds=frozenset())
    assert verdict.ledger_duplicates == 1
    assert not verdict.is_clean


def test_garbage_is_counted_and_expected_of_nobody(tmp_path: Path) -> None:
    _, agent = run_script(tmp_path, "!garbage nul\n!garbage deep\n!garbage nan\n!garbage unknown_type")
    verdict = judge(
        load_truth(agent.truth), [], kinds=KINDS - {"session.bound", "model.request", "usage", "turn.completed"}
    )
    assert verdict.garbage == 4
    assert verdict.printed == 0
    assert verdict.is_clean


def test_a_process_can_be_judged_alone(tmp_path: Path) -> None:
    run_script(tmp_path, "one", "--session-id", "s-one")
    _, agent = run_script(tmp_path, "two", "--session-id", "s-two")
    truth = load_truth(agent.truth)
    (process,) = truth.of_session("s-two")
    got = [Fact("text.completed", "s1", "You said: two")]
    kinds = frozenset({"text.completed"})
    assert judge(truth, got, processes=[process], kinds=kinds).is_clean
    assert judge(truth, got, kinds=kinds).lost == 1


def test_a_torn_last_line_of_a_truth_file_is_left_out(tmp_path: Path) -> None:
    _, agent = run_script(tmp_path, "x")
    (path,) = [p for p in agent.truth.glob("*.ndjson") if p.name != "ledger.ndjson"]
    before = load_truth(agent.truth).processes[0].records
    path.write_bytes(path.read_bytes()[:-3])
    assert load_truth(agent.truth).processes[0].records == before[:-1]


def break_middle(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"{broken\n", *lines[2:]]))


def lose_start(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))


def not_objects(path: Path) -> None:
    path.write_bytes(b"[]\n")


@pytest.mark.parametrize(
    ("damage", "place"), [(break_middle, "line 3"), (lose_start, "line 1"), (not_objects, "line 1: not an object")]
)
def test_a_damaged_truth_file_is_an_error_that_names_the_place(
    tmp_path: Path, damage: Callable[[Path], None], place: str
) -> None:
    _, agent = run_script(tmp_path, "x", "--session-id", "s")
    (path,) = agent.truth.glob("s-*.ndjson")
    damage(path)
    with pytest.raises(OracleError, match=f"{path.name}, {place}"):
        load_truth(agent.truth)


def test_processes_with_the_same_pid_in_other_namespaces_have_files_of_their_own(tmp_path: Path) -> None:
    _, agent = run_script(tmp_path, "x", "--session-id", "s")
    (path,) = agent.truth.glob("s-*.ndjson")
    record = json.loads(path.read_text().splitlines()[0])
    from scripted_agent.truth import Truth as Recorder

    for expected in (f"s-{os.getpid()}.ndjson", f"s-{os.getpid()}.2.ndjson"):
        recorder = Recorder(str(agent.truth), "s")
        recorder.record("start", {"session": "s", "pid": record["pid"]})
        assert recorder.name == expected
    assert len(load_truth(agent.truth).of_session("s")) == 3


@pytest.mark.parametrize(("outcome", "clean"), [("cancelled", True), ("denied", False)])
def test_what_an_agent_denies_at_the_end_of_stdin_was_answered_by_nobody(
    tmp_path: Path, outcome: str, clean: bool
) -> None:
    _, agent = run_script(tmp_path, "!ask deploy")  # its stdin ends with nobody having answered
    found = load_truth(agent.truth)
    [ask] = [line.message for line in found.processes[0].printed if line.message and line.message["type"] == "ask"]
    event = {"type": "interaction.resolved", "body": {"interaction": ask["request"], "outcome": outcome}}
    verdict = judge(found, [fact_of_event(event)], kinds=frozenset({"interaction.resolved"}))
    assert verdict.is_clean is clean


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_was_left_open_may_be_closed_in_any_order_but_not_before_it_began(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    with scripted(tmp_path) as agent:
        agent.prompt("!background 60\n!tool work 60000")
        agent.until("tool.start")
        agent.process.send_signal(signal.SIGTERM)
        agent.process.wait(10)
    found = load_truth(agent.truth)
    printed = [line.message for line in found.processes[0].printed if line.message is not None]
    job, tool = (next(m["id"] for m in printed if m["type"] == kind) for kind in ("background", "tool.start"))
    begun = [
        {"type": "background", "body": {"id": job, "state": "started"}},
        {"type": "tool.started", "body": {"tool": tool, "name": "work"}},
    ]
    closed = [
        {"type": "background", "body": {"id": job, "state": "completed"}},
        {"type": "tool.completed", "body": {"tool": tool, "status": "interrupted"}},
    ]
    kinds = frozenset({"background", "tool.started", "tool.completed"})
    in_order = [fact_of_event(event) for event in [*begun, *(closed[index] for index in order)]]
    assert judge(found, in_order, kinds=kinds).is_clean
    assert judge(found, in_order[::-1], kinds=kinds).out_of_order


def test_a_line_that_a_kill_cut_off_may_be_there_or_be_closed_by_the_product(tmp_path: Path) -> None:
    lines = [
        {"type": "session", "session_id": "s", "agent": "scripted", "version": "1"},
        {"type": "tool.start", "id": "t1", "name": "work", "input": {}},
        {"type": "tool.end", "id": "t1", "status": "ok", "output": "done"},
    ]
    records: list[dict[str, Any]] = [{"n": 1, "at": 1.0, "ev": "start", "session": "s", "pid": 1}]
    records += [{"n": n, "at": 1.0, "ev": "stdout", "line": json.dumps(line)} for n, line in enumerate(lines, start=2)]
    records.append({"n": 5, "at": 1.1, "ev": "exit", "code": 143, "unfinished": 4})
    (tmp_path / "s-1.ndjson").write_text("".join(json.dumps(record) + "\n" for record in records))
    cut = load_truth(tmp_path)
    begun = [Fact("session.bound", "", "s"), Fact("tool.started", "t1", "work")]
    for status in ("ok", "interrupted"):
        assert judge(cut, [*begun, Fact("tool.completed", "t1", status)]).is_clean, status
    assert not judge(cut, [*begun, Fact("tool.completed", "t1", "error")]).is_clean
    assert not judge(cut, begun[:1]).is_clean
