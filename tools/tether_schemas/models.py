"""Every message and record of the contract as JSON Schema, one file each in `docs/schemas`."""

from __future__ import annotations

import json
from typing import Any, Final

from pydantic import BaseModel

from tether import events
from tether.blobs import Manifest
from tether.checkpoint import CheckpointManifest, CheckpointReference
from tether.control import AnswerPayload, ControlReply, ControlRequest, InterjectPayload, StartCommand
from tether.conversation_fold import ConversationState
from tether.deletion import DeletionRecord, ForgetPayload
from tether.errors import Problem
from tether.events import ConversationEvent
from tether.export_format import ConversationExport
from tether.fold import ExecutionState
from tether.frames import Frame
from tether.history import History, HistoryRequest
from tether.owner import OwnerRecord
from tether.prompt import ConversationRecord, Prompt, RequestRecord
from tether.quarantine import QuarantineEntry
from tether.quotas import AllowanceRecord, RunningRecord
from tether.sandbox import DrainOrder, DrainReport, Registration, SandboxRecord
from tether.snapshot import Snapshot
from tether_agent.requests import (
    DeleteRequest,
    DrainRequest,
    DrainStatusRequest,
    ForgetRequest,
    ResumeRequest,
    SandboxesRequest,
    StopRequest,
    SuspendRequest,
    WorkspaceRequest,
)
from tether_backend.core.notices import Notification

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

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
    "conversation-record": ConversationRecord,
    "allowance-record": AllowanceRecord,
    "running-record": RunningRecord,
    "sandbox-record": SandboxRecord,
    "registration": Registration,
    "blob-manifest": Manifest,
    "quarantine-entry": QuarantineEntry,
    "notification": Notification,
    "snapshot": Snapshot,
    "execution-state": ExecutionState,
    "conversation-state": ConversationState,
    "problem": Problem,
    "agent-sandboxes-request": SandboxesRequest,
    "agent-workspace-request": WorkspaceRequest,
    "agent-stop-request": StopRequest,
    "agent-drain-request": DrainRequest,
    "agent-suspend-request": SuspendRequest,
    "agent-delete-request": DeleteRequest,
    "agent-drain-status-request": DrainStatusRequest,
    "agent-resume-request": ResumeRequest,
    "deletion-record": DeletionRecord,
    "forget-payload": ForgetPayload,
    "agent-forget-request": ForgetRequest,
    "conversation-export": ConversationExport,
    "drain-order": DrainOrder,
    "drain-report": DrainReport,
    "checkpoint-manifest": CheckpointManifest,
    "checkpoint-reference": CheckpointReference,
    "history-request": HistoryRequest,
    "history": History,
}


def pretty(value: dict[str, Any], *, sort_keys: bool = False) -> str:
    return json.dumps(value, indent=2, sort_keys=sort_keys, ensure_ascii=sort_keys) + "\n"


def render() -> dict[str, str]:
    """File name → content, for every model and every event body."""
    files = {f"{name}.json": model for name, model in MODELS.items()}
    files |= {f"event.{kind}.json": body for kind, body in events.BODIES.items()}
    return {
        name: pretty({"$schema": DIALECT, **model.model_json_schema()}, sort_keys=True) for name, model in files.items()
    }
