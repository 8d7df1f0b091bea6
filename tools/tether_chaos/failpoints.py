"""Which failpoints the code has, found by reading the code: nobody keeps a list.

failpoint("a.b.c")                     as written
failpoint_of("a.b", x, Union)          a name for each class of the union, which is looked up in the module
<anything>.step("c"), self._step("c")  in a package or module with `under("a.b")`: a.b.c
"""

from __future__ import annotations

import ast
import importlib
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tether
import tether_agent
import tether_backend
import tether_collector
import tether_router
from tether.failpoints import snake

PACKAGES = (tether, tether_agent, tether_backend, tether_collector, tether_router)
_HOOKS = ("step", "_step")


@dataclass(frozen=True, slots=True, order=True)
class Failpoint:
    """`place`: file and line, of the first where there are several."""

    name: str
    place: str


class ScanError(ValueError):
    """A failpoint whose name the scan cannot read: it must be a literal."""


def scan() -> list[Failpoint]:
    """All failpoints of contracts and services, by name. Raises ScanError."""
    found: dict[str, Failpoint] = {}
    for package in PACKAGES:
        root = Path(str(package.__file__)).parent
        files = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py"))}
        prefixes = {path: prefix for path, tree in files.items() if (prefix := _prefix(tree)) is not None}
        for path, tree in files.items():
            if package is tether and path.name == "failpoints.py":
                continue
            module = ".".join((package.__name__, *path.relative_to(root).with_suffix("").parts))
            # A hook's prefix is said in its own module, or in the only one of the package that says any.
            prefix = prefixes.get(path) or (next(iter(prefixes.values())) if len(prefixes) == 1 else None)
            for name, line in _names(tree, module, prefix):
                found.setdefault(name, Failpoint(name, f"{module}:{line}"))
    return sorted(found.values())


def _called(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _prefix(tree: ast.Module) -> str | None:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="under"), args=[ast.Constant(value=str(prefix))]):
                return prefix
            case _:
                pass
    return None


def _names(tree: ast.Module, module: str, prefix: str | None) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = _called(node)
        if called == "failpoint":
            yield from ((name, node.lineno) for name in _literals(node, module))
        elif called == "failpoint_of":
            yield from ((name, node.lineno) for name in _of_union(node, module))
        elif called in _HOOKS and prefix is not None and isinstance(node.func, ast.Attribute):
            if any(isinstance(argument, ast.JoinedStr) for argument in node.args):
                raise ScanError(f"{module}:{node.lineno}: the name of a failpoint must be a literal")
            literals = [text for argument in node.args for text in _texts(argument)]
            yield from ((f"{prefix}.{name}", node.lineno) for name in literals)


def _texts(node: ast.expr) -> list[str]:
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.IfExp(body=body, orelse=orelse):
            return [*_texts(body), *_texts(orelse)]
        case _:
            return []


def _literals(node: ast.Call, module: str) -> list[str]:
    names = _texts(node.args[0]) if node.args else []
    if not names:
        raise ScanError(f"{module}:{node.lineno}: the name of a failpoint must be a literal")
    return names


def _of_union(node: ast.Call, module: str) -> list[str]:
    match node.args:
        case [ast.Constant(value=str(prefix)), _, union]:
            value = eval(compile(ast.Expression(union), module, "eval"), vars(importlib.import_module(module)))
            return [f"{prefix}.{snake(one.__name__)}" for one in typing.get_args(value)]
        case _:
            raise ScanError(f"{module}:{node.lineno}: failpoint_of takes a literal prefix, a value and a union")
