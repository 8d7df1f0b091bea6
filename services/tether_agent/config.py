"""Configuration of an agent service, from the environment, once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from tether.settings import ServiceSettings


class AgentSettings(ServiceSettings):
    """What an agent service reads. Times in seconds.

    `agent_collector_user` and its password file are the collectors' own on the bus; unset, they use the service's.
    """

    agent_provider: Literal["local"] = "local"
    agent_state_dir: Path = Field(description="what the service must remember; one service at a time holds it")
    agent_workspaces_dir: Path = Field(description="workspaces that name no directory of their own")
    agents_file: Path | None = Field(default=None, description="agents' commands and keys, TOML")
    agent_stop_sandboxes: bool = Field(default=False, description="end every sandbox when the service ends")
    agent_ready_wait_s: float = Field(default=30.0, gt=0, le=600, description="for a collector to register")
    agent_commands_max: int = Field(default=64, ge=1, le=1024, description="commands driven at the same time")
    agent_collector_user: str | None = None
    agent_collector_password_file: Path | None = None

    @field_validator("agent_state_dir", "agent_workspaces_dir", "agent_collector_password_file", "agents_file")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        if path is not None and not path.is_absolute():
            raise ValueError("must be an absolute path")
        return path
