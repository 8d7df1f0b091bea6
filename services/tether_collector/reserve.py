"""Room that is kept on the volume for the end: a drain needs the journal and the spools to take their last records.

    collector starts ─▶ `.tether/reserve` of RESERVE_BYTES ──drain begins──▶ deleted ──the sandbox stays──▶ made again

Where the volume has no room for it, or no way to keep it, the collector does without.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import structlog

from tether.limits import MIB

RESERVE_BYTES: Final = 2 * MIB  # the last records of some hundred executions, and the copy of a small journal
_log: Final = structlog.get_logger("tether.collector")


def _path(state_dir: Path) -> Path:
    return state_dir / "reserve"


def keep(state_dir: Path) -> bool:
    """Whether the room is kept."""
    path = _path(state_dir)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.warning("reserve_missing", error=str(error))
        release(state_dir)
        return False
    return True


def release(state_dir: Path) -> None:
    """The room may be used."""
    try:
        _path(state_dir).unlink(missing_ok=True)
    except OSError as error:
        _log.warning("reserve_not_released", error=str(error))
