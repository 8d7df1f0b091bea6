"""`python -m tether_collector`: configuration from the environment, then the service until it is drained (SIGTERM, or
the verb) or hands over (SIGHUP, SIGINT).

Exit codes: 0 drained or handed over; 75 SIGTERM's drain has failed; 78 misconfigured, or the checkpoint that it was to
go on from cannot be restored (`.tether/restore-failed.json` says why); 1 anything that nobody expected.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import sys
from typing import Final

# Whoever wakes a sandbox waits for these imports: without looking for garbage, of which they make none, and without
# structlog's rich, of which the collector uses nothing, they take a quarter less.
gc.disable()
sys.modules.setdefault("rich", None)  # type: ignore[arg-type]  # as if it were not installed

from tether.service import run  # noqa: E402
from tether.settings import load_or_exit  # noqa: E402
from tether_collector.config import CollectorSettings  # noqa: E402
from tether_collector.service import on_signals, run_collector  # noqa: E402

# A flood makes objects that live until its end: the collector looks at the young ones less often than every 700, and
# never again at what was imported (half of the CPU time of a flood, measured).
GC_AFTER: Final = (10_000, 20, 20)


def main() -> int:
    settings = load_or_exit(CollectorSettings)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold keys
    os.umask(0o077)
    gc.freeze()
    gc.set_threshold(*GC_AFTER)
    gc.enable()

    code = 0

    async def serve(stop: asyncio.Event) -> None:
        nonlocal code
        code = await run_collector(settings, stop, terminated=on_signals(stop))

    return run(serve, settings, service="collector") or code


if __name__ == "__main__":
    sys.exit(main())
