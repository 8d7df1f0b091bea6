"""Quotas at the edge: prompts per minute, waiting prompts, stored bytes, open readers (see `tether.quotas`).

Before a prompt is stored:  1 bytes of the log and blobs   as of at most STORED_LOOK_S ago
                            2 prompts that wait            as of at most WAITING_LOOK_S ago, and what was let in since
                            3 the minute's allowance       exact over all backends: one number by compare-and-set

1 and 2 are looks at streams that others fill too, so several backends may together let in a few more than the limit;
the queue's own limit per conversation, and the log's own size, stand behind them. A request is charged once: who
repeats it while it waits pays nothing (this process remembers; another backend may charge it again).

Readers are counted where they are, in one process: a limit is per backend. A place is taken before the stream's first
byte and goes with the stream.

A quota bounds what is let in; asking costs this process something too, and all tenants share its event loop:

    refused over and over   the answer to further requests is held back for HOLD_S: a caller that asks again at once
                            has so many questions a second as it has connections, and no more
    opening a stream,       OPENING_MAX of a tenant at a time, where there are several tenants: what a storm of one
    storing a prompt        asks of the loop between two turns of another stays small
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final

from tether import subjects
from tether.errors import Problem, QuotaExceededError
from tether.ids import new_id
from tether.kv import Bucket, Conflict, Entry
from tether.ports import Bus
from tether.quotas import AllowanceRecord, Limits, Quotas, Scope, exceeded
from tether_backend.core.quotas import MINUTE_MS, Refused, Taken, give_back, take
from tether_backend.metrics import Metrics

STORED_LOOK_S: Final = 5.0
WAITING_LOOK_S: Final = 1.0
ALLOWANCE_TTL_S: Final = 2 * MINUTE_MS // 1000  # a record that is older says nothing any more
CHARGED_MAX: Final = 16_384  # requests that are remembered as charged
ALLOWANCES_MAX: Final = 4096  # records of which the revision is remembered: one round trip less for each prompt
RACES_MAX: Final = 32  # compare-and-sets lost to other backends before the prompt is put off
WAITING_RETRY_S: Final = 2.0
READER_RETRY_S: Final = 5.0
HOLD_S: Final = 1.0
REFUSALS_FREE: Final = 10  # of a tenant within HOLD_S that are answered at once
OPENING_MAX: Final = 4

Clock = Callable[[], int]  # unix milliseconds


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(slots=True)
class _Seen:
    """What is known of one tenant. `waiting`: by workspace, with what was let in since the look."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    stored_bytes: int = 0
    stored_at_s: float = -1e9
    waiting: Counter[str] = field(default_factory=Counter)
    waiting_at_s: float = -1e9
    refused_s: deque[float] = field(default_factory=lambda: deque(maxlen=REFUSALS_FREE))


