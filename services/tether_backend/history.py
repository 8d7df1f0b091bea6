"""Answers `tether.history.{tenant}.{workspace}`: a conversation's rows up to a cut, for an agent that lost its session.

    1  the projection has applied the log up to the cut (its consumer's ack floor says so), else RUNTIME_UNAVAILABLE
    2  the first message that the log has behind the cut bounds what is told: rows carry no sequence, but they carry
       places, and the log knows which message was the first one that may not be told
    3  rows as one read, bounded (`core.export`)

At the cut the conversation was idle: every execution that an entry before it names had ended. What such an execution is
found to have said later (a salvaged tail) is told, too. The workspace is the subject's, which is what a sandbox's user
may use: a conversation of another one does not exist for it. Asking changes nothing, so several backends may answer.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Final

import structlog
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from tether import subjects
from tether.errors import BusError, Code, InvalidError, Problem, problem
from tether.events import PROMPT_ADMITTED, ConversationEvent
from tether.frames import decode
from tether.history import History, HistoryRequest
from tether.limits import EXECUTION_TOKEN_CONVERSATION
from tether.ports import Bus, Message
from tether_backend.core.export import rows_of
from tether_backend.projector import SHARD
from tether_backend.store.engine import Database
from tether_backend.store.export import turns_of

QUEUE: Final = "tether-history"
CONCURRENCY_MAX: Final = 4  # each holds up to HISTORY_BYTES_MAX of rows a few times over
_log = structlog.get_logger("tether.backend")


class HistoryServer:
    """One tenant's."""

    def __init__(self, bus: Bus, database: Database, tenant: str) -> None:
        self._bus = bus
        self._database = database
        self._tenant = tenant
        self._stream = subjects.events_stream(tenant)

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Answers while the context is open."""
        return self._bus.serve(
            subjects.histories(self._tenant),
            self._answer,
            queue=QUEUE,
            name="tether-backend-history",
            concurrency_max=CONCURRENCY_MAX,
        )

    async def _answer(self, message: Message) -> bytes | None:
        try:
            request = HistoryRequest.model_validate_json(message.data)
        except ValidationError:
            return None  # nothing that it could be told of
        workspace = message.subject.rpartition(".")[2]
        if request.tenant != self._tenant or request.workspace != workspace:
            return self._refused(request, _unknown(request)).encode()
        try:
            history = await self.history(request)
        except (BusError, SQLAlchemyError) as error:
            _log.warning("history_unavailable", conversation=request.conversation, error=str(error))
            detail = "the rows cannot be read for now"
            history = self._refused(request, problem(Code.RUNTIME_UNAVAILABLE, detail))
        return history.encode()

    async def history(self, request: HistoryRequest) -> History:
        """Raises BusError, SQLAlchemyError."""
        durable = subjects.projection_durable(self._database.id, SHARD)
        consumer = await self._bus.consumer(self._stream, durable)
        through = 0 if consumer is None else consumer.ack_floor
        if through < request.cut:
            detail = f"the projection has the log up to {through}, {request.cut} is asked for"
            return self._refused(request, problem(Code.RUNTIME_UNAVAILABLE, detail, retry_after_s=0.5), through)
        before = await self._first_behind(request)
        found = await turns_of(self._database, self._tenant, request.workspace, request.conversation, before)
        if found is None:
            return self._refused(request, _unknown(request), through)
        turns, more = found
        rows, partial = rows_of(turns, more=more)
        return History(
            conversation=request.conversation, cut=request.cut, through=through, rows=tuple(rows), partial=partial
        )

    async def _first_behind(self, request: HistoryRequest) -> str | None:
        """The id of the conversation's first message behind the cut."""
        subject = subjects.event(self._tenant, request.workspace, request.conversation, EXECUTION_TOKEN_CONVERSATION)
        after = request.cut
        while (message := await self._bus.next_after(self._stream, after, subject)) is not None:
            after = message.sequence
            try:
                event = decode(message.subject, message.data)
            except InvalidError:
                continue  # damage has no row
            if isinstance(event, ConversationEvent) and event.type == PROMPT_ADMITTED:
                return event.id
        return None

    def _refused(self, request: HistoryRequest, why: Problem, through: int = 0) -> History:
        return History(conversation=request.conversation, cut=request.cut, through=through, problem=why)


def _unknown(request: HistoryRequest) -> Problem:
    return problem(Code.NOT_FOUND, f"this workspace has no conversation {request.conversation}")
