"""`NatsBus`: the port `tether.ports.Bus` over one NATS connection, and `connect`."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Final

from tether import natsheaders as wire_headers
from tether import nkey_jwt, permissions, topology_apply
from tether.bus import publisher, reader
from tether.bus.config import BusConfig
from tether.bus.connection import NO_RESPONDERS, AnswerTimeoutError, Connection, ConnectionLostError
from tether.bus.micro import Registry
from tether.bus.pull import PullLoop
from tether.bus.serve import serving
from tether.bus.subscription import CoreSubscription, LiveCopySubscription, to_message
from tether.errors import BusUnavailableError, NoReplyError
from tether.ports import (
    ConsumerState,
    Handler,
    Job,
    LiveSubscription,
    Message,
    PubAck,
    StoredMessage,
    StreamState,
    Subscription,
)
from tether.topology import Topology

_ANY_INBOX: Final = "_INBOX"


class NatsBus:
    """See `tether.ports.Bus` for every call's meaning. Made by `connect`; `async with` closes it."""

    def __init__(self, config: BusConfig) -> None:
        self.config = config
        self._connection = Connection(config)
        self._registry = Registry(self._connection)

    async def open(self) -> None:
        await self._connection.open()

    async def close(self) -> None:
        if not self._connection.closed:
            await self._connection.close()

    async def __aenter__(self) -> NatsBus:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def connected(self) -> bool:
        return self._connection.connected

    @property
    def epoch(self) -> int:
        return self._connection.wire.epoch

    @property
    def payload_bytes_max(self) -> int:
        return self._connection.payload_bytes_max

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
        return await publisher.publish(
            self._connection,
            subject,
            data,
            msg_id=msg_id,
            expect_last=expect_last,
            headers=headers,
            ttl_s=ttl_s,
            timeout_s=timeout_s,
        )

    async def send(self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None) -> None:
        block = wire_headers.encode(headers) if headers else None
        size_bytes = len(data) + len(block or b"")
        await self._connection.ready(subject, size_bytes, self.config.api_timeout_s)
        self._connection.send(subject, data, headers=block)

    async def last(self, stream: str, subject: str, *, leader: bool = True) -> StoredMessage | None:
        if leader:
            return await reader.last(self._connection, stream, subject)
        return await reader.last_direct(self._connection, stream, subject)

    async def at(self, stream: str, sequence: int) -> StoredMessage | None:
        return await reader.at(self._connection, stream, sequence)

    async def next_after(self, stream: str, sequence: int, filter_subject: str) -> StoredMessage | None:
        return await reader.next_after(self._connection, stream, sequence, filter_subject)

    async def read(
        self, stream: str, after: int, filter_subject: str, *, limit: int = 500, bytes_max: int = 4 << 20
    ) -> Sequence[StoredMessage]:
        return await reader.read(self._connection, stream, after, filter_subject, limit, bytes_max)

    async def subjects(self, stream: str, filter_subject: str) -> Mapping[str, int]:
        return await reader.subjects(self._connection, stream, filter_subject)

    async def state(self, stream: str) -> StreamState | None:
        return await reader.state(self._connection, stream)

    async def consumer(self, stream: str, durable: str) -> ConsumerState | None:
        return await reader.consumer(self._connection, stream, durable)

    async def delete_consumer(self, stream: str, durable: str) -> None:
        await reader.delete_consumer(self._connection, stream, durable)

    async def purge(self, stream: str, subject: str, *, up_to: int | None = None) -> int:
        return await reader.purge(self._connection, stream, subject, up_to)

    async def erase(self, stream: str, sequence: int) -> bool:
        return await reader.erase(self._connection, stream, sequence)

    async def delete_stream(self, stream: str) -> None:
        await reader.delete_stream(self._connection, stream)

    def jobs(self, stream: str, durable: str, *, in_flight_max: int = 256) -> AsyncGenerator[Job, None]:
        return PullLoop(self._connection, stream, durable, in_flight_max).run()

    async def subscribe(self, subject: str, *, queue: str = "", buffer_bytes_max: int = 8 << 20) -> Subscription:
        self._open(subject)
        subscription = CoreSubscription(self._connection, subject, buffer_bytes_max)
        subscription.start(queue)
        return subscription

    async def live(
        self, subject: str, *, buffer_bytes_max: int = 32 << 20, keep: Callable[[bytes], bool] | None = None
    ) -> LiveSubscription:
        self._open(subject)
        subscription = LiveCopySubscription(self._connection, subject, buffer_bytes_max, keep)
        subscription.start()
        return subscription

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Message:
        block = wire_headers.encode(headers) if headers else None
        try:
            raw, body = await self._connection.ask(subject, data, headers=block, timeout_s=timeout_s)
        except AnswerTimeoutError:
            raise NoReplyError(f"no reply within {timeout_s:g} s", subject=subject, no_responders=False) from None
        except ConnectionLostError:
            raise NoReplyError("the connection was lost", subject=subject, no_responders=False) from None
        if wire_headers.parse(raw)[0] == NO_RESPONDERS:
            raise NoReplyError("nobody answers there", subject=subject, no_responders=True)
        return to_message(subject.encode(), b"", raw, body)

    def serve(
        self, subject: str, handler: Handler, *, queue: str = "", name: str, concurrency_max: int = 64
    ) -> AbstractAsyncContextManager[None]:
        return serving(
            self._connection,
            self._registry,
            subject,
            handler,
            queue=queue,
            name=name,
            concurrency_max=concurrency_max,
        )

    async def barrier(self) -> None:
        await self._connection.barrier()

    async def ensure(self, topology: Topology) -> None:
        await topology_apply.apply(partial(reader.api, self._connection), topology)

    async def diff(self, topology: Topology) -> Sequence[str]:
        return await topology_apply.diff(partial(reader.api, self._connection), topology)

    async def api(self, subject: str, request: object = None) -> dict[str, object]:
        """A raw JetStream API request (`$JS.API.…`), for tools. The answer may carry `error`."""
        return await self._connection.api(subject, request)

    def _open(self, subject: str) -> None:
        wire_headers.check_subject(subject)
        if self._connection.closed:
            raise BusUnavailableError("the connection is closed")


