"""The collector, made to end at a named step (`os._exit`, no clean-up), or to meet there what nobody foresaw (`!step`):
run by path, with a collector's environment."""

from __future__ import annotations

import asyncio
import os
import sys

from tether.service import run
from tether.settings import load_or_exit
from tether_collector.config import CollectorSettings
from tether_collector.service import on_signals, run_collector

CRASHED = 77


def main() -> int:
    settings = load_or_exit(CollectorSettings)
    wanted = sys.argv[1]

    def step(name: str) -> None:
        if name == wanted:
            os._exit(CRASHED)
        if wanted == f"!{name}":
            raise RuntimeError(f"nobody foresaw this at {name}")

    async def serve(stop: asyncio.Event) -> None:
        await run_collector(settings, stop, terminated=on_signals(stop), step=step)

    return run(serve, settings, service="collector")


if __name__ == "__main__":
    sys.exit(main())
