"""The whole execution plane over the in-memory bus, in virtual time: real routers, the agent service's real driver, the
real collector with its journal and spool, real control leases; only processes are models (`support_model_cli`).

Every service may die, at a step of its own or at any moment, may be frozen, and has a bus that goes wrong by chance.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import sqlite3
import tempfile
import traceback
import types
from collections.abc import Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

from support_model_cli import Machine
from support_router import TENANT, World, now_ms, world
from tether import ids, subjects
from tether.control import ControlReply, ControlRequest
from tether.control_lease import ControlLeases
from tether.errors import BusError, ProblemError
from tether.events import Event
from tether.frames import Frame, decode
from tether.ids import ExecutionTarget
from tether.prompt import Prompt
from tether.testing import FaultKind, MemoryBus, MemoryServer
from tether_agent.drive import Driver
from tether_agent.providers import Compute, NotReadyError
from tether_collector.config import CollectorSettings
from tether_collector.journal import Journal
from tether_collector.process import prepare
from tether_collector.service import Ends, serve
from tether_router.config import RouterSettings
from tether_router.service import route

WORKSPACE: Final = "w1"
BOOT: Final = "boot-1"
FACTS: Final = {"pid": 7}
CALLS: Final = ("publish", "request", "last", "read", "at", "next_after")
RATES: Final = {
    "publish": {FaultKind.LOSE_ACK: 0.02, FaultKind.LOSE_MESSAGE: 0.02, FaultKind.LATE: 0.01, FaultKind.DELAY: 0.08},
    "request": {FaultKind.LOSE_ACK: 0.05, FaultKind.LOSE_MESSAGE: 0.03, FaultKind.DELAY: 0.08},
    "last": {FaultKind.UNAVAILABLE: 0.02, FaultKind.DELAY: 0.05},
    "read": {FaultKind.UNAVAILABLE: 0.02, FaultKind.DELAY: 0.05},
}


@dataclass(eq=False)
class Service:
    """One process: its connection and its main task."""

    name: str
    bus: MemoryBus
    task: asyncio.Task[None] | None = None
    dead: bool = False

    async def kill(self) -> None:
        """Nothing of it reaches anybody from here on; what was frozen or late of it still may."""
        self.die()
        if self.task is not None:
            await asyncio.gather(self.task, return_exceptions=True)

    def die(self) -> None:
        self.dead = True
        self.bus.disconnect()
        self.bus.closed = True
        if self.task is not None:
            self.task.cancel()

    @property
    def over(self) -> bool:
        return self.dead or (self.task is not None and self.task.done())


@dataclass(eq=False)
class Asked:
    """One control as a client sent it, perhaps several times: what it was told."""

    request: ControlRequest
    replies: list[ControlReply] = field(default_factory=list)
    refusals: list[ProblemError] = field(default_factory=list)
    lost: int = 0


@dataclass(eq=False)
class Backend(Service):
    leases: ControlLeases | None = None
    asking: set[asyncio.Task[None]] = field(default_factory=set)


class Provider:
    """Starts the collector where it does not run, as the local provider does."""

    name = "model"

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    async def ensure(self, tenant: str, workspace: str, restore: str | None = None) -> Compute:
        plane = self._plane
        if plane.collector is None or plane.collector.over:
            raise NotReadyError("the collector is being started")
        return Compute(tenant, workspace, ids.sandbox_id(tenant, workspace), BOOT, FACTS)


class Clock(types.ModuleType):
    """`time` as the services under test see it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__("clock")
        self._loop = loop

    def time(self) -> float:
        return self._loop.time() + 1_700_000_000

    def time_ns(self) -> int:
        return int(self._loop.time() * 1e9) + 1_700_000_000_000_000_000

    def monotonic(self) -> float:
        return self._loop.time()


TIMED: Final = (
    "tether_collector.hands",
    "tether_collector.surroundings",
    "tether_collector.next_process",
    "tether_collector.registration",
    "tether_collector.spool_inputs",
    "tether_collector.keeper.spool",
    "tether_agent.waking",
)


