"""The AsyncAPI document's part about a sandbox's life: drain, suspend, resume, delete; checkpoints; lost sessions."""

from __future__ import annotations

from typing import Any, Final

from tether import subjects
from tether.ids import default_workspace, sandbox_id
from tether_schemas import asyncapi_parts as p
from tether_schemas.asyncapi_parts import Channel, Json, Message, Operation

_T, _C = "default", "garden-42"
_W: Final = default_workspace(_C)
_WHERE: Final = {"tenant": _T, "workspace": _W}
_DRAIN: Final = "maintenance-7"
_PROBLEM: Final = {"$ref": "schemas/problem.json"}
_STATES: Final = ["provisioning", "active", "draining", "suspended", "resuming", "deleting"]
_RUNNING: Final = {"drain": _DRAIN, "state": "running", "phase": "turn", "purpose": "drain"}
_LEADER: Final = "last message of the key, read from the stream's leader"
_TO_SANDBOX: Final = (
    "drain",
    "suspend",
    "delete",
    "drainStatus",
    "resume",
)  # as ids; the verb of drainStatus has a dash
_ASKED_BY: Final = ("client", "backend")


def _object(required: list[str], properties: dict[str, Any]) -> Json:
    """An answer of the agent service: its fields, or a problem."""
    return {"type": "object", "required": required, "properties": {"v": {"const": 1}, **properties}}


_OPERATION: Final = _object(
    ["v"],
    {
        "report": {"$ref": "schemas/drain-report.json"},
        "purpose": {"enum": ["drain", "suspend", "delete"]},
        "state": {"enum": [*_STATES, "deleted"], "description": "the sandbox's"},
        "joined": {"type": "boolean", "description": "it ran before this request; `report.drain` is its id"},
        "problem": _PROBLEM,
    },
)
_RESUMED: Final = _object(
    ["v"],
    {
        "state": {"enum": _STATES},
        "woken": {"type": "boolean", "description": "this very request woke it"},
        "checkpoint": {"$ref": "schemas/checkpoint-reference.json"},
        "checkpoint_revision": {"type": "integer", "minimum": 0},
        "problem": _PROBLEM,
    },
)
_REFERENCE: Final = {
    "v": 1,
    "op": "6f1d",
    "checkpoint": "ckp_5f0c7d1e2a3b",
    "drain": _DRAIN,
    **_WHERE,
    "sandbox": sandbox_id(_T, _W),
    "boot": "boot_5f0c7d1e",
    "manifest": "0" * 64,
    "manifest_bytes": 2048,
    "stored": "volume",
    "include": "sessions",
    "clean": True,
    "files": 7,
    "size_bytes": 184_320,
    "created_at": 1_767_225_660_000,
}
_REPLY: Final = {"v": 1, "report": _RUNNING, "purpose": "drain", "state": "draining", "joined": False}
_NAMED: Final = {**_WHERE, "drain_id": _DRAIN}

MESSAGES: Final[tuple[Message, ...]] = (
    Message("drainRequest", "Stop it in good order", "agent-drain-request", example={**_NAMED, "grace_s": 60}),
    Message("suspendRequest", "Put it to sleep if it is idle", "agent-suspend-request", example=_NAMED),
    Message("deleteRequest", "Drain it, then forget it", "agent-delete-request", example=_NAMED),
    Message("drainStatusRequest", "How does the operation stand?", "agent-drain-status-request", example=_NAMED),
    Message("resumeRequest", "Wake it", "agent-resume-request", example=_WHERE),
    *(Message(f"{name}Reply", "The operation as it stands, or a problem", _OPERATION, example=_REPLY)
      for name in _TO_SANDBOX if name != "resume"),
    Message("resumeReply", "What became of the wake, or a problem", _RESUMED,
            example={"v": 1, "state": "resuming", "woken": True, "checkpoint_revision": 12}),
    Message(
        "checkpointReference",
        "What a resume goes on from: written last, so what it names is whole",
        "checkpoint-reference",
        {
            "Nats-Expected-Last-Subject-Sequence": "Compare-and-set: the revision that is replaced; 0 for none",
            "KV-Operation": "`DEL` or `PURGE`: the key is gone; the payload is empty",
        },
        ("Nats-Expected-Last-Subject-Sequence",),
        _REFERENCE,
    ),
    Message("historyRequest", "The rows of a conversation up to a cut", "history-request",
            example={"v": 1, **_WHERE, "conversation": _C, "cut": 212}),
    Message("historyReply", "At most so many rows, the latest; or a problem", "history",
            example={"v": 1, "conversation": _C, "cut": 212, "through": 214,
                     "rows": [{"role": "user", "text": "look after the garden", "at": 1_767_225_600_000}]}),
)  # fmt: skip


