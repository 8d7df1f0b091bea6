"""`python -m tether_router [ensure]`: a router. Any number of them may run.

`ensure` makes what a router would make at its start, streams, buckets and consumers, and ends. It may be repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from tether.bus import connect_service
from tether.service import run
from tether.settings import load_or_exit
from tether_router.config import RouterSettings
from tether_router.service import ensure, serve


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tether_router", description=__doc__)
    parser.add_argument("verb", nargs="?", choices=["serve", "ensure"], default="serve")
    verb = parser.parse_args(argv).verb
    settings = load_or_exit(RouterSettings, RouterSettings.quotas)

    async def serving(stop: asyncio.Event) -> None:
        await serve(settings, stop)

    async def ensuring(stop: asyncio.Event) -> None:
        bus = await connect_service(settings, "tether-router-ensure", stop)
        if bus is not None:
            async with bus:
                await ensure(bus, settings)

    return run(ensuring if verb == "ensure" else serving, settings, service="router")


if __name__ == "__main__":
    sys.exit(main())
