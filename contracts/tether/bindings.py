"""Where a conversation lives and what was admitted there: the other half of `frame_rules`, from records.

A subject names its workspace, and a sandbox is confined to its own; it is free in the rest of the name. So a message
is believed only where records that no sandbox can write say the same:

    conversation    `tether_conversations` says which workspace it lives in. Written before the first admission, for
                    good: a message of another workspace, or of a conversation that nobody admitted, is refused
    execution       the owner record names it as its target or among its tombstones. Of what is older than the oldest
                    tombstone the record says nothing more: its messages were stored before that one ended
    request         what `_` says of a request is believed while the request memory has it, or has forgotten it by age

An admission writes its records before the log: a record that is absent when a message is read was absent when it was
stored. What is known stays known (these facts never change), so a record is asked for once per conversation, execution
and request, never per message; memory is bounded, least recently used first.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Final, Generic, TypeVar

from tether import events as ev
from tether import subjects
from tether.errors import InvalidError, UnreadableRecordError
from tether.events import ConversationEvent
from tether.frame_rules import Refusal
from tether.kv import Bucket
from tether.limits import REQUEST_MEMORY_S
from tether.owner import TOMBSTONES_MAX, OwnerRecord
from tether.ports import Bus
from tether.prompt import ConversationRecord, RequestRecord
from tether.subjects import EventAddress

KNOWN_MAX: Final = 16_384  # conversations, and executions, that are remembered: some 300 bytes each
ASKED_AT_ONCE_MAX: Final = 32  # records that are read at the same time
_FORGETTING_S: Final = 3600.0  # before the end of the request memory, a request may be gone already
# What makes messages and responses visible. (A prompt that nobody can read fails without a record of its request.)
_OF_REQUESTS: Final = frozenset({ev.PROMPT_ADMITTED, ev.RESPONSE_CREATED})
KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


def judge_execution(address: EventAddress, owner: OwnerRecord | None, stored_at_ns: int) -> Refusal | None:
    """Whether the conversation's owner record ever admitted the execution. Pure."""
    if owner is None:
        return Refusal.NOT_ADMITTED
    if owner.target is not None and owner.target.execution == address.execution:
        return None
    if owner.buried(address.execution):
        return None
    stones = owner.tombstones
    forgotten = len(stones) >= TOMBSTONES_MAX and stored_at_ns // 1_000_000 <= stones[0].at
    return None if forgotten else Refusal.NOT_ADMITTED


def request_of(event: ConversationEvent) -> str | None:
    """The request that the event must belong to; None where it belongs to none."""
    if event.type not in _OF_REQUESTS:
        return None
    request = event.body.get("request")
    return request if isinstance(request, str) else ""


class _Known(Generic[KeyT, ValueT]):
    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[KeyT, ValueT] = OrderedDict()

    def get(self, key: KeyT) -> ValueT | None:
        found = self._values.get(key)
        if found is not None:
            self._values.move_to_end(key)
        return found

    def put(self, key: KeyT, value: ValueT) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        while len(self._values) > self._most:
            self._values.popitem(last=False)

    def clear(self) -> None:
        self._values.clear()


class Bindings:
    """One tenant's facts. One user at a time, or several on one loop: reads may be made twice, facts are the same."""

    def __init__(self, bus: Bus, tenant: str, *, known_max: int = KNOWN_MAX) -> None:
        self._tenant = tenant
        self._conversations = Bucket(bus, subjects.CONVERSATIONS)
        self._owners = Bucket(bus, subjects.OWNERS)
        self._requests = Bucket(bus, subjects.REQUESTS)
        self._workspaces: _Known[str, str] = _Known(known_max)
        self._executions: _Known[str, tuple[str, str]] = _Known(known_max)
        self._asked: _Known[tuple[str, str], bool] = _Known(known_max)
        self._slots = asyncio.Semaphore(ASKED_AT_ONCE_MAX)

    def forget(self) -> None:
        """The records may be others: a bucket was put back, a conversation deleted."""
        self._workspaces.clear()
        self._executions.clear()
        self._asked.clear()

    def known_workspace(self, conversation: str) -> str | None:
        return self._workspaces.get(conversation)

    async def workspace(self, conversation: str) -> str | None:
        """Where it lives; None where nobody admitted it. Raises BusError."""
        known = self._workspaces.get(conversation)
        if known is None:
            key = subjects.conversation_key(self._tenant, conversation)
            async with self._slots:
                try:
                    record = await self._conversations.record(key, ConversationRecord)
                except UnreadableRecordError:
                    record = None
            if record is None:
                return None
            known = record.workspace
            self._workspaces.put(conversation, known)
        return known

    async def place(self, address: EventAddress) -> Refusal | None:
        """Whether the conversation lives in that workspace. Raises BusError."""
        known = await self.workspace(address.conversation)
        if known is None:
            return Refusal.NOT_ADMITTED
        return None if known == address.workspace else Refusal.FOREIGN_CONVERSATION

    def known_execution(self, address: EventAddress) -> Refusal | bool:
        """True where it is known to be the conversation's, a refusal where it is another's, False where it is not
        known."""
        known = self._executions.get(address.execution)
        if known is None:
            return False
        return known == (address.workspace, address.conversation) or Refusal.FOREIGN_EXECUTION

    def learn(self, execution: str, workspace: str, conversation: str) -> None:
        """The rows have it, or a record has named it."""
        self._executions.put(execution, (workspace, conversation))

    async def owner(self, workspace: str, conversation: str) -> OwnerRecord | None:
        """As it is now; None where there is none that can be read. Raises BusError."""
        async with self._slots:
            try:
                return await self._owners.record(subjects.owner_key(self._tenant, workspace, conversation), OwnerRecord)
            except UnreadableRecordError:
                return None

    async def request(self, address: EventAddress, request: str, stored_at_ns: int, now_ns: int) -> Refusal | None:
        """Whether a request of that id was made in this conversation. Raises BusError."""
        if now_ns - stored_at_ns > (REQUEST_MEMORY_S - _FORGETTING_S) * 1e9:
            return None
        if self._asked.get((address.conversation, request)):
            return None
        try:
            key = subjects.request_key(self._tenant, request)
        except InvalidError:
            return Refusal.NOT_ADMITTED  # nobody can have asked under such an id
        async with self._slots:
            try:
                record = await self._requests.record(key, RequestRecord)
            except UnreadableRecordError:
                record = None
        if record is None or (record.workspace, record.conversation) != (address.workspace, address.conversation):
            return Refusal.NOT_ADMITTED
        self._asked.put((address.conversation, request), True)
        return None


async def at_once(keys: Iterable[KeyT], ask: Callable[[KeyT], Awaitable[ValueT]]) -> dict[KeyT, ValueT]:
    """The answers for each of the keys, asked for together. Raises the first error (`BusError`)."""
    wanted = list(dict.fromkeys(keys))
    answers = await asyncio.gather(*(ask(key) for key in wanted))
    return dict(zip(wanted, answers, strict=True))
