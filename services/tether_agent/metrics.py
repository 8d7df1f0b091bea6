"""An agent service's figures; see `tether.metrics`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from tether.metrics import REGISTRY, SECONDS
from tether_agent.providers import Status

commands: Final = Counter(
    "tether_agent_commands",
    "Deliveries of commands by how they ended: receipt, claimed, stale, gave_up, later, refused",
    ["outcome"],
    registry=REGISTRY,
)
command_seconds: Final = Histogram(
    "tether_agent_command_seconds", "One delivery of a command", buckets=SECONDS, registry=REGISTRY
)
collector_starts: Final = Counter(
    "tether_agent_collector_starts", "Collectors that were spawned, restarts included", registry=REGISTRY
)
collector_ends: Final = Counter(
    "tether_agent_collector_ends", "Collectors that ended without being told to", registry=REGISTRY
)
drains: Final = Counter(
    "tether_agent_drains",
    "Drains that ended, by purpose (drain, suspend, delete) and outcome (done, failed)",
    ["purpose", "outcome"],
    registry=REGISTRY,
)
drain_seconds: Final = Histogram(
    "tether_agent_drain_seconds",
    "From the order of a drain to the release of its compute",
    buckets=SECONDS,
    registry=REGISTRY,
)
idle_suspends: Final = Counter(
    "tether_agent_idle_suspends", "Sandboxes that were suspended because they were idle", registry=REGISTRY
)
resumes: Final = Counter(
    "tether_agent_resumes",
    "Suspended sandboxes that were woken, by cause: prompt, request",
    ["cause"],
    registry=REGISTRY,
)
resume_seconds: Final = Histogram(
    "tether_agent_resume_seconds", "From waking a sandbox to its being active", buckets=SECONDS, registry=REGISTRY
)
continuations: Final = Counter(
    "tether_agent_continuations", "Turns that a drain had cut and that were gone on with", registry=REGISTRY
)
deletes: Final = Counter("tether_agent_deletes", "Sandboxes that were deleted", registry=REGISTRY)
sandboxes: Final = Gauge(
    "tether_agent_sandboxes",
    "Sandboxes by state: alive (its collector runs), down",
    ["state"],
    registry=REGISTRY,
)


def watch(statuses: Callable[[], Sequence[Status]]) -> None:
    """Ask for the sandboxes whenever somebody scrapes."""
    sandboxes.labels("alive").set_function(lambda: sum(status.alive for status in statuses()))
    sandboxes.labels("down").set_function(lambda: sum(not status.alive for status in statuses()))
