"""A collector's figures; see `tether.metrics`. Counted by batch: a line costs nothing of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from tether.control import VERBS
from tether.events import RAW, Event
from tether.metrics import REGISTRY, SECONDS
from tether.sandbox import ExecutionSummary

frames: Final = Counter("tether_collector_frames", "Frames that the log has taken", registry=REGISTRY)
events: Final = Counter("tether_collector_events", "Events in these frames", registry=REGISTRY)
published_bytes: Final = Counter("tether_collector_published_bytes", "Bytes of these frames", registry=REGISTRY)
publish_seconds: Final = Histogram(
    "tether_collector_publish_seconds", "From sending a frame to the log's answer", buckets=SECONDS, registry=REGISTRY
)
publish_failures: Final = Counter(
    "tether_collector_publish_failures",
    "Frames sent without being taken: undecided (no answer), wrong_last, unavailable, denied",
    ["reason"],
    registry=REGISTRY,
)
paced_seconds: Final = Counter(
    "tether_collector_paced_seconds", "That frames were held back for a quota", registry=REGISTRY
)
inputs: Final = Counter(
    "tether_collector_inputs", "Records of the spool that were read: lines of output, exits, timers", registry=REGISTRY
)
read_bytes: Final = Counter("tether_collector_read_bytes", "Bytes of output read from the spool", registry=REGISTRY)
raw_lines: Final = Counter(
    "tether_collector_raw_lines", "Lines that the adapter could not map, told as they are", registry=REGISTRY
)
spool_bytes: Final = Gauge(
    "tether_collector_spool_bytes", "Bytes of spools and final snapshots on disk, looked at every minute",
    registry=REGISTRY,
)  # fmt: skip
evictions: Final = Counter(
    "tether_collector_evictions", "Ended executions that were deleted from disk for age or quota", registry=REGISTRY
)
executions: Final = Gauge(
    "tether_collector_executions",
    "Executions by state: starting, running, waiting, exiting",
    ["state"],
    registry=REGISTRY,
)
pending_interactions: Final = Gauge(
    "tether_collector_pending_interactions", "Approvals and questions that wait for somebody", registry=REGISTRY
)
controls: Final = Counter(
    "tether_collector_controls",
    "Controls that were answered, by verb and the receipt's status at that time",
    ["verb", "status"],
    registry=REGISTRY,
)
recoveries: Final = Counter(
    "tether_collector_recoveries", "Executions that a new collector went on with", registry=REGISTRY
)

drains: Final = Counter(
    "tether_collector_drains", "Drains of the sandbox that are over, by outcome: done, failed", ["outcome"],
    registry=REGISTRY,
)  # fmt: skip
drain_seconds: Final = Histogram(
    "tether_collector_drain_seconds", "From the order of a drain to its end",
    buckets=(0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300), registry=REGISTRY,
)  # fmt: skip
checkpoint_bytes: Final = Histogram(
    "tether_collector_checkpoint_bytes", "Bytes of all files of a checkpoint",
    buckets=tuple(4.0**n * 16 * 1024 for n in range(10)), registry=REGISTRY,
)  # fmt: skip
checkpoint_seconds: Final = Histogram(
    "tether_collector_checkpoint_seconds", "From the first file that is looked at to the last blob that is stored",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120), registry=REGISTRY,
)  # fmt: skip

_STATES: Final = ("starting", "running", "waiting", "exiting")


def known_verb(verb: str) -> str:
    """A verb of the protocol, whatever a subject says."""
    return verb if verb in VERBS else "unknown"


def read(count: int, size_bytes: int, made: Sequence[tuple[Event, object]]) -> None:
    """One read of the spool, and the events that came of it."""
    inputs.inc(count)
    read_bytes.inc(size_bytes)
    raw = sum(event.type == RAW for event, _ in made)
    if raw:
        raw_lines.inc(raw)


def stored(size_bytes: int, took_s: float) -> None:
    """A frame that the log has taken."""
    frames.inc()
    published_bytes.inc(size_bytes)
    publish_seconds.observe(took_s)


def show(summaries: Sequence[ExecutionSummary]) -> None:
    """Where the executions stand, as the registration says it."""
    for state in _STATES:
        executions.labels(state).set(sum(one.state == state for one in summaries))
    pending_interactions.set(sum(one.pending_interactions for one in summaries if one.state != "ended"))
