"""Configuration of a service: read from the environment once, all problems reported together, passed on as a value.

Every variable is `TETHER_…`; an unknown one is refused with the nearest known name, since a misspelt variable that
is ignored is worse than none. Secrets come from files (`…_FILE`) or the environment, and never show in `repr`.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

PREFIX = "TETHER_"
# Variables of other programs of the set that a service may find in its environment without reading them.
FOREIGN_PREFIXES = ("TETHER_SCRIPTED_", "TETHER_TEST_", "TETHER_CLI_", "TETHER_CLIENT_", "TETHER_PROCESS_")

_SECRET_NAME = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?|HEADERS)(_|$)", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret: `ANTHROPIC_API_KEY`, `…_TOKEN`, `…_CUSTOM_HEADERS`."""
    return _SECRET_NAME.search(name) is not None


class ServiceSettings(BaseSettings):
    """What every service reads. `nats_url` may list several servers, separated by commas."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", hide_input_in_errors=True)

    nats_url: str = "nats://127.0.0.1:4222"
    nats_user: str | None = None
    nats_password: SecretStr | None = None
    nats_password_file: Path | None = None
    nats_creds_file: Path | None = None
    replicas: int = Field(default=1, ge=1, le=5, description="replicas of every stream and bucket")
    tenants: str = Field(default="default", description="tenants that this set serves, separated by commas")
    log_format: Literal["json", "console"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    ready_file: Path | None = Field(default=None, description="written once the service is ready, JSON")

    def password(self) -> str | None:
        """The bus password, from the file if one is named."""
        if self.nats_password_file is not None:
            return self.nats_password_file.read_text(encoding="utf-8").strip()
        return None if self.nats_password is None else self.nats_password.get_secret_value()

    @property
    def tenant_names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.tenants.split(",") if name.strip())


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
            problems.append(f"{name}: {item['msg']}")
    if problems or settings is None:
        raise ConfigurationError(problems)
    return settings


def load_or_exit(model: type[SettingsT]) -> SettingsT:
    """For `__main__`: print every problem to stderr and exit with 78 (EX_CONFIG)."""
    try:
        return load(model)
    except ConfigurationError as error:
        _exit(error)


def _exit(error: ConfigurationError) -> NoReturn:
    for line in error.problems:
        print(f"configuration: {line}", file=sys.stderr)
    raise SystemExit(78)
