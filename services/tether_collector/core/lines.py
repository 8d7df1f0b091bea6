"""Output lines as JSON: whatever bytes a CLI prints, the answer is an object or the reason why there is none.

Values are safe to store and to publish: finite numbers, at most 64 levels deep, no lone surrogates (JSON may escape
one, UTF-8 cannot carry it). Texts from a line are cut before they reach an event's small fields, and ids that may not
stand in a subject are replaced by a digest, so that a hostile line cannot make an event that no reader accepts.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any, Final, NoReturn

from tether.events import RAW
from tether.jsonsafe import depth_of
from tether.limits import JSON_DEPTH_MAX
from tether_collector.core.inputs import Draft, OutputLine

PREVIEW_CHARS: Final = 1024
DETAIL_CHARS: Final = 2048
NAME_CHARS: Final = 256
ID_CHARS: Final = 200

_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ESCAPED_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_KEY: Final = re.compile(r"\b(sk-[A-Za-z]{0,4}|Bearer\s+)[A-Za-z0-9._-]{6,}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is out of range")
    return value


# One decoder: `json.loads` with options builds a new one for each line.
_decode: Final = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite).decode


def _mend(value: Any) -> Any:
    """The value without lone surrogates; pairs have been joined by the parser."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_mend(item) for item in value]
    if isinstance(value, dict):
        return {_mend(key): _mend(item) for key, item in value.items()}
    return value


def parse(line: OutputLine) -> dict[str, Any] | str:
    """The object of a line, or why it is none."""
    data = line.data
    if line.bytes_total > len(data):
        return f"longer than {len(data)} bytes, cut"
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    if data.count(b"{") + data.count(b"[") > JSON_DEPTH_MAX and depth_of(text) > JSON_DEPTH_MAX:
        return f"nested more than {JSON_DEPTH_MAX} deep"
    try:
        value = _decode(text)
    except (ValueError, RecursionError):
        return "not JSON" if line.complete else "not JSON, cut off by the end of the stream"
    if not isinstance(value, dict):
        return "not a JSON object"
    if b"\\u" in data and _ESCAPED_SURROGATE.search(data):
        mended: dict[str, Any] = _mend(value)
        return mended
    return value


def raw(line: OutputLine, why: str) -> Draft:
    """A bounded event for a line that no rule maps."""
    preview = line.data[: PREVIEW_CHARS * 4].decode("utf-8", "replace")[:PREVIEW_CHARS].replace("\x00", "\ufffd")
    body = {"stream": line.stream, "preview": redact(preview), "bytes": line.bytes_total, "why": why}
    return Draft(RAW, body)


def redact(text: str) -> str:
    """Without what looks like key material."""
    return _KEY.sub(r"\1…", text)


def text_of(value: Any, chars_max: int = DETAIL_CHARS) -> str | None:
    """A string, cut, or None for anything else."""
    if not isinstance(value, str):
        return None
    return value if len(value) <= chars_max else value[: chars_max - 1] + "…"


def detail_of(value: Any) -> str | None:
    """An explanation for people: a string, cut and redacted."""
    text = text_of(value)
    return None if text is None else redact(text)


def count_of(value: Any) -> int:
    """A count: an int from 0, anything else is 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else 0


def id_of(value: Any) -> str | None:
    """An id for an event's body: a short string as it is, a long one as its digest, anything else None."""
    if not isinstance(value, str) or not value:
        return None
    return value if len(value) <= ID_CHARS else digest_of(value)


def token_of(value: Any) -> str | None:
    """An id that may stand in a subject or a path: as it is, or its digest."""
    if not isinstance(value, str) or not value:
        return None
    return value if _TOKEN.fullmatch(value) else digest_of(value)


def digest_of(text: str) -> str:
    return "x_" + hashlib.sha256(text.encode()).hexdigest()[:24]