def permitted_inbox(creds_file: str | None) -> str:
    """Where the user of a credentials file may get its answers, by its own claims."""
    if creds_file is None:
        return _ANY_INBOX
    try:
        claims, _ = nkey_jwt.read_credentials(Path(creds_file).read_text(encoding="utf-8"))
        return nkey_jwt.inbox_of(nkey_jwt.read_claims(claims)) or _ANY_INBOX
    except (OSError, UnicodeDecodeError, nkey_jwt.CredentialError):
        return _ANY_INBOX  # the connection tells what is wrong with it


async def connect(
    servers: str | Sequence[str],
    *,
    name: str,
    user: str | None = None,
    password: str | None = None,
    token: str | None = None,
    creds_file: str | None = None,
    nkey_seed: str | None = None,
    tls: ssl.SSLContext | None = None,
    tls_hostname: str | None = None,
    inbox_prefix: str | None = None,
    connect_timeout_s: float = 10.0,
) -> NatsBus:
    """Connect. `servers`: one URL, several, or several joined by commas. `inbox_prefix` None: the one that the
    credentials file permits, else `_INBOX`. Raises BusUnavailableError (nobody answered in time),
    PermissionDeniedError (credentials or inbox refused)."""
    urls = servers.split(",") if isinstance(servers, str) else servers
    inbox = inbox_prefix or permitted_inbox(creds_file)
    bus = NatsBus(
        BusConfig(
            servers=tuple(url.strip() for url in urls),
            name=name,
            user=user,
            password=password,
            token=token,
            creds_file=creds_file,
            nkey_seed=nkey_seed,
            tls=tls,
            tls_hostname=tls_hostname,
            inbox_prefix=inbox,
            listed=not inbox.startswith(permissions.inbox_prefix(permissions.SANDBOX)),
            connect_timeout_s=connect_timeout_s,
        )
    )
    await bus.open()
    return bus
