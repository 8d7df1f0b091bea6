"""Faults on a running set: SIGKILL, or SIGSTOP and, after a while, SIGCONT. The set's own supervisors restart."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

from tether.processes import ProcessId, identify, is_running, send_signal
from tether_chaos.plan import ALL, SERVICES, Fault
from tether_cli import state


def victims(data: Path, service: str) -> list[ProcessId]:
    """Living processes of a service; a collector per sandbox."""
    paths = state.Paths(data)
    if service != "collector":
        now = state.read(paths)
        child = None if now is None else now.children.get(service)
        return [child] if child is not None and is_running(child) else []
    found = []
    for path in sorted((paths.agent / "sandboxes").glob("*/sandbox.json")):
        try:
            pid = int(json.loads(path.read_bytes())["pid"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # just being written, or no collector runs
        identity = identify(pid)
        if identity is not None and b"tether_collector" in _command(pid):
            found.append(identity)
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class Saboteur:
    """Does the faults of a plan. `done` says which found their victim; nothing stays frozen when it returns."""

    def __init__(self, data: Path, services: Sequence[str] = SERVICES) -> None:
        self._data = data
        self._services = services
        self._frozen: set[ProcessId] = set()
        self.done: list[str] = []

    async def run(self, faults: Iterable[Fault]) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with asyncio.TaskGroup() as group:
                for number, fault in enumerate(faults):
                    await asyncio.sleep(fault.after_s)
                    chosen = self._choose(fault)
                    if chosen:
                        pids = ", ".join(str(victim.pid) for victim in chosen)
                        self.done.append(f"{loop.time() - began_s:6.2f} s  {fault} (pid {pids})")
                    for victim in chosen:
                        if fault.freeze_s is None:
                            send_signal(victim, signal.SIGKILL)
                        else:
                            group.create_task(self._freeze(victim, fault.freeze_s), name=f"freeze-{number}")
        finally:
            for victim in list(self._frozen):
                send_signal(victim, signal.SIGCONT)

    def _choose(self, fault: Fault) -> list[ProcessId]:
        if fault.service == ALL:
            return [victim for service in self._services for victim in victims(self._data, service)]
        found = victims(self._data, fault.service)
        return [found[int(fault.pick * len(found))]] if found else []

    async def _freeze(self, victim: ProcessId, freeze_s: float) -> None:
        if send_signal(victim, signal.SIGSTOP):
            self._frozen.add(victim)
            await asyncio.sleep(freeze_s)
            send_signal(victim, signal.SIGCONT)
            self._frozen.discard(victim)
