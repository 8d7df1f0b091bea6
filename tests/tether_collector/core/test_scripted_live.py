"""The scripted adapter against the real scripted agent: a few pipes in place of keeper and spool."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support_execution import PROMPT_ID, Rig, launch
from support_scripted import Scripted, scripted
from tether import events as ev
from tether_collector.core import inputs as i
from tether_oracle import load_truth

SESSION = launch().session
React = Callable[["Live", dict[str, Any]], None]


class Live:
    """Does what the machine wants with a real process, and gives it every line that comes back."""

    def __init__(self, agent: Scripted, text: str) -> None:
        self.agent = agent
        self.rig = Rig("scripted", start=launch(text))
        self._written: set[str] = set()

    def obey(self) -> None:
        for want in self.rig.execution.wants():
            if isinstance(want, i.WriteStdin) and want.control not in self._written:
                self._written.add(want.control)
                self.agent.send_raw(want.data)
                self.rig.written(want.control)
            elif isinstance(want, i.CloseStdin) and "close" not in self._written:
                self._written.add("close")
                self.agent.close_stdin()
                self.rig.give(i.StreamClosed(self.rig.at, "stdin"))

    def run(self, react: React | None = None) -> Rig:
        """To the proof. `react` sees each line and may note controls."""
        self.obey()
        while (message := self.agent.next()) is not None:
            raw = message["raw"].rstrip(b"\n") if message["type"] == "<bad>" else json.dumps(message).encode()
            self.rig.say(raw)
            if react is not None:
                react(self, message)
            self.obey()
        self.rig.exit(self.agent.process.wait(20))
        self.rig.prove()
        return self.rig


def run(folder: Path, text: str, react: React | None = None) -> Rig:
    with scripted(folder, "--session-id", SESSION) as agent:
        return Live(agent, text).run(react)


def on(kind: str, /, **fields: Any) -> Callable[[Callable[[Rig], object]], React]:
    """A reaction to the first line of this type."""

    def make(act: Callable[[Rig], object]) -> React:
        done: list[bool] = []

        def react(live: Live, message: dict[str, Any]) -> None:
            if not done and message["type"] == kind and all(message.get(key) == fields[key] for key in fields):
                done.append(True)
                act(live.rig)

        return react

    return make


def outcome(rig: Rig) -> str:
    assert rig.types()[-1] == ev.EXECUTION_ENDED
    ended: str = rig.body(ev.RESPONSE_ENDED)["outcome"]
    assert rig.body(ev.EXECUTION_ENDED)["outcome"] == ended
    return ended


def pending(rig: Rig) -> str:
    return rig.execution.pending()[-1].interaction


def test_every_text_that_the_agent_printed_is_completed_once_and_its_deltas_add_up(tmp_path: Path) -> None:
    rig = run(tmp_path, "!say one two\n!lines 20\n!deltas 30 0\n!reasoning hm\n!flood 1500")
    assert outcome(rig) == "completed"
    (process,) = load_truth(tmp_path / "truth").processes
    printed = [
        json.loads(record["line"]) for record in process.records if record["ev"] == "stdout" and "line" in record
    ]
    assert [body["text"] for body in rig.bodies(ev.TEXT_COMPLETED)] == [
        line["text"] for line in printed if line["type"] == "text"
    ]
    assert len(rig.bodies(ev.TEXT_DELTA)) == sum(line["type"] == "delta" for line in printed)
    assert rig.bodies(ev.RAW) == []
    assert rig.body(ev.REASONING_COMPLETED)["text"] == "hm"


def test_the_session_is_bound_and_resumable_after_its_first_completed_item(tmp_path: Path) -> None:
    rig = run(tmp_path, "!say hi")
    assert [(body["native_session"], body["resumable"]) for body in rig.bodies(ev.SESSION_BOUND)] == [
        (SESSION, False),
        (SESSION, True),
    ]


@pytest.mark.parametrize(("decision", "resolved", "status"), [("allow", "answered", "ok"), ("deny", "denied", "error")])
def test_an_approval_is_answered_and_settled(tmp_path: Path, decision: str, resolved: str, status: str) -> None:
    answer = on("ask")(lambda rig: rig.control("k1", "answer", interaction=pending(rig), decision=decision))
    rig = run(tmp_path, "!ask work", answer)
    assert outcome(rig) == "completed"
    assert rig.body(ev.INTERACTION_RESOLVED)["outcome"] == resolved
    assert rig.body(ev.TOOL_COMPLETED)["status"] == status
    assert rig.receipts("k1") == ["accepted", "delivered", "settled"]


def test_a_question_is_answered_by_its_id(tmp_path: Path) -> None:
    def answer(rig: Rig) -> None:
        (question,) = rig.body(ev.INTERACTION_REQUESTED)["questions"]
        chosen = question["options"][0]["label"]
        rig.control("k1", "answer", interaction=pending(rig), decision="allow", answers={question["id"]: [chosen]})

    rig = run(tmp_path, "!question Which colour? | red | blue", on("ask")(answer))
    assert "red" in rig.bodies(ev.TEXT_COMPLETED)[-1]["text"]
    assert rig.receipts("k1")[-1] == "settled"


def test_a_retried_request_voids_its_text_and_a_failed_one_fails_the_response(tmp_path: Path) -> None:
    rig = run(tmp_path, "!retry 2\n!say after\n!fail overloaded")
    assert outcome(rig) == "failed"
    assert rig.body(ev.RESPONSE_ENDED)["error"]["code"] == "overloaded"
    assert len(rig.bodies(ev.TEXT_DISCARDED)) == 1
    assert [body["state"] for body in rig.bodies(ev.MODEL_REQUEST)] == ["started", "retrying", "retrying", "failed"]


def test_an_interrupt_cancels_and_what_was_said_is_partial(tmp_path: Path) -> None:
    rig = run(tmp_path, "!deltas 100000 10", on("delta")(lambda rig: rig.control("k1", "interrupt")))
    assert outcome(rig) == "cancelled"
    assert rig.body(ev.TEXT_COMPLETED)["partial"] is True
    assert rig.receipts("k1") == ["accepted", "delivered", "settled"]


def test_a_stop_is_settled_by_the_proof(tmp_path: Path) -> None:
    rig = run(tmp_path, "!hang", on("model", state="started")(lambda rig: rig.control("k1", "stop")))
    assert outcome(rig) == "stopped"
    assert rig.receipts("k1") == ["accepted", "delivered", "settled"]


@pytest.mark.parametrize("mode", ["queued", "steered"])
def test_an_interjection_is_taken_up_and_the_response_waits_for_it(tmp_path: Path, mode: str) -> None:
    def interject(rig: Rig) -> None:
        rig.control("k1", "interject", request="req_2", content=[{"type": "text", "text": "!say second"}])

    def release(rig: Rig) -> None:
        (tmp_path / "go").touch()

    script = f"{'!steer' if mode == 'steered' else ''}\n!say first\n!wait_file {tmp_path / 'go'}"
    reactions = [on("text")(interject), on("prompt.accepted")(release)]

    def react(live: Live, message: dict[str, Any]) -> None:
        for reaction in reactions:
            reaction(live, message)

    rig = run(tmp_path, script, react)
    assert outcome(rig) == "completed"
    assert [body["text"] for body in rig.bodies(ev.TEXT_COMPLETED)] == ["first", "second"]
    assert rig.receipts("k1") == ["accepted", "delivered", "settled"]
    assert len(rig.bodies(ev.TURN_COMPLETED)) == (1 if mode == "steered" else 2)
    assert len(rig.bodies(ev.USAGE)) == len({body["turn"] for body in rig.bodies(ev.USAGE)})


def test_background_work_keeps_the_response_open(tmp_path: Path) -> None:
    rig = run(tmp_path, "!background 0.2\n!say bye")
    types = rig.types()
    assert types.index(ev.TURN_COMPLETED) < len(types) - 1 - types[::-1].index(ev.BACKGROUND)
    assert types.index(ev.RESPONSE_ENDED) > len(types) - 1 - types[::-1].index(ev.BACKGROUND)
    assert outcome(rig) == "completed"


def test_an_exit_without_a_result_is_lost(tmp_path: Path) -> None:
    rig = run(tmp_path, "!say hi\n!exit 0")
    assert outcome(rig) == "lost"
    assert rig.body(ev.TEXT_COMPLETED)["text"] == "hi"


@pytest.mark.parametrize(
    "kind", ["invalid_json", "not_object", "nul", "half_utf8", "huge=2", "deep", "unknown_type", "nan"]
)
def test_garbage_becomes_raw_and_no_reliable_text_is_lost(tmp_path: Path, kind: str) -> None:
    rig = run(tmp_path, f"!say before\n!garbage {kind}\n!say after")
    assert outcome(rig) == "completed"
    assert [body["text"] for body in rig.bodies(ev.TEXT_COMPLETED)] in (["before", "after"], ["before", "", "after"])
    assert len(rig.bodies(ev.RAW)) == 1


def test_an_unknown_session_fails_the_resume_by_name(tmp_path: Path) -> None:
    with scripted(tmp_path, "--resume", "nobody-knows") as agent:
        rig = Live(agent, "!say hi").run()
    assert rig.body(ev.RESPONSE_ENDED)["error"]["code"] == "RESUME_FAILED"


def test_a_resumed_session_is_told_and_recalls(tmp_path: Path) -> None:
    run(tmp_path, "!say one")
    with scripted(tmp_path, "--resume", SESSION) as agent:
        rig = Live(agent, "!recall").run()
    assert outcome(rig) == "completed"
    assert PROMPT_ID in rig.body(ev.TEXT_COMPLETED)["text"]
