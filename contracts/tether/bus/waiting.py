"""A service's start: a bus that is not up yet is waited for, and so are the streams, which the router alone makes (two
makers with different settings would change them back and forth)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from tether.bus.bus import NatsBus, connect
from tether.errors import BusError, BusUnavailableError, PermissionDeniedError
from tether.ports import Bus
from tether.settings import ServiceSettings

_LOOK_AGAIN_S: Final = 0.2


async def connect_service(
    settings: ServiceSettings,
    name: str,
    stop: asyncio.Event,
    *,
    inbox_prefix: str | None = None,
    connect_timeout_s: float = 10.0,
) -> NatsBus | None:
    """Connected as `settings` say, or None where `stop` came first. Raises PermissionDeniedError for refused
    credentials, ConfigurationError for TLS files that cannot be used."""
    log = structlog.get_logger(name)
    while not stop.is_set():
        try:
            return await connect(
                settings.nats_url,
                name=name,
                user=settings.nats_user,
                password=settings.password(),
                creds_file=None if settings.nats_creds_file is None else str(settings.nats_creds_file),
                tls=settings.tls(),
                inbox_prefix=inbox_prefix,
                connect_timeout_s=connect_timeout_s,
            )
        except BusUnavailableError as error:
            log.warning("bus_unavailable", error=str(error))
    return None


async def wait_for_streams(bus: Bus, streams: Sequence[str], stop: asyncio.Event) -> bool:
    """Until all of them exist; False where `stop` came first. Raises PermissionDeniedError."""
    log = structlog.get_logger("tether.bus")
    waiting = ""
    for stream in streams:
        while True:
            try:
                found = await bus.state(stream) is not None
            except PermissionDeniedError:
                raise
            except BusError:
                found = False
            if found:
                break
            if waiting != stream:
                waiting = stream
                log.info("stream_awaited", stream=stream)
            try:
                async with asyncio.timeout(_LOOK_AGAIN_S):
                    await stop.wait()
            except TimeoutError:
                continue
            return False
    return True
