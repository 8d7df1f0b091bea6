"""Cursors: an opaque position in a tenant's log, bound to tenant and conversation.

A cursor holds a stream sequence, the index in that message's frame up to which the reader has applied (exclusive),
and a tag of the stored message's timestamp: a recreated or rolled-back stream reuses sequences, so position is no
identity. Whoever accepts a cursor reads that sequence and compares the tag.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from dataclasses import dataclass
from enum import Enum
from typing import Final

from tether.errors import InvalidError
from tether.ports import StoredMessage

_LAYOUT: Final = ">BQHI8s"  # version, sequence, index, tag, binding
_VERSION: Final = 1
WHOLE: Final = 0xFFFF  # index: the whole message is applied


def tag_of(stored_at_ns: int) -> int:
    """32 bits of a stored message's timestamp (unix nanoseconds)."""
    return int.from_bytes(hashlib.blake2b(stored_at_ns.to_bytes(8, "big"), digest_size=4).digest(), "big")


def _binding(tenant: str, conversation: str) -> bytes:
    return hashlib.blake2b(f"{tenant}\x1f{conversation}".encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class Cursor:
    """Applied: every message before `sequence`, and of that message the first `index` events (`WHOLE`: all).
    `sequence` 0 is the beginning."""

    sequence: int
    index: int = WHOLE
    tag: int = 0

    @staticmethod
    def beginning() -> Cursor:
        return Cursor(0)

    @staticmethod
    def after(sequence: int, stored_at_ns: int, *, index: int = WHOLE) -> Cursor:
        return Cursor(sequence, index, tag_of(stored_at_ns))

    def encode(self, tenant: str, conversation: str) -> str:
        packed = struct.pack(_LAYOUT, _VERSION, self.sequence, self.index, self.tag, _binding(tenant, conversation))
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")

    @staticmethod
    def decode(text: str, tenant: str, conversation: str) -> Cursor:
        """Raises `InvalidError` for a token that is damaged, of another version, tenant or conversation."""
        remedy = "must be a cursor that this conversation's events or history gave, unchanged"
        if len(text) > 64:
            raise InvalidError("cursor", remedy)
        try:
            packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            version, sequence, index, tag, binding = struct.unpack(_LAYOUT, packed)
        except (binascii.Error, struct.error, ValueError):
            raise InvalidError("cursor", remedy) from None
        if version != _VERSION:
            raise InvalidError("cursor", f"version {version} is not known here; attach without a cursor")
        if binding != _binding(tenant, conversation):
            raise InvalidError("cursor", "belongs to another tenant or conversation")
        return Cursor(sequence, index, tag)


class Standing(Enum):
    """What a stream says of a cursor."""

    CURRENT = "current"  # the message is there and is the same: continue after it
    EVICTED = "evicted"  # before the retained range: attach; a gap only if an ordinal is missing
    CHANGED = "changed"  # another message, or beyond the end: CURSOR_POSITION_CHANGED


def judge(cursor: Cursor, message: StoredMessage | None, *, last_sequence: int) -> Standing:
    """`message` is what the stream holds at the cursor's sequence; `last_sequence` is the stream's, from its leader."""
    if cursor.sequence == 0:
        return Standing.CURRENT  # the stream is the tenant's: whether an ordinal is missing shows in the frames
    if cursor.sequence > last_sequence:
        return Standing.CHANGED
    if message is None:
        return Standing.EVICTED
    return Standing.CURRENT if tag_of(message.stored_at_ns) == cursor.tag else Standing.CHANGED
