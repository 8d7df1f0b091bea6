"""The collector's registration: who it is, what it can, which executions it has. A key with a TTL, renewed in time.

Written every 10 s and soon after every change; a key that is gone means that nobody was there to renew it, never that
an execution has ended. The list is bounded in entries and bytes (`core.discovery`); how many were left out is said.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import structlog

from tether import __version__
from tether import metrics as process_metrics
from tether.errors import BusError, UnreadableRecordError
from tether.kv import Bucket, Conflict
from tether.limits import REGISTRATION_RENEW_S, REGISTRATION_TTL_S
from tether.ports import Bus
from tether.sandbox import CAN_DRAIN, CAN_SNAPSHOT, CAN_STOP_TARGET, ExecutionSummary, Registration
from tether.subjects import SANDBOXES, registration_key
from tether_collector import confinement, metrics
from tether_collector.config import CollectorSettings
from tether_collector.core.discovery import bounded

DEBOUNCE_S: Final = 0.2
RETRY_S: Final = 1.0
CAPABILITIES: Final = (CAN_SNAPSHOT, CAN_STOP_TARGET, CAN_DRAIN)


class Life(NamedTuple):
    """`idle_since` and `draining` of the registration."""

    idle_since: int | None
    draining: str | None


class Registrar:
    """Writes the registration. `summaries` is asked at each writing, which `changed` brings forward."""

    def __init__(
        self,
        bus: Bus,
        settings: CollectorSettings,
        instance: str,
        summaries: Callable[[], Sequence[ExecutionSummary]],
        changed: asyncio.Event,
        life: Callable[[], Life] = lambda: Life(None, None),
    ) -> None:
        self._confinement = dict(confinement.told(settings))
        self._bucket = Bucket(bus, SANDBOXES, leader=False)
        self._settings = settings
        self._instance = instance
        self._summaries = summaries
        self._key = registration_key(settings.tenant, settings.workspace, settings.sandbox)
        self._changed = changed
        self._life = life
        self._revision: int | None = None

    def registration(self) -> Registration:
        executions, omitted = bounded(self._summaries())
        settings, life = self._settings, self._life()
        return Registration(
            tenant=settings.tenant,
            workspace=settings.workspace,
            sandbox=settings.sandbox,
            boot=settings.boot,
            instance=self._instance,
            capabilities=CAPABILITIES,
            agents=tuple(sorted(settings.agents)),
            facts={**settings.facts, **process_metrics.place(), "confinement": self._confinement},
            executions=executions,
            executions_omitted=omitted,
            version=__version__,
            idle_since=life.idle_since,
            draining=life.draining,
            updated_at=time.time_ns() // 1_000_000,
        )

    async def probe(self) -> None:
        """Find out how CLIs are isolated here, and tell it."""
        self._confinement |= await confinement.probe(self._settings)
        self._changed.set()

    async def run(self) -> None:
        log = structlog.get_logger("tether.collector")
        while True:
            self._changed.clear()
            pause_s = REGISTRATION_RENEW_S
            metrics.show(self._summaries())
            try:
                await self.write()
            except (BusError, Conflict) as error:
                log.info("registration_delayed", error=str(error))
                self._revision = None
                pause_s = RETRY_S
            await asyncio.sleep(DEBOUNCE_S)
            try:
                async with asyncio.timeout(pause_s - DEBOUNCE_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def write(self) -> None:
        """Once. Raises BusError, Conflict (somebody else writes the key: read it and go on)."""
        value = self.registration().value()
        op = secrets.token_hex(8)
        if self._revision is None:
            try:
                current = await self._bucket.get(self._key)
                self._revision = None if current is None else current.revision
            except UnreadableRecordError as error:
                self._revision = error.revision  # the key is this sandbox's own: it is replaced
        try:
            if self._revision is None:
                entry = await self._bucket.create(self._key, value, op=op, ttl_s=REGISTRATION_TTL_S)
            else:
                entry = await self._bucket.update(
                    self._key, value, op=op, revision=self._revision, ttl_s=REGISTRATION_TTL_S
                )
        except Conflict as conflict:
            if conflict.current is not None:
                raise
            # It has expired meanwhile.
            entry = await self._bucket.create(self._key, value, op=op, ttl_s=REGISTRATION_TTL_S)
        self._revision = entry.revision
