"""`python -m tether_collector`: configuration from the environment, then the service until SIGTERM."""

from __future__ import annotations

import asyncio
import sys

from tether.service import run
from tether.settings import load_or_exit
from tether_collector.config import CollectorSettings
from tether_collector.service import run_collector


def main() -> int:
    settings = load_or_exit(CollectorSettings)

    async def serve(stop: asyncio.Event) -> None:
        await run_collector(settings, stop)

    return run(serve, settings, service="tether-collector")


if __name__ == "__main__":
    sys.exit(main())
