"""The AsyncAPI document's part about deleting a conversation: the operation's record, and who erases what."""

from __future__ import annotations

from typing import Final

from tether import subjects
from tether.ids import default_workspace
from tether_schemas import asyncapi_parts as p
from tether_schemas.asyncapi_parts import Channel, Message, Operation

_T, _C = "default", "garden-42"
_W: Final = default_workspace(_C)
_DELETION: Final = "del_5f0c7d1e2a3b"
_NAMED: Final = {"tenant": _T, "workspace": _W, "deletion": _DELETION, "conversation": _C, "sessions": []}
_FORGOTTEN: Final = {
    "type": "object",
    "required": ["v"],
    "properties": {
        "v": {"const": 1},
        "clean": {"type": "boolean", "description": "nothing of the conversation is left on the volume"},
        "pending_on": {"type": "string", "description": "else, what has to happen first"},
        "executions": {"type": "integer", "minimum": 0},
        "files": {"type": "integer", "minimum": 0},
        "problem": {"$ref": "schemas/problem.json"},
    },
}
_LEADER: Final = "last message of the key, read from the stream's leader"
_CAS: Final = "compare-and-set; an equal `op` after a doubtful answer is success"
_ERASE: Final = "deletes messages one by one, with their bytes overwritten"

MESSAGES: Final[tuple[Message, ...]] = (
    Message(
        "deletionRecord",
        "A deletion, and how far it is",
        "deletion-record",
        {
            "Nats-Expected-Last-Subject-Sequence": "Compare-and-set: the revision that is replaced; 0 for none",
            "KV-Operation": "`DEL` or `PURGE`: the key is gone; the payload is empty",
        },
        ("Nats-Expected-Last-Subject-Sequence",),
        {
            "v": 1,
            "op": "6f1d",
            "deletion": _DELETION,
            "tenant": _T,
            "conversation": _C,
            "workspace": _W,
            "step": "log",
            "began_at": 1_767_225_660_000,
        },
    ),
    Message("forgetRequest", "Delete what the volume has of it", "agent-forget-request", example=_NAMED),
    Message(
        "forgetReply",
        "Whether the volume is clean, or a problem",
        _FORGOTTEN,
        example={"v": 1, "clean": True, "pending_on": "", "executions": 1, "files": 3},
    ),
)

CHANNELS: Final[tuple[Channel, ...]] = (
    Channel(
        "deletions",
        p.kv(subjects.DELETIONS, subjects.deletion_key(p.TENANT, p.CONVERSATION)),
        "Deletions",
        "One per conversation that was deleted: ordered by backends and clients, carried on by routers. It outlives "
        "what it deletes, so that what comes late is nobody's.",
        ("deletionRecord",),
        f"KV_{subjects.DELETIONS}",
    ),
    Channel(
        "agentForget",
        subjects.agent("forget"),
        "Agent services: forget",
        "Core request and reply. The sandbox's record forgets the conversation, and so does its volume where no "
        "collector is registered and the volume is to be reached.",
        ("forgetRequest",),
    ),
    Channel("agentForgetReply", None, "The reply subject of forget", "Chosen by who asks.", ("forgetReply",)),
)


def _looks(role: str, does: str, summary: str) -> Operation:
    return Operation(role, "receive", "deletions", does, summary, how=_LEADER)


def _erases(does: str, channel: str, summary: str) -> Operation:
    return Operation("router", "receive", channel, does, summary, how=_ERASE)


OPERATIONS: Final[tuple[Operation, ...]] = (
    *(
        Operation(role, "send", "deletions", "orderDeletion", "Have a conversation deleted", how=_CAS)
        for role in ("client", "backend")
    ),
    _looks("client", "readDeletion", "Is it deleted?"),
    _looks("backend", "readDeletion", "Is it deleted, and is an event that says so believed?"),
    _looks("router", "readDeletions", "What is to be deleted?"),
    Operation("router", "send", "deletions", "carryDeletion", "Note each step that is taken", how=_CAS),
    Operation(
        "router",
        "send",
        "agentForget",
        "forget",
        "Have the volume forget it",
        reply="agentForgetReply",
        how="request; may be asked again",
    ),
    Operation(
        "agentService",
        "receive",
        "agentForget",
        "answerForget",
        "Answer forget",
        queue="agent-service",
        reply="agentForgetReply",
        how="request and reply",
    ),
    _erases("erasePrompts", "prompts", "Prompts that wait"),
    _erases("eraseCommands", "commands", "Commands of what has ended"),
    _erases("eraseBlobs", "blobParts", "What no other conversation refers to, and checkpoints"),
    _erases("eraseQuarantine", "quarantine", "What was refused of it"),
    Operation("router", "send", "checkpoints", "dropReferences", "References that cover it", how=_CAS),
    Operation("router", "send", "notifications", "dropNotifications", "Notifications of it", how=_CAS),
    Operation("router", "receive", "notifications", "findNotifications", "Which are of it?", how=_LEADER),
    Operation("router", "receive", "projections", "awaitDatabases", "Which have applied it?", how=_LEADER),
    Operation("router", "receive", "webhookStarts", "passWebhookStarts", "Not a notification", how=_LEADER),
    Operation("router", "send", "controlLeases", "holdControlLease", "Stop what runs, for `force`", how=_CAS),
)
