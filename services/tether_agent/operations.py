"""Answers to drain, suspend, delete, drain-status and resume (`requests` gives their shapes).

Each writes its order into the sandbox's record by compare-and-set, and answers what the record says then; `lifecycle`
does the rest, here or wherever the record is seen. So an answer that is lost loses nothing: the same request again
joins what it began.

Suspend and a delete that saves nothing look before they order: at executions, at prompts that wait, at the compute. The
order counts on exactly the revision that was read before that look, so a start that came in between has it looked
at again.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from tether.blobs import read_blob
from tether.checkpoint import CheckpointReference, decode_manifest
from tether.deletion import ForgetPayload
from tether.errors import BusError, Code, InvalidError, Problem, ProblemError, problem
from tether.events import BlobRef
from tether.failpoints import failpoint
from tether.ids import ExecutionTarget
from tether.limits import CHECKPOINT_MANIFEST_BYTES_MAX
from tether.ports import Bus
from tether.sandbox import CAN_DRAIN, DrainOrder, DrainReport, SandboxRecord, no_sandbox
from tether_agent import log
from tether_agent.config import AgentSettings
from tether_agent.core import draining, idle
from tether_agent.core.sandbox import ConversationForgotten, DeleteOrdered, DrainOrdered, Purpose, joins, told_of
from tether_agent.lifecycle import Lifecycle, work_waits
from tether_agent.providers import NotReadyError, Provider, ProvisionError
from tether_agent.providers.lost import open_executions
from tether_agent.records import Applied, MovedError, SandboxRecords
from tether_agent.requests import (
    Answer,
    DeleteRequest,
    DrainRequest,
    DrainStatusRequest,
    ForgetRequest,
    Handling,
    ResumeRequest,
    SuspendRequest,
    parse,
)
from tether_agent.waking import Kept, Waker, now_ms

ENSURE_S: Final = 8.0  # a resume waits so long for the collector, within what its caller waits for the answer
ENSURE_AGAIN_S: Final = 0.25
_ROUNDS_MAX: Final = 8  # of records that moved on under a look
_BUSY_MAX: Final = 16  # executions that a refusal names
_RETRY_S: Final = 1.0
NOT_KEPT: Final = "it was deleted without a checkpoint, as asked"
NO_CHECKPOINT: Final = "there is no checkpoint of it"
_log = structlog.get_logger("tether_agent")


class Operations:
    """See the module's docstring."""

    def __init__(self, bus: Bus, provider: Provider, lifecycle: Lifecycle, settings: AgentSettings) -> None:
        self._bus = bus
        self._provider = provider
        self._lifecycle = lifecycle
        self._settings = settings
        self._sandboxes = SandboxRecords(bus)
        self._waker = Waker(bus, provider)

    @property
    def handlers(self) -> dict[str, Handling]:
        """By verb, for `Requests`."""
        verbs = {
            "drain": self.drain,
            "suspend": self.suspend,
            "delete": self.delete,
            "drain-status": self.status,
            "resume": self.resume,
            "forget": self.forget,
        }
        return {verb: _guarded(handler) for verb, handler in verbs.items()}

    async def drain(self, data: bytes) -> Answer:
        request = parse(DrainRequest, data)
        known = await self._known(request)
        if isinstance(known, dict):
            return known
        record, _ = known
        joined = joins(record, request.drain_id)
        if not joined and record.state == "active":
            await self._check_can_drain(record)
        applied = await self._order(request, "drain", None)
        return self._told(applied, request.drain_id, joined or not applied.wrote)

    async def suspend(self, data: bytes) -> Answer:
        request = parse(SuspendRequest, data)
        for _ in range(_ROUNDS_MAX):
            known = await self._known(request)
            if isinstance(known, dict):
                return known
            record, revision = known
            if not joins(record, request.drain_id) and record.state == "active":
                await self._check_can_drain(record)
                if not request.force:
                    await self._check_idle(record)
            try:
                applied = await self._order(request, "suspend", None if request.force else revision)
            except MovedError:
                continue
            return self._told(applied, request.drain_id, not applied.wrote)
        raise NotReadyError("the sandbox's record changes too fast")

    async def delete(self, data: bytes) -> Answer:
        request = parse(DeleteRequest, data)
        for _ in range(_ROUNDS_MAX):
            known = await self._known(request)
            if isinstance(known, dict):
                return known
            record, revision = known
            running = record.drain if record.state in ("draining", "deleting") else None
            if (
                running is not None
                and running.purpose == "delete"
                and (request.checkpoint or record.state == "deleting")
            ):
                return self._told(Applied(record, revision, wrote=False), request.drain_id, joined=True)
            try:
                applied = await self._delete(request, record, revision)
            except MovedError:
                continue
            return self._told(applied, request.drain_id, not applied.wrote)
        raise NotReadyError("the sandbox's record changes too fast")

    async def status(self, data: bytes) -> Answer:
        request = parse(DrainStatusRequest, data)
        record, _ = await self._sandboxes.read(request.tenant, request.workspace)
        report = None
        if record is not None:
            report = record.drained if request.drain_id is None else told_of(record, request.drain_id)
        if record is None or report is None:
            report = report or await self._made_by(request.tenant, request.workspace, request.drain_id)
        if report is not None:
            return _answer(report, "deleted" if record is None else record.state, joined=False)
        raise ProblemError(no_sandbox() if record is None else _no_operation())

    async def resume(self, data: bytes) -> Answer:
        request = parse(ResumeRequest, data)
        applied = await self._waker.woken(request.tenant, request.workspace)
        self._lifecycle.begun(applied)
        assert applied.record is not None
        record, woken = applied.record, applied.wrote and applied.record.state == "resuming"
        kept = await self._waker.kept(request.tenant, request.workspace)
        reference = kept.reference
        if record.state == "active" and record.provider == self._provider.name:
            record, woken = await self._made_sure(record, kept)
        shown = None if reference is None else reference.model_dump(mode="json", exclude_none=True)
        return {
            "state": record.state,
            "woken": woken,
            "checkpoint": shown,
            "checkpoint_revision": record.checkpoint_revision,
        }

    async def _made_sure(self, record: SandboxRecord, kept: Kept) -> tuple[SandboxRecord, bool]:
        """The record says active: its compute is there when this returns, or is on its way; and whether this request
        brought it. Raises NotReadyError, ProblemError, BusError."""
        waits_for: NotReadyError | None = None
        try:
            async with asyncio.timeout(ENSURE_S):
                while True:
                    try:
                        applied = await self._waker.bring(record, kept)
                        return applied.record or record, applied.wrote
                    except NotReadyError as error:
                        waits_for = error
                    found, _ = await self._found(record.tenant, record.workspace)
                    if found.state != "active":  # it was suspended meanwhile, or is on another way
                        again = await self._waker.woken(record.tenant, record.workspace)
                        self._lifecycle.begun(again)
                        return again.record or found, again.wrote
                    await asyncio.sleep(ENSURE_AGAIN_S)
        except TimeoutError:
            if waits_for is not None:
                raise waits_for from None
            return record, False  # it is being started: its registration tells when it is there
        except ProvisionError as error:
            raise ProblemError(error.problem) from None

    async def forget(self, data: bytes) -> Answer:
        """The sandbox's record first: it may tell of the conversation's executions, whatever becomes of the volume."""
        request = parse(ForgetRequest, data)
        event = ConversationForgotten(request.conversation, now_ms())
        await self._sandboxes.apply(request.tenant, request.workspace, event)
        payload = ForgetPayload(deletion=request.deletion, conversation=request.conversation, sessions=request.sessions)
        done = await self._provider.forget(request.tenant, request.workspace, payload)
        return done.model_dump(mode="json")

    # --- orders ---

    def _of(self, request: DrainRequest, purpose: Purpose) -> DrainOrder:
        settings = self._settings
        return DrainOrder(
            drain=request.drain_id,
            purpose=purpose,
            reason=request.reason,
            grace_s=settings.agent_drain_grace_s if request.grace_s is None else request.grace_s,
            store=request.store or settings.agent_checkpoint_store,
            include=request.include or settings.agent_checkpoint_include,
            began_at=now_ms(),
        )

    async def _order(self, request: DrainRequest, purpose: Purpose, expect: int | None) -> Applied:
        """Raises MovedError, NotReadyError, ProblemError, BusError."""
        event = DrainOrdered(self._of(request, purpose), now_ms())
        applied = await self._sandboxes.apply(request.tenant, request.workspace, event, expect=expect)
        if applied.wrote:
            failpoint("agent.drain.ordered")
            where = {"tenant": request.tenant, "workspace": request.workspace}
            _log.info("drain_ordered", **where, drain=request.drain_id, purpose=purpose)
            self._lifecycle.begun(applied)
        return applied

    async def _delete(self, request: DeleteRequest, record: SandboxRecord, revision: int) -> Applied:
        """Raises MovedError, NotReadyError, ProblemError, BusError."""
        over = record.state == "active" and self._ended(record)
        if record.state == "active" and request.checkpoint and not over:
            await self._check_can_drain(record)
            return await self._order(request, "delete", revision)
        report = await self._existing(request, record)
        event = DeleteOrdered(self._of(request, "delete"), report, now_ms(), checkpoint=request.checkpoint, over=over)
        applied = await self._sandboxes.apply(request.tenant, request.workspace, event, expect=revision)
        if applied.wrote:
            failpoint("agent.delete.ordered")
            where = {"tenant": request.tenant, "workspace": request.workspace}
            _log.info("delete_ordered", **where, drain=request.drain_id, unsaved=report.unsaved)
            self._lifecycle.begun(applied)
        return applied

    def _ended(self, record: SandboxRecord) -> bool:
        """The provider says that nothing of it runs."""
        statuses = self._provider.statuses()
        return any(
            each.ended and (each.tenant, each.workspace) == (record.tenant, record.workspace) for each in statuses
        )

    async def _existing(self, request: DeleteRequest, record: SandboxRecord) -> DrainReport:
        """The checkpoint that stays, verified where it is relied on. Raises ProblemError, BusError."""
        kept = await self._waker.kept(record.tenant, record.workspace)
        reference = kept.reference
        unsaved = None if reference is not None else NO_CHECKPOINT
        if record.state in ("active", "draining") and not request.checkpoint:
            unsaved = NOT_KEPT
        elif reference is not None and request.checkpoint:
            await self._verify(reference)
        return DrainReport(
            drain=request.drain_id,
            state="running",
            phase="releasing",
            purpose="delete",
            reason=request.reason or None,
            checkpoint=reference,
            checkpoint_revision=kept.revision,
            unsaved=unsaved,
        )

    async def _verify(self, reference: CheckpointReference) -> None:
        """The manifest is there, and is the one that is named. Raises ProblemError, BusError."""
        tenant, workspace = reference.tenant, reference.workspace
        data = None
        if reference.stored != "blobs":
            data = await self._provider.manifest(tenant, workspace, reference.checkpoint)
        if data is None and reference.stored != "volume":
            named = BlobRef(digest=reference.manifest, bytes=reference.manifest_bytes, kind="checkpoint")
            data = await read_blob(self._bus, tenant, workspace, named, bytes_max=CHECKPOINT_MANIFEST_BYTES_MAX)
        why = "its manifest is not to be found"
        if data is not None:
            try:
                decode_manifest(data, reference)
            except InvalidError as error:
                why = f"{error.field} {error.remedy}"
            else:
                return
        detail = f"the checkpoint {reference.checkpoint} cannot be read: {why}; `checkpoint: false` deletes without it"
        raise ProblemError(problem(Code.CHECKPOINT_FAILED, detail, retryable=False))

    # --- looks ---

    async def _found(self, tenant: str, workspace: str) -> tuple[SandboxRecord, int]:
        """Raises ProblemError, NotReadyError, BusError."""
        record, revision = await self._sandboxes.read(tenant, workspace)
        if record is None:
            raise ProblemError(no_sandbox())
        return record, revision

    async def _made_by(self, tenant: str, workspace: str, drain: str | None) -> DrainReport | None:
        """The record went on since that drain, or is deleted: what it made is told of still. Raises BusError."""
        kept = None if drain is None else await self._waker.kept_by(tenant, workspace, drain)
        return None if kept is None or kept.reference is None else _report_of(kept, kept.reference)

    async def _known(self, request: DrainRequest) -> tuple[SandboxRecord, int] | Answer:
        """The record and its revision; or the answer, where this id began an operation that is over, and others came
        after it, or the sandbox is deleted: it does not begin again, and joins none of theirs. Raises ProblemError,
        NotReadyError, BusError."""
        record, revision = await self._sandboxes.read(request.tenant, request.workspace)
        last = None if record is None else record.drained
        if record is not None and last is not None and last.drain == request.drain_id:
            return record, revision
        report = None if record is None else told_of(record, request.drain_id)
        if report is None:
            report = await self._made_by(request.tenant, request.workspace, request.drain_id)
        if report is not None:
            return _answer(report, "deleted" if record is None else record.state, joined=True)
        if record is None:
            raise ProblemError(no_sandbox())
        return record, revision

    async def _check_can_drain(self, record: SandboxRecord) -> None:
        """Raises ProblemError where its collector is known not to. One that is away is found out about later."""
        registration = await self._sandboxes.registration(record.tenant, record.workspace, record.sandbox)
        if registration is not None and CAN_DRAIN not in registration.capabilities:
            raise ProblemError(draining.cannot_drain())

    async def _check_idle(self, record: SandboxRecord) -> None:
        """Raises ProblemError (SESSION_BUSY) naming who is active; BusError. Records and registration lag behind an
        end; the log does not."""
        tenant, workspace = record.tenant, record.workspace
        found: dict[str, tuple[ExecutionTarget, str]] = {}
        for target in await open_executions(self._bus, tenant, workspace):
            found[target.execution] = (target, "open")
        registration = await self._sandboxes.registration(tenant, workspace, record.sandbox)
        for target, state in [] if registration is None else idle.living(registration):
            found[target.execution] = (target, state)
        busy = {
            name: {"conversation": target.conversation, "execution": name, "state": state}
            for name, (target, state) in found.items()
            if not await log.has_ended(self._bus, target)
        }
        if not busy and not await work_waits(self._bus, tenant, workspace):
            return
        who = list(busy.values())[:_BUSY_MAX]
        detail = ", ".join(f"{each['conversation']} ({each['state']})" for each in who) or "a prompt that waits"
        why = problem(Code.SESSION_BUSY, f"the sandbox is busy: {detail}; `force` cuts them", executions=who)
        raise ProblemError(why)

    def _told(self, applied: Applied, drain: str, joined: bool) -> Answer:
        record = applied.record
        assert record is not None
        report = record.drained
        if report is None:
            # Suspended before this version wrote reports: there is nothing to drain, and what is kept is kept.
            report = DrainReport(drain=drain, state="done", phase="over")
        return _answer(report, record.state, joined=joined)


