"""The backend's life.

    start   bus → topology → database (migrated, identified) → feeds, projectors → histories → socket → ready
    stop    no new connections; event streams end with their cursors good; projector leases released; bus, database

One TaskGroup owns the feeds, the projectors and the server; the first that ends unexpectedly ends the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import secrets
from collections.abc import Sequence
from typing import Final

import structlog

from tether import metrics as process_metrics
from tether import subjects, topology
from tether.bus import connect_service, wait_for_streams
from tether.control_lease import ControlLeases
from tether.errors import BusError, ProblemError
from tether.ids import check_token
from tether.kv import Bucket
from tether.lease import Lease
from tether.ports import Bus
from tether.quotas import Quotas
from tether.service import ready
from tether_backend.config import BackendSettings, Tokens, load_tokens
from tether_backend.feed import Feed
from tether_backend.history import HistoryServer
from tether_backend.http.app import create_app
from tether_backend.http.edge import Admission
from tether_backend.http.server import Server, listen, make_server, url_of
from tether_backend.metrics import Metrics
from tether_backend.projector import SHARD, Projector
from tether_backend.quotas import EdgeQuotas
from tether_backend.recovery import RecoveryWorker
from tether_backend.runtime import Deps
from tether_backend.store.engine import Database, open_database
from tether_backend.store.history import History
from tether_backend.webhooks.config import Endpoint, load_endpoints
from tether_backend.webhooks.service import Webhooks

_log = structlog.get_logger("tether.backend")
LEASE_TTL_S: Final = 5  # a projector that was killed is followed by another after so long
LEASE_RENEW_S: Final = 1.5
_RETRY_S: Final = 0.5


async def run(settings: BackendSettings, stop: asyncio.Event) -> None:
    """Run until `stop`. Raises ConfigurationError, OSError (socket), BusError and SQLAlchemyError of the start."""
    for name in settings.tenant_names:
        check_token(name, "TETHER_TENANTS")
    tokens = load_tokens(settings.http_tokens_file, settings.tenant_names)
    endpoints = load_endpoints(settings.webhooks_file, settings.tenant_names)
    quotas = settings.quotas()
    bus = await connect_service(settings, "tether-backend", stop)
    if bus is None:
        return
    async with bus:
        streams = [*topology.names(topology.base())]
        for name in settings.tenant_names:
            streams += topology.names(topology.tenant(name))
        if not await wait_for_streams(bus, streams, stop):
            return
        database = await open_database(settings.database_url)
        try:
            await serve(settings, assemble(settings, tokens, bus, database, endpoints, quotas), stop)
        finally:
            await database.close()


def assemble(
    settings: BackendSettings,
    tokens: Tokens,
    bus: Bus,
    database: Database,
    endpoints: Sequence[Endpoint] = (),
    quotas: Quotas | None = None,
) -> Deps:
    """The parts of one backend process."""
    metrics = Metrics()
    readers_max = settings.backend_quota_readers_total
    process_metrics.serve_also(metrics.registry)
    names = settings.tenant_names
    return Deps(
        bus=bus,
        database=database,
        history=History(database),
        feeds={name: Feed(bus, name, metrics) for name in names},
        projectors={name: Projector(bus, database, name, metrics, shared=len(names) > 1) for name in names},
        leases=ControlLeases(bus, "backend"),
        webhooks={
            name: Webhooks(bus, name, [one for one in endpoints if one.tenant == name], metrics) for name in names
        },
        admission=Admission(tokens, settings.host_names, settings.origins),
        metrics=metrics,
        version=importlib.metadata.version("tether"),
        quotas=EdgeQuotas(bus, quotas or settings.quotas(), metrics, readers_max=readers_max, tenants=len(names)),
    )


async def serve(settings: BackendSettings, deps: Deps, stop: asyncio.Event) -> None:
    listener = listen(settings.http_host, settings.http_port)
    server = make_server(create_app(deps))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(feed.run(), name=f"feed-{name}") for name, feed in deps.feeds.items()] + [
            group.create_task(project(deps, projector), name=f"projector-{name}")
            for name, projector in deps.projectors.items()
        ]
        tasks += [
            group.create_task(hooks.run(), name=f"webhooks-{name}")
            for name, hooks in deps.webhooks.items()
            if hooks.endpoints
        ]
        served = contextlib.AsyncExitStack()
        for name in deps.projectors:
            await served.enter_async_context(HistoryServer(deps.bus, deps.database, name).serving())
        web = group.create_task(server.serve(sockets=[listener]), name="http")
        announce = group.create_task(_announce(settings, deps, server, url_of(listener)), name="ready")
        await stop.wait()
        _log.info("backend_stops")
        for feed in deps.feeds.values():
            feed.close()
        server.should_exit = True
        await web
        await served.aclose()
        await deps.leases.close()
        for task in (*tasks, announce):
            task.cancel()


async def _announce(settings: BackendSettings, deps: Deps, server: Server, url: str) -> None:
    """Ready is what answers, follows the log and has a proven database."""
    for feed in deps.feeds.values():
        await feed.ready.wait()
    for projector in deps.projectors.values():
        await projector.bound.wait()
    await server.up.wait()
    ready(settings, url=url, database=deps.database.id)


async def project(deps: Deps, projector: Projector) -> None:
    """Hold the lease, project and repair, or stand by. The lease is the database's: each has one projector."""
    bus, database = deps.bus, deps.database
    key = f"{subjects.projector_lease_key(projector.tenant, SHARD)}.{database.id}"
    worker = recovery_worker(deps, projector.tenant)
    holder = f"backend-{secrets.token_hex(6)}"
    while True:
        lease = Lease(Bucket(bus, subjects.LEASES), key, holder=holder, ttl_s=LEASE_TTL_S, renew_s=LEASE_RENEW_S)
        try:
            await lease.acquire()
        except ProblemError:
            await projector.stand_by()
            await asyncio.sleep(LEASE_RENEW_S)
            continue
        except BusError:
            await asyncio.sleep(_RETRY_S)
            continue
        await _project_while(lease, projector, worker)


def recovery_worker(deps: Deps, tenant: str) -> RecoveryWorker:
    feed, writer = deps.feeds[tenant], deps.projectors[tenant].writer
    return RecoveryWorker(deps.bus, deps.database, writer, tenant, feed.watched, deps.metrics)


async def _project_while(lease: Lease, projector: Projector, worker: RecoveryWorker) -> None:
    keep = asyncio.create_task(lease.keep(), name=f"lease-{lease.key}")
    work = asyncio.create_task(projector.run(), name=f"project-{projector.tenant}")
    repair = asyncio.create_task(worker.run(), name=f"recovery-{projector.tenant}")
    try:
        await asyncio.wait((keep, work, repair), return_when=asyncio.FIRST_COMPLETED)
        for one in (work, repair):
            if one.done():
                one.result()
        _log.warning("projector_lease_ended", tenant=projector.tenant, reason=keep.result() if keep.done() else "")
    finally:
        for task in (repair, work, keep):
            task.cancel()
        await asyncio.gather(repair, work, keep, return_exceptions=True)
        await lease.release()
