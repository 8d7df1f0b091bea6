"""The shared half of the memory bus: streams, consumers, core routing, and the parts of the JetStream API that
`tether.topology_apply` uses, so that `ensure` and `diff` are the same code on both buses.

`replicated=True` answers like an R3 stream: deduplication before compare-and-set, followers that may lag.
Everything is synchronous: one call is one atomic step of the server.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from tether.ports import Message
from tether.testing.clock import VirtualClock
from tether.testing.matching import matches, overlap
from tether.testing.memory_consumer import MemoryConsumer
from tether.testing.memory_stream import MemoryStream, Stored
from tether.topology_apply import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND, ApiError

PAYLOAD_BYTES_MAX: Final = 1 << 20  # a server's default, headers included
_IMMUTABLE: Final = ("retention", "storage", "deny_delete")


@dataclass(eq=False, slots=True)
class CoreSubscription:
    """One subscription of one connection; `deliver` is called at once, and only while that is connected."""

    pattern: str
    queue: str
    connected: Callable[[], bool]
    deliver: Callable[[Message], None]


class MemoryServer:
    """Shared by any number of `MemoryBus` connections."""

    def __init__(self, *, clock: VirtualClock | None = None, replicated: bool = False, seed: int = 0) -> None:
        self.clock = clock or VirtualClock()
        self.replicated = replicated
        self.streams: dict[str, MemoryStream] = {}
        self.consumers: dict[tuple[str, str], MemoryConsumer] = {}
        self.wakers: set[Callable[[], None]] = set()
        self.inboxes: dict[str, Callable[[Message], None]] = {}
        self._followers: dict[str, int] = {}
        self._subscriptions: list[CoreSubscription] = []
        self._random = random.Random(seed)
        self._serial = itertools.count(1)
        self.clock.on_advance(self.wake)

    # --- what tests do to it ---

    def hold_followers(self, stream: str, up_to: int | None) -> None:
        """Direct reads see nothing beyond `up_to` from now on; None: followers have caught up."""
        if up_to is None:
            self._followers.pop(stream, None)
        else:
            self._followers[stream] = up_to

    def evict(self, stream: str, up_to: int) -> None:
        """Retention: drop everything up to and including a sequence."""
        self.streams[stream].evict(up_to)

    def delete_message(self, stream: str, sequence: int) -> None:
        self.streams[stream].remove(sequence)

    def roll_back(self, stream: str, to_sequence: int) -> None:
        """The stream becomes an older copy of itself; sequences will be given out again."""
        self.streams[stream].roll_back(to_sequence)
        for (name, _), consumer in self.consumers.items():
            if name == stream:
                consumer.roll_back(to_sequence)

    def recreate(self, stream: str) -> None:
        """Delete the stream and make it anew with the same configuration: empty, another `created`, no consumers."""
        config = self.streams[stream].config
        self.delete_stream(stream)
        self._create_stream("", dict(config))

    # --- core ---

    def subscribe(self, subscription: CoreSubscription) -> None:
        self._subscriptions.append(subscription)

    def unsubscribe(self, subscription: CoreSubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def route(self, message: Message) -> int:
        """Deliver a core message; returns to how many."""
        inbox = self.inboxes.get(message.subject)
        if inbox is not None:
            inbox(message)
            return 1
        groups: dict[tuple[str, str], list[CoreSubscription]] = {}
        chosen: list[CoreSubscription] = []
        for subscription in self._subscriptions:
            if not subscription.connected() or not matches(subscription.pattern, message.subject):
                continue
            if subscription.queue:
                groups.setdefault((subscription.pattern, subscription.queue), []).append(subscription)
            else:
                chosen.append(subscription)
        chosen.extend(self._random.choice(members) for members in groups.values())
        for subscription in chosen:
            subscription.deliver(message)
        return len(chosen)

    # --- streams ---

    def capturing(self, subject: str) -> MemoryStream | None:
        return next((stream for stream in self.streams.values() if stream.captures(subject)), None)

    def store(self, subject: str, data: bytes, headers: Mapping[str, str], *, live: bool = True) -> Stored | None:
        """Store and republish; None where no stream takes the subject. Raises RefusedError."""
        stream = self.capturing(subject)
        if stream is None:
            return None
        stored = stream.store(subject, data, headers, self.clock.now_ns())
        if stored.message is not None:
            if live:
                self._republish(stream, stored)
            self.wake()
        return stored

    def _republish(self, stream: MemoryStream, stored: Stored) -> None:
        republish = stream.config.get("republish")
        message = stored.message
        assert message is not None
        if not republish or not matches(republish["src"], message.subject):
            return
        prefix = republish["src"].removesuffix(">")
        subject = republish["dest"].removesuffix(">") + message.subject[len(prefix) :]
        headers = {
            **message.headers,
            "Nats-Stream": stream.name,
            "Nats-Subject": message.subject,
            "Nats-Sequence": str(message.sequence),
            "Nats-Time-Stamp": rfc3339(message.stored_at_ns),
            "Nats-Last-Sequence": str(stored.previous),
        }
        self.route(Message(subject, message.data, "", headers))

    def stream(self, name: str) -> MemoryStream | None:
        found = self.streams.get(name)
        if found is not None:
            found.expire(self.clock.now_ns())
        return found

    def visible(self, name: str) -> int | None:
        """The last sequence that direct reads see; None where they see everything."""
        return self._followers.get(name)

    def delete_stream(self, name: str) -> None:
        self.streams.pop(name, None)
        self._followers.pop(name, None)
        for key in [key for key in self.consumers if key[0] == name]:
            del self.consumers[key]
        self.wake()

    def wake(self) -> None:
        """Something may have become deliverable."""
        for waker in list(self.wakers):
            waker()

    # --- the API that `tether.topology_apply` uses ---

    async def api(self, subject: str, request: Any) -> dict[str, Any]:
        """Raises ApiError."""
        kind, verb, stream, *rest = subject.removeprefix("$JS.API.").split(".")
        if kind == "STREAM":
            return self._stream_api(subject, verb, stream, request)
        return self._consumer_api(subject, verb, stream, rest[0], request)

    def _stream_api(self, subject: str, verb: str, name: str, config: Any) -> dict[str, Any]:
        found = self.stream(name)
        if verb == "CREATE":
            if found is not None and found.config != config:
                raise _error(subject, 10058, "stream name already in use with a different configuration")
            return {"config": (found or self._create_stream(subject, config)).config}
        if found is None:
            raise _error(subject, STREAM_NOT_FOUND, "stream not found")
        if verb == "UPDATE":
            for field in _IMMUTABLE:
                if config.get(field) != found.config.get(field):
                    raise _error(subject, 10052, f"stream configuration update can not change {field}")
            self._check_overlap(subject, config)
            found.config = dict(config)
        return {"config": found.config}

    def _create_stream(self, subject: str, config: dict[str, Any]) -> MemoryStream:
        self._check_overlap(subject, config)
        stream = MemoryStream(dict(config), self._created(), replicated=self.replicated)
        self.streams[stream.name] = stream
        return stream

    def _check_overlap(self, subject: str, config: Mapping[str, Any]) -> None:
        for other in self.streams.values():
            if other.name == config["name"]:
                continue
            if any(overlap(one, two) for one in config["subjects"] for two in other.config["subjects"]):
                raise _error(subject, 10065, "subjects overlap with an existing stream")

    def _consumer_api(self, subject: str, verb: str, stream: str, durable: str, request: Any) -> dict[str, Any]:
        owner = self.streams.get(stream)
        if owner is None:
            raise _error(subject, STREAM_NOT_FOUND, "stream not found")
        found = self.consumers.get((stream, durable))
        if verb == "CREATE":
            config, action = dict(request["config"]), request["action"]
            if found is None:
                found = self.consumers[stream, durable] = MemoryConsumer(config, owner, self._created())
            elif action == "create" and found.config != config:
                raise _error(subject, 10148, "consumer already exists")
            found.config = config
            self.wake()
        elif found is None:
            raise _error(subject, CONSUMER_NOT_FOUND, "consumer not found")
        return {"config": found.config}

    def _created(self) -> str:
        """No two objects share it, however little time has passed."""
        return rfc3339(self.clock.now_ns() + next(self._serial))


def _error(subject: str, code: int, description: str) -> ApiError:
    return ApiError(subject, {"err_code": code, "description": description})


def rfc3339(unix_ns: int) -> str:
    seconds, fraction = divmod(unix_ns, 1_000_000_000)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S") + f".{fraction:09d}Z"
