"""Reading and writing the log as a router does: executions' subjects are read, the `_` subject is also written.

`_` has several writers (routers, agent services, collectors). One event is one message: it is appended by
compare-and-set on the subject, and is there once because whoever loses the compare-and-set reads forward, looking for
the id it was about to write, before it tries again. The message id makes the server drop a late twin as well; its
`duplicate` alone proves nothing (the message may have been purged), so it counts only if the message is readable.

Batch reads may be answered by a follower that lags. The end of a subject is therefore taken from the leader first, and
a batch that does not reach it is completed from the leader, message by message.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Final

import structlog

from tether.errors import InvalidError, UndecidedError, WrongLastSequenceError
from tether.events import ConversationEvent
from tether.frames import decode, encode_event
from tether.ports import Bus, StoredMessage
from tether.subjects import EventAddress, events_stream
from tether_router.core.facts import (
    ConversationView,
    ExecutionFacts,
    Position,
    absorb,
    absorb_conversation,
)

UNDECIDED_ATTEMPTS_MAX: Final = 5  # of one append, before the prompt is given back
APPEND_RACES_MAX: Final = 64  # writers of one conversation that may come in between
# Executions whose facts are kept, so that only what is new is read: 2.7 KiB each. Nobody asks for one that has ended
# once its owner record knows, but for a crash or a lost race in between: of these only the last few are kept.
LIVING_CACHED_MAX: Final = 4096
ENDED_CACHED_MAX: Final = 128

_log = structlog.get_logger("tether.router")


async def read_through(
    bus: Bus, stream: str, subject: str, after: int, up_to: int, *, batches_max: int | None = None
) -> AsyncIterator[StoredMessage]:
    """The messages of `subject` after sequence `after` up to `up_to` (which the leader has), in order.

    `batches_max` bounds the work: then the last message's sequence says how far it went.
    """
    batches = 0
    while after < up_to and (batches_max is None or batches < batches_max):
        batches += 1
        batch = await bus.read(stream, after, subject)
        if not batch:
            message = await bus.next_after(stream, after, subject)
            if message is None:
                return  # evicted meanwhile
            batch = [message]
        for message in batch:
            if message.sequence > up_to:
                return
            yield message
            after = message.sequence


class FactsCache:
    """Facts by subject, the least recently used let go first; those of ended executions are counted apart, so that
    what has ended pushes out nothing that lives."""

    def __init__(self) -> None:
        self._living: OrderedDict[str, ExecutionFacts] = OrderedDict()
        self._ended: OrderedDict[str, ExecutionFacts] = OrderedDict()

    def __len__(self) -> int:
        return len(self._living) + len(self._ended)

    def take(self, subject: str) -> ExecutionFacts | None:
        """Out of the cache: who reads on puts back what it then knows."""
        return self._living.pop(subject, None) or self._ended.pop(subject, None)

    def put(self, subject: str, facts: ExecutionFacts) -> None:
        kept, most = (self._living, LIVING_CACHED_MAX) if facts.ended is None else (self._ended, ENDED_CACHED_MAX)
        other = self._ended if facts.ended is None else self._living
        other.pop(subject, None)  # of somebody who read at the same time
        kept[subject] = facts
        kept.move_to_end(subject)
        while len(kept) > most:
            kept.popitem(last=False)


class Log:
    """One router's access to the tenants' logs. The facts kept here are a cache of the log."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.cache = FactsCache()

    async def execution(self, address: EventAddress, *, batches_max: int | None = None) -> ExecutionFacts:
        """What the log says of an execution by now. With `batches_max` perhaps not all of it: `scanned_to` is then
        behind, and what is missing is read the next time."""
        stream, subject = events_stream(address.tenant), address.subject
        last = await self._bus.last(stream, subject)
        facts = self.cache.take(subject)
        if last is None:
            return ExecutionFacts(address.execution)
        if facts is None or facts.scanned_to > last.sequence:  # a log that was put back: read it anew
            facts = ExecutionFacts(address.execution)
        try:
            if facts.scanned_to < last.sequence:
                read = read_through(
                    self._bus, stream, subject, facts.scanned_to, last.sequence, batches_max=batches_max
                )
                async for message in read:
                    facts = absorb(facts, message)
        finally:
            self.cache.put(subject, facts)
        return facts

    async def conversation(self, address: EventAddress, after: int) -> ConversationView:
        """The `_` subject after sequence `after`."""
        stream, subject = events_stream(address.tenant), address.subject
        last = await self._bus.last(stream, subject)
        if last is None:
            return ConversationView()
        if after > last.sequence:  # a log that was put back
            after = 0
        view = ConversationView()
        async for message in read_through(self._bus, stream, subject, after, last.sequence):
            view = absorb_conversation(view, message)
        # What lies before `after` counts for compare-and-set, and for the generation that its writer saw.
        return absorb_conversation(view, last) if view.last_sequence < last.sequence else view

    async def tail(self, address: EventAddress) -> ConversationView:
        """The last event of `_` alone."""
        last = await self._bus.last(events_stream(address.tenant), address.subject)
        return ConversationView() if last is None else absorb_conversation(ConversationView(), last)

    async def append(self, address: EventAddress, event: ConversationEvent, base: int) -> Position | None:
        """Append `event` to `_` unless its id is there after `base`. None: a later generation than the event's is
        there, and nothing was written. Raises BusError."""
        data = encode_event(event)
        retry = undecided = 0
        for _ in range(APPEND_RACES_MAX):
            suffix = f"/r{retry}" if retry else ""
            try:
                ack = await self._bus.publish(
                    address.subject,
                    data,
                    msg_id=f"{address.conversation}/{address.execution}/{event.id}{suffix}",
                    expect_last=base,
                )
            except UndecidedError:
                undecided += 1
                if undecided > UNDECIDED_ATTEMPTS_MAX:
                    raise
                continue
            except WrongLastSequenceError as lost:
                view = await self._between(address, base, lost.actual)
                if (found := view.seen.get(event.id)) is not None:
                    return found
                if view.generation > event.generation:
                    return None
                base = lost.actual
                continue
            position = await self._position(address, event.id, ack.sequence)
            if position is not None:
                return position
            retry += 1  # `duplicate` of a message that is gone
        raise UndecidedError("too many writers came in between", subject=address.subject)

    async def _between(self, address: EventAddress, base: int, up_to: int) -> ConversationView:
        if base > up_to:  # purged or put back: whatever is there may be news
            base = 0
        view = ConversationView()
        stream = events_stream(address.tenant)
        async for message in read_through(self._bus, stream, address.subject, base, up_to):
            view = absorb_conversation(view, message)
        return view

    async def _position(self, address: EventAddress, identity: str, sequence: int) -> Position | None:
        """Where the event is, if the message there is it."""
        stored = await self._bus.next_after(events_stream(address.tenant), sequence - 1, address.subject)
        if stored is None or stored.sequence != sequence:
            return None
        try:
            event = decode(stored.subject, stored.data)
        except InvalidError:
            return None
        if not isinstance(event, ConversationEvent) or event.id != identity:
            return None
        return Position(stored.sequence, stored.stored_at_ns)
