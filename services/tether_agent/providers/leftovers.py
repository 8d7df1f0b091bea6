"""What may live on when a sandbox's collector is gone: its keepers, and their CLIs.

Only ours are found, by what nobody else has:

* a keeper is a living process whose arguments name `keeper/__main__.py --dir FOLDER`, FOLDER below the `.tether` of
  this very workspace;
* what a keeper's CLI left behind carries `TETHER_PROCESS_NONCE` with the nonce of such a folder's spawn record.

Keepers get SIGTERM (they end their CLI, record the proof and go), then SIGKILL; a CLI in a PID namespace dies with its
keeper, what is left of the others is swept by the marker until nothing is.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tether.processes import ProcessId, identify, is_running, machine_boot, send_signal
from tether.walking import entries_below
from tether_agent.providers import procfs
from tether_agent.providers.sandbox_file import SandboxFile

KEEPER_TERM_S: Final = 12.0  # a keeper's own escalation against its CLI fits in
KEEPER_KILL_S: Final = 3.0
SWEEPS_MAX: Final = 50
_POLL_S: Final = 0.05
_MARKER: Final = "TETHER_PROCESS_NONCE"
_BOOT: Final = "TETHER_BOOT"
_KEEPER_MAIN: Final = "keeper/__main__.py"
_RECORD_BYTES_MAX: Final = 64 * 1024


def keepers(state_dir: Path) -> list[tuple[ProcessId, Path]]:
    """Living keepers of one workspace's `.tether`, with the folder of each. The init of a PID namespace has its
    keeper's arguments too; it is the keeper's child, and goes with it."""
    root = state_dir.resolve()
    found = []
    for pid in procfs.pids():
        argv = procfs.argv_of(pid)
        if len(argv) < 4 or argv[-2] != "--dir" or not argv[-3].endswith(_KEEPER_MAIN):
            continue
        folder = Path(argv[-1])
        identity = identify(pid)
        if identity is not None and folder.is_absolute() and root in folder.resolve().parents:
            found.append((identity, folder))
    pids = {identity.pid for identity, _ in found}
    return [(identity, folder) for identity, folder in found if procfs.parent_of(identity.pid) not in pids]


def nonces(state_dir: Path) -> set[str]:
    """The nonces of the spawn records below a workspace's `.tether`."""
    found = set()
    for entry in entries_below(state_dir):
        if entry.name != "spawn.json":
            continue
        try:
            with open(entry.path, "rb") as file:  # noqa: PTH123
                nonce = json.loads(file.read(_RECORD_BYTES_MAX)).get("nonce")
        except (OSError, ValueError, AttributeError):
            continue  # torn by a crash: its keeper, if any, is found by its arguments
        if isinstance(nonce, str) and len(nonce) >= 16:
            found.add(nonce)
    return found


def proof_of_end(file: SandboxFile, executions: Iterable[str]) -> str | None:
    """How it is known that nothing of this sandbox lives; None where it is not. `executions`: what it may have run."""
    if file.machine_boot != machine_boot():
        return f"the machine was booted anew since boot {file.boot}"
    alive = (
        (file.process is not None and is_running(file.process))
        or procfs.with_environ(_BOOT, file.boot)
        or keepers(Path(file.directory) / ".tether")
        or any(procfs.with_environ_prefix(_MARKER, f"{name}-") for name in executions)
    )
    return None if alive else f"no process of boot {file.boot} is left: collector, keepers, agents"


async def end(state_dir: Path) -> int:
    """End every keeper of this workspace and what its CLI left behind. Returns how many had to be ended."""
    living = [identity for identity, _ in keepers(state_dir)]
    for identity in living:
        send_signal(identity, signal.SIGTERM)
    left = await _gone(living, KEEPER_TERM_S)
    for identity in left:
        send_signal(identity, signal.SIGKILL)
    await _gone(left, KEEPER_KILL_S)
    return len(living) + await _sweep(nonces(state_dir))


async def _gone(identities: Iterable[ProcessId], timeout_s: float) -> list[ProcessId]:
    """Wait until they are gone; those that are not when the time is over."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    left = [identity for identity in identities if is_running(identity)]
    while left and loop.time() < deadline_s:
        await asyncio.sleep(_POLL_S)
        left = [identity for identity in left if is_running(identity)]
    return left


async def _sweep(marks: set[str]) -> int:
    """Kill what carries one of our marks, until a look finds nothing (a process may fork while it is looked for)."""
    killed: set[ProcessId] = set()
    for _ in range(SWEEPS_MAX):
        found = [identity for mark in marks for identity in procfs.with_environ(_MARKER, mark)]
        if not found:
            break
        for identity in found:
            send_signal(identity, signal.SIGKILL)
        killed.update(found)
        await asyncio.sleep(_POLL_S)
    return len(killed)
