"""Sandboxes on the bus: the life-cycle record, the registration of a collector, its capabilities."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from tether.events import GapReason
from tether.ids import ExecutionTarget, Token

CAN_SNAPSHOT: Final = "executionSnapshotAttach"
CAN_STOP_TARGET: Final = "executionTargetStopV1"
CAN_FALL_BACK: Final = "executionNativeHistoryFallbackV1"

SandboxState = Literal["provisioning", "active", "draining", "suspended", "resuming", "deleting"]
ExecutionState = Literal["starting", "running", "waiting", "exiting", "ended"]


class SandboxRecord(BaseModel):
    """`tether_sandboxes/{tenant}.{workspace}`: written by the agent service only, by compare-and-set.

    `starts` grows with every start that is forwarded, so that a drain decided on an older revision loses.
    `facts` are the provider's (pid, pod, …); they identify, they prove nothing by themselves.
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
    updated_at: int = 0

    def value(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True, exclude={"op"})


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
    the instance. `executions_omitted` says how many did not fit.
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
    updated_at: int = 0

    def value(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True, exclude={"op"})