class Plane:
    """See the module. `seed` decides every delay and fault."""

    def __init__(self, seed: int, loop: asyncio.AbstractEventLoop) -> None:
        random.seed(seed)  # services draw their back-offs from it
        self.random = random.Random(seed)
        self.server = MemoryServer()
        self.loop = loop
        self.conversations: dict[str, str] = {}  # execution → conversation
        self.machine = Machine(self.random.randrange(1 << 30), loop, lambda name: self.conversations[name])
        self.routers: list[Service] = []
        self.agent: Service | None = None
        self.collector: Service | None = None
        self.backends: list[Backend] = []
        self.world: World
        self.asked: dict[str, Asked] = {}
        self.crash_at: list[str] = []  # steps at which the collector dies, in this order
        self.failures: list[str] = []  # what a service died of that nobody killed
        shared = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="tether-plane-", dir=shared if shared.is_dir() else None))
        self.settings = CollectorSettings(
            tenant=TENANT,
            workspace=WORKSPACE,
            boot=BOOT,
            workspace_dir=self.folder / "workspace",
            agents={"scripted": ("scripted",)},
            facts=FACTS,
        )

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """The edges at which models stand in: processes, and the wall clock."""

        def dead() -> Callable[[], bool]:
            collector = self.collector
            assert collector is not None
            return lambda: collector.dead

        async def launch(folder: Path, spec: Any) -> Any:
            return await self.machine.launch(folder, spec, dead())

        async def adopt(folder: Path, _nonce: str) -> Any:
            return await self.machine.adopt(folder, dead())

        async def swept(_prefix: str) -> bool:
            return True

        clock = Clock(self.loop)
        with contextlib.ExitStack() as stack:
            for module in TIMED:
                stack.enter_context(mock.patch(f"{module}.time", clock))
            stack.enter_context(mock.patch("tether_collector.process.launch", launch))
            stack.enter_context(mock.patch("tether_collector.process.adopt", adopt))
            for module in ("process", "execution_shell", "next_process"):
                stack.enter_context(mock.patch(f"tether_collector.{module}.sweep", swept))
            yield

    async def open(self) -> None:
        outside = MemoryBus(self.server)
        self.world = await world(outside)
        (self.folder / "workspace").mkdir()
        prepare(self.settings.state_dir)
        self.start_collector()
        self.start_agent()
        for _ in range(2):
            self.start_router()
            self.start_backend()

    async def close(self) -> None:
        for service in self.services():
            await service.kill()
        for backend in self.backends:
            await asyncio.gather(*backend.asking, return_exceptions=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def services(self) -> list[Service]:
        return [one for one in (*self.routers, self.agent, self.collector, *self.backends) if one is not None]

    # --- services ---

    def connection(self) -> MemoryBus:
        bus = MemoryBus(self.server)
        bus.faults.random(self.random.randrange(1 << 30), RATES, delay_max_s=2.0)
        return bus

    def _run(self, service: Service, work: Coroutine[Any, Any, None]) -> None:
        service.task = self.loop.create_task(work, name=service.name)
        service.task.add_done_callback(lambda task: self._ended(service, task))

    def _ended(self, service: Service, task: asyncio.Task[None]) -> None:
        if not service.dead and not task.cancelled() and task.exception() is not None:
            self.failures.append(service.name + ":\n" + "".join(traceback.format_exception(task.exception())))

    def start_router(self) -> None:
        bus = self.connection()
        service = Service(f"router-{len(self.routers)}", bus)
        settings = RouterSettings(tenants=TENANT, router_sweep_s=60.0)
        self._run(service, route(bus, settings, asyncio.Event(), clock=now_ms))
        self.routers.append(service)

    def start_agent(self) -> None:
        bus = self.connection()
        self.agent = Service("agent", bus)
        self._run(self.agent, Driver(bus, Provider(self), commands_max=8).run())  # type: ignore[arg-type]

    def start_collector(self) -> None:
        bus = self.connection()
        service = self.collector = Service("collector", bus)
        number = self.random.randrange(1 << 30)

        def step(name: str) -> None:
            if not service.dead and self.crash_at and self.crash_at[0] == name:
                self.crash_at.pop(0)
                service.die()
            if service.dead:
                raise asyncio.CancelledError(f"the collector died at {name}")

        async def work() -> None:
            journal = Journal(self.settings.state_dir / "journal.sqlite3")
            try:
                ends = Ends(asyncio.Event(), asyncio.Event())
                await serve(self.settings, bus, journal, f"ins_{number:x}", ends, step)
            finally:
                journal.close()

        self._run(service, work())

    def start_backend(self) -> None:
        bus = self.connection()
        backend = Backend(f"backend-{len(self.backends)}", bus)
        backend.leases = ControlLeases(bus, backend.name)
        self.backends.append(backend)

    async def restart(self, service: Service) -> None:
        """Kill it and start its successor."""
        await service.kill()
        if service in self.routers:
            self.routers.remove(service)
            self.start_router()
        elif service is self.agent:
            self.start_agent()
        elif service is self.collector:
            self.start_collector()
        elif isinstance(service, Backend):
            self.backends.remove(service)
            self.start_backend()

    def freeze(self, service: Service, seconds: float) -> None:
        """Its next calls of each kind stop before their effect and go on later, whatever has happened by then."""
        for call in CALLS:
            service.bus.faults.add(call, FaultKind.DELAY, times=2, delay_s=seconds)

    async def revive(self) -> None:
        """Whoever died by itself (at a step) is started again, as its supervisor would."""
        if self.collector is not None and self.collector.over:
            await self.restart(self.collector)

    def heal(self) -> None:
        """From here on nothing goes wrong any more; what is under way may still be late."""
        self.crash_at.clear()
        for service in self.services():
            service.bus.faults.clear()
        self.machine.release()

    # --- clients ---

    async def send(self, prompt: Prompt, *, again: str = "") -> None:
        execution = ids.execution_id(TENANT, prompt.request_id, prompt.attempt)
        self.conversations[execution] = prompt.conversation
        await self.world.send(prompt, again=again)

    def control(self, backend: Backend, request: ControlRequest) -> None:
        """Send it in the background; the same id again counts as the same control's."""
        asked = self.asked.setdefault(request.control, Asked(request))
        task = self.loop.create_task(self._ask(backend, request, asked), name=f"ask-{request.control}")
        backend.asking.add(task)
        task.add_done_callback(backend.asking.discard)

    async def _ask(self, backend: Backend, request: ControlRequest, asked: Asked) -> None:
        assert backend.leases is not None
        try:
            asked.replies.append(await backend.leases.ask(request))
        except ProblemError as error:
            asked.refusals.append(error)
        except BusError:
            asked.lost += 1

    async def target(self, conversation: str) -> ExecutionTarget | None:
        return (await self.world.owner(conversation, WORKSPACE)).target

    # --- what an outsider finds ---

    async def events(self, execution: str) -> list[Event]:
        subject = subjects.event(TENANT, WORKSPACE, self.conversations[execution], execution)
        found: list[Event] = []
        for message in await self.world.stored(subjects.events_stream(TENANT), subject):
            frame = decode(message.subject, message.data)
            assert isinstance(frame, Frame)
            found += frame.events
        return found

    def journaled(self) -> dict[str, dict[str, Any]]:
        """Control id → what the collector's journal says, read beside it."""

        with contextlib.closing(sqlite3.connect(self.settings.state_dir / "journal.sqlite3")) as database:
            rows = database.execute(
                "SELECT control, execution, verb, status, problem, payload FROM controls"
            ).fetchall()
        names = ("control", "execution", "verb", "status", "problem", "payload")
        found = {row[0]: dict(zip(names, row, strict=True)) for row in rows}
        for entry in found.values():
            entry["payload"] = json.loads(entry["payload"])
        return found

    async def story(self) -> str:
        """Everything that an outsider finds, for whoever has to understand a failure."""
        lines: list[str] = []
        for keeper in self.machine.keepers.values():
            state = f"alive={keeper.alive} gone={keeper.gone} proven={keeper.proven} killed={keeper.killed}"
            lines.append(f"{keeper.spec.execution} {keeper.behaviour} {state} stdin={keeper.stdin}")
        for execution in self.conversations:
            events = [f"  {one.ordinal} {one.at} {one.type} {one.body}"[:240] for one in await self.events(execution)]
            lines += [execution, *events] if events else []
        lines += [f"{entry}" for entry in self.journaled().values()]
        lines += [
            f"{asked.request.control} {asked.replies} {asked.refusals} {asked.lost}" for asked in self.asked.values()
        ]
        collector = self.collector
        if collector is not None and collector.task is not None:
            lines.append(f"collector over={collector.over}")
        for task in asyncio.all_tasks(self.loop):
            frames = [f"{one.f_code.co_filename.rpartition('/')[2]}:{one.f_lineno}" for one in task.get_stack(limit=2)]
            lines.append(f"task {task.get_name()} {frames}")
        return "\n".join(lines)


@asynccontextmanager
async def plane(seed: int) -> Any:
    """A plane for one scenario that a test writes by hand."""
    made = Plane(seed, asyncio.get_running_loop())
    with made.patched():
        await made.open()
        try:
            yield made
        finally:
            await made.close()
