"""Configuration of an agent service, from the environment, once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from tether.checkpoint import Include, Store
from tether.limits import DRAIN_GRACE_MAX_S, DRAIN_GRACE_S, MIB, VOLUME_WAIT_S
from tether.settings import ServiceSettings


class AgentSettings(ServiceSettings):
    """What an agent service reads. Times in seconds.

    `agent_collector_user` and its password file are the collectors' own on the bus; unset, they use the service's.
    """

    agent_provider: Literal["local", "docker"] = Field(default="local", description="who runs sandboxes: local, docker")
    agent_state_dir: Path = Field(description="what the service must remember; one service at a time holds it")
    agent_workspaces_dir: Path = Field(description="workspaces that name no directory of their own")
    agents_file: Path | None = Field(default=None, description="agents' commands and keys, TOML")
    agent_stop_sandboxes: bool = Field(default=False, description="end every sandbox when the service ends")
    agent_ready_wait_s: float = Field(default=30.0, gt=0, le=600, description="for a collector to register")
    agent_volume_wait_s: float = Field(
        default=VOLUME_WAIT_S, ge=0, description="for a gone sandbox's volume, before its executions are closed as lost"
    )
    agent_idle_s: float | None = Field(
        default=None, gt=0, description="a sandbox without executions is suspended after so long; unset: never"
    )
    agent_idle_waiting: bool = Field(
        default=False, description="a sandbox whose executions all wait for a person counts as idle too"
    )
    agent_drain_grace_s: float = Field(
        default=DRAIN_GRACE_S,
        ge=0,
        le=DRAIN_GRACE_MAX_S,
        description="of a drain that does not say, until all is killed",
    )
    agent_checkpoint_store: Store = Field(
        default="volume", description="where checkpoints are kept that do not say: volume, blobs, both"
    )
    agent_checkpoint_include: Include = Field(
        default="sessions", description="what checkpoints hold that do not say: sessions, or the whole workspace"
    )
    agent_commands_max: int = Field(default=64, ge=1, le=1024, description="commands driven at the same time")
    agent_collector_user: str | None = Field(default=None, description="collectors' own user on the bus")
    agent_collector_password_file: Path | None = Field(default=None, description="holds its password")
    agent_collector_metrics_listen: str | None = Field(
        default=None, description="TETHER_METRICS_LISTEN of collectors; with port 0 each takes a free one"
    )
    docker_image: str = Field(default="tether-sandbox:local", description="of sandboxes, provider docker")
    docker_prefix: str = Field(
        default="tether", pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$", description="of the names of containers and volumes"
    )
    docker_network: str = Field(
        default="bridge", description="that sandboxes are on; NATS and models are reached by it"
    )
    docker_nats_url: str | None = Field(default=None, description="TETHER_NATS_URL of collectors; unset: the service's")
    docker_agents_dir: Path | None = Field(
        default=None, description="of the engine's machine, mounted read-only at /opt/tether/agents"
    )
    docker_cpus: float = Field(default=2.0, gt=0, le=1024, description="of one sandbox")
    docker_memory_bytes: int = Field(default=4096 * MIB, ge=64 * MIB, description="of one sandbox, without swap")
    docker_pids: int = Field(default=512, ge=32, le=4_194_304, description="processes and threads of one sandbox")
    docker_tmp_bytes: int = Field(default=512 * MIB, ge=MIB, description="/tmp of one sandbox; counts as its memory")

    @field_validator(
        "agent_state_dir", "agent_workspaces_dir", "agent_collector_password_file", "agents_file", "docker_agents_dir"
    )
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
