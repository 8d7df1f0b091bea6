"""Faults on a running set: SIGKILL, or SIGSTOP and, after a while, SIGCONT. The set's own supervisors restart."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterable
from pathlib import Path

from tether_chaos.plan import Fault
from tether_cli import processes, state
from tether_cli.processes import ProcessId


def victims(data: Path, service: str) -> list[ProcessId]:
    """Living processes of a service; a collector per sandbox."""
    paths = state.Paths(data)
    if service != "collector":
        now = state.read(paths)
        child = None if now is None else now.children.get(service)
        return [child] if child is not None and processes.is_running(child) else []
    found = []
    for path in sorted((paths.agent / "sandboxes").glob("*/sandbox.json")):
        try:
            pid = int(json.loads(path.read_bytes())["pid"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # just being written, or no collector runs
        identity = processes.identify(pid)
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

    def __init__(self, data: Path) -> None:
        self._data = data
        self._frozen: set[ProcessId] = set()
        self.done: list[str] = []

    async def run(self, faults: Iterable[Fault]) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with asyncio.TaskGroup() as group:
                for number, fault in enumerate(faults):
                    await asyncio.sleep(fault.after_s)
                    found = victims(self._data, fault.service)
                    if not found:
                        continue
                    victim = found[int(fault.pick * len(found))]
                    self.done.append(f"{loop.time() - began_s:6.2f} s  {fault} (pid {victim.pid})")
                    if fault.freeze_s is None:
                        processes.send_signal(victim, signal.SIGKILL)
                    else:
                        group.create_task(self._freeze(victim, fault.freeze_s), name=f"freeze-{number}")
        finally:
            for victim in list(self._frozen):
                processes.send_signal(victim, signal.SIGCONT)

    async def _freeze(self, victim: ProcessId, freeze_s: float) -> None:
        if processes.send_signal(victim, signal.SIGSTOP):
            self._frozen.add(victim)
            await asyncio.sleep(freeze_s)
            processes.send_signal(victim, signal.SIGCONT)
            self._frozen.discard(victim)
