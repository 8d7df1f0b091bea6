"""What a terminal shows of items: pure, so every line is judged here."""

from __future__ import annotations

import io
from typing import Any

from tether import events as ev
from tether.client.items import CaughtUp, ConversationItem, ExecutionItem, GapItem, Item, PositionChanged, SnapshotItem
from tether.events import ConversationEvent, Event
from tether.fold import ExecutionState, TextItem, ToolItem
from tether_cli.asks import parse_approval, parse_choice
from tether_cli.render import Renderer, clean, duration, money, one_line
from tether_cli.terminal import Screen


def shown(*items: Item, renderer: Renderer | None = None) -> tuple[str, str]:
    """(stdout, stderr) after these items."""
    out, beside = io.StringIO(), io.StringIO()
    screen, renderer = Screen(out, beside), renderer or Renderer()
    for item in items:
        screen.write(renderer.render(item))
    screen.end_line()
    return out.getvalue(), beside.getvalue()


def log(*events: tuple[str, dict[str, Any]]) -> list[Item]:
    return [
        ExecutionItem("c", "e", Event(ordinal=number, at=1, type=kind, body=body), "k", False)
        for number, (kind, body) in enumerate(events, start=1)
    ]


def delta(text: str, offset: int, segment: str = "s") -> tuple[str, dict[str, Any]]:
    return ev.TEXT_DELTA, {"segment": segment, "text": text, "offset": offset}


def completed(text: str, segment: str = "s") -> tuple[str, dict[str, Any]]:
    return ev.TEXT_COMPLETED, {"segment": segment, "text": text}


def test_deltas_appear_as_they_come_and_the_whole_text_adds_only_what_is_missing() -> None:
    assert shown(*log(delta("hel", 0), delta("lo", 3), completed("hello there"))) == ("hello there\n", "")


def test_an_overlapping_delta_is_cut_at_what_is_shown() -> None:
    assert shown(*log(delta("hello", 0), delta("llo there", 2), completed("hello there")))[0] == "hello there\n"


def test_a_text_that_differs_from_its_deltas_is_shown_whole() -> None:
    assert shown(*log(delta("helo", 0), completed("hello")))[0] == "helohello\n"


def test_segments_stand_on_lines_of_their_own() -> None:
    assert shown(*log(delta("a", 0, "1"), delta("b", 0, "2"), completed("c", "3")))[0] == "a\nb\nc\n"


def test_a_tool_is_one_line_with_its_status() -> None:
    started = (ev.TOOL_STARTED, {"tool": "t", "name": "Bash", "input": {"command": "ls -la"}})
    assert shown(*log(started, (ev.TOOL_COMPLETED, {"tool": "t", "status": "ok"})))[1] == "→ Bash: ls -la  ok\n"
    failed = (ev.TOOL_COMPLETED, {"tool": "t", "status": "error", "output": "no such\nfile"})
    assert shown(*log(started, failed))[1] == "→ Bash: ls -la  failed (no such file)\n"


def test_tools_side_by_side_are_each_told_with_their_status() -> None:
    lines = shown(
        *log(
            (ev.TOOL_STARTED, {"tool": "1", "name": "A", "input": None}),
            (ev.TOOL_STARTED, {"tool": "2", "name": "B", "input": None}),
            (ev.TOOL_COMPLETED, {"tool": "1", "status": "ok"}),
            (ev.TOOL_COMPLETED, {"tool": "2", "status": "interrupted"}),
        )
    )[1].splitlines()
    assert lines == ["→ A", "→ B", "→ A  ok", "→ B  interrupted"]


def test_text_behind_an_open_tool_begins_a_line() -> None:
    items = log((ev.TOOL_STARTED, {"tool": "1", "name": "A"}), delta("text", 0))
    assert shown(*items) == ("text\n", "→ A\n")


def test_void_text_is_said_to_be_void_and_comes_anew() -> None:
    out, beside = shown(*log(delta("old", 0), (ev.TEXT_DISCARDED, {"segment": "s"}), delta("new", 0, "s2")))
    assert out == "old\nnew\n"
    assert beside == "[model] the text above is void: the model's request was made anew\n"


