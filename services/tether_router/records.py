"""Owner and request records, and the workspaces of conversations: typed reads and compare-and-set writes.

A stored value that is no record (hand-written, of a version that is not known here) raises `InvalidError`: nothing is
decided by it, and nothing overwrites it.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from pydantic import ValidationError

from tether import subjects
from tether.checkpoint import CheckpointReference
from tether.errors import InvalidError, UnreadableRecordError
from tether.kv import Bucket, Conflict, Entry
from tether.owner import OwnerRecord
from tether.ports import Bus, StoredMessage
from tether.prompt import RequestRecord, invalid

_log = structlog.get_logger("tether.router")


@dataclass(frozen=True, slots=True)
class OwnerEntry:
    """Revision 0: there is no record yet, the conversation is idle."""

    record: OwnerRecord
    revision: int


@dataclass(frozen=True, slots=True)
class RequestEntry:
    record: RequestRecord | None
    revision: int


def owner_of(entry: Entry | None) -> OwnerEntry:
    if entry is None:
        return OwnerEntry(OwnerRecord(), 0)
    try:
        return OwnerEntry(OwnerRecord.model_validate(entry.value), entry.revision)
    except ValidationError as error:
        raise invalid(error, f"{subjects.OWNERS}/{entry.key}") from None


def _request_of(entry: Entry | None) -> RequestEntry:
    if entry is None:
        return RequestEntry(None, 0)
    try:
        return RequestEntry(RequestRecord.model_validate(entry.value), entry.revision)
    except ValidationError as error:
        raise invalid(error, f"{subjects.REQUESTS}/{entry.key}") from None


class Records:
    """Reads are from the leader: a router decides by them."""

    def __init__(self, bus: Bus) -> None:
        self._owners = Bucket(bus, subjects.OWNERS)
        self._requests = Bucket(bus, subjects.REQUESTS)
        self._conversations = Bucket(bus, subjects.CONVERSATIONS)
        self._checkpoints = Bucket(bus, subjects.CHECKPOINTS)

    async def _get(self, bucket: Bucket, key: str) -> Entry | None:
        try:
            return await bucket.get(key)
        except UnreadableRecordError:
            raise InvalidError(f"{bucket.name}/{key}", "must hold a JSON object") from None

    async def owner(self, key: str) -> OwnerEntry:
        return owner_of(await self._get(self._owners, key))

    async def write_owner(self, key: str, record: OwnerRecord, revision: int, op: str) -> int | None:
        """The new revision, or None where compare-and-set lost."""
        return await _write(self._owners, key, record.value(), revision, op)

    async def request(self, key: str) -> RequestEntry:
        return _request_of(await self._get(self._requests, key))

    async def write_request(self, key: str, record: RequestRecord, revision: int, op: str) -> int | None:
        """The new revision, or None where compare-and-set lost."""
        return await _write(self._requests, key, record.value(), revision, op)

    async def checkpoint(self, key: str) -> tuple[CheckpointReference | None, int]:
        """A workspace's reference and its revision. One that cannot be read lets nobody go on from it: that is logged,
        and no prompt waits for it."""
        try:
            entry = await self._checkpoints.get(key)
            if entry is None:
                return None, 0
            return CheckpointReference.model_validate(entry.value), entry.revision
        except (UnreadableRecordError, ValidationError) as error:
            _log.error("checkpoint_unreadable", key=key, error=str(error))
            return None, 0

    async def bind(self, key: str, workspace: str, op: str) -> str:
        """The conversation's workspace: `workspace` if it had none, for good."""
        entry = await self._get(self._conversations, key)
        if entry is None:
            try:
                entry = await self._conversations.create(key, {"v": 1, "workspace": workspace}, op=op)
            except Conflict as lost:
                if lost.current is None:
                    raise InvalidError(f"{subjects.CONVERSATIONS}/{key}", "was deleted while it was made") from None
                entry = lost.current
        bound = entry.value.get("workspace")
        if not isinstance(bound, str):
            raise InvalidError(f"{subjects.CONVERSATIONS}/{key}", "must name a workspace")
        return bound


async def _write(bucket: Bucket, key: str, value: dict[str, object], revision: int, op: str) -> int | None:
    try:
        if revision == 0:
            return (await bucket.create(key, value, op=op)).revision
        return (await bucket.update(key, value, op=op, revision=revision)).revision
    except Conflict:
        return None


def owner_from(message: StoredMessage) -> OwnerEntry | None:
    """An owner record from a message of its bucket's stream; None where it was deleted or is no record."""
    if message.headers.get("KV-Operation") in ("DEL", "PURGE"):
        return None
    try:
        return OwnerEntry(OwnerRecord.model_validate_json(message.data), message.sequence)
    except ValidationError:
        return None
