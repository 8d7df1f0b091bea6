"""The backend as a process of its own: its port once it says that it is ready; killed and started again at will."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support_backend import eventually
from support_nats import NatsServer


@asynccontextmanager
async def backend_process(
    server: NatsServer, tenant: str, folder: Path, port: int = 0
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A process with `folder`'s tokens.json and database, and its port. Killed at the end where it still runs."""
    ready = folder / "ready.json"
    await asyncio.to_thread(ready.unlink, missing_ok=True)
    environment = {
        "PATH": "/usr/bin:/bin",
        "TETHER_NATS_URL": server.url,
        "TETHER_TENANTS": tenant,
        "TETHER_READY_FILE": str(ready),
        "TETHER_HTTP_PORT": str(port),
        "TETHER_HTTP_TOKENS_FILE": str(folder / "tokens.json"),
        "TETHER_DATABASE_URL": f"sqlite+aiosqlite:///{folder / 'db.sqlite3'}",
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tether_backend", env=environment, stderr=asyncio.subprocess.DEVNULL
    )
    try:

        async def announced() -> int:
            assert child.returncode is None, f"the backend ended with {child.returncode}"
            if not await asyncio.to_thread(ready.exists):
                return 0
            facts = json.loads(await asyncio.to_thread(ready.read_text))
            return int(facts["url"].rpartition(":")[2])

        yield child, await eventually(announced, "the backend is ready")
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
