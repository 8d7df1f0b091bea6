"""How a service reaches NATS: one frozen value, made from its own configuration and passed on."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Final

RECONNECT_WAIT_S: Final = 0.1  # between attempts; never given up
CONNECT_ATTEMPT_S: Final = 2.0  # one attempt's TCP connect and handshake
PING_INTERVAL_S: Final = 5
PINGS_OUTSTANDING_MAX: Final = 2
WATCHDOG_INTERVAL_S: Final = 1.0
WATCHDOG_ANSWER_S: Final = 2.0  # without an answer for so long the connection is replaced
PENDING_BYTES_MAX: Final = 16 << 20  # unsent bytes of one connection; beyond, publishers wait
HEADERS_BYTES_MAX: Final = 4096  # room that `payload_bytes_max` leaves for headers


@dataclass(frozen=True, slots=True)
class BusConfig:
    """`servers`: nats:// or tls:// URLs. At most one of user+password, token, `creds_file`, `nkey_seed` is used.

    `inbox_prefix` is what this user may subscribe to (one per user where users are confined).
    `listed`: what is served is told to `nats micro`; sandboxes may not.
    `name` is shown by the server's connection list. Durations in seconds.
    """

    servers: tuple[str, ...] = field(repr=False)  # a URL may carry credentials
    name: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    creds_file: str | None = None
    nkey_seed: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    tls_hostname: str | None = None
    inbox_prefix: str = "_INBOX"
    listed: bool = True
    connect_timeout_s: float = 10.0
    api_timeout_s: float = 5.0
    reconnect_wait_s: float = RECONNECT_WAIT_S
    watchdog_interval_s: float = WATCHDOG_INTERVAL_S
    watchdog_answer_s: float = WATCHDOG_ANSWER_S
