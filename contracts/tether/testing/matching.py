"""Subject patterns: `*` is one token, `>` the rest."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=65536)
def matches(pattern: str, subject: str) -> bool:
    if pattern in (subject, ">"):
        return True
    wanted, found = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(found) > index
        if index >= len(found) or token not in ("*", found[index]):
            return False
    return len(wanted) == len(found)


def literal(pattern: str) -> bool:
    """Whether a pattern is one subject."""
    return not any(token in ("*", ">") for token in pattern.split("."))


@lru_cache(maxsize=4096)
def overlap(one: str, other: str) -> bool:
    """Whether some subject matches both patterns."""
    a, b = one.split("."), other.split(".")
    for left, right in zip(a, b, strict=False):
        if ">" in (left, right):
            return True
        if left != right and "*" not in (left, right):
            return False
    return len(a) == len(b)
