"""What holds for whatever Codex prints: lines of the recordings, damaged, repeated and out of order."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Final

from hypothesis import given, settings
from hypothesis import strategies as st

from support_execution import CLAIM, TARGET, Rig, launch
from support_recordings import GOLDEN, read_recording
from tether import events as ev
from tether_collector.core import inputs as i
from tether_collector.core.adapters import adapter_for
from tether_collector.core.execution import Execution
from tether_collector.core.replies import WAITING_MAX

THREAD, TURN = "th-1", "tu-1"
OF: Final = {"threadId": THREAD, "turnId": TURN}
HANDSHAKE: Final[list[dict[str, Any]]] = [
    {"id": "opening:initialize", "result": {}},
    {"id": "reply:thread", "result": {"thread": {"id": THREAD}}},
    {"id": "reply:turn", "result": {"turn": {"id": TURN}}},
    {"method": "turn/started", "params": {"threadId": THREAD, "turn": {"id": TURN}}},
]
ASKS: Final = (
    *("item/commandExecution/requestApproval", "item/fileChange/requestApproval", "item/permissions/requestApproval"),
    *("execCommandApproval", "applyPatchApproval", "item/tool/requestUserInput", "mcpServer/elicitation/request"),
)
FORM: Final = {"properties": {"a": {"type": "string", "enum": ["x"]}, "b": {"type": "boolean", "title": "t"}}}
ASKED: Final = {
    **OF,
    "itemId": "i1",
    "questions": [{"id": "q", "question": "?", "options": [{"label": "a"}]}],
    "requestedSchema": FORM,
    "permissions": {"network": {"enabled": True}},
    "fileChanges": {"/a": {}},
    "command": "ls",
}


def _recorded() -> list[dict[str, Any]]:
    lines = []
    for path in sorted((GOLDEN / "codex-0.171.0").glob("*.ndjson")):
        lines += [json.loads(row["line"]) for row in read_recording(path) if row["ch"] == "stdout"]
    return lines


MESSAGES: Final = [*_recorded(), *({"id": 3, "method": method, "params": ASKED} for method in ASKS for _ in range(8))]
hostile = st.one_of(
    *(st.none(), st.booleans(), st.integers(-5, 2**70), st.floats(allow_nan=False), st.text(max_size=5)),
    *(st.sampled_from([THREAD, TURN, "i1", "\ud800", "x" * 300]), st.sampled_from([[], {}, [[]], [None], {"a": 1}])),
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
    said = HANDSHAKE[: draw(st.integers(1, 4))]
    for _ in range(draw(st.integers(1, 20))):
        message = draw(st.sampled_from(MESSAGES))
        params = message.get("params")
        if isinstance(params, dict) and draw(st.integers(0, 9)):
            ours: dict[str, Any] = {name: value for name, value in {**OF, "itemId": "i1"}.items() if name in params}
            if isinstance(item := params.get("item"), dict):
                ours["item"] = {**item, "id": draw(st.sampled_from(["i1", "i2"]))}
            if isinstance(turn := params.get("turn"), dict):
                ours["turn"] = {**turn, "id": TURN}
            message = {**message, "params": {**params, **ours}}
        said = [*said, mutate(draw, message, draw(st.integers(1, 5))) if draw(st.booleans()) else message]
    return [json.dumps(message).encode() for message in said]


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_no_line_breaks_the_adapter_and_a_cut_changes_nothing(data: st.DataObject) -> None:
    rig = Rig("codex")
    cut = Execution.start(launch(), adapter_for("codex"), TARGET, CLAIM)
    inputs: list[i.Input | None] = []
    for number, line in enumerate(data.draw(lines())):
        inputs.append(i.OutputLine(rig.at, "stdout", line, len(line)))
        if data.draw(st.integers(0, 5)) == 0:
            verb = data.draw(st.sampled_from(["interject", "interrupt", "stop", "answer"]))
            payload: dict[str, Any] = {"request": "r", "content": [{"type": "text", "text": "more"}]}
            if verb == "answer":
                payload = {"interaction": "i1_3", "decision": data.draw(st.sampled_from(["allow", "deny"]))}
            inputs.append(i.Note(rig.at, "control", {"control": f"c{number}", "verb": verb, "payload": payload}))
        if data.draw(st.booleans()):
            inputs.append(None)  # every wanted write is done
    inputs += [i.Exited(rig.at, 1), i.Proved(rig.at, "pid_namespace")]
    for input_ in inputs:
        for each in _written(rig) if input_ is None else [input_]:
            rig.give(each)  # checks each body against its type
            cut = Execution.load(cut.dump())
            cut.apply(each, rig.record)
            assert rig.execution.wants() == cut.wants()
    assert cut.dump() == rig.execution.dump()
    assert rig.types().count(ev.RESPONSE_ENDED) == rig.types().count(ev.EXECUTION_ENDED) == 1
    assert rig.execution.pending() == []
    tools = Counter(body["tool"] for body in rig.bodies(ev.TOOL_STARTED))
    assert tools == Counter(body["tool"] for body in rig.bodies(ev.TOOL_COMPLETED))


def _written(rig: Rig) -> list[i.Input]:
    wanted = [want.control for want in rig.wants(i.WriteStdin)]
    return [each for c in wanted for each in (i.StdinLine(rig.at, c, b""), i.StdinDone(rig.at, c, "written"))]


# --- single cases ----------------------------------------------------------------------------------------------------


def running(handshake: int = 4) -> Rig:
    rig = Rig("codex")
    for message in HANDSHAKE[:handshake]:
        rig.write_all()
        rig.say(message)
    rig.write_all()
    return rig


def test_a_thread_without_an_id_ends_the_response_with_what_is_wrong() -> None:
    rig = running(1)
    rig.say({"id": "reply:thread", "result": {"thread": {}}})
    error = rig.body(ev.RESPONSE_ENDED)["error"]
    assert error["code"] == "agent_error"
    assert "a thread without an id" in error["detail"]


def test_a_prompt_behind_a_first_turn_that_was_refused_is_settled_by_its_own() -> None:
    rig = running(2)
    rig.control("ctl-1", "interject", request="r", content=[{"type": "text", "text": "more"}])
    rig.write_all()
    rig.say({"id": "reply:turn", "error": {"code": -32600, "message": "input too large"}})
    assert rig.bodies(ev.RESPONSE_ENDED) == [], "the second prompt waits for its turn"
    started = {"type": "userMessage", "id": "u1", "clientId": "ctl-1"}
    rig.say(
        {"id": "ctl-1", "result": {"turn": {"id": TURN}}},
        HANDSHAKE[3],
        {"method": "item/started", "params": {**OF, "item": started}},
        {"method": "turn/completed", "params": {"threadId": THREAD, "turn": {"id": TURN, "status": "completed"}}},
    )
    assert rig.receipts("ctl-1") == ["accepted", "delivered", "settled"]
    assert rig.body(ev.RESPONSE_ENDED)["outcome"] == "completed"


def test_an_answer_that_the_cli_did_not_wait_for_was_not_taken() -> None:
    rig = running()
    rig.say({"id": 3, "method": ASKS[0], "params": ASKED})
    rig.control("ctl-1", "answer", interaction="i1_3", decision="allow")
    rig.say({"method": "serverRequest/resolved", "params": {"threadId": THREAD, "requestId": 3}})
    assert rig.body(ev.INTERACTION_RESOLVED)["outcome"] == "cancelled"
    assert rig.receipts("ctl-1") == ["accepted", "rejected"]
    assert rig.wants(i.WriteStdin) == []


def test_a_tool_that_is_told_twice_starts_once() -> None:
    rig = running()
    item = {"type": "commandExecution", "id": "i1", "command": "ls", "status": "inProgress"}
    for _ in range(2):
        rig.say({"method": "item/started", "params": {**OF, "item": item}})
    assert len(rig.bodies(ev.TOOL_STARTED)) == 1


def test_a_flood_of_requests_and_tools_leaves_a_bounded_state() -> None:
    rig = running()
    for number in range(3000):
        item = {"type": "commandExecution", "id": f"c{number}", "command": "ls", "status": "inProgress"}
        rig.say(
            {"id": number, "method": "fs/readTextFile", "params": {}},
            {"method": "item/started", "params": {**OF, "item": item}},
        )
        if number % 10 == 9:
            rig.say(
                {"method": "turn/completed", "params": {"threadId": THREAD, "turn": {"id": TURN, "status": "failed"}}}
            )
    assert len(rig.wants(i.WriteStdin)) <= WAITING_MAX
    assert len(rig.execution._adapter_state["ended"]) <= 512
    assert len(rig.bodies(ev.RAW)) <= 64
