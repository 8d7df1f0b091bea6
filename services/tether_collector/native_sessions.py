"""What is known of the CLIs' own sessions: which agent and version made one, and its file as it was at its last end.

    .tether/sessions/{session}.json   {v, session, agent, cli_version, bytes, digest, at, unapplied}

Written when the process of an execution is gone: then its CLI has written what it will. The record is how a file that
stands elsewhere than where the CLI looks (a volume that was put together by hand, another folder or name) is known to
be the very session: `find` compares size and digest, and the session's id in its rows. One that was changed since is
not taken. Only Claude's files are looked for: its rows name their session, and a copy under another id is a session of
its own. The files of the CLI itself are never changed or deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tether.jsonsafe import loads_object
from tether.limits import KIB, RECOVERY_MATERIAL_BYTES_MAX
from tether.service import write_whole
from tether.walking import entries_below
from tether_collector.checkpoint_files import open_file

FOLDER: Final = "sessions"
CLAUDE: Final = "claude"
RECORD_BYTES_MAX: Final = 256 * KIB
FILES_MAX: Final = 2_000  # that are looked at
_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_SLUG: Final = re.compile(r"[^A-Za-z0-9]")


@dataclass(frozen=True, slots=True)
class Found:
    """A session's file, as bytes under its new id, and how many rows of it a model sees."""

    data: bytes
    rows: int


def claude_file(home: Path, cwd: str, session: str) -> Path:
    """Where Claude Code keeps the session of this working folder."""
    return home / "projects" / _SLUG.sub("-", cwd) / f"{session}.jsonl"


def _record_path(state_dir: Path, session: str) -> Path | None:
    return state_dir / FOLDER / f"{session}.json" if _PLAIN.fullmatch(session) else None


def record(
    state_dir: Path,
    home: Path,
    cwd: str,
    agent: str,
    session: str,
    version: str | None,
    at: int,
    unapplied: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Note the session as its process left it, with the answers that it left unapplied. Raises OSError."""
    path = _record_path(state_dir, session)
    if path is None:
        return
    content: dict[str, Any] = {"v": 1, "session": session, "agent": agent, "cli_version": version, "at": at}
    if agent == CLAUDE:
        try:
            with (
                open_file(claude_file(home, cwd, session), home) as descriptor,
                os.fdopen(os.dup(descriptor), "rb") as file,
            ):
                content["digest"] = hashlib.file_digest(file, "sha256").hexdigest()
                content["bytes"] = file.tell()
        except (FileNotFoundError, NotADirectoryError):
            pass
    data = json.dumps(content | ({"unapplied": list(unapplied)} if unapplied else {})).encode()
    if len(data) > RECORD_BYTES_MAX:
        data = json.dumps(content).encode()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, data)


def recorded(state_dir: Path, session: str) -> dict[str, Any] | None:
    """What was noted of the session; None where nothing can be read."""
    path = _record_path(state_dir, session)
    try:
        return None if path is None else loads_object(path.read_bytes(), "session", bytes_max=RECORD_BYTES_MAX)
    except (OSError, ValueError):
        return None


def find(state_dir: Path, home: Path, agent: str, session: str, new_session: str) -> Found | None:
    """The session's own file, wherever it is below the CLI's folder, made the file of `new_session`."""
    known = recorded(state_dir, session)
    if agent != CLAUDE or known is None or not isinstance(known.get("digest"), str):
        return None
    size_bytes = known.get("bytes")
    if not isinstance(size_bytes, int) or not 0 < size_bytes <= RECOVERY_MATERIAL_BYTES_MAX:
        return None
    for path in _candidates(home, size_bytes):
        try:
            with open_file(path, home) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
                data = file.read(size_bytes + 1)
        except OSError:
            continue
        if hashlib.sha256(data).hexdigest() == known["digest"]:
            return _renamed(data, session, new_session)
    return None


def _candidates(home: Path, size_bytes: int) -> Iterator[Path]:
    seen = 0
    for entry in entries_below(home):
        if ".jsonl" not in entry.name:
            continue
        seen += 1
        if seen > FILES_MAX:
            return
        try:
            size = entry.stat(follow_symlinks=False).st_size if entry.is_file(follow_symlinks=False) else None
        except OSError:
            continue
        if size == size_bytes:
            yield Path(entry.path)


def _renamed(data: bytes, session: str, new_session: str) -> Found | None:
    """None where a row is of another session, or none says of which it is."""
    out, rows, named = [], 0, False
    for line in data.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            out.append(line)  # the CLI passes over a damaged one
            continue
        if isinstance(row, dict) and "sessionId" in row:
            if row["sessionId"] != session:
                return None
            named, row["sessionId"] = True, new_session
            rows += row.get("type") in ("user", "assistant")
        out.append(json.dumps(row, separators=(",", ":")).encode())
    return Found(b"\n".join(out) + b"\n", rows) if named else None
