"""Configuration of an agent service, from the environment, once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from tether.limits import VOLUME_WAIT_S
from tether.settings import ServiceSettings


class AgentSettings(ServiceSettings):
    """What an agent service reads. Times in seconds.

    `agent_collector_user` and its password file are the collectors' own on the bus; unset, they use the service's.
    """

    agent_provider: Literal["local"] = Field(default="local", description="who runs sandboxes")
    agent_state_dir: Path = Field(description="what the service must remember; one service at a time holds it")
    agent_workspaces_dir: Path = Field(description="workspaces that name no directory of their own")
    agents_file: Path | None = Field(default=None, description="agents' commands and keys, TOML")
    agent_stop_sandboxes: bool = Field(default=False, description="end every sandbox when the service ends")
    agent_ready_wait_s: float = Field(default=30.0, gt=0, le=600, description="for a collector to register")
    agent_volume_wait_s: float = Field(
        default=VOLUME_WAIT_S, ge=0, description="for a gone sandbox's volume, before its executions are closed as lost"
    )
    agent_commands_max: int = Field(default=64, ge=1, le=1024, description="commands driven at the same time")
    agent_collector_user: str | None = Field(default=None, description="collectors' own user on the bus")
    agent_collector_password_file: Path | None = Field(default=None, description="holds its password")
    agent_collector_metrics_listen: str | None = Field(
        default=None, description="TETHER_METRICS_LISTEN of collectors; with port 0 each takes a free one"
    )

    @field_validator("agent_state_dir", "agent_workspaces_dir", "agent_collector_password_file", "agents_file")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        if path is not None and not path.is_absolute():
            raise ValueError("must be an absolute path")
        return path


def telemetry(settings: AgentSettings) -> dict[str, str]:
    """What collectors are told of traces and metrics: the service's own traces settings, their own listener."""
    values = {}
    if settings.traces_endpoint is not None:
        values["TETHER_TRACES_ENDPOINT"] = settings.traces_endpoint
        values["TETHER_TRACES_SAMPLE"] = str(settings.traces_sample)
        values["TETHER_TRACES_DELAY_MS"] = str(settings.traces_delay_ms)
    if settings.agent_collector_metrics_listen is not None:
        values["TETHER_METRICS_LISTEN"] = settings.agent_collector_metrics_listen
    return values
