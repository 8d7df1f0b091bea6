"""The operator's life: kopf watches, one worker a task reconciles, a sweep looks after what no event tells.

kopf tells of every change of a task or a sandbox's pod (`on.event`: it writes no finalizer, progress or diff), lists
anew after lost watches, and answers the liveness probe. What is done about it is `reconcile`'s, level-triggered: an
event only says where to look, so that a lost one costs the sweep's time and nothing else.

One replica: kopf has no leader election. A second one that runs for a moment (a rollout) repeats effects that bear it.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import kopf
import structlog
from lightkube.core.exceptions import ApiError

from tether import kube, topology
from tether.bus import connect_service, wait_for_streams
from tether.service import ready
from tether_operator import metrics
from tether_operator.cluster import Cluster, connected
from tether_operator.config import OperatorSettings
from tether_operator.control_plane import ControlPlane
from tether_operator.core import render
from tether_operator.reconcile import Reconciler

SWEEP_S: Final = 30.0
FAILED_S: Final = 5.0  # after an answer of the API that is an error
_log = structlog.get_logger("tether_operator")


class Workers:
    """One task of asyncio for each task of Kubernetes that is known, woken by events and by the time it asked for."""

    def __init__(self, reconciler: Reconciler, group: asyncio.TaskGroup) -> None:
        self._reconciler = reconciler
        self._group = group
        self._wakes: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def wake(self, name: str) -> None:
        known = self._wakes.get(name)
        if known is None:
            known = self._wakes[name] = asyncio.Event()
            task = self._group.create_task(self._work(name, known), name=f"task-{name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        known.set()

    def close(self) -> None:
        """Stop looking; what is under way is repeated by the next operator."""
        for task in list(self._tasks):
            task.cancel()

    async def _work(self, name: str, wake: asyncio.Event) -> None:
        again_s: float | None = 0.0
        while True:
            try:
                async with asyncio.timeout(again_s):
                    await wake.wait()
            except TimeoutError:
                pass
            wake.clear()
            try:
                again_s = await self._reconciler.once(name)
            except ApiError as error:
                _log.warning("api_refused", task=name, code=error.status.code, reason=error.status.message)
                metrics.failures.inc()
                again_s = FAILED_S * random.uniform(0.8, 1.2)
            except OSError as error:
                _log.warning("api_not_reached", task=name, error=str(error))
                metrics.failures.inc()
                again_s = FAILED_S * random.uniform(0.8, 1.2)
            else:
                metrics.looks.inc()
            if again_s is None and not wake.is_set():
                del self._wakes[name]
                return


async def serve(settings: OperatorSettings, stop: asyncio.Event) -> None:
    """Run until `stop` is set."""
    bus = await connect_service(settings, "tether-operator", stop)
    if bus is None:
        return
    async with bus, connected(settings) as cluster:
        if not await wait_for_streams(bus, topology.names(topology.base()), stop):
            return
        reconciler = Reconciler(cluster, ControlPlane(bus))
        async with asyncio.TaskGroup() as group:
            workers = Workers(reconciler, group)
            tasks = [group.create_task(_sweep(cluster, reconciler, workers), name="sweep")]
            async with _watching(settings, workers):
                ready(settings, namespace=settings.operator_namespace)
                await stop.wait()
            for task in tasks:
                task.cancel()
            workers.close()


async def _sweep(cluster: Cluster, reconciler: Reconciler, workers: Workers) -> None:
    while True:
        try:
            for name in await cluster.names():
                workers.wake(name)
            await reconciler.orphans()
        except (ApiError, OSError) as error:
            _log.warning("sweep_failed", error=str(error))
        await asyncio.sleep(SWEEP_S * random.uniform(0.8, 1.2))


@asynccontextmanager
async def _watching(settings: OperatorSettings, workers: Workers) -> AsyncIterator[None]:
    """kopf, in this loop. What it fails with ends the service."""
    registry, kubeconfig = kopf.OperatorRegistry(), settings.operator_kubeconfig

    @kopf.on.event(kube.GROUP, kube.VERSION, kube.PLURAL, registry=registry)
    async def task_changed(name: str | None, **_: Any) -> None:
        if name is not None:
            workers.wake(name)

    @kopf.on.event("", "v1", "pods", labels=render.SANDBOXES, registry=registry)
    async def pod_changed(meta: kopf.Meta, **_: Any) -> None:
        for one in meta.get("ownerReferences", ()):
            if one.get("kind") == kube.KIND:
                workers.wake(str(one["name"]))

    @kopf.on.login(registry=registry)
    async def login(logger: kopf.Logger, settings: kopf.OperatorSettings, **_: Any) -> kopf.ConnectionInfo | None:
        if kubeconfig is not None:
            os.environ["KUBECONFIG"] = str(kubeconfig)
            return kopf.login_with_kubeconfig(logger=logger, settings=settings)
        return kopf.login_with_service_account(logger=logger, settings=settings)

    own = kopf.OperatorSettings()
    own.scanning.disabled = True  # a namespaced Role sees no CRDs and no namespaces
    own.posting.enabled = False  # events are ours
    own.watching.server_timeout = 300
    own.watching.client_timeout = 330
    own.watching.connect_timeout = 10
    stopping, started = asyncio.Event(), asyncio.Event()
    liveness = None if settings.operator_liveness is None else f"http://{settings.operator_liveness}/healthz"
    operator = asyncio.create_task(
        kopf.operator(
            registry=registry,
            settings=own,
            standalone=True,
            namespaces=[settings.operator_namespace],
            liveness_endpoint=liveness,
            stop_flag=stopping,
            ready_flag=started,
        ),
        name="kopf",
    )
    try:
        await started.wait()
        yield
    finally:
        stopping.set()
        await operator
