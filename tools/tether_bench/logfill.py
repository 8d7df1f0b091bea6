"""Executions without a CLI: their frames are made here and published to the log, as a collector would."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tether import events as ev
from tether import subjects
from tether.events import ConversationEvent, Event
from tether.frames import Frame, Position, encode_event, message_id
from tether.ids import default_workspace, new_id, sandbox_id
from tether.kv import Bucket
from tether.limits import EXECUTION_TOKEN_CONVERSATION, FRAME_EVENTS_MAX
from tether.owner import OwnerRecord, Tombstone
from tether.ports import Bus, PubAck
from tether.prompt import ConversationRecord, RequestRecord
from tether.subjects import EventAddress

_TEXT: Final = "what an agent says of its work, at the length of a usual line of text"


@dataclass(frozen=True, slots=True)
class MadeExecution:
    """`frames`: encoded, in order, with their message ids; `events` of them."""

    address: EventAddress
    introduction: Sequence[ConversationEvent]
    frames: Sequence[tuple[bytes, str]]
    events: int

    @property
    def conversation_subject(self) -> str:
        where = self.address
        return EventAddress(where.tenant, where.workspace, where.conversation, EXECUTION_TOKEN_CONVERSATION).subject


def made_execution(tenant: str, conversation: str, events: int) -> MadeExecution:
    """A running execution with exactly so many events (at least 2): its claim, then texts and tool calls in turn."""
    workspace = default_workspace(conversation)
    execution, request, response = new_id("exe"), new_id("req"), new_id("rsp")
    address = EventAddress(tenant, workspace, conversation, execution)
    at = time.time_ns() // 1_000_000
    target = {
        "tenant": tenant,
        "workspace": workspace,
        "conversation": conversation,
        "response": response,
        "response_generation": 1,
        "execution": execution,
        "execution_generation": 1,
        "sandbox": sandbox_id(tenant, workspace),
        "boot": "bench",
        "process_generation": 1,
    }
    claim = ev.ExecutionStarted(
        boot="bench", instance="bench", process=1, target=target, agent="scripted", request=request, adapter_version="1"
    )
    admitted = ev.PromptAdmitted(request=request, prompt_sequence=1, content=[{"type": "text", "text": "bench"}])
    created = ev.ResponseCreated(
        request=request,
        response=response,
        response_generation=1,
        execution=execution,
        execution_generation=1,
        agent="scripted",
    )
    introduction = [
        ConversationEvent(id=f"{request}/{kind}", generation=1, at=at, type=kind, body=_plain(body))
        for kind, body in ((ev.PROMPT_ADMITTED, admitted), (ev.RESPONSE_CREATED, created))
    ]
    begin = Event(ordinal=1, at=at, type=ev.EXECUTION_STARTED, body=_plain(claim)).model_dump_json(exclude_none=True)
    log = [begin, *(_event(ordinal, at) for ordinal in range(2, events + 1))]
    frames = []
    for first in range(1, events + 1, FRAME_EVENTS_MAX):
        taken = log[first - 1 : first - 1 + FRAME_EVENTS_MAX]
        last = first + len(taken) - 1
        pos = Position(record=last, index=0)
        head = f'{{"v":1,"first":{first},"last":{last},"pos":{{"record":{pos.record},"index":{pos.index}}},"events":['
        data = f"{head}{','.join(taken)}]}}".encode()
        frame = Frame(first=first, last=last, pos=pos, events=[])
        frames.append((data, message_id(address, frame, data)))
    return MadeExecution(address, introduction, frames, events)


def _plain(body: ev.Body) -> dict[str, Any]:
    return body.model_dump(mode="json", exclude_none=True)


def _event(ordinal: int, at: int) -> str:
    """As JSON, written by hand: two hundred thousand of them are made before anything is measured."""
    match ordinal % 4:
        case 0:
            kind = ev.TOOL_STARTED
            body = f'{{"tool":"t{ordinal}","name":"Bash","input":{{"command":"make step-{ordinal}"}}}}'
        case 1 if ordinal > 4:
            kind = ev.TOOL_COMPLETED
            body = f'{{"tool":"t{ordinal - 1}","status":"ok","output":"step {ordinal - 1} is done"}}'
        case _:
            kind = ev.TEXT_COMPLETED
            body = f'{{"segment":"s{ordinal}","text":"{_TEXT}"}}'
    return f'{{"ordinal":{ordinal},"at":{at},"type":"{kind}","body":{body}}}'


async def introduce(bus: Bus, made: MadeExecution) -> None:
    """As a router admits it: the records that readers ask for, then the conversation's own events: the prompt and the
    response that the execution answers."""
    where = made.address
    key = subjects.conversation_key(where.tenant, where.conversation)
    place = ConversationRecord(workspace=where.workspace).model_dump(mode="json")
    await Bucket(bus, subjects.CONVERSATIONS).create(key, place, op="bench")
    asked = RequestRecord(
        digest="bench",
        workspace=where.workspace,
        conversation=where.conversation,
        attempt=1,
        prompt_sequence=1,
        state="done",
    )
    request = str(made.introduction[0].body["request"])
    await Bucket(bus, subjects.REQUESTS).create(subjects.request_key(where.tenant, request), asked.value(), op="bench")
    owner = OwnerRecord(tombstones=(Tombstone(execution=where.execution, outcome="completed", at=1),))
    key = subjects.owner_key(where.tenant, where.workspace, where.conversation)
    await Bucket(bus, subjects.OWNERS).create(key, owner.value(), op="bench")
    for event in made.introduction:
        await bus.publish(
            made.conversation_subject, encode_event(event), msg_id=f"{made.address.conversation}/{event.id}"
        )


async def publish(bus: Bus, made: MadeExecution) -> PubAck:
    """One frame in flight, each on the base of the one before: as a collector writes. Returns the last ack."""
    ack = PubAck("", 0, False)
    for data, identity in made.frames:
        ack = await bus.publish(made.address.subject, data, msg_id=identity, expect_last=ack.sequence)
    return ack
