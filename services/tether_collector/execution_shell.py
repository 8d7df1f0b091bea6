"""One execution, from its journaled start to its saved end. The machine decides; this performs, in this order:

    1  claim in the log                    (claim.py; refused: nothing was spawned, nothing will be)
    2  keeper: adopted, or launched once   (raising.py, process.py)
    3  base from the log, state from the spool (pipeline.py)
    4  spool → events → blobs → log, and what the machine wants → keeper, until the terminal frame is stored
       (or another process follows: 2 to 4 again, with what is recorded so far)
    5  final snapshot on disk (finals.py), journal, the keeper may go

A crash between any two is continued by `run` of the next collector: 1 sends the same bytes again, 2 finds the spawn
record, 3 discards what the log has, 5 writes the same file again.

Three tasks share the state on the loop's thread: the pump (reads the spool; alone changes the pipeline), the hands
(ask the keeper) and the writer (publishes). A lost acked tail makes the writer ask for a rebase: from that call on
nothing of the old reading is offered, and the pump rebuilds. Reading pauses while the writer is far behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Final, Literal

import structlog

from tether import events as ev
from tether import tracing
from tether.checkpoint import DrainedExecution
from tether.errors import BusError, Code, Problem, problem
from tether.events import Event
from tether.frame_writer import RecordGap, Told
from tether.frames import Position
from tether.ids import ExecutionTarget
from tether.sandbox import ExecutionSummary
from tether.snapshot import Snapshot, Watermark
from tether.subjects import EventAddress
from tether_collector import claim as claiming
from tether_collector import metrics, trace
from tether_collector.accepted import AcceptedControls
from tether_collector.blobs import Blob, externalise
from tether_collector.core.execution import Execution
from tether_collector.core.inputs import Want
from tether_collector.core.review import End
from tether_collector.departing import what_became
from tether_collector.hands import Hands
from tether_collector.journal import Control, Start
from tether_collector.keeper_link import KeeperRefusedError, LinkLost
from tether_collector.launching import agent_launch
from tether_collector.live_snapshot import snapshot_of
from tether_collector.log_writer import LogWriter
from tether_collector.pipeline import Base, Pipeline, base_of
from tether_collector.process import AgentProcess, keeper_folder
from tether_collector.raising import Succession, hand_over, raise_process, remember_session
from tether_collector.salvage import closed_without_tail, salvage
from tether_collector.spool_room import LOOK_S, SpoolRoom
from tether_collector.surroundings import Surroundings as Surroundings
from tether_collector.surroundings import now_ms as now_ms
from tether_collector.sweep import sweep

PROVE_AGAIN_S: Final = 2.0
OWNER_AGAIN_S: Final = 0.5


class ExecutionShell:
    """See the module. `run` is its task; everything else is asked by others meanwhile.

    `restoring`: the execution has ended, and the log lost what it had: the same is told again, from the spool alone."""

    def __init__(self, around: Surroundings, start: Start, *, restoring: bool = False) -> None:
        self.start = start
        self._restoring = restoring
        self.target: ExecutionTarget = start.target
        self.ended = False
        self._left: DrainedExecution | None = None
        self._around = around
        self._address = EventAddress(start.target.tenant, start.target.workspace, start.conversation, start.execution)
        self._kick = asyncio.Event()
        self._pipeline: Pipeline | None = None
        self._rebase: Base | None = None
        self._controls = AcceptedControls(around.journal, start.execution, around.step)
        self._adopted_at = 0  # the record up to which the spool is history for the present link
        self._replayed = False  # the spool's end was reached since the last rebuild
        self._lead: tuple[Event, Position] | None = None  # a gap that is told before anything else
        self._paused = False
        self._pumping = False
        self._still = asyncio.Event()  # paused, and no step is under way
        self._ending = False  # all is told; the end is being written down
        self._over = asyncio.Event()
        self._fenced: str | None = None
        self._span = tracing.Span()
        self._shown: object = None
        self._due: object = None  # what the hands were last called for
        self._log = structlog.get_logger("tether.collector")
        self._equip()

    def _equip(self) -> None:
        """What belongs to the present process."""
        around, start = self._around, self.start
        folder = keeper_folder(around.settings.state_dir, start.execution, start.target.process_generation)
        before = str(around.settings.facts.get("before", ""))
        self._process = AgentProcess(folder, start.nonce, self._kick.set, before)
        self._hands = Hands(self._process, self._wants, self._unnoted)
        self._writer = LogWriter(around.bus, self._address, self, around.pace)
        self._room = SpoolRoom(
            around.settings,
            lambda: around.bus.connected,
            self._process,
            self._writer,
            self._step,
            lambda: self._rebase is not None,
        )
        self._succession = Succession(around, start, lambda: self.judging, self._record_note, self._all_stored)

    # --- what others ask ---

    @property
    def machine(self) -> Execution | None:
        return None if self._pipeline is None else self._pipeline.machine

    @property
    def judging(self) -> Execution | None:
        """The machine, once it knows everything that the spool held when the keeper was met: before, what it says of an
        interaction or a turn is the past's, and a refusal would be final."""
        pipeline = self._pipeline
        if pipeline is None or self._rebase is not None:
            return None
        known = self._replayed if self._process.gone else pipeline.after >= self._adopted_at
        return pipeline.machine if known else None

    @property
    def proven(self) -> bool:
        """Nothing of the process is left; what remains is telling it."""
        return self.machine is not None and self.machine.ended

    @property
    def left(self) -> DrainedExecution | None:
        """What became of it, once nothing of the process is left; None before, and where there never was one."""
        pipeline = self._pipeline
        return self._left if pipeline is None else what_became(self.start, pipeline, self._controls)

    @property
    def all_told(self) -> bool:
        """Everything that may be said before a drain releases the end is in the log."""
        return self.machine is not None and self.machine.held and self._rebase is None and self._writer.idle

    async def release(self, body: dict[str, Any]) -> None:
        """A drain says what became of the checkpoint. To be tried again where it shows no effect."""
        await self._record("note", {"kind": "released"}, body)

    def summary(self) -> ExecutionSummary:
        machine = self.machine
        status = None if machine is None else machine.status()
        last = 0 if self._pipeline is None else self._pipeline.fold.applied
        return ExecutionSummary(
            target=self.target if machine is None else machine.target,
            state="ended" if self.ended else "starting" if status is None else status.state,
            last_ordinal=last,
            pending_interactions=0 if status is None else status.pending,
            started_at=self.start.created_at,
        )

    async def snapshot(self) -> Snapshot | None:
        """The folded state of what the log has; None while it is not known yet."""
        pipeline = self._pipeline
        if pipeline is None or not pipeline.caught_up:
            return None
        async with self._writer.between_frames():
            return await snapshot_of(pipeline, self._around.bus, self._address)

    def accept(self, control: Control) -> None:
        """A journaled control: noted in the spool as soon as the keeper takes it."""
        self._controls.add(control)
        self._hands.poke()

    async def receipt(self, control: str, enough: frozenset[str], wait_s: float) -> Control | None:
        """The receipt once its status is one of `enough` or final, or as it stands when the time is over."""
        return await self._controls.wait(control, enough, wait_s)

    async def settle(self) -> None:
        """Stop reading, wait until everything offered is stored, and save the state at exactly that point. What is at
        its end is let come to it: that is written down there."""
        self._paused = True
        self._kick.set()
        if self._pumping:
            await self._still.wait()
        if self._ending:
            await self._over.wait()
        if self._ending or not self._pumping:
            return
        await self._writer.settled()
        pipeline = self._pipeline
        if pipeline is not None and self._writer.idle and self._rebase is None and pipeline.hand_over():
            self._around.step("handed_over")

    # --- the life ---

    async def run(self) -> None:
        with trace.execution(self._around.settings.state_dir, self.start) as self._span:
            await self._run()

    async def _run(self) -> None:
        try:
            if self._restoring:
                self._process.gone = True
            elif self.start.phase == "journaled" and not await self._claim():
                return
            else:
                await self._raise_process()
            while await self._live():
                await self._go_on_with_the_next_process()
        finally:
            self._over.set()
            self._process.close()
            if self._pipeline is not None:
                self._pipeline.close()
            if self.ended:
                self._pipeline = None  # what is left of it is on disk: the final snapshot, the journal's summary

    async def _claim(self) -> bool:
        outcome = await claiming.claim(self._around.bus, self._address, self.start.claim, self._around.settings.boot)
        match outcome:
            case claiming.Claimed():
                self._around.step("claimed")
                self._around.journal.set_phase(self.start.execution, "claimed")
                self._around.step("claim_journaled")
                self._log.info("execution_claimed")
                return True
            case claiming.Orphaned(message):
                await sweep(f"{self.start.execution}-")
                await claiming.end_orphan(self._around.bus, self._address, message, now_ms())
                detail = "it was claimed by a collector whose journal is lost"
                self._refuse(problem(Code.EXECUTION_DURABILITY_GAP, detail))
            case claiming.Refused(why):
                self._refuse(why)
        return False

    def _refuse(self, why: Problem) -> None:
        """Nothing was spawned and nothing will be."""
        self._log.warning("start_refused", code=why.code, detail=why.detail)
        self._span.failed(why.code)
        self._controls.set(self.start.control, "rejected", why)
        self.ended = True
        self._around.journal.set_ended(self.start.execution, now_ms(), None)

    async def _raise_process(self) -> None:
        await raise_process(self._around, self.start, self._process)
        self._controls.set(self.start.control, "delivered", None, at_least=True)

    async def _go_on_with_the_next_process(self) -> None:
        machine = self.machine
        assert machine is not None and self._pipeline is not None
        self.start = await hand_over(self._around, self.start, self._process, machine.target)
        self.target = machine.target
        self._process.close()
        self._pipeline.close()
        self._pipeline = None
        self._equip()
        await self._raise_process()

    async def _live(self) -> bool:
        """Whether another process follows."""
        base = await self._read_base()
        if base is not None:
            self._around.step("base_read")
            self._rebuild(base)
            self._around.step("rebuilt")
            if base.terminal:
                self._ending = True
                self._replay_ended()
            elif await self._tell():
                return True
        if self._fenced is not None:
            self._log.error("execution_fenced", reason=self._fenced)
            if self._restoring:
                self._around.journal.forget_end(self.start.execution)
                return False
            await self._process.abandon()
            await self._salvage()
            self._controls.close()
            self._close_journal(now_ms())
            return False
        await self._finish()
        return False

    async def _tell(self) -> bool:
        """Spool to log, until the terminal frame is stored or another writer is found; True where another process is
        due before that."""
        async with asyncio.TaskGroup() as group:
            name = self.start.execution
            tasks = [
                group.create_task(self._pump(), name=f"pump:{name}"),
                group.create_task(self._hands.run(), name=f"hands:{name}"),
                group.create_task(self._process.listen(), name=f"keeper:{name}"),
            ]
            writing = group.create_task(self._writer.run(), name=f"writer:{name}")
            following = group.create_task(self._succession.run(), name=f"succession:{name}")
            await asyncio.wait((writing, following), return_when=asyncio.FIRST_COMPLETED)
            again = not writing.done()
            self._ending = not again
            for task in (*tasks, writing, following):
                task.cancel()
        return again

    def _replay_ended(self) -> None:
        """The log has the end. If the spool explains it, it is ours and only the fold is to be made."""
        assert self._pipeline is not None
        if not self._pipeline.replayed_to_its_end():
            self._fenced = "the execution was ended by another"

    async def _salvage(self) -> None:
        """Another closed the execution while the volume was away: what the spool has beyond the log is kept."""
        base = closed_without_tail(await claiming.last_message(self._around.bus, self._address))
        if base is not None:
            if self._process.gone:
                await self._process.prove_gone()  # so that the spool has its end, too
            with closing(self._replayed_from(base)) as pipeline:
                await salvage(self._around.bus, self._around.blobs, self.start.target, pipeline, now_ms())
            self._around.step("salvaged")

    async def _read_base(self) -> Base | None:
        """Where the log stands; None where this writer is fenced."""
        message = await claiming.last_message(self._around.bus, self._address)
        if message is None:
            if self._restoring or await self.still_ours():
                return Base(0, Position(record=0, index=0))
            self._fenced = "the subject is empty and the conversation has another owner"
            return None
        base = base_of(message)
        if isinstance(base, str):
            self._fenced = base
            return None
        return base

    def _replayed_from(self, base: Base) -> Pipeline:
        """A replay begins with the first process, whichever is the present one."""
        event = claiming.claim_event(self._address, self.start.claim)
        launch, adapter = agent_launch(self._around.settings, self.start)
        target = ExecutionTarget.model_validate(event.body["target"])
        return Pipeline.rebuild(self._process.directory, launch, adapter, event, target, base)

    def _rebuild(self, base: Base) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
        pipeline = self._replayed_from(base)
        link = self._process.live
        self._adopted_at = 0 if link is None else link.hello.last_record
        self._room.begin()
        self._lead = None
        self._replayed = False
        self._due = None
        self._pipeline = pipeline
        if base.ordinal == 0 and pipeline.next_ordinal == 2:
            event = claiming.claim_event(self._address, self.start.claim)
            self._writer.offer([(event, claiming.CLAIM_POSITION)], 0)
        elif (lead := pipeline.lead(self.start.created_at)) is not None:
            self._log.error("log_not_restored", first=lead[0].ordinal, last=lead[0].end)
            self._lead = lead

    # --- spool to log ---

    async def _pump(self) -> None:
        self._pumping = True
        self._still.clear()
        try:
            while True:
                await self._move()
        finally:  # whoever settles does not wait for a pump that is over
            self._pumping = False
            self._still.set()

    async def _move(self) -> None:
        self._kick.clear()
        if self._rebase is not None:
            base, self._rebase = self._rebase, None
            self._rebuild(base)
        assert self._pipeline is not None
        await self._room.wait(self._pipeline)
        if self._lead is not None:  # the writer knows the log's end by now
            lead, self._lead = self._lead, None
            self._writer.offer([lead], 0)
        if self._paused:
            self._still.set()
        if self._paused or not await self._step(self._told_of()):
            await self._idle()
        else:
            await asyncio.sleep(0)  # a flood must not starve controls and the other executions

    def _told_of(self) -> int | None:
        """The last record that the keeper told of: it kicks for the next one, so nobody has to look whether there is
        one. None where nobody tells, or where something is missing: then the reader looks for itself."""
        link, pipeline = self._process.live, self._pipeline
        return None if link is None or pipeline is None or pipeline.behind_log else link.last_record

    async def _step(self, told: int | None = None) -> bool:
        """One read of the spool, its events to the writer; False where there was nothing."""
        pipeline = self._pipeline
        assert pipeline is not None
        progress = pipeline.step(told)
        if progress.inputs:
            metrics.read(progress.inputs, progress.size_bytes, progress.events)
            self._notice(progress.events)
        ready: list[tuple[Event, Position]] = []
        for event, position in progress.events:
            small, blob = externalise(event)
            if blob is not None:
                if not await self._store(blob):
                    if ready:
                        self._room.offer(ready, 0)
                        ready = []
                    self._room.shed(event, position)
                    continue
                self._around.step("blob_stored")
            ready.append((small, position))
        if self._rebase is not None:
            return True  # asked for while a blob was stored: what was read belongs to the old reading
        if ready:
            self._room.offer(ready, progress.size_bytes)
            self._around.step("offered")
        if progress.moved:
            await self._room.after(pipeline, progress.size_bytes)
        return progress.moved

    async def _store(self, blob: Blob) -> bool:
        """Wait until the blob is stored; False where the spool would burst meanwhile."""
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._around.blobs.put(blob)
                return True
            except TimeoutError:
                if self._room.crowded():
                    return False

    def _notice(self, events: Sequence[tuple[Event, Position]]) -> None:
        """After inputs were applied: receipts, wants, and what the registration shows."""
        machine = self.machine
        assert machine is not None
        for event, _ in events:
            if event.type == ev.CONTROL_RECEIPT:
                self._controls.take(event.body)
            elif event.type in trace.TOLD:
                trace.tell(self._span, event)
        self._succession.look()
        due = (self._knows_past, machine.wants())
        if due != self._due:  # else the hands know it already, and look again by themselves where they must
            self._due = due
            self._hands.poke()
        status = machine.status()
        if status.state != "starting":
            self._controls.set(self.start.control, "settled", None, at_least=True)
        shown = (status.state, status.native_session, status.pending)
        if shown != self._shown:
            self._shown = shown
            self._around.changed()

    async def _idle(self) -> None:
        """At the end of the spool: close what is missing, look after the keeper, or wait for more."""
        pipeline, process = self._pipeline, self._process
        assert pipeline is not None
        if not self._replayed and not self._paused:
            self._replayed = True
            self._succession.look()
        if self._paused or (pipeline.machine.ended and not pipeline.behind_log):
            await self._kick.wait()
        elif not process.gone and process.live is None:
            if await process.adopt():
                assert process.link is not None
                self._adopted_at = process.link.hello.last_record
            self._hands.poke()
        elif pipeline.behind_log:
            self._log.error("spool_shorter_than_log", next_ordinal=pipeline.next_ordinal)
            await self._record("note", {"kind": "gap"}, pipeline.gap_body())
        elif process.gone and (pipeline.machine.held or self._between_processes):
            await self._kick.wait()
        elif process.gone:
            await self._prove_gone()
        elif pipeline.machine.adapter_version != (version := pipeline.machine.adapter.version):
            self._log.info("adapter_changed", before=pipeline.machine.adapter_version, version=version)
            await self._record("adapter", {"name": pipeline.machine.adapter.name, "version": version})
        else:
            try:
                quiet = self._around.bus.connected and not self._room.owes and not self._around.pace.limited
                async with asyncio.timeout(None if quiet else LOOK_S):
                    await self._kick.wait()
            except TimeoutError:
                await self._room.look(pipeline)

    async def _prove_gone(self) -> None:
        """The keeper is gone and the spool ends without a proof: make it, or try again later."""
        if not await self._process.prove_gone():
            await asyncio.sleep(PROVE_AGAIN_S)
            await self._process.adopt()
        else:
            self._log.warning("keeper_gone")

    async def _record(
        self, kind: Literal["note", "adapter"], meta: dict[str, Any], body: dict[str, Any] | None = None
    ) -> None:
        """Record an input; where the link breaks the caller looks again (a gap that was recorded is seen then)."""
        try:
            await self._process.append(kind, meta, body)
        except (LinkLost, KeeperRefusedError) as error:
            self._log.warning("note_delayed", kind=kind, meta=meta, error=str(error))
            await asyncio.sleep(PROVE_AGAIN_S)
        else:
            assert self._pipeline is not None
            if not self._process.gone:
                await self._wait_for_record(self._pipeline.after)

    async def _record_note(self, meta: dict[str, Any], body: dict[str, Any]) -> None:
        await self._record("note", meta, body)

    async def _all_stored(self) -> bool:
        await self._writer.settled()
        return self._writer.idle and self._rebase is None and self._fenced is None

    @property
    def _between_processes(self) -> bool:
        machine = self.machine
        gone_on = machine is not None and machine.process_generation > self.start.target.process_generation
        return machine is not None and (gone_on or machine.between_processes)

    async def _wait_for_record(self, after: int) -> None:
        link = self._process.live
        if link is not None:
            try:
                await link.wait_records(after)
            except LinkLost:
                pass

    # --- what the writer tells ---

    def told(self, told: Told) -> None:
        if self._rebase is not None:
            self._rebase = Base(told.ordinal, told.position, told.sequence, told.tag, events=told.events)
        elif self._pipeline is not None:
            self._pipeline.told(told.events, told.ordinal, told.sequence, told.tag)

    def rebase(self, ordinal: int, position: Position) -> None:
        self._log.warning("log_rewound", ordinal=ordinal)
        self._rebase = Base(ordinal, position)
        self._kick.set()

    async def record_gap(self, gap: RecordGap) -> None:
        await self._record("note", {"kind": "gap"}, {"reason": gap.reason, "from": gap.first, "to": gap.last})

    async def still_ours(self) -> bool:
        if self._restoring:
            return False  # it is purged while it is put back
        return await claiming.is_owned(self._around.bus, self._address)

    def fenced(self, reason: str) -> None:
        self._fenced = reason

    # --- controls ---

    @property
    def _knows_past(self) -> bool:
        """The machine has read what the spool held when the link was made: what it wants is wanted now."""
        pipeline = self._pipeline
        return pipeline is not None and self._rebase is None and pipeline.after >= self._adopted_at

    def _wants(self) -> Sequence[Want]:
        pipeline = self._pipeline
        if pipeline is None or not self._knows_past or self._between_processes:
            return ()
        return pipeline.machine.wants()

    def _unnoted(self) -> Sequence[tuple[str, dict[str, Any]]]:
        """Controls that are journaled and that the spool does not have."""
        pipeline = self._pipeline
        if pipeline is None or not self._knows_past:
            return ()
        return self._controls.unnoted(pipeline.machine)

    # --- the end ---

    async def _finish(self) -> None:
        """The terminal frame is stored."""
        self._around.step("terminal_stored")
        pipeline = self._pipeline
        assert pipeline is not None
        self._left = self.left
        snapshot = await self._final_snapshot()
        state = pipeline.fold.head() if snapshot is None else snapshot.state
        at = state.ended_at or self.start.ended_at or now_ms()
        if snapshot is not None:
            summary = self.summary().model_copy(update={"state": "ended"})
            await self._around.finals.keep(summary, snapshot, at)
        await remember_session(self._around, self.start, pipeline.machine)
        self._around.step("final_written")
        self._controls.close()
        self._close_journal(at, pipeline.watermark())
        self._around.step("end_journaled")
        await self._process.dismiss()
        self._around.step("keeper_dismissed")
        self._log.info("execution_ended", outcome=state.outcome, ordinals=pipeline.fold.applied)

    async def _final_snapshot(self) -> Snapshot | None:
        """Waits for a bus that is away: the end is stored already, and must not be the end of the other executions."""
        while True:
            try:
                return await self.snapshot()
            except BusError:
                await asyncio.sleep(OWNER_AGAIN_S)

    def _close_journal(self, at: int, told: Watermark | None = None) -> None:
        """`told`: where its own end is stored."""
        self.target = self.summary().target
        self.ended = True
        end = None if told is None else End(self.start.execution, told.ordinal, told.sequence, at)
        self._around.journal.set_ended(self.start.execution, at, self.summary(), end)
        self._controls.wake()
        self._around.changed()
