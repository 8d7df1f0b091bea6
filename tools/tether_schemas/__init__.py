"""Exports the contract as JSON Schema: one file per message or record. CI fails when the files drift from the code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from tether import events
from tether.control import AnswerPayload, ControlReply, ControlRequest, InterjectPayload, StartCommand
from tether.errors import Problem
from tether.events import ConversationEvent
from tether.fold import ConversationState, ExecutionState
from tether.frames import Frame
from tether.owner import OwnerRecord
from tether.prompt import Prompt, RequestRecord
from tether.sandbox import Registration, SandboxRecord
from tether.snapshot import Snapshot

MODELS: Final[dict[str, type[BaseModel]]] = {
    "prompt": Prompt,
    "request-record": RequestRecord,
    "start-command": StartCommand,
    "frame": Frame,
    "conversation-event": ConversationEvent,
    "control-request": ControlRequest,
    "control-reply": ControlReply,
    "answer-payload": AnswerPayload,
    "interject-payload": InterjectPayload,
    "owner-record": OwnerRecord,
    "sandbox-record": SandboxRecord,
    "registration": Registration,
    "snapshot": Snapshot,
    "execution-state": ExecutionState,
    "conversation-state": ConversationState,
    "problem": Problem,
}


def render() -> dict[str, str]:
    """File name → content, for every model and every event body."""
    files = {f"{name}.json": model for name, model in MODELS.items()}
    files |= {f"event.{kind}.json": body for kind, body in events.BODIES.items()}
    return {
        name: json.dumps(
            {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()},
            indent=2,
            sort_keys=True,
        )
        + "\n"
        for name, model in files.items()
    }


def drift(folder: Path) -> list[str]:
    """What differs between the folder and the code, one sentence each."""
    wanted = render()
    present = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    found = [f"{name}: missing" for name in sorted(wanted.keys() - present.keys())]
    found += [f"{name}: not of this code" for name in sorted(present.keys() - wanted.keys())]
    found += [
        f"{name}: differs from the code"
        for name in sorted(wanted.keys() & present.keys())
        if wanted[name] != present[name]
    ]
    return found


def write(folder: Path) -> int:
    """Write every schema, remove what is not of this code; returns how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = render()
    for path in folder.glob("*.json"):
        if path.name not in wanted:
            path.unlink()
    for name, content in wanted.items():
        (folder / name).write_text(content, encoding="utf-8")
    return len(wanted)
