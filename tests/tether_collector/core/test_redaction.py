"""Secrets never become events: whole texts, streams that are cut anywhere, cut texts, and what a replay says."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support_execution import CLAIM, TARGET, Rig, launch
from tether import events as ev
from tether.fold import Applied, ExecutionFold, TextItem, ToolItem
from tether.frames import merge
from tether.secret_patterns import BUILTIN, parse
from tether_collector.core.adapters import adapter_for
from tether_collector.core.execution import Execution
from tether_collector.core.redaction import Literal, Redactor, Rules

GIVEN = "key-that-was-given-7Qx2"
ANT = "sk-ant-api03-" + "aB3_" * 20
PEM = "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEowIBAAKC\n" * 8 + "-----END RSA PRIVATE KEY-----"
LOCKED = PEM.replace("KEY-----\nMII", "KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0AF1\n\nMII", 1)
RULES = Rules((parse("corp", "corp_[a-z]{4,8}-[0-9]{2,3}"), *BUILTIN), (Literal.of("MY_KEY", GIVEN, "salt"),))
# Whole secrets, their pieces, what looks like their beginning, and words around them.
_PARTS = st.sampled_from(
    [
        *(ANT, PEM, LOCKED, GIVEN, "corp_abcd-12", "AKIAIOSFODNN7EXAMPLE", "xoxb-1234567890-ab", "ghp_" + "a" * 30),
        *("sk-", "sk-ant-", "task-", "corp_", "corp_abcd", "key-that-", "key-", "-----BEGIN ", "-----", "AKIA", "eyJ"),
        *(
            "eyJhbGciOiJIUzI1NiJ9",
            "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3",
            ".",
            " ",
            "\n",
            "x",
            "é🙂",
            "12",
            "a" * 25,
        ),
    ]
)
TEXTS = st.lists(_PARTS, min_size=1, max_size=8).map("".join)


def streamed(text: str, cuts: list[int], rules: Rules = RULES, *, saved: bool = False) -> list[dict[str, Any]]:
    """The bodies of deltas of a text that is cut there, and of what is told at its end."""
    redactor, told, start = Redactor(rules), list[dict[str, Any]](), 0
    for end in [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]:
        body = {"segment": "s", "text": text[start:end], "offset": start}
        told.append(redactor.delta(ev.TEXT_DELTA, body))
        start = end
        if saved:
            again = Redactor(rules)
            again.load(json.loads(json.dumps(redactor.dump())))
            redactor = again
    return [*told, *(body for _, body in redactor.flush())]


@given(text=TEXTS, cuts=st.lists(st.integers(0, 4000), max_size=12), saved=st.booleans())
def test_deltas_of_any_cut_are_the_redacted_whole_and_their_offsets_have_no_holes(
    text: str, cuts: list[int], saved: bool
) -> None:
    told = streamed(text, cuts, saved=saved)
    said = ""
    for body in told:
        assert body["offset"] == len(said)
        said += body["text"]
    assert said in (RULES.scan(text)[0], RULES.scan(text, cut=True)[0])  # a secret that breaks off counts as one
    assert sum(body.get("redacted", 0) for body in told) == said.count("[redacted:")
    assert GIVEN not in said
    assert ANT not in said


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"use {ANT}, please", "use [redacted:anthropic_key], please"),
        (f"a {GIVEN}{GIVEN} b", "a [redacted:MY_KEY][redacted:MY_KEY] b"),
        (f"{PEM}\nnext", "[redacted:private_key]\nnext"),
        (f"{LOCKED}\nnext", "[redacted:private_key]\nnext"),
        (f"x={PEM.replace(chr(10), chr(92) + 'n')};", "x=[redacted:private_key];"),
        ("corp_abcde-123.", "[redacted:corp]."),
        (
            "disk-" + "a" * 48 + " and task-0123456789abcdefghijkl",
            "disk-" + "a" * 48 + " and task-0123456789abcdefghijkl",
        ),
        ("the header -----BEGIN PRIVATE KEY-----, as such", "the header -----BEGIN PRIVATE KEY-----, as such"),
        ("key-that-was-given-7Qx3", "key-that-was-given-7Qx3"),
        ("sk-short", "sk-short"),
    ],
)
def test_what_is_a_secret_is_marked_and_what_only_looks_like_one_stays(text: str, told: str) -> None:
    assert RULES.scan(text)[0] == told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("… x-api-key: sk-ant-api03-a", "… x-api-key: [redacted:anthropic_key]"),
        ("it says key-that-was-gi…", "it says [redacted:MY_KEY]…"),
        ("and -----BEGIN RSA PRIVATE KEY-----\nMII", "and [redacted:private_key]"),
        ("nothing at all…", "nothing at all…"),
    ],
)
def test_the_beginning_of_a_secret_at_the_end_of_a_cut_text_counts_as_one(text: str, told: str) -> None:
    assert RULES.scan(text, cut=True)[0] == told


def test_no_secret_is_in_the_rules_that_lie_beside_the_spool() -> None:
    kept = json.dumps(RULES.dump())
    assert GIVEN not in kept
    assert GIVEN[9:] not in kept
    again = Rules.load(json.loads(kept))
    assert again.scan(f"a {GIVEN} b {ANT} corp_abcd-12") == RULES.scan(f"a {GIVEN} b {ANT} corp_abcd-12")
    assert again.knows(GIVEN)
    assert not again.knows(GIVEN[:-1] + "3")


def test_every_place_where_an_agents_words_go_is_redacted() -> None:
    redactor = Redactor(RULES)
    asked = {"interaction": "i1", "kind": "approval", "input": {"a": [ANT], GIVEN: 1}, "description": f"run {ANT}"}
    bodies: dict[str, dict[str, Any]] = {
        ev.TEXT_COMPLETED: {"segment": "s", "text": f"a {ANT}"},
        ev.REASONING_COMPLETED: {"segment": "s", "text": f"a {ANT}"},
        ev.TOOL_STARTED: {"tool": "t", "name": "Bash", "input": {"command": f"echo {ANT}", "more": [[GIVEN]]}},
        ev.TOOL_COMPLETED: {"tool": "t", "status": "ok", "output": [{"text": ANT}], "detail": GIVEN},
        ev.INTERACTION_REQUESTED: {**asked, "offered": {"decision": "allow", "input": {"a": ANT}}},
        ev.INTERACTION_RESOLVED: {"interaction": "i1", "outcome": "denied", "detail": ANT},
        ev.CONTROL_RECEIPT: {"control": "c", "verb": "answer", "status": "rejected", "detail": ANT},
        ev.MODEL_REQUEST: {"state": "failed", "detail": f"401 for {ANT}"},
        ev.BACKGROUND: {"id": "b", "state": "started", "description": ANT},
        ev.TURN_COMPLETED: {"turn": "t", "outcome": "failed", "reason": ANT, "detail": ANT},
        ev.RESPONSE_ENDED: {"outcome": "failed", "error": {"code": "X", "detail": ANT}},
        ev.EXECUTION_ENDED: {"outcome": "failed", "error": {"code": "X", "detail": ANT}},
        ev.SESSION_BOUND: {"native_session": "n", "cwd": f"/w/{ANT}"},
        ev.SESSION_RECOVERED: {"process": 2, "why": "chosen", "source": "export", "detail": ANT},
        ev.GAP: {"reason": "corrupt", "detail": ANT},
        ev.RAW: {"stream": "stderr", "preview": f"x {ANT}", "bytes": 9, "why": f"not JSON: {ANT}"},
    }
    for kind, body in bodies.items():
        told = redactor.body(kind, body)
        assert ANT not in json.dumps(told), kind
        assert GIVEN not in json.dumps(told), kind
        assert told["redacted"] >= 1, kind
        ev.BODIES[kind].model_validate(told)
    told = redactor.body(ev.INTERACTION_REQUESTED, {**asked, "offered": {"input": {"a": ANT}}})
    assert told["offered"] is None, "a part of an answer is another answer"
    silent = {ev.EXECUTION_STARTED, ev.TEXT_DISCARDED, ev.USAGE, *ev.DELTAS, *ev.CONVERSATION_TYPES}
    assert set(ev.BODIES) - silent <= set(bodies), "an event type with words of the agent that nobody redacts"


def test_a_body_without_a_secret_is_the_same_object() -> None:
    body = {"tool": "t", "status": "ok", "output": {"a": ["plain", 1, None]}}
    assert Redactor(RULES).body(ev.TOOL_COMPLETED, body) is body
    delta = {"segment": "s", "text": "plain ", "offset": 0}
    assert Redactor(RULES).delta(ev.TEXT_DELTA, delta) is delta


def scripted(rules: Rules, *, dumped: bool = False) -> Rig:
    """A turn whose agent says its key everywhere."""
    rig = Rig()
    rig.execution = Execution.start(launch(), adapter_for("scripted"), TARGET, CLAIM, rules)
    leak = f"{GIVEN} {ANT}"
    lines: list[dict[str, Any]] = [
        {"type": "session", "session_id": launch().session, "agent": "scripted", "version": "1"}
    ]
    lines += [{"type": "turn.started", "prompt": rig.execution.launch.prompt_id}]
    lines += [{"type": "delta", "segment": "s1", "text": leak[at : at + 5]} for at in range(0, len(leak), 5)]
    lines += [{"type": "text", "segment": "s1", "text": leak}]
    lines += [{"type": "tool.start", "id": "t1", "name": "Bash", "input": {"command": leak}}]
    lines += [{"type": "tool.progress", "id": "t1", "text": leak[at : at + 3]} for at in range(0, len(leak), 3)]
    lines += [{"type": "tool.end", "id": "t1", "status": "interrupted"}]
    lines += [{"type": "delta", "segment": "s2", "text": f"open {leak}"}]
    for line in lines:
        rig.say(line)
        if dumped:
            rig.execution = Execution.load(rig.execution.dump(), rules)
    rig.complain(f"warning {leak}")
    return rig


@pytest.mark.parametrize("dumped", [False, True])
def test_an_execution_tells_no_secret_wherever_it_is_saved_and_loaded(dumped: bool) -> None:
    rig = scripted(RULES, dumped=dumped)
    told = json.dumps([event.model_dump() for event in rig.events])
    assert GIVEN not in told
    assert ANT not in told
    assert [event.ordinal for event in rig.events] == list(range(2, 2 + len(rig.events)))
    progress = "".join(event.body["text"] for event in rig.events if event.type == ev.TOOL_PROGRESS)
    assert progress == "[redacted:MY_KEY] [redacted:anthropic_key]", "what was held back is told before its tool ends"


def test_rules_change_what_an_event_says_and_not_which_event_it_is() -> None:
    """A replay under other rules continues the log that was told under the first ones."""
    plain, redacted = scripted(Rules()), scripted(RULES)
    kinds = [(event.ordinal, event.type) for event in plain.events]
    # One delta more, where a tool ended without output while something was held back.
    more = [event for event in redacted.events if event.type == ev.TOOL_PROGRESS][-1]
    assert [event.type for event in redacted.events if event is not more] == [kind for _, kind in kinds]


def test_the_fold_says_how_many_secrets_an_item_had_however_frames_are_cut() -> None:
    rig = scripted(RULES)
    for events in (rig.events, merge(rig.events)):
        fold = ExecutionFold()
        fold.skip_to(2, "durability_gap")
        for event in [*events, *events[-3:]]:
            assert fold.apply(event) in (Applied.APPLIED, Applied.DUPLICATE)
        state = fold.freeze()
        text = next(item for item in state.items if isinstance(item, TextItem) and item.id == "s1")
        tool = next(item for item in state.items if isinstance(item, ToolItem))
        assert (text.text, text.redacted) == ("[redacted:MY_KEY] [redacted:anthropic_key]", 2)
        assert (tool.progress, tool.redacted) == ("[redacted:MY_KEY] [redacted:anthropic_key]", 4)


def test_a_changed_input_that_has_a_mark_in_place_of_its_secret_is_refused() -> None:
    rig = Rig()
    rig.execution = Execution.start(launch(), adapter_for("scripted"), TARGET, CLAIM, RULES)
    rig.say(
        {"type": "ask", "request": "r1", "kind": "approval", "tool": "Write", "tool_id": "t", "input": {"k": GIVEN}}
    )
    shown = rig.events[-1].body["input"]
    assert shown == {"k": "[redacted:MY_KEY]"}
    payload = {"interaction": "r1", "decision": "allow", "input": shown}
    refused = rig.execution.check_control("answer", rig.execution.target, payload)
    assert refused is not None
    assert "mark in place of a secret" in refused.problem.detail
    assert (
        rig.execution.check_control("answer", rig.execution.target, {"interaction": "r1", "decision": "allow"}) is None
    )


@pytest.mark.parametrize(
    "text",
    [
        "sk-ant-" * 20_000,
        "-----BEGIN RSA PRIVATE KEY-----" * 4_000,
        ("eyJ" + "a" * 4000 + " ") * 40,
        "key-that" * 20_000,
        "corp_abcd-" * 15_000,
        "-" * 150_000,
    ],
)
def test_no_text_makes_redaction_slow(text: str) -> None:
    """Some 150,000 characters that begin secrets all the time: milliseconds; a quadratic search takes minutes."""
    began = time.process_time()
    RULES.scan(text)
    redactor = Redactor(RULES)
    for at in range(0, len(text), 997):
        redactor.delta(ev.TEXT_DELTA, {"segment": "s", "text": text[at : at + 997], "offset": at})
    assert time.process_time() - began < 15.0
