"""Performs a drain (`core.draining` decides), from its order to the collector's exit.

    verb `drain`, authority kind `sandbox`, payload a DrainOrder        SIGTERM
        ── journal (fsync) ─▶ starts are refused (DRAINING, retryable) ─▶ looks and deeds until it is over
        ─▶ done, by the verb: the collector answers until its report was asked for, at most LINGER_S, then exits 0
        ─▶ done, by SIGTERM: exits 0 at once; failed: exits 75
        ─▶ failed, by the verb: the collector stays, and takes starts again (the compute is kept)

**The reply** to the verb comes at once: `result` is a `DrainReport` dump (without what is None); `status` is `accepted`
while `result.state` is `running`, `settled` once it is `done` or `failed` (the failure is `result.problem`, never the
reply's own). The same control id, or the same drain id under another control, gets the report as it then stands.
Another drain id while one runs gets the running one's report: `result.drain` names it. A rejected reply (`problem`
set): INVALID payload, FORBIDDEN authority, LEASE_NOT_READY for an older revision, REQUEST_CONFLICT for a control id
that was used with another payload.

A collector that was killed goes on from the journal, whichever boot it is of. One that starts over a drain that is
done, of its own boot and ordered by the verb, takes nothing: it tells the report and goes. The registration says
`draining: <drain id>` until the exit.
"""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import structlog
from pydantic import ValidationError

from tether.checkpoint import DrainedExecution
from tether.control import ControlReply, ControlRequest
from tether.errors import Code, Problem, ProblemError, problem
from tether.prompt import invalid
from tether.sandbox import DrainOrder
from tether_collector import metrics, reserve
from tether_collector.checkpointing import CheckpointError, Checkpoints
from tether_collector.core import draining as core
from tether_collector.core.draining import Draining, Leave, Look, MakeCheckpoint, Release, Seen, Stage, WriteReference
from tether_collector.departing import ended_before, leave_control, leave_request, released
from tether_collector.execution_shell import ExecutionShell
from tether_collector.executions import Executions
from tether_collector.journal import Start
from tether_collector.starting import Starter
from tether_collector.surroundings import now_ms

LOOK_S: Final = 0.05  # between looks at the executions: who leaves tells nobody but the spool
LINGER_S: Final = 30.0  # a report that nobody asks for: who ordered the drain is gone, and starts the collector again
AFTER_REPLY_S: Final = 0.1  # for the reply that carried it to be out; one that is lost is asked for again
CHECKPOINT_SHARE: Final = 0.25  # of SIGTERM's grace, for what comes after the last process: log, checkpoint, reference
FAILED_EXIT: Final = 75  # EX_TEMPFAIL: the drain that SIGTERM asked for has failed
SANDBOX: Final = "_"  # stands for a conversation where the highest token of the sandbox's own controls is kept
_log: Final = structlog.get_logger("tether.collector")
_T = TypeVar("_T")


