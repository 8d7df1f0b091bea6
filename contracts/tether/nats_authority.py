"""The keys of a NATS that is Tether's own, what its server is told, and the credentials of each role.

    operator      signs the accounts; needed only here, when the set starts or roles are given out
    authority     a signing key of the operator's: the agent service makes workspaces' accounts with it, and revokes
    services      the account with JetStream in which services and people are
    system        the servers' own account: by it the agent service tells them of workspaces' accounts

Made once, kept in a folder of mode 0700 as files of mode 0600. A role's users are signed by a key of the role's
(derived from the account's), whose scope in the account's claims is the permission table: credentials that were given
out follow it when servers are told of a new one. Those of people (`cli`) may do everything in the services' account:
whoever can read them can read the keys too.

`python -m tether.nats_authority FOLDER [--tenant NAME]… [--accounts-dir DIR] [--push URL]` makes or renews all of it
for a NATS of one's own, and says as JSON where it is; `tether nats-permissions --write` does the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tether import nkey_jwt, permissions
from tether.errors import BusError, InvalidError
from tether.ids import check_token
from tether.nkey_jwt import Allowed, CredentialError, Key, Kind, Scope
from tether.permissions import ROLES, Role
from tether.service import write_whole
from tether.tls import TlsFilesError, client_context

# Always the same: a server that reloads its configuration refuses another operator, and claims that differ are one.
OPERATOR_ISSUED_S: Final = 1_700_000_000
SERVER_CONFIG: Final = "tether-accounts.conf"
ACCOUNTS_DIR: Final = "/data/accounts"
PERSON: Final = "cli"
UPDATE: Final = "$SYS.REQ.CLAIMS.UPDATE"
PUSH_S: Final = 10.0
AUTHORITY_USER: Final = "authority"
_KINDS: Final = {
    "operator": Kind.OPERATOR,
    "authority": Kind.OPERATOR,
    "services": Kind.ACCOUNT,
    "system": Kind.ACCOUNT,
}
_SEED: Final = ".seed"
_CREDS: Final = ".creds"
_INBOX: Final = f"{permissions.inbox_prefix(AUTHORITY_USER)}.>"
# All that the agent service does with the servers' own account.
SYSTEM_USE: Final = Allowed(publish=(_INBOX, UPDATE, "$SYS.REQ.ACCOUNT.*.CLAIMS.LOOKUP"), subscribe=(_INBOX,))


@dataclass(frozen=True, slots=True)
class Keys:
    """See the module's docstring. `folder`: where their files are."""

    folder: Path
    operator: Key
    authority: Key
    services: Key
    system: Key

    @property
    def authority_file(self) -> Path:
        return self.folder / f"authority{_SEED}"

    def role_key(self, role: Role) -> Key:
        """What signs the users of a role."""
        return nkey_jwt.derived_key(Kind.ACCOUNT, self.services, f"tether/role/v1/{role}")

    def creds_file(self, name: str) -> Path:
        """Of a role, of `cli`, or of `authority`; there once `write_credentials` made it."""
        return self.folder / f"{name}{_CREDS}"


def keys(folder: Path) -> Keys:
    """Those of this folder, made where they are missing. Raises CredentialError for what is no key, OSError."""
    found: dict[str, Key] = {}
    for name, kind in _KINDS.items():
        path = folder / f"{name}{_SEED}"
        if not path.exists():
            write_whole(path, nkey_jwt.new_key(kind).seed.encode())
        found[name] = nkey_jwt.read_key(path.read_text(encoding="ascii"))
        if found[name].kind is not kind:
            raise CredentialError(f"{path} is a key of another kind")
    return Keys(folder, **found)


def write_credentials(own: Keys, roles: Sequence[Role]) -> None:
    """Of these roles, of people, and of the agent service towards the system account."""
    for role in roles:
        _write(own, role, own.role_key(role), scoped_by=own.services.public, inbox=permissions.inbox_prefix(role))
    _write(own, PERSON, own.services)
    _write(own, AUTHORITY_USER, own.system, allowed=SYSTEM_USE, inbox=permissions.inbox_prefix(AUTHORITY_USER))


