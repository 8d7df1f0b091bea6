"""What the `tether` command prints and how it ends.

Exit codes (documented in `tether --help`):

    0    done; for `run` and `attach`: the response completed
    1    the outcome is a failure (the response failed, a doctor's finding, a difference in the topology)
    2    wrong usage, or input that is refused
    3    nothing to talk to: no set is up, or it cannot be reached
    4    denied, or not authenticated
    5    the outcome is lost or known in part only, a drain cut the turn, or what is waited for goes on
    130  interrupted

Plain output goes to stdout for people; with `--json` stdout carries JSON alone (one object, or one per line where a
command streams). Errors go to stderr: one line with its remedy, or one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TextIO

from tether.errors import Code, Problem


class Exit(IntEnum):
    """Process exit codes."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    DENIED = 4
    LOST = 5
    INTERRUPTED = 130


_DENIED = frozenset({Code.UNAUTHENTICATED, Code.FORBIDDEN})
_UNREACHABLE = frozenset({Code.RUNTIME_UNAVAILABLE})
_USAGE = frozenset({Code.INVALID, Code.NOT_FOUND, Code.TARGET_UNKNOWN})
_LOST = frozenset({Code.EXECUTION_DURABILITY_GAP, Code.RETENTION_GAP, Code.STOP_UNCONFIRMED})


class CliError(Exception):
    """Ends a command: what went wrong, what to do about it, and the exit code. Nothing secret goes in."""

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        exit_code: Exit = Exit.FAILED,
        code: str = "",
        context: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.context = dict(context or {})  # what the problem names more, as the API has it
        self.message = message
        self.remedy = remedy
        self.exit_code = exit_code
        self.code = code

    def value(self) -> dict[str, Any]:
        parts = {"message": self.message, "remedy": self.remedy, "code": self.code, "exit_code": int(self.exit_code)}
        return {"error": {**self.context, **{key: value for key, value in parts.items() if value != ""}}}

    def line(self) -> str:
        return f"tether: {self.message}" + (f"; {self.remedy}" if self.remedy else "")


def from_problem(problem: Problem) -> CliError:
    """A wire problem as a command's end."""
    exit_code = Exit.FAILED
    for codes, chosen in (
        (_DENIED, Exit.DENIED),
        (_UNREACHABLE, Exit.UNREACHABLE),
        (_USAGE, Exit.USAGE),
        (_LOST, Exit.LOST),
    ):
        if problem.code in codes:
            exit_code = chosen
    fields = "; ".join(f"{field.field}: {field.remedy}" for field in problem.fields)
    detail = fields if fields and fields not in problem.detail else ""
    told = f"{problem.code.value}: {problem.detail}"
    return CliError(told, remedy=detail, exit_code=exit_code, code=problem.code, context=problem.context)


@dataclass(frozen=True, slots=True)
class Output:
    """Where a command's result goes. `as_json`: stdout carries JSON alone."""

    as_json: bool = False

    def say(self, text: str = "") -> None:
        """A line for people; nothing with `--json`."""
        if not self.as_json:
            _write(sys.stdout, text)

    def note(self, text: str) -> None:
        """A line beside the result (stderr), for people; nothing with `--json`."""
        if not self.as_json:
            _write(sys.stderr, text)

    def warn(self, message: str, remedy: str) -> None:
        """What may go wrong, on stderr: one line, with `--json` one JSON object."""
        told = json.dumps({"warning": {"message": message, "remedy": remedy}}, ensure_ascii=False)
        _write(sys.stderr, told if self.as_json else f"tether: {message}; {remedy}")

    def value(self, value: object) -> None:
        """A JSON value on a line of its own; nothing without `--json`."""
        if self.as_json:
            _write(sys.stdout, json.dumps(value, ensure_ascii=False, default=str))

    def table(self, headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Aligned columns for people; nothing with `--json`."""
        if self.as_json:
            return
        lines = [[str(cell) for cell in row] for row in rows]
        widths = [max(len(head), *(len(line[at]) for line in lines), 0) for at, head in enumerate(headers)]
        for line in [list(headers), *lines]:
            _write(sys.stdout, "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def report(error: CliError, *, as_json: bool) -> None:
    """Tell an error on stderr."""
    _write(sys.stderr, json.dumps(error.value(), ensure_ascii=False) if as_json else error.line())


def _write(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()
