"""Channels, messages and operations of the AsyncAPI document: who sends what to whom, role by role.

Roles are the processes of architecture.md: `client` is whoever uses the SDK over NATS (and the `tether` command),
`operator` the `tether` command as it looks after a set.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import TypeAdapter

from tether import limits, subjects
from tether.ids import ExecutionTarget, default_workspace, execution_id, response_id, sandbox_id
from tether_agent.providers import Status, Stopped
from tether_schemas import asyncapi_parts as p
from tether_schemas.asyncapi_parts import Channel, Json, Message, Operation

_MSG_ID: Final = "Nats-Msg-Id"
_EXPECT: Final = "Nats-Expected-Last-Subject-Sequence"
_TTL: Final = "Nats-TTL"
_KV_OPERATION: Final = "KV-Operation"
_CAS: Final = "Compare-and-set: the sequence of the subject's last message as the writer knows it, 0 for none"
_REVISION: Final = "Compare-and-set: the revision that is replaced; 0 where the key must not exist"
_TRACE: Final = {"traceparent": "W3C Trace Context, where traces are on"}

ROLES: Final = {
    "client": "Whoever uses the SDK over NATS, and the `tether` command",
    "operator": "The `tether` command as it starts, ends and checks a set",
    "backend": "HTTP, event streams and the projection",
    "router": "Admission of prompts, the owner record",
    "agentService": "Sandboxes and their collectors",
    "collector": "The CLI's process, its event log, its controls",
    "server": "nats-server by itself",
}

# --- what the examples show: one conversation ---

_T, _C, _R = "default", "garden-42", "req-1"
_W: Final = default_workspace(_C)
_TARGET: Final = ExecutionTarget(
    tenant=_T,
    workspace=_W,
    conversation=_C,
    response=response_id(_T, _R, 1),
    response_generation=1,
    execution=execution_id(_T, _R, 1),
    execution_generation=1,
    sandbox=sandbox_id(_T, _W),
).model_dump(mode="json", exclude_none=True)
_CONTENT: Final = [{"type": "text", "text": "look after the garden"}]
_PROMPT: Final = {
    "v": 1,
    "tenant": _T,
    "workspace": _W,
    "conversation": _C,
    "request_id": _R,
    "attempt": 1,
    "content": _CONTENT,
    "agent": {"kind": "scripted"},
    "mode": "auto",
    "author": "me",
}
_START: Final = {
    "v": 1,
    "kind": "start",
    "control": "ctl_0c5d",
    "target": _TARGET,
    "owner_revision": 41,
    "request_id": _R,
    "attempt": 1,
    "content": _CONTENT,
    "agent": {"kind": "scripted"},
}
_FRAME: Final = {
    "v": 1,
    "first": 7,
    "last": 9,
    "pos": {"record": 12, "index": 0},
    "events": [
        {
            "ordinal": 7,
            "last": 8,
            "at": 1767225600700,
            "type": "text.delta",
            "body": {"segment": "s1", "text": "The roses need water.", "offset": 0},
        },
        {
            "ordinal": 9,
            "at": 1767225600900,
            "type": "text.completed",
            "body": {"segment": "s1", "text": "The roses need water."},
        },
    ],
}
_NOTE: Final = {
    "v": 1,
    "id": f"{_R}/prompt.admitted",
    "generation": 1,
    "at": 1767225600000,
    "type": "prompt.admitted",
    "body": {"request": _R, "prompt_sequence": 17, "content": _CONTENT, "author": "me"},
}
_CONTROL: Final = {
    "v": 1,
    "control": "ctl-7",
    "verb": "answer",
    "target": _TARGET,
    "payload": {"interaction": "r1-9f3a2c1b", "decision": "allow"},
}
_REPLY: Final = {"v": 1, "control": "ctl-7", "verb": "answer", "status": "delivered"}


def _object(required: list[str], properties: dict[str, Any]) -> Json:
    return {"type": "object", "required": required, "properties": properties}


def _answer(properties: dict[str, Any]) -> Json:
    """An answer of the agent service: its fields, or a problem."""
    return {**_object(["v"], {"v": {"const": 1}, **properties, "problem": {"$ref": "schemas/problem.json"}})}


def _list_of(model: type[Any]) -> Json:
    return {"type": "array", "items": TypeAdapter(model).json_schema()}


_RECORD_HEADERS: Final = {_EXPECT: _REVISION, _KV_OPERATION: "`DEL` or `PURGE`: the key is gone; the payload is empty"}

MESSAGES: Final[dict[str, Message]] = {
    message.name: message
    for message in (
        Message(
            "prompt",
            f"A user's message; at most {limits.PROMPT_BYTES_MAX} bytes. The same id again is not stored again",
            "prompt",
            {_MSG_ID: "`{tenant}/{request_id}/{digest}/{attempt}`", **_TRACE},
            (_MSG_ID,),
            _PROMPT,
        ),
        Message(
            "startCommand",
            "Run this prompt as this execution, once",
            "start-command",
            {_MSG_ID: "the control id", **_TRACE},
            (_MSG_ID,),
            _START,
        ),
        Message(
            "frame",
            f"Events `first..last` of an execution; at most {limits.FRAME_BYTES_MAX} bytes unless one event is larger",
            "frame",
            {_MSG_ID: "`{conversation}/{execution}/{first}-{last}/{digest}`, `/r1`… appended", _EXPECT: _CAS, **_TRACE},
            (_MSG_ID, _EXPECT),
            _FRAME,
        ),
        Message(
            "conversationEvent",
            "One event of the conversation itself; idempotent by its id",
            "conversation-event",
            {_MSG_ID: "`{conversation}/_/{id}`, where its writer sets it", _EXPECT: _CAS, **_TRACE},
            (_EXPECT,),
            _NOTE,
        ),
        *(
            Message(
                f"live{name[0].upper()}{name[1:]}",
                f"The copy of a stored {name}, as the server republishes it",
                schema,
                {
                    "Nats-Stream": "the stream that stored it",
                    "Nats-Subject": "the subject that it was stored under",
                    "Nats-Sequence": "its sequence: a hint, identity is (execution, ordinal)",
                    "Nats-Last-Sequence": "sequence of the message before it on this subject, 0 for none",
                    "Nats-Time-Stamp": "when it was stored: what a cursor's tag is made of",
                },
                ("Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Last-Sequence", "Nats-Time-Stamp"),
                example,
            )
            for name, schema, example in (
                ("frame", "frame", _FRAME),
                ("conversationEvent", "conversation-event", _NOTE),
            )
        ),
        Message("controlRequest", "One control or question", "control-request", _TRACE, (), _CONTROL),
        Message("controlReply", "The receipt as it stands", "control-reply", example=_REPLY),
        Message(
            "blobChunk",
            f"{limits.BLOB_CHUNK_BYTES} bytes of the content, the last one fewer",
            None,
            {_EXPECT: "0: each part is stored once"},
            (_EXPECT,),
        ),
        Message(
            "quarantineEntry",
            "A message of the log that readers refuse, and why",
            "quarantine-entry",
            example={
                "v": 1,
                "reason": "type",
                "detail": "events.type: response.created is not an execution's to say",
                "stream": "EVENTS_acme",
                "subject": "tether.event.acme.checkout.c-1.exe_1",
                "tenant": "acme",
                "workspace": "checkout",
                "conversation": "c-1",
                "execution": "exe_1",
                "sequence": 207,
                "stored_at": 1_790_000_000_000,
                "bytes": 9,
                "digest": "0" * 64,
                "prefix": "eyJ2IjoxfQ==",
                "last_sequence": 207,
            },
        ),
        Message(
            "blobManifest",
            "Stored last: a blob whose manifest can be read is whole",
            "blob-manifest",
            {_EXPECT: "0: each part is stored once"},
            (_EXPECT,),
        ),
        Message("ownerRecord", "Which execution owns the conversation", "owner-record", _RECORD_HEADERS, (_EXPECT,)),
        Message("requestRecord", "What is known of a request id", "request-record", _RECORD_HEADERS, (_EXPECT,)),
        Message("conversationRecord", "The workspace, for good", "conversation-record", _RECORD_HEADERS, (_EXPECT,)),
        Message(
            "allowanceRecord",
            "How far an allowance of prompts is used up",
            "allowance-record",
            {**_RECORD_HEADERS, _TTL: "120s"},
            (_EXPECT,),
        ),
        Message("runningRecord", "Who holds a place to run", "running-record", _RECORD_HEADERS, (_EXPECT,)),
        Message("sandboxRecord", "A sandbox's life cycle", "sandbox-record", _RECORD_HEADERS, (_EXPECT,)),
        Message(
            "registration",
            "A collector that lives, and what it can",
            "registration",
            {**_RECORD_HEADERS, _TTL: f"{limits.REGISTRATION_TTL_S}s"},
            (_EXPECT,),
        ),
        Message(
            "lease",
            "Who holds the key. The token is the revision at acquisition: the first value has none, renewals carry it",
            _object(
                ["holder", "op"],
                {
                    "holder": {"type": "string"},
                    "token": {"type": "integer"},
                    "execution": {"type": "string"},
                    "op": {"type": "string"},
                },
            ),
            {**_RECORD_HEADERS, _TTL: "whole seconds; the holder renews in time"},
            (_EXPECT, _TTL),
            {"holder": "backend-5f0c7d1e2a3b", "token": 1201, "op": "6f1d"},
        ),
        Message(
            "batchNumber",
            "Number of the last batch that the database committed; a database behind it is an older copy",
            _object(["number", "op"], {"number": {"type": "integer", "minimum": 0}, "op": {"type": "string"}}),
            _RECORD_HEADERS,
            (_EXPECT,),
            {"number": 4711, "op": "6f1d"},
        ),
        Message(
            "notification", "A webhook's notification and how far it is", "notification", _RECORD_HEADERS, (_EXPECT,)
        ),
        Message(
            "webhookStart",
            "Unix milliseconds of an endpoint's first start",
            _object(["since", "op"], {"since": {"type": "integer", "minimum": 0}, "op": {"type": "string"}}),
            _RECORD_HEADERS,
            (_EXPECT,),
            {"since": 1767225600000, "op": "6f1d"},
        ),
        Message("sandboxesRequest", "Which sandboxes are there?", "agent-sandboxes-request", example={}),
        Message("workspaceRequest", "Use this directory for a workspace", "agent-workspace-request"),
        Message("stopRequest", "End a sandbox, or all", "agent-stop-request", example={"all": True}),
        Message("sandboxesReply", "Sandboxes, or a problem", _answer({"sandboxes": _list_of(Status)})),
        Message("workspaceReply", "The path, or a problem", _answer({"path": {"type": "string"}})),
        Message("stopReply", "What was ended, or a problem", _answer({"stopped": _list_of(Stopped)})),
    )
}

_EVENT: Final = subjects.event(p.TENANT, p.WORKSPACE, p.CONVERSATION, p.EXECUTION)
_OWN: Final = subjects.event(p.TENANT, p.WORKSPACE, p.CONVERSATION, limits.EXECUTION_TOKEN_CONVERSATION)
_LOG: Final = subjects.events_stream(p.TENANT)
_BLOBS: Final = subjects.blobs_stream(p.TENANT)
_QUARANTINE: Final = subjects.quarantine_stream(p.TENANT)
_CHUNK: Final = subjects.blob(p.TENANT, p.WORKSPACE, "artifact", p.DIGEST, p.PART).replace(".artifact.", ".{kind}.")


def _bucket(id_: str, name: str, key: str, title: str, description: str, message: str) -> Channel:
    return Channel(id_, p.kv(name, key), title, description, (message,), f"KV_{name}")


_OWNER_KEY: Final = subjects.owner_key(p.TENANT, p.WORKSPACE, p.CONVERSATION)

CHANNELS: Final[tuple[Channel, ...]] = (
    Channel(
        "prompts",
        subjects.prompt(p.TENANT, p.WORKSPACE, p.CONVERSATION),
        "Prompts that wait",
        "A work queue, in order per conversation; the ack of a publish means durably accepted.",
        ("prompt",),
        subjects.PROMPTS_STREAM,
    ),
    Channel(
        "commands",
        subjects.command(p.TENANT, p.WORKSPACE),
        "Commands to agent services",
        "A work queue; each command is driven to a receipt of the collector, then acked.",
        ("startCommand",),
        subjects.COMMANDS_STREAM,
    ),
    Channel(
        "executionEvents",
        _EVENT,
        "An execution's log",
        "Frames with ordinals from 1 without holes, one writer, one in flight. `execution.ended` is the last event.",
        ("frame",),
        _LOG,
    ),
    Channel(
        "conversationEvents",
        _OWN,
        "A conversation's own log",
        "One event a message; several writers, each by compare-and-set.",
        ("conversationEvent",),
        _LOG,
    ),
    Channel(
        "liveExecutionEvents",
        _EVENT.replace("tether.event.", "tether.live."),
        "An execution's log, live",
        "Republished by the server once a frame is stored. No durability: what is missed is read from the log.",
        ("liveFrame",),
        None,
        _LOG,
    ),
    Channel(
        "liveConversationEvents",
        _OWN.replace("tether.event.", "tether.live."),
        "A conversation's own log, live",
        "Republished by the server once an event is stored.",
        ("liveConversationEvent",),
        None,
        _LOG,
    ),
    Channel(
        "control",
        subjects.control(p.TENANT, p.WORKSPACE, p.VERB),
        "Controls of a sandbox",
        "Core request and reply: a lost answer reads as `unknown`, `receipt` tells later. The same control id with the "
        "same payload gets the first receipt.",
        ("controlRequest",),
    ),
    Channel(
        "controlReply",
        None,
        "The reply subject of a control",
        "`tether.reply.{tenant}.{workspace}.{asker}.{token}`, the last two chosen by who asks: a sandbox may answer "
        "for its own workspace and nowhere else.",
        ("controlReply",),
    ),
    *(
        Channel(
            f"agent{verb.capitalize()}",
            subjects.agent(verb),
            f"Agent services: {verb}",
            "Core request and reply, one of the agent services answers.",
            (f"{verb}Request",),
        )
        for verb in ("sandboxes", "workspace", "stop")
    ),
    *(
        Channel(
            f"agent{verb.capitalize()}Reply",
            None,
            f"The reply subject of {verb}",
            "Chosen by who asks.",
            (f"{verb}Reply",),
        )
        for verb in ("sandboxes", "workspace", "stop")
    ),
    Channel(
        "blobParts",
        _CHUNK,
        "Blobs in parts",
        "Chunks `0`, `1`, … and then the manifest, whose part is `manifest`.",
        ("blobChunk", "blobManifest"),
        _BLOBS,
    ),
    Channel(
        "quarantine",
        "tether.quarantine." + _EVENT.removeprefix("tether.event."),
        "Quarantine",
        "What of the log is refused, with its reason: the same tokens as the message's subject.",
        ("quarantineEntry",),
        _QUARANTINE,
    ),
    _bucket(
        "owners", subjects.OWNERS, _OWNER_KEY, "Owner records", "One per conversation; routers decide by it.",
        "ownerRecord",
    ),
    _bucket(
        "requests", subjects.REQUESTS, subjects.request_key(p.TENANT, p.REQUEST), "Request memory",
        "Makes a repeated request the same request.", "requestRecord",
    ),
    _bucket(
        "controlLeases", subjects.LEASES, subjects.lease_key(p.TENANT, p.WORKSPACE, p.CONVERSATION), "Control leases",
        "Whose user-driven controls count.", "lease",
    ),
    _bucket(
        "projectorLeases", subjects.LEASES,
        f"{subjects.projector_lease_key(p.TENANT, 0).removesuffix('.0')}.XSHARD.{p.DATABASE}",
        "Projector leases", "Which backend projects into a database.", "lease",
    ),
    _bucket(
        "sandboxes", subjects.SANDBOXES, subjects.sandbox_key(p.TENANT, p.WORKSPACE), "Sandboxes",
        "Life-cycle records, written by the agent service alone.", "sandboxRecord",
    ),
    _bucket(
        "registrations", subjects.SANDBOXES, subjects.registration_key(p.TENANT, p.WORKSPACE, p.SANDBOX),
        "Registrations", "Written by the collector alone; gone when it does not renew.", "registration",
    ),
    _bucket(
        "projections", subjects.PROJECTIONS, subjects.projection_key(p.DATABASE, p.TENANT, 0).replace(".0", ".XSHARD"),
        "Projection batch numbers", "Proves that a database is the one that the consumer's acks are of.",
        "batchNumber",
    ),
    _bucket(
        "conversations", subjects.CONVERSATIONS, subjects.conversation_key(p.TENANT, p.CONVERSATION), "Conversations",
        "Conversation to workspace, created once.", "conversationRecord",
    ),
    _bucket(
        "tenantAllowances", subjects.QUOTAS, subjects.prompt_rate_key(p.TENANT), "Allowances of tenants",
        "Prompts a minute, exact over all backends; where a limit is set.", "allowanceRecord",
    ),
    _bucket(
        "workspaceAllowances", subjects.QUOTAS, subjects.prompt_rate_key(p.TENANT, p.WORKSPACE),
        "Allowances of workspaces", "Prompts a minute, exact over all backends; where a limit is set.",
        "allowanceRecord",
    ),
    _bucket(
        "tenantPlaces", subjects.QUOTAS, subjects.running_key(p.TENANT), "Places of tenants",
        "Conversations of a tenant that run; where a limit is set.", "runningRecord",
    ),
    _bucket(
        "allPlaces", subjects.QUOTAS, subjects.running_key(None), "Places of the set",
        "Conversations that run, of all tenants; where a limit is set.", "runningRecord",
    ),
    _bucket(
        "webhookLeases", subjects.LEASES, subjects.webhooks_lease_key(p.TENANT), "Webhook leases",
        "Which backend sends a tenant's notifications.", "lease",
    ),
    _bucket(
        "notifications", subjects.NOTIFICATIONS, subjects.notification_key(p.TENANT, p.ENDPOINT, p.NOTIFICATION),
        "Webhook outbox", "One record per notification: pending, delivered or dead.", "notification",
    ),
    _bucket(
        "webhookStarts", subjects.NOTIFICATIONS, subjects.webhook_start_key(p.TENANT, p.ENDPOINT),
        "Webhook starts", "From when on an endpoint is notified, created once.", "webhookStart",
    ),
)  # fmt: skip

_LEADER: Final = "last message of the key, read from the stream's leader"
_DIRECT: Final = "direct get"
_WRITE: Final = "compare-and-set; an equal `op` after a doubtful answer is success"
_BATCH: Final = "batch direct get from a sequence; no consumer"
_PROJECTION: Final = f"projection-{p.DATABASE}-0"


def _core(role: str, does: str, channel: str, summary: str, reply: str) -> Operation:
    return Operation(role, "send", channel, does, summary, reply=reply, how="request; no answer reads as unknown")


def _store(role: str, does: str, channel: str, summary: str) -> Operation:
    return Operation(role, "send", channel, does, summary, how=_WRITE)


def _look(role: str, does: str, channel: str, summary: str, how: str = _LEADER) -> Operation:
    return Operation(role, "receive", channel, does, summary, how=how)


_SENDS: Final = "publish with ack; the same bytes again while it is undecided"
_LISTENS: Final = "core subscription"

OPERATIONS: Final[tuple[Operation, ...]] = (
    # client
    Operation("client", "send", "prompts", "submitPrompt", "Submit a prompt", how=_SENDS),
    _core("client", "control", "control", "Answer, interject, interrupt, stop, ask", "controlReply"),
    Operation("client", "receive", "liveExecutionEvents", "followExecutions", "Follow executions live", how=_LISTENS),
    Operation(
        "client", "receive", "liveConversationEvents", "followConversation", "Follow a conversation live", how=_LISTENS
    ),
    _look("client", "readExecutionLog", "executionEvents", "Replay from a cursor", _BATCH),
    _look("client", "readConversationLog", "conversationEvents", "Replay from a cursor", _BATCH),
    Operation(
        "client", "receive", "executionEvents", "followDurably", "Follow with a durable reader of one's own",
        durable="NAME",
    ),
    _look("client", "readRequest", "requests", "What became of a request"),
    _look("client", "readOwner", "owners", "Which execution is active"),
    _look("client", "readConversation", "conversations", "Which workspace it lives in"),
    _look("client", "readSandboxes", "sandboxes", "List sandboxes", _BATCH),
    _look("client", "readRegistrations", "registrations", "What a collector can", _DIRECT),
    _look("client", "readBlob", "blobParts", "Read large content", _BATCH),
    # operator
    _core("operator", "listSandboxes", "agentSandboxes", "List sandboxes", "agentSandboxesReply"),
    _core("operator", "assignWorkspace", "agentWorkspace", "Use a directory as a workspace", "agentWorkspaceReply"),
    _core("operator", "stopSandboxes", "agentStop", "End sandboxes", "agentStopReply"),
    # backend
    Operation("backend", "send", "prompts", "submitPrompt", "Submit what HTTP was given", how=_SENDS),
    _look("backend", "readPrompts", "prompts", "Does a prompt of a conversation wait?", _DIRECT),
    _core("backend", "control", "control", "Answer, interrupt, stop, snapshot, receipt", "controlReply"),
    Operation("backend", "receive", "liveExecutionEvents", "feedExecutions", "Feed event streams", how=_LISTENS),
    Operation(
        "backend", "receive", "liveConversationEvents", "feedConversations", "Feed event streams", how=_LISTENS
    ),
    Operation(
        "backend", "receive", "executionEvents", "projectExecutions", "Project into the database",
        durable=_PROJECTION,
    ),
    Operation(
        "backend", "receive", "conversationEvents", "projectConversations", "Project into the database",
        durable=_PROJECTION,
    ),
    _look("backend", "readRequest", "requests", "What became of a request"),
    _look("backend", "readOwner", "owners", "The target of a control"),
    _look("backend", "readConversation", "conversations", "Which workspace it lives in"),
    _look("backend", "readSandboxes", "sandboxes", "List sandboxes", _BATCH),
    _look("backend", "readRegistrations", "registrations", "What a collector can", _LEADER),
    _store("backend", "storeQuarantine", "quarantine", "What its projection does not believe"),
    _look("backend", "readQuarantine", "quarantine", "Show it to operators", _BATCH),
    _look("backend", "readBlob", "blobParts", "Read a snapshot that is too large for a reply", _BATCH),
    _store("backend", "holdProjectorLease", "projectorLeases", "One projector per database"),
    _store("backend", "holdControlLease", "controlLeases", "Controls of this backend's users count"),
    _look("backend", "readTenantAllowance", "tenantAllowances", "How much of it is used?"),
    _look("backend", "readWorkspaceAllowance", "workspaceAllowances", "How much of it is used?"),
    _store("backend", "chargeTenant", "tenantAllowances", "Before a prompt is stored"),
    _store("backend", "chargeWorkspace", "workspaceAllowances", "Before a prompt is stored"),
    _store("backend", "noteBatch", "projections", "After each commit, before the ack"),
    Operation(
        "backend", "receive", "executionEvents", "watchExecutions", "Look for what webhooks are to tell",
        durable=subjects.WEBHOOKS_DURABLE,
    ),
    Operation(
        "backend", "receive", "conversationEvents", "watchConversations", "Look for what webhooks are to tell",
        durable=subjects.WEBHOOKS_DURABLE,
    ),
    _store("backend", "holdWebhookLease", "webhookLeases", "One sender per tenant"),
    _store("backend", "writeNotification", "notifications", "Note what is to be told, and what became of it"),
    _store("backend", "noteWebhookStart", "webhookStarts", "Note from when on an endpoint is notified"),
    _look("backend", "readWebhookStart", "webhookStarts", "From when on is it notified?"),
    _look("backend", "readNotifications", "notifications", "What is due"),
    _look("backend", "proveDatabase", "projections", "Is this database an older copy?"),
    # router
    Operation(
        "router", "receive", "prompts", "admitPrompts", "Admit the conversation's oldest prompt",
        durable=subjects.ROUTER_DURABLE,
    ),
    Operation("router", "send", "commands", "startExecution", "Have an execution started", how=_SENDS),
    _core("router", "control", "control", "Interject into a running turn, ask for receipts", "controlReply"),
    _store("router", "writeConversationLog", "conversationEvents", "Tell what became of a prompt"),
    Operation("router", "receive", "liveExecutionEvents", "followExecutions", "See starts and ends", how=_LISTENS),
    _look("router", "readExecutionLog", "executionEvents", "Before each decision", _BATCH),
    _look("router", "readConversationLog", "conversationEvents", "What an admission wrote before", _BATCH),
    _store("router", "writeOwner", "owners", "Move the owner record"),
    _look("router", "readOwner", "owners", "Before each decision, and in a sweep"),
    _look("router", "readTenantPlaces", "tenantPlaces", "Is one free?"),
    _look("router", "readPlaces", "allPlaces", "Is one free?"),
    _store("router", "takeTenantPlace", "tenantPlaces", "Before an execution begins"),
    _store("router", "takePlace", "allPlaces", "Before an execution begins"),
    _store("router", "writeRequest", "requests", "Remember a request's outcome"),
    _look("router", "readRequest", "requests", "New, same again, or a conflict?"),
    _store("router", "bindConversation", "conversations", "Fix the conversation's workspace"),
    _look("router", "readConversation", "conversations", "Is it another workspace's?"),
    _look("router", "readSandbox", "sandboxes", "Before a takeover: what the provider says"),
    _look("router", "readRegistrations", "registrations", "Before a takeover: who can stop the execution"),
    # agent service
    Operation(
        "agentService", "receive", "commands", "driveCommands", "Drive each command to a receipt",
        durable=subjects.AGENT_DURABLE,
    ),
    _core("agentService", "start", "control", "Hand a start to the collector", "controlReply"),
    _look("agentService", "readOwner", "owners", "Is the start still wanted?"),
    _store("agentService", "endUnstarted", "executionEvents", "Append never_started where the claim would be"),
    _look("agentService", "readExecutionLog", "executionEvents", "Is the execution claimed?", _DIRECT),
    _store("agentService", "tellFailure", "conversationEvents", "Say that a start was given up"),
    _look("agentService", "readConversationLog", "conversationEvents", "Is it told already?", _BATCH),
    _store("agentService", "writeSandbox", "sandboxes", "Move the life-cycle record"),
    _look("agentService", "readSandbox", "sandboxes", "Before each move"),
    _look("agentService", "readRegistration", "registrations", "Has the collector registered?"),
    _look("agentService", "readBlobQuota", "blobParts", "A new sandbox is told it", "the stream's state"),
    *(
        Operation(
            "agentService", "receive", f"agent{verb.capitalize()}", f"answer{verb.capitalize()}",
            f"Answer {verb}", queue="agent-service", reply=f"agent{verb.capitalize()}Reply", how="request and reply",
        )
        for verb in ("sandboxes", "workspace", "stop")
    ),
    # collector
    Operation(
        "collector", "receive", "control", "serveControls", "Serve the sandbox's controls", reply="controlReply",
        how="request and reply",
    ),
    Operation(
        "collector", "send", "executionEvents", "writeFrames", "Claim, write and end an execution's log",
        how="one frame in flight, compare-and-set on its own subject",
    ),
    _look("collector", "readExecutionLog", "executionEvents", "The log is the writer's base", _DIRECT),
    _look("collector", "readOwner", "owners", "Still the owner's target?", _DIRECT),
    _look("collector", "readLease", "controlLeases", "Does the sender of a control hold the lease?", _DIRECT),
    _store("collector", "register", "registrations", "Say what runs here, and renew it"),
    _store("collector", "storeBlob", "blobParts", "Large outputs and snapshots"),
    # server
    Operation(
        "server", "send", "liveExecutionEvents", "republishFrames", "Copy each stored frame", how="republish"
    ),
    Operation(
        "server", "send", "liveConversationEvents", "republishEvents", "Copy each stored event", how="republish"
    ),
)  # fmt: skip
