"""One JetStream stream in memory: store, compare-and-set, deduplication, limits, purge, TTL.

Synchronous; time comes in. The order of checks is the server's. One server: compare-and-set first, so a retry of a
stored message reads "wrong last sequence". Replicated: deduplication first, so the same retry reads "duplicate". Ids
are remembered over the whole stream, for the window, whatever happens to their messages (purge, limits).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tether.ports import PubAck, StoredMessage
from tether.testing.matching import literal, matches

MSG_ID: Final = "Nats-Msg-Id"
EXPECTED: Final = "Nats-Expected-Last-Subject-Sequence"
TTL: Final = "Nats-TTL"
ROLLUP: Final = "Nats-Rollup"


class RefusedError(Exception):
    """The server's error answer to a publish, as its JSON has it."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(description)
        self.error: dict[str, Any] = {"code": code, "err_code": err_code, "description": description}


@dataclass(frozen=True, slots=True)
class Stored:
    """What a publish did. `previous`: the subject's last sequence before it. Not `fresh`: a duplicate."""

    ack: PubAck
    message: StoredMessage | None
    previous: int


def size_of(subject: str, data: bytes, headers: Mapping[str, str]) -> int:
    """Bytes on disk as nats-server counts them."""
    block = header_bytes(headers)
    return 22 + len(subject) + (4 + block if block else 0) + len(data) + 8


def header_bytes(headers: Mapping[str, str]) -> int:
    """Size of the header block on the wire."""
    if not headers:
        return 0
    return 12 + sum(len(key.encode()) + len(value.encode()) + 4 for key, value in headers.items())


