"""Every stream, bucket and durable consumer that Tether needs, as data.

`ensure` (in `tether.bus`) applies it, `diff` names what a live server has otherwise, the permission table and the
AsyncAPI document are generated from it. One owner creates a tenant's streams before its first prompt is accepted.
`VERSION` is written to each object's metadata; updates only go upward and keep fields that they do not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from tether import limits, subjects

VERSION: Final = 2
VERSION_KEY: Final = "tether_topology"

Retention = Literal["limits", "workqueue"]


@dataclass(frozen=True, slots=True)
class Republish:
    source: str
    destination: str


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A JetStream stream. Ages in seconds, sizes in bytes, -1 = unlimited."""

    name: str
    subjects: tuple[str, ...]
    description: str
    retention: Retention = "limits"
    max_age_s: int = 0
    max_bytes: int = -1
    max_msgs_per_subject: int = -1
    max_msg_size_bytes: int = -1
    discard_new: bool = False
    discard_new_per_subject: bool = False
    duplicate_window_s: int = limits.DUPLICATE_WINDOW_S
    allow_direct: bool = True
    allow_rollup: bool = False
    allow_msg_ttl: bool = False
    deny_delete: bool = False
    republish: Republish | None = None
    replicas: int = 1
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """A durable pull consumer with explicit acks."""

    stream: str
    durable: str
    description: str
    filter_subject: str = ""
    ack_wait_s: float = limits.ACK_WAIT_S
    max_ack_pending: int = -1
    max_deliver: int = -1
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Topology:
    streams: Sequence[StreamSpec]
    consumers: Sequence[ConsumerSpec] = field(default_factory=tuple)
    version: int = VERSION


def bucket(
    name: str, description: str, *, history: int = 1, ttl: bool = False, replicas: int = 1, max_age_s: int = 0
) -> StreamSpec:
    """A key-value bucket as its stream. `ttl`: keys may carry a TTL each (no limit markers are written)."""
    return StreamSpec(
        name=f"KV_{name}",
        subjects=(f"$KV.{name}.>",),
        description=description,
        max_age_s=max_age_s,
        max_msgs_per_subject=history,
        discard_new=True,
        allow_rollup=True,
        allow_msg_ttl=ttl,
        deny_delete=True,
        replicas=replicas,
        metadata=(("tether_kind", "bucket"),),
    )


def base(*, replicas: int = 1) -> Topology:
    """What is there once, whatever the tenants."""
    streams = (
        StreamSpec(
            name=subjects.PROMPTS_STREAM,
            subjects=(subjects.PROMPTS_ALL,),
            description="Prompts waiting for admission, in order per conversation",
            retention="workqueue",
            max_msgs_per_subject=limits.WAITING_PROMPTS_MAX,
            max_msg_size_bytes=limits.PROMPT_BYTES_MAX,
            discard_new=True,
            discard_new_per_subject=True,
            replicas=replicas,
            metadata=(("tether_kind", "queue"),),
        ),
        StreamSpec(
            name=subjects.COMMANDS_STREAM,
            subjects=(subjects.COMMANDS_ALL,),
            description="Commands to agent services, each driven to a receipt",
            retention="workqueue",
            discard_new=True,
            replicas=replicas,
            metadata=(("tether_kind", "queue"),),
        ),
        bucket(subjects.OWNERS, "Owner record of each conversation; compare-and-set only", replicas=replicas),
        bucket(
            subjects.REQUESTS,
            "Request memory: payload digest, attempt, outcome",
            max_age_s=limits.REQUEST_MEMORY_S,
            replicas=replicas,
        ),
        bucket(subjects.LEASES, "Control and projector leases, per-key TTL", ttl=True, replicas=replicas),
        bucket(subjects.CHECKPOINTS, "Checkpoint references, last 8 each", history=8, replicas=replicas),
        bucket(subjects.SANDBOXES, "Sandbox life cycle and registrations", ttl=True, replicas=replicas),
        bucket(subjects.PROJECTIONS, "Last batch number of each projection database", replicas=replicas),
        bucket(
            subjects.NOTIFICATIONS,
            "Webhook outbox: one record per endpoint and event, create-only, so that nothing is notified twice",
            ttl=True,
            replicas=replicas,
        ),
        bucket(subjects.CONVERSATIONS, "Conversation to workspace, create-only", replicas=replicas),
        bucket(
            subjects.DELETIONS,
            "Deletions of conversations: asked for by backends, done by routers; each outlives what it deleted",
            ttl=True,
            replicas=replicas,
        ),
        bucket(
            subjects.QUOTAS,
            "Use of quotas: allowances of prompts (expire when they are whole again), places for running executions",
            ttl=True,
            replicas=replicas,
        ),
    )
    consumers = (
        ConsumerSpec(
            stream=subjects.PROMPTS_STREAM,
            durable=subjects.ROUTER_DURABLE,
            description="Routers admit prompts",
            ack_wait_s=limits.PROMPT_ACK_WAIT_S,
        ),
        ConsumerSpec(
            stream=subjects.COMMANDS_STREAM,
            durable=subjects.AGENT_DURABLE,
            description="Agent services drive commands to receipts",
            ack_wait_s=limits.COMMAND_ACK_WAIT_S,
        ),
    )
    return Topology(streams=streams, consumers=consumers)