def _write(
    own: Keys,
    name: str,
    issuer: Key,
    *,
    scoped_by: str | None = None,
    allowed: Allowed | None = None,
    inbox: str | None = None,
) -> None:
    """A user keeps its key over restarts: connections that outlived one go on."""
    path = own.creds_file(name)
    try:
        user = nkey_jwt.read_credentials(path.read_text(encoding="ascii"))[1]
    except (OSError, UnicodeDecodeError, CredentialError):
        user = nkey_jwt.new_key(Kind.USER)
    claims = nkey_jwt.user_claims(
        issuer,
        user.public,
        name=name,
        issued_s=int(time.time()),
        scoped_by=scoped_by,
        allowed=allowed,
        inbox=inbox,
    )
    write_whole(path, nkey_jwt.credentials(claims, user).encode())


def services_claims(own: Keys, tenants: Sequence[str]) -> str:
    """Of the services' account: the permission table, and what workspaces' accounts may import."""
    return nkey_jwt.account_claims(
        own.operator,
        own.services.public,
        name="TETHER",
        issued_s=int(time.time()),
        jetstream=True,
        scopes=[
            Scope(own.role_key(role).public, role, permissions.service(role, tenants)) for role in permissions.ROLES
        ],
        exports=permissions.exports(),
    )


async def push(own: Keys, tenants: Sequence[str], url: str, ca_file: Path | None = None) -> None:
    """Tell running servers of the services' account as it is now: their configuration tells them only at their start.
    Raises BusError, TlsFilesError, CredentialError (they refuse)."""
    from tether.bus import connect

    creds = str(own.creds_file(AUTHORITY_USER))
    context = client_context(ca_file, None, None)
    async with await connect(url, name="tether-permissions", creds_file=creds, tls=context) as bus:
        answer = await bus.request(UPDATE, services_claims(own, tenants).encode(), timeout_s=PUSH_S)
    if json.loads(answer.data).get("data", {}).get("code") != 200:
        raise CredentialError(f"the servers refused them: {answer.data[:500]!r}")


def server_config(own: Keys, tenants: Sequence[str], accounts_folder: Path | str) -> str:
    """The part of a server's configuration that says whom it believes. Every server of a cluster gets the same, and a
    folder of its own. Holds no secret."""
    now_s = int(time.time())
    operator = nkey_jwt.operator_claims(
        own.operator,
        name="tether",
        system_account=own.system.public,
        signing_keys=[own.authority.public],
        issued_s=OPERATOR_ISSUED_S,
    )
    system = nkey_jwt.account_claims(own.operator, own.system.public, name="SYSTEM", issued_s=now_s)
    return f"""operator: {operator}
system_account: {own.system.public}
resolver {{
  type: full
  dir: "{accounts_folder}"
  allow_delete: false
  interval: "2m"
}}
resolver_preload {{
  {own.system.public}: {system}
  {own.services.public}: {services_claims(own, tenants)}
}}
"""


def write_all(folder: Path, tenants: Sequence[str], accounts_folder: Path | str) -> Keys:
    """Everything for a NATS of one's own. Raises CredentialError, OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    own = keys(folder)
    write_credentials(own, ROLES)
    write_whole(folder / SERVER_CONFIG, server_config(own, tenants, accounts_folder).encode())
    return own


def places(own: Keys) -> dict[str, object]:
    """Where everything is that `write_all` made; no secret."""
    return {
        "server_config": str(own.folder / SERVER_CONFIG),
        "credentials": {name: str(own.creds_file(name)) for name in (*ROLES, PERSON)},
        "authority_key_file": str(own.authority_file),
        "authority_creds_file": str(own.creds_file(AUTHORITY_USER)),
        "authority_account": own.services.public,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tether.nats_authority", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tenant", action="append", help="may be given several times; default: default")
    parser.add_argument("--accounts-dir", default=ACCOUNTS_DIR, help="where a server keeps accounts")
    parser.add_argument("--push", metavar="URL", help="running servers that are to be told of it as well")
    parser.add_argument(
        "--ca-file", type=Path, help="with --push: authorities that their certificate is checked against"
    )
    arguments = parser.parse_args()
    try:
        tenants = [check_token(name, "tenant") for name in arguments.tenant or ["default"]]
        own = write_all(arguments.folder, tenants, arguments.accounts_dir)
        if arguments.push is not None:
            asyncio.run(push(own, tenants, arguments.push, arguments.ca_file))
    except InvalidError as error:
        parser.error(f"--{error.field} {error.remedy}")
    except (CredentialError, BusError, TlsFilesError, OSError) as error:
        print(f"{arguments.folder}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(places(own), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
