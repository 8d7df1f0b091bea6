"""Quarantine: what readers of a tenant's log refuse, for an operator to look at. `QUARANTINE_{tenant}`.

    the log ─ projector ─ refused? ─▶ tether.quarantine.{tenant}.{workspace}.{conversation}.{execution}

One writer (whoever projects), so entries of one subject lie in order of the log. An entry names the message by its
place in the log (sequence and stored time), says why, and shows a bounded prefix; the message itself stays in the log
for as long as the log keeps it. Written once: the message id is the place, and beyond the duplicate window the last
entry of the subject says how far its writer was. A flood is told by few entries: `count` messages from `sequence` to
`last_sequence`, of which the first is described.

The stream is bounded in bytes and age; the oldest entries go first. Entries are shown, never replayed.
"""

from __future__ import annotations

import base64
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tether import subjects
from tether.errors import WrongLastSequenceError
from tether.frame_rules import Refusal
from tether.limits import QUARANTINE_PAGE_MAX, QUARANTINE_PREFIX_BYTES, QUARANTINE_SINGLE_MAX
from tether.ports import Bus, StoredMessage
from tether.subjects import EventAddress

_SUBJECTS_MAX: Final = 4096  # whose last entry is remembered
_DETAIL_CHARS_MAX: Final = 300
_READ_MAX: Final = 500


class QuarantineEntry(BaseModel):
    """`sequence`: the message's in the log; with `stored_at` (unix ms) it names the message. `prefix`: the first bytes
    in base64; `digest`: sha-256 of the whole in hex; `bytes` its size. With `count` > 1 further messages of the same
    workspace were refused for the same reason, up to `last_sequence`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1] = 1
    reason: Refusal
    detail: str = ""
    stream: str
    subject: str
    tenant: str
    workspace: str
    conversation: str
    execution: str
    sequence: int
    stored_at: int
    stored_at_ns: int = 0
    bytes: int
    digest: str
    prefix: str
    count: int = 1
    last_sequence: int
    at: int = 0

    @property
    def text(self) -> str:
        """The prefix for a human: what is no text shows as such."""
        return base64.b64decode(self.prefix).decode("utf-8", "replace")


class NumberedEntry(QuarantineEntry):
    """`id`: its place in quarantine."""

    id: int = 0


class QuarantineList(BaseModel):
    """A page, newest first. `next_page`: what `before` continues with; None where that was all."""

    entries: list[NumberedEntry] = Field(default_factory=list)
    next_page: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A message of the log that was refused."""

    address: EventAddress
    stored: StoredMessage
    reason: Refusal
    detail: str = ""


def entries_of(refused: Iterable[Refused], at_ms: int) -> list[QuarantineEntry]:
    """The first few of each workspace and reason have an entry each, what is more shares one. Pure."""
    groups: dict[tuple[str, Refusal], list[Refused]] = {}
    for one in refused:
        groups.setdefault((one.address.workspace, one.reason), []).append(one)
    made: list[QuarantineEntry] = []
    for group in groups.values():
        made += [_entry([one], at_ms) for one in group[:QUARANTINE_SINGLE_MAX]]
        if len(group) > QUARANTINE_SINGLE_MAX:
            made.append(_entry(group[QUARANTINE_SINGLE_MAX:], at_ms))
    return sorted(made, key=lambda entry: entry.sequence)


def _entry(group: Sequence[Refused], at_ms: int) -> QuarantineEntry:
    first = group[0]
    address, stored = first.address, first.stored
    return QuarantineEntry(
        reason=first.reason,
        detail=first.detail[:_DETAIL_CHARS_MAX],
        stream=subjects.events_stream(address.tenant),
        subject=stored.subject,
        tenant=address.tenant,
        workspace=address.workspace,
        conversation=address.conversation,
        execution=address.execution,
        sequence=stored.sequence,
        stored_at=stored.stored_at_ns // 1_000_000,
        stored_at_ns=stored.stored_at_ns,
        bytes=len(stored.data),
        digest=hashlib.sha256(stored.data).hexdigest(),
        prefix=base64.b64encode(stored.data[:QUARANTINE_PREFIX_BYTES]).decode(),
        count=len(group),
        last_sequence=group[-1].stored.sequence,
        at=at_ms,
    )


