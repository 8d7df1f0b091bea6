"""`python -m tether_collector.forget`: delete what a volume that no collector holds has of one conversation.

The request is JSON on standard input: `{workspace_dir, conversation, sessions}`; the answer, on standard output, is a
`tether.deletion.Forgotten`. Where a collector holds the volume, it is the one to be asked, and the answer says so.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import sys
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from tether.deletion import SESSIONS_MAX, Forgotten, SessionName
from tether.ids import Token
from tether_collector.forgetting import forget_on_disk
from tether_collector.journal import JournalError

REQUEST_BYTES_MAX: Final = 256 * 1024


class Request(BaseModel):
    """See the module."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workspace_dir: Path
    conversation: Token
    sessions: Annotated[tuple[SessionName, ...], Field(max_length=SESSIONS_MAX)] = ()


def forget(request: Request) -> Forgotten:
    """Raises OSError, sqlite3.Error, JournalError."""
    state_dir = request.workspace_dir / ".tether"
    if not state_dir.is_dir():
        return Forgotten(clean=True)
    descriptor = os.open(state_dir / "collector.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        waits, executions, files = forget_on_disk(request.workspace_dir, request.conversation, request.sessions)
    except BlockingIOError:
        return Forgotten(clean=False, pending_on="a collector holds the volume and is not registered yet")
    finally:
        os.close(descriptor)
    return Forgotten(clean=not waits, pending_on=waits, executions=executions, files=files)


def main() -> int:
    request = Request.model_validate_json(sys.stdin.buffer.read(REQUEST_BYTES_MAX))
    os.umask(0o077)
    try:
        done = forget(request)
    except (OSError, sqlite3.Error, JournalError) as error:
        done = Forgotten(clean=False, pending_on=f"the volume cannot be written: {error}")
    sys.stdout.write(done.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
