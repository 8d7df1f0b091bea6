"""Appending a conversation-level event once, for services that read the log's leader. One message, by compare-and-set
on `_`. (Routers append with a fence of their own: `tether_router.log`.)

    1  the end of `_`, from its leader      2  is the id there already? then it is told
    3  append behind that end               4  lost the race, or no answer came: from 1, and only what is new is read

The id is derived from what is told, so whoever tells it again (another replica, the next process after a crash) finds
it there. Of two copies of one message the compare-and-set lets one in. There is no message id: the server would call a
message a duplicate that has been purged, and store nothing.
"""

from __future__ import annotations

from typing import Final

from tether import frames, subjects
from tether.errors import InvalidError, UndecidedError, WrongLastSequenceError
from tether.events import ConversationEvent
from tether.limits import EXECUTION_TOKEN_CONVERSATION
from tether.ports import Bus
from tether.subjects import EventAddress

_ROUNDS_MAX: Final = 16  # writers of `_` that are faster


async def append_once(bus: Bus, of: EventAddress, event: ConversationEvent) -> bool:
    """True once it is there, by whomever. False where others write too fast: to be tried later. Raises BusError."""
    stream = subjects.events_stream(of.tenant)
    subject = subjects.event(of.tenant, of.workspace, of.conversation, EXECUTION_TOKEN_CONVERSATION)
    data = frames.encode_event(event)
    seen = 0
    for _ in range(_ROUNDS_MAX):
        last = await bus.last(stream, subject)
        end = 0 if last is None else last.sequence
        if await _holds(bus, stream, subject, event.id, after=seen, until=end):
            return True
        seen = end
        try:
            await bus.publish(subject, data, expect_last=end)
        except (WrongLastSequenceError, UndecidedError):
            continue
        return True
    return False


async def _holds(bus: Bus, stream: str, subject: str, event_id: str, *, after: int, until: int) -> bool:
    """Whether the event is among the messages `after..until`; a follower that lags is read until it has caught up."""
    at = after
    while at < until:
        batch = await bus.read(stream, at, subject)
        if not batch:
            following = await bus.next_after(stream, at, subject)
            if following is None:
                return False  # evicted meanwhile
            batch = [following]
        for message in batch:
            if message.sequence > until:
                return False
            at = message.sequence
            try:
                content = frames.decode(message.subject, message.data)
            except InvalidError:
                continue
            if isinstance(content, ConversationEvent) and content.id == event_id:
                return True
    return False
