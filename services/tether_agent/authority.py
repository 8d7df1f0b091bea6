"""What sandboxes may do on NATS, and until when: accounts of workspaces, credentials of sandboxes, their revocation.

    admit    is the workspace's account as it should be at the servers? else it is pushed ─▶ credentials, new for each
             boot: a key of its own, claims that end after `agent_credentials_life_s`
    renew    before half of that is over: the same key, new claims, in the same file. The collector reads it whenever it
             connects; a server closes the connection when its claims end
    revoke   once nothing of the sandbox is left: the account is pushed with "no claims issued up to now count" ─▶ every
             server closes what uses them and refuses them from then on ─▶ the file goes

A workspace's account has no key of its own anywhere: it is derived from the authority's (`nkey_jwt.derived_key`), so
nothing has to be kept, and every agent service with the same authority comes to the same one.

The race: claims say their second, and a revocation covers a whole one. So claims are issued after the second of the
account's last revocation, and a revocation covers the second in which the last claims were issued. The credentials file
is what is known to be unrevoked: it is written before anybody gets its content, and deleted when the revocation is
acknowledged. Revocations wait for a bus that is away, and a later admission of the same workspace waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from tether import nkey_jwt, permissions
from tether.bus import NatsBus, connect
from tether.errors import BusError
from tether.ids import sandbox_id
from tether.nkey_jwt import EVERY_USER, CredentialError, Key, Kind
from tether.private import open_to_others
from tether.service import write_whole
from tether.settings import ConfigurationError
from tether_agent.config import AgentSettings

UPDATE: Final = "$SYS.REQ.CLAIMS.UPDATE"
FOLDER: Final = "bus"
ANSWER_S: Final = 5.0
RETRY_S: Final = 1.0
LOOK_MAX_S: Final = 30.0  # between looks for credentials that have to be renewed
_PURPOSE: Final = "tether/workspace-account/v1/"
_SUFFIX: Final = ".creds"
_log = structlog.get_logger("tether_agent")

Renewed = Callable[[str, str, str], Awaitable[None]]  # tenant, workspace, the credentials' text
Where = tuple[str, str]  # tenant, workspace


class AuthorityAwayError(Exception):
    """The servers could not be told, or did not take it: try again later."""


@dataclass(frozen=True, slots=True)
class _Claims:
    """Of the credentials in a file."""

    key: Key
    name: str
    issued_s: int
    expires_s: int


class Authority:
    """See the module's docstring. One for an agent service; `running` does what has to be done by itself."""

    def __init__(self, settings: AgentSettings, key: Key, creds_file: Path, account: str) -> None:
        self._url = settings.nats_url
        self._tls = settings.tls()
        self._life_s = settings.agent_credentials_life_s
        self._folder = settings.agent_state_dir / FOLDER
        self._key = key
        self._creds_file = creds_file
        self._account = account
        self._bus: NatsBus | None = None
        self._connecting = asyncio.Lock()
        self._locks: dict[Where, asyncio.Lock] = {}
        self._pushed: dict[Where, int] = {}  # the second up to which its account, as it is at the servers, revokes
        self._revoking: dict[Where, None] = {}
        self._wake = asyncio.Event()

    def file(self, tenant: str, workspace: str) -> Path:
        """Where a sandbox's credentials are, while it may use them."""
        return self._folder / f"{tenant}.{workspace}{_SUFFIX}"

    # --- the three deeds ---

    async def admit(self, tenant: str, workspace: str, sandbox: str, *, boot: str) -> str:
        """The text of the credentials of this boot's collectors. Raises AuthorityAwayError."""
        where = (tenant, workspace)
        async with self._lock(where):
            if where in self._revoking:
                await self._revoke(where)
            known = _read(self.file(tenant, workspace))
            name = f"{sandbox} {boot}"
            if known is not None and known.name == name and not self._due(known):
                return self.file(tenant, workspace).read_text(encoding="ascii")
            if known is not None and known.name != name:
                # Of an earlier boot that was not revoked: it is over now that there is a later one.
                await self._revoke(where)
                known = None
            if where not in self._pushed:
                await self._ensure_account(where)
            key = nkey_jwt.new_key(Kind.USER) if known is None else known.key
            return await asyncio.to_thread(self._issue, where, key, name)

    def revoke(self, tenant: str, workspace: str) -> None:
        """Nothing of the sandbox is left: its credentials count no more, as soon as the servers can be told."""
        if self.file(tenant, workspace).exists():
            self._revoking[tenant, workspace] = None
            self._wake.set()

    def revoke_all_but(self, living: Collection[Where]) -> None:
        """Of sandboxes that ended while nobody was there to say so."""
        for path in self._folder.glob(f"*{_SUFFIX}"):
            if (where := _where(path)) not in living:
                self.revoke(*where)

    @contextlib.asynccontextmanager
    async def running(self, renewed: Renewed) -> AsyncIterator[None]:
        """`renewed` hands new credentials to a sandbox that cannot read the file."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._revoke_all(), name="bus-revocations"),
                group.create_task(self._renew_all(renewed), name="bus-credentials"),
            ]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                if self._bus is not None:
                    await self._bus.close()

    # --- tasks ---

    async def _revoke_all(self) -> None:
        while True:
            self._wake.clear()
            failed = False
            for where in list(self._revoking):
                async with self._lock(where):
                    if where in self._revoking:
                        try:
                            await self._revoke(where)
                        except AuthorityAwayError as error:
                            failed = True
                            _log.warning("revocation_waits", tenant=where[0], workspace=where[1], reason=str(error))
            if failed:
                await asyncio.sleep(RETRY_S)
            else:
                await self._wake.wait()

    async def _renew_all(self, renewed: Renewed) -> None:
        while True:
            for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
                async with self._lock(_where(path)):
                    await self._renew(path, renewed)
            await asyncio.sleep(min(LOOK_MAX_S, self._life_s / 8))

    async def _renew(self, path: Path, renewed: Renewed) -> None:
        """Also sees to it that the servers know the account: they may have lost it, or know it as an earlier version
        of Tether made it."""
        where, known = _where(path), _read(path)
        if known is None or where in self._revoking:
            return
        due = self._due(known)
        if due or where not in self._pushed:
            try:
                await self._ensure_account(where)
            except AuthorityAwayError as error:
                _log.warning("account_not_looked_at", tenant=where[0], workspace=where[1], reason=str(error))
        if due:
            text = await asyncio.to_thread(self._issue, where, known.key, known.name)
            await renewed(*where, text)
            _log.info("credentials_renewed", tenant=where[0], workspace=where[1])

    # --- claims ---

    def _due(self, known: _Claims) -> bool:
        return known.expires_s - time.time() < self._life_s / 2

    def _issue(self, where: Where, key: Key, name: str) -> str:
        """Blocks on the disk."""
        tenant, workspace = where
        issued_s = max(int(time.time()), self._pushed.get(where, 0) + 1)
        claims = nkey_jwt.user_claims(
            self._account_key(where),
            key.public,
            name=name,
            issued_s=issued_s,
            inbox=permissions.sandbox_inbox(tenant, workspace),
            expires_s=int(time.time() + self._life_s),
        )
        text = nkey_jwt.credentials(claims, key)
        write_whole(self.file(tenant, workspace), text.encode())
        return text

    def _account_key(self, where: Where) -> Key:
        return nkey_jwt.derived_key(Kind.ACCOUNT, self._key, f"{_PURPOSE}{where[0]}/{where[1]}")

    def _account_claims(self, where: Where, issued_s: int, revoked_s: int) -> str:
        return nkey_jwt.account_claims(
            self._key,
            self._account_key(where).public,
            name=f"{where[0]}.{where[1]}",
            issued_s=issued_s,
            default=permissions.sandbox(*where, sandbox_id(*where)),
            imports=permissions.sandbox_imports(self._account, *where),
            revocations={EVERY_USER: revoked_s},
        )

    async def _ensure_account(self, where: Where) -> None:
        """A new account revokes what is older than itself: the workspace may have had one that was deleted."""
        found = await self._lookup(where)
        if found is None:
            await self._push(where, 0, int(time.time()) - 1)
            return
        body = found.get("nats", {})
        revoked_s = int(body.get("revocations", {}).get(EVERY_USER, 0))
        wanted = nkey_jwt.read_claims(self._account_claims(where, 0, revoked_s))["nats"]
        if any(body.get(part) != wanted[part] for part in ("imports", "default_permissions", "revocations")):
            await self._push(where, int(found.get("iat", 0)), revoked_s)
        self._pushed[where] = revoked_s

    async def _revoke(self, where: Where) -> None:
        """The lock is held."""
        path = self.file(*where)
        known = _read(path)
        found = await self._lookup(where)
        revoked_s = max(int(time.time()), 0 if known is None else known.issued_s)
        await self._push(where, 0 if found is None else int(found.get("iat", 0)), revoked_s)
        path.unlink(missing_ok=True)
        self._revoking.pop(where, None)
        _log.info("credentials_revoked", tenant=where[0], workspace=where[1])

    # --- servers ---

    async def _lookup(self, where: Where) -> dict[str, Any] | None:
        account = self._account_key(where).public
        data = await self._ask(f"$SYS.REQ.ACCOUNT.{account}.CLAIMS.LOOKUP", b"")
        try:
            return nkey_jwt.read_claims(data.decode("ascii")) if data else None
        except (CredentialError, UnicodeDecodeError):
            raise AuthorityAwayError("the servers' answer is no claims") from None

    async def _push(self, where: Where, before_s: int, revoked_s: int) -> None:
        """Claims of a later second than those that are there: servers keep the newest."""
        text = self._account_claims(where, max(int(time.time()), before_s + 1), revoked_s)
        answer = await self._ask(UPDATE, text.encode())
        try:
            code = json.loads(answer).get("data", {}).get("code")
        except (ValueError, AttributeError):
            code = None
        if code != 200:
            raise AuthorityAwayError(f"the servers refused the account of workspace {where[1]}: {answer[:500]!r}")
        self._pushed[where] = revoked_s

    async def _ask(self, subject: str, data: bytes) -> bytes:
        try:
            async with self._connecting:
                if self._bus is None:
                    self._bus = await connect(
                        self._url, name="tether-agent authority", creds_file=str(self._creds_file), tls=self._tls
                    )
            return (await self._bus.request(subject, data, timeout_s=ANSWER_S)).data
        except BusError as error:
            raise AuthorityAwayError(f"the servers cannot be told of sandboxes' credentials: {error.detail}") from None

    def _lock(self, where: Where) -> asyncio.Lock:
        return self._locks.setdefault(where, asyncio.Lock())


def _where(path: Path) -> Where:
    tenant, _, workspace = path.name.removesuffix(_SUFFIX).partition(".")
    return tenant, workspace


def _read(path: Path) -> _Claims | None:
    """None where there is no file, or none that can be read."""
    try:
        text, key = nkey_jwt.read_credentials(path.read_text(encoding="ascii"))
        claims = nkey_jwt.read_claims(text)
        return _Claims(key, str(claims["name"]), int(claims["iat"]), int(claims["exp"]))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, CredentialError, KeyError, ValueError, TypeError) as error:
        _log.warning("credentials_unreadable", path=str(path), error=str(error))
        return None


def of(settings: AgentSettings) -> Authority | None:
    """The authority that the settings name; None where sandboxes use credentials that were made otherwise. Raises
    ConfigurationError."""
    named = {
        "TETHER_AGENT_AUTHORITY_KEY_FILE": settings.agent_authority_key_file,
        "TETHER_AGENT_AUTHORITY_CREDS_FILE": settings.agent_authority_creds_file,
        "TETHER_AGENT_AUTHORITY_ACCOUNT": settings.agent_authority_account,
    }
    missing = [name for name, value in named.items() if value is None]
    if len(missing) == len(named):
        return None
    if missing:
        raise ConfigurationError([f"{name}: is needed too; all of {', '.join(named)}, or none" for name in missing])
    key_file, creds_file = settings.agent_authority_key_file, settings.agent_authority_creds_file
    assert key_file is not None and creds_file is not None and settings.agent_authority_account is not None
    try:
        if open_to_others(key_file.stat()):
            raise ConfigurationError([f"TETHER_AGENT_AUTHORITY_KEY_FILE: {key_file} is open to others; chmod 600 it"])
        key = nkey_jwt.read_key(key_file.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError, CredentialError) as error:
        raise ConfigurationError([f"TETHER_AGENT_AUTHORITY_KEY_FILE: {key_file}: {error}"]) from None
    if key.kind is not Kind.OPERATOR:
        raise ConfigurationError(["TETHER_AGENT_AUTHORITY_KEY_FILE: must be a signing key of the operator (SO…)"])
    return Authority(settings, key, creds_file, settings.agent_authority_account)
