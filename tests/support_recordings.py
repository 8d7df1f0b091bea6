"""Recordings of agent CLIs as inputs of the execution machine: one driver for each agent, one table of them.

A driver turns what was written to stdin on the day of the recording into the controls that would write it, and the ids
that were used then into those that the adapter of today uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from support_execution import PROMPT_ID, START_MS, Rig, launch
from tether_collector.core import inputs as i
from tether_collector.core.adapters.base import Launch
from tether_collector.core.adapters.claude import CLAUDE
from tether_collector.core.adapters.codex_wire import INITIALIZE, THREAD, TURN

GOLDEN: Final = Path(__file__).parent / "golden"


class Driver(Protocol):
    """Made from a recording's rows."""

    launch: Launch

    def said(self, line: str) -> str:
        """A line of the CLI's stdout or stderr, with the ids of today."""
        ...

    def wrote(self, at: int, line: str) -> Sequence[i.Input]:
        """What a line that was written to stdin is today."""
        ...


def written(at: int, control: str) -> list[i.Input]:
    return [i.StdinLine(at, control, b""), i.StdinDone(at, control, "written")]


def controlled(at: int, control: str, verb: str, payload: dict[str, Any]) -> list[i.Input]:
    return [i.Note(at, "control", {"control": control, "verb": verb, "payload": payload}), *written(at, control)]


class ClaudeDriver:
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        spawn = json.loads(rows[0]["line"])
        prompts = [row for row in rows if row["ch"] == "stdin" and '"user"' in row["line"]]
        first = json.loads(prompts[0]["line"]).get("uuid") if prompts else None
        argv = spawn["argv"]
        session = argv[argv.index("--resume") + 1] if "--resume" in argv else None
        self.launch = launch(resume=session is not None, prompt_id=first or PROMPT_ID, session=session)
        self._replace: dict[str, str] = {}
        self._controls = 0
        self._prompts = 0

    def said(self, line: str) -> str:
        for old, new in self._replace.items():
            line = line.replace(old, new)
        return line

    def wrote(self, at: int, line: str) -> Sequence[i.Input]:
        try:
            message = json.loads(self.said(line))
        except ValueError:
            return []
        self._controls += 1
        control = f"ctl-{self._controls}"
        match message["type"]:
            case "user":
                return self._prompt(at, control, message)
            case "control_response":
                response = message["response"]
                decision = response["response"]
                payload = {"interaction": response["request_id"], "decision": decision["behavior"]}
                if "message" in decision:
                    payload["text"] = decision["message"]
                answers = decision.get("updatedInput", {}).get("answers", {})
                payload["answers"] = {key: [value] for key, value in answers.items()}
                return controlled(at, control, "answer", payload)
            case "control_request" if message["request"]["subtype"] == "interrupt":
                return controlled(at, message["request_id"], "interrupt", {})
        return []

    def _prompt(self, at: int, control: str, message: dict[str, Any]) -> Sequence[i.Input]:
        self._prompts += 1
        if self._prompts == 1:
            return written(at, "opening:prompt")
        content = message["message"]["content"]
        if "uuid" in message:
            ours = CLAUDE.prompt(CLAUDE.initial(self.launch), control, content)
            self._replace[message["uuid"]] = json.loads(ours)["uuid"]
        return controlled(at, control, "interject", {"request": f"req-{self._controls}", "content": content})


