"""`python -m tether_router`: a router. Any number of them may run."""

from __future__ import annotations

import asyncio
import sys

from tether.service import run
from tether.settings import load_or_exit
from tether_router.config import RouterSettings
from tether_router.service import serve


def main() -> int:
    settings = load_or_exit(RouterSettings, RouterSettings.quotas)

    async def serving(stop: asyncio.Event) -> None:
        await serve(settings, stop)

    return run(serving, settings, service="router")


if __name__ == "__main__":
    sys.exit(main())
