"""What the conformance suites share: the harness that a bus brings, waiting, and the streams that tests make."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

from tether import subjects, topology
from tether.kv import Bucket
from tether.ports import Bus, Job, LiveSubscription

T = TypeVar("T")
WITHIN_S = 20.0


class Harness(Protocol):
    """What a bus brings to the suite. `bus` is connected and has the tenant's log."""

    bus: Bus
    tenant: str
    replicas: int
    dedupe_first: bool  # a retry with the same id and compare-and-set reads `duplicate` (R3), not 10071 (R1)

    async def connect(self) -> Bus:
        """Another connection, closed by the harness."""
        ...

    async def pause(self, seconds: float) -> None:
        """Let so much time pass for the server."""
        ...

    async def interest(self, live: LiveSubscription) -> None:
        """Return when a live subscription to the tenant is known wherever a copy may come from."""
        ...


async def eventually(harness: Harness, check: Callable[[], Awaitable[T | None]], what: str) -> T:
    """The first result of `check` that is neither None nor False, within `WITHIN_S`."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + WITHIN_S
    for _ in range(10_000):
        found = await check()
        if found:
            return found
        if loop.time() > deadline_s:
            break
        await harness.pause(0.02)
    raise AssertionError(f"not within {WITHIN_S:g} s: {what}")


async def take(jobs: AsyncGenerator[Job, None]) -> Job:
    """The next job of an iterator, within the deadline."""
    async with asyncio.timeout(WITHIN_S):
        return await anext(jobs)


class ConformanceBase:
    """Helpers; everything made carries the harness's tenant."""

    def event(self, harness: Harness, execution: str = "e1") -> str:
        return subjects.event(harness.tenant, "w", "c", execution)

    def log(self, harness: Harness) -> str:
        return subjects.events_stream(harness.tenant)

    async def queue(self, harness: Harness, **consumer: Any) -> tuple[str, str]:
        """A small work queue: (stream, subject prefix); durable `worker`, at most 3 messages per subject."""
        name, prefix = f"QUEUE_{harness.tenant}", f"queue.{harness.tenant}"
        stream = topology.StreamSpec(
            name=name,
            subjects=(f"{prefix}.>",),
            description="A work queue",
            retention="workqueue",
            max_msgs_per_subject=3,
            discard_new=True,
            discard_new_per_subject=True,
            replicas=harness.replicas,
        )
        options = {"ack_wait_s": 1.0, **consumer}
        durable = topology.ConsumerSpec(stream=name, durable="worker", description="Works", **options)
        await harness.bus.ensure(topology.Topology(streams=(stream,), consumers=(durable,)))
        return name, prefix

    async def bucket(self, harness: Harness, *, history: int = 1) -> Bucket:
        spec = topology.bucket(
            f"bucket_{harness.tenant}", "A bucket", ttl=True, history=history, replicas=harness.replicas
        )
        await harness.bus.ensure(topology.Topology(streams=(spec,)))
        return Bucket(harness.bus, f"bucket_{harness.tenant}")
