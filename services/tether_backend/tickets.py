"""Tickets: short-lived permits to open one conversation's streams, for what cannot send a header. Pure.

A browser's EventSource and WebSocket have only their URL, and a URL is no place for a token: it ends up in logs,
histories and referrers. A ticket is worth less: one conversation, and one minute to open it in. Over the WebSocket that
it opens, whoever holds it may also ask what its token may, about this conversation alone.

    ticket = base64url(version, expires_at in ms, MAC)
    MAC    = HMAC-SHA-256 under a key of the principal's token, over version, expires_at, tenant, name, conversation

The key is derived from the digest of the token as the tokens file gives it, so a ticket holds across restarts and on
every replica with the same file, and dies with the token that it stands for. The token cannot be had from a ticket.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import struct
from typing import Final

from tether.api import StreamTicket
from tether.errors import Code, Problem, problem
from tether.limits import TICKET_LIFE_S
from tether_backend.config import Principal, Tokens

_VERSION: Final = 1
_LAYOUT: Final = ">BQ32s"  # version, expires_at in unix ms, MAC
_CHARS_MAX: Final = 64
_PURPOSE: Final = b"tether/stream-ticket/1"


def issue(tokens: Tokens, principal: Principal, conversation: str, now_ms: int) -> StreamTicket:
    """A ticket for a principal of the tokens file."""
    digest = next(digest for digest, known in tokens.entries if known == principal)
    expires_at = now_ms + round(TICKET_LIFE_S * 1000)
    packed = struct.pack(_LAYOUT, _VERSION, expires_at, _mac(digest, principal, conversation, expires_at))
    return StreamTicket(ticket=base64.urlsafe_b64encode(packed).decode().rstrip("="), expires_at=expires_at)


def check(tokens: Tokens, ticket: str, conversation: str, now_ms: int) -> Principal | Problem:
    """Whom the ticket stands for; UNAUTHENTICATED where it is no ticket of this conversation, or has expired.

    Compares with every entry, in constant time each.
    """
    refused = problem(Code.UNAUTHENTICATED, "ticket: must be one that was given for this conversation, unchanged")
    if len(ticket) > _CHARS_MAX or not ticket.isascii():
        return refused
    try:
        packed = base64.b64decode(ticket + "=" * (-len(ticket) % 4), altchars=b"-_", validate=True)
        version, expires_at, told = struct.unpack(_LAYOUT, packed)
    except (binascii.Error, struct.error, ValueError):
        return refused
    found = None
    for digest, principal in tokens.entries:
        if hmac.compare_digest(told, _mac(digest, principal, conversation, expires_at)):
            found = principal
    if found is None or version != _VERSION:
        return refused
    if now_ms > expires_at:
        return problem(Code.UNAUTHENTICATED, "ticket: has expired; get another and go on from the last cursor")
    return found


def _mac(digest: bytes, principal: Principal, conversation: str, expires_at: int) -> bytes:
    key = hmac.digest(digest, _PURPOSE, hashlib.sha256)
    # Lengths first: no two sets of fields give the same bytes.
    fields = [text.encode() for text in (principal.tenant, principal.name, conversation)]
    message = struct.pack(">BQIII", _VERSION, expires_at, *map(len, fields)) + b"".join(fields)
    return hmac.digest(key, message, hashlib.sha256)
