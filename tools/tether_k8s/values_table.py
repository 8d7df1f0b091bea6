"""The table of a chart's values, from the `## @param NAME description` comments of its values.yaml.

Every value is described and every description is of a value: what differs is an error, told with its name. A value is a
leaf, or whatever has a description of its own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import yaml

BEGIN: Final = "<!-- values: written by `python -m tether_k8s readme` -->"
END: Final = "<!-- end of values -->"
_PARAM: Final = re.compile(r"^\s*## @param (\S+) (.+)$")


class TableError(Exception):
    """values.yaml and its comments differ."""


def table(values: Path) -> str:
    """Raises TableError."""
    text = values.read_text(encoding="utf-8")
    described: dict[str, str] = {}
    for line in text.splitlines():
        found = _PARAM.match(line)
        if found is not None:
            if found[1] in described:
                raise TableError(f"{found[1]}: described twice")
            described[found[1]] = found[2].strip()
    given = dict(_leaves(yaml.safe_load(text), "", described))
    problems = [f"{name}: no `## @param`" for name in given if name not in described]
    problems += [f"{name}: described, but no value" for name in described if name not in given]
    if problems:
        raise TableError("\n".join(problems))
    rows = [
        f"| `{name}` | {text.replace('|', chr(92) + '|')} | `{_shown(given[name])}` |"
        for name, text in described.items()
    ]
    return "\n".join(["| value | what it is | default |", "|---|---|---|", *rows])


def replaced(readme: str, rows: str) -> str:
    """Raises TableError where the README has no place for it."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise TableError(f"README has no {BEGIN} … {END}")
    return f"{head}{BEGIN}\n{rows}\n{END}{tail}"


def _leaves(value: Any, name: str, described: dict[str, str]) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value and name not in described:
        return [
            one for key, part in value.items() for one in _leaves(part, f"{name}.{key}" if name else key, described)
        ]
    return [(name, value)]


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
