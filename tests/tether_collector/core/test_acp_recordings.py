"""Every recorded line of the ACP agents means something by name, and the events it makes are pinned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support_acp_recordings import AGENTS, Replay, recordings, stdout_messages
from support_execution import CLAIM, TARGET, Rig, launch
from support_recordings import GOLDEN, read_recording
from tether import events as ev
from tether_collector.core import inputs as i
from tether_collector.core.adapters import adapter_for
from tether_collector.core.execution import Execution

RECORDINGS = recordings()
NAMES = [f"{path.parent.name}/{path.stem}" for path in RECORDINGS]
# Lines of stdout that no rule maps: answers to what the driver asked after the adapter was done.
UNKNOWN: Final[dict[str, int]] = {"cancel_text": 1, "load_unknown": 2}


def replayed(path: Path) -> Rig:
    return Replay(path).play()


def golden(name: str) -> Rig:
    return replayed(GOLDEN / f"{name}.ndjson")


def test_every_scenario_of_every_agent_is_there() -> None:
    scenarios = {path.stem for path in RECORDINGS}
    assert len(scenarios) == 9
    assert len(RECORDINGS) == len(scenarios) * len(AGENTS)


@pytest.mark.parametrize("path", RECORDINGS, ids=NAMES)
def test_every_recorded_stdout_line_is_mapped_or_ignored_by_name_or_answers_nothing(path: Path) -> None:
    rig = replayed(path)
    unknown = [body["why"] for body in rig.bodies(ev.RAW) if body["stream"] == "stdout"]
    assert unknown == ["a response to nothing that was asked"] * UNKNOWN.get(path.stem, 0)
    said = [row["line"] for row in read_recording(path) if row["ch"] == "stderr"]
    told = [line for line in said if not line.startswith(("[session/", "[idle-compaction]"))]
    assert [body["preview"] for body in rig.bodies(ev.RAW) if body["stream"] == "stderr"] == told


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
def test_a_recording_ends_with_the_fence_and_is_the_same_wherever_it_was_cut(path: Path) -> None:
    rig = replayed(path)
    types = rig.types()
    assert types[-1] == ev.EXECUTION_ENDED
    assert types.count(ev.EXECUTION_ENDED) == types.count(ev.RESPONSE_ENDED) == 1
    assert [event.ordinal for event in rig.events] == list(range(2, len(rig.events) + 2))
    execution = Execution.start(rig.execution.launch, rig.adapter, TARGET, CLAIM)
    again = []
    for record, input_ in enumerate(rig.inputs, 1):
        execution = Execution.load(execution.dump())
        again += [event.model_dump() for event, _ in execution.apply(input_, record)]
    assert again == [event.model_dump() for event in rig.events]


@pytest.mark.parametrize("path", RECORDINGS, ids=NAMES)
def test_deltas_of_a_segment_add_up_to_its_completed_text(path: Path) -> None:
    texts: dict[str, str] = {}
    for event in replayed(path).events:
        segment = str(event.body.get("segment"))
        if event.type == ev.TEXT_DELTA:
            assert event.body["offset"] == len(texts.get(segment, ""))
            texts[segment] = texts.get(segment, "") + event.body["text"]
        elif event.type == ev.TEXT_COMPLETED:
            assert texts.pop(segment) == event.body["text"]
    assert texts == {}


@pytest.mark.parametrize("folder", AGENTS)
@pytest.mark.parametrize(
    ("name", "outcome", "code"),
    [
        ("basic", "completed", None),
        ("cancel_text", "cancelled", "INTERRUPTED"),
        ("cancel_running_tool", "cancelled", "INTERRUPTED"),
        ("load_1", "completed", None),
        ("load_unknown", "failed", "RESUME_FAILED"),
    ],
)
def test_how_a_recorded_run_ended(folder: str, name: str, outcome: str, code: str | None) -> None:
    body = golden(f"{folder}/{name}").body(ev.RESPONSE_ENDED)
    assert (body["outcome"], (body.get("error") or {}).get("code")) == (outcome, code)


@pytest.mark.parametrize("folder", AGENTS)
def test_an_allowed_tool_is_answered_and_tells_its_input_and_output(folder: str) -> None:
    rig = golden(f"{folder}/permission_allow")
    started, done = rig.body(ev.TOOL_STARTED), rig.body(ev.TOOL_COMPLETED)
    assert started["input"]["command"].startswith("touch /sandbox/ws/p-")
    assert (done["status"], done["output"].strip()) == ("ok", "hi-from-tool")
    asked, resolved = rig.body(ev.INTERACTION_REQUESTED), rig.body(ev.INTERACTION_RESOLVED)
    assert {option["kind"] for option in asked["options"]} >= {"allow_once", "reject_once"}
    assert resolved["outcome"] == "answered"
    assert rig.receipts(resolved["control"]) == ["accepted", "delivered", "settled"]
    types = rig.types()
    order = [ev.TOOL_STARTED, ev.INTERACTION_REQUESTED, ev.INTERACTION_RESOLVED, ev.TOOL_COMPLETED]
    assert [types.index(kind) for kind in order] == sorted(types.index(kind) for kind in order)


@pytest.mark.parametrize("folder", AGENTS)
def test_a_denied_tool_is_resolved_as_denied(folder: str) -> None:
    rig = golden(f"{folder}/permission_reject")
    assert rig.body(ev.INTERACTION_RESOLVED)["outcome"] == "denied"
    assert rig.body(ev.TOOL_COMPLETED)["status"] == "error"


@pytest.mark.parametrize("folder", AGENTS)
def test_an_interrupted_tool_is_told_as_such_and_the_interrupt_is_settled_by_the_turns_end(folder: str) -> None:
    rig = golden(f"{folder}/cancel_running_tool")
    assert rig.body(ev.TOOL_COMPLETED)["status"] == "interrupted"
    [control] = {body["control"] for body in rig.bodies(ev.CONTROL_RECEIPT) if body["verb"] == "interrupt"}
    assert rig.receipts(control) == ["accepted", "delivered", "settled"]


def test_a_cancelled_codex_is_told_to_close_its_session_as_its_commands_run_on() -> None:
    replay = Replay(GOLDEN / "acp-codex-acp-2.6.0/cancel_running_tool.ndjson")
    replay.play()
    assert [message.get("method") for message in replay.written][-1] == "session/close"


@pytest.mark.parametrize("folder", AGENTS)
def test_a_resumed_session_replays_nothing_and_has_no_cost_that_is_not_its_turns(folder: str) -> None:
    rig = golden(f"{folder}/load_1")
    assert [body["text"] for body in rig.bodies(ev.TEXT_COMPLETED)][-1] == "second answer"
    assert "first answer" not in json.dumps([event.body for event in rig.events])
    assert rig.bodies(ev.SESSION_BOUND)[0]["resumable"] is True
    assert "cost_usd" not in rig.body(ev.USAGE), "nothing says what the session had cost before"


def test_the_cost_of_a_turn_is_what_the_session_grew_by() -> None:
    usage = golden("acp-claude-agent-acp-0.101.0/permission_allow").body(ev.USAGE)
    assert (usage["input_tokens"], usage["output_tokens"], usage["cost_usd"]) == (200, 29, 0.00228)
    assert usage["model"] == "claude-opus-5-5"


@pytest.mark.parametrize("folder", AGENTS)
def test_a_mode_that_asks_is_set_before_the_first_prompt(folder: str) -> None:
    replay = Replay(GOLDEN / folder / "basic.ndjson")
    replay.play()
    methods = [message["method"] for message in replay.written]
    assert methods[:2] == ["initialize", "session/new"]
    assert methods[-1] == "session/prompt"
    modes = [message["params"]["modeId"] for message in replay.written if message["method"] == "session/set_mode"]
    wanted = {"acp:claude": ["default"], "acp:codex": ["read-only"], "acp:opencode": []}
    assert modes == wanted[AGENTS[folder]], "opencode asks because of its environment"


# --- laws ------------------------------------------------------------------------------------------------------------

MESSAGES = list(stdout_messages())
hostile = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 2**70), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=5,
)


def mutate(draw: st.DrawFn, value: Any, depth: int) -> Any:
    """The value with one place of it replaced or removed."""
    if isinstance(value, dict) and value and depth:
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 5)) == 0:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: mutate(draw, value[key], depth - 1)}
    if isinstance(value, list) and value and depth:
        return [mutate(draw, value[0], depth - 1), *value[1:]]
    return draw(hostile)


@st.composite
def lines(draw: st.DrawFn) -> list[bytes]:
    """A handshake that goes well, then lines of any recording, some of them damaged."""
    said = []
    for number in range(draw(st.integers(0, 4))):
        result: dict[str, Any] = {"protocolVersion": 1, "sessionId": "ses_1", "agentCapabilities": {}}
        said.append({"jsonrpc": "2.0", "id": number + 1, "result": result})
    for _ in range(draw(st.integers(1, 25))):
        message = draw(st.sampled_from(MESSAGES))
        if "params" in message and draw(st.integers(0, 9)):
            message = {**message, "params": {**message["params"], "sessionId": "ses_1"}}
        said.append(mutate(draw, message, draw(st.integers(1, 6))) if draw(st.booleans()) else message)
    return [json.dumps(message).encode() for message in said]


@given(st.data())
@settings(deadline=None, max_examples=40)
@pytest.mark.parametrize("kind", ["acp:claude", "acp:codex", "acp:opencode", "acp:qwen", "acp:another"])
def test_no_line_breaks_the_adapter_and_a_cut_changes_nothing(kind: str, data: st.DataObject) -> None:
    rig = Rig(kind)
    cut = Execution.start(launch(), adapter_for(kind), TARGET, CLAIM)
    controls = st.sampled_from(["interject", "interrupt", "stop", "answer"])
    inputs: list[i.Input] = []
    for number, line in enumerate(data.draw(lines())):
        inputs.append(i.OutputLine(rig.at, "stdout", line, len(line)))
        if data.draw(st.integers(0, 6)) == 0:
            verb = data.draw(controls)
            payload: dict[str, Any] = {"request": "r", "content": [{"type": "text", "text": "more"}]}
            if verb == "answer":
                payload = {
                    "interaction": "1111111111114111-0",
                    "decision": data.draw(st.sampled_from(["allow", "deny"])),
                }
            inputs.append(i.Note(rig.at, "control", {"control": f"c{number}", "verb": verb, "payload": payload}))
    inputs += [i.Exited(rig.at, 1), i.Proved(rig.at, "pid_namespace")]
    for record, input_ in enumerate(inputs, 1):
        rig.give(input_)  # checks each body against its type
        cut = Execution.load(cut.dump())
        cut.apply(input_, record)
        assert [want.control for want in rig.wants(i.WriteStdin)] == [
            want.control for want in cut.wants() if isinstance(want, i.WriteStdin)
        ]
    assert cut.dump() == rig.execution.dump()
    assert rig.types().count(ev.RESPONSE_ENDED) == rig.types().count(ev.EXECUTION_ENDED) == 1
    assert rig.execution.pending() == []
