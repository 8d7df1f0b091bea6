"""Drive the execution machine by hand: a rig that numbers records, checks every event and keeps what was said."""

from __future__ import annotations

import json
from typing import Any, Final

from tether import events as ev
from tether.events import Event
from tether.frames import Position
from tether.ids import ExecutionTarget
from tether_collector.core import inputs as i
from tether_collector.core.adapters import adapter_for
from tether_collector.core.adapters.base import Adapter, Launch
from tether_collector.core.execution import Execution

START_MS = 1_000_000
PROMPT_ID = "11111111-1111-4111-8111-111111111111"
TARGET = ExecutionTarget(
    tenant="t1",
    workspace="w1",
    conversation="c1",
    response="rsp_1",
    response_generation=1,
    execution="exe_1",
    execution_generation=1,
    sandbox="sbx_1",
    boot="boot1",
    process_generation=1,
)
CLAIM: dict[str, Any] = {
    "boot": "boot1",
    "instance": "ins1",
    "process": 1,
    "target": TARGET.model_dump(mode="json"),
    "agent": "claude",
    "request": "req_1",
    "adapter_version": "1",
}


SESSION: Final = "22222222-2222-4222-8222-222222222222"


def launch(
    text: str = "hello",
    *,
    resume: bool = False,
    prompt_id: str = PROMPT_ID,
    session: str | None = None,
    fallback: bool = False,
) -> Launch:
    return Launch(
        execution="exe_1",
        prompt_id=prompt_id,
        content=[{"type": "text", "text": text}],
        cwd="/sandbox/ws",
        session=session or SESSION,
        resume=resume,
        fallback=fallback,
    )


class Rig:
    """One execution and its shell's hands."""

    def __init__(self, kind: str = "scripted", *, start: Launch | None = None) -> None:
        self.adapter: Adapter = adapter_for(kind)
        self.execution = Execution.start(start or launch(), self.adapter, TARGET, CLAIM)
        self.at = START_MS
        self.record = 0
        self.events: list[Event] = []
        self.positions: list[Position] = []
        self.inputs: list[i.Input] = []

    def give(self, *inputs: i.Input) -> list[Event]:
        """Apply inputs as the next records; the events that they made, each one checked."""
        fresh: list[Event] = []
        for input_ in inputs:
            self.record += 1
            self.inputs.append(input_)
            for event, position in self.execution.apply(input_, self.record):
                check_event(event)
                fresh.append(event)
                self.positions.append(position)
        self.events += fresh
        return fresh

    def pass_ms(self, ms: int) -> None:
        self.at += ms

    def say(self, *messages: dict[str, Any] | bytes) -> list[Event]:
        fresh: list[Event] = []
        for message in messages:
            data = message if isinstance(message, bytes) else json.dumps(message).encode()
            fresh += self.give(i.OutputLine(self.at, "stdout", data, len(data)))
        return fresh

    def complain(self, text: str) -> list[Event]:
        return self.give(i.OutputLine(self.at, "stderr", text.encode(), len(text)))

    def note(self, kind: str, **body: Any) -> list[Event]:
        return self.give(i.Note(self.at, kind, body))

    def control(self, control: str, verb: str, **payload: Any) -> list[Event]:
        return self.note("control", control=control, verb=verb, payload=payload)

    def written(self, control: str, result: Any = "written") -> list[Event]:
        return self.give(i.StdinLine(self.at, control, b""), i.StdinDone(self.at, control, result))

    def write_all(self) -> list[Event]:
        """Do what a shell does with every wanted write."""
        fresh: list[Event] = []
        for want in self.wants(i.WriteStdin):
            fresh += self.written(want.control)
        return fresh

    def wants(self, kind: type[Any]) -> list[Any]:
        return [want for want in self.execution.wants() if isinstance(want, kind)]

    def deadline(self, name: str) -> int:
        """Milliseconds from now to a wanted deadline."""
        found = [want.at for want in self.wants(i.Deadline) if want.name == name]
        assert len(found) == 1, self.execution.wants()
        return int(found[0]) - self.at

    def timer(self, name: str) -> list[Event]:
        """Let the wanted deadline pass."""
        self.pass_ms(self.deadline(name))
        return self.give(i.Timer(self.at, name))

    def exit(self, rc: int = 0) -> list[Event]:
        return self.give(i.StreamClosed(self.at, "stdout"), i.StreamClosed(self.at, "stderr"), i.Exited(self.at, rc))

    def prove(self) -> list[Event]:
        return self.give(i.Proved(self.at, "pid_namespace"))

    def types(self) -> list[str]:
        return [event.type for event in self.events]

    def bodies(self, kind: str) -> list[dict[str, Any]]:
        return [event.body for event in self.events if event.type == kind]

    def body(self, kind: str) -> dict[str, Any]:
        found = self.bodies(kind)
        assert len(found) == 1, (kind, self.types())
        return found[0]

    def receipts(self, control: str) -> list[str]:
        return [body["status"] for body in self.bodies(ev.CONTROL_RECEIPT) if body["control"] == control]


def check_event(event: Event) -> None:
    """The body is what its type promises, nothing more, and survives the wire."""
    model = ev.BODIES[event.type]
    typed = model.model_validate(event.body)
    names = {field.alias or name for name, field in model.model_fields.items()}
    assert set(event.body) <= names, (event.type, event.body)
    assert typed is not None
    assert Event.model_validate_json(event.model_dump_json(exclude_none=True)) == Event(**event.model_dump())


def started(kind: str = "scripted") -> Rig:
    """An execution whose prompt was written and whose turn runs."""
    rig = Rig(kind)
    rig.write_all()
    if kind == "scripted":
        rig.say(
            {"type": "session", "session_id": "s-1", "agent": "scripted", "version": "1"},
            {"type": "turn.started", "prompt": PROMPT_ID},
        )
    return rig
