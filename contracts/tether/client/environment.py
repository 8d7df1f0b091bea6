"""Where a client finds its server: the environment, or the state file of the set that `tether up` runs.

    TETHER_CLIENT_URL                 http(s)://… or nats://…
    TETHER_CLIENT_TOKEN[_FILE]        HTTP: the bearer token
    TETHER_CLIENT_NATS_USER, TETHER_CLIENT_NATS_PASSWORD[_FILE], TETHER_CLIENT_NATS_CREDS_FILE
    TETHER_CLIENT_NATS_TLS_CA_FILE, TETHER_CLIENT_NATS_TLS_CERT_FILE, TETHER_CLIENT_NATS_TLS_KEY_FILE
    TETHER_CLIENT_TENANT              NATS: the tenant (over HTTP the token says it)

All problems are told together; an unknown `TETHER_CLIENT_…` is refused. Secrets never show in `repr`.
"""

from __future__ import annotations

import difflib
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from tether import tls
from tether.settings import ConfigurationError

if TYPE_CHECKING:
    from tether.client.transport import Transport

PREFIX: Final = "TETHER_CLIENT_"
_STATE_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and what is needed to talk to it."""

    url: str
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    nats_user: str | None = None
    nats_password: str | None = field(default=None, repr=False)
    nats_password_file: str | None = None
    nats_creds_file: str | None = None
    nats_tls_ca_file: str | None = None
    nats_tls_cert_file: str | None = None
    nats_tls_key_file: str | None = None
    tenant: str = "default"

    @property
    def over_nats(self) -> bool:
        return self.url.startswith(("nats://", "tls://", "ws://", "wss://"))

    def transport(self) -> Transport:
        if self.over_nats:
            from tether.client.nats import NatsCredentials, NatsTransport

            credentials = NatsCredentials(
                user=self.nats_user,
                password=_secret(self.nats_password, self.nats_password_file),
                creds_file=self.nats_creds_file,
                tls=self._tls(),
            )
            return NatsTransport(self.url, self.tenant, credentials)
        from tether.client.http import HttpTransport

        return HttpTransport(self.url, _secret(self.token, self.token_file) or "")

    def _tls(self) -> ssl.SSLContext | None:
        files = (self.nats_tls_ca_file, self.nats_tls_cert_file, self.nats_tls_key_file)
        try:
            return tls.client_context(*(None if file is None else Path(file) for file in files))
        except tls.TlsFilesError as error:
            raise ConfigurationError([f"{PREFIX}NATS_TLS_{error.setting.upper()}: {error.remedy}"]) from None


def _secret(value: str | None, file: str | None) -> str | None:
    if file is None:
        return value
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8"
        raise ConfigurationError([f"{file}: {reason}"]) from None


def load(environ: Mapping[str, str] | None = None) -> Endpoint:
    """From the environment. Raises ConfigurationError with every problem."""
    env = os.environ if environ is None else environ
    known = {f"{PREFIX}{entry.name}".upper(): entry.name for entry in fields(Endpoint)}
    problems: list[str] = []
    values: dict[str, str] = {}
    for name in sorted(env):
        if not name.startswith(PREFIX):
            continue
        if name in known:
            values[known[name]] = env[name]
            continue
        near = difflib.get_close_matches(name, known, n=1)
        problems.append(f"{name}: not a setting of the client" + (f"; did you mean {near[0]}?" if near else ""))
    url = values.get("url", "")
    if not url.startswith(("http://", "https://", "nats://", "tls://", "ws://", "wss://")):
        problems.append(f"{PREFIX}URL: must be an http(s):// or nats:// URL")
    elif url.startswith("http") and not (values.get("token") or values.get("token_file")):
        problems.append(f"{PREFIX}TOKEN or {PREFIX}TOKEN_FILE: is needed over HTTP")
    if problems:
        raise ConfigurationError(problems)
    return Endpoint(**values)


def state_path(environ: Mapping[str, str] | None = None) -> Path:
    """The state file of the local set: in `$TETHER_CLI_DATA`, else `${XDG_DATA_HOME:-~/.local/share}/tether`."""
    env = os.environ if environ is None else environ
    if named := env.get("TETHER_CLI_DATA"):
        return Path(named).expanduser() / "state.json"
    base = env.get("XDG_DATA_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "share") / "tether" / "state.json"


def local(path: str | None = None, over: Literal["http", "nats"] = "http") -> Endpoint:
    """The set that is up on this machine. Raises ConfigurationError."""
    file = state_path() if path is None else Path(path)
    try:
        with file.open("rb") as handle:
            state: Any = json.loads(handle.read(_STATE_BYTES_MAX))
        if over == "http":
            return Endpoint(url=str(state["http_url"]), token_file=str(state["token_file"]))
        return Endpoint(
            url=str(state["nats_url"]),
            nats_creds_file=str(state["nats_creds_file"]),
            tenant=str(state["tenant"]),
        )
    except FileNotFoundError:
        raise ConfigurationError([f"{file}: no set is up here; start one with `tether up --detach`"]) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigurationError([f"{file}: is not the state of a set"]) from None
