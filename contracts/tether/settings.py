"""Configuration of a service: read from the environment once, all problems reported together, passed on as a value.

Every variable is `TETHER_…`; an unknown one is refused with the nearest known name, since a misspelt variable that
is ignored is worse than none. Secrets come from files (`…_FILE`) or the environment, and never show in `repr`.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import ssl
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NoReturn, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tether import tls
from tether.refusals import remedy_of

PREFIX = "TETHER_"
EX_CONFIG = 78  # sysexits.h: another start changes nothing
# Variables of other programs of the set that a service may find in its environment without reading them.
FOREIGN_PREFIXES = ("TETHER_SCRIPTED_", "TETHER_TEST_", "TETHER_CLI_", "TETHER_CLIENT_", "TETHER_PROCESS_")

_SECRET_NAME = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?|HEADERS)(_|$)", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret: `ANTHROPIC_API_KEY`, `…_TOKEN`, `…_CUSTOM_HEADERS`."""
    return _SECRET_NAME.search(name) is not None


class ServiceSettings(BaseSettings):
    """What every service reads. `nats_url` may list several servers, separated by commas."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", hide_input_in_errors=True)

    nats_url: str = Field(default="nats://127.0.0.1:4222", description="servers, separated by commas")
    nats_user: str | None = Field(default=None, description="user on the bus")
    nats_password: SecretStr | None = Field(default=None, description="its password; rather name a file")
    nats_password_file: Path | None = Field(default=None, description="holds the password; wins over it")
    nats_creds_file: Path | None = Field(default=None, description="JWT and key of a user, as nsc writes them")
    nats_tls_ca_file: Path | None = Field(
        default=None, description="authorities that NATS's certificate is checked against, PEM; unset: the system's"
    )
    nats_tls_cert_file: Path | None = Field(default=None, description="this service's certificate for NATS, PEM")
    nats_tls_key_file: Path | None = Field(default=None, description="its key, PEM, not encrypted")
    replicas: int = Field(default=1, ge=1, le=5, description="replicas of every stream and bucket")
    tenants: str = Field(default="default", description="tenants that this set serves, separated by commas")
    log_format: Literal["json", "console"] = Field(default="json", description="of the log on stderr")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="the least to tell")
    ready_file: Path | None = Field(default=None, description="written once the service is ready, JSON")
    traces_endpoint: str | None = Field(
        default=None, repr=False, description="OTLP/HTTP receiver of traces, a URL; unset: no traces"
    )
    traces_sample: float = Field(default=1.0, ge=0, le=1, description="share of new traces that are kept")
    traces_delay_ms: int = Field(default=2_000, ge=10, le=60_000, description="spans are handed over so often")
    metrics_listen: str | None = Field(
        default=None, description="HOST:PORT of /metrics without a token; port 0: a free one; unset: none"
    )

    @field_validator("traces_endpoint")
    @classmethod
    def _endpoint(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            parts = urlsplit(value)
            good = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:
            good = False
        if not good:
            raise ValueError("must be a URL, as http://127.0.0.1:4318/v1/traces")
        if not _installed("opentelemetry.exporter.otlp.proto.http"):
            raise ValueError("needs the extra otel: install it with `pip install 'tether[otel]'`, or unset this")
        return value

    @field_validator("metrics_listen")
    @classmethod
    def _listen(cls, value: str | None) -> str | None:
        if value is not None:
            host, _, port = value.rpartition(":")
            if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
                raise ValueError("must be HOST:PORT, as 127.0.0.1:9465")
        return value

    def password(self) -> str | None:
        """The bus password, from the file if one is named."""
        if self.nats_password_file is not None:
            return self.nats_password_file.read_text(encoding="utf-8").strip()
        return None if self.nats_password is None else self.nats_password.get_secret_value()

    def tls(self) -> ssl.SSLContext | None:
        """TLS towards NATS, as the files say. Raises ConfigurationError."""
        try:
            return tls.client_context(self.nats_tls_ca_file, self.nats_tls_cert_file, self.nats_tls_key_file)
        except tls.TlsFilesError as error:
            raise ConfigurationError([f"TETHER_NATS_TLS_{error.setting.upper()}: {error.remedy}"]) from None

    @property
    def tenant_names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.tenants.split(",") if name.strip())


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


class ConfigurationError(Exception):
    """All problems of a configuration, one line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load(model: type[SettingsT], environ: Mapping[str, str] | None = None) -> SettingsT:
    """Read `model` from the environment. Raises ConfigurationError with every problem at once."""
    env = dict(os.environ if environ is None else environ)
    known = {f"{PREFIX}{name}".upper() for name in model.model_fields}
    problems = []
    for name in sorted(env):
        if not name.startswith(PREFIX) or name in known or name.startswith(FOREIGN_PREFIXES):
            continue
        near = difflib.get_close_matches(name, known, n=1)
        problems.append(f"{name}: not a setting of this service" + (f"; did you mean {near[0]}?" if near else ""))
    values = {name: env[f"{PREFIX}{name}".upper()] for name in model.model_fields if f"{PREFIX}{name}".upper() in env}
    settings: SettingsT | None = None
    try:
        # Values are handed over explicitly, so that a test's mapping and the process environment behave alike.
        settings = model.model_validate(values)
    except ValidationError as error:
        for item in error.errors(include_input=False, include_url=False):
            name = PREFIX + "_".join(str(part) for part in item["loc"]).upper()
            problems.append(f"{name}: {remedy_of(item)}")
    if problems or settings is None:
        raise ConfigurationError(problems)
    return settings


def load_or_exit(model: type[SettingsT], check: Callable[[SettingsT], object] | None = None) -> SettingsT:
    """For `__main__`: print every problem to stderr and exit with 78 (EX_CONFIG). `check` reads files that the settings
    name, and raises ConfigurationError."""
    try:
        settings = load(model)
        if check is not None:
            check(settings)
        return settings
    except ConfigurationError as error:
        _exit(error)


def _exit(error: ConfigurationError) -> NoReturn:
    for line in error.problems:
        print(f"configuration: {line}", file=sys.stderr)
    raise SystemExit(EX_CONFIG)