def test_model_retries_are_shown_as_such() -> None:
    body = {"state": "retrying", "attempt": 2, "attempts_max": 10, "delay_ms": 1200, "http_status": 529}
    told = shown(*log((ev.MODEL_REQUEST, body)))[1]
    assert told == "[model] the request is made again (attempt 2 of 10): HTTP 529, in 1.2 s\n"


def test_gaps_and_changed_positions_are_named() -> None:
    gap = GapItem("c", "e", 3, 7, "retention_gap", "k")
    lines = shown(gap, PositionChanged("c", "k"), CaughtUp("c", "k"))[1].splitlines()
    assert lines[0] == "[gap] events 3 to 7 are not to be had: retention_gap"
    assert lines[1].startswith("[stream] the log is another one")
    assert len(lines) == 2
    logged = shown(*log((ev.GAP, {"from": 4, "to": 4, "reason": "durability_gap"})))[1]
    assert logged == "[gap] event 4 are not to be had: durability_gap\n".replace("are not", "are not")


def test_a_snapshot_shows_what_the_events_would_have_less_what_is_shown() -> None:
    state = ExecutionState(
        items=[TextItem(id="s", text="hello there", state="completed"), ToolItem(id="t", name="A", state="ok")]
    )
    out, beside = shown(*log(delta("hello", 0)), SnapshotItem("c", {"e": state}, "k"))
    assert out == "hello\n there\n"
    assert beside.splitlines()[1] == "→ A  ok"


def test_an_approval_names_what_it_is_about_and_the_id_to_answer_by() -> None:
    body = {"interaction": "r1", "kind": "approval", "name": "Bash", "input": {"command": "rm -rf /"}}
    assert shown(*log((ev.INTERACTION_REQUESTED, body)))[1] == "? may it run Bash: rm -rf /  [r1]\n"


def test_a_failed_response_names_its_code() -> None:
    ended = (ev.RESPONSE_ENDED, {"outcome": "failed", "error": {"code": "OVERLOADED", "detail": "later"}})
    assert shown(*log(ended))[1] == "[response] failed: OVERLOADED later\n"


def test_messages_of_others_are_shown_where_they_join() -> None:
    body = {"request": "q", "prompt_sequence": 1, "content": [{"type": "text", "text": "and this"}], "into": "r"}
    told = ConversationItem(
        "c", ConversationEvent(id="q", generation=1, at=1, type=ev.PROMPT_ADMITTED, body=body), "k", False
    )
    assert shown(told, renderer=Renderer(prompts=False))[1] == "> and this\n"


def test_what_a_terminal_would_obey_is_not_passed_on() -> None:
    assert clean("a\x1b[2Jb\x07\x9bc\r\nd\te\u202ef") == "a�[2Jb��c\nd\te�f"
    assert "\x1b" not in shown(*log(delta("\x1b]0;title\x07", 0)))[0]
    assert one_line({"command": "a\nb\x1b[1m"}) == '{"command": "a\\nb\\u001b[1m"}'


def test_long_input_is_cut_to_a_line() -> None:
    assert len(one_line("x" * 10_000)) == 100


def test_unknown_events_show_nothing() -> None:
    assert shown(*log(("some.future.type", {"x": 1}))) == ("", "")


def test_money_and_durations_read_well() -> None:
    assert [money(value) for value in (None, 0.0, 0.000023, 0.5, 12.3456)] == [
        "cost unknown",
        "$0",
        "$0.000023",
        "$0.5",
        "$12.35",
    ]
    assert [duration(value) for value in (0.04, 59.9, 61, 3700)] == ["0.0 s", "59.9 s", "1 min 01 s", "1 h 01 min"]


def test_typed_approvals_allow_only_by_yes() -> None:
    assert [parse_approval(line).decision for line in ("y", "YES", "n", "", None, "yep")] == [
        "allow",
        "allow",
        "deny",
        "deny",
        "deny",
        "deny",
    ]
    assert parse_approval("not today").text == "not today"


def test_typed_choices_are_numbers_or_words() -> None:
    question = {"options": [{"label": "red"}, {"label": "blue"}]}
    assert parse_choice("2", question) == ["blue"]
    assert parse_choice("9", question) == ["9"]
    assert parse_choice("green", question) == ["green"]
    assert parse_choice("", question) == []
    assert parse_choice("1, 2", {**question, "multiple": True}) == ["red", "blue"]
    assert parse_choice("1, 2", question) == ["1, 2"]
