"""Leases: one holder of a key at a time, by a value with a TTL that the holder renews with compare-and-set.

```
waiting ──written(create)──▶ held ──written(renew)──▶ held
   ▲ refused: taken            │ refused: another's, or gone
   │                           │ clock past `valid_until_s`        stop
   └──────── (a new lease) ── lost                        held ──────────▶ released
```

The **token** is the revision at acquisition: the first value has none, renewals carry it on, so whoever reads the key
knows the token (`token_of`) and can refuse an older one. A bucket that was made anew counts revisions from one: whoever
knows of a higher token acquires `above` it. The holder's own clock decides earlier than the server's: a
lease is valid from when its write was *sent*, for the TTL; an unanswered renewal does not prolong it. Renewing is safe
to repeat: each write has its operation id. `decide` is pure; `Lease` is the shell that writes and tells.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from tether.errors import BusError, Code, ProblemError, problem
from tether.kv import Bucket, Conflict, Entry

_RETRY_S: Final = 0.25  # after a write that the bus could not take
_MARKER_TTL_S: Final = 1  # what remains of a released lease


@dataclass(frozen=True, slots=True)
class Waiting:
    """Not held, not yet lost."""


@dataclass(frozen=True, slots=True)
class Held:
    """Held until `valid_until_s` of the holder's clock; `revision` is the next write's compare-and-set."""

    token: int
    revision: int
    valid_until_s: float
    renew_at_s: float


@dataclass(frozen=True, slots=True)
class Lost:
    """Final: `reason` says how. Another acquisition is another lease with another token."""

    token: int
    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    token: int


State = Waiting | Held | Lost | Released


@dataclass(frozen=True, slots=True)
class Written:
    """A write sent at `sent_s` was stored as `revision`."""

    sent_s: float
    revision: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A write lost against `holder` (None: the key is gone)."""

    holder: str | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The bus did not take a write, or did not say: nothing is known, at `now_s`."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Clock:
    now_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Input = Written | Refused | Failed | Clock | Stop


@dataclass(frozen=True, slots=True)
class Renew:
    revision: int
    token: int


@dataclass(frozen=True, slots=True)
class Delete:
    revision: int


@dataclass(frozen=True, slots=True)
class WakeAt:
    at_s: float


Effect = Renew | Delete | WakeAt


def decide(state: State, event: Input, ttl_s: float, renew_s: float) -> tuple[State, tuple[Effect, ...]]:
    """The next state and what to do. Lost and Released are final: nothing changes them."""
    match state, event:
        case Waiting(), Written(sent_s, revision):
            held = Held(revision, revision, sent_s + ttl_s, sent_s + renew_s)
            return held, (WakeAt(held.renew_at_s),)
        case Held(), Written(sent_s, revision):
            held = Held(state.token, revision, sent_s + ttl_s, sent_s + renew_s)
            return held, (WakeAt(held.renew_at_s),)
        case Held(), Refused(None):
            return Lost(state.token, "expired"), ()
        case Held(), Refused(holder):
            return Lost(state.token, f"taken by {holder}"), ()
        case Held(), Failed(now_s):
            if now_s >= state.valid_until_s:
                return Lost(state.token, "not renewed in time"), ()
            at_s = min(now_s + _RETRY_S, state.valid_until_s)
            return replace(state, renew_at_s=at_s), (WakeAt(at_s),)
        case Held(), Clock(now_s):
            if now_s >= state.valid_until_s:
                return Lost(state.token, "not renewed in time"), ()
            if now_s >= state.renew_at_s:
                return state, (Renew(state.revision, state.token),)
            return state, (WakeAt(state.renew_at_s),)
        case Held(), Stop():
            return Released(state.token), (Delete(state.revision),)
        case _:
            return state, ()


def token_of(entry: Entry) -> int:
    """The token of a stored lease: written by renewals, else the entry's own revision."""
    token = entry.value.get("token")
    return token if isinstance(token, int) and not isinstance(token, bool) else entry.revision


