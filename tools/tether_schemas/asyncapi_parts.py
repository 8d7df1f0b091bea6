"""The pieces that the AsyncAPI document is made of, and the addresses as `tether.subjects` builds them.

Addresses are built by the product's own builders from marker tokens, so a subject that changes there changes here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tether import topology
from tether.control import VERBS
from tether.ids import TOKEN_PATTERN
from tether.topology import ConsumerSpec, StreamSpec

Json = dict[str, Any]
Action = Literal["send", "receive"]

# Marker token → parameter. A marker is a valid token and occurs in no fixed part of an address.
MARKERS: Final = {
    "XTENANT": "tenant",
    "XWORKSPACE": "workspace",
    "XCONVERSATION": "conversation",
    "XEXECUTION": "execution",
    "XVERB": "verb",
    "XDIGEST": "digest",
    "XPART": "part",
    "XREQUEST": "request",
    "XSANDBOX": "sandbox",
    "XDATABASE": "database",
    "XSHARD": "shard",
    "XENDPOINT": "endpoint",
    "XNOTIFICATION": "notification",
}
TENANT, WORKSPACE, CONVERSATION, EXECUTION = "XTENANT", "XWORKSPACE", "XCONVERSATION", "XEXECUTION"
ENDPOINT, NOTIFICATION = "XENDPOINT", "XNOTIFICATION"
VERB, DIGEST, PART, REQUEST, SANDBOX, DATABASE = "XVERB", "XDIGEST", "XPART", "XREQUEST", "XSANDBOX", "XDATABASE"

PARAMETERS: Final[dict[str, Json]] = {
    "tenant": {"description": "Who is served; a token of HTTP names it, a NATS account or user confines it"},
    "workspace": {"description": "The volume and its sandbox; fixed by the conversation's first prompt"},
    "conversation": {"description": "Chosen by its client"},
    "execution": {"description": "One run of a CLI; derived from tenant, request id and attempt"},
    "verb": {"description": "What is asked", "enum": list(VERBS)},
    "kind": {"description": "What the blob is for", "enum": ["artifact", "checkpoint"]},
    "digest": {"description": "sha-256 of the content, hex"},
    "part": {"description": "Number of the chunk from 0; the last message has `manifest`"},
    "request": {"description": "The request id of the prompt"},
    "sandbox": {"description": "Derived from tenant and workspace"},
    "database": {"description": "Drawn when a projection database is made"},
    "shard": {"description": "Shard of the projection, from 0"},
    "endpoint": {"description": "Name of a webhook endpoint in TETHER_WEBHOOKS_FILE"},
    "notification": {"description": "Derived from the event and the endpoint"},
}


def named(text: str) -> str:
    """Marker tokens as `{parameter}`."""
    for marker, name in MARKERS.items():
        text = text.replace(marker, f"{{{name}}}")
    return text


def kv(bucket: str, key: str) -> str:
    return f"$KV.{bucket}.{key}"


@dataclass(frozen=True, slots=True)
class Message:
    """`schema`: a file of docs/schemas, or the schema itself; None: bytes. `headers` by name with their meaning."""

    name: str
    summary: str
    schema: str | Mapping[str, Any] | None
    headers: Mapping[str, str] = field(default_factory=dict)
    required_headers: Sequence[str] = ()
    example: Mapping[str, Any] | None = None

    def render(self) -> Json:
        made: Json = {"name": self.name, "title": self.name, "summary": self.summary}
        if self.schema is None:
            made["contentType"] = "application/octet-stream"
            made["payload"] = {"type": "string", "format": "binary"}
        else:
            made["contentType"] = "application/json"
            schema = {"$ref": f"schemas/{self.schema}.json"} if isinstance(self.schema, str) else dict(self.schema)
            made["payload"] = {"schemaFormat": "application/schema+json;version=draft-2020-12", "schema": schema}
        if self.headers:
            made["headers"] = {
                "type": "object",
                "required": list(self.required_headers),
                "properties": {name: {"type": "string", "description": text} for name, text in self.headers.items()},
            }
        if self.example is not None:
            made["examples"] = [{"name": "one", "payload": dict(self.example)}]
        return made


@dataclass(frozen=True, slots=True)
class Channel:
    """`address` of marker tokens; None: known at run time only. `stream`: the name of the stream that stores it."""

    id: str
    address: str | None
    title: str
    description: str
    messages: Sequence[str]
    stream: str | None = None
    republished_from: str | None = None

    @property
    def parameters(self) -> list[str]:
        text = named(self.address or "")
        return [name for name in PARAMETERS if f"{{{name}}}" in text]


@dataclass(frozen=True, slots=True)
class Operation:
    """What one role does with a channel. `durable`: the consumer that it reads with. `how`: how it reads or writes."""

    role: str
    action: Action
    channel: str
    does: str
    summary: str
    messages: Sequence[str] = ()
    durable: str | None = None
    queue: str | None = None
    reply: str | None = None
    how: str | None = None

    @property
    def id(self) -> str:
        return f"{self.role}.{self.does}"


# --- JetStream facts ---


def stream_specs() -> list[StreamSpec]:
    """Every stream, with the tenant's as a marker."""
    return [*topology.base().streams, *topology.tenant(TENANT).streams]


