"""One tenant's webhooks in one process at a time: the watcher of the log, and a deliverer for each endpoint."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import httpx2
import structlog

from tether import subjects, topology
from tether.errors import BusError, ProblemError
from tether.failpoints import under
from tether.kv import Bucket
from tether.lease import Lease
from tether.limits import WEBHOOK_TIMEOUT_S
from tether.ports import Bus, Job, StoredMessage
from tether_backend.core.notices import Notice, notices_of
from tether_backend.core.stream import decode_stored
from tether_backend.metrics import Metrics
from tether_backend.webhooks.config import Endpoint
from tether_backend.webhooks.deliverer import Deliverer
from tether_backend.webhooks.outbox import Outbox

_log = structlog.get_logger("tether.webhooks")
LEASE_TTL_S: Final = 5
LEASE_RENEW_S: Final = 1.5
_RETRY_S: Final = 0.5
_GRACE_MS: Final = 5_000  # an endpoint's start and the log's times are of two clocks
_IN_FLIGHT_MAX: Final = 256
Step = Callable[[str], None]
_failpoint: Final[Step] = under("backend.webhooks")


class Webhooks:
    """`endpoints`: this tenant's. `step` is told after each step: tests crash there."""

    def __init__(
        self,
        bus: Bus,
        tenant: str,
        endpoints: Sequence[Endpoint],
        metrics: Metrics,
        *,
        step: Step = _failpoint,
    ) -> None:
        self.tenant = tenant
        self.outbox = Outbox(bus, tenant)
        self._bus = bus
        self.endpoints = {endpoint.name: endpoint for endpoint in endpoints}
        self._metrics = metrics
        self._step = step

    async def run(self) -> None:
        """For ever: hold the lease and work, or stand by. Outlives failures of the bus."""
        holder = f"backend-{secrets.token_hex(6)}"
        bucket = Bucket(self._bus, subjects.LEASES)
        key = subjects.webhooks_lease_key(self.tenant)
        while True:
            lease = Lease(bucket, key, holder=holder, ttl_s=LEASE_TTL_S, renew_s=LEASE_RENEW_S)
            try:
                await lease.acquire()
            except ProblemError:
                await asyncio.sleep(LEASE_RENEW_S)
                continue
            except BusError:
                await asyncio.sleep(_RETRY_S)
                continue
            await self._work_while(lease)

    async def _work_while(self, lease: Lease) -> None:
        keep = asyncio.create_task(lease.keep(), name=f"lease-{lease.key}")
        work = asyncio.create_task(self.work(), name=f"webhooks-{self.tenant}")
        try:
            await asyncio.wait((keep, work), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            _log.warning("webhooks_lease_ended", tenant=self.tenant, reason=keep.result() if keep.done() else "")
        finally:
            for task in (work, keep):
                task.cancel()
            await asyncio.gather(work, keep, return_exceptions=True)
            await lease.release()

    async def work(self) -> None:
        """Watch and deliver, for ever."""
        timeout = httpx2.Timeout(WEBHOOK_TIMEOUT_S)
        async with httpx2.AsyncClient(timeout=timeout, follow_redirects=False, trust_env=False) as client:
            deliverers = {
                name: Deliverer(self.outbox, {name: endpoint}, client, self._metrics)
                for name, endpoint in self.endpoints.items()
            }
            async with asyncio.TaskGroup() as group:
                for name, deliverer in deliverers.items():
                    group.create_task(deliverer.run(), name=f"webhooks-deliver-{self.tenant}-{name}")
                group.create_task(self._watch(deliverers), name=f"webhooks-watch-{self.tenant}")

    async def _watch(self, deliverers: Mapping[str, Deliverer]) -> None:
        stream, durable = subjects.events_stream(self.tenant), subjects.WEBHOOKS_DURABLE
        spec = topology.Topology(streams=(), consumers=(topology.webhooks(self.tenant),))
        while True:
            try:
                now_ms = time.time_ns() // 1_000_000
                since = {name: await self.outbox.since_ms(name, now_ms) - _GRACE_MS for name in self.endpoints}
                await self._bus.ensure(spec)
                async for job in self._bus.jobs(stream, durable, in_flight_max=_IN_FLIGHT_MAX):
                    for name in await self._take(job, since):
                        deliverers[name].poke()
            except BusError as error:
                _log.warning("webhooks_wait", tenant=self.tenant, detail=error.detail)
            await asyncio.sleep(_RETRY_S)  # the consumer is gone, or the bus: from where the acks are

    async def _take(self, job: Job, since: Mapping[str, int]) -> set[str]:
        """Records first, then the ack. The endpoints for which something is new; `since`: none has what is older."""
        fresh: set[str] = set()
        stored_ms = job.message.stored_at_ns // 1_000_000
        for notice in self._notices(job.message):
            for endpoint in self.endpoints.values():
                if notice.kind in endpoint.kinds and stored_ms >= since[endpoint.name]:
                    if await self.outbox.add(notice, endpoint, time.time_ns() // 1_000_000):
                        fresh.add(endpoint.name)
                    self._step("notification_added")
        await job.ack()
        self._step("acked")
        return fresh

    def _notices(self, stored: StoredMessage) -> list[Notice]:
        """What is no message of the log's makes none."""
        message = decode_stored(stored)
        if message is None or message.content is None:
            _log.warning("webhooks_unreadable", tenant=self.tenant, sequence=stored.sequence)
            return []
        return list(notices_of(message.address, message.content))
