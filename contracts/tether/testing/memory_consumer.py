"""A durable pull consumer in memory: explicit acks, ack wait, nak with delay, redelivery. Time comes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tether.ports import ConsumerState, StoredMessage
from tether.testing.memory_stream import MemoryStream


@dataclass(slots=True)
class _Pending:
    """Delivered and not settled; due again at `due_ns`."""

    deliveries: int
    due_ns: int


class MemoryConsumer:
    """`config` is the consumer's JSON configuration. In a work queue an acked message is removed."""

    def __init__(self, config: dict[str, Any], stream: MemoryStream, created: str) -> None:
        self.config = config
        self.created = created
        self._stream = stream
        self._delivered = 0
        self._ack_floor = 0
        self._pending: dict[int, _Pending] = {}

    @property
    def _ack_wait_ns(self) -> int:
        return int(self.config.get("ack_wait", 30_000_000_000))

    @property
    def _filter(self) -> str:
        return str(self.config.get("filter_subject") or ">")

    def take(self, now_ns: int) -> tuple[StoredMessage, int] | None:
        """The next delivery and its number: what is due again first, then what is new."""
        self._prune(now_ns)
        due = [(entry.due_ns, sequence) for sequence, entry in self._pending.items() if entry.due_ns <= now_ns]
        if due:
            _, sequence = min(due)
            entry = self._pending[sequence]
            entry.deliveries += 1
            entry.due_ns = now_ns + self._ack_wait_ns
            message = self._stream.get(sequence)
            assert message is not None, "pruned above"
            return message, entry.deliveries
        pending_max = int(self.config.get("max_ack_pending", -1))
        if 0 < pending_max <= len(self._pending):
            return None
        new = next(self._stream.after(self._delivered, self._filter), None)
        if new is None:
            return None
        self._delivered = new.sequence
        self._pending[new.sequence] = _Pending(1, now_ns + self._ack_wait_ns)
        return new, 1

    def due_ns(self) -> int | None:
        """When the next unsettled message is due again."""
        return min((entry.due_ns for entry in self._pending.values()), default=None)

    def ack(self, sequence: int) -> None:
        """Settle by sequence, whichever delivery it was (a term does the same)."""
        if self._pending.pop(sequence, None) is None:
            return
        if not self._pending:
            self._ack_floor = self._delivered
        elif sequence < (lowest := min(self._pending)):
            self._ack_floor = max(self._ack_floor, lowest - 1)
        if self._stream.config.get("retention") == "workqueue":
            self._stream.remove(sequence)

    def nak(self, sequence: int, now_ns: int, delay_ns: int) -> None:
        entry = self._pending.get(sequence)
        if entry is not None:
            entry.due_ns = now_ns + delay_ns

    def in_progress(self, sequence: int, now_ns: int) -> None:
        self.nak(sequence, now_ns, self._ack_wait_ns)

    def roll_back(self, to_sequence: int) -> None:
        self._delivered = min(self._delivered, to_sequence)
        self._ack_floor = min(self._ack_floor, to_sequence)
        self._pending = {seq: entry for seq, entry in self._pending.items() if seq <= to_sequence}

    def state(self, now_ns: int) -> ConsumerState:
        self._prune(now_ns)
        return ConsumerState(
            str(self.config["durable_name"]),
            self.created,
            self._ack_floor,
            self._delivered,
            sum(1 for _ in self._stream.after(self._delivered, self._filter)),
            len(self._pending),
        )

    def _prune(self, now_ns: int) -> None:
        """Messages that are gone (purge, limits) are not delivered again."""
        self._stream.expire(now_ns)
        for sequence in [seq for seq in self._pending if self._stream.get(seq) is None]:
            del self._pending[sequence]