class ReaderPlace:
    """One open stream's; `leave` gives it back, once."""

    __slots__ = ("_leave",)

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave: Callable[[], None] | None = leave

    def leave(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self.leave()

    def __del__(self) -> None:
        self.leave()  # a stream that was never begun


class EdgeQuotas:
    """Of one backend process. `readers_max`: of all tenants together, 0 for no limit."""

    def __init__(
        self,
        bus: Bus,
        quotas: Quotas,
        metrics: Metrics,
        *,
        readers_max: int = 0,
        tenants: int = 1,
        clock: Clock = _now_ms,
    ) -> None:
        self._bus = bus
        self._bucket = Bucket(bus, subjects.QUOTAS)
        self._quotas = quotas
        self._metrics = metrics
        self._readers_max = readers_max
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._charged: OrderedDict[tuple[str, str, int], None] = OrderedDict()
        self._allowances: OrderedDict[str, Entry] = OrderedDict()
        self._readers: Counter[str] = Counter()
        self._alone = tenants <= 1
        self._opening: dict[str, asyncio.Semaphore] = {}

    # --- the loop's time ---

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Held while something is opened or stored for a request, and not while it waits. Raises QuotaExceededError as
        the block does, held back where the tenant is refused over and over."""
        gate = contextlib.nullcontext() if self._alone else self._gate(tenant)
        try:
            async with gate:
                yield
        except QuotaExceededError:
            await self._hold(tenant)
            raise

    def _gate(self, tenant: str) -> asyncio.Semaphore:
        return self._opening.setdefault(tenant, asyncio.Semaphore(OPENING_MAX))

    async def _hold(self, tenant: str) -> None:
        refused_s = self._seen.setdefault(tenant, _Seen()).refused_s
        now_s = time.monotonic()
        often = len(refused_s) == REFUSALS_FREE and now_s - refused_s[0] < HOLD_S
        refused_s.append(now_s)
        if often:
            await asyncio.sleep(HOLD_S)

    # --- prompts ---

    async def prompt(self, tenant: str, workspace: str, request: str, attempt: int) -> None:
        """Before it is stored. Raises QuotaExceededError, BusError; then nothing was charged."""
        key = (tenant, request, attempt)
        limits = self._quotas.of(tenant)
        if key in self._charged or not _any_of_prompts(limits):
            return
        async with self._tenant(tenant) as seen:
            if key in self._charged:
                return
            await self._judge_stored(tenant, limits, seen)
            await self._judge_waiting(tenant, workspace, limits, seen)
            await self._charge(tenant, workspace, limits)
            seen.waiting[workspace] += 1
            self._charged[key] = None
            if len(self._charged) > CHARGED_MAX:
                self._charged.popitem(last=False)

    @contextlib.asynccontextmanager
    async def _tenant(self, tenant: str) -> AsyncIterator[_Seen]:
        """One prompt of a tenant at a time: what is let in counts for the next."""
        seen = self._seen.setdefault(tenant, _Seen())
        async with seen.lock:
            yield seen

    async def _judge_stored(self, tenant: str, limits: Limits, seen: _Seen) -> None:
        limit = limits.stored_bytes
        if not limit:
            return
        now_s = time.monotonic()
        if now_s - seen.stored_at_s >= STORED_LOOK_S:
            states = [
                await self._bus.state(name) for name in (subjects.events_stream(tenant), subjects.blobs_stream(tenant))
            ]
            seen.stored_bytes = sum(state.bytes for state in states if state is not None)
            seen.stored_at_s = now_s
        self._told(tenant, "stored_bytes", seen.stored_bytes, limit)
        if seen.stored_bytes >= limit:
            detail = f"the tenant's log and blobs hold {seen.stored_bytes} of {limit} bytes: delete what is not needed"
            raise self._refused(tenant, exceeded("stored_bytes", limit, "tenant", detail, used=seen.stored_bytes))

    async def _judge_waiting(self, tenant: str, workspace: str, limits: Limits, seen: _Seen) -> None:
        wanted = [limit for limit in (limits.waiting_prompts, limits.workspace_waiting_prompts) if limit]
        if not wanted:
            return
        await self._look_at_waiting(tenant, min(wanted), seen)
        total, own = seen.waiting.total(), seen.waiting[workspace]
        bounds: tuple[tuple[Scope, int, int], ...] = (
            ("tenant", total, limits.waiting_prompts),
            ("workspace", own, limits.workspace_waiting_prompts),
        )
        for scope, used, limit in bounds:
            if limit and scope == "tenant":
                self._told(tenant, "waiting_prompts", used, limit)
            if limit and used >= limit:
                detail = f"{used} messages of this {scope} wait to be admitted already"
                what = exceeded("waiting_prompts", limit, scope, detail, retry_after_s=WAITING_RETRY_S, used=used)
                raise self._refused(tenant, what)

    async def _look_at_waiting(self, tenant: str, least: int, seen: _Seen) -> None:
        now_s = time.monotonic()
        if now_s - seen.waiting_at_s < WAITING_LOOK_S:
            return
        queue = await self._bus.state(subjects.PROMPTS_STREAM)
        seen.waiting.clear()
        if queue is not None and queue.messages >= least:  # else no tenant can have so many
            found = await self._bus.subjects(subjects.PROMPTS_STREAM, f"tether.prompt.{tenant}.>")
            for subject, count in found.items():
                seen.waiting[subject.split(".")[3]] += count
        seen.waiting_at_s = now_s

    # --- the minute's allowance ---

    async def _charge(self, tenant: str, workspace: str, limits: Limits) -> None:
        """The tenant's first; it is given back where the workspace's is used up."""
        if limits.prompts_per_minute:
            used = await self._take(tenant, None, limits.prompts_per_minute)
            self._told(tenant, "prompts_per_minute", used, limits.prompts_per_minute)
        if limits.workspace_prompts_per_minute:
            try:
                await self._take(tenant, workspace, limits.workspace_prompts_per_minute)
            except QuotaExceededError:
                if limits.prompts_per_minute:
                    await self._give_back(tenant, limits.prompts_per_minute)
                raise

    async def _take(self, tenant: str, workspace: str | None, per_minute: int) -> int:
        """How many of the allowance are used then. Raises QuotaExceededError, BusError."""
        key = subjects.prompt_rate_key(tenant, workspace)
        entry = self._allowances.get(key) or await self._bucket.get(key)
        for _ in range(RACES_MAX):
            now_ms = self._clock()
            match take(self._whole_at(entry), now_ms, per_minute):
                case Refused() as refused:
                    raise self._over(tenant, workspace, per_minute, now_ms, refused)
                case Taken() as taken:
                    try:
                        self._remember(key, await self._write(key, entry, taken.whole_at_ms, per_minute))
                    except Conflict as lost:
                        entry = lost.current
                        continue
                    return taken.used
        detail = "too many backends take prompts of this tenant at the same moment"
        raise self._refused(tenant, exceeded("prompts_per_minute", per_minute, "tenant", detail, retry_after_s=0.5))

    def _over(
        self, tenant: str, workspace: str | None, per_minute: int, now_ms: int, refused: Refused
    ) -> QuotaExceededError:
        scope: Scope = "tenant" if workspace is None else "workspace"
        what = exceeded(
            "prompts_per_minute",
            per_minute,
            scope,
            f"{per_minute} messages a minute are allowed to this {scope}",
            retry_after_s=max(0.05, refused.retry_after_ms / 1000),
            reset_at_ms=max(now_ms, refused.whole_at_ms),
        )
        return self._refused(tenant, what)

    async def _give_back(self, tenant: str, per_minute: int) -> None:
        """Where another backend writes at the same moment the tenant has lost one prompt of the minute."""
        key = subjects.prompt_rate_key(tenant)
        entry = self._allowances.get(key)
        if entry is None:
            return
        whole_at = give_back(self._whole_at(entry), self._clock(), per_minute)
        try:
            self._remember(key, await self._write(key, entry, whole_at, per_minute))
        except Conflict:
            self._allowances.pop(key, None)

    async def _write(self, key: str, entry: Entry | None, whole_at_ms: int, per_minute: int) -> Entry:
        value = AllowanceRecord(whole_at=whole_at_ms, per_minute=per_minute).model_dump()
        op = new_id("quota")
        if entry is None:
            return await self._bucket.create(key, value, op=op, ttl_s=ALLOWANCE_TTL_S)
        return await self._bucket.update(key, value, op=op, revision=entry.revision, ttl_s=ALLOWANCE_TTL_S)

    def _whole_at(self, entry: Entry | None) -> int:
        return 0 if entry is None else self._bucket.parse(entry, AllowanceRecord).whole_at

    def _remember(self, key: str, entry: Entry) -> None:
        self._allowances[key] = entry
        self._allowances.move_to_end(key)
        if len(self._allowances) > ALLOWANCES_MAX:
            self._allowances.popitem(last=False)

    # --- readers ---

    def judge_reader(self, tenant: str) -> None:
        """Whether one more may be opened, before anything is read for it. Raises QuotaExceededError."""
        total, own, limit = self._readers.total(), self._readers[tenant], self._quotas.of(tenant).readers
        bounds: tuple[tuple[Scope, int, int], ...] = (("tenant", own, limit), ("service", total, self._readers_max))
        for scope, used, most in bounds:
            if most and used >= most:
                of = "this tenant" if scope == "tenant" else "this service"
                detail = f"{used} event streams of {of} are open already: close some, or follow several in one"
                raise self._refused(tenant, exceeded("readers", most, scope, detail, retry_after_s=READER_RETRY_S))

    def reader(self, tenant: str) -> ReaderPlace:
        """A place for one stream. Raises QuotaExceededError."""
        self.judge_reader(tenant)
        self._readers[tenant] += 1
        self._told(tenant, "readers", self._readers[tenant], self._quotas.of(tenant).readers)
        return ReaderPlace(lambda: self._left(tenant))

    def _left(self, tenant: str) -> None:
        self._readers[tenant] -= 1
        self._told(tenant, "readers", self._readers[tenant], self._quotas.of(tenant).readers)
        if self._readers[tenant] <= 0:
            del self._readers[tenant]

    # --- figures ---

    def _told(self, tenant: str, limit: str, used: int, value: int) -> None:
        if value:
            self._metrics.quota_used.labels(tenant, limit).set(used)
            self._metrics.quota_limit.labels(tenant, limit).set(value)

    def _refused(self, tenant: str, what: Problem) -> QuotaExceededError:
        self._metrics.quota_refusals.labels(tenant, str(what.context["limit"])).inc()
        return QuotaExceededError(what)


def _any_of_prompts(limits: Limits) -> bool:
    return bool(
        limits.prompts_per_minute
        or limits.workspace_prompts_per_minute
        or limits.waiting_prompts
        or limits.workspace_waiting_prompts
        or limits.stored_bytes
    )
