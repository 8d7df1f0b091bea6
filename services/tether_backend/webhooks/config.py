"""`TETHER_WEBHOOKS_FILE`: where notifications go. JSON, mode 0600, as it holds secrets:

    [{"name": "chat", "url": "https://example.org/hook", "secret": "whsec_…", "tenant": "default",
      "kinds": ["interaction.requested"]}]

`secret` is `whsec_` and at least 24 bytes in base64 (Standard Webhooks); `kinds` defaults to all.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import httpx2
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from tether.ids import Token
from tether.refusals import remedy_of
from tether.settings import ConfigurationError
from tether_backend.core.notices import KINDS, Kind

_PREFIX: Final = "whsec_"
_SECRET_BYTES_MIN: Final = 24
_NAMES_MAX: Final = 32
_UNPRINTABLE: Final = re.compile(r"[\x00-\x20\x7f]")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`url` may hold a secret of its own: it is not shown."""

    name: str
    tenant: str
    kinds: frozenset[Kind]
    url: str = field(repr=False)
    secret: bytes = field(repr=False)

    @property
    def host(self) -> str:
        """What may be shown of the address."""
        return urlsplit(self.url).hostname or ""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Token
    url: str
    secret: str
    tenant: Token
    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] = KINDS

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
            is_good = is_good and parts.port != 0 and bool(httpx2.URL(value).host)
        except (ValueError, httpx2.InvalidURL):
            is_good = False
        if not is_good or _UNPRINTABLE.search(value):
            raise ValueError("must be an http(s) address with a host, without user and password")
        return value

    @field_validator("secret")
    @classmethod
    def _is_secret(cls, value: str) -> str:
        if len(_key(value)) < _SECRET_BYTES_MIN:
            raise ValueError(f"must be whsec_ and at least {_SECRET_BYTES_MIN} bytes in base64")
        return value


def _key(secret: str) -> bytes:
    if not secret.startswith(_PREFIX):
        return b""
    try:
        return base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        return b""


def load_endpoints(path: Path | None, tenants: tuple[str, ...]) -> tuple[Endpoint, ...]:
    """None: no webhooks. Raises ConfigurationError with every problem; contents are never echoed."""
    if path is None:
        return ()
    where = f"TETHER_WEBHOOKS_FILE={path}"
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
    if not isinstance(raw, list) or len(raw) > _NAMES_MAX:
        raise ConfigurationError([*problems, f"{where}: must be a JSON list of at most {_NAMES_MAX} entries"])
    endpoints: list[Endpoint] = []
    for index, item in enumerate(raw):
        try:
            entry = _Entry.model_validate(item)
        except ValidationError as error:
            for one in error.errors(include_input=False, include_url=False):
                named = ".".join(str(part) for part in one["loc"]) or "entry"
                problems.append(f"{where}: entry {index} {named}: {remedy_of(one)}")
            continue
        if entry.tenant not in tenants:
            problems.append(f"{where}: entry {index} tenant: {entry.tenant} is not in TETHER_TENANTS")
        if any(one.name == entry.name and one.tenant == entry.tenant for one in endpoints):
            problems.append(f"{where}: entry {index} name: {entry.name} is there twice")
        endpoints.append(Endpoint(entry.name, entry.tenant, frozenset(entry.kinds), entry.url, _key(entry.secret)))
    if problems:
        raise ConfigurationError(problems)
    return tuple(endpoints)
