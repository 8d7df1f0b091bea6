"""NATS's decentralised authority: keys, and the signed claims of operators, accounts and users.

An operator signs accounts, an account signs its users; a server that knows the operator's claims believes both without
being asked. A user proves the key that its claims name by signing the server's nonce; claims and key together are a
credentials file. Claims are JWTs signed with ed25519 in NATS's own dress: keys are base32 with a letter for their kind
(`O` operator, `A` account, `U` user; seeds `SO`, `SA`, `SU`).

A client shows its claims in its first line, which servers keep short; so permissions stand in the account's claims: as
the default of its users, or as the **scope** of a signing key, whose users have that and nothing else.

Pure, but for `new_key` (randomness). Times are unix seconds, handed in.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import nkeys  # type: ignore[import-untyped]

HEADER: Final = {"typ": "JWT", "alg": "ed25519-nkey"}
CLAIMS_VERSION: Final = 2
UNLIMITED: Final = -1
INBOX_TAG: Final = "tether-inbox:"
EVERY_USER: Final = "*"  # in an account's revocations
_SECOND_NS: Final = 1_000_000_000
_SEED_BYTES: Final = 32
_PARTS: Final = 3
_NO_LIMITS: Final = {"subs": UNLIMITED, "data": UNLIMITED, "payload": UNLIMITED}
_JETSTREAM_LIMITS: Final = ("mem_storage", "disk_storage", "streams", "consumer", "max_ack_pending")


class Kind(IntEnum):
    """What a key is for: the prefix byte of its text."""

    OPERATOR = nkeys.PREFIX_BYTE_OPERATOR
    ACCOUNT = nkeys.PREFIX_BYTE_ACCOUNT
    USER = nkeys.PREFIX_BYTE_USER


class CredentialError(Exception):
    """A key, claims or credentials that cannot be read. Says what is wrong, never what stands in them."""


@dataclass(frozen=True, slots=True)
class Key:
    """`public` is its name, `seed` the secret."""

    kind: Kind
    public: str
    seed: str = field(repr=False)

    def sign(self, data: bytes) -> bytes:
        signed: bytes = nkeys.from_seed(self.seed.encode()).sign(data)
        return signed


def _key(kind: Kind, raw: bytes) -> Key:
    seed = nkeys.encode_seed(raw, int(kind))
    return Key(kind, nkeys.from_seed(seed).public_key.decode(), seed.decode())


def new_key(kind: Kind) -> Key:
    return _key(kind, secrets.token_bytes(_SEED_BYTES))


def derived_key(kind: Kind, authority: Key, purpose: str) -> Key:
    """The key that `authority` has for `purpose`: always the same, and of no use in finding out the authority's."""
    return _key(kind, hmac.digest(authority.seed.encode(), purpose.encode(), hashlib.sha256))


def read_key(seed: str) -> Key:
    """Of a seed's text. Raises CredentialError."""
    text = seed.strip()
    try:
        prefix, _ = nkeys.decode_seed(text.encode())
        return Key(Kind(prefix), nkeys.from_seed(text.encode()).public_key.decode(), text)
    except (nkeys.NkeysError, ValueError, binascii.Error, IndexError):
        raise CredentialError("it is no seed of an operator, account or user") from None


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a user may do. An empty `publish` or `subscribe` allows nothing of it (in NATS's own claims it would allow
    everything). `responses`: whoever is asked may answer once, within `response_ttl_s`."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    publish_deny: tuple[str, ...] = ()
    subscribe_deny: tuple[str, ...] = ()
    responses: bool = False
    response_ttl_s: int = 120

    def claims(self) -> dict[str, Any]:
        """As a user's claims state it."""
        found: dict[str, Any] = {
            "pub": _direction(self.publish, self.publish_deny),
            "sub": _direction(self.subscribe, self.subscribe_deny),
        }
        if self.responses:
            found["resp"] = {"max": 1, "ttl": self.response_ttl_s * _SECOND_NS}
        return found


def _direction(allow: tuple[str, ...], deny: tuple[str, ...]) -> dict[str, list[str]]:
    if not allow:
        return {"deny": [">"]}
    return {"allow": list(allow), **({"deny": list(deny)} if deny else {})}


@dataclass(frozen=True, slots=True)
class Scope:
    """A signing key of an account, by its public key, and what users that it signs may do. `role` is for people."""

    key: str
    role: str
    allowed: Allowed

    def claims(self) -> dict[str, Any]:
        """As an account's claims state it."""
        template = {**self.allowed.claims(), **_NO_LIMITS}
        return {"kind": "user_scope", "key": self.key, "role": self.role, "template": template}


@dataclass(frozen=True, slots=True)
class Export:
    """A subject (wildcards allowed) that other accounts may import: `service` to publish into, `stream` to hear."""

    name: str
    subject: str
    kind: str


