"""What the docker provider writes down about each sandbox: `{state}/containers/{tenant}.{workspace}/sandbox.json`.

The same life as the local provider's file (providers/sandbox_file.py); in place of a process there is a container.
Written before a container is created (`starting`: boot id, no container), when its id is known, once its files are
handed over (`running`), and with the engine's word on its end (`proof`) before it is removed: afterwards the engine
knows nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from tether import ids
from tether.processes import machine_boot
from tether.service import write_whole
from tether_agent.providers.sandbox_file import SandboxFile

FOLDER: Final = "containers"
_VERSION: Final = 1
_BYTES_MAX: Final = 64 * 1024
_log = structlog.get_logger("tether_agent")


@dataclass(frozen=True, slots=True)
class DockerFile(SandboxFile):
    """`directory`: the user's own, empty where the workspace is the volume `volume`. `container`: the engine's id.
    `started_at`: its run, in the engine's words. `created_s`: unix time before which it did not exist. `proof`: the
    engine's word on its end, `before`: on that of the one before it, as far as that left something to be told."""

    container: str = ""
    started_at: str = ""
    volume: str = ""
    created_s: int = 0
    proof: str = ""
    before: str = ""


def following(
    file: DockerFile | None,
    tenant: str,
    workspace: str,
    directory: str,
    volume: str,
    *,
    restore: str | None,
    now_s: int,
) -> DockerFile:
    """What is written down before a container is created. A container that has ended took everything with it, so each
    has a boot of its own."""
    untold = file is not None and file.status == "unfinished"
    return DockerFile(
        tenant=tenant,
        workspace=workspace,
        sandbox=ids.sandbox_id(tenant, workspace),
        boot=ids.new_id("boot"),
        machine_boot=machine_boot(),
        directory=directory,
        status="starting",
        used=file is not None and file.used and file.status not in ("stopped", "lost"),
        restore=restore or "",
        volume=volume,
        created_s=now_s,
        # A recovery that ended in the middle of its work tells of the container before it, not of itself.
        before=(file.before or file.proof) if untold and file is not None else "",
    )


def write(state_dir: Path, file: DockerFile) -> None:
    folder = state_dir / FOLDER / f"{file.tenant}.{file.workspace}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_whole(folder / "sandbox.json", json.dumps({"v": _VERSION, **asdict(file)}).encode())


def read_all(state_dir: Path) -> Iterator[DockerFile]:
    """A damaged one is logged and counts as none: its container is found by its labels."""
    for path in sorted((state_dir / FOLDER).glob("*/sandbox.json")):
        try:
            with path.open("rb") as stream:
                value: dict[str, Any] = json.loads(stream.read(_BYTES_MAX))
            if value.pop("v") != _VERSION:
                raise ValueError("another version")
            yield DockerFile(**value)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("sandbox_file_unreadable", path=str(path), error=str(error))