class Drainer:
    """Of one collector. `over` is set when the process is to end; `failed` then says whether SIGTERM's drain did."""

    def __init__(
        self, executions: Executions, starter: Starter, checkpoints: Checkpoints, changed: Callable[[], None]
    ) -> None:
        self._executions = executions
        self._around = executions.around
        self._starter = starter
        self._checkpoints = checkpoints
        self._changed = changed
        self._state: Draining | None = None
        self._shells: dict[str, ExecutionShell] = {}
        self._poked = asyncio.Event()
        self._collected = asyncio.Event()
        self._ordering = asyncio.Lock()
        self._by_signal = False
        self.over = asyncio.Event()
        self.failed = False

    @property
    def draining(self) -> str | None:
        """The drain because of which nothing is started here."""
        return self._executions.draining

    def recover(self) -> None:
        """Before anything is served: go on with what the journal says."""
        state = self._around.journal.drain()
        if state is None:
            return
        settled = state.source == "verb" and not state.failed and state.boot == self._around.settings.boot
        if state.over and not settled:
            return
        reserve.release(self._around.settings.state_dir)
        _log.info("drain_recovered", drain=state.drain, phase=state.phase)
        self._hold(state)

    def _hold(self, state: Draining) -> None:
        self._state = state
        self._shells = {name: shell for name in state.runs if (shell := self._executions.get(name)) is not None}
        self._executions.draining = state.drain
        self._poked.set()
        self._changed()

    # --- orders ---

    async def serve(self, request: ControlRequest) -> ControlReply:
        """The verb. Raises ProblemError; see the module."""
        if request.authority.kind != "sandbox":
            raise ProblemError(problem(Code.FORBIDDEN, "authority: a drain is ordered by the sandbox's record alone"))
        try:
            order = DrainOrder.model_validate(request.payload)
        except ValidationError as error:
            raise invalid(error, "payload") from None
        async with self._ordering:
            state = self._known(request, order) or await self._begin_by(request, order)
        if state.over and not state.failed:
            self._collected.set()
        report = core.report_of(state).model_dump(mode="json", exclude_none=True)
        return ControlReply(
            control=request.control, verb="drain", status="settled" if state.over else "accepted", result=report
        )

    def _known(self, request: ControlRequest, order: DrainOrder) -> Draining | None:
        """The drain that this request is about, or joins."""
        journal, state = self._around.journal, self._state
        control = journal.control(request.control)
        if control is not None and control.digest != request.digest:
            if self.draining != order.drain:
                detail = f"drain_id: {order.drain} named a drain of this sandbox that is over; take another id"
                raise ProblemError(problem(Code.REQUEST_CONFLICT, detail))
            raise ProblemError(problem(Code.REQUEST_CONFLICT, "this control id was used with another payload"))
        if state is not None and (state.drain == order.drain or not state.over or self.draining is not None):
            return state
        return journal.drain(order.drain)

    async def _begin_by(self, request: ControlRequest, order: DrainOrder) -> Draining:
        settings, journal = self._around.settings, self._around.journal
        if settings.recovery:
            detail = "this collector only tells what is left"
            raise ProblemError(problem(Code.RUNTIME_UNAVAILABLE, detail, retryable=True))
        token = request.authority.token
        if token and token < (seen := journal.token(SANDBOX, "sandbox")):
            raise ProblemError(problem(Code.LEASE_NOT_READY, "authority: an older sandbox record", token=seen))
        return await self._begin(order, "verb", request)

    async def by_signal(self) -> None:
        """SIGTERM: begins a drain, or goes on with the one that runs, and ends the process when it is over."""
        self._by_signal = True
        async with self._ordering:
            state = self._state
            if state is None or (state.over and self.draining is None):
                settings = self._around.settings
                await self._begin(
                    DrainOrder(
                        drain=_signal_drain(settings.boot, now_ms()),
                        reason="sigterm",
                        grace_s=settings.collector_drain_grace_s * (1 - CHECKPOINT_SHARE),
                        store=settings.collector_checkpoint_store,
                        include=settings.collector_checkpoint_include,
                        began_at=now_ms(),
                    ),
                    "signal",
                    None,
                )
            self._poked.set()

    async def _begin(self, order: DrainOrder, source: core.Source, request: ControlRequest | None) -> Draining:
        """The lock is the starts': one that was being accepted is in the drain, the next one is refused."""
        self._executions.draining = order.drain
        self._collected.clear()
        reserve.release(self._around.settings.state_dir)
        try:
            async with self._starter.lock:
                living = tuple(shell.start.execution for shell in self._executions.living())
                journal, settings = self._around.journal, self._around.settings
                token = (SANDBOX, "sandbox", 0 if request is None else request.authority.token)
                try:
                    carried = core.carried(journal.drain(), settings.collector_restore, journal.generations())
                    state = core.ordered(order, source, settings.boot, now_ms(), living, carried)
                    journal.add_drain(state, request, token)
                except sqlite3.Error as error:
                    detail = f"the journal does not take it: {error}"
                    raise ProblemError(problem(Code.RUNTIME_UNAVAILABLE, detail, retryable=True)) from error
        except BaseException:
            self._executions.draining = None
            raise
        self._around.step("drain_journaled")
        _log.info("drain_began", drain=order.drain, executions=len(state.runs), grace_s=order.grace_s, source=source)
        self._hold(state)
        return state

    # --- the deeds ---

    async def run(self) -> None:
        """The task: performs what there is to drain, and then the end of the process."""
        while True:
            self._poked.clear()
            state = self._state
            if state is not None:
                if not state.over:
                    await self._perform()
                await self._finish()
            await self._poked.wait()

    async def _perform(self) -> None:
        while self._state is not None and not self._state.over:
            before = self._state
            living = [name for name, run in before.runs.items() if run.stage != "ended"]
            self._decide(Look(now_ms(), tuple(self._seen(name) for name in living)))
            for want in core.wants(self._state):
                await self._do(want)
            if self._state == before:
                await asyncio.sleep(LOOK_S)
        state = self._state
        assert state is not None
        took_s = (now_ms() - state.at) / 1000
        _log.info("drain_over", drain=state.drain, failed=state.failed, seconds=took_s)
        metrics.drains.labels("failed" if state.failed else "done").inc()
        metrics.drain_seconds.observe(took_s)

    def _decide(self, input_: core.Input) -> None:
        """The state is on disk before anything that it wants is done."""
        assert self._state is not None
        before, state = self._state, core.decide(self._state, input_)
        if state == before:
            return
        try:
            self._around.journal.save_drain(state)
        except sqlite3.Error as error:  # a full volume: what is done is idempotent, and is begun again from before
            _log.error("drain_not_saved", drain=state.drain, phase=state.phase, error=str(error))
        self._state = state
        if state.phase != before.phase:
            self._passed(state.phase)
            _log.info("drain_phase", drain=state.drain, phase=state.phase)
            self._changed()

    def _passed(self, phase: core.Phase) -> None:
        match phase:
            case "leaving":
                self._around.step("drain_leaving")
            case "publishing":
                self._around.step("drain_publishing")
            case "checkpoint":
                self._around.step("drain_checkpoint")
            case "releasing":
                self._around.step("drain_releasing")
            case "over":
                self._around.step("drain_over")
            case "turn" | "killing":
                pass  # the first is journaled with the order; the second is passed unseen where they die fast enough

    async def _do(self, want: core.Effect) -> None:
        state = self._state
        assert state is not None
        match want:
            case Leave(execution, kill_at):
                self._leave(state.drain, execution, kill_at)
            case MakeCheckpoint():
                await self._make(state)
            case WriteReference(reference):
                revision = await _or_problem(self._checkpoints.write_reference(reference))
                if isinstance(revision, Problem):
                    self._fail(core.ReferenceLost(revision))
                else:
                    self._decide(core.ReferenceWritten(revision))
            case Release(execution, checkpoint, why):
                shell = self._shells.get(execution)
                if shell is not None and shell.all_told:
                    await shell.release(released(checkpoint, why))

    async def _make(self, state: Draining) -> None:
        self._decide(core.CheckpointBegun())
        if self._state is None or self._state.failed:
            _log.error("checkpoint_given_up", attempts=state.attempts)
            return
        self._around.step("checkpoint_begun")
        made = await _or_problem(self._checkpoints.make(state, self._around.journal.generations()))
        if isinstance(made, Problem):
            self._fail(core.CheckpointFailed(made, core.UNSAVED))
        else:
            self._decide(core.CheckpointMade(made))
            self._around.step("checkpoint_journaled")

    def _fail(self, input_: core.CheckpointFailed | core.ReferenceLost) -> None:
        _log.error("checkpoint_failed", detail=input_.problem.detail)
        self._decide(input_)

    def _leave(self, drain: str, execution: str, kill_at: int) -> None:
        shell, journal = self._shells.get(execution), self._around.journal
        if shell is None or shell.ended or journal.control(leave_control(drain, execution)) is not None:
            return
        request = leave_request(drain, execution, kill_at)
        try:
            shell.accept(journal.add_control(request, execution, now_ms(), token=("", "", 0)))
        except sqlite3.Error as error:
            _log.error("leave_delayed", execution=execution, error=str(error))
            return
        self._around.step("leave_journaled")

    # --- looks ---

    def _seen(self, execution: str) -> Seen:
        shell = self._shells.get(execution)
        start = self._around.journal.start(execution) if shell is None or shell.ended else None
        if shell is None or shell.ended:
            left = shell.left if shell is not None else None
            return Seen(execution, "ended", True, left or _left_before(start))
        left = shell.left
        if left is not None:
            return Seen(execution, "gone", shell.all_told, left)
        return Seen(execution, _stage(shell))

    # --- the end ---

    async def _finish(self) -> None:
        """After a drain that is over: whether the process goes on. What was left unfinished by SIGTERM, or by another
        boot, is finished now and holds nobody here."""
        state = self._state
        assert state is not None and state.over
        if self._by_signal:
            self.failed = state.failed
            self.over.set()
        elif state.failed or state.source == "signal" or state.boot != self._around.settings.boot:
            self._executions.draining = None
            reserve.keep(self._around.settings.state_dir)
            self._changed()
        else:
            await self._linger()
            self.over.set()

    async def _linger(self) -> None:
        asked = asyncio.create_task(self._collected.wait(), name="drain-report")
        told = asyncio.create_task(self._until_signal(), name="drain-signal")
        try:
            done, _ = await asyncio.wait((asked, told), timeout=LINGER_S, return_when=asyncio.FIRST_COMPLETED)
            if asked in done:
                await asyncio.sleep(AFTER_REPLY_S)
        finally:
            for task in (asked, told):
                task.cancel()
            await asyncio.gather(asked, told, return_exceptions=True)

    async def _until_signal(self) -> None:
        while not self._by_signal:
            self._poked.clear()
            await self._poked.wait()


async def _or_problem(work: Awaitable[_T]) -> _T | Problem:
    """What it comes to, or CHECKPOINT_FAILED. What nobody foresaw would come again after every restart: the drain fails
    by its name, its traceback is in the log, and the collector serves on."""
    try:
        return await work
    except CheckpointError as error:
        return error.problem
    except Exception as error:  # noqa: BLE001 - the boundary of one checkpoint, told with its traceback
        _log.exception("checkpoint_broke")
        return problem(Code.CHECKPOINT_FAILED, f"unforeseen: {type(error).__name__}: {error}"[:1000])


def _signal_drain(boot: str, at: int) -> str:
    return "drn_" + hashlib.sha256(f"sigterm\x1f{boot}\x1f{at}".encode()).hexdigest()[:24]


def _left_before(start: Start | None) -> DrainedExecution | None:
    return None if start is None or start.summary is None else ended_before(start, start.summary)


def _stage(shell: ExecutionShell) -> Stage:
    machine = shell.judging
    if machine is None:
        return "turn"
    if machine.response_outcome is not None:
        return "over"
    return "waiting" if machine.status().state == "waiting" else "turn"
