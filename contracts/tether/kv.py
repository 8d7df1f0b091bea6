"""Key-value buckets over a bus's streams: get, create, compare-and-set, delete, keys.

A bucket `B` is the stream `KV_B` with subjects `$KV.B.{key}`; a revision is a stream sequence. Every value carries
the operation id that wrote it (`op`), so a writer whose answer was lost finds out whether it won:
an equal id is success.
What lies there and is no record raises UnreadableRecordError (a BusError, so who retries those waits for it to be put
right); lists leave it out. Leases use a bucket with history 1 and per-key TTL, written with compare-and-set.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import structlog
from pydantic import BaseModel, ValidationError

from tether.errors import UndecidedError, UnreadableRecordError, WrongLastSequenceError
from tether.ports import Bus, StoredMessage
from tether.refusals import path_of, remedy_of

_log = structlog.get_logger("tether.kv")
ModelT = TypeVar("ModelT", bound=BaseModel)
_OPERATION: Final = "KV-Operation"
_ATTEMPTS_MAX: Final = 8  # of an undecided write before the caller is told


@dataclass(frozen=True, slots=True)
class Entry:
    """`revision` is the compare-and-set token of the next write. `value` is the JSON object as stored."""

    key: str
    value: dict[str, Any]
    revision: int
    stored_at_ns: int


class Conflict(Exception):  # noqa: N818 - an outcome of compare-and-set, not a fault
    """Compare-and-set lost: `current` is what is there now (None: no such key)."""

    def __init__(self, key: str, current: Entry | None) -> None:
        super().__init__(f"{key} was written by another")
        self.key = key
        self.current = current


class Bucket:
    """One bucket. `leader=False` reads by direct get (sandboxes); services that decide read from the leader."""

    def __init__(self, bus: Bus, name: str, *, leader: bool = True) -> None:
        self._bus = bus
        self.name = name
        self._stream = f"KV_{name}"
        self._leader = leader

    def _subject(self, key: str) -> str:
        return f"$KV.{self.name}.{key}"

    def _entry(self, message: StoredMessage | None) -> Entry | None:
        if message is None or message.headers.get(_OPERATION) in ("DEL", "PURGE"):
            return None
        key = message.subject.removeprefix(f"$KV.{self.name}.")
        try:
            value = json.loads(message.data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise UnreadableRecordError("it is no JSON object", bucket=self.name, key=key, revision=message.sequence)
        return Entry(key, value, message.sequence, message.stored_at_ns)

    def parse(self, entry: Entry, model: type[ModelT]) -> ModelT:
        """The entry's value as a record. Raises UnreadableRecordError."""
        try:
            return model.model_validate(entry.value)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            detail = f"{path_of(first['loc'])}: {remedy_of(first)}"
            raise UnreadableRecordError(detail, bucket=self.name, key=entry.key, revision=entry.revision) from None

    async def record(self, key: str, model: type[ModelT]) -> ModelT | None:
        """The key's record; None where there is none. Raises UnreadableRecordError, BusError."""
        entry = await self.get(key)
        return None if entry is None else self.parse(entry, model)

    async def records(
        self, model: type[ModelT], filter_key: str = ">", *, after: int = 0
    ) -> AsyncIterator[tuple[Entry, ModelT]]:
        """Every record that can be read: a list is not lost for one entry that nobody understands. `after`: only what
        was written after this revision."""
        async for entry in self.keys(filter_key, after=after):
            try:
                yield entry, self.parse(entry, model)
            except UnreadableRecordError as error:
                _log.warning("record_unreadable", detail=error.detail, record=error.subject)

    async def get(self, key: str) -> Entry | None:
        return self._entry(await self._bus.last(self._stream, self._subject(key), leader=self._leader))

    async def history(self, key: str) -> list[Entry]:
        """Every value of the key that the bucket still has, the oldest first; what cannot be read is left out. Raises
        BusError."""
        found: list[Entry] = []
        after = 0
        while batch := await self._bus.read(self._stream, after, self._subject(key)):
            for message in batch:
                after = message.sequence
                try:
                    entry = self._entry(message)
                except UnreadableRecordError as error:
                    _log.warning("record_unreadable", detail=error.detail, record=error.subject)
                    continue
                if entry is not None:
                    found.append(entry)
        return found

    async def create(self, key: str, value: dict[str, Any], *, op: str, ttl_s: int | None = None) -> Entry:
        """Write a key that must not exist (a deleted or expired one does not). Raises Conflict, BusError."""
        message = await self._bus.last(self._stream, self._subject(key), leader=self._leader)
        entry = self._entry(message)
        if entry is not None:
            if entry.value.get("op") == op:
                return entry
            raise Conflict(key, entry)
        return await self._put(key, value, op=op, revision=message.sequence if message else 0, ttl_s=ttl_s)

    async def update(
        self, key: str, value: dict[str, Any], *, op: str, revision: int, ttl_s: int | None = None
    ) -> Entry:
        """Replace the value of exactly `revision`. Raises Conflict, BusError. Idempotent by `op`."""
        return await self._put(key, value, op=op, revision=revision, ttl_s=ttl_s)

    async def _put(self, key: str, value: dict[str, Any], *, op: str, revision: int, ttl_s: int | None) -> Entry:
        subject = self._subject(key)
        data = json.dumps({**value, "op": op}, separators=(",", ":")).encode()
        undecided: UndecidedError | None = None
        for _ in range(_ATTEMPTS_MAX):
            try:
                ack = await self._bus.publish(subject, data, expect_last=revision, ttl_s=ttl_s)
            except UndecidedError as error:
                undecided = error
                continue
            except WrongLastSequenceError:
                # Ours, if an earlier attempt was stored and only its answer was lost.
                current = await self.get(key)
                if current is not None and current.value.get("op") == op:
                    return current
                raise Conflict(key, current) from None
            return Entry(key, {**value, "op": op}, ack.sequence, 0)
        assert undecided is not None
        raise undecided

    async def delete(self, key: str, *, revision: int, ttl_s: int | None = None) -> None:
        """Delete exactly `revision` (a marker remains, with `ttl_s` for so long). Raises Conflict."""
        try:
            await self._bus.publish(
                self._subject(key), b"", expect_last=revision, headers={_OPERATION: "DEL"}, ttl_s=ttl_s
            )
        except WrongLastSequenceError:
            current = await self.get(key)
            if current is not None:
                raise Conflict(key, current) from None

    async def keys(self, filter_key: str = ">", *, after: int = 0) -> AsyncIterator[Entry]:
        """Every live entry whose key matches `filter_key` (subject wildcards) and whose revision is past `after`, in
        order of revision. What is no JSON object is left out."""
        while True:
            batch = await self._bus.read(self._stream, after, self._subject(filter_key))
            for message in batch:
                after = message.sequence
                try:
                    entry = self._entry(message)
                except UnreadableRecordError as error:
                    _log.warning("record_unreadable", detail=error.detail, record=error.subject)
                    continue
                if entry is not None:
                    yield entry
            if not batch:
                return
