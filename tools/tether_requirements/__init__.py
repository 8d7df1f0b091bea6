"""Requirements as data: each id is covered by tests that exist, or names what is open.

`tests/requirements.toml` holds `[[requirement]]` tables with `id`, `group`, `sentence`, `tests` (`path::function`) and,
where it is not or not fully proven, `open` (what is missing). `IDS` is the whole list: none may be dropped in silence.
"""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path


def _ids(prefix: str, last: int, *, without: tuple[int, ...] = ()) -> list[str]:
    return [f"{prefix}{number}" for number in range(1, last + 1) if number not in without]


IDS: frozenset[str] = frozenset(
    [
        *_ids("L", 14),
        *_ids("R", 15),
        *_ids("P", 8),
        *_ids("C", 10),
        *_ids("G", 10),
        *_ids("D", 13),
        *_ids("T", 4),
        *_ids("K", 10),
    ]
)


@dataclass(frozen=True, slots=True)
class Requirement:
    id: str
    group: str
    sentence: str
    tests: tuple[str, ...]
    open: str | None


def load(path: Path) -> list[Requirement]:
    """Read the file. Raises KeyError or TOMLDecodeError on a broken one."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))["requirement"]
    return [
        Requirement(
            id=table["id"],
            group=table["group"],
            sentence=table["sentence"],
            tests=tuple(table.get("tests", ())),
            open=table.get("open"),
        )
        for table in tables
    ]


def functions_of(path: Path) -> set[str]:
    """Names of a file's test functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds) and node.name.startswith("test_")}


def problems(requirements: list[Requirement], root: Path) -> list[str]:
    """What is wrong, one sentence each."""
    found: list[str] = []
    seen: set[str] = set()
    for requirement in requirements:
        if requirement.id in seen:
            found.append(f"{requirement.id}: listed twice")
        seen.add(requirement.id)
        if requirement.id not in IDS:
            found.append(f"{requirement.id}: not a known id")
        if not requirement.tests and not requirement.open:
            found.append(f"{requirement.id}: neither tests nor `open`")
        for test in requirement.tests:
            name, _, function = test.partition("::")
            path = root / name
            if not path.is_file():
                found.append(f"{requirement.id}: {name} does not exist")
            elif function not in functions_of(path):
                found.append(f"{requirement.id}: {name} has no test {function}")
    found += [f"{missing}: not listed" for missing in sorted(IDS - seen)]
    return found