def _is_deleting(record: SandboxRecord) -> bool:
    """A drain runs for a delete."""
    return record.state == "draining" and record.drain is not None and record.drain.purpose == "delete"


def _answer(report: DrainReport, state: str, *, joined: bool) -> Answer:
    shown = report.model_dump(mode="json", exclude_none=True)
    return {"report": shown, "purpose": report.purpose or "drain", "state": state, "joined": joined}


def _no_operation() -> Problem:
    remedy = "the last one, and of those before it the last eight that made a checkpoint or failed, are known"
    return problem(Code.NOT_FOUND, f"drain_id: the sandbox knows of no such operation; {remedy}")


def _report_of(kept: Kept, reference: CheckpointReference) -> DrainReport:
    return DrainReport(
        drain=reference.drain,
        state="done",
        phase="over",
        executions=reference.executions,
        checkpoint=reference,
        checkpoint_revision=kept.revision,
    )


def _guarded(handler: Handling) -> Handling:
    """What is not possible now is an answer too."""

    async def answer(data: bytes) -> Answer:
        found: Problem
        try:
            return await handler(data)
        except NotReadyError as error:
            code = Code.DRAINING if error.soon else Code.RUNTIME_UNAVAILABLE
            found = problem(code, str(error), retry_after_s=_RETRY_S)
        except BusError as error:
            found = problem(Code.RUNTIME_UNAVAILABLE, f"the bus: {error.detail}", retry_after_s=_RETRY_S)
        raise ProblemError(found)

    return answer
