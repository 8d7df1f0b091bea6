"""Recordings of ACP agents, replayed: the adapter leads the conversation, and the recorded agent answers it.

A recorded response is given under the id of the adapter's own request of the same method, so a recording shows what
the adapter makes of an agent, and not how the driver of that day counted. What that driver did not ask (a mode that it
left alone) is answered with an empty result; what it wrote by itself (an answer, a cancel, a second prompt) becomes the
control that writes it now.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support_execution import START_MS, Rig, launch
from support_recordings import GOLDEN, read_recording
from tether_collector.core import inputs as i

AGENTS = {
    "acp-claude-agent-acp-0.101.0": "acp:claude",
    "acp-codex-acp-2.6.0": "acp:codex",
    "acp-opencode-1.18.33": "acp:opencode",
}
# The recordings' driver loaded sessions; agents that offer both are asked to resume by the adapter.
SAME = {"session/resume": "session/load", "session/set_config_option": "session/set_mode"}


def recordings() -> list[Path]:
    return sorted(path for folder in AGENTS for path in (GOLDEN / folder).glob("*.ndjson"))


class Replay:
    """One recording, played against a rig."""

    def __init__(self, path: Path) -> None:
        self._rows = read_recording(path)
        self._messages = [json.loads(row["line"]) for row in self._rows if row["ch"] == "stdin"]
        methods = {message.get("id"): message["method"] for message in self._messages if "method" in message}
        self._methods: dict[Any, str] = methods
        prompts = [message for message in self._messages if message.get("method") == "session/prompt"]
        loads = [message for message in self._messages if message.get("method") == "session/load"]
        start = launch(prompts[0]["params"]["prompt"][0]["text"], resume=bool(loads))
        if loads:
            start = type(start)(**{**_fields(start), "session": loads[0]["params"]["sessionId"]})
        self.rig = Rig(AGENTS[path.parent.name], start=start)
        self.written: list[dict[str, Any]] = []  # every message that the adapter wrote
        self._asked: dict[str, list[Any]] = {}  # method → ids of our requests that wait
        self._prompts = 0
        self._controls = 0

    def play(self) -> Rig:
        for row in self._rows:
            self.rig.at = START_MS + int(row["t"] * 1000)
            match row["ch"]:
                case "proc":
                    self._proc(json.loads(row["line"]))
                case "stdin":
                    self._stdin(json.loads(row["line"]))
                case "stderr":
                    self.rig.complain(row["line"])
                case _:
                    self._say(row["line"])
            self._write()
        return self.rig

    def _write(self) -> None:
        """Do every wanted write; requests that the recording knows nothing of are answered."""
        for want in self.rig.wants(i.WriteStdin):
            messages = [json.loads(line) for line in want.data.splitlines()]
            self.written += messages
            self.rig.written(want.control)
            for message in messages:
                if "method" in message and "id" in message:
                    method = SAME.get(message["method"], message["method"])
                    if method in self._methods.values():
                        self._asked.setdefault(method, []).append(message["id"])
                    else:
                        self.rig.say({"jsonrpc": "2.0", "id": message["id"], "result": {}})

    def _say(self, line: str) -> None:
        message = json.loads(line)
        if "method" not in message:
            asked = self._asked.get(self._methods[message["id"]], [])
            if asked:
                line = line.replace(f'"id":{message["id"]},', f'"id":{asked.pop(0)},', 1)
            else:
                line = line.replace(f'"id":{message["id"]},', f'"id":{message["id"] + 1000},', 1)
        self.rig.say(line.encode())

    def _stdin(self, message: dict[str, Any]) -> None:
        self._controls += 1
        control = f"ctl-{self._controls}"
        if message.get("method") == "session/prompt":
            self._prompts += 1
            if self._prompts > 1:
                self.rig.control(control, "interject", request=f"req-{control}", content=message["params"]["prompt"])
        elif message.get("method") == "session/cancel":
            self.rig.control(control, "interrupt")
        elif "result" in message:
            asked = self.rig.execution.pending()
            decision = "deny" if message["result"]["outcome"]["optionId"] in ("reject", "cancel") else "allow"
            self.rig.control(control, "answer", interaction=asked[0].interaction, decision=decision)

    def _proc(self, event: dict[str, Any]) -> None:
        rig = self.rig
        match event["event"]:
            case "stdin_closed":
                rig.give(i.StreamClosed(rig.at, "stdin"))
            case "stdout_eof":
                rig.give(i.StreamClosed(rig.at, "stdout"))
            case "exit":
                rig.give(i.Exited(rig.at, event["rc"]), i.Proved(rig.at, "pid_namespace"))


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def stdout_messages() -> Iterator[dict[str, Any]]:
    """Every message that a recorded agent wrote."""
    for path in recordings():
        for row in read_recording(path):
            if row["ch"] == "stdout":
                yield json.loads(row["line"])