class CodexDriver:
    """The recordings' requests had numbers and their prompts no ids: both get those of today."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        asked = [json.loads(row["line"]) for row in rows if row["ch"] == "stdin" and "thread/resume" in row["line"]]
        session = asked[0]["params"]["threadId"] if asked else None
        self.launch = launch(resume=session is not None, session=session)
        self._ids: dict[int, str] = {}
        self._prompts: list[str] = []
        self._shown: dict[str, str] = {}  # a prompt's item → the prompt
        self._asked: dict[int, str] = {}
        self._controls = 0
        self._cleans = 0

    def said(self, line: str) -> str:
        if not line.startswith("{"):
            return line
        message = json.loads(line)
        if "method" not in message:
            message["id"] = self._ids.get(message["id"], message["id"])
            return json.dumps(message)
        params = message["params"]
        if "id" in message:
            self._asked[message["id"]] = f"{params['itemId']}_{message['id']}"
        item = params.get("item", {})
        if item.get("type") != "userMessage" or item["clientId"] is not None:
            return line
        if item["id"] not in self._shown:
            self._shown[item["id"]] = self._prompts.pop(0)
        item["clientId"] = self._shown[item["id"]]
        return json.dumps(message)

    def wrote(self, at: int, line: str) -> Sequence[i.Input]:
        message = json.loads(line)
        self._controls += 1
        control = f"ctl-{self._controls}"
        if "method" not in message:
            return self._answer(at, control, message)
        match message["method"]:
            case "initialize":
                return self._ours(at, message, INITIALIZE)
            case "thread/start" | "thread/resume" if THREAD not in self._ids.values():
                return self._ours(at, message, THREAD)
            case "turn/start" if TURN not in self._ids.values():
                self._prompts.append(PROMPT_ID)
                return self._ours(at, message, TURN)
            case "turn/start":
                self._prompts.append(control)
                self._ids[message["id"]] = control
                payload = {"request": f"req-{self._controls}", "content": message["params"]["input"]}
                return controlled(at, control, "interject", payload)
            case "turn/interrupt":
                self._ids[message["id"]] = control
                return controlled(at, control, "interrupt", {})
            case "thread/backgroundTerminals/clean":
                self._cleans += 1
                return self._ours(at, message, f"clean:{self._cleans}")
        return []

    def _ours(self, at: int, message: dict[str, Any], identifier: str) -> Sequence[i.Input]:
        self._ids[message["id"]] = identifier
        return written(at, identifier)

    def _answer(self, at: int, control: str, message: dict[str, Any]) -> Sequence[i.Input]:
        result = message["result"]
        payload: dict[str, Any] = {"interaction": self._asked.get(message["id"], f"unknown_{message['id']}")}
        payload["decision"] = "allow" if "answers" in result or result["decision"] == "accept" else "deny"
        if "answers" in result:
            payload["answers"] = {key: value["answers"] for key, value in result["answers"].items()}
        return controlled(at, control, "answer", payload)


DRIVERS: Final[dict[str, type[ClaudeDriver | CodexDriver]]] = {"claude": ClaudeDriver, "codex": CodexDriver}


def agent_of(path: Path) -> str:
    """The agent of a recording: its folder is called `<agent>-<version>`."""
    return path.parent.name.rpartition("-")[0]


def recordings(agent: str = "*") -> list[Path]:
    found = GOLDEN.glob(f"{agent}-[0-9]*/*.ndjson")
    return sorted(path for path in found if agent_of(path) in DRIVERS)


def read_recording(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Replay:
    """A recording as inputs."""

    def __init__(self, path: Path) -> None:
        self._rows = read_recording(path)
        self.agent = agent_of(path)
        self._driver: Driver = DRIVERS[self.agent](self._rows)
        self.launch = self._driver.launch

    def inputs(self) -> Iterator[i.Input]:
        for row in self._rows:
            at = START_MS + int(row["t"] * 1000)
            if row["ch"] == "proc":
                yield from self._proc(at, json.loads(row["line"]))
            elif row["ch"] == "stdin":
                yield from self._driver.wrote(at, row["line"])
            else:
                data = self._driver.said(row["line"]).encode()
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


def replayed(path: Path) -> Rig:
    replay = Replay(path)
    rig = Rig(replay.agent, start=replay.launch)
    for input_ in replay.inputs():
        rig.give(input_)
    if (want := rig.execution.next_process) is not None:  # the recording has no further process
        rig.note("process_refused", code="SESSION_BUSY", detail=f"process {want.process} was not recorded")
    return rig
