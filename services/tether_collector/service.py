"""The collector's process: one workspace, everything of it from disk and log at every start.

Start                                              Stop (SIGTERM; drain is another verb)
    1  `.tether`, lock: one collector a workspace      1  controls are no longer served
    2  journal                                         2  spools are no longer read; what was read is stored
    3  bus, for as long as that takes                  3  keepers are let go: they and their CLIs run on
    4  every unended execution goes on                 4  final snapshots that are not on disk yet are written, else
    5  controls are served, registration, ready           each is told as a `durability_gap`: log, registration
                                                       5  bus, journal, lock

2 to 4 share SHUTDOWN_BUDGET_S: 2 leaves FINALS_SHARE_S of it to 4, and that the last TELL_SHARE_S to the telling.

With `recovery` it starts nothing, and stops by itself once every execution is told to its end.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Final

import structlog

from tether.bus import connect_service
from tether.errors import BusError
from tether.failpoints import under
from tether.kv import Conflict
from tether.limits import SHUTDOWN_BUDGET_S
from tether.ports import Bus
from tether.service import ready
from tether_collector.blobs import BlobStore
from tether_collector.config import CollectorSettings
from tether_collector.control_server import ControlServer
from tether_collector.execution_shell import Surroundings
from tether_collector.executions import Executions
from tether_collector.finals import FinalSnapshots
from tether_collector.journal import Journal
from tether_collector.process import prepare
from tether_collector.registration import Registrar
from tether_collector.review import Reviewer
from tether_collector.starting import Starter

LOCK_WAIT_S: Final = SHUTDOWN_BUDGET_S + 2.0  # a predecessor that is stopping holds it for so long
LOCK_LOOK_S: Final = 0.05
CONNECT_WAIT_S: Final = 10.0
FINALS_SHARE_S: Final = 4.0
TELL_SHARE_S: Final = 1.0

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
    changed = asyncio.Event()
    finals = FinalSnapshots(settings.state_dir, journal)
    around = Surroundings(
        settings=settings,
        bus=bus,
        journal=journal,
        blobs=BlobStore(bus, settings.tenant, settings.workspace),
        finals=finals,
        changed=changed.set,
        step=step,
    )
    with closing(finals):
        await _serve(around, instance, stop, changed)


async def _serve(around: Surroundings, instance: str, stop: asyncio.Event, changed: asyncio.Event) -> None:
    log = structlog.get_logger("tether.collector")
    settings, bus, journal, finals = around.settings, around.bus, around.journal, around.finals
    async with asyncio.TaskGroup() as group:
        executions = Executions(around, group)
        registrar = Registrar(bus, settings, instance, executions.summaries, changed)
        recovered = executions.recover()
        server = ControlServer(executions, Starter(executions, instance))
        async with server.serving(bus):
            chores = [
                group.create_task(registrar.run(), name="registration"),
                group.create_task(executions.housekeeping(), name="housekeeping"),
                group.create_task(finals.run(), name="final-snapshots"),
                group.create_task(Reviewer(bus, journal, executions.put_back).run(), name="review"),
            ]
            ready(settings, workspace=settings.workspace, boot=settings.boot, instance=instance, recovered=recovered)
            await (_either(stop, executions.over()) if settings.recovery else stop.wait())
        log.info("collector_stopping")
        deadline_s = asyncio.get_running_loop().time() + SHUTDOWN_BUDGET_S
        try:
            async with asyncio.timeout_at(deadline_s - FINALS_SHARE_S):
                await executions.flush()
        except TimeoutError:
            log.warning("flush_incomplete")
        await executions.leave()
        for chore in chores:
            chore.cancel()
        await asyncio.wait(chores)
        await _save_finals(finals, registrar, deadline_s)


async def _save_finals(finals: FinalSnapshots, registrar: Registrar, deadline_s: float) -> None:
    """The last thing before the bus goes: the registration is what tells others of the gaps."""
    log = structlog.get_logger("tether.collector")
    lost = await finals.flush(deadline_s - TELL_SHARE_S)
    for one in lost:
        log.error("final_snapshot_lost", execution=one.target.execution, reason="durability_gap")
    if lost:
        try:
            async with asyncio.timeout_at(deadline_s):
                await registrar.write()
        except (BusError, Conflict, TimeoutError) as error:
            log.warning("gaps_not_registered", error=str(error))
