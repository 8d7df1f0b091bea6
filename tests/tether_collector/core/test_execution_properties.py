"""Laws of the machine: the same inputs make the same events wherever it was cut, and no bytes can break it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support_execution import CLAIM, PROMPT_ID, TARGET, Rig, launch
from support_recordings import Replay, recordings
from tether import events as ev
from tether.errors import InvalidError
from tether_collector.core import inputs as i
from tether_collector.core.adapters import ADAPTERS, adapter_for
from tether_collector.core.adapters.base import Launch
from tether_collector.core.execution import Execution

RECORDED: list[tuple[str, Launch, list[i.Input]]] = []
for _path in recordings():
    _replay = Replay(_path)
    RECORDED.append((_replay.agent, _replay.launch, list(_replay.inputs())))
LINES: dict[str, list[Any]] = {}
for _agent, _, _inputs in RECORDED:
    _said = [input_ for input_ in _inputs if isinstance(input_, i.OutputLine) and input_.stream == "stdout"]
    LINES.setdefault(_agent, []).extend(json.loads(line.data) for line in _said)
NAMES = ["k1", "k2", "r1", "r2", "s1", "t1", PROMPT_ID]
SCRIPTED_TYPES = [
    *("session", "turn.started", "prompt.accepted", "delta", "text", "discard", "reasoning", "tool.start"),
    *("tool.progress", "tool.end", "ask", "ask.resolved", "ask.cancelled", "interrupted", "model", "usage"),
    *("background", "result", "error"),
]

names = st.sampled_from(NAMES)
hostile = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 2**70), st.floats(), st.text(max_size=5), names),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=5,
)


@st.composite
def scripted_lines(draw: st.DrawFn) -> bytes:
    message: dict[str, Any] = {"type": draw(st.sampled_from(SCRIPTED_TYPES))}
    for field, values in {
        "id": names,
        "request": names,
        "prompt": names,
        "segment": names,
        "session_id": names,
        "text": st.text(max_size=8),
        "state": st.sampled_from(["started", "done", "completed", "retrying", "failed"]),
        "status": st.sampled_from(["ok", "error", "interrupted"]),
        "kind": st.sampled_from(["approval", "question"]),
        "mode": st.sampled_from(["queued", "steered"]),
        "decision": st.sampled_from(["allow", "deny"]),
        "code": st.sampled_from(["session_not_found", "session_exists", "x"]),
        "questions": st.just([{"id": "q1", "question": "?", "options": ["a"]}]),
    }.items():
        if draw(st.integers(0, 9)):
            message[field] = draw(values) if draw(st.integers(0, 19)) else draw(hostile)
    return json.dumps(message).encode()


def _mutate(draw: st.DrawFn, value: Any, depth: int) -> Any:
    """The value with one place of it replaced or removed."""
    if isinstance(value, dict) and value and depth:
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 5)) == 0:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: _mutate(draw, value[key], depth - 1)}
    if isinstance(value, list) and value and depth:
        return [_mutate(draw, value[0], depth - 1), *value[1:]]
    return draw(hostile)


@st.composite
def recorded_lines(draw: st.DrawFn, kind: str) -> bytes:
    """Lines of this agent, or of any where none of its own is recorded; half of them damaged."""
    message = draw(st.sampled_from(LINES.get(kind) or [line for lines in LINES.values() for line in lines]))
    if draw(st.booleans()):
        message = _mutate(draw, message, draw(st.integers(1, 5)))
    return json.dumps(message).encode()


def output(data: bytes, stream: Any, complete: bool) -> i.OutputLine:
    return i.OutputLine(0, stream, data, len(data), complete)


controls = st.builds(
    lambda control, verb, payload: i.Note(0, "control", {"control": control, "verb": verb, "payload": payload}),
    names,
    st.sampled_from(["answer", "interject", "interrupt", "stop", "drain"]),
    st.one_of(
        st.builds(
            lambda key, decision: {"interaction": key, "decision": decision}, names, st.sampled_from(["allow", "deny"])
        ),
        st.just({"request": "q", "content": [{"type": "text", "text": "more"}]}),
        hostile,
    ),
)
written = st.sampled_from(["opening:prompt", "opening:initialize", "reply:thread", "reply:turn", "clean:1"])
others: st.SearchStrategy[i.Input] = st.one_of(
    controls,
    st.builds(i.StdinLine, st.just(0), st.one_of(names, written), st.just(b"")),
    st.builds(
        i.StdinDone,
        st.just(0),
        st.one_of(names, written),
        st.sampled_from(["written", "partial", "closed"]),
    ),
    st.builds(i.StreamClosed, st.just(0), st.sampled_from(["stdin", "stdout", "stderr"])),
    st.builds(
        i.Timer,
        st.just(0),
        st.sampled_from(["watchdog", "watchdog.kill", "stop.interrupt", "stop.term", "settle", "first_event"]),
    ),
    st.builds(i.Note, st.just(0), st.just("gap"), st.just({"reason": "corrupt"})),
    st.builds(output, st.binary(max_size=20), st.sampled_from(["stdout", "stderr"]), st.booleans()),
)
ends: st.SearchStrategy[i.Input] = st.one_of(
    st.builds(i.Exited, st.just(0), st.sampled_from([0, 1, 2, 143, -9])),
    st.builds(i.Proved, st.just(0), st.sampled_from(["pid_namespace", "keeper_gone"])),
    st.just(i.Note(0, "spawn_failed", {"detail": "no"})),
)


@st.composite
def runs(draw: st.DrawFn, kind: str) -> list[i.Input]:
    """A plausible and a hostile life: lines, controls, timers; ends now and then."""
    lines = scripted_lines() if kind == "scripted" else recorded_lines(kind)
    inputs: list[i.Input] = []
    at = 1_000
    for _ in range(draw(st.integers(1, 40))):
        at += draw(st.sampled_from([0, 1, 500, 3_000, 20_000]))
        which = draw(st.integers(0, 30))
        if which < 18:
            input_: i.Input = output(draw(lines), "stdout", True)
        else:
            input_ = draw(others if which < 30 else ends)
        inputs.append(_at(input_, at))
    return inputs


def _at(input_: Any, at: int) -> i.Input:
    if isinstance(input_, i.OutputLine):
        return input_._replace(at=at)
    fields = {name: getattr(input_, name) for name in input_.__dataclass_fields__}
    made: i.Input = type(input_)(**{**fields, "at": at})
    return made


def told(execution: Execution, input_: i.Input, record: int) -> tuple[list[Any], list[i.Want]]:
    events = execution.apply(input_, record)
    return [(event.model_dump(), position) for event, position in events], execution.wants()


def same_when_cut(start: Launch, kind: str, inputs: Sequence[i.Input], cuts: set[int]) -> None:
    whole = Execution.start(start, adapter_for(kind), TARGET, CLAIM)
    cut = Execution.start(start, adapter_for(kind), TARGET, CLAIM)
    for record, input_ in enumerate(inputs, 1):
        if record in cuts:
            cut = Execution.load(cut.dump())
        assert told(cut, input_, record) == told(whole, input_, record)
    assert cut.dump() == whole.dump()


@given(st.data())
@settings(deadline=None, max_examples=60)
@pytest.mark.parametrize("kind", sorted(ADAPTERS))
def test_l2_the_same_inputs_make_the_same_events_and_wants_wherever_it_was_cut(kind: str, data: st.DataObject) -> None:
    inputs = data.draw(runs(kind))
    cuts = data.draw(st.sets(st.integers(1, len(inputs))))
    same_when_cut(launch(), kind, inputs, cuts)


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_l2_a_recording_cut_before_every_record_makes_the_same_events(number: int) -> None:
    kind, start, inputs = RECORDED[number]
    same_when_cut(start, kind, inputs, set(range(1, len(inputs) + 1)))


@given(st.data())
@settings(deadline=None, max_examples=80)
@pytest.mark.parametrize("kind", sorted(ADAPTERS))
def test_no_input_breaks_the_machine_and_its_log_keeps_the_rules(kind: str, data: st.DataObject) -> None:
    rig = Rig(kind)
    for input_ in data.draw(runs(kind)):
        rig.give(input_)  # checks each body against its type
        rig.execution.status()
        rig.execution.check_control("answer", TARGET, {"interaction": "r1", "decision": "allow"})
    types = rig.types()
    assert [event.ordinal for event in rig.events] == list(range(2, len(types) + 2))
    assert types.count(ev.RESPONSE_ENDED) <= 1
    assert types.count(ev.EXECUTION_ENDED) <= 1
    if ev.EXECUTION_ENDED in types:
        assert types[-1] == ev.EXECUTION_ENDED
        assert ev.RESPONSE_ENDED in types
        assert rig.execution.pending() == []
        last: dict[str, str] = {}
        for body in rig.bodies(ev.CONTROL_RECEIPT):
            assert last.get(body["control"]) not in ("settled", "rejected", "unknown"), "a final receipt is final"
            last[body["control"]] = body["status"]
        assert set(last.values()) <= {"settled", "rejected", "unknown"}


@given(st.binary(max_size=200), st.sampled_from(["stdout", "stderr"]), st.booleans(), st.integers(0, 5))
@settings(deadline=None)
@pytest.mark.parametrize("kind", sorted(ADAPTERS))
def test_no_bytes_break_an_adapter(kind: str, data: bytes, stream: Any, complete: bool, more: int) -> None:
    adapter = adapter_for(kind)
    state = adapter.initial(launch())
    reading = adapter.on_line(state, i.OutputLine(0, stream, data, len(data) + more, complete))
    assert len(reading.drafts) <= 1
    json.dumps(state, allow_nan=False)


def test_an_unknown_agent_is_refused_by_the_field_and_the_known_ones_are_named() -> None:
    with pytest.raises(InvalidError) as caught:
        adapter_for("gpt")
    assert caught.value.field == "agent.kind"
    assert caught.value.remedy == f"must be one of {', '.join(sorted(ADAPTERS))}, or acp:<name>"
    assert {"claude", "codex", "scripted"} <= set(ADAPTERS)


def test_a_state_of_another_version_is_refused_by_name() -> None:
    state = json.loads(Rig().execution.dump())
    with pytest.raises(InvalidError) as caught:
        Execution.load(json.dumps({**state, "v": 99}).encode())
    assert caught.value.field == "state.v"
