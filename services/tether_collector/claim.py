"""Claim before spawn: `execution.started` as the first message of the execution's subject, by compare-and-set.

    publish at base 0 ── stored ─────────────────────────────▶ Claimed
        │   ▲ no answer, or the server's doubt: the same bytes again
        │   └───────────────────────────────────────────────┐
        └── wrong last sequence, `duplicate` ─▶ read the last │
                 empty ───────────────────────────────────────┘ (with `/r1`… where the id is burnt)
                 our own bytes ───────────────────────────────▶ Claimed
                 execution.ended ─────────────────────────────▶ Refused   the start was given up, or it ran elsewhere
                 a claim of this boot that is not ours ───────▶ Orphaned  its journal is lost: it is never spawned
                 anything else ───────────────────────────────▶ Refused   another writer's

The bytes are journaled before the first attempt, so a restarted collector sends the very same ones: a claim with
them is ours, whatever answers were lost.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any, Final

from tether import events as ev
from tether import subjects, tracing
from tether.control import StartCommand
from tether.errors import (
    BusError,
    Code,
    InvalidError,
    Problem,
    UndecidedError,
    WrongLastSequenceError,
    problem,
)
from tether.events import Event
from tether.frames import Frame, Position, decode, encode, message_id
from tether.ids import ExecutionTarget
from tether.kv import Bucket
from tether.limits import PUBLISH_ATTEMPT_S, PUBLISH_BACKOFF_MAX_S, PUBLISH_BACKOFF_MIN_S
from tether.owner import OwnerRecord
from tether.ports import Bus, StoredMessage
from tether.subjects import EventAddress, events_stream

UNAVAILABLE_PAUSE_S: Final = 0.5
CLAIM_POSITION: Final = Position(record=0, index=0)


@dataclass(frozen=True, slots=True)
class Claimed:
    """The claim is stored, and it is ours."""


@dataclass(frozen=True, slots=True)
class Orphaned:
    """A claim of this boot by a collector whose journal is lost; `message` is it."""

    message: StoredMessage


@dataclass(frozen=True, slots=True)
class Refused:
    problem: Problem


Outcome = Claimed | Orphaned | Refused


def claim_body(
    command: StartCommand,
    target: ExecutionTarget,
    *,
    instance: str,
    adapter_version: str,
    key_source: str | None = None,
) -> dict[str, Any]:
    """The body of `execution.started`."""
    body = ev.ExecutionStarted(
        boot=target.boot,
        instance=instance,
        process=target.process_generation,
        target=target.model_dump(mode="json", exclude_none=True),
        agent=command.agent.kind,
        request=command.request_id,
        adapter_version=adapter_version,
        resumed_from=command.resume_session,
        key_source=key_source,
    )
    return body.model_dump(mode="json", exclude_none=True)


def claim_frame(body: dict[str, Any], at: int) -> bytes:
    """The frame as it is journaled and stored: ordinal 1 alone."""
    event = Event(ordinal=1, at=at, type=ev.EXECUTION_STARTED, body=body)
    return encode(Frame(first=1, last=1, pos=CLAIM_POSITION, events=[event]))


def claim_event(address: EventAddress, data: bytes) -> Event:
    """The event of a journaled claim."""
    frame = decode(address.subject, data)
    assert isinstance(frame, Frame)
    return frame.events[0]


def judge(address: EventAddress, message: StoredMessage, data: bytes, boot: str) -> Outcome:
    """What a subject that is not empty says of our claim. Pure."""
    if message.data == data:
        return Claimed()
    try:
        frame = decode(address.subject, message.data)
    except InvalidError:
        return Refused(problem(Code.TARGET_STALE, "another writer has the execution's subject"))
    assert isinstance(frame, Frame)
    newest = frame.events[-1]
    if newest.type == ev.EXECUTION_ENDED:
        outcome = newest.body.get("outcome")
        return Refused(problem(Code.TARGET_STALE, f"the execution has ended: {outcome}", outcome=outcome))
    if newest.type == ev.EXECUTION_STARTED and newest.body.get("boot") == boot:
        return Orphaned(message)
    return Refused(problem(Code.TARGET_STALE, "the execution was claimed by another"))


async def claim(bus: Bus, address: EventAddress, data: bytes, boot: str) -> Outcome:
    """Return only with certainty; waits for a bus that is away."""
    frame = decode(address.subject, data)
    assert isinstance(frame, Frame)
    retry = 0
    while True:
        try:
            ack = await bus.publish(
                address.subject,
                data,
                msg_id=message_id(address, frame, data, retry=retry),
                expect_last=0,
                headers=tracing.outgoing(),
                timeout_s=PUBLISH_ATTEMPT_S,
            )
        except UndecidedError:
            await asyncio.sleep(random.uniform(PUBLISH_BACKOFF_MIN_S, PUBLISH_BACKOFF_MAX_S))
            continue
        except WrongLastSequenceError:
            message = await last_message(bus, address)
        except BusError:
            await asyncio.sleep(UNAVAILABLE_PAUSE_S * random.uniform(0.8, 1.2))
            continue
        else:
            if not ack.duplicate:
                return Claimed()
            message = await last_message(bus, address)
            if message is None:
                retry += 1
        if message is not None:
            return judge(address, message, data, boot)


async def last_message(bus: Bus, address: EventAddress) -> StoredMessage | None:
    """The subject's last message in the form that a sandbox may ask; waits for a bus that is away."""
    pause_s = PUBLISH_BACKOFF_MIN_S
    while True:
        try:
            return await bus.last(events_stream(address.tenant), address.subject, leader=False)
        except BusError:
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            pause_s = min(pause_s * 2, 1.0)


async def is_owned(bus: Bus, address: EventAddress) -> bool:
    """Whether the owner record names this execution; waits until that can be read."""
    key = subjects.owner_key(address.tenant, address.workspace, address.conversation)
    while True:
        try:
            record = await Bucket(bus, subjects.OWNERS, leader=False).record(key, OwnerRecord)
        except BusError:
            await asyncio.sleep(UNAVAILABLE_PAUSE_S)
            continue
        return record is not None and record.target is not None and record.target.execution == address.execution


async def end_orphan(bus: Bus, address: EventAddress, message: StoredMessage, at: int) -> None:
    """End a claim that is never spawned: `lost`, after its processes were swept. Does nothing where it has ended."""
    while True:
        frame = decode(address.subject, message.data)
        assert isinstance(frame, Frame)
        if frame.events[-1].type == ev.EXECUTION_ENDED:
            return
        error = {"code": Code.EXECUTION_DURABILITY_GAP.value, "detail": "the collector's journal of it is lost"}
        first = frame.last + 1
        proof = {"method": "keeper_gone", "at": at, "detail": "no journal; swept by marker"}
        ended = [
            Event(ordinal=first, at=at, type=ev.RESPONSE_ENDED, body={"outcome": "lost", "error": error}),
            Event(
                ordinal=first + 1,
                at=at,
                type=ev.EXECUTION_ENDED,
                body={"outcome": "lost", "proof": proof, "tail": "unknown", "error": error},
            ),
        ]
        last = Frame(first=first, last=first + 1, pos=frame.pos, events=ended)
        data = encode(last)
        try:
            await bus.publish(
                address.subject, data, msg_id=message_id(address, last, data), expect_last=message.sequence
            )
        except BusError:
            await asyncio.sleep(UNAVAILABLE_PAUSE_S)
        newest = await last_message(bus, address)
        # Undecided and not stored: again. Stored, purged, or somebody else's frame: nothing more is ours to do.
        if newest is None or newest.sequence != message.sequence:
            return
