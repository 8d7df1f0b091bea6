"""The recovery worker of one tenant: the shell of `core.recovery`. Runs in the process that holds the projector lease.

    scan     marks (a gap was recorded, a cold start) at once and every MARKED_S; what the rows call unfinished and no
             owner record names, every UNFINISHED_S
    attempt  1 the snapshot: collector, final snapshot or log (`tether.snapshots`)   2 the log after it, merged into the
             rows in one transaction   3 a note on `_` where something had been given up and is there again
             4 the mark goes

An attempt may be cut anywhere: the mark is in the database until its work is done, and each of its steps is the same
when it is done again. It never says that an execution failed, and sends nothing to anybody but the question of step 1.
The note's writer is this worker alone, under an id made of what was missing: replicas with databases of their own tell
the same repair once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import structlog
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from tether import events as ev
from tether import subjects
from tether.conversation_log import append_once
from tether.errors import BusError
from tether.events import ConversationEvent
from tether.failpoints import under
from tether.ids import ExecutionTarget
from tether.kv import Bucket
from tether.limits import COLD_CANDIDATE_S
from tether.owner import OwnerRecord
from tether.ports import Bus
from tether.snapshots import Absent, Snapshots, Source
from tether_backend.core.recovery import (
    Abandon,
    Attempt,
    Attempted,
    Candidate,
    Effect,
    Identity,
    Input,
    Recovery,
    Scanned,
    Ticked,
    candidate_of,
)
from tether_backend.metrics import Metrics
from tether_backend.store.engine import Database
from tether_backend.store.projection import ProjectionWriter, SupersededError
from tether_backend.store.recovery import SCAN_MAX, Recoveries, Wanted

_log = structlog.get_logger("tether.recovery")
MARKED_S: Final = 5.0  # a new mark is looked at at once; this notices another collector, owner or reader
UNFINISHED_S: Final = 30.0
Step = Callable[[str], None]
_failpoint: Final[Step] = under("backend.recovery")
_SETTLED: Final = frozenset({"repaired", "current", "told"})


@dataclass(frozen=True, slots=True)
class _Found:
    """A candidate, and what the rows and the owner record say of it."""

    wanted: Wanted
    owner: OwnerRecord


class RecoveryWorker:
    """`watched`: whether somebody follows a conversation. `writer`: of the projector whose lease is held."""

    def __init__(
        self,
        bus: Bus,
        database: Database,
        writer: ProjectionWriter,
        tenant: str,
        watched: Callable[[str], bool],
        metrics: Metrics,
        *,
        step: Step = _failpoint,
    ) -> None:
        self.tenant = tenant
        self.core = Recovery()
        self._bus = bus
        self._writer = writer
        self._rows = Recoveries(database, tenant)
        self._snapshots = Snapshots(bus, tenant)
        self._watched = watched
        self._metrics = metrics
        self._step = step
        self._found: dict[str, _Found] = {}
        self._unfinished: dict[str, tuple[_Found, Candidate]] = {}
        self._unfinished_due_s = 0.0
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._done: asyncio.Queue[Attempted] = asyncio.Queue()

    async def run(self) -> None:
        """For ever, while the caller holds the lease; outlives failures of bus and database."""
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    self._perform(group, self.core.apply(await self._scan()))
                except (BusError, SQLAlchemyError, OSError) as error:
                    _log.info("recovery_waits", tenant=self.tenant, detail=type(error).__name__)
                await self._wait(group)

    async def _wait(self, group: asyncio.TaskGroup) -> None:
        """Until the next scan: what is due begins, what is over is noted."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + MARKED_S
        marked = asyncio.ensure_future(self._writer.marked.wait())
        try:
            while (left_s := until_s - loop.time()) > 0 and not marked.done():
                due_s = self.core.due_s()
                wait_s = left_s if due_s is None else max(0.0, min(left_s, due_s - loop.time()))
                done = asyncio.ensure_future(self._done.get())
                try:
                    await asyncio.wait((marked, done), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    done.cancel() if not done.done() else None
                over = done.result() if done.done() and not done.cancelled() else None
                event: Input = Ticked(loop.time()) if over is None else over
                self._perform(group, self.core.apply(event))
        finally:
            marked.cancel()
        self._writer.marked.clear()

    def _perform(self, group: asyncio.TaskGroup, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Attempt(candidate, number):
                    execution = candidate.identity.execution
                    work = self._attempt(candidate, number)
                    self._tasks[execution, number] = group.create_task(work, name=f"recover-{execution}")
                case Abandon(execution, number):
                    task = self._tasks.pop((execution, number), None)
                    if task is not None:
                        task.cancel()
        self._metrics.recovery_candidates.labels("watched").set(self.core.watched)
        self._metrics.recovery_candidates.labels("cold").set(self.core.cold)

    # --- who is a candidate ---

    async def _scan(self) -> Scanned:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._unfinished_due_s:
            self._unfinished = await self._unfinished_now()
            self._unfinished_due_s = loop.time() + UNFINISHED_S
        found = dict(self._unfinished)
        for wanted in await self._rows.wanted():  # a mark says more than the rows
            one = await self._candidate(wanted)
            if one is not None:
                found[wanted.address.execution] = one
            else:
                await self._rows.settled(wanted.address.execution, wanted.mark)
        self._found = {execution: one for execution, (one, _) in found.items()}
        return Scanned(loop.time(), [candidate for _, candidate in found.values()])

    async def _unfinished_now(self) -> dict[str, tuple[_Found, Candidate]]:
        found: dict[str, tuple[_Found, Candidate]] = {}
        after = ""
        while rows := await self._rows.unfinished(after):
            for wanted in rows:
                one = await self._candidate(wanted)
                if one is not None and len(found) < SCAN_MAX:
                    found[wanted.address.execution] = one
            after = rows[-1].address.execution
        return found

    async def _candidate(self, wanted: Wanted) -> tuple[_Found, Candidate] | None:
        """With its full identity, or None where nothing is to be done. Raises BusError."""
        where = wanted.address
        key = subjects.owner_key(where.tenant, where.workspace, where.conversation)
        owner = await Bucket(self._bus, subjects.OWNERS).record(key, OwnerRecord) or OwnerRecord()
        owned = owner.target if owner.target is not None and owner.target.execution == where.execution else None
        if wanted.why == "unknown" and owned is not None:
            return None
        target = owned or _target(wanted)
        peer = None if target is None else await self._snapshots.registration(target)
        identity = Identity(
            tenant=where.tenant,
            workspace=where.workspace,
            conversation=where.conversation,
            execution=where.execution,
            response_generation=0 if target is None else target.response_generation,
            execution_generation=0 if target is None else target.execution_generation,
            sandbox="" if target is None else target.sandbox,
            boot="" if target is None else target.boot,
            process_generation=0 if target is None else target.process_generation,
            instance="" if peer is None else peer.instance,
            mark=wanted.mark,
        )
        found = candidate_of(
            identity,
            wanted.why,
            owned=owned is not None,
            ended=wanted.ended,
            partial=wanted.partial or wanted.note is not None,
            since_ms=wanted.since_ms,
            now_ms=_now_ms(),
            watched=self._watched(where.conversation),
        )
        return None if found is None else (_Found(wanted, owner), found)

    # --- one attempt ---

    async def _attempt(self, candidate: Candidate, number: int) -> None:
        execution = candidate.identity.execution
        outcome = "failed"
        try:
            async with asyncio.timeout(COLD_CANDIDATE_S):
                outcome = await self._repair(self._found[execution], candidate.identity)
        except TimeoutError:
            outcome = "timed_out"
        except (BusError, SQLAlchemyError, SupersededError, OSError) as error:
            _log.info("recovery_attempt_failed", execution=execution, detail=f"{type(error).__name__}: {error}"[:300])
        finally:
            self._tasks.pop((execution, number), None)
        settled = outcome in _SETTLED
        if settled:
            self._unfinished.pop(execution, None)
        self._metrics.recoveries.labels(outcome).inc()
        log = _log.info if outcome in ("repaired", "told") else _log.debug
        log("recovery_attempt", tenant=self.tenant, execution=execution, why=candidate.why, outcome=outcome)
        self._done.put_nowait(Attempted(asyncio.get_running_loop().time(), execution, number, settled))

    async def _repair(self, found: _Found, identity: Identity) -> str:
        """What became of it: a label of `Metrics.recoveries`. Raises BusError, SQLAlchemyError, SupersededError."""
        wanted = found.wanted
        if wanted.note is not None:
            return await self._tell(found, wanted.note)
        read = await self._snapshots.get(wanted.address, _target(wanted))
        if isinstance(read, Absent):
            return read.why.value
        self._step("snapshot_read")
        source: Source = read.source
        merged = await self._writer.merge(wanted.address, read.snapshot, tell=source == "collector", now_ms=_now_ms())
        self._step("merged")
        if merged is None:
            return "behind"
        if merged.filled and source == "collector":
            note = await self._rows.note(identity.execution)
            return "failed" if note is None else await self._tell(found, note)
        if merged.gaps:
            return "behind"
        await self._rows.settled(identity.execution, identity.mark)
        return "repaired" if merged.changed else "current"

    async def _tell(self, found: _Found, body: dict[str, Any]) -> str:
        """Steps 3 and 4."""
        where = found.wanted.address
        event = ConversationEvent(
            id=f"{where.execution}/{ev.RECOVERY}/{body.get('first')}-{body.get('last')}",
            generation=found.owner.generation,
            at=_now_ms(),
            type=ev.RECOVERY,
            body=body,
        )
        if not await append_once(self._bus, where, event):
            return "failed"
        self._step("note_told")
        await self._rows.settled(where.execution, found.wanted.mark)
        self._step("settled")
        return "told" if found.wanted.note is not None else "repaired"


def _target(wanted: Wanted) -> ExecutionTarget | None:
    """As the rows have it, from the execution's first event."""
    try:
        return ExecutionTarget.model_validate(wanted.target or {})
    except ValidationError:
        return None


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