def consumer_specs() -> list[ConsumerSpec]:
    everything = f"tether.event.{TENANT}.{WORKSPACE}.{CONVERSATION}.*"
    return [
        *topology.base().consumers,
        topology.projection(TENANT, DATABASE, 0),
        topology.webhooks(TENANT),
        topology.reader(TENANT, "NAME", everything),
    ]


def stream_facts(spec: StreamSpec) -> Json:
    """What a reader or an operator must know of a stream; limits that are not set are left out."""
    made: Json = {
        "stream": named(spec.name),
        "subjects": [named(subject) for subject in spec.subjects],
        "description": named(spec.description),
        "kind": dict(spec.metadata).get("tether_kind"),
        "storage": "file",
        "retention": spec.retention,
        "discard": "new" if spec.discard_new else "old",
        "allowDirect": spec.allow_direct,
        "duplicateWindowSeconds": spec.duplicate_window_s,
    }
    limited = {
        "maxAgeSeconds": spec.max_age_s,
        "maxBytes": max(0, spec.max_bytes),
        "maxMessagesPerSubject": max(0, spec.max_msgs_per_subject),
        "maxMessageBytes": max(0, spec.max_msg_size_bytes),
    }
    made |= {name: value for name, value in limited.items() if value}
    flags = {
        "discardNewPerSubject": spec.discard_new_per_subject,
        "allowMessageTtl": spec.allow_msg_ttl,
        "allowRollup": spec.allow_rollup,
        "denyDelete": spec.deny_delete,
    }
    made |= {name: True for name, is_set in flags.items() if is_set}
    if spec.republish is not None:
        made["republish"] = {
            "source": named(spec.republish.source),
            "destination": named(spec.republish.destination),
        }
    consumers = [consumer_facts(each) for each in consumer_specs() if each.stream == spec.name]
    return {**made, "consumers": consumers} if consumers else made


def consumer_facts(spec: ConsumerSpec) -> Json:
    made: Json = {
        "durable": named(spec.durable),
        "description": named(spec.description),
        "kind": "pull",
        "ack": "explicit",
        "ackWaitSeconds": spec.ack_wait_s,
        "maxAckPending": spec.max_ack_pending,
        "maxDeliver": spec.max_deliver,
    }
    return {**made, "filterSubject": named(spec.filter_subject)} if spec.filter_subject else made


TOKEN_SCHEMA: Final[Json] = {"type": "string", "pattern": TOKEN_PATTERN}


def bucket_of(channel: Channel) -> str | None:
    """The bucket of a channel's address."""
    if channel.address is None or not channel.address.startswith("$KV."):
        return None
    return channel.address.split(".")[1]
