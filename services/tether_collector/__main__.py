"""`python -m tether_collector`: configuration from the environment, then the service until SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Final

from tether.service import run
from tether.settings import load_or_exit
from tether_collector.config import CollectorSettings
from tether_collector.service import run_collector

# A flood makes objects that live until its end: the collector looks at the young ones less often than every 700, and
# never again at what was imported (half of the CPU time of a flood, measured).
GC_AFTER: Final = (10_000, 20, 20)


def main() -> int:
    settings = load_or_exit(CollectorSettings)
    gc.freeze()
    gc.set_threshold(*GC_AFTER)

    async def serve(stop: asyncio.Event) -> None:
        await run_collector(settings, stop)

    return run(serve, settings, service="collector")


if __name__ == "__main__":
    sys.exit(main())
