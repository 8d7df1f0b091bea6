"""Quotas: what a tenant, and each of its workspaces, may use; who enforces which; how a refusal is worded.

    prompts_per_minute   backend     a bucket that refills evenly; refused before anything is stored
    waiting_prompts      backend     prompts that are stored and not admitted yet
    stored_bytes         backend     of the tenant's log and blobs; new prompts are refused, running ones go on
    readers              backend     open event streams (SSE and WebSocket) of one backend process
    running_executions   router      whatever way a prompt came: beyond, it waits its turn
    events_per_s         collector   a CLI that says more is slowed down, nothing is lost
    event_bytes_per_s    collector   likewise, of what goes to the log

0 is no limit. A value comes from the tenant's table of the quotas file, else from its `default`, else from the
service's own setting. Each service reads the same file and takes what it enforces:

    [default]
    prompts_per_minute = 600

    [tenants.acme]
    running_executions = 8
    workspace = { running_executions = 2, events_per_s = 500 }

A refusal is `QUOTA_EXCEEDED` with `limit` (the name above), `value`, `scope` (service, tenant, workspace, conversation,
connection) and, where time alone ends it, `reset_at` (unix ms) and `retry_after_s`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tether.errors import BusError, Code, Problem, QuotaExceededError, problem
from tether.ids import Token
from tether.limits import MIB, WAITING_PROMPTS_MAX
from tether.refusals import path_of, remedy_of
from tether.settings import ConfigurationError

QUOTAS_FILE_BYTES_MAX: Final = 4 * MIB
_QUEUE_FULL: Final = 10077  # maximum messages (of the stream, or of the subject) exceeded
Scope = Literal["service", "tenant", "workspace", "conversation", "connection"]
_Count = Annotated[int, Field(ge=0, le=2**53)]


class WorkspaceQuota(BaseModel):
    """Of each workspace of a tenant. None: as the default says; 0: no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts_per_minute: _Count | None = None
    waiting_prompts: _Count | None = None
    running_executions: _Count | None = None
    events_per_s: _Count | None = None
    event_bytes_per_s: _Count | None = None


class TenantQuota(BaseModel):
    """Of a tenant as a whole, and of each of its workspaces. None: as the default says; 0: no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts_per_minute: _Count | None = None
    waiting_prompts: _Count | None = None
    running_executions: _Count | None = None
    stored_bytes: _Count | None = None
    readers: _Count | None = None
    workspace: WorkspaceQuota = WorkspaceQuota()


class QuotasFile(BaseModel):
    """The whole file, TOML or JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    default: TenantQuota = TenantQuota()
    tenants: dict[Token, TenantQuota] = {}


class AllowanceRecord(BaseModel):
    """`tether_quotas`, `prompts.…`: a bucket of `per_minute` prompts. `whole_at`: when it is full again, unix ms (the
    theoretical arrival time of the cell rate algorithm): each prompt moves it on by a minute's share."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1] = 1
    whole_at: int
    per_minute: int = 0


class Place(BaseModel):
    """Of one conversation that runs, or is about to. `at`: when it was taken, unix ms."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    execution: str
    at: int


class RunningRecord(BaseModel):
    """`tether_quotas`, `running.…`: who holds a place. Keys of `held` are owner keys: a place is of a conversation,
    whose owner record says whether it still runs. `limit` as the writer knows it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    v: Literal[1] = 1
    limit: int = 0
    held: dict[str, Place] = {}


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one tenant as they hold, every default applied; 0 is no limit. `workspace_…`: of each of its workspaces."""

    prompts_per_minute: int = 0
    waiting_prompts: int = 0
    running_executions: int = 0
    stored_bytes: int = 0
    readers: int = 0
    workspace_prompts_per_minute: int = 0
    workspace_waiting_prompts: int = 0
    workspace_running_executions: int = 0
    workspace_events_per_s: int = 0
    workspace_event_bytes_per_s: int = 0


@dataclass(frozen=True, slots=True)
class Quotas:
    """Of all tenants. `file`: None where none is named."""

    defaults: Limits = Limits()
    file: QuotasFile | None = None
    _known: dict[str, Limits] = field(default_factory=dict, compare=False, repr=False)

    def of(self, tenant: str) -> Limits:
        known = self._known.get(tenant)
        if known is None:
            known = self._known[tenant] = _merged(self.defaults, self.file, tenant)
        return known


def _merged(defaults: Limits, file: QuotasFile | None, tenant: str) -> Limits:
    if file is None:
        return defaults
    tables = [file.default, *([file.tenants[tenant]] if tenant in file.tenants else [])]
    values = {name: getattr(defaults, name) for name in Limits.__dataclass_fields__}
    for table in tables:
        values |= table.model_dump(exclude_none=True, exclude={"workspace"})
        of_workspace = table.workspace.model_dump(exclude_none=True)
        values |= {f"workspace_{name}": value for name, value in of_workspace.items()}
    return Limits(**values)


def load_quotas(path: Path | None, defaults: Limits, tenants: tuple[str, ...]) -> Quotas:
    """Read the quotas file. Raises ConfigurationError with every problem, each naming its field and what is taken."""
    if path is None:
        return Quotas(defaults)
    where = f"TETHER_QUOTAS_FILE={path}"
    try:
        file = QuotasFile.model_validate(_read(path, where))
    except ValidationError as error:
        found = error.errors(include_input=False, include_url=False)
        raise ConfigurationError([f"{where}: {path_of(one['loc'])}: {remedy_of(one)}" for one in found]) from None
    strangers = [name for name in file.tenants if name not in tenants]
    if strangers:
        raise ConfigurationError([f"{where}: tenants.{name}: is not in TETHER_TENANTS" for name in strangers])
    return Quotas(defaults, file)


def _read(path: Path, where: str) -> Any:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigurationError([f"{where}: {error.strerror}"]) from None
    if len(data) > QUOTAS_FILE_BYTES_MAX:
        raise ConfigurationError([f"{where}: must be at most {QUOTAS_FILE_BYTES_MAX} bytes"])
    try:
        return tomllib.loads(data.decode()) if path.suffix == ".toml" else json.loads(data)
    except (ValueError, RecursionError) as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON (or name it .toml)"
        raise ConfigurationError([f"{where}: must be {kind}: {error}"]) from None


def waiting_full(error: BusError) -> QuotaExceededError | None:
    """What the queue's own limits say of a prompt that was not stored; None where it is no quota that refused it."""
    if error.code != _QUEUE_FULL:
        return None
    if "per subject" in error.detail:
        most = WAITING_PROMPTS_MAX
        detail = f"{most} messages wait in this conversation already"
        return QuotaExceededError(exceeded("waiting_prompts", most, "conversation", detail, retry_after_s=1.0))
    return None


def exceeded(
    limit: str,
    value: int,
    scope: Scope,
    detail: str,
    *,
    retry_after_s: float | None = None,
    reset_at_ms: int | None = None,
    **more: Any,
) -> Problem:
    """`QUOTA_EXCEEDED` in the one form that it has everywhere. `value`: of the limit."""
    context: Mapping[str, Any] = {
        "limit": limit,
        "value": value,
        "scope": scope,
        **({} if reset_at_ms is None else {"reset_at": reset_at_ms}),
        **more,
    }
    return problem(Code.QUOTA_EXCEEDED, detail, retry_after_s=retry_after_s, **context)
