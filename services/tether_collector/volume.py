"""Whose volume this is: written on it once, and read before anything of it is used.

    .tether/volume.json  is another's, or unreadable ─▶ `.tether/restore-failed.json` and the log say so, exit 78
                         is ours ─▶ go on
                         is not there (a new volume, or one of a version that did not write it) ─▶ written, under the
                         workspace's lock: whole or not at all, and never over one that is there

A volume of another workspace that was put in place of ours has a journal, agents' homes and files of its own, and would
be taken for ours that went on since. No checkpoint has the identity: a volume that is filled from one is ours from the
first start on it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from tether.checkpoint import VOLUME, VolumeIdentity
from tether.errors import InvalidError
from tether.jsonsafe import loads_object
from tether.limits import KIB
from tether.service import write_whole
from tether_collector.checkpoint_files import open_file
from tether_collector.config import CollectorSettings
from tether_collector.restoring import RestoreError, say

_BYTES_MAX: Final = 4 * KIB


def is_ours(settings: CollectorSettings) -> bool:
    """False, and said on the volume and in the log, where it is another's."""
    return _check(settings, _identity_of)


def make_ours(settings: CollectorSettings) -> bool:
    """The same, once it has an identity. The workspace's lock is held."""
    return _check(settings, _made)


def _check(settings: CollectorSettings, read: Callable[[CollectorSettings], VolumeIdentity | None]) -> bool:
    try:
        found = read(settings)
    except OSError as error:
        detail = f"{VOLUME} cannot be read or written: {error.strerror or error}; mend the volume"
    except (InvalidError, ValidationError):
        detail = f"{VOLUME} is damaged; put the volume of this workspace in place, or delete the file if it is that"
    else:
        if found is None or (found.tenant, found.workspace) == (settings.tenant, settings.workspace):
            return True
        # Whose it is is said to nobody of ours.
        detail = f"the volume is another workspace's, as its {VOLUME} says; put that of this workspace in place"
    say(settings, RestoreError(detail))
    return False


def _identity_of(settings: CollectorSettings) -> VolumeIdentity | None:
    """None where there is none. Raises OSError, InvalidError, ValidationError."""
    try:
        with open_file(settings.workspace_dir / VOLUME) as descriptor:
            data = os.read(descriptor, _BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    return VolumeIdentity.model_validate(loads_object(data, "volume", bytes_max=_BYTES_MAX))


def _made(settings: CollectorSettings) -> VolumeIdentity | None:
    if (found := _identity_of(settings)) is not None:
        return found
    path = settings.workspace_dir / VOLUME
    ours = VolumeIdentity(tenant=settings.tenant, workspace=settings.workspace)
    whole = path.with_name(f".{path.name}.new")
    write_whole(whole, ours.model_dump_json().encode())
    try:
        with suppress(FileExistsError):
            os.link(whole, path)
    finally:
        whole.unlink(missing_ok=True)
    _sync(path.parent)
    return _identity_of(settings)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
