"""The log as its readers see it: frames, the fold, merging, attaching.

Laws: what decodes encodes to what decodes equally; a merged log folds as the log does; a snapshot and what follows it
fold as all of it does; a merge loses no completed text that was not discarded; an attach delivers each ordinal once and
in order, or says that it is missing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final

from pydantic import ValidationError

from tether import attach, frames
from tether.conversation_fold import ConversationFold
from tether.cursor import Cursor
from tether.errors import InvalidError
from tether.events import ConversationEvent, Event, body_of
from tether.fold import Applied, ExecutionFold, ExecutionState, TextItem
from tether.frames import Frame, Position
from tether.merge import merge
from tether.ports import LiveMessage, StoredMessage
from tether_fuzz.target import Features, Target, law, refusal
from tether_fuzz.targets import good

FRAMES_MAX: Final = 40  # of one input
FOLLOWERS_MAX: Final = 3  # snapshots that are followed
_ROUNDS_MAX: Final = 4000  # of an attach: each input is answered by far fewer


def decoded(subject: str, data: bytes) -> Frame | ConversationEvent | InvalidError:
    try:
        return frames.decode(subject, data)
    except InvalidError as error:
        return error


def run_frame(data: bytes) -> Features:
    message = decoded(good.SUBJECT, data)
    if not isinstance(message, Frame):
        return refusal(message) if isinstance(message, InvalidError) else []
    again = frames.decode(good.SUBJECT, frames.encode(message))
    law(again == message, "a frame that was encoded decodes to itself")
    features: list[Hashable] = [(event.type, _is_good(event)) for event in message.events]
    waiting = [(event, Position(1, at)) for at, event in enumerate(message.events)]
    if not _continues(message.events):
        return features
    taken: list[Event] = []
    while waiting:
        cut = frames.cut(waiting, bytes_max=2000, events_max=7)
        law(frames.decode(good.SUBJECT, cut.data) == cut.frame, "what is cut is what its bytes say")
        law(len(cut.data) <= 2000 or cut.taken == 1, "a cut frame is within its size")
        taken += cut.frame.events
        waiting = waiting[cut.taken :]
    law(_folded(taken) == _folded(message.events), "a log that is cut and merged folds as it did")
    return features


def _is_good(event: Event | ConversationEvent) -> bool:
    try:
        body_of(event)
    except ValidationError:
        return False
    return True


def _continues(events: list[Event]) -> bool:
    """A writer's own events, whose deltas have their fields: what merging is for."""
    return events[0].ordinal == 1 and all(_is_good(event) for event in events)


def _folded(events: list[Event]) -> ExecutionState:
    fold = ExecutionFold()
    for event in events:
        fold.apply(event)
    return fold.freeze()


def run_note(data: bytes) -> Features:
    fold = ConversationFold()
    features: list[Hashable] = []
    for line in data.split(b"\n"):
        message = decoded(good.NOTE_SUBJECT, line)
        if isinstance(message, InvalidError):
            features += refusal(message)
        elif isinstance(message, ConversationEvent):
            law(frames.decode(good.NOTE_SUBJECT, frames.encode_event(message)) == message, "an event decodes to itself")
            fold.apply(message)
            law(fold.apply(message) is Applied.DUPLICATE, "an event is applied once")
            features.append((message.type, _is_good(message)))
    state = fold.freeze()
    law(type(state).model_validate_json(state.model_dump_json()) == state, "a conversation's state is JSON")
    return features


def run_fold(data: bytes) -> Features:
    """Frames in any order, with holes that are given up; a snapshot is taken at each of them."""
    fold, features = ExecutionFold(), set[Hashable]()
    followers: list[ExecutionFold] = []
    states: list[ExecutionState] = []
    for line in data.split(b"\n")[:FRAMES_MAX]:
        message = decoded(good.SUBJECT, line)
        if not isinstance(message, Frame):
            continue
        for event in message.events:
            before = fold.applied
            told = _apply(fold, event)
            law(fold.applied >= before, "a fold goes forward")
            for follower in followers:
                _apply(follower, event)
            features.add((event.type, told, fold.phase))
        state = fold.freeze()
        text = state.model_dump_json()
        law(ExecutionState.model_validate_json(text) == state, "a state is JSON")
        if len(followers) < FOLLOWERS_MAX:
            followers.append(ExecutionFold(ExecutionState.model_validate_json(text)))
            states.append(state)
    last = fold.freeze()
    for follower in followers:
        law(follower.freeze() == last, "a snapshot and what follows it fold as everything does")
    for state in states:
        features.add(_check_merge(state, last))
    return features


def _apply(fold: ExecutionFold, event: Event) -> Applied:
    told = fold.apply(event)
    if told is Applied.HOLE:
        fold.skip_to(event.ordinal, "retention_gap")
        told = fold.apply(event)
        law(told is Applied.APPLIED, "what follows a gap that was given up is applied")
    return told


