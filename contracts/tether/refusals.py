"""What a sender is told of input that a model refuses: the field and a remedy, in one wording everywhere.

pydantic's own messages speak of its types ("Input should be a valid tuple"); here each common type of error has the
words of JSON. Nothing of the input is echoed but the names of fields, and those are cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tether.errors import FieldProblem

FIELDS_MAX: Final = 16  # told of one input
_PART_CHARS_MAX: Final = 128
_TOKEN: Final = re.compile(r"^\^\[A-Za-z0-9_-\]\{1,(\d+)\}\$$")
_AGENT_KIND: Final = "^[a-z0-9][a-z0-9:._-]{0,63}$"
_DIGITS: Final = re.compile(r"^\^\[0-9a-f\]\{(\d+)\}\$$")
# Type of error → remedy; `{name}` is of the error's context.
_REMEDIES: Final[Mapping[str, str]] = {
    "missing": "is required",
    "extra_forbidden": "is not known; leave it out",
    "string_type": "must be text",
    "string_unicode": "must be Unicode text",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dataclass_type": "must be an object",
    "dict_type": "must be an object",
    "mapping_type": "must be an object",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "set_type": "must be a list",
    "frozen_set_type": "must be a list",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a smaller whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "none_required": "must be null, or be left out",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
}


def remedy_of(item: Mapping[str, Any]) -> str:
    """The remedy for one entry of `ValidationError.errors()`: its `type` and `ctx`, never its input."""
    kind, context = str(item["type"]), dict(item.get("ctx") or {})
    match kind:
        case "literal_error" | "enum":
            return _one_of(str(context["expected"]))
        case "string_pattern_mismatch":
            return _like(str(context["pattern"]))
        case "value_error" | "assertion_error":
            return str(context["error"]) if "error" in context else str(item["msg"]).partition(", ")[2]
        case "too_short" | "string_too_short" if context.get("min_length") == 1:
            return "must not be empty"
    if (known := _REMEDIES.get(kind)) is not None:
        return known.format(**context)
    return f"is not valid ({item['msg']})"


def _one_of(expected: str) -> str:
    """`expected` as pydantic writes it: `'allow' or 'deny'`."""
    names = expected.replace("'", "")
    return f"must be one of {names}" if " or " in names else f"must be {names}"


def _like(pattern: str) -> str:
    if (token := _TOKEN.match(pattern)) is not None:
        return f"must be 1 to {token[1]} of the characters A-Z a-z 0-9 _ -"
    if (digits := _DIGITS.match(pattern)) is not None:
        return f"must be {digits[1]} of the characters 0-9 a-f"
    if pattern == _AGENT_KIND:
        return "must be 1 to 64 of the characters a-z 0-9 : . _ -, with a letter or digit first"
    return f"must match {pattern}"


def path_of(location: Iterable[object], prefix: str = "") -> str:
    """`agent.kind` of `("agent", "kind")`; empty for the whole."""
    parts = (str(part).encode("utf-8", "replace").decode() for part in location)
    cut = (part if len(part) <= _PART_CHARS_MAX else f"{part[:_PART_CHARS_MAX]}…" for part in parts)
    return ".".join([*([prefix] if prefix else []), *cut])


def problems_of(items: Iterable[Mapping[str, Any]], prefix: str = "") -> tuple[FieldProblem, ...]:
    """Every field that is refused, once, up to FIELDS_MAX of them. `items`: of `ValidationError.errors()`."""
    found: dict[str, str] = {}
    for item in items:
        if len(found) == FIELDS_MAX:
            break
        found.setdefault(path_of(item["loc"], prefix) or "body", remedy_of(item))
    return tuple(FieldProblem(field=field, remedy=remedy) for field, remedy in found.items())


def detail_of(fields: Iterable[FieldProblem]) -> str:
    return "; ".join(f"{each.field}: {each.remedy}" for each in fields)
