"""NATS headers and subjects on the wire: encode, parse, status line; and RFC 3339 times to nanoseconds."""

from __future__ import annotations

import calendar
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from tether.errors import BusError
from tether.ports import LiveMessage

_LINE: Final = b"NATS/1.0"
_KEY: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_BREAKS: Final = re.compile(r"[\r\n\0]")
_DIGITS_MAX: Final = 19  # of a sequence: below 2**64


def encode(headers: Mapping[str, str]) -> bytes:
    """The header block. Raises BusError for a name or value that would not survive it."""
    lines = [_LINE]
    for key, value in headers.items():
        if not _KEY.fullmatch(key) or _BREAKS.search(value):
            raise BusError(f"header {key!r} cannot be sent")
        lines.append(f"{key}: {value}".encode())
    return b"\r\n".join(lines) + b"\r\n\r\n"


def check_subject(subject: str) -> str:
    """Raises BusError for a subject that would break the protocol line (spaces, control characters, nothing)."""
    if not subject or not subject.isprintable() or " " in subject:
        raise BusError(f"subject {subject!r} cannot be used")
    return subject


def parse(raw: bytes | None) -> tuple[int, str, dict[str, str]]:
    """(status or 0, its description, headers). Lines that are none are skipped; the first of a name counts."""
    if not raw:
        return 0, "", {}
    first, *lines = raw.decode("utf-8", "replace").split("\r\n")
    code, _, description = first[len(_LINE) :].strip().partition(" ")
    headers: dict[str, str] = {}
    for line in lines:
        key, colon, value = line.partition(":")
        if colon:
            headers.setdefault(key, value.strip())
    return _number(code), description, headers


@lru_cache(maxsize=128)
def _seconds(text: str) -> int:
    year, month, day = int(text[0:4]), int(text[5:7]), int(text[8:10])
    return calendar.timegm((year, month, day, int(text[11:13]), int(text[14:16]), int(text[17:19])))


def time_ns(text: str) -> int:
    """Unix nanoseconds of an RFC 3339 time as servers write it; 0 for an empty text. Raises ValueError."""
    if not text:
        return 0
    seconds, rest = _seconds(text[:19]), text[19:]
    fraction, offset_s = "", 0
    if rest.startswith("."):
        end = 1
        while end < len(rest) and rest[end].isdigit():
            end += 1
        fraction, rest = rest[1:end], rest[end:]
    if rest and rest not in ("Z", "z"):
        sign = -1 if rest[0] == "-" else 1
        offset_s = sign * (int(rest[1:3]) * 3600 + int(rest[4:6]) * 60)
    return (seconds - offset_s) * 1_000_000_000 + int((fraction + "000000000")[:9])


def _number(text: str) -> int:
    """Of ASCII digits, as servers write a sequence; 0 for anything else."""
    return int(text) if len(text) <= _DIGITS_MAX and text.isascii() and text.isdigit() else 0


def live_message(subject: str, data: bytes, headers: Mapping[str, str]) -> LiveMessage:
    """A republished copy. One without its sequence (published to the live subject by hand) has sequence 0; a sequence
    or time that no server writes counts as none, as whoever may publish there chooses its headers."""
    try:
        stored_at_ns = time_ns(headers.get("Nats-Time-Stamp", ""))
    except ValueError:
        stored_at_ns = 0
    return LiveMessage(
        subject,
        _number(headers.get("Nats-Sequence", "")),
        _number(headers.get("Nats-Last-Sequence", "")),
        data,
        stored_at_ns if 0 <= stored_at_ns < 2**63 else 0,
        headers,
    )
