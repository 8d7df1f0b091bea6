"""Whether a collector that has ended is to stay down, by the sandbox's record and the checkpoint's reference.

A drained collector ends by itself, with exit code 0. It is not started again
    * where the record says that its drain is done, or that the sandbox is suspended or being deleted: who wrote that
      releases what is left,
    * where it was told to go by the machine (SIGTERM, no order of ours) and a reference names its boot: its executions
      are told to their end, and the record becomes `suspended`.

A collector that ends in the middle of a drain is started again: it goes on from its journal. What cannot be read now
is no reason to stay down: a collector that was started in vain answers from its journal, and ends again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog

from tether import subjects
from tether.checkpoint import FOLDER, RESTORE_FAILED, CheckpointReference, RestoreFailure
from tether.errors import BusError, Problem
from tether.kv import Bucket
from tether.limits import CHECKPOINT_MANIFEST_BYTES_MAX
from tether.ports import Bus
from tether.sandbox import SandboxRecord
from tether_agent.core.sandbox import releasing
from tether_agent.providers.sandbox_file import SandboxFile

RESTORE_FAILED_BYTES_MAX: Final = 64 * 1024
_log = structlog.get_logger("tether_agent")


async def is_over(bus: Bus | None, file: SandboxFile) -> bool:
    """The record says that nothing of this sandbox is to run."""
    if bus is None:
        return False
    try:
        key = subjects.sandbox_key(file.tenant, file.workspace)
        record = await Bucket(bus, subjects.SANDBOXES).record(key, SandboxRecord)
    except BusError as error:
        _log.info("record_not_read", tenant=file.tenant, workspace=file.workspace, reason=str(error))
        return False
    if record is None:
        return False
    return releasing(record) or record.state in ("suspended", "deleting")


async def drained_itself(bus: Bus | None, file: SandboxFile) -> bool:
    """A checkpoint of this very boot is referenced: its collector, which ended with 0, was drained."""
    if bus is None:
        return False
    try:
        key = subjects.checkpoint_key(file.tenant, file.workspace)
        reference = await Bucket(bus, subjects.CHECKPOINTS).record(key, CheckpointReference)
    except BusError as error:
        _log.info("reference_not_read", tenant=file.tenant, workspace=file.workspace, reason=str(error))
        return False
    return reference is not None and reference.boot == file.boot


def read_manifest(directory: Path, checkpoint: str) -> bytes | None:
    """The manifest on the volume; whether it is the one that the reference names is its digest's word."""
    try:
        with (directory / FOLDER / f"{checkpoint}.json").open("rb") as stream:
            return stream.read(CHECKPOINT_MANIFEST_BYTES_MAX + 1)
    except OSError:
        return None


def restore_failure(directory: Path, boot: str) -> Problem | None:
    """Why the collector of this boot could not go on from its checkpoint; None where that is not what happened."""
    try:
        with (directory / RESTORE_FAILED).open("rb") as stream:
            return decode_restore_failure(stream.read(RESTORE_FAILED_BYTES_MAX), boot)
    except OSError:
        return None


def decode_restore_failure(data: bytes, boot: str) -> Problem | None:
    """The same, of what was read."""
    try:
        found = RestoreFailure.model_validate_json(data)
    except ValueError:
        return None
    return found.problem if found.boot == boot else None
