"""Prompts in, settled: the loop over the durable consumer `router`.

Per delivery:
  1 poison is told where its conversation can be named, and terminated
  2 at the conversation's gate: `Admitter.admit`
  3 Ack → acked with confirmation (a lost ack comes again and finds its answer)
    Wait → held here for a while, so that what happens in the conversation wakes it at once; then given back with a
    delay that grows with its deliveries. Held deliveries are few; beyond, prompts are given back at once. One that
    has no place for its execution is held until a place comes free, tenants in turn.
No tenant has more than its share of what is in hand and of what is worked on at the same time (see `turns`).

The server redelivers what is not settled within the ack wait, so everything in hand says `in_progress` in time; a
frozen router does not, and another takes over: admission is safe against both.

Shutdown: no new deliveries, held ones are given back, the others are finished within the budget, then cancelled
(their next delivery continues).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final, cast

import structlog

from tether import subjects, tracing
from tether.errors import BusError
from tether.failpoints import failpoint, failpoint_of
from tether.ids import new_id
from tether.limits import NAK_DELAY_MAX_S, NAK_DELAY_MIN_S, PROMPT_ACK_WAIT_S, SHUTDOWN_BUDGET_S
from tether.ports import Bus, Job
from tether.prompt import Prompt
from tether_router import metrics
from tether_router.admitter import Admitter, Clock, identity_of
from tether_router.core.intake import Poison, inspect
from tether_router.core.steps import Ack, Wait
from tether_router.gates import Gates, Visit
from tether_router.log import Log
from tether_router.slots import Slots
from tether_router.turns import TENANT_SHARE, TENANT_WORKING_MAX, Shares, Turn, Turns

IN_FLIGHT_MAX: Final = 256  # deliveries in hand
HELD_MAX: Final = 128  # of those, waiting for their conversation; the rest stays for prompts that can go on
HELD_PER_CONVERSATION_MAX: Final = 4  # beyond its oldest, which is always held if there is room
PLACELESS_MAX: Final = 96  # of those, waiting for a place for a running execution
PLACELESS_PER_TENANT_MAX: Final = 8
HOLD_S: Final = 15.0  # then the delivery goes back, and another router may have it
IN_PROGRESS_S: Final = PROMPT_ACK_WAIT_S / 3
AWAY_MAX_S: Final = 1.0  # between attempts of what the bus, or another writer, kept from being decided

_log = structlog.get_logger("tether.router")


def delay_s(count: int) -> float:
    """0.25 s growing to 5 s; `count` from 1."""
    return float(min(NAK_DELAY_MAX_S, NAK_DELAY_MIN_S * 2 ** min(count - 1, 16)))


class Router:
    """One replica. `run` ends when `stop` is set and what was in hand is settled or given back."""

    def __init__(
        self,
        bus: Bus,
        log: Log,
        admitter: Admitter,
        gates: Gates,
        clock: Clock,
        *,
        slots: Slots | None = None,
        tenants: int = 1,
    ) -> None:
        """`tenants`: of how many this router has the prompts; where there are several none gets more than its share."""
        self._bus = bus
        self._log = log
        self._admitter = admitter
        self._gates = gates
        self._clock = clock
        self._instance = new_id("rtr")
        self._in_hand: set[Job] = set()
        self._slots = slots
        alone = tenants <= 1
        self._shares = Shares(IN_FLIGHT_MAX if alone else IN_FLIGHT_MAX // TENANT_SHARE)
        self._turns = Turns(None if alone else TENANT_WORKING_MAX)
        self._held = 0
        self._placeless = 0
        self._delivered = 0
        self._stopping = False

    async def run(self, stop: asyncio.Event) -> None:
        deliveries: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            keeper = group.create_task(self._keep_in_progress(), name="router-in-progress")
            jobs = self._bus.jobs(subjects.PROMPTS_STREAM, subjects.ROUTER_DURABLE, in_flight_max=IN_FLIGHT_MAX)
            async for job in _until(jobs, stop):
                if not self._shares.enter(tenant_of(job)):
                    metrics.given_back.labels("share").inc()
                    await job.nak(delay_s(job.deliveries))
                    continue
                task = group.create_task(self._deliver(job), name=f"prompt-{job.message.sequence}")
                deliveries.add(task)
                task.add_done_callback(deliveries.discard)
            self._stopping = True
            self._gates.wake_all()
            if self._slots is not None:
                self._slots.wake_all()
            if deliveries:
                _, late = await asyncio.wait(deliveries, timeout=SHUTDOWN_BUDGET_S)
                for task in late:
                    _log.warning("delivery_cut_off", task=task.get_name())
                    task.cancel()
            keeper.cancel()

    async def _keep_in_progress(self) -> None:
        while True:
            await asyncio.sleep(IN_PROGRESS_S)
            for job in list(self._in_hand):
                if job in self._in_hand:
                    await job.in_progress()

    async def _deliver(self, job: Job) -> None:
        """The boundary of one prompt: whatever goes wrong with it, the others go on."""
        self._in_hand.add(job)
        metrics.redeliveries.inc(job.deliveries > 1)
        try:
            with tracing.scope("admit prompt", kind="consumer", headers=job.message.headers) as span:
                span.set(deliveries=job.deliveries, sequence=job.message.sequence)
                await self._handle(job, span)
        except BusError as error:
            _log.warning("delivery_failed", sequence=job.message.sequence, error=str(error))
            await job.nak(min(AWAY_MAX_S, delay_s(job.deliveries)))
        except Exception:  # noqa: BLE001 - the boundary of one prompt, told with its traceback
            _log.exception("delivery_broken", sequence=job.message.sequence, subject=job.message.subject)
            await job.nak(NAK_DELAY_MAX_S)
        finally:
            self._in_hand.discard(job)
            self._shares.leave(tenant_of(job))

    async def _handle(self, job: Job, span: tracing.Span) -> None:
        taken = inspect(job.message, payload_bytes_max=self._bus.payload_bytes_max)
        if isinstance(taken, Poison):
            await self._refuse(job, taken)
            return
        prompt = taken.prompt
        key = subjects.owner_key(prompt.tenant, prompt.workspace, prompt.conversation)
        identity = identity_of(prompt)
        with tracing.identified(span, **identity), self._gates.visit(key) as visit:
            settled = await self._admit_or_hold(job, prompt, visit)
            if not settled:
                metrics.prompts.labels("waiting").inc()
        if settled:
            # Who waits behind this prompt looks only now: it was the oldest until the ack.
            self._gates.wake(key)

    async def _admit_or_hold(self, job: Job, prompt: Prompt, visit: Visit) -> bool:
        """True once the job is acked, False once it is given back."""
        began_s = asyncio.get_running_loop().time()
        looks = 0
        while True:
            looks += 1
            async with visit.lock:
                visit.look()
                if self._stopping and looks > 1:
                    await job.nak(NAK_DELAY_MIN_S)
                    return False
                end = await self._admit(job, prompt)
            if isinstance(end, Ack):
                return True
            if end.place:
                if not await self._wait_for_place(job, prompt, began_s, looks):
                    return False
                continue
            left_s = began_s + HOLD_S - asyncio.get_running_loop().time()
            full = self._held >= HELD_MAX or (end.behind and visit.others >= HELD_PER_CONVERSATION_MAX)
            if self._stopping or full or left_s <= 0 or not end.changed:
                most_s = NAK_DELAY_MAX_S if end.changed else AWAY_MAX_S
                await job.nak(min(most_s, delay_s(job.deliveries)))
                return False
            self._held += 1
            try:
                with metrics.held_prompts.track_inprogress():
                    await visit.woken(min(left_s, delay_s(looks)))
            finally:
                self._held -= 1

    async def _wait_for_place(self, job: Job, prompt: Prompt, began_s: float, looks: int) -> bool:
        """Hold the prompt until a place may be free; False once it is given back."""
        slots = self._slots
        assert slots is not None
        left_s = began_s + HOLD_S - asyncio.get_running_loop().time()
        full = self._held >= HELD_MAX or self._placeless >= PLACELESS_MAX
        if self._stopping or full or left_s <= 0 or slots.waiting(prompt.tenant) >= PLACELESS_PER_TENANT_MAX:
            metrics.given_back.labels("place").inc()
            await job.nak(delay_s(job.deliveries))
            return False
        self._held += 1
        self._placeless += 1
        try:
            with metrics.held_prompts.track_inprogress():
                await slots.freed(prompt.tenant, job.message.sequence, min(left_s, delay_s(looks)))
        finally:
            self._held -= 1
            self._placeless -= 1
        return True

    async def _admit(self, job: Job, prompt: Prompt) -> Ack | Wait:
        if self._slots is not None and self._slots.hopeless(prompt):
            return Wait("the limit of running executions is used up", place=True)
        async with self._turns.turn(prompt.tenant) as turn:
            return await self._admit_in_turn(job, prompt, turn)

    async def _admit_in_turn(self, job: Job, prompt: Prompt, turn: Turn) -> Ack | Wait:
        message = job.message
        self._delivered += 1
        verdict = await self._admitter.admit(
            prompt,
            sequence=message.sequence,
            stored_at_ns=message.stored_at_ns,
            actor=f"{self._instance}-{self._delivered}",
            turn=turn,
        )
        failpoint_of("router.admission", verdict.end, Ack | Wait)
        execution = verdict.state.execution
        if isinstance(verdict.end, Ack):
            confirmed = await job.ack(confirm=True)
            failpoint("router.prompt.acked")
            code = verdict.state.failure.code.value if verdict.state.failure is not None else None
            outcome = verdict.end.outcome
            _log.info("prompt_settled", outcome=outcome, code=code, confirmed=confirmed, execution=execution)
            metrics.settled(outcome, code, self._clock() - message.stored_at_ns // 1_000_000)
        else:
            _log.debug("prompt_waits", reason=verdict.end.reason)
        return verdict.end

    async def _refuse(self, job: Job, poison: Poison) -> None:
        """Told first, terminated then; a conversation whose log cannot be written is no reason to keep poison."""
        if poison.address is not None:
            try:
                view = await self._log.tail(poison.address)
                event = poison.event(generation=view.generation, at=self._clock())
                if event.id not in view.seen:
                    await self._log.append(poison.address, event, view.last_sequence)
            except BusError as error:
                _log.warning("poison_untold", subject=job.message.subject, error=str(error))
        await job.term(poison.problem.detail)
        metrics.prompts.labels("refused").inc()
        _log.warning(
            "prompt_refused", subject=job.message.subject, sequence=job.message.sequence, detail=poison.problem.detail
        )


def tenant_of(job: Job) -> str:
    """Of a prompt's subject, whatever its payload says."""
    return job.message.subject.split(".")[2]


async def _until(jobs: AsyncIterator[Job], stop: asyncio.Event) -> AsyncIterator[Job]:
    """The jobs until `stop` is set; the source is closed then."""
    stopped = asyncio.create_task(stop.wait(), name="router-stop")
    following: asyncio.Task[Job] | None = None
    try:
        while not stopped.done():
            following = asyncio.create_task(_next(jobs), name="router-next")
            await asyncio.wait((stopped, following), return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return
            job, following = following.result(), None
            yield job
    except StopAsyncIteration:
        return
    finally:
        for task in (stopped, following):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in (stopped, following) if task is not None), return_exceptions=True)
        await cast(AsyncGenerator[Job, None], jobs).aclose()


async def _next(jobs: AsyncIterator[Job]) -> Job:
    return await anext(jobs)
