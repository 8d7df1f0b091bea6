"""The backend's configuration, and the tokens that it accepts."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from tether.ids import Token
from tether.quotas import Limits, Quotas, load_quotas
from tether.refusals import remedy_of
from tether.settings import ConfigurationError, ServiceSettings

LOOPBACK_NAMES: Final = ("127.0.0.1", "localhost", "::1")
_DIGEST = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_TOKEN_CHARS_MIN: Final = 16  # a shorter token can be guessed


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class BackendSettings(ServiceSettings):
    """`http_port` 0: a free port, told in the ready file. `http_hosts`: names under which clients may reach the
    service beyond loopback, separated by commas; `http_origins` likewise for browsers' origins."""

    http_host: str = Field(default="127.0.0.1", description="address to listen on; beyond loopback needs tokens")
    http_port: int = Field(default=0, ge=0, le=65535, description="0: a free one, told in the ready file")
    http_hosts: str = Field(default="", description="names of this service beyond loopback, separated by commas")
    http_origins: str = Field(default="", description="browsers' origins that may ask, separated by commas")
    http_tokens_file: Path | None = Field(default=None, description="tokens and their tenants, JSON, mode 0600")
    webhooks_file: Path | None = Field(default=None, description="where notifications go, JSON, mode 0600")
    quotas_file: Path | None = Field(default=None, description="tenants' quotas, TOML or JSON; wins over …_QUOTA_…")
    backend_quota_prompts_per_minute: int = Field(
        default=0, ge=0, description="that a tenant may send, all at once or spread; 0: no limit"
    )
    backend_quota_workspace_prompts_per_minute: int = Field(
        default=0, ge=0, description="likewise of each workspace; 0: no limit"
    )
    backend_quota_waiting_prompts: int = Field(
        default=10_000, ge=0, description="of a tenant that wait to be admitted; 0: no limit"
    )
    backend_quota_workspace_waiting_prompts: int = Field(
        default=0, ge=0, description="likewise of each workspace; 0: no limit"
    )
    backend_quota_stored_bytes: int = Field(
        default=0, ge=0, description="of a tenant's log and blobs; beyond, prompts are refused; 0: no limit"
    )
    backend_quota_readers: int = Field(
        default=4096, ge=0, description="event streams of a tenant, of each backend; 0: no limit"
    )
    backend_quota_readers_total: int = Field(
        default=16_384, ge=0, description="event streams of all tenants, of each backend; 0: no limit"
    )
    database_url: str = Field(
        default="sqlite+aiosqlite:///tether-backend.sqlite3",
        repr=False,
        description="of the projection, for SQLAlchemy",
    )

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if self.http_tokens_file is None and not is_loopback(self.http_host):
            raise ValueError(
                f"TETHER_HTTP_HOST={self.http_host} is not loopback: set TETHER_HTTP_TOKENS_FILE, or bind to 127.0.0.1"
            )
        return self

    def quotas(self) -> Quotas:
        """Raises ConfigurationError."""
        defaults = Limits(
            prompts_per_minute=self.backend_quota_prompts_per_minute,
            waiting_prompts=self.backend_quota_waiting_prompts,
            stored_bytes=self.backend_quota_stored_bytes,
            readers=self.backend_quota_readers,
            workspace_prompts_per_minute=self.backend_quota_workspace_prompts_per_minute,
            workspace_waiting_prompts=self.backend_quota_workspace_waiting_prompts,
        )
        return load_quotas(self.quotas_file, defaults, self.tenant_names)

    @property
    def host_names(self) -> frozenset[str]:
        return frozenset((*LOOPBACK_NAMES, *_names(self.http_hosts)))

    @property
    def origins(self) -> frozenset[str]:
        return frozenset(_names(self.http_origins))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip().lower() for name in text.split(",") if name.strip())


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks: the token's tenant and name."""

    tenant: str
    name: str


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    token: Annotated[str, StringConstraints(min_length=_TOKEN_CHARS_MIN)] | None = None
    token_sha256: _DIGEST | None = None
    tenant: Token
    name: Annotated[str, StringConstraints(min_length=1, max_length=128)]

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.token is None) == (self.token_sha256 is None):
            raise ValueError("give exactly one of token and token_sha256")
        return self


@dataclass(frozen=True, slots=True)
class Tokens:
    """Digests of accepted tokens; the tokens themselves are not kept."""

    entries: tuple[tuple[bytes, Principal], ...]

    def find(self, token: str) -> Principal | None:
        """Compares with every entry, in constant time each."""
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, principal in self.entries:
            if hmac.compare_digest(known, digest):
                found = principal
        return found


def load_tokens(path: Path | None, tenants: tuple[str, ...]) -> Tokens:
    """Read the tokens file. Raises ConfigurationError with every problem; contents are never echoed."""
    if path is None:
        raise ConfigurationError(["TETHER_HTTP_TOKENS_FILE: must name a file: every request needs a token"])
    where = f"TETHER_HTTP_TOKENS_FILE={path}"
    try:
        mode = path.stat().st_mode
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigurationError([f"{where}: {error.strerror}"]) from None
    except ValueError:
        raise ConfigurationError([f"{where}: must be a JSON list"]) from None
    problems = []
    if stat.S_IMODE(mode) & 0o077:
        problems.append(f"{where}: must be readable by its owner only (chmod 600)")
    if not isinstance(raw, list) or not raw:
        raise ConfigurationError([*problems, f"{where}: must be a JSON list with at least one entry"])
    entries: list[tuple[bytes, Principal]] = []
    for index, item in enumerate(raw):
        try:
            entry = _Entry.model_validate(item)
        except ValidationError as error:
            for one in error.errors(include_input=False, include_url=False):
                field = ".".join(str(part) for part in one["loc"])
                problems.append(f"{where}: entry {index} {field}: {remedy_of(one)}")
            continue
        if entry.tenant not in tenants:
            problems.append(f"{where}: entry {index} tenant: {entry.tenant} is not in TETHER_TENANTS")
        if entry.token is not None:
            digest = hashlib.sha256(entry.token.encode()).digest()
        else:
            digest = bytes.fromhex(entry.token_sha256 or "")
        entries.append((digest, Principal(entry.tenant, entry.name)))
    if problems:
        raise ConfigurationError(problems)
    return Tokens(tuple(entries))
