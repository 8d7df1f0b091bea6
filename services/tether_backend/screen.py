"""Before a batch is projected: what of it is not to be believed. Sets `refusal` of messages, and nothing else.

    what the message says of itself     `frames.decode` has looked already (`tether.frame_rules`)
    its conversation's workspace        `tether.bindings`: a record, asked for once per conversation
    its execution                       a row of that conversation has it, else the owner record ever admitted it
    a prompt, a response on `_`         the request memory has the request

All that a batch needs is asked for together, before the batch's transaction: once per conversation, execution and
request, and again only for what was not known. Many messages of nobody cost one question for each name that they make
up in one batch, and no row.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import sqlalchemy as sa

from tether.bindings import Bindings, at_once, judge_execution, request_of
from tether.events import ConversationEvent
from tether.frame_rules import Refusal
from tether.ports import Bus
from tether.subjects import EventAddress
from tether_backend.core.stream import LogMessage
from tether_backend.store import schema
from tether_backend.store.engine import Database

_WHY = {
    Refusal.NOT_ADMITTED: "no record says that this was ever admitted",
    Refusal.FOREIGN_CONVERSATION: "the conversation lives in another workspace",
    Refusal.FOREIGN_EXECUTION: "the execution is another conversation's",
}


def refuse(message: LogMessage, reason: Refusal, why: str = "") -> None:
    if message.refusal is None:
        message.refusal, message.why = reason, why or _WHY.get(reason, "")


class Screen:
    """One tenant's."""

    def __init__(self, bus: Bus, database: Database, tenant: str) -> None:
        self.bindings = Bindings(bus, tenant)
        self._database = database
        self._tenant = tenant

    async def look(self, messages: Sequence[LogMessage]) -> None:
        """Raises BusError, SQLAlchemyError."""
        bindings = self.bindings
        unknown = [
            one.address.conversation for one in messages if bindings.known_workspace(one.address.conversation) is None
        ]
        if unknown:
            await at_once(unknown, bindings.workspace)
        believed = []
        for message in messages:
            known = bindings.known_workspace(message.address.conversation)
            if known is None:
                refuse(message, Refusal.NOT_ADMITTED)
            elif known != message.address.workspace:
                refuse(message, Refusal.FOREIGN_CONVERSATION)
            else:
                believed.append(message)
        await self.notes(one for one in believed if one.address.conversation_level)
        await self._executions([one for one in believed if not one.address.conversation_level])

    async def notes(self, messages: Iterable[LogMessage]) -> None:
        """Of conversations that live where they say."""
        now_ns = time.time_ns()
        for message in messages:
            if not isinstance(message.content, ConversationEvent):
                continue
            request = request_of(message.content)
            if request is None:
                continue
            reason = await self.bindings.request(message.address, request, message.stored_at_ns, now_ns)
            if reason is not None:
                refuse(message, reason)

    async def _executions(self, messages: Sequence[LogMessage]) -> None:
        missing: dict[str, None] = {}
        for message in messages:
            if self.bindings.known_execution(message.address) is False:
                missing[message.address.execution] = None
        if missing:
            await self._from_rows(list(missing))
            await self._from_owners(messages)
        for message in messages:
            known = self.bindings.known_execution(message.address)
            if known is False:
                refuse(message, Refusal.NOT_ADMITTED)
            elif isinstance(known, Refusal):
                refuse(message, known)

    async def _from_rows(self, names: Sequence[str]) -> None:
        table = schema.executions.c
        query = sa.select(table.execution, table.workspace, table.conversation).where(
            table.tenant == self._tenant, table.execution.in_(names)
        )
        async with self._database.read() as connection:
            for row in await connection.execute(query):
                self.bindings.learn(row.execution, row.workspace, row.conversation)

    async def _from_owners(self, messages: Sequence[LogMessage]) -> None:
        left: dict[EventAddress, int] = {}
        for message in messages:
            if self.bindings.known_execution(message.address) is False:
                left.setdefault(message.address, message.stored_at_ns)
        owners = await at_once(
            ((one.workspace, one.conversation) for one in left), lambda key: self.bindings.owner(*key)
        )
        for address, stored_at_ns in left.items():
            owner = owners[address.workspace, address.conversation]
            if judge_execution(address, owner, stored_at_ns) is None:
                self.bindings.learn(address.execution, address.workspace, address.conversation)