def _verb(name: str) -> str:
    return "drain-status" if name == "drainStatus" else name


def _channel(name: str) -> str:
    return f"agent{name[0].upper()}{name[1:]}"


_SAYS: Final = {
    "drain": "A drain: no new starts, executions leave within the grace, checkpoint, compute released. Answered at "
    "once; the same `drain_id` joins.",
    "suspend": "A drain that is refused with SESSION_BUSY while an execution lives, unless forced.",
    "delete": "Drained first; its checkpoint stays, its record goes.",
    "drainStatus": "The running or the last operation, or exactly the one that is named.",
    "resume": "Wakes a suspended sandbox, once, whoever asks.",
}

CHANNELS: Final[tuple[Channel, ...]] = (
    *(
        Channel(_channel(name), subjects.agent(_verb(name)), f"Agent services: {_verb(name)}",
                f"Core request and reply. {_SAYS[name]}", (f"{name}Request",))
        for name in _TO_SANDBOX
    ),
    *(
        Channel(f"{_channel(name)}Reply", None, f"The reply subject of {_verb(name)}", "Chosen by who asks.",
                (f"{name}Reply",))
        for name in _TO_SANDBOX
    ),
    Channel("checkpoints", p.kv(subjects.CHECKPOINTS, subjects.checkpoint_key(p.TENANT, p.WORKSPACE)),
            "Checkpoint references", "One per workspace, written by the collector that was drained. The revision is "
            "the token of a resume.", ("checkpointReference",), f"KV_{subjects.CHECKPOINTS}"),
    Channel("history", subjects.history(p.TENANT, p.WORKSPACE), "Histories for sessions that are lost",
            "Core request and reply, one of the backends answers; asked again where its rows are behind the cut.",
            ("historyRequest",)),
    Channel("historyReply", None, "The reply subject of a history", "Chosen by who asks.", ("historyReply",)),
)  # fmt: skip

_ASKS: Final = "request; the same id joins, so it may be asked again"

OPERATIONS: Final[tuple[Operation, ...]] = (
    *(
        Operation(role, "send", _channel(name), name, f"{_verb(name)} of a sandbox", reply=f"{_channel(name)}Reply",
                  how=_ASKS)
        for role in _ASKED_BY
        for name in _TO_SANDBOX
    ),
    *(
        Operation("agentService", "receive", _channel(name), f"answer{_channel(name)[5:]}", f"Answer {_verb(name)}",
                  queue="agent-service", reply=f"{_channel(name)}Reply", how="request and reply")
        for name in _TO_SANDBOX
    ),
    Operation("agentService", "send", "prompts", "continueTurn", "Have a turn that a drain cut go on, once",
              how="publish with ack; its id follows from checkpoint and conversation"),
    Operation("agentService", "receive", "prompts", "readPrompts", "Does work wait for the sandbox?", how="direct get"),
    Operation("collector", "send", "checkpoints", "writeReference", "Say what was kept",
              how="compare-and-set; an equal `op` after a doubtful answer is success"),
    *(
        Operation(role, "receive", "checkpoints", "readReference", summary, how=_LEADER)
        for role, summary in (
            ("agentService", "What does a wake go on from?"), ("router", "Which revision does a start carry?"),
            ("client", "What was kept?"), ("backend", "What was kept?"),
        )
    ),
    Operation("collector", "send", "history", "askHistory", "Ask for what a lost session knew", reply="historyReply",
              how="request; asked again while the rows are behind the cut"),
    Operation("backend", "receive", "history", "answerHistory", "Export the rows up to the cut", queue="tether-history",
              reply="historyReply", how="request and reply"),
)  # fmt: skip