def _check_merge(mine: ExecutionState, theirs: ExecutionState) -> Hashable:
    merged = merge(mine, theirs)
    voided = {item.id for item in theirs.items if isinstance(item, TextItem) and item.state == "discarded"}
    kept = {
        (item.kind, item.id) for item in merged.state.items if isinstance(item, TextItem) and item.state == "completed"
    }
    for item in mine.items:
        if isinstance(item, TextItem) and item.state == "completed" and item.id not in voided:
            law((item.kind, item.id) in kept, "completed text that was not discarded stays")
    law(merge(merged.state, merged.state).state == merged.state, "a merge with itself changes nothing")
    return ("merge", merged.changed, merged.state.partial, bool(merged.filled))


def run_attach(data: bytes) -> Features:
    """Lines as messages of a stream: a first half is stored, the rest comes live; every third copy is lost."""
    stored, live = _messages(data.split(b"\n")[:60])
    machine = attach.Attach(1, buffer_bytes_max=4096)
    reached: dict[str, int] = {}
    features = set[Hashable]()
    queue: list[attach.AttachEffect] = machine.begin()
    rounds = 0
    last = stored[-1].sequence if stored else 0
    while queue or live:
        rounds += 1
        law(rounds < _ROUNDS_MAX, "an attach comes to rest")
        if not queue or (live and rounds % 5 == 0):
            message = live.pop(0) if live else None
            if message is not None:
                stored.append(StoredMessage(message.subject, message.sequence, message.stored_at_ns, message.data))
                if message.sequence % 3:
                    queue += machine.apply(attach.LiveArrived(1, message))
            continue
        effect = queue.pop(0)
        features.add(type(effect).__name__)
        _check_delivery(effect, reached)
        queue += _answer(machine, effect, stored, last)
    for event in (attach.Silent(1), attach.Overflowed(1), attach.Probed(1, -1, 0, True), attach.Barriered(2)):
        machine.apply(event)
    return features


def _messages(lines: list[bytes]) -> tuple[list[StoredMessage], list[LiveMessage]]:
    stored: list[StoredMessage] = []
    live: list[LiveMessage] = []
    before: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        subject = good.NOTE_SUBJECT if b'"generation"' in line and b'"ordinal"' not in line else good.SUBJECT
        if number * 2 <= len(lines):
            stored.append(StoredMessage(subject, number, number * 1000, line))
        else:
            live.append(LiveMessage(subject, number, before.get(subject, 0), line, number * 1000))
        before[subject] = number
    return stored, live


def _answer(
    machine: attach.Attach, effect: attach.AttachEffect, stored: list[StoredMessage], last: int
) -> list[attach.AttachEffect]:
    match effect:
        case attach.Subscribe():
            return machine.apply(attach.Barriered(1))
        case attach.AskEnd():
            return machine.apply(attach.EndKnown(1, last, None))
        case attach.Read(_, number, after):
            batch = [message for message in stored if message.sequence > after][:7]
            return machine.apply(attach.BatchRead(1, number, batch))
        case attach.Probe(_, number, after):
            more = any(message.sequence > after for message in stored)
            return machine.apply(attach.Probed(1, number, after, more))
        case attach.AskSnapshot(_, address):
            return machine.apply(attach.SnapshotRead(1, address.execution, None, "nobody has one"))
        case _:
            return []


def _check_delivery(effect: attach.AttachEffect, reached: dict[str, int]) -> None:
    match effect:
        case attach.Deliver(address, events, cursor):
            text = cursor.encode(good.TENANT, good.CONVERSATION)
            law(Cursor.decode(text, good.TENANT, good.CONVERSATION) == cursor, "a cursor decodes to itself")
            if isinstance(events, ConversationEvent):
                return
            for event in events:
                applied = reached.get(address.execution, 0)
                law(event.ordinal <= applied + 1 <= event.end, "each ordinal comes once, in order")
                reached[address.execution] = event.end
        case attach.DeliverGap(address, first, until):
            law(first == reached.get(address.execution, 0) + 1 and until >= first, "a gap is what is missing")
            reached[address.execution] = until
        case _:
            pass


def _frame_seeds() -> Iterable[bytes]:
    yield from good.frames_of(1)
    yield from good.frames_of(30)


def _log_seeds() -> Iterable[bytes]:
    for width in (1, 4, 30):
        yield b"\n".join(good.frames_of(width))
    whole = good.frames_of(3)
    yield b"\n".join([*good.notes(), *whole])
    yield b"\n".join([whole[0], *whole[3:], *whole[1:3]])


TARGETS: Final = (
    Target("frame", "contract", "json", run_frame, _frame_seeds),
    Target("note", "contract", "lines", run_note, lambda: [*good.notes(), b"\n".join(good.notes())]),
    Target("fold", "contract", "lines", run_fold, _log_seeds),
    Target("attach", "contract", "lines", run_attach, _log_seeds),
)
