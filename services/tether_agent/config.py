"""Configuration of an agent service, from the environment, once."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from tether.checkpoint import Include, Store
from tether.limits import DRAIN_GRACE_MAX_S, DRAIN_GRACE_S, MIB, SANDBOX_CREDENTIALS_S, VOLUME_WAIT_S
from tether.quotas import Limits, Quotas, load_quotas
from tether.settings import ServiceSettings


class AgentSettings(ServiceSettings):
    """What an agent service reads. Times in seconds.

    `agent_collector_user` and its password file are the collectors' own on the bus; unset, they use the service's.
    """

    agent_provider: Literal["local", "docker", "kubernetes"] = Field(
        default="local", description="who runs sandboxes: local, docker, kubernetes"
    )
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
    agent_cli_user: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(:[0-9]{1,10})?$",
        description="provider local, as root: whom CLIs run as, NAME or UID:GID",
    )
    agent_cli_umask: str = Field(default="077", pattern=r"^[0-7]{3}$", description="of CLIs, octal")
    agent_cli_limits: str | None = Field(
        default=None, description="of each CLI's processes, JSON: files, processes, file_bytes, memory_bytes"
    )
    agent_commands_max: int = Field(default=64, ge=1, le=1024, description="commands driven at the same time")
    agent_collector_user: str | None = Field(default=None, description="collectors' own user on the bus")
    agent_collector_password_file: Path | None = Field(default=None, description="holds its password")
    agent_authority_key_file: Path | None = Field(
        default=None, description="NATS operator's signing key (seed, mode 0600): each workspace gets an account"
    )
    agent_authority_creds_file: Path | None = Field(
        default=None, description="user of NATS's system account by which accounts are pushed and revoked"
    )
    agent_authority_account: str | None = Field(
        default=None, pattern=r"^A[A-Z2-7]{55}$", description="public key of the services' account"
    )
    agent_credentials_life_s: float = Field(
        default=SANDBOX_CREDENTIALS_S, ge=10, le=30 * 86_400, description="of a sandbox's credentials; renewed before"
    )
    agent_collector_metrics_listen: str | None = Field(
        default=None, description="TETHER_METRICS_LISTEN of collectors; with port 0 each takes a free one"
    )
    quotas_file: Path | None = Field(default=None, description="tenants' quotas, TOML or JSON; wins over …_QUOTA_…")
    agent_quota_events_per_s: int = Field(
        default=0, ge=0, description="of each workspace to the log; a CLI that is faster waits; 0: no limit"
    )
    agent_quota_event_bytes_per_s: int = Field(default=0, ge=0, description="likewise; 0: no limit")
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
    kubernetes_namespace: str = Field(default="default", description="of AgentTasks, provider kubernetes")
    kubernetes_kubeconfig: Path | None = Field(
        default=None, description="a kubeconfig; unset: the pod's own service account"
    )
    kubernetes_workspace_size: str = Field(
        default="10Gi", pattern=r"^[0-9]+(\.[0-9]+)?([EPTGMk]i?|m)?$", description="of the claim of a new workspace"
    )

    @field_validator(
        "agent_state_dir",
        "agent_workspaces_dir",
        "agent_collector_password_file",
        "agent_authority_key_file",
        "agent_authority_creds_file",
        "agents_file",
        "docker_agents_dir",
        "kubernetes_kubeconfig",
    )
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        if path is not None and not path.is_absolute():
            raise ValueError("must be an absolute path")
        return path


def quotas(settings: AgentSettings) -> Quotas:
    """Raises ConfigurationError."""
    defaults = Limits(
        workspace_events_per_s=settings.agent_quota_events_per_s,
        workspace_event_bytes_per_s=settings.agent_quota_event_bytes_per_s,
    )
    return _quotas(settings.quotas_file, defaults, settings.tenant_names)


@functools.lru_cache(maxsize=1)
def _quotas(path: Path | None, defaults: Limits, tenants: tuple[str, ...]) -> Quotas:
    """The file as it was when the service started: one that is being edited starts no collector wrongly."""
    return load_quotas(path, defaults, tenants)


def pace(settings: AgentSettings, tenant: str) -> dict[str, str]:
    """What the collectors of this tenant are told of their quotas."""
    limits = quotas(settings).of(tenant)
    return {
        "TETHER_COLLECTOR_QUOTA_EVENTS_PER_S": str(limits.workspace_events_per_s),
        "TETHER_COLLECTOR_QUOTA_EVENT_BYTES_PER_S": str(limits.workspace_event_bytes_per_s),
    }


def confinement(settings: AgentSettings) -> dict[str, str]:
    """What collectors are told of how CLIs run, whatever the provider."""
    values = {"TETHER_COLLECTOR_CLI_UMASK": settings.agent_cli_umask}
    if settings.agent_cli_limits is not None:
        values["TETHER_COLLECTOR_CLI_LIMITS"] = settings.agent_cli_limits
    return values


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
