"""Sandbox records on the bus: `core.sandbox` decides, compare-and-set writes, who lost reads again."""

from __future__ import annotations

from typing import Final

from pydantic import ValidationError

from tether import ids, subjects
from tether.kv import Bucket, Conflict
from tether.owner import OwnerRecord
from tether.ports import Bus
from tether.sandbox import SandboxRecord
from tether_agent.core.sandbox import Keep, SandboxInput, Wait, Write, decide
from tether_agent.providers import NotReadyError

_ROUNDS_MAX: Final = 8  # of lost compare-and-sets before the caller comes back later


class SandboxRecords:
    """`tether_sandboxes/{tenant}.{workspace}`, read from the leader."""

    def __init__(self, bus: Bus) -> None:
        self._bucket = Bucket(bus, subjects.SANDBOXES)

    async def read(self, tenant: str, workspace: str) -> tuple[SandboxRecord | None, int]:
        """The record and its revision (0 where there is none). Raises BusError; NotReadyError for a record that this
        version cannot read."""
        entry = await self._bucket.get(subjects.sandbox_key(tenant, workspace))
        if entry is None:
            return None, 0
        try:
            return SandboxRecord.model_validate(entry.value), entry.revision
        except ValidationError as error:
            raise NotReadyError(f"the sandbox's record cannot be read: {error.error_count()} problems") from None

    async def apply(self, tenant: str, workspace: str, event: SandboxInput) -> int:
        """Take the transition; returns the record's revision then. Raises NotReadyError, BusError."""
        key, op = subjects.sandbox_key(tenant, workspace), ids.new_id("op")
        for _ in range(_ROUNDS_MAX):
            record, revision = await self.read(tenant, workspace)
            match decide(record, event):
                case Keep():
                    return revision
                case Wait(reason):
                    raise NotReadyError(reason)
                case Write(changed):
                    try:
                        if record is None:
                            entry = await self._bucket.create(key, changed.value(), op=op)
                        else:
                            entry = await self._bucket.update(key, changed.value(), op=op, revision=revision)
                    except Conflict:
                        continue
                    return entry.revision
        raise NotReadyError("the sandbox's record changes too fast")


class OwnerRecords:
    """`tether_owners`, read only, from the leader."""

    def __init__(self, bus: Bus) -> None:
        self._bucket = Bucket(bus, subjects.OWNERS)

    async def read(self, tenant: str, workspace: str, conversation: str) -> tuple[OwnerRecord | None, int]:
        """Raises BusError; NotReadyError for a record that this version cannot read."""
        entry = await self._bucket.get(subjects.owner_key(tenant, workspace, conversation))
        if entry is None:
            return None, 0
        try:
            return OwnerRecord.model_validate(entry.value), entry.revision
        except ValidationError as error:
            raise NotReadyError(f"the owner record cannot be read: {error.error_count()} problems") from None
