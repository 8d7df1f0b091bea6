"""The HTTP API of sandboxes as types: a sandbox, its checkpoint, and the operations drain, suspend, resume and delete.

    POST /v1/sandboxes/{workspace}/drain | suspend     202 DrainView: what began, or what was joined
    DELETE /v1/sandboxes/{workspace}                    202 DrainView
    GET /v1/sandboxes/{workspace}/drains/{drain_id}    200 DrainView: how it stands, final in `done` and `failed`
    POST /v1/sandboxes/{workspace}/resume              202 ResumeView

An operation is named by its `drain_id`: the same id again, over whatever way, joins it and has no second effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from tether.checkpoint import CheckpointReference, DrainedExecution, Include, Store
from tether.errors import Problem
from tether.ids import Token
from tether.limits import DRAIN_GRACE_MAX_S
from tether.sandbox import DrainOrder, DrainReport, ExecutionSummary, Registration, SandboxRecord, SandboxState

REASON_CHARS_MAX: Final = 256
Purpose = Literal["drain", "suspend", "delete"]
_KEPT: Final = {"checkpoint", "created_at", "clean", "include", "stored", "size_bytes", "files"}


class _In(BaseModel):
    """A request's body: unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _Out(BaseModel):
    """An answer: readers ignore fields that they do not know."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class DrainRequest(_In):
    """The body of drain; it may be left out. The same `drain_id` joins the operation, also after its end; without one
    a new one is made and told. `grace_s`: until everything is killed, of which a turn under way has its share. `store`:
    where the checkpoint goes, `include`: what of the workspace is in it; left out, as the service is configured."""

    drain_id: Token | None = None
    grace_s: Annotated[float, Field(ge=0, le=DRAIN_GRACE_MAX_S, allow_inf_nan=False)] | None = None
    reason: Annotated[str, Field(max_length=REASON_CHARS_MAX)] | None = None
    store: Store | None = None
    include: Include | None = None


class SuspendRequest(DrainRequest):
    """The body of suspend; it may be left out. SESSION_BUSY where something runs or waits there, unless `force`."""

    force: bool = False


class DeleteRequest(DrainRequest):
    """What a delete is asked with (over HTTP as query). It drains first; `checkpoint` false ends it without one."""

    checkpoint: bool = True


class ResumeRequest(_In):
    """The body of resume: it has no fields, and may be left out."""


class CheckpointView(_Out):
    """What was kept of a sandbox. `include`: `sessions` (the agents' session files, journal and recovery material) or
    `workspace` (the user's files, too); what is not included comes back with the volume only. `clean`: nothing was
    killed for it. `stored`: where it lies. `revision`: of its reference, the token of a resume."""

    checkpoint: str
    created_at: int
    clean: bool
    include: Include
    stored: Store
    size_bytes: int
    files: int
    revision: int = 0

    @staticmethod
    def of(reference: CheckpointReference, revision: int = 0) -> CheckpointView:
        return CheckpointView(**reference.model_dump(include=_KEPT), revision=revision)


class DrainView(_Out):
    """A drain, suspend or delete as an operation. `state` is final in `done` and `failed`; `phase` says what it waits
    for. `reason`: as it was given. `executions`: what became of each (`completed`, `graceful`, `forced`,
    `checkpoint_failed`). `joined`: it ran before this request; `drain` is then the running one's id, also where another
    was asked for. `problem` where it failed, `unsaved`: what was not kept. `sandbox_state`: the sandbox's own, or
    `deleted`."""

    workspace: str
    drain: str
    state: Literal["running", "done", "failed"]
    phase: str
    purpose: Purpose | None = None
    reason: str | None = None
    joined: bool = False
    sandbox_state: str | None = None
    executions: list[DrainedExecution] = Field(default_factory=list)
    checkpoint: CheckpointView | None = None
    problem: Problem | None = None
    unsaved: str | None = None

    @property
    def is_final(self) -> bool:
        return self.state != "running"

    @staticmethod
    def of(workspace: str, report: DrainReport) -> DrainView:
        reference = report.checkpoint
        return DrainView(
            workspace=workspace,
            drain=report.drain,
            state=report.state,
            phase=report.phase,
            purpose=report.purpose,
            reason=report.reason,
            executions=list(report.executions),
            checkpoint=None if reference is None else CheckpointView.of(reference, report.checkpoint_revision),
            problem=report.problem,
            unsaved=report.unsaved,
        )


class ResumeView(_Out):
    """A resume. `state`: `resuming` until its collector is there, then `active`. `woken`: this very request woke it.
    `checkpoint`: what it goes on from."""

    workspace: str
    state: SandboxState
    woken: bool
    checkpoint: CheckpointView | None = None


class SandboxView(_Out):
    """A sandbox: its life-cycle record and, where its collector is registered, what that says.

    `drain`: the order that it is draining by. `drained`: what the last drain came to. `checkpoint`: what a resume goes
    on from. `idle_since`: since when nothing has run there (unix milliseconds), None while something does.
    """

    workspace: str
    sandbox: str
    state: SandboxState
    provider: str
    connected: bool
    boot: str | None = None
    capabilities: list[str] = Field(default_factory=list)
    agents: list[str] = Field(default_factory=list)
    executions: list[ExecutionSummary] = Field(default_factory=list)
    executions_omitted: int = 0
    version: str | None = None
    drain: DrainOrder | None = None
    drained: DrainView | None = None
    checkpoint: CheckpointView | None = None
    idle_since: int | None = None
    updated_at: int = 0

    @property
    def living(self) -> int:
        """How many executions live; of those that the registration had no room for it is not known, so they count."""
        return sum(one.state != "ended" for one in self.executions) + self.executions_omitted

    @staticmethod
    def of(
        record: SandboxRecord, registration: Registration | None, checkpoint: CheckpointView | None = None
    ) -> SandboxView:
        if record.state == "suspended":
            registration = None  # left over, until it expires: its collector has ended, as the record says
        view = SandboxView(
            workspace=record.workspace,
            sandbox=record.sandbox,
            state=record.state,
            provider=record.provider,
            connected=registration is not None,
            drain=record.drain if record.state in ("draining", "deleting") else None,
            drained=None if record.drained is None else DrainView.of(record.workspace, record.drained),
            checkpoint=checkpoint,
            updated_at=record.updated_at,
        )
        if registration is None:
            return view
        told = {
            "boot": registration.boot,
            "capabilities": list(registration.capabilities),
            "agents": list(registration.agents),
            "executions": list(registration.executions),
            "executions_omitted": registration.executions_omitted,
            "version": registration.version,
            "idle_since": registration.idle_since,
        }
        return view.model_copy(update=told)


class SandboxList(_Out):
    sandboxes: list[SandboxView]


def views_of(
    records: Iterable[SandboxRecord],
    registrations: Iterable[Registration],
    checkpoints: Iterable[tuple[CheckpointReference, int]],
) -> list[SandboxView]:
    """One view per record, by workspace. `checkpoints`: references with their revisions."""
    registered = {one.sandbox: one for one in registrations}
    kept = {one.workspace: CheckpointView.of(one, revision) for one, revision in checkpoints}
    ordered = sorted(records, key=lambda record: record.workspace)
    return [SandboxView.of(one, registered.get(one.sandbox), kept.get(one.workspace)) for one in ordered]
