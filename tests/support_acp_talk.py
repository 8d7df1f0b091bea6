"""An ACP agent played by hand: what the adapter writes, message by message."""

from __future__ import annotations

import json
from typing import Any, Final

from support_execution import Rig
from tether import events as ev
from tether_collector.core import inputs as i
from tether_collector.core.adapters import base as b

SESSION: Final = "ses_1"
CAPABILITIES: Final[dict[str, Any]] = {"loadSession": True, "sessionCapabilities": {"resume": {}, "close": {}}}
OPTIONS: Final = [
    {"optionId": "yes", "name": "Yes", "kind": "allow_once"},
    {"optionId": "ever", "name": "Always", "kind": "allow_always"},
    {"optionId": "no", "name": "No", "kind": "reject_once"},
]


class Talk:
    """An agent played by hand: `asked` are the adapter's requests that wait, by method."""

    def __init__(self, kind: str = "acp:another", start: b.Launch | None = None) -> None:
        self.rig = Rig(kind, start=start)
        self.written: list[dict[str, Any]] = []
        self.asked: dict[str, list[int]] = {}
        self.write()

    def write(self) -> list[dict[str, Any]]:
        """Do every wanted write; the messages."""
        fresh: list[dict[str, Any]] = []
        for want in self.rig.wants(i.WriteStdin):
            fresh += [json.loads(line) for line in want.data.splitlines()]
            self.rig.written(want.control)
        for message in fresh:
            assert message["jsonrpc"] == "2.0"
            if "method" in message and "id" in message:
                self.asked.setdefault(message["method"], []).append(message["id"])
        self.written += fresh
        return fresh

    def say(self, **message: Any) -> list[dict[str, Any]]:
        self.rig.say({"jsonrpc": "2.0", **message})
        return self.write()

    def answer(self, method: str, result: Any = None, error: Any = None) -> list[dict[str, Any]]:
        identifier = self.asked[method].pop(0)
        return self.say(id=identifier, **({"result": result} if error is None else {"error": error}))

    def update(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        update = {"sessionUpdate": kind, **fields}
        return self.say(method="session/update", params={"sessionId": SESSION, "update": update})

    def chunk(self, text: str, message: str = "m1") -> None:
        self.update("agent_message_chunk", messageId=message, content={"type": "text", "text": text})

    def ask(self, identifier: Any = 0, tool: str = "t1", options: Any = None) -> str:
        call = {"toolCallId": tool, "title": "ls", "kind": "execute", "rawInput": {"command": "ls"}}
        params = {"sessionId": SESSION, "toolCall": call, "options": OPTIONS if options is None else options}
        self.say(id=identifier, method="session/request_permission", params=params)
        return str(self.rig.bodies(ev.INTERACTION_REQUESTED)[-1]["interaction"])

    def given(self, interaction: str, **answer: Any) -> list[dict[str, Any]]:
        self.rig.control("ctl-a", "answer", interaction=interaction, **answer)
        return self.write()

    def interject(self, control: str, text: str) -> list[dict[str, Any]]:
        self.rig.control(control, "interject", request=f"req-{control}", content=[{"type": "text", "text": text}])
        return self.write()

    def rejected(self) -> tuple[str, str]:
        [body] = [body for body in self.rig.bodies(ev.CONTROL_RECEIPT) if body["status"] == "rejected"]
        return body["reason"], body["detail"]


def ready(kind: str = "acp:another", start: b.Launch | None = None, session: Any = None) -> Talk:
    """An agent that has its prompt."""
    talk = Talk(kind, start)
    talk.answer("initialize", {"protocolVersion": 1, "agentCapabilities": CAPABILITIES})
    method = "session/resume" if start is not None and start.resume else "session/new"
    talk.answer(method, {"sessionId": SESSION, **(session or {})})
    for method in ("session/set_mode", "session/set_config_option", "session/set_model"):
        while talk.asked.get(method):
            talk.answer(method, {})
    assert "session/prompt" in talk.asked, talk.written
    return talk


def modes(*ids: str, current: str) -> dict[str, Any]:
    return {"modes": {"currentModeId": current, "availableModes": [{"id": each, "name": each} for each in ids]}}
