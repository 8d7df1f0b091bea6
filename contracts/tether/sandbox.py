"""Sandboxes on the bus: the life-cycle record, the registration of a collector, its capabilities."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from tether.checkpoint import CheckpointReference, DrainedExecution, Include, Store
from tether.errors import Code, FieldProblem, Problem, problem
from tether.events import GapReason
from tether.ids import ExecutionTarget, Token
from tether.limits import DRAIN_GRACE_MAX_S, DRAIN_GRACE_S

CAN_SNAPSHOT: Final = "executionSnapshotAttach"
CAN_STOP_TARGET: Final = "executionTargetStopV1"
CAN_FALL_BACK: Final = "executionNativeHistoryFallbackV1"
CAN_DRAIN: Final = "sandboxDrainV1"

FAILED_MAX: Final = 8  # reports of failed drains in a record, as many as the bucket keeps references

SandboxState = Literal["provisioning", "active", "draining", "suspended", "resuming", "deleting"]
ExecutionState = Literal["starting", "running", "waiting", "exiting", "ended"]


class DrainOrder(BaseModel):
    """A drain that was decided: the operation that `draining` stands for, and the payload of the verb `drain`.

    `purpose`: `drain` and `suspend` end in `suspended`, `delete` in no record. `grace_s`: until everything is killed;
    DRAIN_TURN_SHARE of it is the turn's that is under way. `began_at` in unix milliseconds.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    drain: Token
    purpose: Literal["drain", "suspend", "delete"] = "drain"
    reason: Annotated[str, Field(max_length=256)] = ""
    grace_s: Annotated[float, Field(ge=0, le=DRAIN_GRACE_MAX_S)] = DRAIN_GRACE_S
    store: Store = "volume"
    include: Include = "sessions"
    began_at: int = 0


class DrainReport(BaseModel):
    """How a drain stands, as the collector's reply and as the operation that callers see. `state` is final in `done`
    and `failed`; `phase` says what it waits for. `purpose` and `reason` are the order's, as the agent service keeps
    them. `problem` where it failed; `unsaved` says what was not kept."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    drain: Token
    state: Literal["running", "done", "failed"]
    phase: Literal["turn", "leaving", "killing", "publishing", "checkpoint", "releasing", "over"] = "turn"
    purpose: Literal["drain", "suspend", "delete"] | None = None
    reason: Annotated[str, Field(max_length=256)] | None = None
    executions: tuple[DrainedExecution, ...] = ()
    checkpoint: CheckpointReference | None = None
    checkpoint_revision: int = 0
    problem: Problem | None = None
    unsaved: str | None = None


class SandboxRecord(BaseModel):
    """`tether_sandboxes/{tenant}.{workspace}`: written by the agent service only, by compare-and-set.

    `starts` grows with every start that is forwarded, so that a drain decided on an older revision loses.
    `facts` are the provider's (pid, pod, …); they identify, they prove nothing by themselves.
    `drain` is the order while `draining`; `drained` what the last one came to, for those who ask again; `failed` what
    earlier ones came to that failed, without messages: of those that went well the checkpoint's references tell.
    `checkpoint_revision`: of the reference that a resume goes on from, 0 where there is none. `wanted_at`: when the
    last prompt or resume asked for it (unix ms), which with the collector's `idle_since` makes the idle clock.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1] = 1
    op: str = ""
    tenant: Token
    workspace: Token
    sandbox: Token
    state: SandboxState
    provider: str
    starts: int = 0
    facts: dict[str, Any] = Field(default_factory=dict)
    drain: DrainOrder | None = None
    drained: DrainReport | None = None
    failed: Annotated[tuple[DrainReport, ...], Field(max_length=FAILED_MAX)] = ()
    checkpoint_revision: int = 0
    wanted_at: int = 0
    updated_at: int = 0

    def value(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True, exclude={"op"})


def no_sandbox() -> Problem:
    """Of a workspace, in one wording whoever is asked."""
    remedy = "there is no sandbox of it; a first message makes one, and the list of sandboxes names those there are"
    fields = (FieldProblem(field="workspace", remedy=remedy),)
    return problem(Code.NOT_FOUND, f"workspace: {remedy}", fields=fields)


class ExecutionSummary(BaseModel):
    """One execution in a registration: its identity, where it stands, and what waits for a human.

    `gap`: it has ended and its final snapshot is not to be had: `retention_gap` (deleted before its time, for a quota),
    `durability_gap` (it could not be written)."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    target: ExecutionTarget
    state: ExecutionState
    last_ordinal: int = 0
    pending_interactions: int = 0
    started_at: int = 0
    gap: GapReason | None = None


class Registration(BaseModel):
    """`tether_sandboxes/{tenant}.{workspace}.{sandbox}`, with a TTL: written by the collector alone.

    `boot` is drawn when the sandbox starts, `instance` at each start of the collector; capabilities are bound to
    the instance. `executions_omitted` says how many did not fit. `idle_since`: when the last execution ended or, where
    there was none, the sandbox began (unix ms); None while one lives. `draining`: the drain under way.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1] = 1
    op: str = ""
    tenant: Token
    workspace: Token
    sandbox: Token
    boot: Token
    instance: Token
    capabilities: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    facts: dict[str, Any] = Field(default_factory=dict)
    executions: tuple[ExecutionSummary, ...] = ()
    executions_omitted: int = 0
    version: str = ""
    idle_since: int | None = None
    draining: Token | None = None
    updated_at: int = 0

    def value(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True, exclude={"op"})
