"""Serving a subject over NATS: subscribed, confirmed by a barrier, listed by the micro responder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tether import natsheaders as wire_headers
from tether.bus.connection import Connection
from tether.bus.micro import Registry
from tether.bus.subscription import to_message
from tether.errors import PermissionDeniedError
from tether.ports import Handler
from tether.serving import HandlerPool


@asynccontextmanager
async def serving(
    connection: Connection,
    registry: Registry,
    subject: str,
    handler: Handler,
    *,
    queue: str,
    name: str,
    concurrency_max: int,
) -> AsyncIterator[None]:
    """Raises PermissionDeniedError where the subject may not be subscribed to, BusError where the barrier fails."""
    wire_headers.check_subject(subject)
    denied: list[PermissionDeniedError] = []

    def respond(reply: str, answer: bytes) -> None:
        if connection.connected:
            connection.send(reply, answer)

    def deliver(where: bytes, reply: bytes, raw: bytes | None, data: bytes) -> None:
        pool.put(to_message(where, reply, raw, data))

    endpoint = registry.add(name, subject, queue)
    pool = HandlerPool(handler, endpoint, concurrency_max, lambda: connection.payload_bytes_max, respond)
    sid = connection.wire.sub(subject, queue, deliver, denied.append)
    try:
        await connection.barrier()
        if denied:
            raise denied[0]
        yield
    finally:
        connection.wire.unsub(sid)
        registry.remove(name, endpoint)
        await pool.finish()
