"""May a sandbox go on from a checkpoint on this volume, and is what the checkpoint names safe to be written? Pure.

    the volume lives (it has a journal)
        it has the checkpoint's manifest, with the reference's digest ─▶ WARM     everything is there
        it has no such manifest                                      ─▶ NEWER    it went on since: used as it is
        it has another content under that name                       ─▶ refused  torn, or another's
    the volume is empty
        the reference is gone, another, or of another sandbox        ─▶ refused
        the files are only on the volume that it was made on         ─▶ refused
        the files are in the blob store                              ─▶ FILL

A manifest is another process's word. Whatever it names is written only if each path is relative, of plain names, named
once, below no file and no link of it, of a place that checkpoints have, and if all of it is within the limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from tether.checkpoint import CheckpointManifest, CheckpointReference, digest_of
from tether_collector.core.checkpoint_rules import JOURNAL, STATE_FOLDER, LeaveOut, judge, too_much, unsafe_path

LINK_CHARS_MAX: Final = 4096


class Way(Enum):
    WARM = "warm"
    NEWER = "newer"
    FILL = "fill"


@dataclass(frozen=True, slots=True)
class Refused:
    """Why the sandbox must not start; `retryable` where another look may say otherwise."""

    detail: str
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for: `revision` 0 for whichever it is. Who asks."""

    checkpoint: str
    revision: int
    tenant: str
    workspace: str
    sandbox: str


@dataclass(frozen=True, slots=True)
class Volume:
    """`live`: there is a journal. `manifest`: the bytes under the checkpoint's name, None where there are none.
    `begun`: the journal knows this boot, so a collector of it has served here already."""

    live: bool
    manifest: bytes | None
    begun: bool = False


def decide(wanted: Wanted, reference: CheckpointReference | None, revision: int, volume: Volume) -> Way | Refused:
    """`revision`: of the reference, 0 where there is none."""
    if volume.live and (volume.manifest is None or volume.begun):
        return Way.NEWER  # one that begun goes on: what it was started with may have been left behind since
    if reference is None:
        return Refused(f"there is no reference of a checkpoint; {wanted.checkpoint} was asked for")
    if reference.checkpoint != wanted.checkpoint or (wanted.revision and wanted.revision != revision):
        detail = f"the reference names checkpoint {reference.checkpoint} at revision {revision} by now"
        return Refused(detail, retryable=True)
    for name in ("tenant", "workspace", "sandbox"):
        if getattr(reference, name) != getattr(wanted, name):
            return Refused(f"the checkpoint is of another {name}")
    if volume.live:
        assert volume.manifest is not None
        if digest_of(volume.manifest) == reference.manifest:
            return Way.WARM
        return Refused("the manifest on the volume is not the one that the reference names: torn, or another's")
    if reference.stored == "volume":
        return Refused("the volume is empty, and the checkpoint was kept on its own volume only")
    return Way.FILL


def check_manifest(manifest: CheckpointManifest) -> str | None:
    """Why nothing of it may be written, or None."""
    if (why := too_much(len(manifest.files) + len(manifest.empty_folders), manifest.size_bytes)) is not None:
        return why
    leaves: set[str] = set()
    for file in manifest.files:
        if (why := _check(file.path, manifest, folder=False)) is not None:
            return f"{file.path!r} {why}"
        if file.path in leaves:
            return f"{file.path!r} is named twice"
        if file.link is not None and (not file.link or "\x00" in file.link or len(file.link) > LINK_CHARS_MAX):
            return f"{file.path!r} is a link to nowhere"
        leaves.add(file.path)
    for folder in manifest.empty_folders:
        if (why := _check(folder, manifest, folder=True)) is not None:
            return f"{folder!r} {why}"
        if folder in leaves:
            return f"{folder!r} is named twice"
        leaves.add(folder)
    for path in leaves:
        if (above := _above(path, leaves)) is not None:
            return f"{path!r} lies below {above!r}, which is no folder"
    return None if JOURNAL in leaves else "it has no journal"


def _check(path: str, manifest: CheckpointManifest, *, folder: bool) -> str | None:
    if (why := unsafe_path(path)) is not None:
        return why
    parts = path.split("/")
    if path == JOURNAL:
        return None
    for count in range(1, len(parts) + 1):
        last = count == len(parts)
        verdict = judge("/".join(parts[:count]), manifest.include, folder=folder if last else True)
        if isinstance(verdict, LeaveOut):
            return "is no file that a checkpoint has"
    return None


def _above(path: str, leaves: set[str]) -> str | None:
    parts = path.split("/")
    return next((above for count in range(1, len(parts)) if (above := "/".join(parts[:count])) in leaves), None)


def targets(manifest: CheckpointManifest) -> list[str]:
    """What is put into place by one rename each, in order. The journal is the last: it makes the volume a live one."""
    found: set[str] = set()
    for path in (*(file.path for file in manifest.files), *manifest.empty_folders):
        parts = path.split("/")
        found.add("/".join(parts[:2]) if parts[0] == STATE_FOLDER else parts[0])
    return [*sorted(found - {JOURNAL}), JOURNAL]
