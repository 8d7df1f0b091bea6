"""A router's figures; see `tether.metrics`."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from tether import subjects
from tether.errors import Code
from tether.metrics import REGISTRY, SECONDS
from tether.ports import Bus

prompts: Final = Counter(
    "tether_router_prompts",
    "Deliveries of prompts by how they ended: admitted, interjected, failed, refused (unreadable), "
    "waiting (given back), known, older_attempt, gone (settled before)",
    ["outcome"],
    registry=REGISTRY,
)
admission_seconds: Final = Histogram(
    "tether_router_admission_seconds",
    "From the prompt's storing to its settling, waiting for its turn included",
    buckets=(*SECONDS, 300.0, 1800.0),
    registry=REGISTRY,
)
redeliveries: Final = Counter(
    "tether_router_redeliveries", "Deliveries that were not the first of their prompt", registry=REGISTRY
)
superseded: Final = Counter(
    "tether_router_superseded", "Prompts that failed because a later one took their place", registry=REGISTRY
)
held_prompts: Final = Gauge(
    "tether_router_held_prompts", "Prompts that this router holds until their conversation moves on", registry=REGISTRY
)
running_places: Final = Gauge(
    "tether_router_running_places",
    "Conversations that hold a place for a running execution, as of the last one taken; tenant empty: of the whole set",
    ["tenant"],
    registry=REGISTRY,
)
running_limit: Final = Gauge("tether_router_running_limit", "How many places there are", ["tenant"], registry=REGISTRY)
given_back: Final = Counter(
    "tether_router_given_back",
    "Prompts that were given back unread: share (of what is in hand the tenant has its share), place (no execution "
    "of it may begin now)",
    ["reason"],
    registry=REGISTRY,
)
waiting_prompts: Final = Gauge(
    "tether_router_waiting_prompts", "Prompts in the queue of the whole set, as of the last sweep", registry=REGISTRY
)


def settled(outcome: str, code: str | None, age_ms: int) -> None:
    """A prompt was settled; `age_ms` since it was stored."""
    prompts.labels(outcome).inc()
    admission_seconds.observe(max(0, age_ms) / 1000)
    superseded.inc(code == Code.REQUEST_SUPERSEDED)


async def look(bus: Bus) -> None:
    """Take the queue's length from its consumer. Raises BusError."""
    state = await bus.consumer(subjects.PROMPTS_STREAM, subjects.ROUTER_DURABLE)
    if state is not None:
        waiting_prompts.set(state.pending + state.ack_pending)
