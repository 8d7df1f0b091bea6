"""The router's life.

Start: bus → base topology → each tenant's streams → follower (its first sweep closes what ended meanwhile) → prompts →
ready. End, on SIGTERM or SIGINT: no new prompts, those in hand are finished within the shutdown budget or given back →
follower → bus. Nothing is kept that is not in JetStream.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from tether import topology
from tether.bus import connect_service
from tether.ports import Bus
from tether.service import ready
from tether_router.admitter import Admitter, Clock
from tether_router.config import RouterSettings
from tether_router.deletion import Deletions
from tether_router.follower import Follower
from tether_router.gates import Gates
from tether_router.log import Log
from tether_router.records import Records
from tether_router.router import Router
from tether_router.slots import Slots

_log = structlog.get_logger("tether.router")


def now_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000


async def ensure(bus: Bus, settings: RouterSettings) -> None:
    """The streams, buckets and consumers of the set and of each tenant; idempotent. Raises BusError."""
    await bus.ensure(topology.base(replicas=settings.replicas))
    for tenant in settings.tenant_names:
        await bus.ensure(
            topology.tenant(
                tenant,
                replicas=settings.replicas,
                max_bytes=settings.events_max_bytes,
                max_age_s=settings.events_max_age_s,
            )
        )


async def route(bus: Bus, settings: RouterSettings, stop: asyncio.Event, *, clock: Clock = now_ms) -> None:
    """Admit prompts and follow the log until `stop` is set. The topology is there."""
    log, records, gates = Log(bus), Records(bus), Gates()
    quotas = settings.quotas()
    slots = Slots(bus, records, quotas, clock, total=settings.router_quota_running_total)
    follower = Follower(bus, log, records, gates, clock, sweep_s=settings.router_sweep_s, seen=slots.seen)
    admitter = Admitter(bus, log, records, clock, history_fallback=settings.router_history_fallback, slots=slots)
    router = Router(bus, log, admitter, gates, clock, slots=slots, tenants=len(settings.tenant_names))
    async with asyncio.TaskGroup() as group:
        following = group.create_task(follower.run(), name="router-follower")
        deleting = group.create_task(Deletions(bus, log, records, clock).run(), name="router-deletions")
        routing = group.create_task(router.run(stop), name="router-prompts")
        ready(settings, tenants=list(settings.tenant_names))
        await routing
        following.cancel()
        deleting.cancel()


async def serve(settings: RouterSettings, stop: asyncio.Event) -> None:
    """Run until `stop` is set."""
    bus = await connect_service(settings, "tether-router", stop)
    if bus is None:
        return
    async with bus:
        await ensure(bus, settings)
        await route(bus, settings, stop)
        _log.info("router_stopped")
