"""JSON with the C parts of the standard library alone.

`json` pulls in `re` and `enum`: 1.2 MiB of the keeper's 12. The scanner and the string encoder in `_json` are the
ones that `json` itself uses.
"""

from __future__ import annotations

from _json import encode_basestring_ascii, make_scanner

Json = dict[str, "object"]


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


class _Context:
    """What the scanner asks of a decoder."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = staticmethod(_no_constant)  # NaN and the infinities
    memo: dict[str, str] = {}  # noqa: RUF012  (the C scanner keeps its own)


_scan = make_scanner(_Context)  # type: ignore[arg-type]


def loads(text: bytes) -> Json:
    """One JSON object. Raises ValueError for anything else."""
    try:
        decoded = text.decode().strip(" \t\r\n")
        value, end = _scan(decoded, 0)
    # Without json.decoder the scanner of 3.11 has no exception class for some errors: SystemError.
    except (StopIteration, RecursionError, SystemError, ValueError):
        raise ValueError("not JSON") from None
    if end != len(decoded) or not isinstance(value, dict):
        raise ValueError("not one JSON object")
    return value


def dumps(value: object) -> bytes:
    """Compact ASCII JSON of dicts, lists, strings, ints, floats, booleans and None."""
    return _encode(value).encode("ascii")


def _encode(value: object) -> str:
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        text = repr(value)
        if text in ("inf", "-inf", "nan"):
            raise ValueError("no JSON for a number that is not finite")
        return text
    if isinstance(value, dict):
        return "{" + ",".join(f"{encode_basestring_ascii(str(k))}:{_encode(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join([_encode(item) for item in value]) + "]"
    raise TypeError(f"no JSON for {type(value).__name__}")
