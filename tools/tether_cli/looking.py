"""What `tether top` shows: one look at the set, from three places that may each be away.

    /proc       the set's processes: alive, memory, CPU since the look before
    the bus     sandboxes and their registrations, executions, queues, streams, consumers
    state file  which processes there should be

A place that does not answer leaves its part empty and says why in `problems`. Nothing is remembered but what a rate
needs: the CPU time and the ordinals of the look before.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tether import frames, subjects, topology
from tether.bus import NatsBus, connect
from tether.errors import BusError, InvalidError
from tether.frames import Frame
from tether.kv import Bucket
from tether.owner import OwnerRecord
from tether.ports import Bus
from tether.processes import ProcessId, is_running, stat_fields
from tether.sandbox import ExecutionSummary, Registration, SandboxRecord
from tether.subjects import EventAddress
from tether_cli.quotas_view import Quota, quotas
from tether_cli.state import Paths, SetState

EXECUTIONS_MAX: Final = 200  # that are looked at each time; what is left out is counted
LOOK_S: Final = 3.0  # for everything that the bus is asked in one look
_CONNECT_S: Final = 1.0
_RSS: Final = 21  # pages, of the fields behind the command in /proc/{pid}/stat
_UTIME: Final = 11
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Service:
    """`cpu_share` of one core since the look before, None at the first; `up_s` since its start."""

    name: str
    pid: int
    alive: bool
    rss_bytes: int = 0
    cpu_share: float | None = None
    up_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sandbox:
    """`connected`: its collector's registration is there. `state` is the agent service's word."""

    workspace: str
    sandbox: str
    state: str
    connected: bool
    executions: int
    starts: int


@dataclass(frozen=True, slots=True)
class Execution:
    """`events_per_s` since the look before, None at the first. `waiting`: approvals and questions."""

    execution: str
    conversation: str
    workspace: str
    state: str
    agent: str
    age_s: float
    events: int
    events_per_s: float | None
    waiting: int


@dataclass(frozen=True, slots=True)
class Consumer:
    """`lag`: messages that it has not settled, delivered or not."""

    name: str
    lag: int


@dataclass(frozen=True, slots=True)
class Stream:
    name: str
    messages: int
    size_bytes: int
    consumers: tuple[Consumer, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """One look. `prompts_waiting` and `commands_waiting` are None where the bus did not say."""

    at_ms: int
    services: tuple[Service, ...] = ()
    sandboxes: tuple[Sandbox, ...] = ()
    executions: tuple[Execution, ...] = ()
    executions_omitted: int = 0
    streams: tuple[Stream, ...] = ()
    prompts_waiting: int | None = None
    commands_waiting: int | None = None
    quotas: tuple[Quota, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class _OfBus:
    sandboxes: list[Sandbox] = field(default_factory=list)
    executions: list[Execution] = field(default_factory=list)
    omitted: int = 0
    streams: list[Stream] = field(default_factory=list)
    quotas: tuple[Quota, ...] = ()


class Looker:
    """Looks at one set, again and again. Close it with `close`."""

    def __init__(self, up: SetState) -> None:
        self._up = up
        self._paths = Paths(Path(up.data))
        self._bus: NatsBus | None = None
        self._cpu: dict[ProcessId, tuple[float, float]] = {}  # → (when, CPU seconds)
        self._ordinals: dict[str, tuple[float, int]] = {}  # execution → (when, last ordinal)

    async def close(self) -> None:
        if self._bus is not None:
            await self._bus.close()

    async def look(self) -> View:
        problems = [] if self._up.is_up else ["the set's own process has ended: `tether down` ends what is left"]
        services = self._services()
        problems += [f"{service.name} is down" for service in services if not service.alive]
        found = _OfBus()
        try:
            async with asyncio.timeout(LOOK_S):
                found = await self._look_at_bus(await self._connected())
        except TimeoutError:
            problems.append(f"the bus did not answer within {LOOK_S:g} s")
        except BusError as error:
            problems.append(f"the bus cannot be asked: {error.detail}")
        problems += [f"sandbox of {box.workspace} is disconnected" for box in found.sandboxes if _is_missed(box)]
        depth = {stream.name: stream.messages for stream in found.streams}
        return View(
            at_ms=time.time_ns() // 1_000_000,
            services=tuple(services),
            sandboxes=tuple(found.sandboxes),
            executions=tuple(found.executions),
            executions_omitted=found.omitted,
            streams=tuple(found.streams),
            prompts_waiting=depth.get(subjects.PROMPTS_STREAM),
            commands_waiting=depth.get(subjects.COMMANDS_STREAM),
            quotas=found.quotas,
            problems=tuple(problems),
        )

    # --- processes ---

    def _services(self) -> list[Service]:
        named = {"set": self._up.supervisor, **self._up.children, **self._collectors()}
        found = [self._service(name, process) for name, process in named.items()]
        self._cpu = {process: self._cpu[process] for process in named.values() if process in self._cpu}
        return found

    def _service(self, name: str, process: ProcessId) -> Service:
        fields = stat_fields(process.pid) if is_running(process) else None
        if fields is None:
            return Service(name, process.pid, alive=False)
        now_s = time.monotonic()
        cpu_s = (int(fields[_UTIME]) + int(fields[_UTIME + 1])) / _TICKS
        before = self._cpu.get(process)
        self._cpu[process] = (now_s, cpu_s)
        share = None if before is None or now_s <= before[0] else (cpu_s - before[1]) / (now_s - before[0])
        up_s = time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_ticks / _TICKS
        return Service(name, process.pid, True, int(fields[_RSS]) * _PAGE, share, max(0.0, up_s))

    def _collectors(self) -> dict[str, ProcessId]:
        """Of the sandboxes on this machine, from the agent service's own files."""
        found = {}
        for path in sorted((self._paths.agent / "sandboxes").glob("*/sandbox.json")):
            try:
                value = json.loads(path.read_bytes())
                if value["status"] in ("running", "starting") and value["pid"]:
                    process = ProcessId(value["pid"], value["start_ticks"], value["machine_boot"])
                    found[f"collector {value['workspace']}"] = process
            except (OSError, ValueError, KeyError, TypeError):
                continue  # being written, or of another version
        return found

    # --- the bus ---

    async def _connected(self) -> Bus:
        """Raises BusError; a connection that was made once reconnects by itself."""
        if self._bus is None:
            up = self._up
            self._bus = await connect(
                up.nats_url,
                name="tether-top",
                creds_file=up.nats_creds_file,
                connect_timeout_s=_CONNECT_S,
            )
        return self._bus

    async def _look_at_bus(self, bus: Bus) -> _OfBus:
        found = _OfBus()
        tenant = self._up.tenant
        bucket = Bucket(bus, subjects.SANDBOXES)
        registered = [one async for _, one in bucket.records(Registration, f"{tenant}.*.*")]
        by_workspace = {one.workspace: one for one in registered}
        async for _, record in bucket.records(SandboxRecord, f"{tenant}.*"):
            found.sandboxes.append(sandbox_of(record, by_workspace.get(record.workspace)))
        living = [one for each in registered for one in each.executions if one.state != "ended"]
        living.sort(key=lambda one: one.started_at)
        found.omitted = max(0, len(living) - EXECUTIONS_MAX)
        for summary in living[:EXECUTIONS_MAX]:
            found.executions.append(await self._execution(bus, summary))
        seen = {one.execution for one in found.executions}
        self._ordinals = {name: entry for name, entry in self._ordinals.items() if name in seen}
        found.streams = await self._streams(bus)
        found.quotas = await quotas(self._up, bus)
        return found

    async def _execution(self, bus: Bus, summary: ExecutionSummary) -> Execution:
        target = summary.target
        key = subjects.owner_key(target.tenant, target.workspace, target.conversation)
        owner = await Bucket(bus, subjects.OWNERS).record(key, OwnerRecord)
        is_owner = owner is not None and owner.target is not None and owner.target.execution == target.execution
        address = EventAddress(target.tenant, target.workspace, target.conversation, target.execution)
        events = await _last_ordinal(bus, address)
        now_s = time.monotonic()
        before = self._ordinals.get(target.execution)
        self._ordinals[target.execution] = (now_s, events)
        rate = None if before is None or now_s <= before[0] else (events - before[1]) / (now_s - before[0])
        return Execution(
            execution=target.execution,
            conversation=target.conversation,
            workspace=target.workspace,
            state=summary.state,
            agent=str(owner.agent.get("kind", "")) if owner is not None and is_owner else "",
            age_s=max(0.0, time.time() - summary.started_at / 1000),
            events=events,
            events_per_s=rate,
            waiting=summary.pending_interactions,
        )

    async def _streams(self, bus: Bus) -> list[Stream]:
        own = topology.tenant(self._up.tenant)
        log = subjects.events_stream(self._up.tenant)
        durables: dict[str, list[str]] = {
            subjects.PROMPTS_STREAM: [subjects.ROUTER_DURABLE],
            subjects.COMMANDS_STREAM: [subjects.AGENT_DURABLE],
            log: [subjects.projection_durable(name, 0) for name in self._databases()],
        }
        found = []
        names = (*topology.names(topology.base()), *topology.names(own))
        for name in sorted(names, key=lambda name: name.startswith("KV_")):  # queues and logs first, then buckets
            state = await bus.state(name)
            if state is None:
                continue
            consumers = [await _consumer(bus, name, durable) for durable in durables.get(name, ())]
            kept = tuple(one for one in consumers if one is not None)
            found.append(Stream(name, state.messages, state.bytes, kept))
        return found

    def _databases(self) -> list[str]:
        """The backend says in its ready file into which database it projects."""
        try:
            facts: Mapping[str, object] = json.loads((self._paths.ready / "backend.json").read_bytes())
        except (OSError, ValueError):
            return []
        database = facts.get("database")
        return [database] if isinstance(database, str) else []


def _is_missed(box: Sandbox) -> bool:
    return not box.connected and box.state in ("active", "draining")


def sandbox_of(record: SandboxRecord, registration: Registration | None) -> Sandbox:
    if record.state == "suspended":
        registration = None  # left over, until it expires
    living = 0 if registration is None else sum(one.state != "ended" for one in registration.executions)
    connected = registration is not None and registration.sandbox == record.sandbox
    return Sandbox(record.workspace, record.sandbox, record.state, connected, living, record.starts)


async def _last_ordinal(bus: Bus, address: EventAddress) -> int:
    message = await bus.last(subjects.events_stream(address.tenant), address.subject)
    if message is None:
        return 0
    try:
        frame = frames.decode(message.subject, message.data)
    except InvalidError:
        return 0
    return frame.last if isinstance(frame, Frame) else 0


async def _consumer(bus: Bus, stream: str, durable: str) -> Consumer | None:
    state = await bus.consumer(stream, durable)
    return None if state is None else Consumer(durable, state.pending + state.ack_pending)
