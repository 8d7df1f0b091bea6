"""What services need of a bus, as protocols. `tether.bus` implements them over nats-py, `tether.testing` in memory.

Everything that JetStream stores is reached through `publish`, `last`, `at`, `next_after` and `read`; key-value
buckets are streams too (`tether.kv`), so both implementations share their semantics:

* compare-and-set on a subject's last sequence (0 = the subject is empty),
* deduplication by message id over the whole stream, within its window, even after a purge,
* republish of a stored message to its live subject with `Nats-Sequence` and `Nats-Last-Sequence`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tether.topology import Topology


@dataclass(frozen=True, slots=True)
class PubAck:
    """`sequence` in the stream. `duplicate`: the id was known; no proof that it is stored."""

    stream: str
    sequence: int
    duplicate: bool


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message of a stream. `stored_at_ns`: unix nanoseconds, the server's clock, fixed when stored."""

    subject: str
    sequence: int
    stored_at_ns: int
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LiveMessage:
    """A republished copy. `previous` is the sequence of the message before it on its exact subject (0 = none).
    `stored_at_ns` as in `StoredMessage` where the header carries it, else 0."""

    subject: str
    sequence: int
    previous: int
    data: bytes
    stored_at_ns: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Message:
    """A core message. `reply` is where an answer goes, empty if none is wanted."""

    subject: str
    data: bytes
    reply: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamState:
    """`created` (RFC 3339) changes when the stream is made anew; first/last are stream sequences. `bytes_max`: its
    quota, -1 where it has none."""

    name: str
    created: str
    messages: int
    bytes: int
    first_sequence: int
    last_sequence: int
    bytes_max: int = -1


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """Of a durable: `ack_floor` stream sequence up to which everything is acked, and what is waiting."""

    name: str
    created: str
    ack_floor: int
    delivered: int
    pending: int
    ack_pending: int


class Job(Protocol):
    """A message of a durable pull consumer; exactly one of ack / nak / term settles it."""

    @property
    def message(self) -> StoredMessage: ...

    @property
    def deliveries(self) -> int:
        """1 on the first delivery."""
        ...

    async def ack(self, *, confirm: bool = False) -> bool:
        """Ack; with `confirm`, wait for the server's answer and return whether it came (double ack)."""
        ...

    async def nak(self, delay_s: float) -> None: ...

    async def in_progress(self) -> None: ...

    async def term(self, reason: str) -> None: ...


class Subscription(Protocol):
    """A bounded core subscription. Iteration raises `SlowReaderError` once the buffer has overflowed."""

    def __aiter__(self) -> AsyncIterator[Message]: ...

    async def next(self, timeout_s: float | None = None) -> Message | None:
        """The next message, or None when `timeout_s` has passed."""
        ...

    async def close(self) -> None: ...


class LiveSubscription(Protocol):
    """As `Subscription`, of republished copies."""

    def __aiter__(self) -> AsyncIterator[LiveMessage]: ...

    async def next(self, timeout_s: float | None = None) -> LiveMessage | None:
        """The next copy, or None when `timeout_s` has passed; earlier where the connection was lost: copies may have
        been missed, and the log tells them."""
        ...

    async def close(self) -> None: ...


Handler = Callable[[Message], Awaitable[bytes | None]]