@dataclass(frozen=True, slots=True)
class Import:
    """A subject of `account` that users of the importing account may use as their own."""

    name: str
    account: str
    subject: str
    kind: str


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _compact(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _signed(issuer: Key, subject: str, name: str, body: Mapping[str, Any], issued_s: int, expires_s: int | None) -> str:
    claims: dict[str, Any] = {
        "iat": issued_s,
        "iss": issuer.public,
        "sub": subject,
        "name": name,
        "nats": {**body, "version": CLAIMS_VERSION},
    }
    if expires_s is not None:
        claims["exp"] = expires_s
    claims["jti"] = base64.b32encode(hashlib.new("sha512_256", _compact(claims)).digest()).rstrip(b"=").decode()
    told = f"{_b64(_compact(HEADER))}.{_b64(_compact(claims))}"
    return f"{told}.{_b64(issuer.sign(told.encode()))}"


def operator_claims(
    operator: Key, *, name: str, system_account: str, signing_keys: Sequence[str] = (), issued_s: int
) -> str:
    """`signing_keys`: public keys that may sign accounts in its place."""
    body = {"type": "operator", "system_account": system_account, "signing_keys": list(signing_keys)}
    return _signed(operator, operator.public, name, body, issued_s, None)


def account_claims(
    authority: Key,
    account: str,
    *,
    name: str,
    issued_s: int,
    jetstream: bool = False,
    default: Allowed | None = None,
    scopes: Sequence[Scope] = (),
    exports: Sequence[Export] = (),
    imports: Sequence[Import] = (),
    revocations: Mapping[str, int] | None = None,
    connections_max: int = UNLIMITED,
) -> str:
    """`default`: what users may do whose claims say nothing of it; None: everything in the account. `scopes`: keys
    that sign users in its place. `revocations`: public key of a user, or `EVERY_USER` → unix second up to which its
    claims count no more."""
    limits: dict[str, Any] = {
        **_NO_LIMITS,
        "imports": UNLIMITED,
        "exports": UNLIMITED,
        "wildcards": True,
        "conn": connections_max,
        "leaf": 0,
        **dict.fromkeys(_JETSTREAM_LIMITS, UNLIMITED if jetstream else 0),
    }
    body: dict[str, Any] = {
        "type": "account",
        "limits": limits,
        "default_permissions": {"pub": {}, "sub": {}} if default is None else default.claims(),
        "signing_keys": [scope.claims() for scope in scopes],
        "revocations": dict(revocations or {}),
        "exports": [{"name": item.name, "subject": item.subject, "type": item.kind} for item in exports],
        "imports": [
            {"name": item.name, "account": item.account, "subject": item.subject, "type": item.kind} for item in imports
        ],
    }
    return _signed(authority, account, name, body, issued_s, None)


def user_claims(
    issuer: Key,
    user: str,
    *,
    name: str,
    issued_s: int,
    scoped_by: str | None = None,
    allowed: Allowed | None = None,
    inbox: str | None = None,
    expires_s: int | None = None,
    bearer: bool = False,
) -> str:
    """Signed by its account's own key; or by a scope's, and then `scoped_by` is the account. `allowed` None: as the
    account says. `inbox`: a note to the user itself, where it may get answers. `bearer`: whoever shows these claims is
    believed, without the key."""
    body: dict[str, Any] = {"type": "user"}
    if scoped_by is not None:
        body["issuer_account"] = scoped_by  # and nothing of its own: the scope is all it has
    else:
        body |= {**({"pub": {}, "sub": {}} if allowed is None else allowed.claims()), **_NO_LIMITS}
    if bearer:
        body["bearer_token"] = True
    if inbox is not None:
        body["tags"] = [f"{INBOX_TAG}{inbox}"]
    return _signed(issuer, user, name, body, issued_s, expires_s)


def inbox_of(claims: Mapping[str, Any]) -> str | None:
    """What a user's claims note as its inbox prefix."""
    body = claims.get("nats")
    tags = body.get("tags") if isinstance(body, dict) else None
    for tag in tags if isinstance(tags, list) else ():
        if isinstance(tag, str) and tag.startswith(INBOX_TAG):
            return tag.removeprefix(INBOX_TAG) or None
    return None


def credentials(claims: str, user: Key) -> str:
    """The text of a credentials file, as `nsc` writes it."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{claims}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )


def _between(text: str, title: str) -> str:
    lines = text.splitlines()
    for index, line in enumerate(lines[:-1]):
        if f"BEGIN {title}" in line:
            return lines[index + 1].strip()
    raise CredentialError(f"it has no section {title}")


def read_credentials(text: str) -> tuple[str, Key]:
    """Claims and key of a credentials file. Raises CredentialError."""
    return _between(text, "NATS USER JWT"), read_key(_between(text, "USER NKEY SEED"))


def read_claims(text: str) -> dict[str, Any]:
    """What claims say; their signature is the server's to check. Raises CredentialError."""
    parts = text.strip().split(".")
    try:
        found = json.loads(_unb64(parts[1])) if len(parts) == _PARTS else None
    except (ValueError, binascii.Error, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CredentialError("they are no claims")
    return found
