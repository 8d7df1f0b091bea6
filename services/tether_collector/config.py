"""Configuration of a collector: one workspace, its sandbox, the agents that may run in it.

`TETHER_AGENTS` maps an agent's kind to its command, as JSON: `{"claude": ["/opt/claude"]}`. What a CLI finds in its
environment is an allow-list: the names below and those of `TETHER_AGENT_ENV_ALLOW`, taken from the collector's own
environment, then what `TETHER_AGENT_ENV_FILE` gives for its kind (`{"claude": {"ANTHROPIC_API_KEY": "…"}}`, a file
of mode 0600 that the provider writes). Values are read at each start and never logged, journaled or put in an
argument list.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, field_validator, model_validator

from tether.agent_args import bad_entry
from tether.checkpoint import Include, Store
from tether.ids import TOKEN_PATTERN, Token, sandbox_id
from tether.limits import DRAIN_GRACE_MAX_S, DRAIN_GRACE_S, KIB, MIB, SPOOL_BYTES_MAX, SPOOL_SEGMENT_BYTES
from tether.private import open_to_others
from tether.secret_patterns import parse
from tether.settings import ServiceSettings

AGENT_ENV_FILE_BYTES_MAX: Final = 256 * KIB
# What every CLI may see of the collector's environment: paths, locale, terminal, temp, certificates, proxies.
ENV_ALLOWED: Final = frozenset(
    [
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TERM",
        "TMPDIR",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "NODE_EXTRA_CA_CERTS",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "LC_ALL",
        "LC_CTYPE",
        "LC_MESSAGES",
        "LC_COLLATE",
        "LC_NUMERIC",
        "LC_TIME",
    ]
)


def _parse(value: object) -> object:
    """A variable holds JSON; the error names the place and never the value."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError("must be JSON") from None


def _redact(value: object) -> object:
    """Name to pattern or patterns, each of them checked; patterns are no secrets."""
    found = _parse(value)
    if not isinstance(found, dict):
        raise ValueError('must be JSON: {"name": "pattern"}')
    many = {name: [source] if isinstance(source, str) else source for name, source in found.items()}
    for name, sources in many.items():
        if not isinstance(sources, list | tuple) or not all(isinstance(source, str) for source in sources):
            raise ValueError(f"{name} must be a pattern, or a list of patterns")
        for source in sources:
            parse(str(name), source)
    return many


AgentKind = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9:._-]{0,63}$")]
Command = Annotated[tuple[Annotated[str, StringConstraints(min_length=1)], ...], Field(min_length=1)]


class CliLimits(BaseModel):
    """Limits of a CLI's processes; unset: the collector's own. `processes` counts all of the user."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    files: Annotated[int, Field(ge=64)] | None = None
    processes: Annotated[int, Field(ge=16)] | None = None
    file_bytes: Annotated[int, Field(ge=MIB)] | None = None
    memory_bytes: Annotated[int, Field(ge=64 * MIB)] | None = None


_CLI_USER: Final = "whom CLIs run as, where the collector is root: NAME, or UID:GID"


class AgentEnvironmentError(Exception):
    """The file of agents' environments cannot be used; the message names the file and the remedy, no value."""


