"""A set of many tenants, each with a token of its own; everything else is as `tether up` makes it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tether.bus import NatsBus, connect
from tether.limits import MIB
from tether.nats_authority import Keys
from tether.processes import ProcessId
from tether.service import write_whole
from tether_cli import nats_server
from tether_cli.set import ServiceSet, SetOptions
from tether_cli.state import SetState
from tether_cli.supervise import ChildSpec

LOG_BYTES: Final = 64 * MIB  # of each tenant's log, and of its blobs: JetStream reserves them
_TOKENS: Final = "http-tokens.json"


class LoadSet(ServiceSet):
    """`environment`: further settings by service."""

    def __init__(
        self, options: SetOptions, tenants: Sequence[str], environment: Mapping[str, Mapping[str, str]]
    ) -> None:
        super().__init__(options)
        self._tenants = tuple(tenants)
        self._environment = environment
        self.tokens = {tenant: secrets.token_urlsafe(24) for tenant in tenants}

    @property
    def bus_tenants(self) -> tuple[str, ...]:
        return self._tenants

    def _http_token(self) -> Path:
        """The set's own entry, once for each tenant with its own token."""
        path = super()._http_token()
        entries = json.loads((self.paths.root / _TOKENS).read_bytes())
        digests = {tenant: hashlib.sha256(token.encode()).hexdigest() for tenant, token in self.tokens.items()}
        entries += [{**entries[0], "tenant": tenant, "token_sha256": digest} for tenant, digest in digests.items()]
        write_whole(self.paths.root / _TOKENS, json.dumps(entries).encode())
        return path

    def _service_spec(self, name: str, server: nats_server.EmbeddedServer, own: Keys) -> ChildSpec:
        spec = super()._service_spec(name, server, own)
        spec.env["TETHER_TENANTS"] = ",".join(self._tenants)
        spec.env.update(self._environment.get(name, {}))
        return spec


@dataclass(slots=True)
class Plane:
    """What a load works with. `folder`: for files of its own; `truth`: of the scripted agents."""

    state: SetState
    tokens: Mapping[str, str]
    folder: Path
    truth: Path
    start_s: float
    say: Callable[[str], None] = field(default=print)

    @contextlib.asynccontextmanager
    async def bus(self) -> AsyncIterator[NatsBus]:
        up = self.state
        async with await connect(up.nats_url, name="tether-load", creds_file=up.nats_creds_file) as bus:
            yield bus

    def process(self, name: str) -> ProcessId:
        return self.state.children[name]


@contextlib.asynccontextmanager
async def plane(
    tenants: Sequence[str],
    environment: Mapping[str, Mapping[str, str]],
    say: Callable[[str], None],
    *,
    quotas: Mapping[str, Any] | None = None,
    idle_s: float | None = None,
) -> AsyncIterator[Plane]:
    """Up as long as the context. `quotas`: the content of a quotas file. Raises CliError where the set fails, also
    meanwhile."""
    with tempfile.TemporaryDirectory(prefix="tether-load-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        truth = folder / "truth"
        agents = folder / "agents.toml"
        agents.write_text(f"[agents.scripted]\nenv = {{ TETHER_SCRIPTED_TRUTH = {json.dumps(str(truth))} }}\n")
        options = SetOptions(
            data=folder / "data",
            tenant=tenants[0],
            agents_file=agents,
            log="quiet",
            log_level="warning",
            ephemeral=True,
            log_bytes=LOG_BYTES,
            idle_s=idle_s,
        )
        if quotas is not None:
            path = folder / "quotas.json"
            path.write_text(json.dumps(quotas), encoding="utf-8")
            named = {"TETHER_QUOTAS_FILE": str(path)}
            environment = {name: {**environment.get(name, {}), **named} for name in ("router", "agent", "backend")}
        begun_s = time.monotonic()
        async with LoadSet(options, tenants, environment) as up:
            start_s = time.monotonic() - begun_s
            say(f"a set of {len(tenants)} tenants is up after {start_s:.1f} s")
            failing = asyncio.create_task(up.failed(), name="set-failed")
            try:
                yield Plane(up.state, up.tokens, folder, truth, start_s, say)
                if failing.done():
                    failing.result()
            finally:
                failing.cancel()
                await asyncio.gather(failing, return_exceptions=True)
