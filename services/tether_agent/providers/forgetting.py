"""Deleting a conversation from a volume that nobody holds: a process of the collector's code does it, since the volume
is the collector's to read and to write (`python -m tether_collector.forget` says what it is asked and answers)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from tether.deletion import ForgetPayload, Forgotten

COMMAND: Final = (sys.executable, "-P", "-m", "tether_collector.forget")
DONE_S: Final = 15.0  # within what the router waits for the answer; what was killed is done again
_KEPT: Final = ("PATH", "PYTHONPATH", "LANG", "TMPDIR")  # of our environment: nothing there is its business


async def forget_on_volume(directory: Path, payload: ForgetPayload) -> Forgotten:
    """What it answers, or that it did not."""
    asked = {"workspace_dir": str(directory), "conversation": payload.conversation, "sessions": payload.sessions}
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={name: os.environ[name] for name in _KEPT if name in os.environ},
    )
    try:
        async with asyncio.timeout(DONE_S):
            answer, _ = await process.communicate(json.dumps(asked).encode())
    except TimeoutError:
        return Forgotten(clean=False, pending_on="the volume does not answer")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        return Forgotten.model_validate_json(answer)
    except ValidationError:
        return Forgotten(clean=False, pending_on=f"the volume could not be looked at (exit {process.returncode})")
