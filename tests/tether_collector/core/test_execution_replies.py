"""What an adapter has to write by itself, and controls whose bytes had to wait: once each, whatever is restarted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from support_execution import CLAIM, TARGET, Rig, launch
from tether_collector.core import inputs as i
from tether_collector.core.adapters import base as b
from tether_collector.core.adapters.scripted import Scripted
from tether_collector.core.execution import Execution


class Asking(Scripted):
    """The scripted agent, spoken to in steps: it is greeted first, and takes nothing before it greeted back."""

    def opening(self, launch: b.Launch) -> Sequence[tuple[str, bytes]]:
        return [("opening:greeting", b"hello\n")]

    def on_line(self, state: dict[str, Any], line: i.OutputLine) -> b.Reading:
        message = json.loads(line.data)
        if "greeting" in message:
            state["greeted"] = True
            held = [b.Reply(control, f"held {control}\n".encode(), work=True) for control in state.pop("held", [])]
            return b.Reading((), (b.Reply("reply:prompt", b"begin\n", work=True), *held))
        if "asked" in message:
            return b.Reading((), (b.Reply(f"reply:{message['asked']}", b"no\n"),))
        return super().on_line(state, line)

    def prompt(self, state: dict[str, Any], control: str, content: Sequence[Mapping[str, Any]]) -> bytes | None:
        return self._later(state, control)

    def interrupt(self, state: dict[str, Any], control: str) -> bytes | None:
        return self._later(state, control)

    def _later(self, state: dict[str, Any], control: str) -> bytes | None:
        if state.get("greeted"):
            return f"now {control}\n".encode()
        state.setdefault("held", []).append(control)
        return None


def rig_of_asking() -> Rig:
    rig = Rig()
    rig.adapter = Asking()
    rig.execution = Execution.start(launch(), rig.adapter, TARGET, CLAIM)
    rig.write_all()
    return rig


def interject(rig: Rig, control: str) -> None:
    rig.control(control, "interject", request="req_2", content=[{"type": "text", "text": "and this"}])


def wanted(rig: Rig) -> list[str]:
    return [want.control for want in rig.wants(i.WriteStdin)]


def test_a_reply_is_wanted_until_the_keeper_recorded_it() -> None:
    rig = rig_of_asking()
    rig.say({"greeting": 1})
    assert wanted(rig) == ["reply:prompt"] == wanted(rig)
    rig.written("reply:prompt")
    assert wanted(rig) == []


def test_a_reply_that_was_not_written_is_wanted_by_a_loaded_machine() -> None:
    rig = rig_of_asking()
    rig.say({"greeting": 1})
    loaded = Execution.load(rig.execution.dump())
    assert i.WriteStdin("reply:prompt", b"begin\n") in loaded.wants()


def test_a_control_that_had_to_wait_is_written_once_under_its_own_id_and_gets_its_receipts() -> None:
    rig = rig_of_asking()
    interject(rig, "k1")
    assert (wanted(rig), rig.receipts("k1")) == ([], ["accepted"])
    rig.say({"greeting": 1})
    assert wanted(rig) == ["reply:prompt", "k1"]
    rig.write_all()
    assert (wanted(rig), rig.receipts("k1")) == ([], ["accepted", "delivered"])


def test_a_control_that_waited_in_vain_is_refused_not_unknown() -> None:
    rig = rig_of_asking()
    interject(rig, "k1")
    rig.exit(1)
    assert rig.receipts("k1") == ["accepted", "rejected"]


def test_a_stop_lets_answers_through_and_holds_what_would_begin_work() -> None:
    rig = rig_of_asking()
    interject(rig, "k1")
    rig.control("s1", "stop")
    rig.say({"greeting": 1}, {"asked": "fs"})
    assert wanted(rig) == ["reply:fs"]


def test_a_control_with_the_name_of_an_adapters_own_write_is_still_written() -> None:
    """The adapter's ids have a colon in them, which no control's can have."""
    rig = Rig()
    opening = [want.control for want in rig.wants(i.WriteStdin)]
    assert all(":" in control for control in opening)
    rig.write_all()
    interject(rig, "opening-prompt")
    assert wanted(rig) == ["opening-prompt"]
