"""Configuration of a router, from the environment, once."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from tether.errors import InvalidError
from tether.ids import check_token
from tether.limits import EVENTS_MAX_AGE_S, EVENTS_MAX_BYTES, MIB, OWNER_SWEEP_S
from tether.quotas import Limits, Quotas, load_quotas
from tether.settings import ServiceSettings
from tether_router.core.state import HistoryFallback


class RouterSettings(ServiceSettings):
    """What a router reads. It makes the tenants' streams, so their retention is its to configure."""

    router_sweep_s: float = Field(
        default=OWNER_SWEEP_S, ge=2, le=OWNER_SWEEP_S, description="between two looks at the owner records, seconds"
    )
    router_history_fallback: HistoryFallback = Field(
        default="takeover",
        description="when the history may stand in for a native session that does not exist: `takeover`: in an "
        "execution that follows a takeover, or a turn that was cut before it had one; `always`; `never`",
    )
    quotas_file: Path | None = Field(default=None, description="tenants' quotas, TOML or JSON; wins over …_QUOTA_…")
    router_quota_running_executions: int = Field(
        default=0, ge=0, description="of a tenant at the same time; further prompts wait; 0: no limit"
    )
    router_quota_workspace_running_executions: int = Field(
        default=0, ge=0, description="likewise of each workspace; 0: no limit"
    )
    router_quota_running_total: int = Field(
        default=0, ge=0, description="executions of the whole set at the same time; further prompts wait; 0: no limit"
    )
    events_max_bytes: int = Field(
        default=EVENTS_MAX_BYTES, ge=16 * MIB, description="of each tenant's log; JetStream reserves it"
    )
    events_max_age_s: int = Field(default=EVENTS_MAX_AGE_S, ge=60, description="of each tenant's log, seconds")

    def quotas(self) -> Quotas:
        """Raises ConfigurationError."""
        defaults = Limits(
            running_executions=self.router_quota_running_executions,
            workspace_running_executions=self.router_quota_workspace_running_executions,
        )
        return load_quotas(self.quotas_file, defaults, self.tenant_names)

    @field_validator("tenants")
    @classmethod
    def _names(cls, tenants: str) -> str:
        names = [name.strip() for name in tenants.split(",") if name.strip()]
        if not names:
            raise ValueError("must name at least one tenant")
        for name in names:
            try:
                check_token(name, "tenant")
            except InvalidError as error:
                raise ValueError(f"each tenant {error.remedy}") from None
        return tenants