def tenant(
    name: str,
    *,
    replicas: int = 1,
    max_bytes: int = limits.EVENTS_MAX_BYTES,
    max_age_s: int = limits.EVENTS_MAX_AGE_S,
) -> Topology:
    """What each tenant has of its own: the log, the blobs, and what of the log is refused."""
    log = StreamSpec(
        name=subjects.events_stream(name),
        subjects=(f"tether.event.{name}.>",),
        description=f"The event log of tenant {name}: one subject per execution, `_` for the conversation",
        max_age_s=max_age_s,
        max_bytes=max_bytes,
        republish=Republish(source=f"tether.event.{name}.>", destination=f"tether.live.{name}.>"),
        replicas=replicas,
        metadata=(("tether_kind", "log"), ("tether_tenant", name)),
    )
    blobs = StreamSpec(
        name=subjects.blobs_stream(name),
        subjects=(f"tether.blob.{name}.>",),
        description=f"Blobs of tenant {name}: artifacts and checkpoints in chunks, manifest last",
        max_bytes=max_bytes,
        replicas=replicas,
        metadata=(("tether_kind", "blobs"), ("tether_tenant", name)),
    )
    quarantine = StreamSpec(
        name=subjects.quarantine_stream(name),
        subjects=(f"tether.quarantine.{name}.>",),
        description=f"Messages of tenant {name}'s log that readers refuse, with the reason; written by its projector",
        max_age_s=limits.QUARANTINE_MAX_AGE_S,
        max_bytes=limits.QUARANTINE_MAX_BYTES,
        max_msg_size_bytes=limits.QUARANTINE_ENTRY_BYTES_MAX,
        replicas=replicas,
        metadata=(("tether_kind", "quarantine"), ("tether_tenant", name)),
    )
    return Topology(streams=(log, blobs, quarantine))


def projection(tenant_name: str, database: str, shard: int) -> ConsumerSpec:
    """The durable consumer of one projection database: its ack floor is the replay cursor."""
    return ConsumerSpec(
        stream=subjects.events_stream(tenant_name),
        durable=subjects.projection_durable(database, shard),
        description=f"Projection of tenant {tenant_name} into database {database}, shard {shard}",
        max_ack_pending=4096,
        metadata=(("tether_kind", "projection"), ("tether_database", database)),
    )


def webhooks(tenant_name: str) -> ConsumerSpec:
    """The durable consumer that looks for what is to be notified."""
    return ConsumerSpec(
        stream=subjects.events_stream(tenant_name),
        durable=subjects.WEBHOOKS_DURABLE,
        description=f"Webhooks of tenant {tenant_name}",
        max_ack_pending=1024,
        metadata=(("tether_kind", "webhooks"),),
    )


def reader(tenant_name: str, durable: str, filter_subject: str) -> ConsumerSpec:
    """A reader's own durable consumer (SDK, `tether attach --durable NAME`)."""
    return ConsumerSpec(
        stream=subjects.events_stream(tenant_name),
        durable=durable,
        description=f"Reader {durable}",
        filter_subject=filter_subject,
        max_ack_pending=1024,
        metadata=(("tether_kind", "reader"),),
    )


def names(topology: Topology) -> tuple[str, ...]:
    """The names of a topology's streams."""
    return tuple(stream.name for stream in topology.streams)
