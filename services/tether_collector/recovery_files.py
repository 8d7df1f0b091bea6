"""Final snapshots: `{workspace}/.tether/execution-recovery/{execution}.json`, one per ended execution.

A file is `{"v": 1, "ended_at": …, "snapshot": {…}}`, written whole (temp, fsync, rename, fsync of the folder). Its
age counts from `ended_at`, the end's own time: writing it again extends nothing. Only files of this name and beginning
are taken for the collector's own; of everything else in the folder only temporary files that a crash left are deleted.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from tether.ids import TOKEN_PATTERN, check_token
from tether.limits import TERMINAL_DISK_GRACE_S
from tether.service import write_whole
from tether.snapshot import Snapshot

FOLDER: Final = "execution-recovery"
VERSION: Final = 1
_HEAD: Final = re.compile(rb'\{"v":1,"ended_at":(\d{1,16}),')
_HEAD_BYTES: Final = 64
_OWN: Final = re.compile(rf"({TOKEN_PATTERN.strip('^$')})\.json")
_LEFTOVER: Final = re.compile(rf"\.({TOKEN_PATTERN.strip('^$')})\.json\.\d+\.tmp")


@dataclass(frozen=True, slots=True)
class FinalFile:
    """A final snapshot and when its execution ended (unix ms)."""

    snapshot: Snapshot
    ended_at: int


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of the collector's own: `ended_at` as it says itself (unix ms)."""

    execution: str
    ended_at: int
    bytes: int


def _path(state_dir: Path, execution: str) -> Path:
    return state_dir / FOLDER / f"{check_token(execution, 'execution')}.json"


def render(snapshot: Snapshot, ended_at: int) -> bytes:
    """The file's content: the same end gives the same but for its time of capture."""
    content = snapshot.model_dump_json(exclude_none=True)
    return f'{{"v":{VERSION},"ended_at":{ended_at},"snapshot":{content}}}'.encode()


def write_final(state_dir: Path, execution: str, data: bytes) -> None:
    """Raises OSError."""
    write_whole(_path(state_dir, execution), data)


def parse(data: bytes) -> FinalFile | None:
    """None where it is damaged: a final snapshot is never guessed."""
    try:
        content = json.loads(data)
        return FinalFile(Snapshot.model_validate(content["snapshot"]), int(content["ended_at"]))
    except (ValueError, KeyError, TypeError, ValidationError):
        return None


def read_final(state_dir: Path, execution: str) -> FinalFile | None:
    """None where there is none, or it is damaged."""
    try:
        return parse(_path(state_dir, execution).read_bytes())
    except OSError:
        return None


def delete_final(state_dir: Path, execution: str) -> None:
    _path(state_dir, execution).unlink(missing_ok=True)


def final_bytes(state_dir: Path, execution: str) -> int:
    """Size of the file, 0 where there is none."""
    try:
        return _path(state_dir, execution).stat().st_size
    except OSError:
        return 0


def own_files(state_dir: Path, known: frozenset[str]) -> list[FoundFile]:
    """The collector's own files of executions that are not among the known: their journal is lost."""
    found = []
    for path in _listed(state_dir):
        match = _OWN.fullmatch(path.name)
        if match is None or match[1] in known:
            continue
        try:
            with path.open("rb") as file:
                head = _HEAD.match(file.read(_HEAD_BYTES))
            size = path.stat().st_size
        except OSError:
            continue
        if head is not None:
            found.append(FoundFile(match[1], int(head[1]), size))
    return found


def delete_leftovers(state_dir: Path, now_s: float) -> int:
    """Temporary files that nobody has touched for the grace: a crash left them. How many these were."""
    count = 0
    for path in _listed(state_dir):
        if _LEFTOVER.fullmatch(path.name) is None:
            continue
        try:
            if path.lstat().st_mtime < now_s - TERMINAL_DISK_GRACE_S:
                path.unlink()
                count += 1
        except OSError:
            continue  # gone, or not to be deleted now: the next round looks again
    return count


def _listed(state_dir: Path) -> list[Path]:
    try:
        return sorted((state_dir / FOLDER).iterdir())
    except OSError:
        return []