class MemoryStream:
    """`config` is the stream's JSON configuration. Sequences are in `_order`, and by subject in `_by_subject`."""

    def __init__(self, config: dict[str, Any], created: str, *, replicated: bool) -> None:
        self.config = config
        self.created = created
        self.replicated = replicated
        self.last_sequence = 0
        self.bytes = 0
        self._first_after_empty = 1
        self._messages: dict[int, StoredMessage] = {}
        self._sizes: dict[int, int] = {}
        self._order: list[int] = []
        self._by_subject: dict[str, list[int]] = {}
        self._ids: dict[str, tuple[int, int]] = {}  # id → sequence, remembered until (ns)
        self._expiring: list[tuple[int, int]] = []  # (ns, sequence)

    @property
    def name(self) -> str:
        return str(self.config["name"])

    @property
    def messages(self) -> int:
        return len(self._order)

    @property
    def first_sequence(self) -> int:
        return self._order[0] if self._order else self._first_after_empty

    def captures(self, subject: str) -> bool:
        return any(matches(pattern, subject) for pattern in self.config["subjects"])

    # --- writing ---

    def store(self, subject: str, data: bytes, headers: Mapping[str, str], now_ns: int) -> Stored:
        """Raises RefusedError."""
        self.expire(now_ns)
        checks = [self._check_expected, self._check_duplicate]
        for check in reversed(checks) if self.replicated else checks:
            known = check(subject, headers)
            if known is not None:
                return known
        size = size_of(subject, data, headers)
        ttl_ns = self._check_limits(subject, size, data, headers)
        previous = self._last_of(subject)
        sequence = self.last_sequence = self.last_sequence + 1
        message = StoredMessage(subject, sequence, now_ns, data, dict(headers))
        if headers.get(ROLLUP) == "sub":
            self._drop(list(self._by_subject.get(subject, ())))
        self._insert(message, size)
        if ttl_ns:
            insort(self._expiring, (now_ns + ttl_ns, sequence))
        if MSG_ID in headers:
            window_ns = int(self.config.get("duplicate_window", 0))
            self._ids[headers[MSG_ID]] = (sequence, now_ns + window_ns)
        self._evict(subject)
        return Stored(PubAck(self.name, sequence, False), message, previous)

    def _check_expected(self, subject: str, headers: Mapping[str, str]) -> Stored | None:
        expected = headers.get(EXPECTED)
        if expected is not None and int(expected) != (last := self._last_of(subject)):
            raise RefusedError(400, 10071, f"wrong last sequence: {last}")
        return None

    def _check_duplicate(self, subject: str, headers: Mapping[str, str]) -> Stored | None:
        known = self._ids.get(headers.get(MSG_ID, ""))
        if known is None:
            return None
        return Stored(PubAck(self.name, known[0], True), None, 0)

    def _check_limits(self, subject: str, size: int, data: bytes, headers: Mapping[str, str]) -> int:
        """The message's TTL in ns (0 = none)."""
        size_max = int(self.config.get("max_msg_size", -1))
        if 0 < size_max < len(data) + header_bytes(headers):
            raise RefusedError(400, 10054, "message size exceeds maximum allowed")
        per_subject = int(self.config.get("max_msgs_per_subject", -1))
        count = len(self._by_subject.get(subject, ()))
        if self.config.get("discard") == "new":
            bytes_max = int(self.config.get("max_bytes", -1))
            if 0 < bytes_max < self.bytes + size:
                raise RefusedError(503, 10077, "maximum bytes exceeded")
            if self.config.get("discard_new_per_subject") and 0 < per_subject <= count:
                raise RefusedError(503, 10077, "maximum messages per subject exceeded")
        ttl = headers.get(TTL)
        if ttl is None:
            return 0
        if not self.config.get("allow_msg_ttl"):
            raise RefusedError(400, 10166, "per-message TTL is disabled")
        seconds = ttl.removesuffix("s")
        if not seconds.isdigit() or int(seconds) < 1:
            raise RefusedError(400, 10165, "invalid per-message TTL")
        return int(seconds) * 1_000_000_000

    def _insert(self, message: StoredMessage, size: int) -> None:
        self._messages[message.sequence] = message
        self._sizes[message.sequence] = size
        self._order.append(message.sequence)
        self._by_subject.setdefault(message.subject, []).append(message.sequence)
        self.bytes += size

    def _evict(self, subject: str) -> None:
        """Apply the limits of `discard: old` (and of buckets: history per key)."""
        per_subject = int(self.config.get("max_msgs_per_subject", -1))
        of_subject = self._by_subject.get(subject, [])
        if 0 < per_subject < len(of_subject):
            self._drop(of_subject[: len(of_subject) - per_subject])
        bytes_max = int(self.config.get("max_bytes", -1))
        while 0 < bytes_max < self.bytes and len(self._order) > 1:
            self._drop(self._order[:1])

    def expire(self, now_ns: int) -> None:
        """Forget ids and drop messages whose time has come."""
        while self._ids:
            oldest = next(iter(self._ids))
            if self._ids[oldest][1] > now_ns:
                break
            del self._ids[oldest]
        due = bisect_right(self._expiring, (now_ns, 1 << 62))
        if due:
            self._drop([sequence for _, sequence in self._expiring[:due]])
            del self._expiring[:due]
        max_age_ns = int(self.config.get("max_age", 0))
        while max_age_ns and self._order and self._messages[self._order[0]].stored_at_ns + max_age_ns <= now_ns:
            self._drop(self._order[:1])

    def _drop(self, sequences: Sequence[int]) -> None:
        for sequence in list(sequences):
            message = self._messages.pop(sequence, None)
            if message is None:
                continue
            self.bytes -= self._sizes.pop(sequence)
            del self._order[bisect_left(self._order, sequence)]
            of_subject = self._by_subject[message.subject]
            del of_subject[bisect_left(of_subject, sequence)]
            if not of_subject:
                del self._by_subject[message.subject]
        if not self._order:
            self._first_after_empty = self.last_sequence + 1

    def remove(self, sequence: int) -> bool:
        """Delete one message (a work queue's ack, or a hole for tests)."""
        known = sequence in self._messages
        self._drop((sequence,))
        return known

    def purge(self, pattern: str, up_to: int | None) -> int:
        doomed = [seq for seq in self._of(pattern) if up_to is None or seq < up_to]
        self._drop(doomed)
        return len(doomed)

    def evict(self, up_to: int) -> None:
        """What age or size limits do: drop everything up to and including a sequence."""
        self._drop(self._order[: bisect_right(self._order, up_to)])

    def roll_back(self, to_sequence: int) -> None:
        """Become an older copy of oneself: as after a power loss or a restored backup."""
        self._drop(self._order[bisect_right(self._order, to_sequence) :])
        self._ids = {key: entry for key, entry in self._ids.items() if entry[0] <= to_sequence}
        self._expiring = [entry for entry in self._expiring if entry[1] <= to_sequence]
        self.last_sequence = min(self.last_sequence, to_sequence)
        if not self._order:
            self._first_after_empty = self.last_sequence + 1

    # --- reading ---

    def get(self, sequence: int) -> StoredMessage | None:
        return self._messages.get(sequence)

    def last(self, subject: str, *, below: int | None = None) -> StoredMessage | None:
        """The subject's last message; `below`: as a follower that has not more than this sequence sees it."""
        sequences = self._by_subject.get(subject, [])
        end = len(sequences) if below is None else bisect_right(sequences, below)
        return self._messages[sequences[end - 1]] if end else None

    def after(self, sequence: int, pattern: str) -> Iterator[StoredMessage]:
        for found in self._of(pattern, sequence):
            yield self._messages[found]

    def subjects(self, pattern: str) -> dict[str, int]:
        return {name: len(seqs) for name, seqs in self._by_subject.items() if matches(pattern, name)}

    def _last_of(self, subject: str) -> int:
        sequences = self._by_subject.get(subject)
        return sequences[-1] if sequences else 0

    def _of(self, pattern: str, after: int = 0) -> Iterator[int]:
        """Sequences > `after` that match, in order (a copy's worth at a time: the stream may change meanwhile)."""
        if literal(pattern):
            sequences = self._by_subject.get(pattern, [])
            yield from sequences[bisect_right(sequences, after) :]
            return
        index = bisect_right(self._order, after)
        while index < len(self._order):
            sequence = self._order[index]
            if matches(pattern, self._messages[sequence].subject):
                yield sequence
            index += 1
