"""Looking again at ended executions: NATS may come back without the messages that it acknowledged last.

A living execution's writer reads its subject after every reconnect; an ended one has no writer any more. Its spool and
journal are kept for the terminal retention, so its tail can be made again and put back: by a shell over the same start
that reads the log's base and tells what is missing, without a process, a registration or a control. `core.review`
decides, by what a confined user may ask: the last message of the workspace's own subjects, and the stream's end, which
a publish names that can never be stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from tether import subjects
from tether.errors import BusError, InvalidError, UndecidedError, WrongLastSequenceError
from tether.frames import Frame, decode
from tether.kv import Bucket
from tether.limits import EXECUTION_TOKEN_CONVERSATION
from tether.ports import Bus
from tether.subjects import EventAddress
from tether_collector.core.review import End, Remains, Verdict, judge_empty, judge_frame
from tether_collector.journal import Journal, Start

REVIEW_S: Final = 60.0  # without a reconnect: what is found deleted now is not taken for lost later
EPOCH_LOOK_S: Final = 0.5
AGAIN_S: Final = 1.0
# A sequence that no stream reaches: the server answers with the one that it has, and stores nothing.
_NEVER: Final = str(2**62)
_EXPECTED: Final = "Nats-Expected-Last-Sequence"
_log = structlog.get_logger("tether.collector")


class Reviewer:
    """`put_back` returns once the start's whole log is stored again."""

    def __init__(self, bus: Bus, journal: Journal, put_back: Callable[[Start], Awaitable[None]]) -> None:
        self._bus = bus
        self._journal = journal
        self._put_back = put_back

    async def run(self) -> None:
        """The task: now, after each reconnect, and every REVIEW_S."""
        loop = asyncio.get_running_loop()
        while True:
            epoch, began_s = self._bus.epoch, loop.time()
            try:
                await self.review()
            except BusError as error:
                _log.info("review_delayed", error=str(error))
                await asyncio.sleep(AGAIN_S)
                continue
            while self._bus.epoch == epoch and loop.time() - began_s < REVIEW_S:  # noqa: ASYNC110 - the bus has no event
                await asyncio.sleep(EPOCH_LOOK_S)

    async def review(self) -> None:
        """Each end once, the latest first. Raises BusError where the bus is away in the middle."""
        for end in self._journal.ends():
            start = self._journal.start(end.execution)
            if start is None:
                continue
            match await self._look(end, start):
                case Verdict.THERE:
                    pass
                case Verdict.PUT_BACK:
                    _log.warning("end_lost", execution=end.execution, ordinal=end.ordinal, sequence=end.sequence)
                    await self._put_back(start)
                case Verdict.DELETED:
                    _log.info("end_deleted", execution=end.execution)
                    self._journal.forget_end(end.execution)

    async def _look(self, end: End, start: Start) -> Verdict:
        target = start.target
        stream = subjects.events_stream(target.tenant)
        address = EventAddress(target.tenant, target.workspace, target.conversation, target.execution)
        last = await self._bus.last(stream, address.subject, leader=False)
        if last is not None:
            try:
                frame = decode(last.subject, last.data)
            except InvalidError:
                return Verdict.THERE  # another writer's: nothing follows it
            assert isinstance(frame, Frame)
            return judge_frame(end, frame.last)
        told = EventAddress(target.tenant, target.workspace, target.conversation, EXECUTION_TOKEN_CONVERSATION)
        conversation = await self._bus.last(stream, told.subject, leader=False)
        key = subjects.owner_key(target.tenant, target.workspace, target.conversation)
        owner = await Bucket(self._bus, subjects.OWNERS, leader=False).get(key)
        remains = Remains(
            stream_end=await stream_end(self._bus, address),
            conversation_at=None if conversation is None else conversation.stored_at_ns // 1_000_000,
            owned=owner is not None,
        )
        return judge_empty(end, remains)


async def stream_end(bus: Bus, address: EventAddress) -> int:
    """The last sequence of the log's stream, asked with the workspace's own subject. Raises BusError."""
    try:
        await bus.publish(address.subject, b"", headers={_EXPECTED: _NEVER})
    except WrongLastSequenceError as error:
        return error.actual
    raise UndecidedError("the server did not say where the stream ends", subject=address.subject)