class CollectorSettings(ServiceSettings):
    """What a collector reads. Sizes in bytes."""

    tenant: Token = Field(description="whose sandbox this is")
    workspace: Token = Field(description="the workspace that it is over")
    sandbox: Annotated[str, StringConstraints(pattern=TOKEN_PATTERN)] = Field(
        default="", validate_default=False, description="derived from tenant and workspace where unset"
    )
    boot: Token = Field(description="drawn when the sandbox starts, the same for every collector of this boot")
    workspace_dir: Path = Field(description="the workspace's folder; state is kept in its .tether")
    agents: Annotated[dict[AgentKind, Command], BeforeValidator(_parse)] = Field(
        default_factory=dict, description="kind to command, as JSON"
    )
    agent_env_file: Path | None = Field(default=None, description="kind to variables, JSON, mode 0600")
    agent_env_allow: str = Field(default="", description="further names that CLIs may see, separated by commas")
    nats_inbox_prefix: str | None = Field(
        default=None, description="where this user may get answers; unset: as its credentials file says, else _INBOX"
    )
    isolation: Literal["auto", "pid_namespace", "subreaper"] = Field(
        default="auto", description="what holds a CLI's processes together; auto: a namespace where it is allowed"
    )
    facts: Annotated[dict[str, Any], BeforeValidator(_parse)] = Field(
        default_factory=dict, description="the provider's facts, JSON, registered"
    )
    recovery: bool = Field(default=False, description="start nothing: tell what is left untold, and end")
    collector_drain_grace_s: float = Field(
        default=DRAIN_GRACE_S, ge=0, le=DRAIN_GRACE_MAX_S, description="from SIGTERM to the end, checkpoint included"
    )
    collector_checkpoint_store: Store = Field(default="volume", description="where SIGTERM's checkpoint is kept")
    collector_checkpoint_include: Include = Field(
        default="sessions", description="of SIGTERM's checkpoint; workspace: the user's files as well"
    )
    collector_checkpoint_wait_s: float = Field(
        default=30.0, gt=0, le=600, description="a blob store that takes nothing for so long has failed"
    )
    collector_blobs_bytes_max: int | None = Field(
        default=None, ge=-1, description="the blob store's quota, -1: none; unset: it is asked for it"
    )
    collector_restore: Token | None = Field(
        default=None, description="checkpoint that this sandbox goes on from; an empty volume is filled from its blobs"
    )
    collector_restore_revision: int = Field(default=0, ge=0, description="of its reference; 0: the one that is there")
    collector_agent_args_allow: Annotated[dict[AgentKind, tuple[str, ...]], BeforeValidator(_parse)] = Field(
        default_factory=dict, description="arguments of prompts that this agent takes beyond the harmless ones, JSON"
    )
    collector_cli_user: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}(:[0-9]{1,10})?$", description=_CLI_USER
    )
    collector_cli_umask: str = Field(default="077", pattern=r"^[0-7]{3}$", description="of CLIs, octal")
    collector_cli_new_privileges: bool = Field(default=False, description="setuid programs work within CLIs")
    collector_cli_limits: Annotated[CliLimits, BeforeValidator(_parse)] = Field(
        default_factory=lambda: CliLimits(),
        description="of each process, JSON: files, processes, file_bytes, memory_bytes",
    )
    collector_redact: Annotated[dict[str, tuple[str, ...]], BeforeValidator(_redact)] = Field(
        default_factory=dict, description="further patterns of secrets, JSON: name to a pattern, or to several"
    )
    collector_redact_builtin: bool = Field(default=True, description="redact well-known shapes of keys")
    collector_quota_events_per_s: int = Field(
        default=0, ge=0, description="of all executions here to the log; a CLI that is faster waits; 0: no limit"
    )
    collector_quota_event_bytes_per_s: int = Field(default=0, ge=0, description="likewise; 0: no limit")
    spool_bytes_max: int = Field(default=SPOOL_BYTES_MAX, ge=MIB, description="of one execution")
    spool_segment_bytes: int = Field(default=SPOOL_SEGMENT_BYTES, ge=16 * KIB, description="of one spool file")

    @field_validator("workspace_dir")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        if not path.is_absolute():
            raise ValueError("must be an absolute path")
        return path

    @field_validator("collector_agent_args_allow")
    @classmethod
    def _entries(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for kind, entries in value.items():
            for entry in entries:
                if (why := bad_entry(entry)) is not None:
                    raise ValueError(f"{kind}: {why}")
        return value

    @model_validator(mode="after")
    def _derive(self) -> CollectorSettings:
        if not self.sandbox:
            object.__setattr__(self, "sandbox", sandbox_id(self.tenant, self.workspace))
        return self

    def key_source(self, kind: str) -> str | None:
        """Where the provider says that this agent's key comes from; it writes that with the file of variables."""
        sources = self.facts.get("key_sources")
        source = sources.get(kind) if isinstance(sources, dict) else None
        return source if isinstance(source, str) and source else None

    @property
    def state_dir(self) -> Path:
        """Everything that Tether keeps in the workspace."""
        return self.workspace_dir / ".tether"


def agent_environment(settings: CollectorSettings, kind: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a CLI of this kind gets, before those that its adapter sets. Raises AgentEnvironmentError."""
    allowed = ENV_ALLOWED | {name.strip() for name in settings.agent_env_allow.split(",") if name.strip()}
    values = {name: value for name, value in environ.items() if name in allowed}
    if settings.agent_env_file is not None:
        values.update(_read_file(settings.agent_env_file).get(kind, {}))
    return values


def _read_file(path: Path) -> dict[str, dict[str, str]]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise AgentEnvironmentError(f"{path} cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(file.fileno())
        if open_to_others(facts):
            raise AgentEnvironmentError(f"{path} is open to others; chmod 600 it")
        data = file.read(AGENT_ENV_FILE_BYTES_MAX + 1)
    if len(data) > AGENT_ENV_FILE_BYTES_MAX:
        raise AgentEnvironmentError(f"{path} has more than {AGENT_ENV_FILE_BYTES_MAX} bytes")
    try:
        value = json.loads(data)
    except ValueError:
        raise AgentEnvironmentError(f"{path} is not JSON") from None
    if not isinstance(value, dict) or not all(
        isinstance(variables, dict)
        and all(isinstance(name, str) and isinstance(text, str) for name, text in variables.items())
        for variables in value.values()
    ):
        raise AgentEnvironmentError(f"{path} must map agent kinds to variables, all of them text")
    return value
