"""Sandbox records on the bus: `core.sandbox` decides, compare-and-set writes, who lost reads again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from tether import ids, subjects
from tether.checkpoint import CheckpointReference
from tether.errors import ProblemError
from tether.kv import Bucket, Conflict, Entry
from tether.owner import OwnerRecord
from tether.ports import Bus
from tether.sandbox import Registration, SandboxRecord
from tether_agent.core.sandbox import Keep, Refuse, Remove, SandboxInput, Wait, Write, decide
from tether_agent.providers import NotReadyError

_ROUNDS_MAX: Final = 8  # of lost compare-and-sets before the caller comes back later


class MovedError(Exception):
    """The record is not at the revision any more that the caller decided on: it reads and decides again."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The record after a transition, and its revision. `wrote`: this very call made it; false where it said so
    already. `record` is None where it was removed, or never was."""

    record: SandboxRecord | None
    revision: int
    wrote: bool


class SandboxRecords:
    """`tether_sandboxes/{tenant}.{workspace}` and the registrations beside it, read from the leader."""

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

    async def written_after(self, revision: int) -> AsyncIterator[tuple[Entry, SandboxRecord]]:
        """Every record that was written after this revision, in order. Raises BusError."""
        async for entry, record in self._bucket.records(SandboxRecord, "*.*", after=revision):
            yield entry, record

    async def registration(self, tenant: str, workspace: str, sandbox: str) -> Registration | None:
        """Raises BusError."""
        return await self._bucket.record(subjects.registration_key(tenant, workspace, sandbox), Registration)

    async def apply(self, tenant: str, workspace: str, event: SandboxInput, *, expect: int | None = None) -> Applied:
        """Take the transition. With `expect`, only on exactly this revision. Raises MovedError, NotReadyError,
        ProblemError for what is refused, BusError."""
        op = ids.new_id("op")
        for _ in range(_ROUNDS_MAX):
            record, revision = await self.read(tenant, workspace)
            if expect is not None and revision != expect:
                raise MovedError
            match decide(record, event):
                case Keep():
                    return Applied(record, revision, wrote=False)
                case Wait(reason):
                    raise NotReadyError(reason, soon=record is not None and record.state == "draining")
                case Refuse(found):
                    raise ProblemError(found)
                case Write() | Remove() as decision:
                    try:
                        return await self._put(tenant, workspace, record, decision, op=op, revision=revision)
                    except Conflict:
                        continue
        raise NotReadyError("the sandbox's record changes too fast")

    async def _put(
        self,
        tenant: str,
        workspace: str,
        before: SandboxRecord | None,
        decision: Write | Remove,
        *,
        op: str,
        revision: int,
    ) -> Applied:
        """Raises Conflict, BusError."""
        key = subjects.sandbox_key(tenant, workspace)
        if isinstance(decision, Remove):
            await self._bucket.delete(key, revision=revision)
            return Applied(None, 0, wrote=True)
        value = decision.record.value()
        if before is None:
            entry = await self._bucket.create(key, value, op=op)
        else:
            entry = await self._bucket.update(key, value, op=op, revision=revision)
        return Applied(decision.record, entry.revision, wrote=True)


class References:
    """`tether_checkpoints/{tenant}.{workspace}`, read only, from the leader."""

    def __init__(self, bus: Bus) -> None:
        self._bucket = Bucket(bus, subjects.CHECKPOINTS)

    async def read(self, tenant: str, workspace: str) -> tuple[CheckpointReference | None, int]:
        """The reference and its revision (0 where there is none). Raises BusError."""
        entry = await self._bucket.get(subjects.checkpoint_key(tenant, workspace))
        return (None, 0) if entry is None else (self._bucket.parse(entry, CheckpointReference), entry.revision)

    async def of_drain(self, tenant: str, workspace: str, drain: str) -> tuple[CheckpointReference, int] | None:
        """The one that this drain made, of those that the bucket still has, with its revision. Raises BusError."""
        for entry in reversed(await self._bucket.history(subjects.checkpoint_key(tenant, workspace))):
            if entry.value.get("drain") == drain:
                return self._bucket.parse(entry, CheckpointReference), entry.revision
        return None


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
