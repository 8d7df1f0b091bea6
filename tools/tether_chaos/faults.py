"""Faults on a running set: SIGKILL; SIGSTOP and, after a while, SIGCONT; a network that stalls or is cut; a full disk.

The set's own supervisors restart what was killed. Every fault notes from when to when it lasted (`outages`): a killed
child is up again when its next start is ready, a collector when it has said so in its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tether.processes import ProcessId, identify, is_running, send_signal
from tether_chaos.chaos_set import ChaosSet
from tether_chaos.outages import Outage
from tether_chaos.plan import ALL, SERVICES, Fault
from tether_cli import state

AT_EVENT_S: Final = 2.0  # without an event for so long the fault hits all the same
_LOOK_S: Final = 0.03
_UP_S: Final = 60.0
_READY: Final = (b"service_ready",)
_BALLAST_STEP: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Victim:
    """`scope`: the workspace of a collector, else empty. `name`: of the set's child."""

    tier: str
    name: str
    scope: str
    process: ProcessId


def victims(data: Path, service: str) -> list[Victim]:
    """Living processes of a service: a collector per sandbox, a nats-server per node."""
    paths = state.Paths(data)
    if service != "collector":
        now = state.read(paths)
        children = {} if now is None else now.children
        return [
            Victim(service, name, "", child)
            for name, child in sorted(children.items())
            if name.rstrip("0123456789") == service and is_running(child)
        ]
    found = []
    for path in sorted((paths.agent / "sandboxes").glob("*/sandbox.json")):
        try:
            recorded = json.loads(path.read_bytes())
            pid, workspace = int(recorded["pid"]), str(recorded["workspace"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # just being written, or no collector runs
        identity = identify(pid)
        if identity is not None and b"tether_collector" in _command(pid):
            found.append(Victim(service, service, workspace, identity))
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class Kill:
    """One SIGKILL of one process, and its successor's coming. Made just before `strike`."""

    def __init__(self, services: ChaosSet, victim: Victim) -> None:
        self.victim = victim
        self.began_s = 0.0  # unix seconds
        self._set = services
        self._log: Path | None = None
        self._offset = 0
        if victim.tier == "collector":
            folder = services.paths.agent / "sandboxes" / f"{services.options.tenant}.{victim.scope}"
            self._log = folder / "collector.log"
            self._offset = self._log.stat().st_size if self._log.exists() else 0

    def strike(self) -> bool:
        """False where it had ended already."""
        self.began_s = time.time()
        return send_signal(self.victim.process, signal.SIGKILL)

    async def up(self) -> float | None:
        """When its successor was ready (unix seconds); None where that took too long."""
        deadline_s = time.monotonic() + _UP_S
        end_s: float | None = None
        while end_s is None and time.monotonic() < deadline_s:
            await asyncio.sleep(_LOOK_S)
            if self._log is not None:
                end_s = time.time() if _said_ready(self._log, self._offset) else None
            else:
                ups = self._set.ups[self.victim.name].items()
                later = [at for process, at in ups if process != self.victim.process]
                end_s = next((at for at in later if at > self.began_s), None)
        return end_s


@dataclass(slots=True)
class Done:
    """What the saboteur did: sentences, kills by tier, when what was out, and how long each tier took from its kill
    until its successor was ready (seconds)."""

    faults: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    outages: list[Outage] = field(default_factory=list)
    restart_s: dict[str, list[float]] = field(default_factory=dict)


class Saboteur:
    """Does the faults of a plan. `next_event` waits for the next stored event. Nothing stays frozen, stalled or full
    when `run` returns."""

    def __init__(
        self, services: ChaosSet, next_event: Callable[[], Awaitable[object]], tiers: Sequence[str] = SERVICES
    ) -> None:
        self._set = services
        self._data = services.paths.root
        self._tiers = tiers
        self._next_event = next_event
        self._frozen: dict[ProcessId, float | None] = {}  # when it was killed in its sleep (unix seconds)
        self._latest: dict[tuple[str, str], Kill] = {}  # by the child's name and the workspace
        self.done = Done()

    async def run(self, faults: Iterable[Fault]) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with asyncio.TaskGroup() as group:
                for number, fault in enumerate(faults):
                    await asyncio.sleep(fault.after_s)
                    if fault.at_event:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(AT_EVENT_S):
                                await self._next_event()
                    hit = self._hit(fault, group, number)
                    if hit:
                        self.done.faults.append(f"{loop.time() - began_s:6.2f} s  {fault} ({hit})")
        finally:
            for victim in list(self._frozen):
                send_signal(victim, signal.SIGCONT)

    def _hit(self, fault: Fault, group: asyncio.TaskGroup, number: int) -> str:
        """What was hit; empty where nothing could be."""
        if fault.how == "disk":
            group.create_task(self._fill_disk(fault.for_s), name=f"disk-{number}")
            return "workspaces"
        chosen = self._choose(fault)
        if fault.how in ("stall", "cut"):
            return self._network(fault, chosen, group, number)
        for victim in chosen:
            if fault.how == "kill":
                self._kill(victim, group, number)
            else:
                group.create_task(self._freeze(victim, fault.for_s), name=f"freeze-{number}")
        return ", ".join(f"pid {victim.process.pid}" for victim in chosen)

    def _choose(self, fault: Fault) -> list[Victim]:
        """The fault's own service where it lives, else the next that does: while one restarts another can be hit."""
        if fault.service == ALL:
            return [victim for tier in self._tiers for victim in self._hittable(tier)]
        at = self._tiers.index(fault.service)
        for tier in (*self._tiers[at:], *self._tiers[:at]):
            found = self._hittable(tier)
            if found:
                return [found[int(fault.pick * len(found))]]
        return []

    def _hittable(self, tier: str) -> list[Victim]:
        found = victims(self._data, tier)
        if tier == "nats" and len(found) < self._set.nodes:
            return []  # a cluster of three bears the loss of one
        return found

    # --- processes ---

    def _kill(self, victim: Victim, group: asyncio.TaskGroup, number: int) -> None:
        kill = Kill(self._set, victim)
        if not kill.strike():
            return
        if victim.process in self._frozen:
            self._frozen[victim.process] = kill.began_s
        self.done.kills[victim.tier] += 1
        self._latest[victim.name, victim.scope] = kill
        group.create_task(self._until_up(kill), name=f"up-{victim.name}-{number}")

    async def _until_up(self, kill: Kill) -> None:
        end_s = await kill.up()
        if end_s is not None and self._latest[kill.victim.name, kill.victim.scope] is kill:  # not killed once more
            self.done.restart_s.setdefault(kill.victim.tier, []).append(round(end_s - kill.began_s, 3))
        self.done.outages.append(Outage(kill.victim.tier, kill.victim.scope, kill.began_s, end_s))

    async def _freeze(self, victim: Victim, for_s: float) -> None:
        if not send_signal(victim.process, signal.SIGSTOP):
            return
        began_s = time.time()
        self._frozen.setdefault(victim.process, None)
        try:
            await asyncio.sleep(for_s)
        finally:
            send_signal(victim.process, signal.SIGCONT)
            killed_s = self._frozen.pop(victim.process, None)  # then its successor's start is another outage
            end_s = time.time() if killed_s is None else killed_s
            self.done.outages.append(Outage(victim.tier, victim.scope, began_s, end_s))

    # --- network and disk ---

    def _network(self, fault: Fault, chosen: Sequence[Victim], group: asyncio.TaskGroup, number: int) -> str:
        if not chosen or chosen[0].tier == "nats":
            return ""
        tier = chosen[0].tier
        proxy = self._set.proxies.get("agent" if tier == "collector" else tier)
        if proxy is None:
            return ""
        now_s = time.time()
        if fault.how == "cut":
            self.done.outages.append(Outage(tier, "", now_s, now_s))
            return f"{proxy.cut(tier)} connections of {tier}"

        async def stall() -> None:
            try:
                await proxy.stall(tier, fault.for_s)
            finally:
                self.done.outages.append(Outage(tier, "", now_s, time.time()))

        group.create_task(stall(), name=f"stall-{number}")
        return tier

    async def _fill_disk(self, for_s: float) -> None:
        """Takes all that the workspaces' file system has left, where it is one of its own (see `disk`)."""
        ballast = self._set.paths.workspaces / ".ballast"
        if not await asyncio.to_thread(self._set.paths.workspaces.is_mount):
            return
        began_s = time.time()
        try:
            await asyncio.to_thread(_fill, ballast)
            await asyncio.sleep(for_s)
        finally:
            ballast.unlink(missing_ok=True)
            self.done.outages.append(Outage("collector", "", began_s, time.time()))


def _fill(path: Path) -> None:
    block = b"\0" * _BALLAST_STEP
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(block) == len(block):
            pass


def _said_ready(log: Path, offset: int) -> bool:
    try:
        if log.stat().st_size < offset:
            offset = 0  # put aside meanwhile
        with log.open("rb") as file:
            file.seek(offset)
            return any(word in file.read() for word in _READY)
    except OSError:
        return False
