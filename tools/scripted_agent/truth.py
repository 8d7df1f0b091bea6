"""Ground truth: what this process really printed, got and did, for an oracle outside the product.

One file per process, `{session}-{pid}.ndjson` in the folder (a pid that comes again in another namespace gets
`{session}-{pid}.2.ndjson`, …), one record a line, each by one O_APPEND write that is never buffered, so it
outlives SIGKILL. Records: `{"n", "at", "ev", …}`, n counts from 1.

A printed line is recorded **before** it is written: a line that a reader has is always in the truth. Whether an
intended line was written whole is told by what follows, as the process prints one line at a time:

    stdout n, then stdout | effect | written | exit      n was written whole
    stdout n, nothing of these after it                  the process was killed in between: perhaps
    exit {"unfinished": n}                               a signal ended the process inside the write: perhaps

`stdin` and `signal` records may fall inside a write and prove nothing. `written` is only recorded when the process
is about to wait, so a flood costs one record a line and an idle process leaves no doubt.

`ledger.ndjson` is shared by all processes: one line per side effect. Its id is `{prompt id}/{step}`: the same prompt
run twice, by whatever process, gives the same ids twice.
"""

from __future__ import annotations

import json
import os
import time

LEDGER_NAME = "ledger.ndjson"
# What is kept of a stdin line in the truth; the product's own limit is far below.
STDIN_RECORD_CHARS_MAX = 1 << 20


class Truth:
    """The recorder; without a folder every call is a no-op that still counts."""

    def __init__(self, folder: str | None, session: str) -> None:
        self._count = 0
        self._session = session
        self._file = -1
        self._ledger = -1
        self.folder = folder
        self.name = ""
        if folder is None:
            return
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - pathlib costs a third of the start-up time
        self._file, self.name = _create(folder, f"{session}-{os.getpid()}")
        self._ledger = os.open(f"{folder}/{LEDGER_NAME}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def record(self, ev: str, fields: dict[str, object] | None = None) -> int:
        """Append one record; returns its number."""
        self._count += 1
        if self._file >= 0:
            body = {"n": self._count, "at": round(time.time(), 6), "ev": ev}
            if fields:
                body.update(fields)
            os.write(self._file, json.dumps(body).encode() + b"\n")
        return self._count

    def stdin(self, raw: bytes, problem: str | None) -> None:
        """A line got on stdin, after it was read; `problem` says why it was ignored."""
        text = raw[:STDIN_RECORD_CHARS_MAX].decode("utf-8", "backslashreplace")
        fields: dict[str, object] = {"line": text, "bytes": len(raw)}
        if problem is not None:
            fields["problem"] = problem
        self.record("stdin", fields)

    def side_effect(self, prompt: str, step: int, name: str, tool_input: object) -> str:
        """Do the side effect: the one line in the ledger. Returns its id."""
        effect_id = f"{prompt}/{step}"
        fields: dict[str, object] = {"id": effect_id, "name": name, "phase": "start", "input": tool_input}
        self.record("effect", fields)
        if self._ledger >= 0:
            line = {
                "id": effect_id,
                "name": name,
                "prompt": prompt,
                "step": step,
                "session": self._session,
                "process": self.name,
                "at": round(time.time(), 6),
            }
            os.write(self._ledger, json.dumps(line).encode() + b"\n")
        return effect_id

    def effect_end(self, effect_id: str, name: str, status: str) -> None:
        self.record("effect", {"id": effect_id, "name": name, "phase": "end", "status": status})


def _create(folder: str, stem: str) -> tuple[int, str]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    attempt = 1
    while True:
        name = f"{stem}.ndjson" if attempt == 1 else f"{stem}.{attempt}.ndjson"
        try:
            return os.open(f"{folder}/{name}", flags, 0o644), name
        except FileExistsError:
            attempt += 1
