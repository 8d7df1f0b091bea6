"""What the agent remembers between processes: `{home}/sessions/{id}.json`, written whole and renamed.

There is no lock, as the CLIs that this agent stands for have none: one writer is the product's promise.
"""

from __future__ import annotations

import json
import os
import re

TURNS_MAX = 200
TEXT_CHARS_MAX = 2000
_SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")


class RefusedError(Exception):
    """The session cannot be opened: printed as `{"type": "error", "code", "message"}`, exit code 1."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Session:
    """An id and its turns. `resumed`: None for a new session, else whether earlier turns are there."""

    def __init__(self, home: str, session_id: str, turns: list[dict[str, str]], resumed: bool | None) -> None:
        self.id = session_id
        self.turns = turns
        self.resumed = resumed
        self._home = home
        self._is_forgotten = False

    def begin_turn(self, prompt: str, text: str) -> None:
        self.turns.append({"prompt": prompt, "text": text[:TEXT_CHARS_MAX], "status": "running", "said": ""})
        self._save()

    def take_history(self, text: str) -> None:
        """What was said before, in another session: remembered as one turn that is named `history`."""
        self.turns.append({"prompt": "history", "text": text[:TEXT_CHARS_MAX], "status": "given", "said": ""})

    def end_turn(self, status: str, said: str) -> None:
        self.turns[-1].update(status=status, said=said[:TEXT_CHARS_MAX])
        self._save()

    def forget(self, *, soft: bool) -> None:
        """Make a later resume fail (hard), or accept it with nothing behind it (soft)."""
        self._is_forgotten = True
        path = _path(self._home, self.id)
        if soft:
            _write(path, {"session_id": self.id, "lost": True})
        else:
            os.unlink(path)  # noqa: PTH108

    def _save(self) -> None:
        if not self._is_forgotten:
            _write(_path(self._home, self.id), {"session_id": self.id, "turns": self.turns[-TURNS_MAX:]})


def open_session(home: str, session_id: str | None, resume: str | None) -> Session:
    """A new session, or an old one; raises RefusedError."""
    for given in (session_id, resume):
        if given is not None and not _SESSION_ID.match(given):
            raise RefusedError("invalid_session_id", f"not a session id: {given[:80]!r}")
    if resume is None:
        new_id = session_id or _fresh_id()
        if os.path.exists(_path(home, new_id)):  # noqa: PTH110
            raise RefusedError("session_exists", f"session {new_id} is already in use")
        return Session(home, new_id, [], None)
    try:
        with open(_path(home, resume), encoding="utf-8") as handle:  # noqa: PTH123
            stored = json.load(handle)
    except (FileNotFoundError, ValueError):
        raise RefusedError("session_not_found", f"no session with id {resume}") from None
    if not isinstance(stored, dict) or stored.get("lost"):
        return Session(home, _fresh_id(), [], False)
    return Session(home, resume, list(stored["turns"]), True)


def _fresh_id() -> str:
    return f"scripted-{os.urandom(8).hex()}"


def _path(home: str, session_id: str) -> str:
    return f"{home}/sessions/{session_id}.json"


def _write(path: str, content: dict[str, object]) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as handle:  # noqa: PTH123
        json.dump(content, handle)
    os.replace(temporary, path)  # noqa: PTH105
