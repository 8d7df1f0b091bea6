"""What the local provider writes down about each sandbox: `{state}/sandboxes/{tenant}.{workspace}/sandbox.json`.

Written before a collector is spawned (status `starting`: boot id, no pid) and after (`running`: pid and start time).
A crash in between leaves `starting`; the collector is then found by the boot id in its environment, which no other
process has. `stopped` is written once nothing is left of the sandbox. `unfinished` says that something had to be
killed: its end is not told in the log yet, so the next agent service starts the collector again to tell it. `lost`: its
volume is away, and the executions that it had were closed without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import structlog

from tether import ids
from tether.processes import ProcessId, machine_boot
from tether.service import write_whole

Status = Literal["starting", "running", "stopped", "unfinished", "lost"]
FOLDER: Final = "sandboxes"
_VERSION: Final = 1
_BYTES_MAX: Final = 64 * 1024
_log = structlog.get_logger("tether_agent")


@dataclass(frozen=True, slots=True)
class SandboxFile:
    """`machine_boot`: the boot of the machine in which `boot` was drawn; after a reboot nothing of it lives. `used`: a
    collector was ready, so its journal lies in the directory. `recovery`: the process only tells what was left.
    `restore`: the checkpoint that this boot goes on from, empty for none."""

    tenant: str
    workspace: str
    sandbox: str
    boot: str
    machine_boot: str
    directory: str
    status: Status
    pid: int = 0
    start_ticks: int = 0
    used: bool = False
    recovery: bool = False
    restore: str = ""

    @property
    def process(self) -> ProcessId | None:
        """The collector as it was spawned, or None where that is not known."""
        return ProcessId(self.pid, self.start_ticks, self.machine_boot) if self.pid else None

    def with_process(self, identity: ProcessId | None) -> SandboxFile:
        if identity is None:
            return replace(self, pid=0, start_ticks=0)
        return replace(self, pid=identity.pid, start_ticks=identity.start_ticks, status="running")


def following(
    file: SandboxFile | None, tenant: str, workspace: str, directory: str, *, restore: str | None, anew: bool = False
) -> SandboxFile:
    """What is written down before a collector is spawned: the boot id of what may still live, else a new one, which
    goes on from the checkpoint `restore`. `anew`: a boot in which no collector was ready, and that was to go on from
    another checkpoint, is over."""
    machine = machine_boot()
    over = anew and file is not None and not file.used and file.restore != (restore or "")
    if file is not None and not over and file.machine_boot == machine and file.status in ("starting", "running"):
        return replace(file.with_process(None), status="starting")
    return SandboxFile(
        tenant=tenant,
        workspace=workspace,
        sandbox=ids.sandbox_id(tenant, workspace),
        boot=ids.new_id("boot"),
        machine_boot=machine,
        directory=directory,
        status="starting",
        used=file is not None and file.used and file.status not in ("stopped", "lost"),
        restore=restore or "",
    )


def volume_there(file: SandboxFile) -> bool:
    """What its collectors wrote is within reach, or nothing was written yet. A mount point without its volume is an
    empty directory."""
    return not file.used or (Path(file.directory) / ".tether" / "journal.sqlite3").exists()


def folder_of(state_dir: Path, tenant: str, workspace: str) -> Path:
    return state_dir / FOLDER / f"{tenant}.{workspace}"


def write(state_dir: Path, file: SandboxFile) -> None:
    folder = folder_of(state_dir, file.tenant, file.workspace)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_whole(folder / "sandbox.json", json.dumps({"v": _VERSION, **asdict(file)}).encode())


def read(state_dir: Path, tenant: str, workspace: str) -> SandboxFile | None:
    """None where there is none; a damaged one is logged and counts as none (its collector is found by registration
    and lock, and refuses a second one)."""
    return _read(folder_of(state_dir, tenant, workspace) / "sandbox.json")


def _read(path: Path) -> SandboxFile | None:
    try:
        with path.open("rb") as stream:
            value: dict[str, Any] = json.loads(stream.read(_BYTES_MAX))
        if value.pop("v") != _VERSION:
            raise ValueError("another version")
        return SandboxFile(**value)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        _log.warning("sandbox_file_unreadable", path=str(path), error=str(error))
        return None


def read_all(state_dir: Path) -> Iterator[SandboxFile]:
    for path in sorted((state_dir / FOLDER).glob("*/sandbox.json")):
        file = _read(path)
        if file is not None:
            yield file
