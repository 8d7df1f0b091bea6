"""`python -m tether_operator`: the operator of AgentTasks."""

from __future__ import annotations

import asyncio
import sys

from tether.service import run
from tether.settings import load_or_exit
from tether_operator.config import OperatorSettings
from tether_operator.service import serve


def main() -> int:
    settings = load_or_exit(OperatorSettings)

    async def serving(stop: asyncio.Event) -> None:
        await serve(settings, stop)

    return run(serving, settings, service="operator")


if __name__ == "__main__":
    sys.exit(main())
