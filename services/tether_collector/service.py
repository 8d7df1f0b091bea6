"""The collector's process: one workspace, everything of it from disk and log at every start.

Start                                              Stop (SIGTERM; drain is another verb)
    1  `.tether`, lock: one collector a workspace      1  controls are no longer served
    2  journal                                         2  spools are no longer read; what was read is stored,
    3  bus, for as long as that takes                     within SHUTDOWN_BUDGET_S
    4  every unended execution goes on                 3  keepers are let go: they and their CLIs run on
    5  controls are served, registration, ready        4  bus, journal, lock

With `recovery` it starts nothing, and stops by itself once every execution is told to its end.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import structlog

from tether.bus import connect_service
from tether.failpoints import under
from tether.limits import SHUTDOWN_BUDGET_S
from tether.ports import Bus
from tether.service import ready
from tether_collector.blobs import BlobStore
from tether_collector.config import CollectorSettings
from tether_collector.control_server import ControlServer
from tether_collector.execution_shell import Surroundings
from tether_collector.executions import Executions
from tether_collector.journal import Journal
from tether_collector.process import prepare
from tether_collector.registration import Registrar
from tether_collector.review import Reviewer
from tether_collector.starting import Starter

LOCK_WAIT_S: Final = SHUTDOWN_BUDGET_S + 2.0  # a predecessor that is stopping holds it for so long
LOCK_LOOK_S: Final = 0.05
CONNECT_WAIT_S: Final = 10.0

Step = Callable[[str], None]
_failpoint: Final[Step] = under("collector")


class WorkspaceInUseError(Exception):
    """Another collector holds the workspace's lock."""


@asynccontextmanager
async def workspace_lock(state_dir: Path) -> AsyncIterator[None]:
    """Hold the workspace. Raises WorkspaceInUseError after LOCK_WAIT_S."""
    descriptor = os.open(state_dir / "collector.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline_s = asyncio.get_running_loop().time() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if asyncio.get_running_loop().time() > deadline_s:
                    raise WorkspaceInUseError(f"another collector holds {state_dir}") from None
                await asyncio.sleep(LOCK_LOOK_S)
        yield
    finally:
        os.close(descriptor)


async def run_collector(settings: CollectorSettings, stop: asyncio.Event, *, step: Step = _failpoint) -> None:
    """Until `stop`. Raises WorkspaceInUseError, JournalError, BusError (credentials refused)."""
    instance = f"ins_{secrets.token_hex(8)}"
    structlog.contextvars.bind_contextvars(
        tenant=settings.tenant,
        workspace=settings.workspace,
        sandbox=settings.sandbox,
        boot=settings.boot,
        instance=instance,
    )
    await asyncio.to_thread(prepare, settings.state_dir)
    async with workspace_lock(settings.state_dir):
        journal = Journal(settings.state_dir / "journal.sqlite3")
        try:
            bus = await connect_service(
                settings,
                f"tether-collector {settings.tenant}/{settings.workspace} {instance}",
                stop,
                inbox_prefix=settings.nats_inbox_prefix,
                connect_timeout_s=CONNECT_WAIT_S,
            )
            if bus is not None:
                async with bus:
                    await serve(settings, bus, journal, instance, stop, step)
        finally:
            journal.close()


async def _either(stop: asyncio.Event, over: Coroutine[None, None, None]) -> None:
    """Until the first of the two."""
    tasks = [asyncio.create_task(stop.wait(), name="stop"), asyncio.create_task(over, name="over")]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve(
    settings: CollectorSettings, bus: Bus, journal: Journal, instance: str, stop: asyncio.Event, step: Step
) -> None:
    """Everything between the bus and the stop."""
    log = structlog.get_logger("tether.collector")
    changed = asyncio.Event()
    around = Surroundings(
        settings=settings,
        bus=bus,
        journal=journal,
        blobs=BlobStore(bus, settings.tenant, settings.workspace),
        changed=changed.set,
        step=step,
    )
    async with asyncio.TaskGroup() as group:
        executions = Executions(around, group)
        registrar = Registrar(bus, settings, instance, executions.summaries, changed)
        recovered = executions.recover()
        server = ControlServer(executions, Starter(executions, instance))
        async with server.serving(bus):
            chores = [
                group.create_task(registrar.run(), name="registration"),
                group.create_task(executions.housekeeping(), name="housekeeping"),
                group.create_task(Reviewer(bus, journal, executions.put_back).run(), name="review"),
            ]
            ready(settings, workspace=settings.workspace, boot=settings.boot, instance=instance, recovered=recovered)
            await (_either(stop, executions.over()) if settings.recovery else stop.wait())
        log.info("collector_stopping")
        try:
            async with asyncio.timeout(SHUTDOWN_BUDGET_S):
                await executions.flush()
        except TimeoutError:
            log.warning("flush_incomplete")
        await executions.leave()
        for chore in chores:
            chore.cancel()
