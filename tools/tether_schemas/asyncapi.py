"""The AsyncAPI 3.0 document: subjects and buckets as channels, roles' doings as operations, JetStream's facts beside.

AsyncAPI has no JetStream binding, so `x-jetstream` says how a channel is stored and `x-how` how an operation reads or
writes; both come from `tether.topology`. Payloads are the files of `docs/schemas`, by relative reference.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any, Final

from tether import topology
from tether_schemas import asyncapi_data as data
from tether_schemas import asyncapi_deletions as deletions
from tether_schemas import asyncapi_sandboxes as sandboxes
from tether_schemas.asyncapi_data import ROLES
from tether_schemas.asyncapi_parts import (
    PARAMETERS,
    Channel,
    Json,
    Operation,
    named,
    stream_facts,
    stream_specs,
)

MESSAGES: Final = {
    **data.MESSAGES,
    **{message.name: message for message in (*sandboxes.MESSAGES, *deletions.MESSAGES)},
}
CHANNELS: Final = (*data.CHANNELS, *sandboxes.CHANNELS, *deletions.CHANNELS)
OPERATIONS: Final = (*data.OPERATIONS, *sandboxes.OPERATIONS, *deletions.OPERATIONS)
_DESCRIPTION: Final = (
    "What Tether's processes say to each other, and what anyone may read, on one NATS JetStream domain. Every decision "
    "lives in a stream or bucket; core request and reply carries only questions whose lost answer reads as `unknown`. "
    "`x-jetstream` of a channel is the stream or bucket that stores it, `x-role` of an operation the process, `x-how` "
    "how it reads or writes. Collectors and agent services also answer NATS's own `$SRV.PING|INFO|STATS`, so "
    "`nats micro ls` shows them. Rules and reasons: protocol.md."
)


def document() -> Json:
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Tether on the bus",
            "version": importlib.metadata.version("tether"),
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0"},
            "tags": [{"name": name, "description": text} for name, text in ROLES.items()],
            "x-topology-version": topology.VERSION,
        },
        "defaultContentType": "application/json",
        "servers": {
            "local": {
                "host": "127.0.0.1:4222",
                "protocol": "nats",
                "description": "nats-server with JetStream; `tether nats-context` writes a context for the nats CLI",
            }
        },
        "channels": {channel.id: _channel(channel) for channel in CHANNELS},
        "operations": {operation.id: _operation(operation) for operation in OPERATIONS},
        "components": {
            "messages": {name: message.render() for name, message in MESSAGES.items()},
            "parameters": dict(PARAMETERS),
        },
    }


def _channel(channel: Channel) -> Json:
    made: Json = {
        "address": None if channel.address is None else named(channel.address),
        "title": channel.title,
        "description": channel.description,
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in channel.messages},
    }
    if channel.parameters:
        made["parameters"] = {name: {"$ref": f"#/components/parameters/{name}"} for name in channel.parameters}
    specs = {spec.name: spec for spec in stream_specs()}
    if channel.stream is not None:
        made["x-jetstream"] = stream_facts(specs[channel.stream])
    elif channel.republished_from is not None:
        made["x-jetstream"] = {"republishedFrom": named(channel.republished_from)}
    return made


def _operation(operation: Operation) -> Json:
    messages = operation.messages or next(each.messages for each in CHANNELS if each.id == operation.channel)
    made: Json = {
        "action": operation.action,
        "channel": {"$ref": f"#/channels/{operation.channel}"},
        "title": operation.summary,
        "summary": f"{operation.role}: {operation.summary}",
        "tags": [{"name": operation.role}],
        "messages": [{"$ref": f"#/channels/{operation.channel}/messages/{name}"} for name in messages],
        "x-role": operation.role,
    }
    if operation.reply is not None:
        reply = next(each for each in CHANNELS if each.id == operation.reply)
        made["reply"] = {
            "channel": {"$ref": f"#/channels/{reply.id}"},
            "messages": [{"$ref": f"#/channels/{reply.id}/messages/{name}"} for name in reply.messages],
        }
    if operation.queue is not None:
        made["bindings"] = {"nats": {"queue": operation.queue, "bindingVersion": "0.1.0"}}
    how: dict[str, Any] = {}
    if operation.durable is not None:
        how["consumer"] = named(operation.durable)
    if operation.how is not None:
        how["by"] = operation.how
    if how:
        made["x-how"] = how
    return made
