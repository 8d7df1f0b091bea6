"""Final snapshots: `{workspace}/.tether/execution-recovery/{execution}.json`, written once per ended execution.

A file is `{"v": 1, "ended_at": …, "snapshot": {…}}`, written whole (temp, fsync, rename, fsync of the folder). Its
age counts from `ended_at`, the end's own time: writing it again extends nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from tether.ids import check_token
from tether.service import write_whole
from tether.snapshot import Snapshot

FOLDER: Final = "execution-recovery"
VERSION: Final = 1


def _path(state_dir: Path, execution: str) -> Path:
    return state_dir / FOLDER / f"{check_token(execution, 'execution')}.json"


def write_final(state_dir: Path, snapshot: Snapshot, ended_at: int) -> None:
    """Idempotent: the same end gives the same content but for its time of capture."""
    content = snapshot.model_dump_json(exclude_none=True)
    data = f'{{"v":{VERSION},"ended_at":{ended_at},"snapshot":{content}}}'
    write_whole(_path(state_dir, snapshot.target.execution), data.encode())


def read_final(state_dir: Path, execution: str) -> Snapshot | None:
    """None where there is none, or it is damaged: a final snapshot is never guessed."""
    try:
        content = json.loads(_path(state_dir, execution).read_bytes())
        return Snapshot.model_validate(content["snapshot"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        return None


def delete_final(state_dir: Path, execution: str) -> None:
    _path(state_dir, execution).unlink(missing_ok=True)


def final_bytes(state_dir: Path, execution: str) -> int:
    """Size of the file, 0 where there is none."""
    try:
        return _path(state_dir, execution).stat().st_size
    except FileNotFoundError:
        return 0
