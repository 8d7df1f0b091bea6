"""Quotas of running executions, enforced where executions begin: whatever way a prompt came, it needs a place.

    take      tenant's record, then the set's, each by compare-and-set; where the set has none the tenant's is put back
    ended     the follower saw an owner record go idle: its place is free from the next `take` on, without a look
    full      nobody is asked again until a place of the tenant's (or of the set) comes free, or LOOK_S have passed;
              then every place is held against its owner record, which finds what other routers freed or left behind

Who finds no room waits in the router's hand, in turn by tenant, and is woken when a place comes free (`freed`).
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from tether import subjects
from tether.errors import InvalidError
from tether.ids import new_id
from tether.kv import Bucket, Conflict, Entry
from tether.owner import OwnerRecord
from tether.ports import Bus
from tether.prompt import Prompt
from tether.quotas import Quotas, RunningRecord
from tether_router import metrics
from tether_router.core import slots as core
from tether_router.records import Records

LOOK_S: Final = 5.0  # between looks at all owner records of a tenant that is full
RACES_MAX: Final = 32

Clock = Callable[[], int]  # unix milliseconds
_log = structlog.get_logger("tether.router")


@dataclass(slots=True)
class _Pool:
    """One record as this process knows it. `scope`: tenant or service. `freed`: conversations whose end was seen, with
    the execution of their place."""

    key: str
    scope: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    entry: Entry | None = None
    record: RunningRecord = field(default_factory=RunningRecord)
    freed: dict[str, str] = field(default_factory=dict)
    looked_at_s: float = -1e9
    full: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    sequence: int
    woken: asyncio.Future[None]


class Slots:
    """Of one router. `total`: running executions of the whole set, 0 for no limit."""

    def __init__(self, bus: Bus, records: Records, quotas: Quotas, clock: Clock, *, total: int = 0) -> None:
        self._bucket = Bucket(bus, subjects.QUOTAS)
        self._records = records
        self._quotas = quotas
        self._clock = clock
        self._total = total
        self._pools: dict[str | None, _Pool] = {}
        self._waiting: OrderedDict[str, list[_Waiter]] = OrderedDict()

    # --- taking ---

    def limited(self, tenant: str) -> bool:
        limits = self._quotas.of(tenant)
        return bool(self._total or limits.running_executions or limits.workspace_running_executions)

    def hopeless(self, prompt: Prompt) -> bool:
        """Known without a look that there is no place: what would be read for this prompt would be read for nothing."""
        if prompt.mode == "interject" or not self.limited(prompt.tenant):
            return False
        key = subjects.owner_key(prompt.tenant, prompt.workspace, prompt.conversation)
        pools = (self._pools.get(prompt.tenant), self._pools.get(None))
        if any(pool is not None and key in pool.record.held for pool in pools):
            return False  # it runs: the prompt may join, or takes the place that the conversation has
        return any(pool is not None and pool.full and not self._due(pool) for pool in pools)

    @staticmethod
    def _due(pool: _Pool) -> bool:
        return bool(pool.freed) or time.monotonic() - pool.looked_at_s >= LOOK_S

    async def take(self, prompt: Prompt, execution: str) -> core.Full | None:
        """None: the conversation has a place. Raises BusError."""
        limits = self._quotas.of(prompt.tenant)
        key = subjects.owner_key(prompt.tenant, prompt.workspace, prompt.conversation)
        now_ms = self._clock()
        workspace = f"{prompt.tenant}.{prompt.workspace}."
        mine = limits.running_executions or limits.workspace_running_executions
        own = core.Want(
            key, execution, now_ms, limits.running_executions, workspace, limits.workspace_running_executions
        )
        if mine:
            full = await self._take(self._pool(prompt.tenant), own)
            if full is not None:
                return full
        if self._total:
            full = await self._take(self._pool(None), core.Want(key, execution, now_ms, self._total))
            if full is not None:
                if mine:
                    await self._put_back(self._pool(prompt.tenant), key, execution)
                return full
        return None

    def _pool(self, tenant: str | None) -> _Pool:
        pool = self._pools.get(tenant)
        if pool is None:
            scope = "service" if tenant is None else "tenant"
            pool = self._pools[tenant] = _Pool(subjects.running_key(tenant), scope)
        return pool

    async def _take(self, pool: _Pool, want: core.Want) -> core.Full | None:
        async with pool.lock:
            if pool.entry is None:
                self._read(pool, await self._bucket.get(pool.key))
            for _ in range(RACES_MAX):
                record = core.free(pool.record, pool.freed)
                outcome = core.take(record, want)
                if isinstance(outcome, core.Full):
                    looked = time.monotonic() - pool.looked_at_s < LOOK_S
                    if not looked and await self._look(pool):
                        continue
                    pool.full = outcome.scope == ""
                    return core.Full(outcome.scope or pool.scope, outcome.value)
                if outcome.record is None or await self._write(pool, outcome.record):
                    pool.full = bool(want.limit) and len(pool.record.held) >= want.limit and not pool.freed
                    self._told(pool, want.limit)
                    return None
        return core.Full(pool.scope, want.limit)

    async def _put_back(self, pool: _Pool, key: str, execution: str) -> None:
        async with pool.lock:
            for _ in range(RACES_MAX):
                place = pool.record.held.get(key)
                if place is None or place.execution != execution:
                    return
                if await self._write(pool, core.free(pool.record, {**pool.freed, key: execution})):
                    return

    async def _write(self, pool: _Pool, record: RunningRecord) -> bool:
        """False where another router wrote: its record is the pool's then."""
        value, op = record.model_dump(), new_id("slot")
        try:
            if pool.entry is None:
                entry = await self._bucket.create(pool.key, value, op=op)
            else:
                entry = await self._bucket.update(pool.key, value, op=op, revision=pool.entry.revision)
        except Conflict as lost:
            self._read(pool, lost.current)
            return False
        self._read(pool, entry)
        return True

    def _read(self, pool: _Pool, entry: Entry | None) -> None:
        pool.entry = entry
        pool.record = RunningRecord() if entry is None else self._bucket.parse(entry, RunningRecord)
        pool.freed = core.still(pool.record, pool.freed)

    async def _look(self, pool: _Pool) -> bool:
        """Hold every place against its owner record; whether one is free."""
        pool.looked_at_s = time.monotonic()
        self._read(pool, await self._bucket.get(pool.key))
        for key, place in pool.record.held.items():
            try:
                owner = (await self._records.owner(key)).record
            except InvalidError:
                continue  # nobody can say what runs there
            if core.is_free(place, owner, self._clock()):
                pool.freed[key] = place.execution
        return bool(pool.freed)

    def _told(self, pool: _Pool, limit: int) -> None:
        tenant = "" if pool.scope == "service" else pool.key.partition(".")[2]
        metrics.running_places.labels(tenant).set(len(pool.record.held) - len(pool.freed))
        metrics.running_limit.labels(tenant).set(limit)

    # --- places that come free ---

    def seen(self, key: str, owner: OwnerRecord) -> None:
        """An owner record as it was just read or written: where it is idle, its place is free."""
        if owner.state != "idle" or not self._pools:
            return
        now_ms, tenant = self._clock(), key.partition(".")[0]
        found = False
        for pool in (self._pools.get(tenant), self._pools.get(None)):
            place = None if pool is None else pool.record.held.get(key)
            if pool is None or place is None or key in pool.freed or not core.is_free(place, owner, now_ms):
                continue
            pool.freed[key] = place.execution
            pool.full = False
            found = True
        if found:
            self._wake(tenant if not self._total else None)

    def waiting(self, tenant: str) -> int:
        return len(self._waiting.get(tenant, ()))

    async def freed(self, tenant: str, sequence: int, timeout_s: float) -> None:
        """Until a place may be there for this prompt, or `timeout_s` have passed: tenants in turn, of each the prompt
        that was stored first."""
        waiter = _Waiter(sequence, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, []).append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter.woken
        except TimeoutError:
            pass
        finally:
            waiting = self._waiting.get(tenant)
            if waiting is not None and waiter in waiting:
                waiting.remove(waiter)
                if not waiting:
                    del self._waiting[tenant]

    def _wake(self, tenant: str | None) -> None:
        """One that waits: of this tenant, or the next tenant's in turn."""
        name = tenant if tenant is not None else next(iter(self._waiting), None)
        waiting = self._waiting.get(name) if name is not None else None
        if name is None or not waiting:
            return
        first = min(waiting, key=lambda waiter: waiter.sequence)
        waiting.remove(first)
        if not first.woken.done():
            first.woken.set_result(None)
        if waiting:
            self._waiting.move_to_end(name)
        else:
            del self._waiting[name]

    def wake_all(self) -> None:
        """The router stops."""
        for waiting in self._waiting.values():
            for waiter in waiting:
                if not waiter.woken.done():
                    waiter.woken.set_result(None)
        self._waiting.clear()
