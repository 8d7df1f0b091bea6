"""A nats-server that believes Tether's accounts, and a client so plain that it shows every refusal."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support_nats import NatsServer, running_server
from tether import ids, nats_authority, nkey_jwt, permissions
from tether.bus import NatsBus, connect
from tether.nats_authority import AUTHORITY_USER, PERSON, Keys
from tether.nkey_jwt import Key, Kind
from tether.permissions import Role
from tether_agent.authority import Authority
from tether_agent.config import AgentSettings

_DENIED = re.compile(rb"Permissions Violation for (Publish|Subscription) (?:to|with Reply of) \"([^\"]+)\"")
ANSWER_S = 30.0


@dataclass(slots=True)
class Refused:
    """What the server would not take. Subjects as they were given."""

    publish: set[str] = field(default_factory=set)
    subscribe: set[str] = field(default_factory=set)


class PlainClient:
    """One connection: sends lines, and knows nothing of what it may. Messages are kept by subject."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._sid = 0
        self.messages: list[tuple[str, bytes]] = []

    def publish(self, subject: str, data: bytes = b"x", *, reply: str = "") -> None:
        self._writer.write(f"PUB {subject} {reply} {len(data)}\r\n".encode() + data + b"\r\n")

    def subscribe(self, subject: str) -> None:
        self._sid += 1
        self._writer.write(f"SUB {subject} {self._sid}\r\n".encode())

    async def refused(self) -> Refused:
        """Of everything since the last call: a server handles one connection's lines in order."""
        found = Refused()
        self._writer.write(b"PING\r\n")
        await self._writer.drain()
        async with asyncio.timeout(ANSWER_S):
            while (line := await self._reader.readline()) != b"PONG\r\n":
                if not line:
                    raise ConnectionError("the server closed the connection")
                if line.startswith((b"MSG ", b"HMSG ")):
                    head = line.split()
                    data = await self._reader.readexactly(int(head[-1]) + 2)
                    self.messages.append((head[1].decode(), data[:-2]))
                elif match := _DENIED.search(line):
                    where = found.publish if match[1] == b"Publish" else found.subscribe
                    where.add(match[2].decode())
                elif line == b"PING\r\n":
                    self._writer.write(b"PONG\r\n")
        return found

    async def tried(self, publish: Iterable[str], subscribe: Iterable[str]) -> Refused:
        for subject in publish:
            self.publish(subject)
        for subject in subscribe:
            self.subscribe(subject)
        return await self.refused()


@contextlib.asynccontextmanager
async def plain(server: NatsServer, credentials: str) -> AsyncIterator[PlainClient]:
    """Raises ConnectionError where the credentials are refused."""
    claims, key = nkey_jwt.read_credentials(credentials)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 20)
    try:
        hello = json.loads((await reader.readline()).removeprefix(b"INFO "))
        signed = base64.urlsafe_b64encode(key.sign(hello["nonce"].encode())).rstrip(b"=").decode()
        options = {"verbose": False, "pedantic": False, "headers": True, "jwt": claims, "sig": signed, "lang": "plain"}
        writer.write(f"CONNECT {json.dumps(options)}\r\n".encode())
        client = PlainClient(reader, writer)
        await client.refused()
        yield client
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@dataclass(slots=True)
class Trust:
    """The server and everything that it believes. `folder`: for files of a test."""

    server: NatsServer
    keys: Keys
    folder: Path

    def credentials(self, role: Role) -> str:
        return self.keys.creds_file(role).read_text()

    @contextlib.asynccontextmanager
    async def person(self) -> AsyncIterator[NatsBus]:
        async with await connect(self.server.url, name="person", creds_file=str(self.keys.creds_file(PERSON))) as bus:
            yield bus

    def settings(self, state: Path, **more: object) -> AgentSettings:
        values = {
            "nats_url": self.server.url,
            "agent_state_dir": state,
            "agent_workspaces_dir": state / "workspaces",
            "agent_authority_key_file": self.keys.authority_file,
            "agent_authority_creds_file": self.keys.creds_file(AUTHORITY_USER),
            "agent_authority_account": self.keys.services.public,
        }
        return AgentSettings.model_validate(values).model_copy(update=more)  # also shorter lives than are allowed

    def authority(self, state: Path, **more: object) -> Authority:
        from tether_agent import authority

        state.mkdir(parents=True, exist_ok=True)
        made = authority.of(self.settings(state, **more))
        assert made is not None
        return made


@contextlib.contextmanager
def trusted_server(folder: Path, tenants: Sequence[str]) -> Iterator[Trust]:
    secrets = folder / "secrets"
    secrets.mkdir(parents=True)
    keys = nats_authority.keys(secrets)
    nats_authority.write_credentials(keys, permissions.ROLES)
    with running_server(extra=nats_authority.server_config(keys, tenants, folder / "accounts")) as server:
        yield Trust(server, keys, folder)


async def renewed_nowhere(_tenant: str, _workspace: str, _credentials: str) -> None:
    """For sandboxes that read the authority's own file."""


def of_sandbox(tenant: str, workspace: str) -> str:
    return ids.sandbox_id(tenant, workspace)


def user(account: Key, **more: object) -> str:
    """Credentials that somebody made up with a key that they have."""
    key = nkey_jwt.new_key(Kind.USER)
    values = {"name": "made-up", "issued_s": int(time.time()), **more}
    return nkey_jwt.credentials(nkey_jwt.user_claims(account, key.public, **values), key)  # type: ignore[arg-type]
