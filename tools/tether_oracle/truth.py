"""Read the scripted agent's truth folder.

One file per process, one record a line; a line is in the file before it goes to stdout. A line whose write is not
proven by a later record (the process was killed in between) is `certain=False`: a reader may have it or not.
The last line of a file may be torn, as a killed process leaves it; a broken line anywhere else is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

LEDGER_NAME: Final = "ledger.ndjson"
# Records that the agent writes only between two lines: they prove that the line before them is out.
_PROVING: Final = frozenset(
    {"stdout", "unprinted", "written", "effect", "exit", "crash", "touched", "spawned", "stdout_closed"}
)


class OracleError(ValueError):
    """The truth folder cannot be read; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Printed:
    """A line that went to stdout. `message` is None for garbage."""

    n: int
    line: str
    certain: bool
    message: Mapping[str, Any] | None
    garbage: str | None = None


@dataclass(frozen=True, slots=True)
class StdinLine:
    """A line that the process got; `problem` says why it ignored it."""

    n: int
    line: str
    problem: str | None

    def message(self) -> Mapping[str, Any] | None:
        """The message, or None for an ignored line."""
        if self.problem is not None:
            return None
        loaded: Mapping[str, Any] = json.loads(self.line)
        return loaded


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One side effect that was done."""

    id: str
    name: str
    prompt: str
    session: str
    process: str


@dataclass(frozen=True, slots=True)
class ProcessTruth:
    """What one process did. `exit_code` is None where it was killed or still runs."""

    file: str
    session: str
    pid: int
    started_at: float
    printed: tuple[Printed, ...]
    stdin: tuple[StdinLine, ...]
    exit_code: int | None
    records: tuple[Mapping[str, Any], ...]

    def prompts(self) -> tuple[str, ...]:
        """Ids of the prompts got, in order, repeats included."""
        messages = (line.message() for line in self.stdin)
        return tuple(str(m["id"]) for m in messages if m is not None and m["type"] == "prompt")


@dataclass(frozen=True, slots=True)
class Truth:
    """A whole folder: its processes in the order in which they started, and the ledger of all."""

    processes: tuple[ProcessTruth, ...]
    ledger: tuple[LedgerLine, ...]

    def of_prompt(self, prompt: str) -> tuple[ProcessTruth, ...]:
        return tuple(process for process in self.processes if prompt in process.prompts())

    def of_session(self, session: str) -> tuple[ProcessTruth, ...]:
        return tuple(process for process in self.processes if process.session == session)


def load_truth(folder: Path) -> Truth:
    """Read a truth folder, also while agents still write to it."""
    processes = [
        process
        for path in sorted(folder.glob("*.ndjson"))
        if path.name != LEDGER_NAME and (process := _process(path)) is not None
    ]
    processes.sort(key=lambda process: process.started_at)
    ledger_path = folder / LEDGER_NAME
    entries = _records(ledger_path) if ledger_path.exists() else ()
    ledger = tuple(
        LedgerLine(str(e["id"]), str(e["name"]), str(e["prompt"]), str(e["session"]), str(e["process"]))
        for e in entries
    )
    return Truth(tuple(processes), ledger)


def _records(path: Path) -> tuple[Mapping[str, Any], ...]:
    lines = path.read_bytes().split(b"\n")
    records: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is torn or empty
        try:
            record = json.loads(line)
        except ValueError as error:
            raise OracleError(f"{path.name}, line {number}: {error}") from None
        if not isinstance(record, dict):
            raise OracleError(f"{path.name}, line {number}: not an object")
        records.append(record)
    return tuple(records)


def _process(path: Path) -> ProcessTruth | None:
    """None for a process that was killed before its first record."""
    records = _records(path)
    if not records:
        return None
    start = records[0]
    if start.get("ev") != "start":
        raise OracleError(f"{path.name}, line 1: a truth file begins with start, not {start.get('ev')!r}")
    return ProcessTruth(
        file=path.name,
        session=str(start["session"]),
        pid=int(start["pid"]),
        started_at=float(start["at"]),
        printed=tuple(_printed(records)),
        stdin=tuple(StdinLine(int(r["n"]), str(r["line"]), r.get("problem")) for r in records if r["ev"] == "stdin"),
        exit_code=next((int(r["code"]) for r in records if r["ev"] == "exit"), None),
        records=records,
    )


def _printed(records: Iterable[Mapping[str, Any]]) -> Iterable[Printed]:
    open_line: Mapping[str, Any] | None = None
    for record in records:
        unfinished = record.get("unfinished")
        if open_line is not None and (record["ev"] in _PROVING or unfinished is not None):
            yield _line(open_line, certain=unfinished != open_line["n"])
            open_line = None
        if record["ev"] == "stdout":
            open_line = record
    if open_line is not None:
        yield _line(open_line, certain=False)


def _line(record: Mapping[str, Any], *, certain: bool) -> Printed:
    garbage = record.get("garbage")
    if garbage is not None:
        return Printed(int(record["n"]), "", certain, None, str(garbage))
    line = str(record["line"])
    return Printed(int(record["n"]), line, certain, json.loads(line))
