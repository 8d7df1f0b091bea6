"""Drive the execution machine by hand: a rig that numbers records, checks every event and keeps what was said."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tether import events as ev
from tether.events import Event
from tether.frames import Position
from tether.ids import ExecutionTarget
from tether_collector.core import inputs as i
from tether_collector.core.adapters import adapter_for
from tether_collector.core.adapters.base import Adapter, Launch
from tether_collector.core.adapters.claude import CLAUDE
from tether_collector.core.execution import Execution

START_MS = 1_000_000
PROMPT_ID = "11111111-1111-4111-8111-111111111111"
GOLDEN = Path(__file__).parent / "golden"
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


def launch(text: str = "hello", *, resume: bool = False, prompt_id: str = PROMPT_ID) -> Launch:
    return Launch(
        execution="exe_1",
        prompt_id=prompt_id,
        content=[{"type": "text", "text": text}],
        cwd="/sandbox/ws",
        session="22222222-2222-4222-8222-222222222222",
        resume=resume,
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


# --- recordings ------------------------------------------------------------------------------------------------------


def recordings() -> list[Path]:
    return sorted(GOLDEN.glob("claude-*/*.ndjson"))


def read_recording(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Replay:
    """A recording as inputs: what the driver of that day wrote becomes the controls that would have written it."""

    def __init__(self, path: Path) -> None:
        self._rows = read_recording(path)
        spawn = json.loads(self._rows[0]["line"])
        prompts = [row for row in self._rows if row["ch"] == "stdin" and '"user"' in row["line"]]
        first = json.loads(prompts[0]["line"]).get("uuid") if prompts else None
        self.launch = launch(resume="--resume" in spawn["argv"], prompt_id=first or PROMPT_ID)
        self._replace: dict[str, str] = {}
        self._controls = 0
        self._prompts = 0

    def inputs(self) -> Iterator[i.Input]:
        for row in self._rows:
            at = START_MS + int(row["t"] * 1000)
            line: str = row["line"]
            for old, new in self._replace.items():
                line = line.replace(old, new)
            if row["ch"] == "proc":
                yield from self._proc(at, json.loads(line))
            elif row["ch"] == "stdin":
                yield from self._stdin(at, line)
            else:
                data = line.encode()
                yield i.OutputLine(at, row["ch"], data, len(data))

    def _proc(self, at: int, event: dict[str, Any]) -> Sequence[i.Input]:
        match event["event"]:
            case "stdin_closed":
                return [i.StreamClosed(at, "stdin")]
            case "stdout_eof":
                return [i.StreamClosed(at, "stdout")]
            case "exit":
                return [i.Exited(at, event["rc"]), i.Proved(at, "pid_namespace")]
            case _:
                return []

    def _stdin(self, at: int, line: str) -> Sequence[i.Input]:
        try:
            message = json.loads(line)
        except ValueError:
            return []
        self._controls += 1
        control = f"ctl-{self._controls}"
        match message["type"]:
            case "user":
                self._prompts += 1
                if self._prompts == 1:
                    control = "opening-prompt"
                    return [i.StdinLine(at, control, line.encode()), i.StdinDone(at, control, "written")]
                payload: dict[str, Any] = {"request": f"req-{self._controls}", "content": message["message"]["content"]}
                if "uuid" in message:
                    ours = json.loads(CLAUDE.prompt(CLAUDE.initial(self.launch), control, payload["content"]))["uuid"]
                    self._replace[message["uuid"]] = ours
                return self._control(at, control, "interject", payload)
            case "control_response":
                response = message["response"]
                decision = response["response"]
                payload = {"interaction": response["request_id"], "decision": decision["behavior"]}
                if "message" in decision:
                    payload["text"] = decision["message"]
                answers = decision.get("updatedInput", {}).get("answers", {})
                payload["answers"] = {key: [value] for key, value in answers.items()}
                return self._control(at, control, "answer", payload)
            case "control_request" if message["request"]["subtype"] == "interrupt":
                return self._control(at, message["request_id"], "interrupt", {})
        return []

    def _control(self, at: int, control: str, verb: str, payload: dict[str, Any]) -> Sequence[i.Input]:
        note = i.Note(at, "control", {"control": control, "verb": verb, "payload": payload})
        return [note, i.StdinLine(at, control, b""), i.StdinDone(at, control, "written")]