class Lease:
    """One acquisition of `key`, by `holder`. `value` is stored beside holder and token (which it must not name).

    Use: `await lease.acquire()`, then run `await lease.keep()` in a task of the owner's TaskGroup; it returns why the
    lease ended. `held` and `token` are what to ask before acting. `release` ends it; not releasing lets it expire.
    """

    def __init__(
        self,
        bucket: Bucket,
        key: str,
        *,
        holder: str,
        ttl_s: int,
        renew_s: float,
        value: Mapping[str, Any] | None = None,
    ) -> None:
        self._bucket = bucket
        self._ttl_s = ttl_s
        self._renew_s = renew_s
        self._value = {**(value or {}), "holder": holder}
        self._state: State = Waiting()
        self._stopping = asyncio.Event()
        self._writing = asyncio.Lock()  # a release must name the revision of a renewal that is under way
        self.key = key
        self.holder = holder

    @property
    def state(self) -> State:
        return self._state

    @property
    def held(self) -> bool:
        """By the own clock, which gives up before the server does."""
        return isinstance(self._state, Held) and _now_s() < self._state.valid_until_s

    @property
    def token(self) -> int:
        """Raises ProblemError(LEASE_NOT_READY) where it is not held."""
        if isinstance(self._state, Held) and self.held:
            return self._state.token
        raise ProblemError(problem(Code.LEASE_NOT_READY, f"{self.key} is not held by {self.holder}"))

    async def acquire(self, above: int = 0) -> int:
        """One attempt; returns the token, which is higher than `above`. Raises BusError, and where another holds it
        ProblemError(LEASE_NOT_READY)."""
        if not isinstance(self._state, Waiting):
            raise ProblemError(problem(Code.LEASE_NOT_READY, f"{self.key}: this lease has ended"))
        sent_s = _now_s()
        try:
            entry = await self._bucket.create(self.key, self._value, op=uuid.uuid4().hex, ttl_s=self._ttl_s)
        except Conflict as lost:
            holder = "nobody for much longer" if lost.current is None else str(lost.current.value.get("holder"))
            raise ProblemError(
                problem(
                    Code.LEASE_NOT_READY, f"{self.key} is held by {holder}", retry_after_s=self._renew_s, holder=holder
                )
            ) from None
        self._advance(Written(sent_s, entry.revision))
        if entry.revision <= above:
            await self._take_token(above + 1)
        return self.token

    async def _take_token(self, token: int) -> None:
        state = self._state
        if isinstance(state, Held):
            self._state = replace(state, token=token)
            await self._renew(state.revision, token)

    async def keep(self) -> str:
        """Renew until it is lost or released; returns the reason."""
        while True:
            effects = self._advance(Clock(_now_s()))
            match self._state:
                case Lost(_, reason):
                    return reason
                case Released() | Waiting():
                    return "released"
            if self._stopping.is_set():
                # The release waits for the renewal that has just ended here. Sleeping would not: it would come back
                # at once, again and again, and nothing else of this process would ever run.
                return "released"
            for effect in effects:
                match effect:
                    case Renew(revision, token):
                        async with self._writing:
                            await self._renew(revision, token)
                    case WakeAt(at_s):
                        await self._sleep(at_s)

    async def release(self) -> None:
        """Idempotent. A delete that fails leaves the key to its TTL."""
        self._stopping.set()
        async with self._writing:
            for effect in self._advance(Stop()):
                if isinstance(effect, Delete):
                    try:
                        await self._bucket.delete(self.key, revision=effect.revision, ttl_s=_MARKER_TTL_S)
                    except (BusError, Conflict):
                        pass  # the TTL ends it

    def _advance(self, event: Input) -> tuple[Effect, ...]:
        self._state, effects = decide(self._state, event, self._ttl_s, self._renew_s)
        return effects

    async def _renew(self, revision: int, token: int) -> None:
        sent_s = _now_s()
        value = {**self._value, "token": token}
        try:
            async with asyncio.timeout(self._ttl_s):
                entry = await self._bucket.update(
                    self.key, value, op=uuid.uuid4().hex, revision=revision, ttl_s=self._ttl_s
                )
        except Conflict as lost:
            current = lost.current
            self._advance(Refused(None if current is None else str(current.value.get("holder"))))
        except (BusError, TimeoutError):
            # Undecided: it may be stored. The next attempt, under another operation id, would lose against it.
            await self._judge(sent_s, token)
        else:
            self._advance(Written(sent_s, entry.revision))

    async def _judge(self, sent_s: float, token: int) -> None:
        """After a doubtful renewal: what is stored now, and is it ours?"""
        try:
            async with asyncio.timeout(self._ttl_s):
                current = await self._bucket.get(self.key)
        except (BusError, TimeoutError):
            self._advance(Failed(_now_s()))
            return
        state = self._state
        if current is None:
            self._advance(Refused(None))
        elif token_of(current) != token:
            self._advance(Refused(str(current.value.get("holder"))))
        elif isinstance(state, Held) and current.revision != state.revision:
            self._advance(Written(sent_s, current.revision))
        else:
            self._advance(Failed(_now_s()))

    async def _sleep(self, at_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, at_s - _now_s())):
                await self._stopping.wait()
        except TimeoutError:
            pass


def _now_s() -> float:
    return asyncio.get_running_loop().time()
