"""What a log says that a router decides by: of an execution's subject, and of a conversation's `_` subject.

Facts are gathered by absorbing stored messages in order; they are a cache that the log can rebuild at any time.
A frame is parsed only if its bytes can hold one of the few types that matter here: a router reads every execution
that ends, and most of a log is text.

    facts ── absorb(message) ──▶ facts          (execution: started, session, receipts, response ended, ended)
    record + facts ── catch_up ──▶ record       (what the owner record is by then; the same if nothing moved)
    view ── absorb_conversation(message) ──▶ view
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from pydantic import ValidationError

from tether import events, owner
from tether.errors import InvalidError
from tether.events import ConversationEvent, Event
from tether.frames import Frame, decode
from tether.ids import ExecutionTarget
from tether.owner import OwnerInput, OwnerRecord
from tether.ports import StoredMessage

RECEIPTS_MAX: Final = 256  # interjections and stops of one execution that are remembered, the newest
_MARKS: Final = (
    events.EXECUTION_STARTED.encode(),
    events.SESSION_BOUND.encode(),
    events.RESPONSE_ENDED.encode(),
    events.EXECUTION_ENDED.encode(),
    events.CONTROL_RECEIPT.encode(),
)
# Of a live copy: what can move an owner record or let a waiting prompt go on.
_HINTS: Final = _MARKS[:4]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a stored message is: sequence, and its timestamp (unix nanoseconds)."""

    sequence: int
    stored_at_ns: int


@dataclass(frozen=True, slots=True)
class EndFact:
    """`whole`: everything before it is in the log; else its tail was out of reach."""

    outcome: str
    proved: bool
    at: int
    whole: bool = True


@dataclass(frozen=True, slots=True)
class ExecutionFacts:
    """One execution, as far as `scanned_to` (stream sequence; 0: its subject is empty or was not read)."""

    execution: str
    scanned_to: int = 0
    target: ExecutionTarget | None = None
    boot: str = ""
    process: int = 0
    started_at: int = 0
    agent: str = ""
    bound_session: str | None = None
    resumable_session: str | None = None
    cli_version: str | None = None
    response_ended_at: int | None = None
    ended: EndFact | None = None
    receipts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def empty(self) -> bool:
        return self.scanned_to == 0

    @property
    def started(self) -> bool:
        return self.process > 0 or self.target is not None


@dataclass(frozen=True, slots=True)
class ConversationView:
    """The `_` subject after the owner record's `log_base`: its last sequence, the ids found, the highest generation
    that a writer saw, and the newest `response.created`."""

    last_sequence: int = 0
    generation: int = 0
    seen: Mapping[str, Position] = field(default_factory=lambda: MappingProxyType({}))
    created: events.ResponseCreated | None = None


def is_hint(data: bytes) -> bool:
    """A live copy that may move an owner record. Cheap, and may be wrong: the log is read before anything moves."""
    return any(mark in data for mark in _HINTS)


def absorb(facts: ExecutionFacts, message: StoredMessage) -> ExecutionFacts:
    """The facts after `message`. A damaged frame or body is passed over: it proves nothing."""
    facts = replace(facts, scanned_to=message.sequence)
    if not any(mark in message.data for mark in _MARKS):
        return facts
    try:
        frame = decode(message.subject, message.data, message.stored_at_ns)
    except InvalidError:
        return facts
    if not isinstance(frame, Frame) or facts.ended is not None:
        return facts  # nothing is believed behind the end
    for event in frame.events:
        try:
            facts = _absorb_event(facts, event)
        except ValidationError:
            continue
    return facts


def _absorb_event(facts: ExecutionFacts, event: Event) -> ExecutionFacts:
    match events.body_of(event):
        case events.ExecutionStarted() as body:
            return replace(
                facts,
                target=ExecutionTarget.model_validate(body.target),
                boot=body.boot,
                process=max(facts.process, body.process),
                started_at=facts.started_at or event.at,
                agent=body.agent,
            )
        case events.SessionBound() as body:
            resumable = body.native_session if body.resumable else facts.resumable_session
            version = body.cli_version or facts.cli_version
            return replace(facts, bound_session=body.native_session, resumable_session=resumable, cli_version=version)
        case events.ResponseEnded():
            return replace(facts, response_ended_at=event.at)
        case events.ExecutionEnded() as body:
            end = EndFact(body.outcome, body.proof is not None, event.at, body.tail != "unknown")
            return replace(facts, ended=end)
        case events.ControlReceipt() as body if body.verb in ("interject", "stop"):
            kept = {**facts.receipts, body.control: body.status}
            while len(kept) > RECEIPTS_MAX:
                del kept[next(iter(kept))]
            return replace(facts, receipts=MappingProxyType(kept))
        case _:
            return facts


def absorb_conversation(view: ConversationView, message: StoredMessage) -> ConversationView:
    """The view after a message of the `_` subject. What cannot be read is passed over, with its place taken."""
    view = replace(view, last_sequence=message.sequence)
    try:
        event = decode(message.subject, message.data, message.stored_at_ns)
    except InvalidError:
        return view
    if not isinstance(event, ConversationEvent):
        return view
    seen = MappingProxyType({**view.seen, event.id: Position(message.sequence, message.stored_at_ns)})
    created = view.created
    if event.type == events.RESPONSE_CREATED:
        try:
            body = events.ResponseCreated.model_validate(event.body)
        except ValidationError:
            body = None
        if body is not None and (created is None or body.execution_generation > created.execution_generation):
            created = body
    return ConversationView(message.sequence, max(view.generation, event.generation), seen, created)


def _inputs(facts: ExecutionFacts) -> Iterator[OwnerInput]:
    """What the facts say, in the order in which the log says it."""
    if facts.started:
        yield owner.Started(facts.execution, facts.boot, facts.process, facts.started_at)
    if facts.resumable_session is not None:
        yield owner.SessionBound(
            facts.execution, facts.resumable_session, facts.agent, resumable=True, cli_version=facts.cli_version
        )
    if facts.bound_session is not None and facts.bound_session != facts.resumable_session:
        yield owner.SessionBound(facts.execution, facts.bound_session, facts.agent, resumable=False)
    if facts.response_ended_at is not None:
        yield owner.ResponseEnded(facts.execution, facts.response_ended_at)
    if facts.ended is not None:
        yield owner.Ended(facts.execution, facts.ended.outcome, facts.ended.proved, facts.ended.at)


def catch_up(record: OwnerRecord, facts: ExecutionFacts | None) -> OwnerRecord:
    """The record once it knows what the log says of its execution. Equal to `record` where it knows already."""
    if facts is None:
        return record
    for event in _inputs(facts):
        match owner.decide(record, event):
            case owner.Accepted(changed):
                record = changed
            case owner.Ignored() | owner.Denied():
                pass
    return record
