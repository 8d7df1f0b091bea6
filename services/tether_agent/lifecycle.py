"""What becomes of sandboxes between their starts: drains and deletes go on, wakes are finished, the idle are suspended.

The records say what is under way; a look at them every LOOK_S (and at once for what this service has begun) finds it,
whoever began it and whatever was killed since:

    draining   ─▶ asks the collector until it is over ─▶ the provider's proof ─▶ suspended, or deleting
    deleting   ─▶ the provider ends what is left ─▶ no record
    resuming   ─▶ compute, continuations ─▶ active (waking.py)
    active     ─▶ suspended where its collector was drained by the machine, or where its compute has ended otherwise and
                  everything of it is told; draining where it has been idle for so long

One task carries a sandbox at a time in this service; another service may carry the same: the verb has one control id,
every transition is a compare-and-set, and a provider ends only what it can identify.

The race of an idle suspend: a prompt that comes between the look and the order. The order is a compare-and-set on the
revision that was read before the look, and each start that is forwarded moves the revision on first.

The race of a sandbox whose compute has ended (the machine or its user stopped it): a start or a resume that brings it
back while it is written down as suspended. A start that finds it so wakes it, and a resume asks again; neither loses
more than a moment, since nothing is ended on the strength of that record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from tether import ids, subjects, tracing
from tether.control import Authority, ControlReply, ControlRequest
from tether.errors import BusError, Code, NoReplyError, problem
from tether.failpoints import failpoint
from tether.ports import Bus
from tether.sandbox import CAN_DRAIN, DrainOrder, DrainReport, ExecutionSummary, SandboxRecord
from tether_agent import metrics
from tether_agent.config import AgentSettings
from tether_agent.core import draining, idle
from tether_agent.core.draining import Ask, GiveUp, Over, Release
from tether_agent.core.sandbox import (
    ComputeEnded,
    Deleted,
    DrainedItself,
    DrainOrdered,
    DrainReported,
    Provisioned,
    Released,
    WakeFailed,
)
from tether_agent.providers import NotReadyError, Provider, ProvisionError, Status, Stopped
from tether_agent.providers.lost import open_executions
from tether_agent.records import Applied, MovedError, SandboxRecords
from tether_agent.waking import Waker, now_ms

LOOK_S: Final = 1.0
RECOUNT_S: Final = 60.0  # all records are read again: a bucket may have been put back to an older state
CARRIED_MAX: Final = 64  # sandboxes that are carried at once
DRAIN_REPLY_S: Final = 2.0
DRAIN_ASK_MIN_S: Final = 0.1
DRAIN_ASK_MAX_S: Final = 1.0
_log = structlog.get_logger("tether_agent")
Key = tuple[str, str]


class Lifecycle:
    """See the module's docstring."""

    def __init__(self, bus: Bus, provider: Provider, settings: AgentSettings) -> None:
        self._bus = bus
        self._provider = provider
        self._settings = settings
        self._sandboxes = SandboxRecords(bus)
        self._waker = Waker(bus, provider)
        self._known: dict[Key, tuple[SandboxRecord, int]] = {}  # a cache: whoever acts reads again
        self._read_up_to = 0
        self._read_all_at_s = float("-inf")
        self._carried: dict[Key, asyncio.Task[None]] = {}
        self._settled: dict[Key, int] = {}  # ended sandboxes whose reference was looked at, by revision
        self._look = asyncio.Event()

    def begun(self, applied: Applied) -> None:
        """Look at once: this service has written a record."""
        record = applied.record
        if record is not None and record.provider == self._provider.name:
            self._known[record.tenant, record.workspace] = (record, applied.revision)
        self._look.set()

    async def stopped(self, stopped: Sequence[Stopped]) -> None:
        """These were stopped without a drain: what is told to its end is suspended now, the rest by a later look."""
        statuses = {(each.tenant, each.workspace): each for each in self._provider.statuses()}
        for each in stopped:
            key = (each.tenant, each.workspace)
            status = statuses.get(key)
            try:
                record, revision = await self._sandboxes.read(*key)
                if record is not None and record.state == "active" and status is not None and status.ended:
                    await self._look_at_ended(record, revision, status)
            except (BusError, NotReadyError) as error:
                _log.info("sandbox_later", tenant=key[0], workspace=key[1], reason=str(error))

    async def run(self) -> None:
        """Until cancelled. What is carried then is gone on with by the next service."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._look.clear()
                try:
                    await self._read()
                    statuses = {(each.tenant, each.workspace): each for each in self._provider.statuses()}
                    for key, (record, revision) in list(self._known.items()):
                        await self._attend(group, record, revision, statuses.get(key))
                except (BusError, NotReadyError) as error:
                    _log.info("lifecycle_later", reason=str(error))
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._look.wait()
                except TimeoutError:
                    pass

    async def _read(self) -> None:
        """What was written since the last look; now and then everything. Raises BusError."""
        loop_s = asyncio.get_running_loop().time()
        if loop_s - self._read_all_at_s >= RECOUNT_S:
            self._known, self._read_up_to, self._read_all_at_s = {}, 0, loop_s
        async for entry, record in self._sandboxes.written_after(self._read_up_to):
            self._read_up_to = entry.revision
            if record.provider == self._provider.name:
                self._known[record.tenant, record.workspace] = (record, entry.revision)

    async def _attend(
        self, group: asyncio.TaskGroup, record: SandboxRecord, revision: int, status: Status | None
    ) -> None:
        """Raises BusError."""
        key = (record.tenant, record.workspace)
        if key in self._carried:
            return
        match record.state:
            case "draining" | "deleting" | "resuming":
                if len(self._carried) < CARRIED_MAX:
                    name = f"carry-{key[0]}.{key[1]}"
                    task = group.create_task(self._carry(key), name=name, context=tracing.detached())
                    self._carried[key] = task
                    task.add_done_callback(lambda _: self._put_down(key))
            case "active":
                if status is not None and status.ended:
                    await self._look_at_ended(record, revision, status)
                elif self._settings.agent_idle_s is not None:
                    await self._look_for_idle(record, revision, self._settings.agent_idle_s)
            case "provisioning" | "suspended":
                pass

    def _put_down(self, key: Key) -> None:
        self._carried.pop(key, None)
        self._look.set()

    # --- what is carried ---

    async def _carry(self, key: Key) -> None:
        """The task of one sandbox that is on its way: one stretch of it, the next look begins the next."""
        try:
            record, _ = await self._sandboxes.read(*key)
            match None if record is None else record.state:
                case "draining":
                    await self._drain(key)
                case "deleting":
                    await self._delete(key)
                case "resuming":
                    assert record is not None
                    await self._wake(record)
                case _:
                    pass
            record, revision = await self._sandboxes.read(*key)
            if record is None:
                self._known.pop(key, None)
            else:
                self._known[key] = (record, revision)
        except (BusError, NotReadyError, OSError) as error:  # OSError: the provider's own files, a full disk
            _log.info("sandbox_later", tenant=key[0], workspace=key[1], reason=str(error))
            await asyncio.sleep(DRAIN_ASK_MAX_S)

    async def _wake(self, record: SandboxRecord) -> None:
        key = (record.tenant, record.workspace)
        try:
            await self._waker.bring(record, await self._waker.kept(*key))
        except ProvisionError as error:
            _log.error("sandbox_not_woken", tenant=key[0], workspace=key[1], reason=error.problem.detail)
            await self._sandboxes.apply(*key, WakeFailed(now_ms()))

    async def _delete(self, key: Key) -> None:
        await self._provider.stop(*key)
        failpoint("agent.delete.stopped")
        applied = await self._sandboxes.apply(*key, Deleted(now_ms()))
        failpoint("agent.delete.removed")
        if applied.wrote:
            metrics.deletes.inc()
            _log.info("sandbox_deleted", tenant=key[0], workspace=key[1])

    async def _drain(self, key: Key) -> None:
        """Until the record is not draining any more. Raises BusError, NotReadyError."""
        heard_at, pause_s = 0, DRAIN_ASK_MIN_S
        while True:
            record, revision = await self._sandboxes.read(*key)
            match draining.following(record, heard_at, now_ms()):
                case Over():
                    return
                case Release(drain, boot):
                    await self._release(key, drain, boot)
                    return
                case GiveUp(report):
                    await self._report(key, report)
                    return
                case Ask(order):
                    assert record is not None
                    told = await self._ask(record, order, revision)
                    if told is None:
                        await asyncio.sleep(DRAIN_ASK_MAX_S)
                        continue
                    heard_at = now_ms()
                    await self._report(key, told)
                    if told.state == "running":
                        await asyncio.sleep(pause_s)
                        pause_s = min(DRAIN_ASK_MAX_S, pause_s * 1.5)

    async def _report(self, key: Key, report: DrainReport) -> None:
        applied = await self._sandboxes.apply(*key, DrainReported(report, now_ms()))
        if not applied.wrote or report.state == "running":
            return
        failpoint("agent.drain.reported")
        told = {"tenant": key[0], "workspace": key[1], "drain": report.drain}
        if report.state == "failed":
            purpose = applied.record.drained.purpose if applied.record and applied.record.drained else None
            metrics.drains.labels(purpose or "drain", "failed").inc()
            why = None if report.problem is None else report.problem.detail
            _log.error("drain_failed", **told, reason=why, unsaved=report.unsaved)
        else:
            _log.info("drain_kept", **told, executions=len(report.executions), revision=report.checkpoint_revision)

    async def _release(self, key: Key, drain: str, boot: str) -> None:
        gone = await self._provider.release(*key, boot)
        if gone is None:
            raise NotReadyError("its provider does not know the sandbox: another agent service releases it")
        failpoint("agent.drain.released")
        before, _ = await self._sandboxes.read(*key)
        applied = await self._sandboxes.apply(*key, Released(drain, now_ms()))
        failpoint("agent.drain.over")
        if applied.wrote and applied.record is not None:
            order = None if before is None else before.drain
            metrics.drains.labels("drain" if order is None else order.purpose, "done").inc()
            if order is not None and order.began_at:
                metrics.drain_seconds.observe(max(0.0, (now_ms() - order.began_at) / 1000))
            told = {"tenant": key[0], "workspace": key[1], "drain": drain}
            _log.info("sandbox_drained", **told, state=applied.record.state, proof=gone.proof, killed=gone.killed)

    async def _ask(self, record: SandboxRecord, order: DrainOrder, revision: int) -> DrainReport | None:
        """The collector's word, or what stands in its place; None where there is none now. Raises BusError."""
        registration = await self._sandboxes.registration(record.tenant, record.workspace, record.sandbox)
        if registration is not None and CAN_DRAIN not in registration.capabilities:
            return draining.failed(record, draining.cannot_drain())
        reply = None
        if registration is not None:
            if registration.boot != record.facts.get("boot"):  # what is released in the end is what answers
                facts = {**record.facts, "boot": registration.boot}
                key = (record.tenant, record.workspace)
                revision = (await self._sandboxes.apply(*key, Provisioned(facts, now_ms(), drains=True))).revision
            reply = await self._request(record, order, revision)
        failpoint("agent.drain.asked")
        if reply is not None:
            try:
                report = draining.report_of(record, reply)
            except ValueError as error:
                report = draining.failed(record, problem(Code.CHECKPOINT_FAILED, f"the reply is no report: {error}"))
            if report is not None:
                return report
        return await self._make_sure(record)

    async def _request(self, record: SandboxRecord, order: DrainOrder, revision: int) -> ControlReply | None:
        request = ControlRequest(
            control=ids.drain_control_id(record.tenant, record.workspace, order.drain),
            verb="drain",
            authority=Authority(kind="sandbox", holder="agent-service", token=revision),
            payload=order.model_dump(mode="json"),
        )
        subject = subjects.control(record.tenant, record.workspace, "drain")
        data = request.model_dump_json(exclude_none=True).encode()
        try:
            with tracing.scope("control drain", kind="client"):
                answer = await self._bus.request(subject, data, timeout_s=DRAIN_REPLY_S, headers=tracing.outgoing())
            return ControlReply.model_validate_json(answer.data)
        except (NoReplyError, ValueError):
            return None

    async def _make_sure(self, record: SandboxRecord) -> DrainReport | None:
        """No word: is its collector there? Raises BusError."""
        try:
            compute = await self._provider.ensure(record.tenant, record.workspace)
        except NotReadyError as error:
            _log.info("drain_waits", tenant=record.tenant, workspace=record.workspace, reason=str(error))
        except ProvisionError as error:
            return draining.failed(record, error.problem)
        else:
            if record.facts != dict(compute.facts):
                await self._sandboxes.apply(
                    record.tenant, record.workspace, Provisioned(compute.facts, now_ms(), drains=True)
                )
        return None

    # --- what is active ---

    async def _look_at_ended(self, record: SandboxRecord, revision: int, status: Status) -> None:
        """Nothing of it runs, and no drain of ours ended it. Raises BusError, NotReadyError."""
        key = (record.tenant, record.workspace)
        if self._settled.get(key) != revision and record.facts.get("boot") == status.boot:
            if await self._look_for_drain(record, revision, status):
                return
            self._settled[key] = revision
        if not status.lost:
            await self._suspend_ended(key, revision)

    async def _suspend_ended(self, key: Key, revision: int) -> None:
        """Unless something of it is not told yet, or work waits that wakes it. Raises BusError, NotReadyError."""
        if await open_executions(self._bus, *key) or await work_waits(self._bus, *key):
            return
        now = [each for each in self._provider.statuses() if (each.tenant, each.workspace) == key]
        if not any(each.ended for each in now):
            return  # somebody has begun to bring it back
        try:
            applied = await self._sandboxes.apply(*key, ComputeEnded(now_ms()), expect=revision)
        except MovedError:
            return  # the next look reads it anew
        if applied.wrote and applied.record is not None:
            self._known[key] = (applied.record, applied.revision)
            _log.info("sandbox_suspended", tenant=key[0], workspace=key[1], cause="ended")

    async def _look_for_drain(self, record: SandboxRecord, revision: int, status: Status) -> bool:
        """Was it drained by the machine? Raises BusError, NotReadyError."""
        key = (record.tenant, record.workspace)
        kept = await self._waker.kept(*key)
        reference = kept.reference
        if reference is None or reference.boot != status.boot:
            return False
        report = DrainReport(
            drain=reference.drain,
            state="done",
            phase="over",
            purpose="drain",
            executions=reference.executions,
            checkpoint=reference,
            checkpoint_revision=kept.revision,
        )
        try:
            await self._sandboxes.apply(*key, DrainedItself(status.boot, report, now_ms()), expect=revision)
        except MovedError:
            return True  # the next look reads it anew
        _log.info("sandbox_suspended", tenant=key[0], workspace=key[1], drain=reference.drain, cause="machine")
        return True

    async def _look_for_idle(self, record: SandboxRecord, revision: int, idle_s: float) -> None:
        """Raises BusError."""
        at = now_ms()
        if record.wanted_at + idle_s * 1000 >= at:
            return  # without a look at anything else
        tenant, workspace, waiting = record.tenant, record.workspace, self._settings.agent_idle_waiting
        registration = await self._sandboxes.registration(tenant, workspace, record.sandbox)
        if registration is None or CAN_DRAIN not in registration.capabilities:
            return
        quiet_since = None
        if waiting and idle.waits_only(registration):
            quiet_since = await self._quiet_since(registration.executions)
        seen = idle.Seen(registration, at, quiet_since)
        if not idle.is_idle(record, seen, idle_s=idle_s, waiting=waiting):
            return
        if await work_waits(self._bus, tenant, workspace):
            return
        order = DrainOrder(
            drain=ids.new_id("drain"),
            purpose="suspend",
            reason="idle",
            grace_s=self._settings.agent_drain_grace_s,
            store=self._settings.agent_checkpoint_store,
            include=self._settings.agent_checkpoint_include,
            began_at=at,
        )
        failpoint("agent.drain.idle")
        try:
            applied = await self._sandboxes.apply(tenant, workspace, DrainOrdered(order, at), expect=revision)
        except MovedError:
            return  # somebody wanted it: it is not idle
        failpoint("agent.drain.ordered")
        metrics.idle_suspends.inc()
        _log.info("sandbox_idle", tenant=tenant, workspace=workspace, drain=order.drain, idle_s=idle_s)
        self.begun(applied)

    async def _quiet_since(self, executions: Sequence[ExecutionSummary]) -> int | None:
        """When the log of these was last written (unix ms); None where it is not known. Raises BusError."""
        newest = 0
        for summary in executions:
            target = summary.target
            if summary.state == "ended":
                continue
            subject = subjects.event(target.tenant, target.workspace, target.conversation, target.execution)
            last = await self._bus.last(subjects.events_stream(target.tenant), subject)
            if last is None:
                return None
            newest = max(newest, last.stored_at_ns // 1_000_000)
        return newest or None


async def work_waits(bus: Bus, tenant: str, workspace: str) -> bool:
    """A prompt or a command of the workspace is stored. Raises BusError."""
    prompts = subjects.prompt(tenant, workspace, "x")[:-1] + "*"
    if await bus.next_after(subjects.PROMPTS_STREAM, 0, prompts) is not None:
        return True
    command = subjects.command(tenant, workspace)
    return await bus.next_after(subjects.COMMANDS_STREAM, 0, command) is not None
