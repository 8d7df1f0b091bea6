"""`python -m tether_operator [release-all [--wait-s N]]`: the operator of AgentTasks, or the end of all of them.

`release-all` deletes every task of the namespace, waits for the running operator to drain them, and takes the
finalizers of those away that are left after N seconds. It needs the API alone. Exit code 0 also where some were let go
undrained: each is logged.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from tether.service import run
from tether.settings import load_or_exit
from tether_operator.cluster import connected
from tether_operator.config import OperatorSettings
from tether_operator.leaving import release_all
from tether_operator.service import serve


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tether_operator", description=__doc__)
    parser.add_argument("verb", nargs="?", choices=["serve", "release-all"], default="serve")
    parser.add_argument("--wait-s", type=float, default=240.0, help="for the drains of release-all")
    arguments = parser.parse_args(argv)
    settings = load_or_exit(OperatorSettings)

    async def serving(stop: asyncio.Event) -> None:
        await serve(settings, stop)

    async def leaving(_: asyncio.Event) -> None:
        async with connected(settings) as cluster:
            await release_all(cluster, wait_s=arguments.wait_s)

    if arguments.verb == "release-all":
        return run(leaving, settings, service="operator")

    return run(serving, settings, service="operator")


if __name__ == "__main__":
    sys.exit(main())
