"""Control leases: who may send user-driven controls to a conversation's collector, one process at a time.

```
control wanted ─▶ held for this execution? ─▶ its authority goes with the control ─▶ idle for IDLE_S ─▶ released
                        │ no                              ▲          │ LEASE_NOT_READY: the proof is discarded,
                        └─ acquire, waiting ≤ WAIT_S ─────┘◀─────────┘ acquired anew, asked once more
```

A lease moves control, never the writer: it says whose control counts where two processes act for the same conversation,
and that one which was frozen beyond its lease and wakes is refused. Its value names holder, execution and token (the
revision at acquisition, carried on by renewals); the collector reads the key for each control (`check`) and journals
the highest token that it accepted. Where it knows a higher one (the bucket was made anew), its refusal says which, and
the lease is acquired above that. A process keeps a lease while it uses it and a little longer, so several backends
behind one balancer take turns within a caller's wait.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from tether import subjects, tracing
from tether.asking import ask_collector
from tether.control import Authority, ControlReply, ControlRequest
from tether.errors import BusError, Code, Problem, ProblemError, problem
from tether.ids import ExecutionTarget
from tether.kv import Bucket, Entry
from tether.lease import Lease, token_of
from tether.limits import (
    ADMISSION_WAIT_S,
    CONTROL_LEASE_IDLE_S,
    CONTROL_LEASE_RENEW_S,
    CONTROL_LEASE_TTL_S,
    CONTROL_REPLY_S,
)
from tether.ports import Bus

USER_VERBS: Final = ("answer", "interject", "interrupt", "stop")  # of a caller that is neither router nor agent service
_TRY_AGAIN_S: Final = 0.1
_TOKEN_MAX: Final = 2**53  # no bucket counts that far
_NOT_YET: Final = (Code.TARGET_UNKNOWN, Code.RUNTIME_UNAVAILABLE)  # retryable, of a collector: it took nothing


@dataclass(eq=False, slots=True)
class _Hold:
    """One acquisition. `ready`: held, or why not. `users`: controls that are under way with it."""

    lease: Lease
    execution: str
    ready: asyncio.Future[None]
    users: int = 0
    used_s: float = 0.0
    dropped: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class ControlLeases:
    """The control leases of this process. `close` releases them; without it they expire."""

    def __init__(
        self,
        bus: Bus,
        name: str,
        *,
        ttl_s: int = CONTROL_LEASE_TTL_S,
        renew_s: float = CONTROL_LEASE_RENEW_S,
        idle_s: float = CONTROL_LEASE_IDLE_S,
        wait_s: float = ADMISSION_WAIT_S,
    ) -> None:
        self.holder = f"{name}-{secrets.token_hex(6)}"
        self._bus = bus
        self._ttl_s, self._renew_s, self._idle_s, self._wait_s = ttl_s, renew_s, idle_s, wait_s
        self._holds: dict[str, _Hold] = {}

    async def ask(self, request: ControlRequest) -> ControlReply:
        """The collector's reply to a user-driven control, sent with the lease. Raises ProblemError(LEASE_NOT_READY)
        where another process holds it, BusError.

        A collector that does not have the execution yet (it is being started, or recovered) took nothing: it is asked
        again under the same id, for as long as a reply would be waited for.
        """
        target = request.target
        assert target is not None, "user-driven controls have a target"
        until_s, discarded, above = _now_s() + CONTROL_REPLY_S, False, 0
        while True:
            async with self.authority(target, above=above) as authority:
                request = request.model_copy(update={"authority": authority})
                reply = await ask_collector(self._bus, target.tenant, target.workspace, request)
            why = None if reply.status != "rejected" else reply.problem
            is_refused = why is not None and why.code == Code.LEASE_NOT_READY
            if is_refused and (not discarded or (above < _seen(why) and _now_s() < until_s)):
                discarded, above = True, max(above, _seen(why))
                await self._discard(target, authority.token)
            elif why is not None and why.retryable and why.code in _NOT_YET and _now_s() + _TRY_AGAIN_S < until_s:
                await asyncio.sleep(_TRY_AGAIN_S)
            else:
                return reply

    @asynccontextmanager
    async def authority(self, target: ExecutionTarget, *, above: int = 0) -> AsyncIterator[Authority]:
        """Hold the conversation's lease meanwhile, by a token higher than `above`. Raises BusError and
        ProblemError(LEASE_NOT_READY)."""
        deadline_s = _now_s() + self._wait_s
        while True:
            hold = self._hold_of(target, above)
            try:
                await asyncio.shield(hold.ready)
                token = hold.lease.token
            except ProblemError:
                await self._drop(hold)
                if _now_s() + _TRY_AGAIN_S >= deadline_s:
                    raise
                await asyncio.sleep(_TRY_AGAIN_S)
                continue
            except BusError:
                await self._drop(hold)
                raise
            if hold.execution == target.execution and token > above and not hold.dropped.is_set():
                break
            await self._drop(hold)  # another execution has the conversation: its lease is another acquisition
        hold.users += 1
        try:
            yield Authority(kind="lease", holder=self.holder, token=token)
        finally:
            hold.users -= 1
            hold.used_s = _now_s()

    async def close(self) -> None:
        """Release all."""
        for hold in list(self._holds.values()):
            await self._drop(hold)

    # --- one lease's life -----------------------------------------------------------------------------------------

    def _hold_of(self, target: ExecutionTarget, above: int) -> _Hold:
        key = subjects.lease_key(target.tenant, target.workspace, target.conversation)
        hold = self._holds.get(key)
        if hold is None:
            lease = Lease(
                Bucket(self._bus, subjects.LEASES),
                key,
                holder=self.holder,
                ttl_s=self._ttl_s,
                renew_s=self._renew_s,
                value={"execution": target.execution},
            )
            hold = _Hold(lease, target.execution, asyncio.get_running_loop().create_future(), used_s=_now_s())
            self._holds[key] = hold
            hold.task = asyncio.create_task(
                self._live(hold, above), name=f"lease-{key}", context=tracing.detached()
            )  # it outlives the request that begins it
        return hold

    async def _live(self, hold: _Hold, above: int) -> None:
        """Acquire, renew while it is used, release."""
        try:
            try:
                await hold.lease.acquire(above)
            except (ProblemError, BusError) as error:
                _fail(hold, error)
                return
            hold.ready.set_result(None)
            keep = asyncio.create_task(hold.lease.keep(), name=f"renew-{hold.lease.key}")
            dropped = asyncio.create_task(hold.dropped.wait(), name=f"drop-{hold.lease.key}")
            try:
                while not (keep.done() or dropped.done()) and (left_s := self._left_s(hold)) > 0:
                    await asyncio.wait((keep, dropped), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._forget(hold)  # first: whoever comes now acquires anew
                dropped.cancel()
                await hold.lease.release()
                await keep
        finally:
            self._forget(hold)
            if not hold.ready.done():  # cancelled while it was acquired
                _fail(hold, ProblemError(problem(Code.LEASE_NOT_READY, "the lease was given up")))

    def _left_s(self, hold: _Hold) -> float:
        return self._idle_s if hold.users else hold.used_s + self._idle_s - _now_s()

    def _forget(self, hold: _Hold) -> None:
        if self._holds.get(hold.lease.key) is hold:
            del self._holds[hold.lease.key]

    async def _drop(self, hold: _Hold) -> None:
        hold.dropped.set()
        self._forget(hold)
        if hold.task is not None:
            await asyncio.wait((hold.task,))

    async def _discard(self, target: ExecutionTarget, token: int) -> None:
        """A proof that the collector refused is used no more."""
        hold = self._holds.get(subjects.lease_key(target.tenant, target.workspace, target.conversation))
        if hold is not None and hold.ready.done() and (not hold.lease.held or hold.lease.token == token):
            await self._drop(hold)


def check(entry: Entry | None, authority: Authority, execution: str) -> Problem | None:
    """Whether the stored lease is this authority's, for a control of `execution`. Pure."""
    if authority.kind != "lease":
        return _not_ready("authority: must be the conversation's control lease")
    if entry is None:
        return _not_ready("authority: nobody holds the conversation's control lease")
    if entry.value.get("holder") != authority.holder or token_of(entry) != authority.token:
        return _not_ready(f"authority: the control lease is held by {str(entry.value.get('holder'))[:128]}")
    if entry.value.get("execution") != execution:
        return _not_ready("authority: the control lease was taken for another execution")
    return None


def is_behind(entry: Entry | None, authority: Authority) -> bool:
    """What was read may be older than the acquisition that is claimed: a replica lags, or the claim is false."""
    if authority.kind != "lease":
        return False
    return entry is None or (entry.revision < authority.token and token_of(entry) != authority.token)


def _seen(refusal: Problem | None) -> int:
    """The token that the collector says it has seen; 0 where it says none."""
    token = None if refusal is None else refusal.context.get("token")
    return token if isinstance(token, int) and not isinstance(token, bool) and 0 < token < _TOKEN_MAX else 0


def _not_ready(detail: str) -> Problem:
    return problem(Code.LEASE_NOT_READY, detail, retry_after_s=CONTROL_LEASE_RENEW_S)


def _fail(hold: _Hold, error: Exception) -> None:
    hold.ready.set_exception(error)
    hold.ready.exception()  # seen, also where nobody waits


def _now_s() -> float:
    return asyncio.get_running_loop().time()