class QuarantineWriter:
    """One tenant's; one at a time."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        self._bus = bus
        self._stream = subjects.quarantine_stream(tenant)
        self._last: OrderedDict[str, tuple[int, int]] = OrderedDict()  # subject → (stored_at_ns, quarantine sequence)

    def forget(self) -> None:
        """Another may have written meanwhile."""
        self._last.clear()

    async def write(self, refused: Sequence[Refused], at_ms: int) -> int:
        """Entries for what has none yet; how many. Raises BusError: what was written stays, and is not doubled."""
        written = 0
        for entry in entries_of(refused, at_ms):
            subject = subjects.quarantine(
                EventAddress(entry.tenant, entry.workspace, entry.conversation, entry.execution)
            )
            stored_at_ns, sequence = await self._known(subject)
            if entry.stored_at_ns <= stored_at_ns:
                continue  # told by an earlier delivery of it
            data = entry.model_dump_json(exclude_none=True).encode()
            identity = f"{entry.sequence}-{entry.stored_at_ns}"
            try:
                ack = await self._bus.publish(subject, data, msg_id=identity, expect_last=sequence)
            except WrongLastSequenceError:
                self._last.pop(subject, None)
                continue  # another projector took over, and tells it
            self._last[subject] = (entry.stored_at_ns, ack.sequence)
            written += 1
        return written

    async def _known(self, subject: str) -> tuple[int, int]:
        known = self._last.get(subject)
        if known is None:
            last = await self._bus.last(self._stream, subject)
            entry = None if last is None else parse_entry(last)
            known = (0, 0) if last is None else (0 if entry is None else entry.stored_at_ns, last.sequence)
            self._last[subject] = known
            while len(self._last) > _SUBJECTS_MAX:
                self._last.popitem(last=False)
        return known


def parse_entry(stored: StoredMessage) -> NumberedEntry | None:
    """None for what is no entry."""
    try:
        entry = QuarantineEntry.model_validate_json(stored.data)
    except ValidationError:
        return None
    return NumberedEntry(**entry.model_dump(), id=stored.sequence)


async def read_page(
    bus: Bus, tenant: str, *, before: int | None, limit: int, workspace: str = "*", conversation: str = "*"
) -> tuple[list[NumberedEntry], int | None]:
    """The newest entries with an id below `before`, newest first, and what the next page begins with. A page reads
    backwards in steps. Raises BusError."""
    stream = subjects.quarantine_stream(tenant)
    state = await bus.state(stream)
    if state is None:
        return [], None
    limit = min(limit, QUARANTINE_PAGE_MAX)
    end = state.last_sequence if before is None else min(before - 1, state.last_sequence)
    wanted = f"tether.quarantine.{tenant}.{workspace}.{conversation}.*"
    found: list[NumberedEntry] = []
    while end >= max(1, state.first_sequence) and len(found) < limit:
        begin = max(state.first_sequence - 1, end - _READ_MAX)
        batch = [one for one in await bus.read(stream, begin, wanted, limit=_READ_MAX) if one.sequence <= end]
        for stored in reversed(batch):
            entry = parse_entry(stored)
            if entry is not None and len(found) < limit:
                found.append(entry)
        end = begin
    more = len(found) == limit and found[-1].id > state.first_sequence
    return found, found[-1].id if more else None


async def read_entry(bus: Bus, tenant: str, number: int) -> NumberedEntry | None:
    """One entry by its id; None where there is none (any more). Raises BusError."""
    stored = await bus.at(subjects.quarantine_stream(tenant), number)
    return None if stored is None else parse_entry(stored)
