"""The collector's process: one workspace, everything of it from disk and log at every start.

Start                                              Stop (SIGHUP, SIGINT: handing over; a drain that is over)
    0  whose volume it is (volume.py); checkpoint to
       go on from (restoring.py)
    1  `.tether`, lock: one collector a workspace      1  controls are no longer served
    2  journal                                         2  spools are no longer read; what was read is stored
    3  bus, for as long as that takes                  3  keepers are let go: they and their CLIs run on
    4  every unended execution goes on                 4  final snapshots that are not on disk yet are written, else
    5  controls are served, registration, ready           each is told as a `durability_gap`: log, registration
                                                       5  bus, journal, lock

SIGTERM is a drain (draining.py) within `collector_drain_grace_s`: what is not over by then is handed over, and the next
collector goes on with it. A recovery collector, and one that does not serve yet, hand over at once.

2 to 4 of the stop share SHUTDOWN_BUDGET_S: 2 leaves FINALS_SHARE_S of it to 4, and that the last TELL_SHARE_S to the
telling.

With `recovery` it starts nothing, and stops by itself once every execution is told to its end.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog

from tether.bus import NatsBus, connect_service
from tether.checkpoint import RESTORE_FAILED_EXIT
from tether.errors import BusError, ProblemError
from tether.failpoints import under
from tether.kv import Conflict
from tether.limits import SHUTDOWN_BUDGET_S
from tether.ports import Bus
from tether.service import ready
from tether_collector import reserve
from tether_collector.blobs import BlobStore
from tether_collector.checkpointing import Checkpoints
from tether_collector.config import CollectorSettings
from tether_collector.control_server import ControlServer
from tether_collector.draining import FAILED_EXIT, Drainer
from tether_collector.executions import Executions
from tether_collector.finals import FinalSnapshots
from tether_collector.journal import Journal
from tether_collector.material import Material
from tether_collector.pace import Pace
from tether_collector.process import prepare
from tether_collector.registration import Life, Registrar
from tether_collector.restoring import restore
from tether_collector.review import Reviewer
from tether_collector.starting import Starter
from tether_collector.surroundings import Surroundings, now_ms
from tether_collector.volume import is_ours, make_ours

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


def on_signals(stop: asyncio.Event) -> asyncio.Event:
    """SIGHUP and SIGINT hand over: they set `stop`. SIGTERM drains: it sets the event that is returned."""
    loop = asyncio.get_running_loop()
    terminated = asyncio.Event()
    for number in (signal.SIGHUP, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGTERM, terminated.set)
    return terminated


async def run_collector(
    settings: CollectorSettings,
    stop: asyncio.Event,
    *,
    terminated: asyncio.Event | None = None,
    step: Step = _failpoint,
) -> int:
    """Until `stop`, or until a drain is over; the exit code. `terminated` asks for a drain. Raises WorkspaceInUseError,
    JournalError, BusError (credentials refused)."""
    instance = f"ins_{secrets.token_hex(8)}"
    structlog.contextvars.bind_contextvars(
        tenant=settings.tenant,
        workspace=settings.workspace,
        sandbox=settings.sandbox,
        boot=settings.boot,
        instance=instance,
    )
    ends = Ends(stop, terminated or asyncio.Event())
    early = asyncio.create_task(ends.before_serving(), name="sigterm")
    try:
        return await _run(settings, instance, ends, step)
    finally:
        early.cancel()
        await asyncio.gather(early, return_exceptions=True)


class Ends:
    """What ends the process. Before anything is served there is nothing that could be drained."""

    def __init__(self, stop: asyncio.Event, terminated: asyncio.Event) -> None:
        self.stop = stop
        self.terminated = terminated
        self.serving = False

    async def before_serving(self) -> None:
        await self.terminated.wait()
        if not self.serving:
            self.stop.set()


async def _run(settings: CollectorSettings, instance: str, ends: Ends, step: Step) -> int:
    name = f"tether-collector {settings.tenant}/{settings.workspace} {instance}"

    async def connect() -> NatsBus | None:
        return await connect_service(
            settings, name, ends.stop, inbox_prefix=settings.nats_inbox_prefix, connect_timeout_s=CONNECT_WAIT_S
        )

    if not await asyncio.to_thread(is_ours, settings):
        return RESTORE_FAILED_EXIT
    if settings.collector_restore is not None and not settings.recovery:
        bus = await connect()
        if bus is None:
            return 0
        async with bus:
            restored = await _unless(ends.stop, restore(settings, bus, step=step))
            if not restored:
                return 0 if restored is None else RESTORE_FAILED_EXIT
    await asyncio.to_thread(prepare, settings.state_dir)
    async with workspace_lock(settings.state_dir):
        if not await asyncio.to_thread(make_ours, settings):
            return RESTORE_FAILED_EXIT
        journal = Journal(settings.state_dir / "journal.sqlite3")
        try:
            bus = await connect()
            if bus is None:
                return 0
            async with bus:
                return await serve(settings, bus, journal, instance, ends, step)
        finally:
            journal.close()


async def _unless(stop: asyncio.Event, deed: Coroutine[Any, Any, bool]) -> bool | None:
    """What it came to; None where it was told to stop meanwhile."""
    task = asyncio.create_task(deed, name="restore")
    await _either(stop, asyncio.wait([task]))
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


async def _either(stop: asyncio.Event, over: Coroutine[Any, Any, object]) -> None:
    """Until the first of the two."""
    tasks: list[asyncio.Task[object]] = [
        asyncio.create_task(stop.wait(), name="stop"),
        asyncio.create_task(over, name="over"),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve(settings: CollectorSettings, bus: Bus, journal: Journal, instance: str, ends: Ends, step: Step) -> int:
    """Everything between the bus and the stop; the exit code."""
    changed = asyncio.Event()
    finals = FinalSnapshots(settings.state_dir, journal)
    around = Surroundings(
        settings=settings,
        bus=bus,
        journal=journal,
        blobs=BlobStore(bus, settings.tenant, settings.workspace),
        finals=finals,
        material=Material(settings.state_dir),
        instance=instance,
        changed=changed.set,
        pace=Pace(
            settings.collector_quota_events_per_s,
            settings.collector_quota_event_bytes_per_s,
        ),
        step=step,
    )
    with closing(finals), closing(Checkpoints(around)) as checkpoints:
        return await _serve(around, checkpoints, instance, ends, changed)


def _life(executions: Executions, journal: Journal, began_at: int) -> Life:
    """Of the registration: idle since the last end, or since this boot began."""
    living = next(executions.living(), None)
    return Life(None if living is not None else max(began_at, journal.last_end() or 0), executions.draining)


async def _drain_when_told(drainer: Drainer, ends: Ends, settings: CollectorSettings) -> None:
    """The task of SIGTERM."""
    await ends.terminated.wait()
    if settings.recovery:
        ends.stop.set()
        return
    try:
        await drainer.by_signal()
    except ProblemError as error:
        structlog.get_logger("tether.collector").error("drain_impossible", error=str(error))
        ends.stop.set()
    else:
        await asyncio.sleep(settings.collector_drain_grace_s)
        structlog.get_logger("tether.collector").error("drain_incomplete", grace_s=settings.collector_drain_grace_s)
        ends.stop.set()


async def _serve(
    around: Surroundings, checkpoints: Checkpoints, instance: str, ends: Ends, changed: asyncio.Event
) -> int:
    log = structlog.get_logger("tether.collector")
    settings, bus, journal, finals = around.settings, around.bus, around.journal, around.finals
    async with asyncio.TaskGroup() as group:
        executions = Executions(around, group)
        around.pace.lifted = lambda: executions.draining is not None
        began_at = journal.boot_seen(settings.boot, now_ms())
        life = partial(_life, executions, journal, began_at)
        registrar = Registrar(bus, settings, instance, executions.summaries, changed, life)
        recovered = executions.recover()
        starter = Starter(executions, instance)
        drainer = Drainer(executions, starter, checkpoints, changed.set)
        await asyncio.to_thread(reserve.keep, settings.state_dir)
        drainer.recover()
        server = ControlServer(executions, starter, drainer)
        ends.serving = True
        async with server.serving(bus):
            chores = [
                group.create_task(registrar.run(), name="registration"),
                group.create_task(executions.housekeeping(), name="housekeeping"),
                group.create_task(finals.run(), name="final-snapshots"),
                group.create_task(Reviewer(bus, journal, executions.put_back).run(), name="review"),
                group.create_task(checkpoints.note_base(), name="checkpoint-base"),
                group.create_task(registrar.probe(), name="confinement-probe"),
            ]
            drains = [
                group.create_task(drainer.run(), name="drain"),
                group.create_task(_drain_when_told(drainer, ends, settings), name="sigterm-drain"),
            ]
            ready(settings, workspace=settings.workspace, boot=settings.boot, instance=instance, recovered=recovered)
            over = executions.over() if settings.recovery else drainer.over.wait()
            await _either(ends.stop, over)
        for drain in drains:
            drain.cancel()
        log.info("collector_stopping", drained=drainer.over.is_set())
        deadline_s = asyncio.get_running_loop().time() + SHUTDOWN_BUDGET_S
        try:
            async with asyncio.timeout_at(deadline_s - FINALS_SHARE_S):
                await executions.flush()
        except TimeoutError:
            log.warning("flush_incomplete")
        await executions.leave()
        for chore in chores:
            chore.cancel()
        await asyncio.wait([*chores, *drains])
        await _save_finals(finals, registrar, deadline_s)
    return FAILED_EXIT if drainer.failed else 0


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
