"""Appending a conversation-level event that says what the backend found. One message, by compare-and-set on `_`.

    1  the end of `_`, from its leader      2  is the id there already? then it is told
    3  append behind that end               4  lost the race, or no answer came: from 1, and only what is new is read

The id is derived from what is told, so whoever tells it again (another replica, the next process after a crash) finds
it there. Sending twice stores one: the id is the message id, too.
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


async def append_note(bus: Bus, of: EventAddress, event: ConversationEvent) -> bool:
    """False where others write too fast: to be tried later. Raises BusError."""
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
            await bus.publish(subject, data, expect_last=end, msg_id=f"{of.conversation}/_/{event.id}")
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