class Bus(Protocol):
    """One connection's view of JetStream. Every call is bounded in time and raises `BusError`s only."""

    @property
    def connected(self) -> bool:
        """False while the connection is known to be away; true is no proof."""
        ...

    @property
    def epoch(self) -> int:
        """Grows with every (re)connect: what was subscribed or read under an older epoch may have missed messages."""
        ...

    @property
    def payload_bytes_max(self) -> int: ...

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        msg_id: str | None = None,
        expect_last: int | None = None,
        headers: Mapping[str, str] | None = None,
        ttl_s: int | None = None,
        timeout_s: float = 2.0,
    ) -> PubAck:
        """Store one message. `expect_last`: compare-and-set on the subject's last sequence.

        Raises UndecidedError (the message may or may not be, or become, stored), WrongLastSequenceError,
        BusUnavailableError (not stored), MessageTooLargeError, PermissionDeniedError.
        """
        ...

    async def send(self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None) -> None:
        """Core publish, not stored: for hints and replies."""
        ...

    async def last(self, stream: str, subject: str, *, leader: bool = True) -> StoredMessage | None:
        """The last stored message of exactly `subject`. `leader`: from the stream's leader (services that decide);
        else a direct get with the subject appended to the API subject (the form that a sandbox may use)."""
        ...

    async def at(self, stream: str, sequence: int) -> StoredMessage | None:
        """The message with this sequence, or None where it is gone or never was."""
        ...

    async def next_after(self, stream: str, sequence: int, filter_subject: str) -> StoredMessage | None:
        """The first message with a sequence > `sequence` on `filter_subject` (wildcards allowed), from the leader."""
        ...

    async def read(
        self, stream: str, after: int, filter_subject: str, *, limit: int = 500, bytes_max: int = 4 << 20
    ) -> Sequence[StoredMessage]:
        """Up to `limit` messages after sequence `after` by batch direct get, in order; empty where there are none.
        A follower may answer: compare with a sequence taken from the leader before concluding that it is the end."""
        ...

    async def subjects(self, stream: str, filter_subject: str) -> Mapping[str, int]:
        """Message count by subject (bounded by what the server returns in pages; every page is fetched)."""
        ...

    async def state(self, stream: str) -> StreamState | None:
        """From the leader; None where the stream does not exist."""
        ...

    async def consumer(self, stream: str, durable: str) -> ConsumerState | None: ...

    async def delete_consumer(self, stream: str, durable: str) -> None: ...

    async def purge(self, stream: str, subject: str, *, up_to: int | None = None) -> int:
        """Delete the messages of `subject` (below sequence `up_to`); returns how many."""
        ...

    async def erase(self, stream: str, sequence: int) -> bool:
        """Delete one message and overwrite its bytes on the servers' disks, which `purge` leaves until a block is
        written anew; False where there was none. Idempotent. Raises BusError (a bucket's stream does not allow it)."""
        ...

    async def delete_stream(self, stream: str) -> None: ...

    def jobs(self, stream: str, durable: str, *, in_flight_max: int = 256) -> AsyncGenerator[Job, None]:
        """Messages of an existing durable pull consumer, for ever; survives reconnects. Close with `aclose()`."""
        ...

    async def subscribe(self, subject: str, *, queue: str = "", buffer_bytes_max: int = 8 << 20) -> Subscription:
        """Core subscription; call `barrier()` before relying on it."""
        ...

    async def live(
        self, subject: str, *, buffer_bytes_max: int = 32 << 20, keep: Callable[[bytes], bool] | None = None
    ) -> LiveSubscription:
        """Subscription to `tether.live.…` copies; of `keep`, those whose data it takes: the others are dropped where
        they arrive, which costs the reader nothing. `keep` is asked for every copy: it is quick and never raises."""
        ...

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Message:
        """A question; raises NoReplyError when it stays unanswered (the outcome is unknown)."""
        ...

    def serve(
        self, subject: str, handler: Handler, *, queue: str = "", name: str, concurrency_max: int = 64
    ) -> AbstractAsyncContextManager[None]:
        """Answer requests on `subject` while the context is open. A handler's None means no answer."""
        ...

    async def barrier(self) -> None:
        """A request round trip on this connection: everything sent before has reached the server."""
        ...

    async def ensure(self, topology: Topology) -> None:
        """Create or upgrade the topology's streams, buckets and consumers; idempotent, never downward."""
        ...

    async def diff(self, topology: Topology) -> Sequence[str]:
        """What differs on the live server, one sentence each; empty where nothing does."""
        ...

    async def close(self) -> None: ...
