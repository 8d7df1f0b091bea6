"""Following a conversation over NATS: the shell around `tether.attach.Attach`, over `tether.ports.Bus`.

    attach (token n) ─ subscribe, barrier, end, read, drain ─▶ live ─ silence ─▶ probe
       ▲                                                        │
       └── pause ◀── a new connection epoch · the buffer overflowed · the bus failed · another stream ◀──┘

One task drives it: the caller's, through an async generator. Effects are performed in order, one at a time; live copies
wait meanwhile in the subscription's bounded buffer. Each new attach has a higher token and begins where the **log** has
been verified, with what the caller was given by execution (`applied`) and the conversation's event ids: what comes
again is dropped by identity. The caller's own cursor may be past a live copy that was lost, this one never is.

A log that was made anew under a living connection has no new epoch. It shows as a live copy that is stored later than
what was seen and yet at an older place, or, in a silence, as a stream of another birth or a shorter one: both mean
another attach, which judges the cursor.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, assert_never

import structlog

from tether import attach as at
from tether import limits, subjects
from tether.attach import Attach, AttachEffect, AttachInput
from tether.client.backoff import Backoff, of_connection, pause
from tether.client.items import CaughtUp, ConversationItem, ExecutionItem, GapItem, Item, PositionChanged, SnapshotItem
from tether.cursor import Cursor
from tether.errors import (
    BusError,
    BusUnavailableError,
    Code,
    PermissionDeniedError,
    ProblemError,
    SlowReaderError,
    problem,
)
from tether.events import ConversationEvent
from tether.failpoints import failpoint
from tether.ports import Bus, LiveMessage, LiveSubscription, StoredMessage
from tether.snapshot import Snapshot
from tether.snapshots import Absent
from tether.subjects import EventAddress

_log = structlog.get_logger("tether.client")
BUFFER_BYTES_MAX: Final = 8 * limits.MIB  # live copies that wait while the caller is busy
IDS_MAX: Final = 4096  # conversation events remembered by id
VERIFY_AFTER: Final = 2000  # live copies without a silence, before the log is asked anyway

# What the log no longer has, from whoever has it (`tether.snapshots`); None and Absent: nobody.
SnapshotSource = Callable[[EventAddress], Awaitable[Snapshot | Absent | None]]


class _AttachAgain(Exception):  # noqa: N818 - no fault: this attach is over, and nothing needs to be waited for
    pass


@dataclass(frozen=True, slots=True)
class _Verified:
    """In the queue of effects behind what was read: once all before it was given, the next attach may begin here."""

    cursor: Cursor


@dataclass(frozen=True, slots=True)
class Where:
    """Whose events are followed."""

    tenant: str
    workspace: str
    conversation: str

    @property
    def stream(self) -> str:
        return subjects.events_stream(self.tenant)

    @property
    def events(self) -> str:
        return subjects.conversation_events(self.tenant, self.workspace, self.conversation)

    @property
    def live(self) -> str:
        return subjects.conversation_live(self.tenant, self.workspace, self.conversation)

    def encode(self, cursor: Cursor) -> str:
        return cursor.encode(self.tenant, self.conversation)

    def address(self, execution: str) -> EventAddress:
        return EventAddress(self.tenant, self.workspace, self.conversation, execution)


@dataclass(slots=True)
class SeenIds:
    """Ids of conversation events that the caller was given; the oldest are forgotten."""

    _ids: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def add(self, event_id: str) -> bool:
        """False where it was known."""
        if event_id in self._ids:
            return False
        self._ids[event_id] = None
        if len(self._ids) > IDS_MAX:
            self._ids.popitem(last=False)
        return True

    def clear(self) -> None:
        self._ids.clear()


class Follower:
    """One reader. `run()` gives its items until the generator is closed or `patience_s` is over."""

    def __init__(
        self,
        bus: Bus,
        where: Where,
        cursor: Cursor,
        snapshots: SnapshotSource,
        *,
        patience_s: float | None = None,
        silence_s: float = limits.SILENCE_PROBE_S,
        buffer_bytes_max: int = BUFFER_BYTES_MAX,
        backoff: Backoff | None = None,
    ) -> None:
        self._bus = bus
        self._where = where
        self._snapshots = snapshots
        self._patience_s = patience_s
        self._silence_s = silence_s
        self._buffer_bytes_max = buffer_bytes_max
        self._backoff = backoff or of_connection()
        self._cursor = cursor  # what the caller has been given
        self._safe = cursor  # up to here the log itself was read: the next attach begins here
        self._applied: dict[str, int] = {}
        self._ids = SeenIds()
        self._caught_up = False
        self._failing_since_s: float | None = None
        self.attaches = 0

    async def run(self) -> AsyncGenerator[Item, None]:
        """Raises ProblemError (the log cannot be read by this version; patience is over), PermissionDeniedError."""
        while True:
            self.attaches += 1
            round_ = _Round(self, Attach(self.attaches, self._safe, dict(self._applied)))
            items = round_.run()
            try:
                async for item in items:
                    yield item
            except PermissionDeniedError:
                raise
            except _AttachAgain as again:
                _log.debug("follow_attaches_again", reason=str(again))
                continue
            except SlowReaderError:
                _log.info("follow_overflowed", conversation=self._where.conversation)
                continue
            except BusError as error:
                await self._pause(error)
            finally:
                await items.aclose()

    async def _pause(self, error: BusError) -> None:
        """Wait; a connection that comes back ends it. Raises ProblemError when patience is over."""
        loop = asyncio.get_running_loop()
        if self._failing_since_s is None:
            self._failing_since_s = loop.time()
        if self._patience_s is not None and loop.time() - self._failing_since_s >= self._patience_s:
            raise ProblemError(problem(Code.RUNTIME_UNAVAILABLE, f"the message bus does not answer: {error.detail}"))
        await pause(self._bus, self._backoff.next_s())

    # --- what the round tells ---

    def healthy(self) -> None:
        self._failing_since_s = None
        self._backoff.reset()

    def verified(self, cursor: Cursor) -> None:
        if cursor.sequence >= self._safe.sequence:
            self._safe = cursor

    def deliver(self, effect: at.Deliver) -> list[Item]:
        where, address = self._where, effect.address
        # A later attach calls replay what was stored while it came; to the caller that is new.
        replay = effect.replay and not self._caught_up
        if isinstance(effect.events, ConversationEvent):
            fresh = self._ids.add(effect.events.id)
            self._cursor = effect.cursor
            token = where.encode(effect.cursor)
            return [ConversationItem(where.conversation, effect.events, token, replay)] if fresh else []
        items: list[Item] = []
        partly = effect.cursor.sequence == effect.sequence
        before, count = self._cursor, len(effect.events)
        for index, event in enumerate(effect.events, start=1):
            cursor = effect.cursor
            if index < count:
                # Inside a frame: so many of its events. Of an older frame, read again: the caller stays where it was.
                done = effect.skipped + index
                cursor = Cursor(effect.sequence, done, effect.cursor.tag) if partly else before
            self._applied[address.execution] = event.end
            items.append(ExecutionItem(where.conversation, address.execution, event, where.encode(cursor), replay))
        self._cursor = effect.cursor
        return items

    def snapshot(self, effect: at.DeliverSnapshot) -> SnapshotItem:
        state = effect.snapshot.state
        self._applied[effect.address.execution] = effect.snapshot.watermark.ordinal
        return SnapshotItem(
            self._where.conversation, {effect.address.execution: state}, self._where.encode(self._cursor)
        )

    def gap(self, effect: at.DeliverGap) -> GapItem:
        self._applied[effect.address.execution] = effect.last
        return GapItem(
            self._where.conversation,
            effect.address.execution,
            effect.first,
            effect.last,
            effect.reason,
            self._where.encode(self._cursor),
            effect.detail,
        )

    def changed(self) -> PositionChanged:
        self._cursor = self._safe = Cursor.beginning()
        self._applied.clear()
        self._ids.clear()
        self._caught_up = False
        return PositionChanged(self._where.conversation, self._where.encode(self._cursor))

    def caught_up(self) -> list[Item]:
        """Once of each log, however many attaches it took."""
        if self._caught_up:
            return []
        self._caught_up = True
        return [CaughtUp(self._where.conversation, self._where.encode(self._cursor))]


class _Round:
    """One attach of a `Follower`: performs its machine's effects."""

    def __init__(self, owner: Follower, machine: Attach) -> None:
        self._owner = owner
        self._machine = machine
        self._bus = owner._bus
        self._where = owner._where
        self._epoch = self._bus.epoch
        self._subscription: LiveSubscription | None = None
        self._created = ""
        self._newest = (0, 0)  # sequence and stored time (ns) of the newest message seen in this log
        self._unverified = 0  # live copies since the log was last asked
        self._probes = 0  # of a silence, without answer yet

    async def run(self) -> AsyncGenerator[Item, None]:
        effects: deque[AttachEffect | _Verified] = deque(self._machine.begin())
        try:
            while True:
                while effects:
                    effect = effects.popleft()
                    for item in self._items(effect):
                        yield item
                    effects.extend(await self._perform(effect))
                    self._check_epoch()
                effects.extend(await self._next())
        finally:
            if self._subscription is not None:
                await self._subscription.close()

    def _check_epoch(self) -> None:
        if self._bus.epoch != self._epoch:
            raise _AttachAgain("the connection was replaced")

    def _items(self, effect: AttachEffect | _Verified) -> list[Item]:
        """What the caller gets of this effect."""
        match effect:
            case at.Deliver():
                return self._owner.deliver(effect)
            case at.DeliverSnapshot():
                return [self._owner.snapshot(effect)]
            case at.DeliverGap():
                return [self._owner.gap(effect)]
            case at.PositionChanged():
                return [self._owner.changed()]
            case at.CaughtUp():
                self._owner.healthy()
                return self._owner.caught_up()
            case _:
                return []

    async def _perform(self, effect: AttachEffect | _Verified) -> Sequence[AttachEffect | _Verified]:
        token = self._machine.token
        match effect:
            case at.Subscribe():
                self._subscription = await self._bus.live(
                    self._where.live, buffer_bytes_max=self._owner._buffer_bytes_max
                )
                await self._bus.barrier()
                failpoint("attach.subscribed")
                return self._apply(at.Barriered(token))
            case at.AskEnd():
                return self._apply(await self._end(effect))
            case at.Read():
                return await self._read(effect)
            case at.Probe():
                return await self._probe(effect)
            case at.AskSnapshot():
                found = await self._owner._snapshots(effect.address)
                failpoint("attach.snapshot_read")
                snapshot, why = (None, found.detail) if isinstance(found, Absent) else (found, "")
                return self._apply(at.SnapshotRead(token, effect.address.execution, snapshot, why))
            case _Verified():
                self._owner.verified(effect.cursor)
                self._unverified = 0
                failpoint("attach.verified")
                return []
            case at.Deliver() | at.DeliverSnapshot() | at.DeliverGap() | at.PositionChanged() | at.CaughtUp():
                return []
            case _:
                assert_never(effect)

    def _apply(self, event: AttachInput) -> list[AttachEffect]:
        return self._machine.apply(event)

    async def _end(self, effect: at.AskEnd) -> at.EndKnown:
        state = await self._bus.state(self._where.stream)
        if state is None:
            # Not an end: a log that is made anew in a moment must not read as an empty one.
            raise BusUnavailableError("the tenant's log does not exist (yet)", subject=self._where.stream)
        self._created = state.created
        at_cursor = None
        if 0 < effect.cursor_sequence <= state.last_sequence:
            at_cursor = await self._bus.at(self._where.stream, effect.cursor_sequence)
        if at_cursor is not None:
            self._saw(at_cursor)
        failpoint("attach.end_known")
        return at.EndKnown(effect.token, state.last_sequence, at_cursor)

    async def _read(self, effect: at.Read) -> Sequence[AttachEffect | _Verified]:
        batch = await self._bus.read(self._where.stream, effect.after, self._where.events)
        failpoint("attach.batch_read")
        if batch:
            self._saw(batch[-1])
        effects = self._apply(at.BatchRead(effect.token, effect.round, batch))
        if batch and _read_on(effects, batch[-1]):
            verified = _Verified(Cursor.after(batch[-1].sequence, batch[-1].stored_at_ns))
            return [*effects[:-1], verified, effects[-1]]
        return effects

    async def _probe(self, effect: at.Probe) -> list[AttachEffect]:
        where = self._where
        subject = where.events if effect.execution is None else where.address(effect.execution).subject
        more = await self._bus.next_after(where.stream, effect.after, subject) is not None
        failpoint("attach.probed")
        self._probes = max(0, self._probes - 1) if effect.round < 0 else self._probes
        effects = self._apply(at.Probed(effect.token, effect.round, effect.after, more))
        if effect.round < 0 and not more and self._probes == 0 and self._machine.live and not effects:
            self._owner.verified(self._machine.cursor)
            self._unverified = 0
        return effects

    async def _next(self) -> list[AttachEffect]:
        """The next live copy, or what a silence makes of it."""
        assert self._subscription is not None
        message = await self._subscription.next(self._owner._silence_s)
        self._check_epoch()
        if message is None:
            await self._check_stream()
            return self._silent()
        if message.sequence == 0:
            return []  # published to the live subject by hand: no copy of a stored message
        sequence, stored_at_ns = self._newest
        if message.sequence <= sequence and message.stored_at_ns > stored_at_ns:
            raise _AttachAgain("a live copy is younger than what was seen, at an older place")
        self._saw(message)
        self._unverified += 1
        effects = self._apply(at.LiveArrived(self._machine.token, message))
        if self._unverified >= VERIFY_AFTER and self._machine.live:
            return [*effects, *self._silent()]
        return effects

    def _saw(self, message: StoredMessage | LiveMessage) -> None:
        self._newest = max(self._newest, (message.sequence, message.stored_at_ns))

    def _silent(self) -> list[AttachEffect]:
        effects = self._apply(at.Silent(self._machine.token))
        self._probes = len(effects)
        self._unverified = 0
        return effects

    async def _check_stream(self) -> None:
        state = await self._bus.state(self._where.stream)
        if state is None:
            raise BusUnavailableError("the tenant's log does not exist (any more)", subject=self._where.stream)
        if state.created != self._created or state.last_sequence < self._machine.cursor.sequence:
            raise _AttachAgain("the log is another one")
        self._owner.healthy()


def _read_on(effects: list[AttachEffect], last: StoredMessage) -> bool:
    """Whether the machine took the whole batch: it reads on behind it."""
    return bool(effects) and isinstance(effects[-1], at.Read) and effects[-1].after == last.sequence


def decode_cursor(text: str | None, where: Where) -> Cursor:
    """Raises `InvalidError` for a cursor that is not this conversation's."""
    return Cursor.beginning() if text is None else Cursor.decode(text, where.tenant, where.conversation)
