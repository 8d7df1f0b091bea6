"""JSON from outside: bounded in size and depth, strict UTF-8, no NaN or Infinity, an object at the top.

The error names the field and the remedy; nothing of the input is echoed (it may hold a secret).
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from tether.errors import InvalidError
from tether.limits import JSON_DEPTH_MAX


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def depth_of(text: str) -> int:
    """Deepest nesting of brackets outside strings; linear, so a bracket bomb is refused before it is parsed."""
    depth = deepest = 0
    in_string = escaped = False
    for char in text:
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest


def loads_object(data: bytes, field: str, *, bytes_max: int) -> dict[str, Any]:
    """Parse `data` as one JSON object. Raises `InvalidError` naming `field`."""
    if len(data) > bytes_max:
        raise InvalidError(field, f"must be at most {bytes_max} bytes, got {len(data)}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidError(field, f"must be UTF-8 (byte {error.start} is not)") from None
    # Cheap upper bound first: only text with many brackets is scanned character by character.
    if text.count("[") + text.count("{") > JSON_DEPTH_MAX and depth_of(text) > JSON_DEPTH_MAX:
        raise InvalidError(field, f"must be nested at most {JSON_DEPTH_MAX} deep")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        where = f" (line {error.lineno} column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidError(field, f"must be valid JSON{where}") from None
    if not isinstance(value, dict):
        raise InvalidError(field, "must be a JSON object")
    return value
