"""`python -m tether_backend`: configuration from TETHER_*, see `config.BackendSettings`."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Final

from tether.service import run as run_service
from tether.settings import ConfigurationError, load_or_exit
from tether_backend.config import BackendSettings, load_tokens
from tether_backend.service import run

# Folded executions live for long and hold no cycles: the collector looks at young objects less often than every 700,
# and never again at what was imported (two fifths of the CPU time of a projected flood, measured).
GC_AFTER: Final = (10_000, 20, 20)


def main() -> int:
    settings = load_or_exit(BackendSettings, BackendSettings.quotas)
    gc.freeze()
    gc.set_threshold(*GC_AFTER)
    try:
        load_tokens(settings.http_tokens_file, settings.tenant_names)
    except ConfigurationError as error:
        for line in error.problems:
            print(f"configuration: {line}", file=sys.stderr)
        return 78

    async def body(stop: asyncio.Event) -> None:
        await run(settings, stop)

    return run_service(body, settings, service="backend")


if __name__ == "__main__":
    raise SystemExit(main())
